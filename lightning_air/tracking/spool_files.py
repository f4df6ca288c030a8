"""Which segment files a spool has: the one that comes next, those that are done with, and the space they all take."""

import errno
import itertools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from lightning_air.tracking.record_codec import HEADER, WORD_BYTES
from lightning_air.tracking.segments import Position, Segment, segment_numbers, segment_path
from lightning_air.tracking.spool_folder import noted_segment

_RETRY_SECONDS = 1.0
_WAIT_SECONDS = 1.0
_SLICE_SECONDS = 0.005
SMALLEST_BYTES = 64


class SpoolFiles:
    """Makes segments ahead of time on the writer's thread, and hands them to the appending one.

    Args:
        folder: It exists, and nobody else changes it.
        segment_bytes: Size of a segment, a multiple of 8.
        max_bytes: Of all segments together.
        clock: The time in seconds.

    Attributes:
        last_left: Number of the last segment that an earlier spool has left, or has used; 0 if there is none.
        is_barred: No segment may be made: the folder is not ours yet.

    Raises:
        ValueError: If a size is too small.
        OSError: If the folder cannot be read.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if segment_bytes < SMALLEST_BYTES or segment_bytes % WORD_BYTES:
            raise ValueError(f"segment_bytes must be a multiple of 8, from {SMALLEST_BYTES} on, got {segment_bytes}.")
        if max_bytes < 2 * segment_bytes:
            raise ValueError(f"max_bytes must be at least two segments of {segment_bytes} bytes, got {max_bytes}.")
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._clock = clock
        self._sizes = {number: segment_path(folder, number).stat().st_size for number in segment_numbers(folder)}
        # A number is never used again: progress that points at a segment which is deleted already (a process was killed
        # while it removed the folder, or something sweeps old files) would have the new one of its number skipped.
        self.last_left = self._last_taken = max(*self._sizes, noted_segment(folder), 0)
        self._numbers = itertools.count(self.last_left + 1)
        self._spares: deque[Segment] = deque()
        self._retired: deque[Segment] = deque()
        self._kept: dict[int, Segment] = {}  # done with, and in memory only: something has deleted their files
        self._retry_at_seconds = clock()
        self._making: object | None = None
        self._waited_for: object | None = None
        self._is_closed = self.is_barred = False

    def take(self, num_bytes: int) -> Segment | None:
        """Return an empty segment with room for so many bytes; None if there is no space. The appending thread's.

        Ordinarily it is there. If not (the writer was too slow, or the record is large), this waits for the disk, but
        neither long nor again and again. No lock is taken: a signal handler may end this anywhere.
        """
        segment = self._pop_spare(num_bytes)
        is_due = self._clock() >= self._retry_at_seconds
        if segment is None and is_due and self._has_come():
            try:
                segment = self._pop_spare(num_bytes, discards=True) or self._make(num_bytes)
            except OSError:
                self._retry_at_seconds = self._clock() + _RETRY_SECONDS
        if segment is not None and self._is_closed:  # meanwhile: the disk has held us up
            self._discard(segment)
            return None
        if segment is not None:
            self._last_taken = segment.number
        return segment

    def retire(self, segment: Segment) -> None:
        """Take a segment back that nothing more is appended to. The appending thread's."""
        segment.finish()
        self._retired.append(segment)

    def prepare(self) -> None:
        """Have the next segment ready. The writer's thread's; to be called often."""
        self._close_retired()
        if self._spares or self._is_closed:
            return
        self._making = object()
        try:
            self._spares.append(self._make(0))
        except OSError:
            pass  # it is said when a record is dropped
        finally:
            self._making = None
        self._tidy()  # if it was closed meanwhile

    def release(self, position: Position) -> None:
        """Delete the segments before a position. The writer's thread's.

        Raises:
            OSError: One cannot be deleted; it is tried again the next time.
        """
        for number in tuple(self._sizes):
            if number < position.segment:
                segment_path(self._folder, number).unlink(missing_ok=True)
                self._sizes.pop(number, None)
        for number in tuple(self._kept):
            if number < position.segment and (segment := self._kept.pop(number, None)) is not None:
                segment.close()

    def in_memory(self) -> list[Segment]:
        """Return the segments that are done with and still in memory. The writer's thread's."""
        return [*self._kept.values(), *self._retired.copy()]

    def drop_spares(self) -> None:
        """Delete what was made and not taken. The writer's thread's, and `close`'s."""
        self._close_retired()
        while (spare := _popped(self._spares)) is not None:
            self._discard(spare)

    def close(self) -> None:
        """Delete what was made and not taken, and make no more; any thread's, whatever the others are doing."""
        self._is_closed = True
        self.drop_spares()
        while self._kept:
            self._kept.popitem()[1].close()

    def _tidy(self) -> None:
        if self._is_closed:
            self.drop_spares()

    def _pop_spare(self, num_bytes: int, *, discards: bool = False) -> Segment | None:
        """Return a segment made ahead, if there is one that fits; one that does not may be discarded."""
        while (spare := _popped(self._spares)) is not None:
            # Segments are read in the order of their numbers, so nobody would come back to an earlier one.
            if spare.number > self._last_taken and spare.has_room(num_bytes):
                return spare
            if not discards:
                self._spares.appendleft(spare)
                return None
            self._discard(spare)
        return None

    def _has_come(self) -> bool:
        """Wait for the segment that the writer's thread makes right now; False if it takes long, and already did."""
        making = self._making
        if making is None:
            return True
        if making is self._waited_for:
            return False
        self._waited_for = making
        for _ in range(round(_WAIT_SECONDS / _SLICE_SECONDS)):
            time.sleep(_SLICE_SECONDS)
            if self._making is not making:
                return True
        return False

    def _make(self, num_bytes: int) -> Segment:
        size = max(self._segment_bytes, len(HEADER) + num_bytes + WORD_BYTES)
        number = next(self._numbers)
        self._sizes[number] = size  # first, as another thread may do the same now
        try:
            self._check_space()
            return Segment(self._folder, number, size)
        except OSError:  # after Ctrl-C the file may be there, and counts until its number is released
            self._sizes.pop(number, None)
            raise

    def _check_space(self) -> None:
        if self.is_barred or sum(tuple(self._sizes.values())) > self._max_bytes:
            raise OSError(errno.EDQUOT, "the spool may not take more", str(self._folder))

    def _discard(self, spare: Segment) -> None:
        spare.close()
        segment_path(self._folder, spare.number).unlink(missing_ok=True)
        self._sizes.pop(spare.number, None)

    def _close_retired(self) -> None:
        while (segment := _popped(self._retired)) is not None:
            if segment.is_there or self._is_closed:
                segment.close()
            else:
                self._kept[segment.number] = segment

    def drop_lost(self) -> None:
        """Delete what was made ahead of time and is not in the folder any more. The writer's thread's."""
        if any(not spare.is_there for spare in self._spares.copy()):
            self.drop_spares()


def _popped(segments: deque[Segment]) -> Segment | None:
    try:
        return segments.popleft()
    except IndexError:  # another thread may have taken the last one since any look at it
        return None
