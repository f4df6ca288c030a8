"""Checkpoints on a Unity Catalog volume that is not mounted here, through the Files API of the Databricks SDK.

The SDK is imported, and the workspace logged in to, at the first call. Files stream from and to disk: large ones go
up in parts, one part per file in memory at a time, since `transfer.py` sends several files at once. The SDK retries
for a minute and heeds `Retry-After`; whatever it raises then is an `OSError` that names the file.
"""

import errno
import importlib.util
import io
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lightning_air._version import __version__
from lightning_air.checkpoint.store import Entry, checked_name, delete_tree, os_error, reason_of

if TYPE_CHECKING:
    from databricks.sdk.mixins.files import FilesExt

_BLOCK_BYTES = 1 << 20
_SDK_RETRY_SECONDS = 60


class FilesApiStore:
    """A `Store` on a volume, by HTTP.

    Args:
        root: The place as "/Volumes/<catalog>/<schema>/<volume>/<folder>".
        connect: Returns the `files` of a workspace client, which several threads may use; called once.

    Raises:
        ModuleNotFoundError: If `databricks-sdk` is not installed.
    """

    is_local = False

    def __init__(self, root: str, *, connect: "Callable[[], FilesExt] | None" = None) -> None:
        if not _has_sdk():
            raise ModuleNotFoundError(
                f"{root!r} is not mounted on this machine, and the Files API needs another package. "
                "Install it with: pip install lightning-air[databricks]",
                name="databricks.sdk",
            )
        self.root = root
        self._connect = connect or _log_in
        self._lock = threading.Lock()
        self._files: FilesExt | None = None

    @contextmanager
    def _at(self, name: str, *, or_root: bool = False) -> Iterator[tuple["FilesExt", str]]:
        """Yield the client, logged in at the first use, and the path; turn what it raises into an `OSError`."""
        path = f"{self.root}/{checked_name(name)}" if name or not or_root else self.root
        try:
            with self._lock:
                if self._files is None:
                    self._files = self._connect()
            yield self._files, path
        except (OSError, RuntimeError, ValueError) as error:  # the SDK's own errors are OSErrors without a number
            message = f"{path}: {reason_of(error)}"
            number = _errno_of(error)
            raise (os_error(error, message) if number is None else OSError(number, message)) from error

    def path(self, name: str) -> Path:
        """Raise: the volume is not on this machine."""
        raise TypeError(f"{name!r} lies on the volume {self.root!r}, which has no local path. Use put and get.")

    def put(self, name: str, source: Path) -> None:
        """Upload a file."""
        with source.open("rb") as file:
            self._upload(name, file)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Upload a small file."""
        self._upload(name, io.BytesIO(data))

    def _upload(self, name: str, content: BinaryIO) -> None:
        with self._at(name) as (files, path):
            files.create_directory(path.rpartition("/")[0])
            files.upload(path, content, overwrite=True, use_parallel=False)

    def get(self, name: str, target: Path) -> None:
        """Download a file."""
        with self._at(name) as (files, path), _content(files, path) as content, target.open("wb") as file:
            shutil.copyfileobj(content, file, _BLOCK_BYTES)

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        with self._at(name) as (files, path), _content(files, path) as content:
            return content.read()

    def num_bytes(self, name: str) -> int | None:
        """Return a file's size; None if it is not there."""
        with suppress(FileNotFoundError), self._at(name) as (files, path):
            return files.get_metadata(path).content_length
        return None

    def md5(self, name: str) -> str | None:
        """Return None: the Files API tells no digest."""
        checked_name(name)
        return None

    def list(self, folder: str = "") -> Sequence[Entry]:
        """Return what lies in a folder."""
        found = []
        with suppress(FileNotFoundError), self._at(folder, or_root=True) as (files, path):
            for item in files.list_directory_contents(path):
                last = (item.path or "").rstrip("/").rpartition("/")[2]
                modified = None if item.last_modified is None else item.last_modified / 1000
                name, is_folder = f"{folder}/{last}" if folder else last, bool(item.is_directory)
                found.append(Entry(name, is_folder, 0 if is_folder else item.file_size or 0, modified))
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        """Delete a file."""
        with suppress(FileNotFoundError), self._at(name) as (files, path):
            files.delete(path)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all that lies in it."""
        checked_name(folder)
        delete_tree(self, folder, self._remove_empty_folder)

    def _remove_empty_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError), self._at(folder) as (files, path):
            files.delete_directory(path)


def _has_sdk() -> bool:
    try:
        return importlib.util.find_spec("databricks.sdk") is not None
    except ModuleNotFoundError:  # there is no `databricks` either
        return False


def _content(files: "FilesExt", path: str) -> "closing[BinaryIO]":
    content = files.download(path).contents
    assert content is not None
    return closing(content)


def _log_in() -> "FilesExt":
    from databricks.sdk import WorkspaceClient  # noqa: PLC0415 - an extra, and half a second to import
    from databricks.sdk.core import Config  # noqa: PLC0415

    try:
        config = Config(
            retry_timeout_seconds=_SDK_RETRY_SECONDS,
            product="lightning-air",
            product_version=".".join(__version__.split(".")[:3]),  # "0.1.0.dev0" is no version to the SDK
        )
    except ValueError as error:
        raise PermissionError(
            errno.EACCES,
            f"cannot log in to the workspace: {reason_of(error)}. Set DATABRICKS_HOST and DATABRICKS_TOKEN, or run "
            "`databricks auth login`.",
        ) from error
    return WorkspaceClient(config=config).files


def _errno_of(error: Exception) -> int | None:
    """Return the error number for what the SDK raised; None if the error has one already."""
    from databricks.sdk import errors as sdk  # noqa: PLC0415
    from databricks.sdk.errors.base import DatabricksError  # noqa: PLC0415

    if getattr(error, "errno", None) is not None:
        return None
    if isinstance(error, DatabricksError):
        info = error.get_error_details().error_info
        if info is not None and info.reason == "FILES_API_DIRECTORY_IS_NOT_EMPTY":
            return errno.ENOTEMPTY
    numbers: tuple[tuple[type[Exception], int], ...] = (
        (sdk.NotFound, errno.ENOENT),
        (sdk.PermissionDenied, errno.EACCES),
        (sdk.Unauthenticated, errno.EACCES),
        (sdk.TooManyRequests, errno.EBUSY),
        (sdk.ResourceConflict, errno.EBUSY),
        (sdk.DeadlineExceeded, errno.ETIMEDOUT),
        (sdk.NotImplemented, errno.ENOSYS),
        (sdk.BadRequest, errno.EINVAL),
        (DatabricksError, errno.EIO),  # 5xx, also those that the SDK has no class for
        (TimeoutError, errno.ETIMEDOUT),
        (OSError, errno.ECONNRESET),  # requests' own: a lost connection, or a server that does not answer
    )
    # The rest is what the SDK says of answers that it did not understand, and of URLs that expired too often.
    return next((number for kind, number in numbers if isinstance(error, kind)), errno.EIO)
