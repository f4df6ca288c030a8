"""The Files API of a workspace, and the object store behind it, on loopback; the real SDK talks to it.

Small files go up in one request; larger ones in parts, to presigned URLs, as the SDK does on every cloud. A test
says which requests go wrong, and how; everything else works.
"""

import json
import re
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "dapi-of-the-tests"
_FILES, _DIRECTORIES, _CLOUD = "/api/2.0/fs/files", "/api/2.0/fs/directories", "/cloud"
_NOT_EMPTY = "FILES_API_DIRECTORY_IS_NOT_EMPTY"
_EXPIRED = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"


@dataclass
class Fault:
    """What goes wrong with some requests.

    Attributes:
        request: A regular expression for "METHOD /path?query".
        status: The status to answer with; None to go on, after the other things have been done to the request.
        headers: Headers of that answer.
        body: Its body.
        resets: Close the connection, with a reset, instead of answering.
        keeps_bytes: Keep only so many bytes of what is put, send only so many of what is asked for, and report success.
        seconds: Wait so long before doing anything.
        nth: The first matching request that it happens to, counted from 1.
        times: How many matching requests it happens to.
    """

    request: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"error_code": "TEST", "message": "as the test wants it"}'
    resets: bool = False
    keeps_bytes: int | None = None
    seconds: float = 0.0
    nth: int = 1
    times: int = 1
    seen: int = 0


def expired_url(request: str, *, times: int = 1) -> Fault:
    """A presigned URL that is no longer valid, in S3's words."""
    return Fault(request, status=403, body=_EXPIRED, times=times)


class Volume:
    """What the server holds, and what it was asked."""

    def __init__(self, faults: Sequence[Fault], page_size: int) -> None:
        self.url = ""
        self.files: dict[str, tuple[bytes, float]] = {}
        """By absolute path: content, and when it was put."""
        self.directories: set[str] = {"/Volumes/main/default/ckpt"}
        self.requests: list[str] = []
        self.faults = list(faults)
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.page_size = page_size
        self.lock = threading.Lock()
        self.stopping = threading.Event()

    def fault_of(self, request: str) -> Fault | None:
        """Note a request, and return what goes wrong with it."""
        with self.lock:
            self.requests.append(request)
            found = None
            for fault in self.faults:
                if re.search(fault.request, request):
                    fault.seen += 1
                    if found is None and fault.nth <= fault.seen < fault.nth + fault.times:
                        found = fault
            return found

    def count(self, request: str) -> int:
        """Return how many requests matched a regular expression."""
        return sum(bool(re.search(request, seen)) for seen in self.requests)


@contextmanager
def files_api(*faults: Fault, page_size: int = 3) -> Iterator[Volume]:
    """Serve an empty volume, `/Volumes/main/default/ckpt`, until the block ends; `.url` is the workspace."""
    volume = Volume(faults, page_size)

    class Handler(_Handler):
        pass

    Handler.volume = volume
    server = _HttpServer(("127.0.0.1", 0), Handler)
    volume.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="files-api-server")
    thread.start()
    try:
        yield volume
    finally:
        volume.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for the requests
    request_queue_size = 64  # with fewer, the kernel lets some wait for a second


class _Answer(Exception):  # noqa: N818 - it ends a request, as an answer does
    def __init__(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = headers or {}


def _not_found(path: str) -> _Answer:
    return _Answer(404, {"error_code": "NOT_FOUND", "message": f"{path} does not exist"})


class _Handler(BaseHTTPRequestHandler):
    volume: Volume

    def _serve(self) -> None:
        fault = self.volume.fault_of(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._kept = None
        if fault is not None:
            self.volume.stopping.wait(fault.seconds)
            self._kept = fault.keeps_bytes
        if fault is not None and fault.resets:
            # To linger for no time is to reset: what is on its way is thrown away.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        try:
            self._dispatch(body, fault)
        except _Answer as answer:
            self.send_response(answer.status)
            content = answer.body
            for name, value in {"Content-Length": str(len(content)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content if self._kept is None else content[: self._kept])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - the names that http.server calls

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            self.close_connection = True  # we have reset it

    def _dispatch(self, body: bytes, fault: Fault | None) -> None:
        if fault is not None and fault.status is not None:
            raise _Answer(fault.status, fault.body, fault.headers)
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        path = unquote(url.path)
        if path == "/.well-known/databricks-config":
            raise _Answer(200, {})
        if path.startswith(_CLOUD):
            self._cloud(path[len(_CLOUD) :], query, body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and path.startswith("/api/"):
            raise _Answer(401, {"error_code": "UNAUTHENTICATED", "message": "who are you?"})
        with self.volume.lock:
            if path.startswith(_FILES):
                self._files(path[len(_FILES) :], query, body)
            elif path.startswith(_DIRECTORIES):
                self._directories(path[len(_DIRECTORIES) :].rstrip("/"), query)
            elif path.endswith("/create-upload-part-urls"):
                self._part_urls(json.loads(body))
            elif path.endswith("/create-download-url"):
                if query["path"] not in self.volume.files:
                    raise _not_found(query["path"])
                raise _Answer(200, {"url": f"{self.volume.url}{_CLOUD}{quote(query['path'])}", "headers": []})
        raise _Answer(404, {"error_code": "ENDPOINT_NOT_FOUND", "message": path})

    def _cloud(self, path: str, query: dict[str, str], body: bytes) -> None:
        with self.volume.lock:
            if self.command == "PUT":
                part = body if self._kept is None else body[: self._kept]
                self.volume.uploads[query["session"]][int(query["part"])] = part
                raise _Answer(200, headers={"ETag": f"part-{query['part']}"})
            if path not in self.volume.files:
                raise _Answer(404)
            raise self._content(path)

    def _content(self, path: str) -> _Answer:
        data, modified = self.volume.files[path]
        stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(modified))
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if requested:
            data = data[int(requested[1]) : int(requested[2]) + 1 if requested[2] else None]
        headers = {"Last-Modified": stamp, "Content-Type": "application/octet-stream"}
        return _Answer(206 if requested else 200, data, headers)

    def _files(self, path: str, query: dict[str, str], body: bytes) -> None:
        files = self.volume.files
        if self.command in {"PUT", "POST"} and path.rpartition("/")[0] not in self.volume.directories:
            raise _not_found(path.rpartition("/")[0])
        if self.command == "PUT":
            files[path] = (body if self._kept is None else body[: self._kept], time.time())
            raise _Answer(204)
        if self.command == "POST":
            self._multipart(path, query, body)
        if path not in files:
            raise _not_found(path)
        if self.command == "DELETE":
            del files[path]
            raise _Answer(204)
        raise self._content(path)

    def _multipart(self, path: str, query: dict[str, str], body: bytes) -> None:
        if query["action"] == "initiate-upload":
            session = uuid.uuid4().hex
            self.volume.uploads[session] = {}
            raise _Answer(200, {"multipart_upload": {"session_token": session}})
        parts = self.volume.uploads.pop(query["session_token"])
        if query["action"] == "complete-upload":
            numbers = [part["part_number"] for part in json.loads(body)["parts"]]
            content = b"".join(parts[number] for number in numbers)
            self.volume.files[path] = (content if self._kept is None else content[: self._kept], time.time())
        raise _Answer(200, {})

    def _part_urls(self, asked: dict[str, Any]) -> None:
        first, count, session = asked["start_part_number"], asked["count"], asked["session_token"]
        urls = [
            {"part_number": n, "url": f"{self.volume.url}{_CLOUD}/part?session={session}&part={n}", "headers": []}
            for n in range(first, first + count)
        ]
        raise _Answer(200, {"upload_part_urls": urls})

    def _directories(self, path: str, query: dict[str, str]) -> None:
        files, directories = self.volume.files, self.volume.directories
        if self.command == "PUT":
            while path.count("/") > 4:  # below the volume
                directories.add(path)
                path = path.rpartition("/")[0]
            raise _Answer(204) if path in directories else _not_found(path)
        if path not in directories:
            raise _not_found(path)
        below = sorted(
            {name for name in (*files, *directories) if name.rpartition("/")[0] == path},
        )
        if self.command == "DELETE":
            if below:
                reason = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": _NOT_EMPTY, "domain": "files"}
                error = {"error_code": "INVALID_PARAMETER_VALUE", "message": "not empty", "details": [reason]}
                raise _Answer(400, error)
            directories.remove(path)
            raise _Answer(204)
        start = int(query.get("page_token", "0"))
        page = below[start : start + self.volume.page_size]
        answer: dict[str, Any] = {"contents": [self._entry(name) for name in page]}
        if start + len(page) < len(below):
            answer["next_page_token"] = str(start + len(page))
        raise _Answer(200, answer)

    def _entry(self, path: str) -> dict[str, Any]:
        entry = {"path": path, "name": path.rpartition("/")[2], "is_directory": path in self.volume.directories}
        if path in self.volume.files:
            data, modified = self.volume.files[path]
            entry |= {"file_size": len(data), "last_modified": int(modified * 1000)}
        return entry


class FastClock:
    """A clock for the SDK that does not sleep, and says how long it would have."""

    def __init__(self) -> None:
        self.slept_seconds = 0.0

    def time(self) -> float:
        return time.time() + self.slept_seconds

    def sleep(self, seconds: float) -> None:
        self.slept_seconds += seconds


def files_of(volume: Volume, clock: FastClock | None = None, **config: Any) -> Any:
    """Return the `files` of the real SDK, logged in to the server, whatever the environment and the home hold.

    Args:
        volume: The server.
        clock: What the SDK's retries wait with; by default one that does not wait.
        config: Attributes of the SDK's configuration, such as `files_ext_multipart_upload_min_stream_size`.
    """
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.core import Config

    made = Config(host=volume.url, token=TOKEN, auth_type="pat", retry_timeout_seconds=5, clock=clock or FastClock())
    for key, value in config.items():
        setattr(made, key, value)
    return WorkspaceClient(config=made).files
