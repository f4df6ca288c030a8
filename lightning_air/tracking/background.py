"""Calls that training does not wait for: uploads, made one after the other by one thread, and again if they may pass.

A server that is away costs nothing but time on that thread: calls wait in their order, within bounds, and a file that
is uploaded again and again waits once only. What the server refuses is said once and dropped.
"""

import errno
import http.client
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests
import urllib3
from mlflow.exceptions import MlflowException

from lightning_air.tracking.door_errors import Busy, DoorError, Refused, Unreachable, judge, one_line
from lightning_air.tracking.metric_names import examples
from lightning_air.tracking.outbox import Outbox, sum_of
from lightning_air.tracking.patience import Patience, Wait
from lightning_air.tracking.warn_once import Warn, WarnOnce

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Calls that may wait; beyond it the oldest are dropped."""

LONGEST_RETRY_AFTER_SECONDS = 300.0
WARN_AFTER_SECONDS = 30.0
"""A shorter outage is nobody's concern."""

TRIES_IN_A_ROW = 6
"""Then a call gives way to others, since it may be the only one that the server has trouble with."""

_MAX_TURNS = 3


@dataclass
class _Job:
    """A call that waits, or is under way.

    Attributes:
        name: For the user.
        call: What to do.
        replaces: Of two that wait with the same, the later one counts.
        note: What another process needs to do the same.
        num_turns: How often it has given way to others that succeeded.
        num_done_before: How many had succeeded when it gave way last.
    """

    name: str
    call: Callable[[], object]
    replaces: str | None
    note: Callable[[], Outbox] | None = None
    num_turns: int = 0
    num_done_before: int = 0


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
        self._patience = Patience(clock=clock, wait=wait)
        self._numbers = itertools.count(1)
        self._state = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # in the order of the calls; with the one under way
        self._waiting: dict[str | None, int] = {}  # by `replaces`; without the one under way
        self._running: int | None = None
        self._turns = threading.Lock()  # held while a call is under way
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_parents = False
        self._failing_since_seconds: float | None = None
        self._has_recovered = False
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
        job = _Job(name, call, replaces, note)
        with self._state:
            is_late = self._is_closed
            crowded_out = None if is_late else self._add(job)
        if is_late and not self._is_parents:
            self._drop(job, "late", "it came after the end")
        if crowded_out is not None:
            self._drop(crowded_out, "crowd", f"{self._max_waiting} others wait")

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until all calls that were submitted before are made, or dropped.

        Returns:
            Whether they are; False once the deadline is over. The thread goes on all the same.
        """
        last = next(self._numbers)
        until_seconds = self._clock() + deadline_seconds
        if self._is_working():
            self._patience.wake()
            with self._state:
                self._state.wait_for(
                    lambda: self._is_through(last) or not self._is_working(), _bounded(deadline_seconds)
                )
        self._work_here(until_seconds)
        return self._is_through(last)

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
        return not self._jobs

    @property
    def left(self) -> list[str]:
        """The names of the calls that are not made yet."""
        with self._state:
            return [job.name for job in self._jobs.values()]

    @property
    def kept(self) -> list[str]:
        """The names of those of them that another process can make."""
        with self._state:
            return [job.name for job in self._jobs.values() if job.note is not None]

    @property
    def lost(self) -> list[str]:
        """The names of those of them that no other process can make."""
        with self._state:
            return [job.name for job in self._jobs.values() if job.note is None]

    def outbox(self) -> Outbox:
        """Return what another process needs to make the calls that are not made yet. Any thread's."""
        with self._state:
            notes = [job.note for job in self._jobs.values() if job.note is not None]
        return sum_of(note() for note in notes)

    def _is_through(self, last: int) -> bool:
        return min(tuple(self._jobs), default=last) >= last

    def _is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _add(self, job: _Job) -> _Job | None:
        """Have a call wait; return one that has to go, if there is one too many."""
        number = self._waiting.get(job.replaces)
        if number is None:
            number = next(self._numbers)
            if job.replaces is not None:
                self._waiting[job.replaces] = number
        self._jobs[number] = job
        self._start()
        self._state.notify_all()
        if len(self._jobs) - (self._running is not None) <= self._max_waiting:
            return None
        victim = min(self._waiting.values(), default=0) or next(each for each in self._jobs if each != self._running)
        self._waiting.pop(self._jobs[victim].replaces, None)
        return self._jobs.pop(victim)

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
            self._state.wait_for(lambda: self._jobs or self._is_closed)
            return bool(self._jobs) and self._patience.seconds_left > 0

    def _work_here(self, until_seconds: float) -> None:
        """Make the calls on this thread if there is no other."""
        patience = Patience(clock=self._clock, wait=self._wait)
        patience.end_in(until_seconds - self._clock())
        while self._jobs and not self._is_working() and patience.seconds_left > 0:
            if not self._turns.acquire(blocking=False):  # another thread does, or this one did when a signal came
                return
            try:
                self._turn(patience)
            finally:
                self._turns.release()

    def _turn(self, patience: Patience) -> None:
        """Make the first call; it goes, or gives way to the others."""
        with self._state:
            if not self._jobs:
                return
            self._running = number = next(iter(self._jobs))
            self._waiting.pop(self._jobs[number].replaces, None)
        is_over = True  # also if it ends this thread
        try:
            is_over = self._insist(number, patience)
        finally:
            with self._state:
                job = self._jobs.pop(number)
                if not is_over and job.replaces not in self._waiting:
                    self._jobs[number] = job
                    if job.replaces is not None:
                        self._waiting[job.replaces] = number
                self._running = None
                self._state.notify_all()
        if self._has_recovered:
            self._has_recovered = False
            self._on_trouble()

    def _insist(self, number: int, patience: Patience) -> bool:
        """Make a call until it succeeds or is refused; return False if it has to be made later."""
        for attempt in itertools.count(1):
            if patience.seconds_left <= 0:
                break
            job = self._newest(number)
            try:
                job.call()
            except Exception as error:
                logger.debug("%s failed.", job.name, exc_info=True)
                kind, trouble = f"refused {type(error).__name__}", trouble_of(error)
            else:
                self.num_done += 1
                self._has_recovered = self._failing_since_seconds is not None
                self._failing_since_seconds = None
                return True
            if isinstance(trouble, Refused):
                self._drop(job, kind, str(trouble))
                return True
            self._note_failure(job, trouble)
            self._on_trouble()
            if attempt >= TRIES_IN_A_ROW and len(self._jobs) > 1:
                return self._is_hopeless(job, trouble)
            asked = trouble.retry_after_seconds if isinstance(trouble, Busy) else None
            if asked is None:
                patience.back_off(attempt - 1)
            else:
                patience.pause(min(asked, LONGEST_RETRY_AFTER_SECONDS), is_firm=True)
        return False

    def _newest(self, number: int) -> _Job:
        """Return the call under way, or the one that was to replace it if it had still waited."""
        with self._state:
            newer = self._waiting.pop(self._jobs[number].replaces, None)
            if newer is not None:
                self._jobs[number] = self._jobs.pop(newer)
            return self._jobs[number]

    def _is_hopeless(self, job: _Job, trouble: DoorError) -> bool:
        """Drop a call that fails whenever its turn comes, while others succeed."""
        if self.num_done > job.num_done_before:
            job.num_turns += 1
            job.num_done_before = self.num_done
        if job.num_turns <= _MAX_TURNS:
            return False
        self._drop(job, "hopeless", f"{trouble}, again and again, while others succeed")
        return True

    def _note_failure(self, job: _Job, trouble: DoorError) -> None:
        now = self._clock()
        if self._failing_since_seconds is None:
            self._failing_since_seconds = now
        elif now - self._failing_since_seconds >= WARN_AFTER_SECONDS:
            seconds = now - self._failing_since_seconds
            self._warn(
                f"{self.name} outage",
                f"MLflow has not taken {job.name} for {seconds:.0f} s ({trouble}), and {len(self._jobs) - 1} more "
                "wait. It is tried again; training goes on.",
            )

    def _drop(self, job: _Job, kind: str, reason: str) -> None:
        self.num_dropped += 1
        self._warn(f"{self.name} {kind}", f"MLflow has not got {job.name}: {reason.removesuffix('.')}.")

    def leave_to_parent(self) -> None:
        """In a forked process: what waits is the parent's, and its thread is not here."""
        self._is_parents = self._is_parents or self._thread is not None or bool(self._jobs)
        self._is_closed = self._is_closed or self._is_parents
        self._state, self._turns = threading.Condition(), threading.Lock()
        self._patience = Patience(clock=self._clock, wait=self._wait)
        self._jobs, self._waiting = {}, {}
        self._thread = self._running = None


# ---- what an error means ---------------------------------------------------------------------------------------------

_NETWORK = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
    requests.exceptions.JSONDecodeError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    socket.gaierror,
)
# The disk of a volume, or a full one.
_PASSING_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EDQUOT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOSPC,
    errno.ENOTCONN,
    errno.ESTALE,
}
# Of clients of stores that need not be installed: Azure's, AWS's, Databricks'.
_PASSING_NAMES = {
    "DeadlineExceeded",
    "EndpointConnectionError",
    "InternalError",
    "ResourceExhausted",
    "ServiceRequestError",
    "ServiceResponseError",
    "TemporarilyUnavailable",
    "TooManyRequests",
}


def trouble_of(error: Exception) -> DoorError:
    """Return what the error of an upload means: `Refused` where to try again is of no use.

    Args:
        error: MLflow's, of the libraries below it, of the disk, or any other: that is refused.
    """
    reason = one_line(f"{type(error).__name__}: {error}")
    for each in _chain(error):
        if (trouble := _trouble_in(each, reason)) is not None:
            return trouble
    if isinstance(error, MlflowException):
        mlflow: Any = error  # its methods have no types
        return _judged(mlflow.get_http_status_code(), reason, {})
    return Refused(reason, blames_content=True)


def _trouble_in(error: BaseException, reason: str) -> DoorError | None:
    """Return what an error by itself tells of a server or of the way to it; None if it is of another kind."""
    if isinstance(error, DoorError):
        return error
    status, headers = _answer(error)
    if status is not None:
        return _judged(status, reason, headers)
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, requests.exceptions.RetryError) or names & _PASSING_NAMES:  # answered, with 429 or 5xx
        return Busy(reason)
    is_network = isinstance(error, _NETWORK) and not isinstance(error, urllib3.exceptions.LocationValueError)
    is_disk = isinstance(error, OSError) and error.errno in _PASSING_ERRNOS
    return Unreachable(reason) if is_network or is_disk else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it came from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _answer(error: BaseException) -> tuple[int | None, Mapping[str, str]]:
    """Return the HTTP status that an error tells of, and the answer's headers."""
    response = getattr(error, "response", None)
    if isinstance(response, requests.Response):
        return response.status_code, response.headers
    if isinstance(response, Mapping):  # botocore's
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = [getattr(error, "status_code", None), response, getattr(response, "status_code", None)]
    return next((status for status in found if isinstance(status, int)), None), {}


def _judged(status: int, reason: str, headers: Mapping[str, str]) -> DoorError:
    try:
        judge(status, reason, headers)
    except DoorError as error:
        return type(error)(reason, **vars(error))
    return Unreachable(reason)


def _bounded(seconds: float) -> float:
    return min(seconds, threading.TIMEOUT_MAX)


_backgrounds: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _after_fork() -> None:
    for background in list(_backgrounds):
        background.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
