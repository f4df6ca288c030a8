"""Which segment files a spool has: the one that comes next, those that are done with, and the space they all take."""

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_air.tracking.record_codec import HEADER, WORD_BYTES
from lightning_air.tracking.segments import Position, Segment, segment_numbers, segment_path

_RETRY_SECONDS = 1.0
_WAIT_SECONDS = 1.0
SMALLEST_BYTES = 64


class SpoolFiles:
    """Makes segments ahead of time on the writer's thread, and hands them to the appending one.

    Args:
        folder: It exists, and nobody else changes it.
        segment_bytes: Size of a segment, a multiple of 8.
        max_bytes: Of all segments together.
        clock: The time in seconds.

    Attributes:
        last_left: Number of the last segment that an earlier spool has left; 0 if there is none.

    Raises:
        ValueError: If a size is too small.
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
        self._lock = threading.Lock()
        self._sizes = {number: segment_path(folder, number).stat().st_size for number in segment_numbers(folder)}
        self.last_left = self._last_number = max(self._sizes, default=0)
        self._spares: deque[Segment] = deque()
        self._retired: deque[Segment] = deque()
        self._retry_at_seconds = clock()

    def take(self, num_bytes: int) -> Segment | None:
        """Return an empty segment with room for so many bytes; None if there is no space. The appending thread's.

        Ordinarily it is there. If not (the writer was too slow, or the record is large), this waits for the disk, but
        neither long nor again and again.
        """
        if self._spares and self._spares[0].has_room(num_bytes):
            return self._spares.popleft()
        if self._clock() < self._retry_at_seconds or not self._lock.acquire(timeout=_WAIT_SECONDS):
            return None
        try:
            while self._spares:
                spare = self._spares.popleft()
                if spare.has_room(num_bytes):
                    return spare
                self._discard(spare)
            return self._make(num_bytes)
        except OSError:
            self._retry_at_seconds = self._clock() + _RETRY_SECONDS
            return None
        finally:
            self._lock.release()

    def retire(self, segment: Segment) -> None:
        """Take a segment back that nothing more is appended to. The appending thread's."""
        segment.finish()
        self._retired.append(segment)

    def prepare(self) -> None:
        """Have the next segment ready. The writer's thread's; to be called often."""
        with self._lock:
            while self._retired:
                self._retired.popleft().close()
            if not self._spares:
                with suppress(OSError):  # it is said when a record is dropped
                    self._spares.append(self._make(0))

    def release(self, position: Position) -> None:
        """Delete the segments before a position. The writer's thread's."""
        with self._lock:
            for number in [number for number in self._sizes if number < position.segment]:
                segment_path(self._folder, number).unlink(missing_ok=True)
                del self._sizes[number]

    def drop_spares(self) -> None:
        """Delete what was made and not taken. The writer's thread's."""
        with self._lock:
            while self._spares:
                self._discard(self._spares.popleft())
            while self._retired:
                self._retired.popleft().close()

    def forget_lock(self) -> None:
        """In a forked process: the thread that may have held the lock is not here."""
        self._lock = threading.Lock()

    def _make(self, num_bytes: int) -> Segment:
        size = max(self._segment_bytes, len(HEADER) + num_bytes + WORD_BYTES)
        if sum(self._sizes.values()) + size > self._max_bytes:
            raise OSError(errno.EDQUOT, "the spool may not take more", str(self._folder))
        self._last_number += 1
        segment = Segment(self._folder, self._last_number, size)
        self._sizes[segment.number] = size
        return segment

    def _discard(self, spare: Segment) -> None:
        spare.close()
        segment_path(self._folder, spare.number).unlink(missing_ok=True)
        del self._sizes[spare.number]
