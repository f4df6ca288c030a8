"""What was logged and not acknowledged, as a checkpoint carries it: the node's disk dies with the node.

A save must not make training wait, so the spool's bytes are copied as they are, and only read when another machine goes
on from them. However long a server is away, the copy is a few megabytes at most: what comes after is in the spool only.
"""

import base64
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_air.tracking.points import Record
from lightning_air.tracking.record_codec import (
    HEADER,
    LAST_FRAME,
    NO_FRAME,
    WORD_BYTES,
    DamagedError,
    Decoder,
    body_bytes_of,
)
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.segments import Position, segment_numbers, segment_path
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RunInfo, write_run_info

logger = logging.getLogger(__name__)

MAX_TAIL_BYTES = 2 << 20
"""So a save takes about 20 ms longer at most, writing it included. Of 20 metrics these are 10,000 records."""


@dataclass(frozen=True)
class Piece:
    """The beginning of a segment file.

    Attributes:
        data: Bytes, without the zeros at the end.
        num_bytes: With them.
        offset: Where the first record wanted begins; before it are names that are needed.
    """

    data: bytes
    num_bytes: int
    offset: int

    def records(self) -> Iterator[Record]:
        """Yield the records; what is no whole record ends it."""
        data = memoryview(self.data.ljust(self.num_bytes, b"\0"))
        if bytes(data[: len(HEADER)]) != HEADER:
            return  # a segment that was being made, or of a machine with the other order of bytes
        decoder, offset = Decoder(), len(HEADER)
        while offset + WORD_BYTES <= len(data):
            word = int.from_bytes(data[offset : offset + WORD_BYTES], sys.byteorder)
            if word in (NO_FRAME, LAST_FRAME):
                return
            begin = offset + WORD_BYTES
            try:
                end = begin + body_bytes_of(word, len(data) - begin)
                record = decoder.decode(word, data[begin:end])
            except DamagedError as error:
                logger.debug("A checkpoint's metrics end at byte %d: %s.", offset, error)
                return
            if record is not None and offset >= self.offset:
                yield record
            offset = end


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What was logged and not acknowledged at one moment.

    Attributes:
        thinner: The snapshot before the first record.
        pieces: Of the spool's segments, in their order.
        is_cut: There are more records, which only the spool has.
    """

    thinner: Mapping[str, Any]
    pieces: tuple[Piece, ...] = ()
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the copy."""
        return sum(len(piece.data) for piece in self.pieces)

    @property
    def is_empty(self) -> bool:
        """Whether there is no record, and nothing in the thinner that is still to become a point."""
        has_records = next(self.records(), None) is not None
        return not has_records and not RunThinner.from_snapshot(self.thinner).counts.pending

    def records(self) -> Iterator[Record]:
        """Yield the records, in their order."""
        for piece in self.pieces:
            yield from piece.records()

    def to_dict(self) -> dict[str, Any]:
        """Return it as a checkpoint can have it, and JSON too."""
        pieces = [
            {"data": base64.b64encode(piece.data).decode(), "num_bytes": piece.num_bytes, "offset": piece.offset}
            for piece in self.pieces
        ]
        return {"thinner": dict(self.thinner), "pieces": pieces, "is_cut": self.is_cut}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Tail | None":
        """Return the tail in a logger's state in a checkpoint; None if there is none."""
        tail = state.get("tail")
        if not isinstance(tail, dict):
            return None
        pieces = tuple(
            Piece(base64.b64decode(piece["data"]), int(piece["num_bytes"]), int(piece["offset"]))
            for piece in tail["pieces"]
        )
        return cls(thinner=dict(tail["thinner"]), pieces=pieces, is_cut=bool(tail["is_cut"]))


def copy_tail(folder: Path, position: Position, max_bytes: int | None = None) -> tuple[tuple[Piece, ...], bool] | None:
    """Copy what a spool's folder has from a position on; while others append, and the writer deletes what is sent.

    Args:
        folder: The spool's.
        position: From the progress.
        max_bytes: Of the copy, what lies before the position in its segment included.

    Returns:
        The copy, and whether there is more than it holds. None if something was deleted meanwhile: then a later
        progress has been noted.

    Raises:
        OSError: It cannot be read.
    """
    left = MAX_TAIL_BYTES if max_bytes is None else max_bytes
    numbers = [number for number in segment_numbers(folder) if number >= position.segment]
    pieces: list[Piece] = []
    is_cut = False
    try:
        for number in numbers:
            whole = segment_path(folder, number).read_bytes()
            data = whole.rstrip(b"\0")
            if len(data) <= len(HEADER):
                continue  # made ahead of time
            is_cut = len(data) > left
            offset = position.offset if number == position.segment else 0
            pieces.append(Piece(data[:left], left if is_cut else len(whole), offset))
            left -= len(data)
            if is_cut:
                break
        # They are deleted in their order: while the first one is there, no other was missing.
        if numbers and not segment_path(folder, numbers[0]).exists():
            return None
    except FileNotFoundError:
        return None
    return tuple(pieces), is_cut


def lay_down(
    spool: Spool,
    tail: Tail,
    *,
    run_id: str,
    tracking_uri: str,
    shown: Mapping[str, tuple[int, int]],
    found: int = 0,
    full_record: bool = False,
) -> None:
    """Put a tail into a spool that is no run's yet.

    Args:
        spool: New.
        tail: Of the run.
        run_id: MLflow's.
        tracking_uri: Of the server that has the run.
        shown: Time in ms and step of the latest value of each key that the server shows.
        found: As in `RunInfo`.
        full_record: As in `RunInfo`.

    Raises:
        OSError: The folder cannot be written.
        ValueError: The tail is of another version.
    """
    thinner = RunThinner.from_snapshot(tail.thinner)
    thinner.continue_elsewhere(shown)
    spool.release(Position(spool.end.segment + 1, 0))  # of a tail that was not laid down to its end
    for record in tail.records():
        spool.append(record.timestamp_ms, record.step, record.values)
    # Last: who finds it finds all.
    info = RunInfo(
        run_id=run_id,
        tracking_uri=tracking_uri,
        thinner=thinner.snapshot(),
        found=found,
        full_record=full_record,
    )
    write_run_info(spool.folder, info)
