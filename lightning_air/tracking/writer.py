"""The one thread that takes records out of the spool and brings their points to the server.

Nothing here reaches training: errors are warned about, once per kind, and what cannot be sent stays in the spool.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol

from lightning_air.tracking.delivery import Delivery, Options, Source, ThinnerT
from lightning_air.tracking.door import Door
from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.ledger import Ledger, Space
from lightning_air.tracking.patience import Patience
from lightning_air.tracking.progress import Progress
from lightning_air.tracking.sending import Sender
from lightning_air.tracking.warn_once import Warn, WarnOnce

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
THREAD_NAME = "lightning-air-tracking"

_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class WriterStats:
    """What became of what was logged, over all attempts that used the spool, and what it has cost in this one.

    Attributes:
        num_sent: Points that the server has acknowledged.
        num_thinned: Values that are in a point with others before them.
        num_over_budget: Values that are in no point, since the budget had none left.
        num_cut: Points that were made and not sent, since others had used the run's budget up.
        num_set_aside: Points that the server refuses.
        num_pending_points: Points made but not acknowledged.
        num_pending_records: Records that no point was made of yet.
        num_dropped: Records that the spool had no space for.
        num_requests: Requests that carried points.
        request_seconds: In these requests, on the writer's thread.
        outage_seconds: From failed requests to the next acknowledgement.
        last_error: Why nothing is acknowledged now; None if all is well.
    """

    num_sent: int
    num_thinned: int
    num_over_budget: int
    num_cut: int
    num_set_aside: int
    num_pending_points: int
    num_pending_records: int
    num_dropped: int
    num_requests: int
    request_seconds: float
    outage_seconds: float
    last_error: str | None


class WholeSource(Source, Space, Protocol):
    """A source of records that also knows its folder and its losses: a spool, or what one has left."""

    folder: Path
    num_appended: int
    num_dropped: int


class Writer(Generic[ThinnerT]):
    """Brings the records of one run to its server, from `start` to `close`.

    Args:
        source: The spool.
        thinner: As it was at the progress' position; from `start` on it is the writer's thread's.
        door: To the server.
        run_id: MLflow's.
        progress: Where to begin; None for a new spool.
        before_send: Told how many points of this spool are to have been sent, before they are; returns how many may be.
            What it raises is an outage: nothing is sent before it has returned. On the writer's thread.
        settle: Told at a clean end how many points of this spool the run may have at most, and how many seconds there
            are for it. What it raises is only logged. On the writer's thread.
        observe: Given the thinner after it has got records, on the writer's thread.
        record: Given every record; None for no full record.
        warn: Told of trouble.
        flush_seconds: A point waits no longer for others to share its request.
        clock: The time in seconds.

    Raises:
        ValueError: If flush_seconds is not positive.
    """

    def __init__(
        self,
        source: WholeSource,
        thinner: ThinnerT,
        door: Door,
        run_id: str,
        *,
        progress: Progress | None = None,
        before_send: Callable[[int], int] = lambda num_points: num_points,
        settle: Callable[[int, float], object] = lambda *_: None,
        observe: Callable[[ThinnerT], object] = lambda _: None,
        record: FullRecord | None = None,
        warn: Warn | None = None,
        flush_seconds: float = FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not flush_seconds > 0:
            raise ValueError(f"flush_seconds must be a positive number of seconds, got {flush_seconds!r}.")
        self._source = source
        self._warn = WarnOnce() if warn is None else warn
        self._patience = Patience(idle=source.prepare, clock=clock)
        self._sender = Sender(door, run_id, patience=self._patience, warn=self._warn, clock=clock)
        self._ledger = Ledger(source.folder, source, self._warn)
        self._delivery = Delivery(
            source,
            thinner,
            self._sender,
            self._ledger,
            progress or Progress(),
            options=Options(before_send=before_send, observe=observe, flush_seconds=flush_seconds),
            record=record,
            warn=self._warn,
            clock=clock,
        )
        self._settle = settle
        self._state = threading.Condition()
        self._num_flushes = self._num_flushed = 0
        self._is_complete = self._is_ended = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def ask(self, call: Callable[[ThinnerT], object]) -> None:
        """Have the thinner changed, on the writer's thread, between two chunks; an attempt after a crash knows it."""
        self._delivery.ask(call)
        self._patience.wake()

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until the points made of all records that were appended before are acknowledged or set aside.

        Returns:
            Whether they are; False once the deadline is over. The writer goes on all the same.
        """
        if not self._is_running():
            return self._is_complete
        with self._state:
            self._num_flushes += 1
            mine = self._num_flushes
            self._patience.wake()
            self._state.wait_for(lambda: self._num_flushed >= mine or self._is_ended, _bounded(deadline_seconds))
            return self._num_flushed >= mine

    def close(self, deadline_seconds: float) -> bool:
        """Flush, the thinner too, and stop; again is as good as once. What remains stays in the spool.

        Returns:
            Whether nothing remains. Once the deadline is over the thread does nothing more to the folder, even if it
            still waits for an answer.
        """
        if self._is_running():
            self._patience.end_in(deadline_seconds)
            self._thread.join(_bounded(deadline_seconds))
            self._ledger.abandon()
        return self._is_complete

    def stats(self) -> WriterStats:
        """Return what became of what was logged."""
        delivery, sending = self._delivery, self._sender.stats
        return WriterStats(
            num_sent=delivery.progress.num_sent + delivery.num_sent_in_part,
            num_thinned=delivery.counts.thinned,
            num_over_budget=delivery.counts.dropped,
            num_cut=delivery.progress.num_cut + delivery.num_cut_in_part,
            num_set_aside=delivery.progress.num_set_aside,
            num_pending_points=delivery.num_pending_points,
            num_pending_records=max(0, delivery.num_left + self._source.num_appended - delivery.num_read),
            num_dropped=self._source.num_dropped,
            num_requests=sending.num_requests,
            request_seconds=sending.request_seconds,
            outage_seconds=sending.outage_seconds,
            last_error=sending.last_error,
        )

    def _is_running(self) -> bool:
        return self._thread.is_alive() and os.getpid() == self._pid  # a forked process has no such thread

    def _run(self) -> None:
        self._try(self._delivery.begin)
        while not self._is_complete:
            is_last, num_flushes = self._patience.is_ending, self._num_flushes
            is_asked = num_flushes > self._num_flushed
            is_through = self._try(partial(self._delivery.turn, is_last=is_last, is_asked=is_asked))
            with self._state:
                if is_through:
                    self._num_flushed, self._is_complete = num_flushes, is_last
                    self._state.notify_all()
            if is_last and (is_through is not None or self._patience.seconds_left <= 0):
                break
            if self._num_flushes == self._num_flushed and not self._patience.is_ending:
                self._patience.pause(_POLL_SECONDS)
        with self._state:
            self._is_ended = True
            self._state.notify_all()
        if self._is_complete:
            self._give_back()

    def _give_back(self) -> None:
        progress = self._delivery.progress
        seconds = max(1.0, min(_SETTLE_SECONDS, self._patience.seconds_left))
        try:
            # What was cut may have been sent by an earlier process that did not live to note it.
            self._settle(progress.num_sent + progress.num_cut, seconds)
        except Exception:
            logger.debug("What was charged ahead stays charged.", exc_info=True)

    def _try(self, call: Callable[[], bool | None]) -> bool | None:
        """Return what the call returns, or None if it failed."""
        try:
            return call()
        except Exception as error:
            logger.debug("The writer failed.", exc_info=True)
            self._warn(f"writer {type(error).__name__}", f"Metrics are delayed: {error!r}. The writer tries again.")
            self._patience.pause(_POLL_SECONDS)
            return None


def _bounded(seconds: float) -> float:
    return min(seconds, threading.TIMEOUT_MAX)
