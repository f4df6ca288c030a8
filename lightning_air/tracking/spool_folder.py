"""What lies in a spool's folder beside the records: whose they are, small files that are whole, and how it all goes."""

import errno
import itertools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_air.tracking.charging import new_writer
from lightning_air.tracking.segments import segment_numbers, segment_path

PROGRESS_NAME = "progress.json"
PREVIOUS_NAME = "progress.previous.json"
RUN_NAME = "run.json"

_SCRATCH_SUFFIX = ".new"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_numbers = itertools.count()


class NoSpoolError(ValueError):
    """A folder that is no spool's: it does not say whose records it holds."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Whose records a folder holds: all that somebody else needs to send them.

    Attributes:
        run_id: MLflow's.
        tracking_uri: Of the server that has the run.
        thinner: The thinner's snapshot before the first record.
        full_record: Whether all records are kept.
        writer: Who is charged for the points; of no other spool.
        charged: Points that the writer had sent before the first record.
        found: Points that the run had when no writer had come to it.
    """

    run_id: str
    tracking_uri: str
    thinner: Mapping[str, Any]
    full_record: bool = False
    writer: str = field(default_factory=new_writer)
    charged: int = 0
    found: int = 0


def is_full(error: OSError) -> bool:
    """Return whether the disk has no more space for us."""
    return error.errno in _NO_SPACE


def write_run_info(folder: Path, info: RunInfo) -> None:
    """Note whose records the folder holds, before the first one is appended.

    Raises:
        OSError: If the folder cannot be written.
    """
    write_whole(folder / RUN_NAME, json.dumps(asdict(info)))


def read_run_info(folder: Path) -> RunInfo:
    """Return whose records the folder holds.

    Raises:
        NoSpoolError: It does not say.
        ValueError: It says something that cannot be read.
    """
    try:
        return RunInfo(**json.loads((folder / RUN_NAME).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        is_there = not isinstance(error, FileNotFoundError | NotADirectoryError)
        raise (ValueError if is_there else NoSpoolError)(
            f"{folder} is no spool of metrics: {RUN_NAME} cannot be read ({error}). Pass the folder of one run, "
            "spool_dir/<run id>."
        ) from error


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
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{next(_numbers)}{_SCRATCH_SUFFIX}")
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


def noted_segment(folder: Path) -> int:
    """Return the number of the latest segment that the folder's progress points at; 0 if it says none.

    Raises:
        OSError: If the folder cannot be read.
    """
    return max(_noted_segment(folder / name) for name in (PROGRESS_NAME, PREVIOUS_NAME))


def _noted_segment(path: Path) -> int:
    try:
        segment = json.loads(path.read_bytes())["position"][0]
    except (FileNotFoundError, ValueError, TypeError, LookupError):  # then nobody goes on there either
        return 0
    return segment if type(segment) is int and segment > 0 else 0


def remove_folder(folder: Path) -> None:
    """Delete what a spool has made, once all of it has arrived; the list of what was set aside stays if there is one.

    Nothing else is deleted, so the folder stays too if somebody has put something into it.

    Raises:
        OSError: If it cannot be deleted.
    """
    segments = (segment_path(folder, number) for number in segment_numbers(folder))
    # The lock last, and what tells whose they are before it.
    small = (folder / name for name in (PREVIOUS_NAME, PROGRESS_NAME, RUN_NAME, "lock"))
    for path in (*segments, *folder.glob(f"*{_SCRATCH_SUFFIX}"), *small):
        path.unlink(missing_ok=True)
    if not os.listdir(folder):  # noqa: PTH208 - a list
        folder.rmdir()
