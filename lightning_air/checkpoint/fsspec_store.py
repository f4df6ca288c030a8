"""Checkpoints at any URL that fsspec knows: S3, Google Cloud Storage, Azure, memory, and file servers.

No listing is ever answered from a cache, nor from an instance that somebody else has filled. Whatever a library
raises becomes an `OSError` that names the file, by the HTTP status that it carries.
"""

import base64
import binascii
import errno
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from lightning_air.checkpoint.store import Entry, checked_name, delete_tree, os_error, reason_of

# Where folders are only a way to read names. s3fs and gcsfs would make a missing bucket, billed to somebody.
_WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "memory"})
_MODIFIED_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TIMEOUT, _TOO_MANY, _SERVER_ERROR = 401, 403, 404, 408, 429, 500


class FsspecStore:
    """A `Store` at a URL. Credentials and endpoints are configured as fsspec and its libraries always are.

    Args:
        root: The URL, without a trailing slash.
    """

    is_local = False

    def __init__(self, root: str) -> None:
        self.root = root
        self._scheme = root.partition(":")[0]
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None

    @contextmanager
    def _at(self, name: str, *, or_root: bool = False) -> Iterator[tuple[Any, str]]:
        """Yield the file system, made at the first use, and the path in it; turn what is raised into an `OSError`."""
        below = f"/{checked_name(name)}" if name or not or_root else ""
        try:
            with self._lock:  # some libraries log in when they are made
                if self._opened is None:
                    options = {"use_listings_cache": False, "skip_instance_cache": True}
                    self._opened = fsspec.core.url_to_fs(self.root, **options)
                fs, root = self._opened
            yield fs, root.rstrip("/") + below
        except Exception as error:
            message = f"{self.root}{below}: {reason_of(error)}"
            number = None if getattr(error, "errno", None) else _errno_of(error)
            raise (os_error(error, message) if number is None else OSError(number, message)) from error

    def path(self, name: str) -> Path:
        """Raise: a URL is not on this machine."""
        raise TypeError(f"{name!r} lies at {self.root!r}, which has no local path. Use put and get.")

    def put(self, name: str, source: Path) -> None:
        """Upload a file."""
        with self._at(name) as (fs, path):
            self._make_folder(fs, path)
            fs.put_file(str(source), path)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Upload a small file."""
        with self._at(name) as (fs, path):
            self._make_folder(fs, path)
            fs.pipe_file(path, data)

    def get(self, name: str, target: Path) -> None:
        """Download a file."""
        with self._at(name) as (fs, path):
            fs.get_file(path, str(target))

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        with self._at(name) as (fs, path):
            return bytes(fs.cat_file(path))

    def num_bytes(self, name: str) -> int | None:
        """Return a file's size; None if it is not there."""
        info = self._info(name)
        return None if info is None or info["type"] == "directory" else int(info["size"])

    def md5(self, name: str) -> str | None:
        """Return the MD5 that the store tells."""
        info = self._info(name)
        return None if info is None else told_md5(info)

    def _info(self, name: str) -> Mapping[str, Any] | None:
        with suppress(FileNotFoundError, NotADirectoryError), self._at(name) as (fs, path):
            fs.invalidate_cache(path)
            info: Mapping[str, Any] = fs.info(path)
            return info
        return None

    def list(self, folder: str = "") -> Sequence[Entry]:
        """Return what lies in a folder."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError), self._at(folder, or_root=True) as (fs, path):
            fs.invalidate_cache(path)
            for info in fs.ls(path, detail=True):
                above, _, last = info["name"].rstrip("/").rpartition("/")
                if above.strip("/") != path.strip("/"):
                    continue  # the folder itself: a marker object, or a file asked for as a folder
                is_folder = info["type"] == "directory"
                num_bytes = 0 if is_folder else int(info["size"])
                found.append(Entry(f"{folder}/{last}" if folder else last, is_folder, num_bytes, _modified(info)))
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        """Delete a file."""
        with suppress(FileNotFoundError, NotADirectoryError), self._at(name) as (fs, path):
            fs.rm_file(path)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all that lies in it."""
        checked_name(folder)
        delete_tree(self, folder, self._remove_empty_folder)

    def _remove_empty_folder(self, folder: str) -> None:
        if self._scheme in _WITHOUT_FOLDERS - {"memory"}:  # in memory, somebody else may have made a folder
            return
        with suppress(FileNotFoundError), self._at(folder) as (fs, path):
            fs.rmdir(path)

    def _make_folder(self, fs: Any, path: str) -> None:
        if self._scheme not in _WITHOUT_FOLDERS:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def told_md5(info: Mapping[str, Any]) -> str | None:
    """Return the hexadecimal MD5 in what fsspec tells of a file.

    Google tells `md5Hash`, and Azure `content_md5`, each of files that were not put together from parts. S3 tells an
    ETag, which is an MD5 only where the object is not encrypted by KMS, and s3fs does not tell whether it is.
    """
    digest = info.get("md5Hash")
    settings = info.get("content_settings")
    if digest is None and settings is not None:
        of_azure = settings.get("content_md5") if isinstance(settings, Mapping) else settings.content_md5
        digest = None if of_azure is None else bytes(of_azure)
    if isinstance(digest, str):
        try:
            digest = base64.b64decode(digest, validate=True)
        except binascii.Error:
            return None
    return digest.hex() if isinstance(digest, bytes) and len(digest) == 16 else None  # noqa: PLR2004 - bytes of an MD5


def _modified(info: Mapping[str, Any]) -> float | None:
    told = next((info[key] for key in _MODIFIED_KEYS if info.get(key) is not None), None)
    if isinstance(told, str):
        with suppress(ValueError):
            told = datetime.fromisoformat(told)
    if isinstance(told, datetime):
        return told.timestamp()
    return float(told) if isinstance(told, int | float) else None


def _errno_of(error: BaseException) -> int | None:
    """Return the error number for what an HTTP library raised; None if it says nothing that we understand."""
    status = next(
        (s for name in ("status", "status_code", "code") if isinstance(s := getattr(error, name, None), int)), None
    )
    response = getattr(error, "response", None)  # botocore's is a dictionary
    if status is None and isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status is None:
        # Connections that aiohttp, botocore, azure and requests lost come without a status.
        is_network = any(
            word in type(error).__name__ for word in ("Timeout", "Connect", "Disconnect", "ServiceRequest", "Payload")
        )
        return errno.ECONNRESET if is_network and not isinstance(error, OSError) else None
    by_status = {
        _UNAUTHORIZED: errno.EACCES,
        _FORBIDDEN: errno.EACCES,
        _NOT_FOUND: errno.ENOENT,
        _TIMEOUT: errno.ETIMEDOUT,
        _TOO_MANY: errno.EBUSY,
    }
    return by_status.get(status, errno.EIO if status >= _SERVER_ERROR else errno.EINVAL)
