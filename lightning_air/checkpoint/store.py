"""Where checkpoints lie: one small interface over local folders, volumes and object stores.

A `Store` is bound to one root, and every name is a relative path below it, with forward slashes. It knows only what
the poorest of them can do: put a whole file, read, ask for a size by name, list, delete. Nothing is appended to,
renamed, linked or overwritten on purpose; what must not be seen half-done is put last, in one write.

A store does not retry and keeps no thread: `retry.py` and `transfer.py` do. A name that would leave the root is a
`ValueError`; every other failure is an `OSError`: `FileNotFoundError` for a name that is not there, and for the rest
one whose message names the file and whose `errno` says whether another try may help (`retry.is_transient`).
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

METADATA_NAME = ".metadata"
"""The file that makes a checkpoint visible: published last, deleted first."""

_NUMBERS: tuple[tuple[type[OSError], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (FileExistsError, errno.EEXIST),
    (TimeoutError, errno.ETIMEDOUT),
    (ConnectionError, errno.ECONNRESET),
)


@dataclass(frozen=True)
class Entry:
    """What a listing says of one name, directly below the folder listed.

    Attributes:
        name: Relative to the store's root.
        is_folder: Whether other names lie below it.
        num_bytes: The size; 0 for a folder, and for a file that is listed but cannot be looked at yet.
        modified_seconds: When it was last written, in seconds since 1970; None where the store does not say.
    """

    name: str
    is_folder: bool
    num_bytes: int
    modified_seconds: float | None


class Store(Protocol):
    """Files below one root. Any rank and any thread may call; every call may take as long as the network does."""

    @property
    def root(self) -> str:
        """The place as the user would write it, without a trailing slash."""

    @property
    def is_local(self) -> bool:
        """Whether the files lie on a file system of this machine that can be trusted with more than whole files.

        Then a file may be written piece by piece and renamed, so that no staging copy is needed; `path(name)` says
        where.
        """

    def path(self, name: str) -> Path:
        """Return where a file of a local store lies.

        Raises:
            TypeError: If the store is not local.
        """

    def put(self, name: str, source: Path) -> None:
        """Write the whole file `source` under this name, making its folders and replacing what is there.

        A return does not prove that all bytes have arrived: ask for `num_bytes`. After an error a part of the file may
        be there; on a local store all of it or nothing.
        """

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small file in one piece, making its folders. A local store also syncs it to disk.

        A reader finds all of it or nothing, except on a mounted volume whose writer is killed in that moment, and on
        the few URLs that are no object store: those may show a shorter file.
        """

    def get(self, name: str, target: Path) -> None:
        """Copy a file to the local path `target`, whose folder exists. After an error a part of it may lie there."""

    def read(self, name: str) -> bytes:
        """Return a small file's content."""

    def num_bytes(self, name: str) -> int | None:
        """Return a file's size by asking for its name; None if it is a folder, not there, or not to be seen yet."""

    def md5(self, name: str) -> str | None:
        """Return the hexadecimal MD5 that the store itself tells of a file; None if it does not tell one."""

    def list(self, folder: str = "") -> Sequence[Entry]:
        """Return what lies directly in a folder, sorted by name; nothing if it does not exist.

        A listing can lag behind what was put: what is known by name is asked for by name.
        """

    def delete(self, name: str) -> None:
        """Delete a file. One that is not there is no error."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder below the root with all that lies in it. One that is not there is no error.

        In every folder `.metadata` goes first: a deletion that is killed leaves something that no reader sees. A new
        file, or one that the listing did not show, makes it fail with ENOTEMPTY where folders are real: try again.
        """


def checked_name(name: str) -> str:
    """Return the name of a file or folder below a store's root, if it is one.

    Raises:
        ValueError: If it is empty, absolute, or has a part that is empty, "." or "..".
    """
    if "\0" in name or any(part in {"", ".", ".."} for part in name.split("/")):
        raise ValueError(
            f"a name in a store must be a relative path such as 'step=100/model.distcp', got {name!r}. "
            "It may not leave the store's root; open the folder above as a store of its own."
        )
    return name


def delete_tree(store: Store, folder: str, remove_folder: Callable[[str], None]) -> None:
    """Delete a folder through its store, `.metadata` first; `remove_folder` removes what is empty by then."""
    metadata = f"{folder}/{METADATA_NAME}"
    store.delete(metadata)
    found = store.list(folder)
    if any(entry.name == metadata for entry in found):
        # On a mount a remembered failed look-up makes the deletion do nothing; a lagging listing looks the same.
        raise OSError(errno.ESTALE, f"{store.root}/{metadata} is still listed after it was deleted")
    for entry in found:
        if entry.is_folder:
            delete_tree(store, entry.name, remove_folder)
        else:
            store.delete(entry.name)
    remove_folder(folder)


def reason_of(error: BaseException) -> str:
    """Return what an error says, without its number, for use in another message; never nothing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"
    return str(error) or type(error).__name__


def os_error(error: BaseException, message: str) -> OSError:
    """Return an `OSError` of the same kind with another message; the caller chains it with `from`."""
    number = getattr(error, "errno", None)
    if not isinstance(number, int):
        number = next((number for kind, number in _NUMBERS if isinstance(error, kind)), None)
    return OSError(message) if number is None else OSError(number, message)
