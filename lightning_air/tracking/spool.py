"""Where the training thread leaves its records: memory-mapped files that survive a SIGKILL, and never make it wait.

Ordinarily `append` is a `struct.pack`, a checksum and two stores into mapped memory: no system call, no lock that
anybody else holds, the GIL kept. The kernel writes the pages to the disk in its own time, also when the process is
dead; only a machine that goes down loses any. The writer's thread makes the next segment ready ahead of time.

A disk that is full, or the limit of what the spool may take, costs records, never the training: they are counted, and
it is said, once an hour.
"""

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from zlib import crc32

from lightning_air.tracking.folder_claim import FolderClaim
from lightning_air.tracking.points import Record
from lightning_air.tracking.record_codec import WORD_BYTES, Layout
from lightning_air.tracking.segments import Position, Segment
from lightning_air.tracking.spool_files import SpoolFiles
from lightning_air.tracking.spool_reader import SpoolReader
from lightning_air.tracking.warn_once import Warn, WarnOnce

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 20
MAX_BYTES = 2 << 30

_SEAL_SECONDS = 1.0
_SAY_AGAIN_SECONDS = 3600.0
_MOST_LAYOUTS = 1000
_FAR = 1 << 62


class Spool:
    """The records of one run, in a folder that only this spool uses.

    Any thread may append, also a signal handler that interrupts an `append`; all else is the writer's thread's. In a
    forked process (a worker of a data loader) `append` returns False and does nothing.

    Args:
        folder: Made if it is not there. What an earlier spool has left in it is read first.
        segment_bytes: Size of a segment file, a multiple of 8. A record that needs more gets a larger one.
        max_bytes: Of all segment files together. Beyond it, and when the disk is full, records are dropped until the
            server has taken what is there.
        warn: Told when records are dropped.
        clock: The time in seconds.

    Attributes:
        num_appended: Records that were kept.
        num_dropped: Records that were not, for want of space.
        num_bad_values: Values left out because they are no numbers.

    Raises:
        SpoolInUseError: Another process has the folder.
        OSError: The folder cannot be made or written. Not if only the disk is full: then records are dropped, until
            there is space.
        ValueError: If a size is too small.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_BYTES,
        warn: Warn | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.num_appended = self.num_dropped = self.num_bad_values = 0
        self._warn = WarnOnce() if warn is None else warn
        self._max_bytes = max_bytes
        self._claim = FolderClaim(self.folder, self._warn)
        try:
            self._files = SpoolFiles(self.folder, segment_bytes=segment_bytes, max_bytes=max_bytes, clock=clock)
        except BaseException:
            self._claim.release()
            raise
        self._files.is_barred = not self._claim.is_held
        self._reader = SpoolReader(self.folder)
        self._end = Position(self._files.last_left, _FAR)
        self._is_closed = self._is_sealed = False
        self._append_lock = threading.RLock()
        self._is_appending = False
        self._deferred: deque[tuple[int, int, Mapping[str, float]]] = deque()
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._num_layouts = self._num_times_full = 0
        self._full_seconds = -math.inf  # when it was, the last time
        self._clock = clock
        self._segment: Segment | None = None
        _spools.add(self)
        self._files.prepare()

    def append(self, timestamp_ms: int, step: int, values: Mapping[str, float]) -> bool:
        """Keep a record; once this returns True, not even a SIGKILL loses it. Never raises.

        In a signal handler that interrupts an `append` of its own thread, the record is only noted, and kept as soon as
        that append ends, however it does, or the spool is closed.

        Returns:
            False if it was dropped: no space, nothing in it that is a number, or the spool is closed.
        """
        with self._append_lock:
            if self._is_appending:  # a signal handler logs, while its own thread is in here
                self._deferred.append((timestamp_ms, step, dict(values)))
                return True
            # Python runs signal handlers after calls only, and an exception out of one (Ctrl-C) may end this there. A
            # frame counts once its word is stored; if `offset` was not moved any more, the next append sees the word.
            try:
                self._is_appending = True
                is_kept = self._append(timestamp_ms, step, values)
            except Exception as error:  # noqa: BLE001 - training does not end because of its metrics
                is_kept = self._drop("spool-error", f"Metrics of step {step!r} are lost: {error!r}.")
            finally:
                self._is_appending = False
                while self._deferred:
                    self.append(*self._deferred.popleft())
            return is_kept

    def _append(self, timestamp_ms: int, step: int, values: Mapping[str, float]) -> bool:
        layout, segment = self._layouts.get(tuple(values)), self._segment
        if layout is None or segment is None or layout.segment is not segment:
            return self._append_with_care(timestamp_ms, step, values)
        offset = segment.offset
        start = offset + WORD_BYTES
        end = start + layout.body_bytes
        stop = end + WORD_BYTES
        if stop > segment.num_bytes or segment.words[offset >> 3]:
            return self._append_with_care(timestamp_ms, step, values)
        try:
            body = layout.pack(timestamp_ms, step, *values.values())
        except Exception:  # noqa: BLE001 - whatever a value's __float__ raises
            return self._append_with_care(timestamp_ms, step, values)
        # `Segment.append`, written out: its calls would cost as much again.
        segment.view[start:stop] = body
        segment.words[offset >> 3] = crc32(body) << 32 | layout.body_bytes
        segment.offset = end
        self.num_appended += 1
        return True

    def _append_with_care(self, timestamp_ms: int, step: int, values: Mapping[str, float]) -> bool:
        """Append what is not ordinary: new names, a full segment, values that are no numbers."""
        if self._is_sealed:
            self._warn("spool-sealed", f"Metrics of step {step} came while their run is being closed: they are lost.")
            return False
        numbers = self._numbers_of(values)
        if not numbers:
            return False
        layout = self._layout_of(tuple(numbers))
        body = layout.pack(int(timestamp_ms), int(step), *numbers.values())
        segment = self._segment_for(layout, len(body))
        if segment is None:
            now = self._clock()
            self._num_times_full += now - self._full_seconds > _SAY_AGAIN_SECONDS
            self._full_seconds = now
            return self._drop(
                f"spool-full {self._num_times_full}",
                f"No space for metrics in {self.folder} (it may take {self._max_bytes:,} bytes, or the disk is full): "
                "they are lost until the server has taken what is there. Free space, or choose a larger disk.",
            )
        if layout.segment is not segment:
            segment.append(layout.definition)
            layout.segment = segment
        segment.append(body)
        self.num_appended += 1
        return True

    def _numbers_of(self, values: Mapping[str, float]) -> dict[str, float]:
        numbers = {}
        for name, value in values.items():
            try:
                numbers[str(name)] = _double(value)
            except Exception as error:  # noqa: BLE001 - whatever a value's __float__ raises
                self.num_bad_values += 1
                self._warn(f"spool-value {name}", f"A value of {name!r} is not logged, the others are: {error}")
        return numbers

    def _layout_of(self, names: tuple[str, ...]) -> Layout:
        layout = self._layouts.get(names)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._num_layouts += 1
            layout = self._layouts[names] = Layout(names, self._num_layouts)
        return layout

    def _segment_for(self, layout: Layout, body_bytes: int) -> Segment | None:
        """Return where a record fits in, if need be the next segment; None if there is no space."""
        segment = self._segment
        if segment is not None:
            segment.skip_interrupted()
            if segment.has_room(body_bytes + (0 if layout.segment is segment else len(layout.definition))):
                return segment
        following = self._files.take(body_bytes + len(layout.definition))
        if following is not None:
            self._segment = following  # first: Ctrl-C in between must not leave a segment that is finished
            if segment is not None:
                self._files.retire(segment)
        return following

    def _drop(self, kind: str, message: str) -> bool:
        self.num_dropped += 1
        self._warn(kind, message)
        return False

    # ---- the writer's thread ----------------------------------------------------------------------------------------

    @property
    def end(self) -> Position:
        """Behind the last record that has been appended."""
        segment = self._segment
        return self._end if segment is None else Position(segment.number, segment.offset)

    def read(self, position: Position, max_records: int) -> list[tuple[Position, Record]]:
        """Return the records after a position, at most so many, each with the position after it."""
        is_growing = self._segment is not None  # looked up before its end
        segments = [segment for segment in (*self._files.in_memory(), self._segment) if segment is not None]
        return self._reader.read(
            position, max_records, last=self.end.segment, is_growing=is_growing, in_memory=segments
        )

    @property
    def num_damaged(self) -> int:
        """Places where records were left out by `read`, because they are not as they were written."""
        return self._reader.num_damaged

    def count_left(self, position: Position) -> int:
        """Return how many records an earlier spool has left after a position."""
        reader = SpoolReader(self.folder)
        try:
            return reader.count(position, last=self._files.last_left)
        finally:
            reader.close()

    def release(self, position: Position) -> None:
        """Give the space before a position back; nobody will ever read there again."""
        self._files.release(position)

    def prepare(self) -> None:
        """Have the next segment ready, so that `append` need not wait for the disk; to be called often. Never raises.

        Where something else has deleted the folder, it is made again, and what comes from then on goes there.
        """
        if not self._is_closed:
            try:
                self._keep_folder()
                self._files.prepare()
            except Exception as error:  # noqa: BLE001 - what it was for fails too then, and says so
                logger.debug("%s is not ready for more: %r", self.folder, error)

    def _keep_folder(self) -> None:
        self._claim.keep()
        self._files.is_barred = not self._claim.is_held
        self._files.drop_lost()
        segment = self._segment
        if segment is not None and not segment.is_there and self._append_lock.acquire(blocking=False):
            try:
                if not self._is_appending:
                    self._put_away()  # what comes from now on goes to where a later process finds it
            finally:
                self._append_lock.release()

    def drop_spare(self) -> None:
        """Give the space of the next segment back: something else needs it more."""
        self._files.drop_spares()

    def seal(self, seconds: float = _SEAL_SECONDS) -> bool:
        """Take no more records: what is there now is all. Any thread's; again is as good as once.

        Args:
            seconds: To wait for an `append` of another thread, which a disk may hold up.

        Returns:
            Whether no record can come any more; if not, one is still under way.
        """
        if not self._append_lock.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            return self._is_sealed
        try:
            if not self._is_sealed:
                if self._is_appending:  # this is a signal handler, and its thread will go on where it was
                    self._end, self._segment = self.end, None
                while self._deferred:
                    self._append(*self._deferred.popleft())
                self._is_sealed = True
                self._put_away()
        finally:
            self._append_lock.release()
        return True

    def _put_away(self) -> None:
        """Append no more to the segment at hand. Whoever calls has the lock."""
        segment = self._segment
        self._end, self._segment = self.end, None
        if segment is not None:
            self._files.retire(segment)

    def close(self) -> None:
        """Take no more records, and let others have the folder with what is in it; again is as good as once.

        Never raises. A writer's thread that could not be waited for may go on reading.
        """
        if self._is_closed:
            return
        try:
            self.seal()
            self._is_closed = True
            self._files.close()
        except Exception as error:  # noqa: BLE001 - what is written is written, and training goes on
            self._warn("spool-close", f"{self.folder} is not closed as it should be: {error!r}.")
        finally:
            self._is_closed = self._is_sealed = True
            self._segment = None
            self._reader.close()
            self._claim.release()

    def leave_to_parent(self) -> None:
        """In a forked process: the folder and all that is mapped are the parent's, whatever its threads were doing."""
        self._append_lock = threading.RLock()
        self._segment, self._is_closed, self._is_sealed, self._is_appending = None, True, True, False
        self._deferred.clear()


def _double(value: object) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.80} is no number.")
    return float(value)  # type: ignore[arg-type]  # raises what it cannot take


_spools: "weakref.WeakSet[Spool]" = weakref.WeakSet()


def _after_fork() -> None:
    for spool in list(_spools):
        spool.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
