"""Checkpoints on a Unity Catalog volume that is mounted on this machine.

The mount looks like a folder and is an object store behind a FUSE daemon. So a file is opened once, written from its
first byte to its last, and closed: no append, seek, truncation to a length, rename, link or sync. An error of the
upload itself can come as late as from `close`. Look-ups that found nothing are remembered by the kernel for a while:
nothing is looked for before it is made.
"""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from lightning_air.checkpoint.local_store import entries, file_size, naming, remove_file
from lightning_air.checkpoint.store import Entry, checked_name, delete_tree

_BLOCK_BYTES = 8 << 20


class MountedVolumeStore:
    """A `Store` in a folder of a mounted volume. The volume exists; the folder need not.

    Args:
        root: The place as "/Volumes/<catalog>/<schema>/<volume>/<folder>".
        volume: Where the volume is mounted.
        folder: The folder in it, "" for the volume itself.
    """

    is_local = False

    def __init__(self, root: str, *, volume: Path, folder: str) -> None:
        self.root = root
        self._volume = volume
        self._folder = volume / folder if folder else volume

    def path(self, name: str) -> Path:
        """Raise: what is written piece by piece must not lie on a volume."""
        raise TypeError(f"{name!r} lies on the volume {self.root!r}, which has no local path. Use put and get.")

    def _at(self, name: str) -> Path:
        return self._folder / checked_name(name)

    def put(self, name: str, source: Path) -> None:
        """Write a whole file, from its first byte to its last."""
        with naming(source), source.open("rb", buffering=0) as file:
            self._make_folder(self._at(name).parent)
            block = memoryview(bytearray(min(_BLOCK_BYTES, os.fstat(file.fileno()).st_size + 1)))
            with _NewFile(self._at(name)) as target:
                while num_read := file.readinto(block):
                    target.write(block[:num_read])

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small file with one call."""
        self._make_folder(self._at(name).parent)
        with _NewFile(self._at(name)) as target:
            target.write(memoryview(data))

    def get(self, name: str, target: Path) -> None:
        """Copy a file to a local path."""
        path = self._at(name)
        block = memoryview(bytearray(_BLOCK_BYTES))
        with naming(path), path.open("rb", buffering=0) as file, target.open("wb", buffering=0) as copy:
            while num_read := file.readinto(block):
                with naming(target):
                    _write_all(copy.fileno(), block[:num_read])

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        path = self._at(name)
        with naming(path):
            return path.read_bytes()

    def num_bytes(self, name: str) -> int | None:
        """Return a file's size; None if it is not there, or its look-up is remembered as having failed."""
        return file_size(self._at(name))

    def md5(self, name: str) -> str | None:
        """Return None: the mount does not tell what the object store knows."""
        checked_name(name)
        return None

    def list(self, folder: str = "") -> Sequence[Entry]:
        """Return what lies in a folder, also what the kernel remembers as missing; its size and time are unknown."""
        return entries(self._at(folder) if folder else self._folder, folder, keeps_unseen=True)

    def delete(self, name: str) -> None:
        """Delete a file."""
        remove_file(self._at(name))

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all that lies in it."""
        checked_name(folder)
        delete_tree(self, folder, self._remove_empty_folder)

    def _remove_empty_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._at(folder).rmdir()

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, up to the volume, without asking first whether they are there."""
        if folder == self._volume:
            return
        try:
            folder.mkdir()
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make_folder(folder.parent)
            with suppress(FileExistsError):
                folder.mkdir()


class _NewFile:
    """A file that is written once, from front to back. One that failed is removed, if the volume lets us."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except FileNotFoundError as error:
            # Its folder has just been made, or was there already: a look-up from before then is remembered.
            raise OSError(errno.ESTALE, "its folder is not to be seen yet", str(self._path)) from error
        return self

    def write(self, block: memoryview) -> None:
        with naming(self._path):
            _write_all(self._descriptor, block)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            with naming(self._path):
                os.close(self._descriptor)
        except OSError:
            self._remove()
            if error is None:
                raise
        if error is not None:
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]
