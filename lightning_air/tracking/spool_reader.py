"""Read a spool's records in order, from any position, also while another thread appends."""

import logging
import mmap
from contextlib import suppress
from pathlib import Path

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
from lightning_air.tracking.segments import Position, segment_numbers, segment_path

logger = logging.getLogger(__name__)


class SpoolReader:
    """Reads the segments of a folder. One thread's.

    Within the process that appends, a record is seen whole or not at all because both sides work under the GIL; in a
    later process because the other one is dead. What is not as it was written (a disk's fault, or the machine went
    down before its memory was on the disk) is left out, and logged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: _OpenSegment | None = None

    def read(self, position: Position, max_records: int, *, last: int | None = None) -> list[tuple[Position, Record]]:
        """Return the records after a position, each with the position after it.

        Args:
            position: From an earlier call, or any that lies before the first record wanted.
            max_records: At most so many are returned.
            last: The last segment to read. While somebody appends it is the one appended to, looked up before this
                call: then what an earlier segment does not hold, it never will. None for all there are.
        """
        found: list[tuple[Position, Record]] = []
        segment = self._segment_at(position, last)
        while segment is not None:
            segment.read_into(found, max_records)
            if len(found) >= max_records or segment.number == last:
                break
            segment = self._segment_at(Position(segment.number + 1, 0), last)
        return found

    def count(self, position: Position, *, last: int | None = None) -> int:
        """Return how many records there are after a position, in segments that nobody appends to."""
        total = 0
        while found := self.read(position, 1000, last=last):
            total += len(found)
            position = found[-1][0]
        return total

    def close(self) -> None:
        """Let go of the file that was read last."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _segment_at(self, position: Position, last: int | None) -> "_OpenSegment | None":
        """Return the segment of a position, there, or the first later one; None if there is none up to the last."""
        segment = self._open
        if segment is None or segment.number != position.segment or segment.offset > position.offset:
            numbers = segment_numbers(self._folder)
            number = next((n for n in numbers if position.segment <= n and (last is None or n <= last)), None)
            if number is None:
                return None
            self.close()
            segment = self._open = _OpenSegment(self._folder, number)
        if segment.number == position.segment:
            segment.skip_to(position.offset)
        return segment


class _OpenSegment:
    """A segment file that is read from its beginning, so that every definition is seen."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.offset = len(HEADER)
        self._path = segment_path(folder, number)
        self._decoder = Decoder()
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        with suppress(ValueError), self._path.open("rb") as file:  # an empty file cannot be mapped
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._view = memoryview(self._map)
        is_ready = self._view[: len(HEADER)] == HEADER  # not if it was being made when the process was killed
        self._num_bytes = len(self._view) // WORD_BYTES * WORD_BYTES if is_ready else 0
        self._words = self._view[: self._num_bytes].cast("Q")

    def read_into(self, found: list[tuple[Position, Record]], max_records: int) -> None:
        """Add the records from here on, until there are so many."""
        while len(found) < max_records and self._is_at_frame():
            record = self._next()
            if record is not None:
                found.append((Position(self.number, self.offset), record))

    def skip_to(self, offset: int) -> None:
        """Go on to a place, minding the definitions on the way."""
        while self.offset < offset and self._is_at_frame():
            self._next()

    def close(self) -> None:
        self._words.release()
        self._view.release()
        if self._map is not None:
            self._map.close()

    def _is_at_frame(self) -> bool:
        return self.offset < self._num_bytes and self._word() not in (NO_FRAME, LAST_FRAME)

    def _word(self) -> int:
        return self._words[self.offset // WORD_BYTES]

    def _next(self) -> Record | None:
        """Go past a frame and return its record; None for names, and for what is damaged."""
        word, start, end = self._word(), self.offset + WORD_BYTES, self._num_bytes
        try:
            end = start + body_bytes_of(word, self._num_bytes - start)
            with self._view[start:end] as body:  # while a part of it is in use, the file could not be closed
                return self._decoder.decode(word, body)
        except DamagedError as error:
            logger.warning("%s is damaged at byte %d (%s); a record is left out.", self._path, self.offset, str(error))
            return None
        finally:
            self.offset = end  # after a damaged length, nobody knows where the next frame begins
