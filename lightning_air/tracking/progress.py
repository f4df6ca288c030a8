"""How far the server has acknowledged a spool: where the next attempt, or a replay, goes on.

The file is replaced whole after each acknowledgement. If it is lost, everything that is left is sent again: the points
have their original timestamps, so the server keeps each once.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_air.tracking.full_record import Kept
from lightning_air.tracking.segments import BEGINNING, Position
from lightning_air.tracking.spool_folder import PROGRESS_NAME
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
        kept: How much of the full record belongs to this moment; None where there is none.
    """

    position: Position = BEGINNING
    thinner: Mapping[str, Any] | None = None
    num_sent: int = 0
    num_set_aside: int = 0
    num_cut: int = 0
    kept: Kept | None = None


def save_progress(folder: Path, progress: Progress) -> None:
    """Replace the folder's progress.

    Raises:
        OSError: If the folder cannot be written.
    """
    write_whole(folder / PROGRESS_NAME, json.dumps({"version": _VERSION, **asdict(progress)}))


def load_progress(folder: Path) -> Progress:
    """Return the folder's progress; that of a new spool, with a message in the log, if it is damaged."""
    path = folder / PROGRESS_NAME
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        logger.debug("%s is not there: the spool is read from its beginning.", path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(
            "%s is damaged (%r): the metrics that are left in this folder are sent from the first one on. The server "
            "keeps each point once.",
            path,
            error,
        )
    return Progress()


def _parse(text: bytes) -> Progress:
    fields = json.loads(text)
    if fields.pop("version") != _VERSION:
        raise ValueError("not written by this version")
    segment, offset = fields.pop("position")
    kept = fields.pop("kept", None)
    fields["kept"] = None if kept is None else Kept(str(kept[0]), int(kept[1]))
    progress = Progress(position=Position(segment, offset), **fields)
    numbers = (segment, offset, progress.num_sent, progress.num_set_aside, progress.num_cut)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"counts must not be negative, got {numbers}")
    if not isinstance(progress.thinner, dict | None):
        raise TypeError("no snapshot of a thinner")
    return progress
