"""Write a small file so that nobody ever reads half of it, also after the machine went down."""

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SCRATCH_SUFFIX = ".new"
"""Of the file that is written first; a killed process may leave one."""

_NO_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_numbers = itertools.count()


def write_whole(
    path: Path, text: str, *, previous: Path | None = None, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Replace a small file; whoever reads it finds the old one or the new one, also after the machine went down.

    Args:
        path: Of the file.
        text: Its new content.
        previous: Where the old one goes; None deletes it.
        is_wanted: Asked once the content is on the disk, which may take long; if not, all stays as it is.

    Returns:
        Whether it was replaced.

    Raises:
        OSError: It cannot be written.
    """
    # A name of its own: a thread whose disk has stalled may come back to it when another one writes the next.
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{next(_numbers)}{SCRATCH_SUFFIX}")
    try:
        # Only the user's: a tracking URI may hold a password.
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            _flush_to_disk(file.fileno())
        if not is_wanted():
            scratch.unlink()
            return False
        if previous is not None and path.exists():
            path.replace(previous)
        scratch.replace(path)
    except OSError:
        with suppress(OSError):  # on a full disk of all places
            scratch.unlink()
        raise
    return True


def _flush_to_disk(descriptor: int) -> None:
    """Else a machine that goes down may leave the new name with nothing in it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
