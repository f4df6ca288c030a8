"""Calls that training does not wait for: uploads, made one after the other by one thread, and again if they may pass.

A server that is away costs nothing but time on that thread: calls wait in their order, within bounds, and a file that
is uploaded again and again waits once only. What the server refuses is said once and dropped.
"""

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from lightning_air.tracking.call_queue import Call, CallQueue
from lightning_air.tracking.door_errors import Busy, DoorError, Refused
from lightning_air.tracking.metric_names import examples
from lightning_air.tracking.outbox import Outbox, sum_of
from lightning_air.tracking.patience import Patience, Wait
from lightning_air.tracking.upload_errors import trouble_of
from lightning_air.tracking.warn_once import Warn, WarnOnce

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Calls that may wait; beyond it one goes: first of those that a later one would have replaced."""

LONGEST_RETRY_AFTER_SECONDS = 300.0
WARN_AFTER_SECONDS = 30.0
"""A shorter outage is nobody's concern."""

TRIES_IN_A_ROW = 6
"""Then a call gives way to others, since it may be the only one that the server has trouble with."""

_MAX_TURNS = 3


class Background:
    """One thread, and the calls that wait for it. The thread starts with the first call.

    Any thread may submit, also a signal handler. In a forked process `submit` does nothing, unless the parent had not
    submitted anything.

    Args:
        name: Of the thread.
        warn: Told of calls that are dropped or late.
        clock: The time in seconds.
        wait: Sleeps between two tries.
        max_waiting: Calls that may wait.
        on_trouble: Called on the thread after a failure, and after the success that ends it: the time to put what
            waits on the disk.

    Attributes:
        num_done: Calls that succeeded.
        num_dropped: Calls that were refused, or for which there was no room.
    """

    def __init__(
        self,
        name: str,
        *,
        warn: Warn | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Event.wait,
        max_waiting: int = MAX_WAITING,
        on_trouble: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self._on_trouble = on_trouble
        self.num_done = self.num_dropped = 0
        self._warn = warn or WarnOnce()
        self._clock, self._wait = clock, wait
        self._max_waiting = max_waiting
        self._queue = CallQueue(max_waiting)
        self._patience = Patience(clock=clock, wait=wait)
        self._state = threading.Condition()
        self._turns = threading.Lock()  # held while a call is under way
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_parents = False
        self._failing_since_seconds: float | None = None
        self._has_recovered = False
        self._refused: list[Callable[[], Outbox]] = []
        _backgrounds.add(self)

    def submit(
        self,
        name: str,
        call: Callable[[], object],
        *,
        replaces: str | None = None,
        note: Callable[[], Outbox] | None = None,
    ) -> None:
        """Have a call made later, on the thread. Returns at once and never raises.

        The call may be made several times, so it has to be one that does no harm twice, and, if the server has trouble
        with it alone, after later ones. Calls of which only the last counts share `replaces`.

        Args:
            name: What it brings where, for the user.
            call: What it raises tells whether it may pass, as `trouble_of` judges.
            replaces: A call with the same that still waits is dropped, and this one takes its place.
            note: Says what another process needs to do the same, should this one not come to it; any thread's.
        """
        wanted = Call(name, call, replaces, note)
        with self._state:
            is_late, crowded_out = self._is_closed, None
            if not is_late:
                crowded_out = self._queue.put(wanted)
                self._start()
                self._state.notify_all()
        if is_late and not self._is_parents:
            self._drop(wanted, "late", "it came after the end")
        if crowded_out is not None:
            self._drop(crowded_out, "crowd", f"{self._max_waiting} others wait")

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until all calls that were submitted before are made, or dropped.

        Returns:
            Whether they are; False once the deadline is over. The thread goes on all the same.
        """
        mark = self._queue.mark()
        until_seconds = self._clock() + deadline_seconds
        if self._is_working():
            self._patience.wake()
            with self._state:
                self._state.wait_for(
                    lambda: self._queue.is_through(mark) or not self._is_working(), _bounded(deadline_seconds)
                )
        self._work_here(until_seconds)
        return self._queue.is_through(mark)

    def close(self, deadline_seconds: float) -> bool:
        """Make all calls that wait, and end; again is as good as once. What is left is named in a warning.

        Where no thread can be started any more, as at the end of the process on Python 3.12, the calls are made here;
        the deadline cannot cut a call short then.

        Returns:
            Whether nothing is left. Once the deadline is over no call is begun, but one may still be under way.
        """
        with self._state:
            is_first, self._is_closed = not self._is_closed, True
            self._state.notify_all()
        if is_first:
            until_seconds = self._clock() + deadline_seconds
            self._patience.end_in(deadline_seconds)
            if self._thread is not None and self._is_working():
                self._thread.join(_bounded(max(0.0, deadline_seconds)))
            self._work_here(until_seconds)
            if left := self.lost:
                self._warn(
                    f"{self.name} left",
                    f"Not known to have reached MLflow within {deadline_seconds:g} s: {examples(left)}.",
                )
        return not self._queue

    @property
    def left(self) -> list[str]:
        """The names of the calls that are not made yet."""
        with self._state:
            return [call.name for call in self._queue]

    @property
    def kept(self) -> list[str]:
        """The names of those of them that another process can make."""
        with self._state:
            return [call.name for call in self._queue if call.note is not None]

    @property
    def lost(self) -> list[str]:
        """The names of those of them that no other process can make."""
        with self._state:
            return [call.name for call in self._queue if call.note is None]

    def outbox(self) -> Outbox:
        """Return what another process needs to make the calls that are not made yet. Any thread's."""
        with self._state:
            notes = [call.note for call in self._queue if call.note is not None]
        return sum_of(note() for note in notes)

    def refused(self) -> Outbox:
        """Return what another process needs to make the calls that were refused, should that change."""
        return sum_of(note() for note in self._refused)

    def _is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        thread = self._thread
        if thread is not None and (thread.ident is None or thread.is_alive()):  # it starts, or runs
            return
        try:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        except RuntimeError:  # the process ends, or has too many threads: tried again at the next call
            logger.debug("The thread %s cannot be started.", self.name, exc_info=True)
            self._thread = None

    # ---- on the thread, or without one where the calls are waited for ------------------------------------------------

    def _run(self) -> None:
        while self._has_work():
            with self._turns:
                self._turn(self._patience)

    def _has_work(self) -> bool:
        with self._state:
            self._state.wait_for(lambda: self._queue or self._is_closed)
            return bool(self._queue) and self._patience.seconds_left > 0

    def _work_here(self, until_seconds: float) -> None:
        """Make the calls on this thread if there is no other."""
        patience = Patience(clock=self._clock, wait=self._wait)
        patience.end_in(until_seconds - self._clock())
        while self._queue and not self._is_working() and patience.seconds_left > 0:
            if not self._turns.acquire(blocking=False):  # another thread does, or this one did when a signal came
                return
            try:
                self._turn(patience)
            finally:
                self._turns.release()

    def _turn(self, patience: Patience) -> None:
        """Make the first call; it goes, or gives way to the others."""
        with self._state:
            if not self._queue.begin():
                return
        is_over = True  # also if it ends this thread
        try:
            is_over = self._insist(patience)
        finally:
            with self._state:
                self._queue.end(is_over=is_over)
                self._state.notify_all()
        if self._has_recovered:
            self._has_recovered = False
            self._on_trouble()

    def _insist(self, patience: Patience) -> bool:
        """Make a call until it succeeds or is refused; return False if it has to be made later."""
        for attempt in itertools.count(1):
            if patience.seconds_left <= 0:
                break
            with self._state:
                call = self._queue.newest()
            try:
                call.make()
            except Exception as error:
                logger.debug("%s failed.", call.name, exc_info=True)
                kind, trouble = f"refused {type(error).__name__}", trouble_of(error)
            else:
                self.num_done += 1
                self._has_recovered = self._failing_since_seconds is not None
                self._failing_since_seconds = None
                return True
            if isinstance(trouble, Refused):
                self._drop(call, kind, str(trouble))
                self._refused += [] if call.note is None else [call.note]
                return True
            self._note_failure(call, trouble)
            self._on_trouble()
            if attempt >= TRIES_IN_A_ROW and len(self._queue) > 1:
                return self._is_hopeless(call, trouble)
            asked_seconds = trouble.retry_after_seconds if isinstance(trouble, Busy) else None
            patience.back_off(attempt - 1, at_least_seconds=min(asked_seconds or 0.0, LONGEST_RETRY_AFTER_SECONDS))
        return False

    def _is_hopeless(self, call: Call, trouble: DoorError) -> bool:
        """Drop a call that fails whenever its turn comes, while others succeed."""
        if self.num_done > call.num_done_before:
            call.num_turns += 1
            call.num_done_before = self.num_done
        if call.num_turns <= _MAX_TURNS:
            return False
        self._drop(call, "hopeless", f"{trouble}, again and again, while others succeed")
        return True

    def _note_failure(self, call: Call, trouble: DoorError) -> None:
        now = self._clock()
        if self._failing_since_seconds is None:
            self._failing_since_seconds = now
        elif now - self._failing_since_seconds >= WARN_AFTER_SECONDS:
            seconds = now - self._failing_since_seconds
            self._warn(
                f"{self.name} outage",
                f"MLflow has not taken {call.name} for {seconds:.0f} s ({trouble}), and {len(self._queue) - 1} more "
                "wait. It is tried again; training goes on.",
            )

    def _drop(self, call: Call, kind: str, reason: str) -> None:
        self.num_dropped += 1
        self._warn(f"{self.name} {kind}", f"MLflow has not got {call.name}: {reason.removesuffix('.')}.")

    def leave_to_parent(self) -> None:
        """In a forked process: what waits is the parent's, and its thread is not here."""
        self._is_parents = self._is_parents or self._thread is not None or bool(self._queue)
        self._is_closed = self._is_closed or self._is_parents
        self._state, self._turns = threading.Condition(), threading.Lock()
        self._patience = Patience(clock=self._clock, wait=self._wait)
        self._queue = CallQueue(self._max_waiting)
        self._thread = None


def _bounded(seconds: float) -> float:
    return min(seconds, threading.TIMEOUT_MAX)


_backgrounds: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _after_fork() -> None:
    for background in list(_backgrounds):
        background.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
