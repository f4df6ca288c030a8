"""A proxy before a tracking server that has bad days: slow, busy, broken, gone, or silent once it has stored a batch.

Its faults can be changed while it runs; it counts the requests that it gets.
"""

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_BODY = b'{"error_code": "TEMPORARILY_UNAVAILABLE", "message": "as the test wants it"}'


@dataclass
class Fault:
    """What goes wrong with requests.

    Attributes:
        request: A regular expression for "METHOD /path".
        seconds: Wait so long before doing anything.
        status: Answer so, and do not forward; None to forward.
        headers: Of that answer.
        body: Of that answer.
        cuts: Close the connection when the server has answered, without passing its answer on.
        drip_seconds: Pass the answer's body on byte by byte, with such a pause before each.
        times: How many requests it happens to; None for all.
    """

    request: str = ""
    seconds: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = _BODY
    cuts: bool = False
    drip_seconds: float = 0.0
    times: int | None = None


@dataclass(frozen=True)
class Seen:
    """A request: its line, when it came, how many bytes its body had, and its headers."""

    request: str
    seconds: float
    num_bytes: int
    headers: dict[str, str]


class FaultyProxy:
    """Stands on a port of its own; its requests go on to the server, one connection each.

    Attributes:
        url: To use as the tracking URI.
        seen: The requests so far.
    """

    def __init__(self, upstream: str) -> None:
        self.seen: list[Seen] = []
        self.stopping = threading.Event()
        self.upstream = urlsplit(upstream)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._port = 0
        self.accept()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def set(self, *faults: Fault) -> None:
        """Have these faults, and no others; the first that matches a request happens to it."""
        with self._lock:
            self._faults = list(faults)

    def count(self, request: str = "log-batch") -> int:
        """Return how many requests matched a regular expression."""
        return sum(bool(re.search(request, seen.request)) for seen in list(self.seen))

    def accept(self) -> None:
        """Listen, on the same port as before."""
        if self._server is None:
            self._server = _Server(("127.0.0.1", self._port), _handler_of(self))
            self._port = self._server.server_port
            self._server.start()

    def refuse(self) -> None:
        """Refuse connections until `accept`."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def close(self) -> None:
        self.stopping.set()
        self.refuse()

    def note(self, seen: Seen) -> Fault:
        """Note a request, and return what goes wrong with it."""
        with self._lock:
            self.seen.append(seen)
            for fault in self._faults:
                if fault.times != 0 and re.search(fault.request, seen.request):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return Fault()


@contextmanager
def faulty_proxy(upstream: str, *faults: Fault) -> Iterator[FaultyProxy]:
    """Run a proxy before a server until the block ends."""
    proxy = FaultyProxy(upstream)
    proxy.set(*faults)
    try:
        yield proxy
    finally:
        proxy.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for the requests
    request_queue_size = 64  # with fewer, the kernel lets some wait for a second
    allow_reuse_address = True

    def start(self) -> None:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="faulty-proxy")
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that give up are what is tested."""


def _handler_of(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    return Handler


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    timeout = 30

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET  # noqa: N815 - http.server's names

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        fault = self.proxy.note(Seen(f"{self.command} {path}", time.monotonic(), len(body), dict(self.headers)))
        if fault.seconds and self.proxy.stopping.wait(fault.seconds):
            return
        if fault.status is not None:
            self._send(fault.status, fault.headers, fault.body)
            return
        status, headers, answer = self._forward(body)
        if fault.cuts:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(status, headers, answer, fault.drip_seconds)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.proxy.upstream.netloc, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name not in ("Connection", "Host")}
            upstream.request(self.command, self.path, body or None, headers)
            response = upstream.getresponse()
            kept = {name: value for name, value in response.getheaders() if name == "Content-Type"}
            return response.status, kept, response.read()
        finally:
            upstream.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes, drip_seconds: float = 0.0) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            pieces = [bytes([byte]) for byte in body] if drip_seconds else [body]
            for piece in pieces:
                if drip_seconds and self.proxy.stopping.wait(drip_seconds):
                    return
                self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Say nothing."""
