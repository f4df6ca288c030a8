"""How far the server has acknowledged a spool: where the next attempt, or a replay, goes on.

The file is replaced whole after each acknowledgement, and the one before it is kept too, with the records behind it: if
one of them is lost, the other one leads to the same points. They have their original timestamps, so the server keeps
each once. If both are lost, nobody knows any more where the windows of values stood that make one point; then all that
is left is sent from its beginning, and the run may get points beside those that it has.
"""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_air.tracking.full_record import Kept
from lightning_air.tracking.segments import BEGINNING, Position, segment_numbers
from lightning_air.tracking.spool_folder import PREVIOUS_NAME, PROGRESS_NAME
from lightning_air.tracking.whole_file import write_whole

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One moment at which every point made of the records before a position was acknowledged or set aside.

    Attributes:
        position: In the spool.
        thinner: The thinner's snapshot there; None before the first record.
        num_sent: Points that the server has acknowledged.
        num_set_aside: Points that it refuses.
        num_cut: Points that the run had no room for: others had used its budget up.
        num_damaged: Places where records were left out, since they are not as they were written.
        kept: How much of the full record belongs to this moment; None where there is none.
        set_aside_bytes: How much of the list of refused points does; None if nobody has looked yet.
    """

    position: Position = BEGINNING
    thinner: Mapping[str, Any] | None = None
    num_sent: int = 0
    num_set_aside: int = 0
    num_cut: int = 0
    num_damaged: int = 0
    kept: Kept | None = None
    set_aside_bytes: int | None = None


def save_progress(folder: Path, progress: Progress, *, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Replace the folder's progress; the one that was there becomes the previous one.

    Args:
        folder: The spool's.
        progress: The new one.
        is_wanted: As in `write_whole`.

    Returns:
        Whether it was replaced.

    Raises:
        OSError: If the folder cannot be written.
    """
    # Not `asdict`, which copies the snapshot: of many metrics it is large.
    content = {"version": _VERSION, **{field.name: getattr(progress, field.name) for field in fields(progress)}}
    path = folder / PROGRESS_NAME
    return write_whole(path, json.dumps(content), previous=folder / PREVIOUS_NAME, is_wanted=is_wanted)


def load_progress(folder: Path) -> Progress:
    """Return the folder's progress; of two the latest that is whole, and that of a new spool if there is none."""
    progress = _load(folder / PROGRESS_NAME)
    if progress is None:
        progress = _load(folder / PREVIOUS_NAME)
    if progress is not None:
        return progress
    numbers = segment_numbers(folder)
    if numbers and numbers[0] > 1:
        logger.warning(
            "How far the metrics in %s were sent is not known any more: what is left is sent from its beginning. The "
            "run may get a few points beside those that it has.",
            folder,
        )
    return Progress()


def forget_damaged(folder: Path) -> None:
    """Delete a progress that is not whole, so that it does not take the place of the one before it. The owner's."""
    path = folder / PROGRESS_NAME
    try:
        content = path.read_bytes()
    except OSError:
        return
    try:
        _parse(content)
    except Exception:  # noqa: BLE001 - whatever may stand there
        with suppress(OSError):
            path.unlink()


def _load(path: Path) -> Progress | None:
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        logger.debug("%s is not there.", path)
    except Exception as error:  # noqa: BLE001 - whatever may stand there, training can begin
        logger.warning("%s is damaged: %r.", path, error)
    return None


def _parse(text: bytes) -> Progress:
    content = json.loads(text)
    if content.pop("version") != _VERSION:
        raise ValueError("not written by this version")
    segment, offset = content.pop("position")
    kept = content.pop("kept", None)
    content["kept"] = None if kept is None else Kept(str(kept[0]), int(kept[1]))
    progress = Progress(position=Position(segment, offset), **content)
    counts = (progress.num_sent, progress.num_set_aside, progress.num_cut, progress.num_damaged)
    numbers = (segment, offset, *counts, progress.set_aside_bytes or 0)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"counts must not be negative, got {numbers}")
    if not isinstance(progress.thinner, dict | None):
        raise TypeError("no snapshot of a thinner")
    return progress
