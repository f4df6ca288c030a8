"""Folders on the scratch disk for files on their way: made, removed, and swept when a killed process has left them."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_air.runtime import staging_area

_PREFIX = "lightning-air-"
# Longer than any save, load or verification takes that is still alive; nothing in them is ever of use again.
ABANDONED_AFTER_SECONDS = 24 * 3600.0


@contextmanager
def scratch_folder(staging_dir: str | Path | None) -> Iterator[Path]:
    """Give a new folder on the scratch disk, and remove it with all that is in it.

    Args:
        staging_dir: Where; None is the system's temporary directory.
    """
    area = staging_area(staging_dir).path
    area.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=area))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shared_scratch(staging_dir: Path, token: str) -> Path:
    """Return the folder that several ranks share: each makes it if need be, and the last one removes it."""
    return staging_dir / f"{_PREFIX}{token}"


def sweep_scratch(staging_dir: Path, *, now: float | None = None) -> int:
    """Remove what killed processes have left, as far as it may be removed, and return how many folders.

    Args:
        staging_dir: Where to look.
        now: In seconds since 1970.
    """
    oldest = (time.time() if now is None else now) - ABANDONED_AFTER_SECONDS
    num_swept = 0
    for folder in staging_dir.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process's, or swept by it
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_mtime < oldest:
                shutil.rmtree(folder)
                num_swept += 1
    return num_swept
