"""What lies in a spool's folder beside the records: whose they are, small files that are whole, and how it all goes."""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_air.tracking.charging import new_writer
from lightning_air.tracking.segments import segment_numbers, segment_path
from lightning_air.tracking.whole_file import SCRATCH_SUFFIX, write_whole

PROGRESS_NAME = "progress.json"
PREVIOUS_NAME = "progress.previous.json"
RUN_NAME = "run.json"

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


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
    for path in (*segments, *folder.glob(f"*{SCRATCH_SUFFIX}"), *small):
        path.unlink(missing_ok=True)
    if not os.listdir(folder):  # noqa: PTH208 - a list
        folder.rmdir()
