"""A disk that is really full: a small file system of its own, for a process of its own."""

import ctypes
from pathlib import Path

_NEW_USER, _NEW_MOUNT = 0x10000000, 0x00020000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14


def mount_small_disk(folder: Path, options: str) -> bool:
    """Mount a file system in memory on a folder, which goes with this process; return whether that can be done here.

    Args:
        folder: It exists.
        options: Of tmpfs, as "size=3m" or "nr_inodes=10".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNT) and libc.unshare(_NEW_USER | _NEW_MOUNT):
        return False
    if libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None):
        return False
    return libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, options.encode()) == 0


def fill(folder: Path) -> Path:
    """Take all the space and all the names that a file system has; return the folder of what takes them."""
    taken = folder / "taken"
    taken.mkdir()
    try:
        with (taken / "bytes").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
    try:
        for number in range(10**6):
            (taken / str(number)).touch()
    except OSError:
        pass
    return taken
