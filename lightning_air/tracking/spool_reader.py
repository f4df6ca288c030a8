"""Read a spool's records in order, from any position, also while another thread appends."""

import logging
import mmap
from collections.abc import Collection
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
    is_whole,
)
from lightning_air.tracking.segments import Position, Segment, segment_numbers, segment_path

logger = logging.getLogger(__name__)

_ZEROS_BYTES = 4096
_ZEROS = bytes(_ZEROS_BYTES)


class SpoolReader:
    """Reads the segments of a folder. One thread's.

    Within the process that appends, a record is seen whole or not at all because both sides work under the GIL; in a
    later process because the other one is dead. What is not as it was written (a disk's fault, or the machine went
    down before its memory was on the disk) is left out, and logged; what is whole behind it is read.

    Attributes:
        num_damaged: Places where something was left out.
    """

    def __init__(self, folder: Path) -> None:
        self.num_damaged = 0
        self._folder = folder
        self._open: _OpenSegment | None = None

    def read(
        self,
        position: Position,
        max_records: int,
        *,
        last: int | None = None,
        is_growing: bool = False,
        in_memory: Collection[Segment] = (),
    ) -> list[tuple[Position, Record]]:
        """Return the records after a position, each with the position after it.

        Args:
            position: From an earlier call, or any that lies before the first record wanted.
            max_records: At most so many are returned.
            last: The last segment to read. While somebody appends it is the one appended to, looked up before this
                call: then what an earlier segment does not hold, it never will. None for all there are.
            is_growing: Somebody appends to the last one.
            in_memory: Segments that this process has in memory: they are read though their files are deleted.
        """
        found: list[tuple[Position, Record]] = []
        segment = self._segment_at(position, last, in_memory)
        while segment is not None:
            self.num_damaged += segment.read_into(found, max_records, is_growing=is_growing and segment.number == last)
            if len(found) >= max_records or segment.number == last:
                break
            segment = self._segment_at(Position(segment.number + 1, 0), last, in_memory)
        return found

    def count(self, position: Position, *, last: int | None = None) -> int:
        """Return how many records there are after a position, in segments that nobody appends to."""
        total = 0
        while found := self.read(position, 1000, last=last):
            total += len(found)
            position = found[-1][0]
        return total

    def close(self) -> None:
        """Let go of the file that was read last; any thread's. Whoever is reading it right now keeps it until then."""
        # Not unmapped here: that cannot be done, and would be a crash, while another thread is reading.
        self._open = None

    def _segment_at(
        self, position: Position, last: int | None, in_memory: Collection[Segment]
    ) -> "_OpenSegment | None":
        """Return the segment of a position, there, or the first later one; None if there is none up to the last."""
        segment = self._open
        if segment is None or segment.number != position.segment or segment.offset > position.offset:
            loaded = {each.number: each for each in in_memory}
            numbers = sorted({*segment_numbers(self._folder), *loaded})
            number = next((n for n in numbers if position.segment <= n and (last is None or n <= last)), None)
            if number is None:
                return None
            segment = self._open = _OpenSegment(self._folder, number, loaded.get(number))
        if segment.number == position.segment:
            segment.skip_to(position.offset)
        return segment


class _OpenSegment:
    """A segment file that is read from its beginning, so that every definition is seen. Unmapped once it is garbage."""

    def __init__(self, folder: Path, number: int, segment: Segment | None) -> None:
        self.number = number
        self.offset = len(HEADER)
        self._path = segment_path(folder, number)
        self._decoder = Decoder()
        self._view = memoryview(b"")
        try:
            with suppress(ValueError), self._path.open("rb") as file:  # an empty file cannot be mapped
                self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            if segment is None:
                raise
            self._view = segment.content()
        is_ready = self._view[: len(HEADER)] == HEADER  # not if it was being made when the process was killed
        self._num_bytes = len(self._view) // WORD_BYTES * WORD_BYTES if is_ready else 0
        self._words = self._view[: self._num_bytes].cast("Q")
        self._num_damaged = 0
        self._empty_from = self._num_bytes  # looked through from there, and nothing found

    def read_into(self, found: list[tuple[Position, Record]], max_records: int, *, is_growing: bool) -> int:
        """Add the records from here on, until there are so many; return at how many places something is left out."""
        before = self._num_damaged
        while len(found) < max_records and self._is_at_frame(is_growing=is_growing):
            record = self._next()
            if record is not None:
                found.append((Position(self.number, self.offset), record))
        return self._num_damaged - before

    def skip_to(self, offset: int) -> None:
        """Go on to a place, minding the definitions on the way."""
        while self.offset < offset and self._is_at_frame(is_growing=False):
            self._next()

    def _is_at_frame(self, *, is_growing: bool) -> bool:
        if self.offset >= self._num_bytes:
            return False
        word = self._words[self.offset // WORD_BYTES]
        if word == NO_FRAME and not is_growing:
            return self._is_behind_hole()
        return word not in (NO_FRAME, LAST_FRAME)

    def _is_behind_hole(self) -> bool:
        """Go to the frame behind zeros that must not be there, if there is one: a page that was not on the disk yet."""
        if self.offset == self._empty_from:
            return False
        there = self._next_whole()
        if there >= self._num_bytes:
            self._empty_from = self.offset
            return False
        if self._words[self.offset // WORD_BYTES] == NO_FRAME:  # else all of it was appended meanwhile
            self._leave_out(there, "zeros")
        return self._words[self.offset // WORD_BYTES] != LAST_FRAME

    def _next(self) -> Record | None:
        """Go past a frame and return its record; None for names, and for what is damaged."""
        word, start = self._words[self.offset // WORD_BYTES], self.offset + WORD_BYTES
        try:
            end = start + body_bytes_of(word, self._num_bytes - start)
            record = self._decoder.decode(word, self._view[start:end])
        except DamagedError as error:
            # Perhaps it is the length that is damaged, so the next frame has to be looked for.
            self._leave_out(self._next_whole(), str(error))
            return None
        self.offset = end
        return record

    def _leave_out(self, end: int, reason: str) -> None:
        self._num_damaged += 1
        logger.warning(
            "%s is damaged at byte %d (%s): %d bytes of records are left out.",
            self._path,
            self.offset,
            reason,
            end - self.offset,
        )
        self.offset = end

    def _next_whole(self) -> int:
        """Return where the next whole frame is, or the end of all frames; the length of the file if there is none."""
        offset = self.offset + WORD_BYTES
        while offset < self._num_bytes:
            if offset % _ZEROS_BYTES == 0 and bytes(self._view[offset : offset + _ZEROS_BYTES]) == _ZEROS:
                offset += _ZEROS_BYTES
            elif self._is_whole(offset):
                return offset
            else:
                offset += WORD_BYTES
        return self._num_bytes

    def _is_whole(self, offset: int) -> bool:
        word, start = self._words[offset // WORD_BYTES], offset + WORD_BYTES
        if word in (NO_FRAME, LAST_FRAME):
            return word == LAST_FRAME
        try:
            body_bytes = body_bytes_of(word, self._num_bytes - start)
        except DamagedError:
            return False
        return is_whole(word, self._view[start : start + body_bytes])
