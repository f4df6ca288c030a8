"""One process per spool folder: a lock that dies with its process, and says who holds it."""

import fcntl
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

_NAME = "lock"
_held: dict[str, int] = {}
"""Folder to process: the kernel's lock is the process', so a second one of our own would be granted."""
# And to close any descriptor of the file gives the kernel's lock up. So one thread at a time; a signal handler may
# interrupt it and release another folder.
_changing = threading.RLock()


class SpoolInUseError(RuntimeError):
    """Another spool has the folder, in this process or in another one."""


class FolderLock:
    """The right to change a folder, until `release` or the end of the process, however it comes.

    Not `flock`: a worker process that was forked would keep that lock when this process is killed, and the next attempt
    could not have the folder.

    Args:
        folder: It exists.

    Raises:
        SpoolInUseError: Somebody else has it; it says who.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._key = str(folder.resolve())
        self._path = folder / _NAME
        self._descriptor = -1
        with _changing:
            if _held.get(self._key) == os.getpid():
                raise SpoolInUseError(f"{folder} is in use by this process already. Close its spool first.")
            self._descriptor = self._acquire()
            _held[self._key] = os.getpid()
        self._say_who()

    @property
    def is_there(self) -> bool:
        """Whether its file is; something may have deleted it, and then others would get the folder too."""
        return self._descriptor < 0 or self._is_current(self._descriptor)

    def renew(self) -> None:
        """Take the folder again, whose file was deleted.

        Raises:
            SpoolInUseError: Somebody else has taken it meanwhile.
            OSError: The folder cannot be written.
        """
        with _changing:
            if self._descriptor >= 0:
                before, self._descriptor = self._descriptor, self._acquire()
                os.close(before)
        self._say_who()

    def release(self) -> None:
        """Let others have the folder; again is as good as once."""
        with _changing:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0 and _held.get(self._key) == os.getpid():
                os.close(descriptor)
                del _held[self._key]

    def _say_who(self) -> None:
        with suppress(OSError):  # a full disk: then it does not say who
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(descriptor):
                    return descriptor
            except (BlockingIOError, PermissionError) as error:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                os.close(descriptor)
                raise SpoolInUseError(
                    f"{self._path.parent} is in use by {owner}. Wait for its end, or give each its own folder."
                ) from error
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the one before us removed the folder while we waited to open it

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def _after_fork() -> None:
    global _changing  # noqa: PLW0603 - the thread that may have had it is not here
    _changing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
