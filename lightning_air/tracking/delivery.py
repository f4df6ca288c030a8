"""The writer's work, without its thread: take records, thin them, send the points, and note how far it got.

Records are taken in chunks. A chunk ends between two records, with about as many points as fit in one request, and
nothing more is read before the server has acknowledged it. So an outage of any length costs no memory, and what is
saved afterwards, the position and the thinner's snapshot there, is one moment: after a crash, the records behind it
give the same points again, and those that the server had got already it keeps once.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lightning_air.tracking.batches import MAX_POINTS
from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.ledger import Ledger
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.progress import Progress
from lightning_air.tracking.segments import Position
from lightning_air.tracking.sending import Outcome, Sender
from lightning_air.tracking.thinning import Counts
from lightning_air.tracking.warn_once import Warn

_RECORDS_AT_ONCE = 100


class Thinner(Protocol):
    """Turns records into points; a deterministic function of its snapshot and the records."""

    def add(self, record: Record) -> list[Point]:
        """Take a record, and return the points that are complete by it."""

    def flush(self) -> list[Point]:
        """Return the points of all that is not complete, as at the end of a run."""

    def snapshot(self) -> dict[str, Any]:
        """Return its whole state, as JSON can have it."""

    @property
    def counts(self) -> Counts:
        """What became of the values so far."""


ThinnerT = TypeVar("ThinnerT", bound=Thinner)


class Source(Protocol):
    """Where records come from: a spool, or what one has left.

    Attributes:
        folder: Of the records.
    """

    folder: Path

    def read(self, position: Position, max_records: int) -> list[tuple[Position, Record]]:
        """Return the records after a position, each with the position after it."""

    def count_left(self, position: Position) -> int:
        """Return how many records an earlier process has left after a position."""

    def prepare(self) -> None:
        """Make room ahead. Never raises."""

    @property
    def num_appended(self) -> int:
        """Records that this process has put in so far."""

    @property
    def num_damaged(self) -> int:
        """Places where records were left out by `read`, because they are not as they were written."""


@dataclass(frozen=True, kw_only=True)
class Options(Generic[ThinnerT]):
    """How points are delivered.

    Attributes:
        before_send: Told how many points of this spool are to have been sent, before they are, and returns how many of
            them may be: the others are dropped, and counted. What it raises is an outage: nothing is sent before it has
            returned.
        observe: Given the thinner after it has got records, on the writer's thread.
        flush_seconds: A point waits no longer for others to share its request.
        noted: Told that more is acknowledged and noted.
        is_over: Asked whether there is no more time.
    """

    before_send: Callable[[int], int]
    observe: Callable[[ThinnerT], object]
    flush_seconds: float
    noted: Callable[[], object] = lambda: None
    is_over: Callable[[], bool] = lambda: False


class Delivery(Generic[ThinnerT]):
    """Carries the records of one source to the server, chunk by chunk. One thread's.

    Args:
        source: Of records.
        thinner: As it was at the progress' position.
        sender: To the server.
        ledger: Where it is noted how far it got.
        progress: Where to begin.
        options: How.
        record: Given every record as it is taken; None for no full record.
        warn: Told of trouble.
        clock: The time in seconds.

    Attributes:
        progress: What is acknowledged, and noted in the folder.
        counts: What became of the values taken so far.
        num_cut_in_part: Points since the progress that may not be sent.
        num_left: Records that an earlier process had left; 0 until that is known.
        num_read: Records taken.
        num_lost: Records that were put in and cannot be read any more: something has deleted their files.
        num_noted: Records of this process whose points are acknowledged or set aside, and that is noted; negative as
            long as there are others before them.
    """

    def __init__(
        self,
        source: Source,
        thinner: ThinnerT,
        sender: Sender,
        ledger: Ledger,
        progress: Progress,
        *,
        options: Options[ThinnerT],
        record: FullRecord | None = None,
        warn: Warn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = progress
        self.counts = thinner.counts
        self.num_cut_in_part = self.num_left = self.num_read = self.num_lost = 0
        self.num_noted = -1
        self._is_begun = False
        self._num_damaged_before = progress.num_damaged
        self._source = source
        self._thinner = thinner
        self._sender = sender
        self._ledger = ledger
        self._options = options
        self._record = record
        self._warn = warn
        self._clock = clock
        self._calls: deque[Callable[[ThinnerT], object]] = deque()
        # The chunk: what was taken since the progress.
        self._position = progress.position
        self._points: list[Point] = []
        self._begun_seconds: float | None = None
        self._unread: deque[tuple[Position, Record]] = deque()
        self._sent_in_part = Outcome()
        self._most_points = 0

    @property
    def num_damaged(self) -> int:
        """Places where records were left out, since they are not as they were written."""
        return self._num_damaged_before + self._source.num_damaged

    @property
    def num_sent_in_part(self) -> int:
        """Points acknowledged since the progress, of a chunk that is not through."""
        return self._sent_in_part.num_done - len(self._sent_in_part.set_aside)

    @property
    def num_pending_points(self) -> int:
        """Points made but not acknowledged."""
        return len(self._points)

    def ask(self, call: Callable[[ThinnerT], object]) -> None:
        """Have the thinner changed between two chunks. Any thread's.

        Not before all is through that an earlier process has left: the server may have some of its points already, and
        another plan would make others of the same values.
        """
        self._calls.append(call)

    def turn(self, *, is_last: bool, is_asked: bool) -> bool:
        """Take the records that are there, and send what is due.

        Args:
            is_last: No records follow: the thinner is flushed too.
            is_asked: Everything is due.

        Returns:
            False if something is due and could not be sent in time.
        """
        if not self._is_begun:
            self._begin()
        self._source.prepare()
        self._ledger.keep(self.progress)
        is_full = True
        if not self._points and self._position == self.progress.position:
            self._make_changes()  # what was asked for before the first record holds from the first record on
        while is_full:
            self._source.prepare()
            num_put_in = self.num_left + self._source.num_appended  # before it is read
            is_full = self._collect()
            if is_full and self._options.is_over():
                return False
            if not is_full:
                self._count_lost(num_put_in)
            if is_last and not is_full:
                self._flush_thinner()
            if not (is_full or is_last or is_asked or self._calls or self._is_due()):
                break
            if not self._commit():
                return False
            self._make_changes()
            self.num_noted = self.num_read + self.num_lost - self.num_left
            self._options.noted()
        return True

    def _begin(self) -> None:
        """Look at what is there."""
        num_left = self._source.count_left(self._position)
        thinner = self._thinner.snapshot() if self.progress.thinner is None else self.progress.thinner
        self.progress = self._ledger.begin(replace(self.progress, thinner=thinner))
        self.num_left, self._is_begun = num_left, True

    def _count_lost(self, num_put_in: int) -> None:
        """Note what should have been read by now."""
        num_lost = num_put_in - self.num_read
        if num_lost > self.num_lost:
            self.num_lost = num_lost
            self._warn(
                f"lost {num_lost}",
                f"{num_lost} records of metrics are lost: something has deleted their files in {self._source.folder} "
                "before they were sent. Choose a spool_dir that nothing cleans up.",
            )

    def _make_changes(self) -> None:
        while self._calls and self.num_read + self.num_lost >= self.num_left:
            self._change(self._calls.popleft())

    def _is_due(self) -> bool:
        begun = self._begun_seconds
        return begun is not None and self._clock() - begun >= self._options.flush_seconds

    def _collect(self) -> bool:
        """Take records until the chunk is full or due, and return True; or until there are no more: then False."""
        num_read, is_full = self.num_read, True
        while not (self._points and len(self._points) + self._most_points > MAX_POINTS):
            if self._calls and self.num_read == self.num_left > num_read:
                break  # what was left is a chunk of its own, and then the changes are made
            if not self._unread:
                if self.num_read > num_read and (self._is_due() or self._options.is_over()):
                    break
                self._unread.extend(self._source.read(self._position, _RECORDS_AT_ONCE))
                if not self._unread:
                    is_full = False
                    break
                time.sleep(0.0001)  # lets training have the GIL, for which it would otherwise wait up to 5 ms
            self._take(*self._unread[0])
            self._unread.popleft()
        if self.num_read > num_read:
            self._observe()
        if self._source.num_damaged:
            self._warn(
                "damaged",
                f"Metrics in {self._source.folder} are not as they were written: the disk has damaged them, or the "
                "machine went down before they were on it. What is damaged is left out, the rest arrives.",
            )
        return is_full

    def _take(self, position: Position, record: Record) -> None:
        if self._begun_seconds is None:
            self._begun_seconds = self._clock()
        points = self._made(lambda: self._thinner.add(record), f"A record of step {record.step} is left out")
        if self._record is not None:
            self._record.add(record)
        self._points += points
        self._most_points = max(self._most_points, len(points))
        self._position = position
        self.num_read += 1

    def _flush_thinner(self) -> None:
        self._points += self._made(self._thinner.flush, "The last values of metrics, for points to come, are left out")
        self._observe()

    def _made(self, make: Callable[[], list[Point]], loss: str) -> list[Point]:
        try:
            return make()
        except Exception as error:  # noqa: BLE001 - it would fail the next time too
            self._warn(f"thinner {type(error).__name__}", f"{loss}: {error!r}.")
            return []

    def _observe(self) -> None:
        self.counts = self._thinner.counts
        try:
            self._options.observe(self._thinner)
        except Exception as error:  # noqa: BLE001 - whoever observes must not stop it
            self._warn(f"observer {type(error).__name__}", f"An observer of the metrics failed: {error!r}.")

    def _change(self, call: Callable[[ThinnerT], object]) -> None:
        try:
            call(self._thinner)
        except Exception as error:  # noqa: BLE001
            self._warn(f"change {type(error).__name__}", f"The thinning of metrics cannot be changed: {error!r}.")
        self.progress = replace(self.progress, thinner=self._thinner.snapshot())
        self.progress = self._ledger.commit(self.progress)

    def _commit(self) -> bool:
        """Send the chunk, and note that it is acknowledged; return False if there was no more time."""
        if not self._send():
            return False
        progress, sent, num_sent, num_cut = (
            self.progress,
            self._sent_in_part,
            self.num_sent_in_part,
            self.num_cut_in_part,
        )
        # Before anything is written, which may fail: what is counted in the progress must not be counted again.
        self._sent_in_part, self.num_cut_in_part, self._begun_seconds = Outcome(), 0, None
        if sent.num_done or num_cut or self._position != progress.position:
            self.progress = replace(
                progress,
                position=self._position,
                thinner=self._thinner.snapshot(),
                num_sent=progress.num_sent + num_sent,
                num_set_aside=progress.num_set_aside + len(sent.set_aside),
                num_cut=progress.num_cut + num_cut,
                num_damaged=self.num_damaged,
            )
            self.progress = self._ledger.commit(self.progress, refused=sent.set_aside, record=self._record)
        return True

    def _send(self) -> bool:
        if self._points:
            # With those cut: a process that was killed may have sent them, when there was room for them still.
            num_gone = self.progress.num_sent + self.num_sent_in_part + self.progress.num_cut + self.num_cut_in_part
            total = num_gone + len(self._points)
            outcome = self._sender.send(self._points, before=lambda: self._options.before_send(total) - num_gone)
            self._sent_in_part.num_done += outcome.num_done
            self._sent_in_part.set_aside += outcome.set_aside
            self._points = self._points[outcome.num_done : len(self._points) - outcome.num_cut]
            if outcome.num_cut:
                self.num_cut_in_part += outcome.num_cut
                self._warn(
                    "cut",
                    f"The run's metric-step budget is used up by all that log into it: {outcome.num_cut:,} points are "
                    "dropped now, and what follows will be. Log into another run, or raise max_metric_steps if the "
                    "server allows more.",
                )
        return not self._points
