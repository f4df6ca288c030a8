"""The one thread that takes records out of the spool and brings their points to the server.

Nothing here reaches training: errors are warned about, once per kind, and what cannot be sent stays in the spool.
Where no thread can be started, as at the end of a process on Python 3.12, whoever closes does the work.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol

from lightning_air.tracking.delivery import Delivery, Options, Source, ThinnerT
from lightning_air.tracking.door import Door
from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.ledger import Ledger, Space
from lightning_air.tracking.patience import Patience
from lightning_air.tracking.progress import Progress
from lightning_air.tracking.sending import Sender
from lightning_air.tracking.spool_folder import RunInfo
from lightning_air.tracking.warn_once import Warn, WarnOnce

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
THREAD_NAME = "lightning-air-tracking"

_POLL_SECONDS = 0.2
_SEAL_SECONDS = 1.0
_SETTLE_SECONDS = 10.0
_LAST_TRIES = 8
"""At the end, of what fails for another reason than the server: they take more than a minute."""


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
        num_lost: Records whose files something else has deleted before they were read.
        num_damaged: Places in the spool where records were left out, since they are not as they were written.
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
    num_lost: int
    num_damaged: int
    num_requests: int
    request_seconds: float
    outage_seconds: float
    last_error: str | None


class WholeSource(Source, Space, Protocol):
    """A source of records that also knows its losses and its end: a spool, or what one has left."""

    num_dropped: int

    def seal(self, seconds: float) -> bool:
        """Take no more records, and return whether none can come any more; wait no longer for that than so long."""


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
        info: Whose the records are: noted in the folder wherever that is not there. None if it need not be.
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
        info: RunInfo | None = None,
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
        self._ledger = Ledger(source.folder, source, self._warn, info=info)
        self._delivery = Delivery(
            source,
            thinner,
            self._sender,
            self._ledger,
            progress or Progress(),
            options=Options(
                before_send=before_send,
                observe=observe,
                flush_seconds=flush_seconds,
                noted=self._tell_waiters,
                is_over=lambda: self._patience.seconds_left <= 0,
            ),
            record=record,
            warn=self._warn,
            clock=clock,
        )
        self._settle = settle
        self._state = threading.Condition()
        self._num_flushes = self._num_flushed = 0
        self._is_started = self._is_sealed = self._is_complete = False
        self._is_at_work = self._has_ended = self._has_died = False
        self._num_failures = 0  # in a row
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. Once."""
        self._is_started = True
        self._start_thread()

    def ask(self, call: Callable[[ThinnerT], object]) -> None:
        """Have the thinner changed, on the writer's thread, between two chunks; an attempt after a crash knows it."""
        self._delivery.ask(call)
        self._patience.wake()

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until the points made of all records that were appended before are acknowledged or set aside.

        Returns:
            Whether they are; False once the deadline is over. The writer goes on all the same.
        """
        if not self._is_started or self._is_complete or not self._is_working():
            return self._is_complete
        num_appended = self._source.num_appended
        with self._state:
            self._num_flushes += 1
            mine = self._num_flushes
            self._patience.wake()

            def is_through() -> bool:
                # All that was there; or this much, though more has come all the time.
                return self._num_flushed >= mine or self._delivery.num_noted >= max(1, num_appended)

            self._state.wait_for(lambda: is_through() or not self._is_at_work, _bounded(deadline_seconds))
            return is_through()

    def close(self, deadline_seconds: float) -> bool:
        """Flush, the thinner too, and stop; again is as good as once. What remains stays in the spool.

        The spool takes no more records from now on.

        Returns:
            Whether nothing remains. Once the deadline is over the thread does nothing more to the folder, even if it
            still waits for an answer.
        """
        if self._is_started and os.getpid() == self._pid:  # a forked process has no such thread
            until_seconds = time.monotonic() + deadline_seconds
            self._is_sealed = self._source.seal(min(deadline_seconds, _SEAL_SECONDS)) or self._is_sealed
            self._patience.end_in(until_seconds - time.monotonic())
            if self._is_working():
                # Not `join`: a Ctrl-C in it leaves a thread that `is_alive` takes for ended, while it still works.
                with self._state:
                    left_seconds = _bounded(max(0.0, until_seconds - time.monotonic()))
                    self._state.wait_for(lambda: not self._is_at_work, left_seconds)
            elif not (self._has_ended or self._has_died):
                self._work()
            self._ledger.abandon(until_seconds - time.monotonic())
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
            num_pending_records=max(
                0, delivery.num_left + self._source.num_appended - delivery.num_read - delivery.num_lost
            ),
            num_dropped=self._source.num_dropped,
            num_lost=delivery.num_lost,
            num_damaged=delivery.num_damaged,
            num_requests=sending.num_requests,
            request_seconds=sending.request_seconds,
            outage_seconds=sending.outage_seconds,
            last_error=sending.last_error or self._failure,
        )

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._is_at_work = True
        try:
            thread.start()
        except RuntimeError:  # the process ends, or has too many threads: tried again at the next flush
            logger.debug("The writer's thread cannot be started.", exc_info=True)
            self._is_at_work = False
        else:
            self._thread = thread

    def _is_working(self) -> bool:
        """Return whether there is a thread, after an attempt to start one where there was none before."""
        if os.getpid() != self._pid:
            return False
        with self._state:
            if self._thread is None and not self._patience.is_ending:
                self._start_thread()
            return self._thread is not None and self._is_at_work

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._has_died = True
            self._failure = f"the writer has died of {error!r}"
            self._ledger.abandon(math.inf)  # what was noted last is right
            self._warn(
                "writer died",
                f"Metrics are not sent any more: {self._failure}. They are kept in {self._source.folder}, and the next "
                "attempt on this machine sends them, or `lightning-air replay`.",
            )
            raise
        finally:
            with self._state:
                self._is_at_work = False
                self._state.notify_all()

    def _work(self) -> None:
        while not self._is_complete:
            is_last, num_flushes = self._patience.is_ending, self._num_flushes
            is_asked = num_flushes > self._num_flushed
            is_through = self._try(partial(self._delivery.turn, is_last=is_last, is_asked=is_asked))
            with self._state:
                if is_through:
                    self._num_flushed, self._is_complete = num_flushes, is_last and self._has_all()
                    self._state.notify_all()
            if is_last and (is_through is not None or self._is_hopeless()):
                break
            if self._num_flushes == self._num_flushed and not self._patience.is_ending:
                self._patience.pause(_POLL_SECONDS)
        if self._is_complete:
            self._give_back()
        self._has_ended = True

    def _has_all(self) -> bool:
        """Return whether all that was ever put into the spool was taken out again."""
        delivery = self._delivery
        num_taken = delivery.num_read - delivery.num_left
        return self._is_sealed and not delivery.num_lost and num_taken >= self._source.num_appended

    def _is_hopeless(self) -> bool:
        return self._patience.seconds_left <= 0 or self._num_failures >= _LAST_TRIES

    def _tell_waiters(self) -> None:
        with self._state:
            self._state.notify_all()

    def _give_back(self) -> None:
        progress = self._delivery.progress
        seconds = max(1.0, min(_SETTLE_SECONDS, self._patience.seconds_left))
        try:
            # What was cut may have been sent by an earlier process that did not live to note it.
            self._settle(progress.num_sent + progress.num_cut, seconds)
        except Exception:
            logger.debug("What was charged ahead stays charged.", exc_info=True)

    def _try(self, call: Callable[[], bool]) -> bool | None:
        """Return what the call returns, or None if it failed; then after a pause."""
        try:
            result = call()
        except Exception as error:
            logger.debug("The writer failed.", exc_info=True)
            self._failure = repr(error)
            self._warn(f"writer {type(error).__name__}", f"Metrics are delayed: {error!r}. The writer tries again.")
            self._patience.back_off(self._num_failures)
            self._num_failures += 1
            return None
        self._num_failures, self._failure = 0, None
        return result


def _bounded(seconds: float) -> float:
    return min(seconds, threading.TIMEOUT_MAX)
