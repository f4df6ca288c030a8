"""The list of points that the server refuses, with its reasons: one JSON object per line, beside the spool.

How long it was is noted in the spool's progress, in the same moment as what the server has acknowledged. So an attempt
after a crash cuts the list there, and adds again what is refused again: each point is in it once, and each line whole.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_air.tracking.points import Point

SET_ASIDE_NAME = "set_aside.jsonl"
MAX_BYTES = 8 << 20
"""Some 30,000 points. Beyond it they are counted only: whoever logs bad points for days learns no more from more."""

_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class SetAside:
    """A point that the server refuses, and why."""

    point: Point
    reason: str


def whole_bytes(folder: Path) -> int:
    """Return how long a folder's list is, without a last line that is not whole; 0 if there is none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with (folder / SET_ASIDE_NAME).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                begin = max(0, end - _CHUNK_BYTES)
                file.seek(begin)
                newline = file.read(end - begin).rfind(b"\n")
                if newline >= 0:
                    return begin + newline + 1
                end = begin
    except FileNotFoundError:
        pass
    return 0


def add_set_aside(
    folder: Path, refused: Iterable[SetAside], *, after_bytes: int | None = None, max_bytes: int = MAX_BYTES
) -> tuple[int, int]:
    """Add points to a folder's list.

    Args:
        folder: The spool's.
        refused: The points.
        after_bytes: Where to add them: what is there beyond goes. None for the end of the last whole line.
        max_bytes: Of the list; what does not fit in is left out.

    Returns:
        How long the list is now, and how many points did not fit in.

    Raises:
        OSError: It cannot be written.
    """
    lines = [json.dumps({**item.point._asdict(), "reason": item.reason}).encode() + b"\n" for item in refused]
    num_bytes = whole_bytes(folder) if after_bytes is None else after_bytes
    descriptor = os.open(folder / SET_ASIDE_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        num_bytes = min(num_bytes, file.seek(0, os.SEEK_END))  # somebody may have taken the list away
        file.truncate(num_bytes)
        file.seek(num_bytes)
        for index, line in enumerate(lines):
            if num_bytes + len(line) > max_bytes:
                return num_bytes, len(lines) - index
            file.write(line)
            num_bytes += len(line)
    return num_bytes, 0
