"""Checkpoints in a folder of this machine, or of a file system that keeps POSIX's word.

A file appears whole or not at all, and once `put` or `put_bytes` has returned, it and its folder survive a power cut.
Links are never followed by a deletion.
"""

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_air.checkpoint.store import METADATA_NAME, Entry, checked_name

# What a process that was killed in `put` leaves behind; no listing shows it, and it goes with its folder.
_UNFINISHED = re.compile(r"\.tmp-[0-9a-f]{32}")


class LocalStore:
    """A `Store` in a local folder, which need not exist yet.

    Args:
        folder: An absolute path.
    """

    is_local = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = str(folder)

    def path(self, name: str) -> Path:
        """Return where a file lies."""
        return self._folder / checked_name(name)

    def put(self, name: str, source: Path) -> None:
        """Copy a file, sync it to disk and give it its name."""
        with source.open("rb") as file:
            self._write(name, lambda target: shutil.copyfileobj(file, target, 1 << 20))

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small file, sync it to disk and give it its name."""
        self._write(name, lambda target: target.write(data))

    def _write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self.path(name)
        make_folder(path.parent)
        unfinished = path.with_name(f".tmp-{uuid.uuid4().hex}")
        try:
            with naming(path), unfinished.open("xb") as target:
                fill(target)
                target.flush()
                os.fsync(target.fileno())
            # What was written beside it must not be younger than the name that makes it visible.
            sync_folder(path.parent)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def get(self, name: str, target: Path) -> None:
        """Copy a file to a local path."""
        shutil.copyfile(self.path(name), target)

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return self.path(name).read_bytes()

    def num_bytes(self, name: str) -> int | None:
        """Return a file's size; None if it is not there."""
        return file_size(self.path(name))

    def md5(self, name: str) -> str | None:
        """Return None: a file system keeps no digests."""
        checked_name(name)
        return None

    def list(self, folder: str = "") -> Sequence[Entry]:
        """Return what lies in a folder, without what a killed `put` left there."""
        path = self.path(folder) if folder else self._folder
        return [entry for entry in entries(path, folder) if not _UNFINISHED.fullmatch(entry.name.rpartition("/")[2])]

    def delete(self, name: str) -> None:
        """Delete a file or a link."""
        remove_file(self.path(name))

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all that lies in it; of a link, only the link."""
        path = self.path(folder)
        if path.is_symlink():
            remove_file(path)
        else:
            _delete_tree(path)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each synced to disk. One that is there is no error."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):  # made by another rank meanwhile
        folder.mkdir()
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut. Some network file systems cannot, and sync them anyway."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Have a file's content survive a power cut."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an `OSError` that comes without one: writing and closing know only a number."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def file_size(path: Path) -> int | None:
    """Return a file's size; None for a folder, and for what is not there."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISDIR(status.st_mode) else status.st_size


def remove_file(path: Path) -> None:
    """Delete a file or a link. One that is not there is no error."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def entries(path: Path, folder: str, *, keeps_unseen: bool = False) -> list[Entry]:
    """Return what lies in a directory, named relative to the root that `folder` is relative to.

    Args:
        path: The directory; nothing lies in one that is not there.
        folder: Its name in the store.
        keeps_unseen: Whether what is listed is there, also if a look-up, which may be remembered, does not find it.
    """
    found = []
    try:
        with os.scandir(path) as scan:
            for item in scan:
                name = f"{folder}/{item.name}" if folder else item.name
                try:
                    is_folder, status = item.is_dir(), item.stat()
                except FileNotFoundError:
                    if keeps_unseen:
                        found.append(Entry(name, item.is_dir(follow_symlinks=False), 0, None))
                    continue  # deleted since it was listed
                found.append(Entry(name, is_folder, 0 if is_folder else status.st_size, status.st_mtime))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda entry: entry.name)


def _delete_tree(folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / METADATA_NAME).unlink()
        sync_folder(folder)  # before anything that it promises is gone
    try:
        with os.scandir(folder) as scan:
            items = list(scan)
    except FileNotFoundError:
        return
    for item in items:
        if item.is_dir(follow_symlinks=False):
            _delete_tree(Path(item.path))
        else:
            remove_file(Path(item.path))
    with suppress(FileNotFoundError):
        folder.rmdir()
