"""Bring points to the server, in order, whatever it takes: wait, try again, and find out which ones it refuses.

A point that the server refuses for its own sake is set aside, with the server's reason, and all others arrive. What is
refused for another reason (the credentials have run out, the run is deleted) is kept and tried again, as in an outage.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_air.tracking.batches import MAX_BYTES, MAX_POINTS, batches_of
from lightning_air.tracking.door import Door
from lightning_air.tracking.door_errors import Busy, Refused, TooLate
from lightning_air.tracking.outages import Outages, SendingStats
from lightning_air.tracking.patience import Patience
from lightning_air.tracking.points import Point
from lightning_air.tracking.refusals import Refusals
from lightning_air.tracking.rest_door import REQUEST_SECONDS
from lightning_air.tracking.run_tags import TAG_PREFIX
from lightning_air.tracking.spool_folder import SetAside
from lightning_air.tracking.warn_once import Warn

MAX_REQUESTS_PER_SECOND = 40.0
"""The platform allows about 47 per workspace."""

REFUSED_TAG = f"{TAG_PREFIX}refused_points"
"""Of runs with points that the server refused."""

LONGEST_RETRY_AFTER_SECONDS = 300.0
REFUSED_RUN_PAUSE_SECONDS = 60.0
# A batch that is stored already takes a server many times as long. So one that it finished too late would never be
# acknowledged; its halves will.
_OVERTAXED_TIMES = 2
_SMALL_BATCH = 25
# Few different ones: the Databricks SDK keeps a client for each.
_REQUEST_SECONDS = (REQUEST_SECONDS, 10.0, 3.0, 1.0)


class GaveUpError(Exception):
    """The deadline is over, or waiting until it would be of no use."""


class TooLargeError(Exception):
    """A batch may be more than the server can do at once."""


@dataclass
class Outcome:
    """What became of some points.

    Attributes:
        num_done: The first so many are acknowledged or set aside; the others are to be sent again.
        set_aside: Those of them that the server refuses.
        num_cut: The last so many may not be sent.
    """

    num_done: int = 0
    num_cut: int = 0
    set_aside: list[SetAside] = field(default_factory=list)


class Sender:
    """Sends the points of one run. One thread's.

    Args:
        door: To the server.
        run_id: MLflow's.
        patience: How long it may try.
        warn: Told of outages and refusals.
        max_requests_per_second: It keeps this distance.
        clock: The time in seconds.

    Attributes:
        stats: What it has cost so far.
    """

    def __init__(
        self,
        door: Door,
        run_id: str,
        *,
        patience: Patience,
        warn: Warn,
        max_requests_per_second: float = MAX_REQUESTS_PER_SECOND,
        max_points: int = MAX_POINTS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = SendingStats()
        self._door = door
        self._run_id = run_id
        self._patience = patience
        self._warn = warn
        self._request_distance_seconds = 1 / max_requests_per_second
        self._max_points, self._max_bytes = max_points, max_bytes
        self._clock = clock
        self._next_request_seconds = clock()
        self._outages = Outages(self.stats, warn, clock)
        self._refusals = Refusals()

    def send(self, points: Sequence[Point], *, before: Callable[[], int] | None = None) -> Outcome:
        """Send points until all are acknowledged or set aside, or the patience is at its end.

        Args:
            points: In the order in which the server is to get them.
            before: Called first, and returns how many of them may be sent; None for all of them. If it raises it is
                called again later; nothing is sent before it has returned.
        """
        outcome = Outcome()
        try:
            num_allowed = len(points) if before is None else self._ask(before)
            outcome.num_cut = max(0, len(points) - max(0, num_allowed))
            allowed = points[: len(points) - outcome.num_cut]
            for batch in batches_of(allowed, max_points=self._max_points, max_bytes=self._max_bytes):
                self._send_batch(batch, outcome)
        except GaveUpError:
            pass
        return outcome

    def _ask(self, before: Callable[[], int]) -> int:
        answers: list[int] = []
        while (reason := self._insist(lambda: answers.append(before()))) is not None:
            self._wait_for_run(reason)
        return answers[-1]

    def _send_batch(self, batch: Sequence[Point], outcome: Outcome) -> None:
        """Send a batch; if it is refused its halves, and their halves, until the bad points are alone."""
        waiting = [batch]
        is_run_open = False
        while waiting:
            part = waiting.pop()
            asked = [index for index, point in enumerate(part) if not self._refusals.is_bad(point)]
            points = [part[index] for index in asked]
            halves = [part[asked[len(asked) // 2] :], part[: asked[len(asked) // 2]]] if len(asked) > 1 else []
            try:
                reason = self._reason_against(points) if points else None
            except TooLargeError:
                waiting += halves
                continue
            if reason is not None and not is_run_open:
                # Is it the points, or the run? A tag that says that points were refused tells, and is worth having.
                of_run = self._insist(lambda: self._door.set_tag(self._run_id, REFUSED_TAG, "true"))
                if of_run is not None:
                    self._wait_for_run(of_run)
                    waiting.append(part)
                    continue
            is_run_open = is_run_open or bool(points)
            if reason is not None and halves:
                waiting += halves
                continue
            if reason is not None:
                self._refusals.refused(points[0], reason)
            else:
                self._refusals.stored(points)
            refused = [point for point in part if reason is not None or self._refusals.is_bad(point)]
            outcome.set_aside += [SetAside(point, self._refusals.reason(point)) for point in refused]
            outcome.num_done += len(part)

    def _reason_against(self, points: Sequence[Point]) -> str | None:
        """Return None once the server has stored the points, or why it refuses them."""
        return self._insist(lambda: self._request(points), can_split=len(points) > _SMALL_BATCH)

    def _insist(self, call: Callable[[], object], *, can_split: bool = False) -> str | None:
        """Call until it succeeds, or is refused for what it carries; then return the reason.

        Raises:
            GaveUpError: If there is no more time.
            TooLargeError: If it may be, and the server fails at it or is too slow, again and again.
        """
        num_overtaxed = 0
        for attempt in itertools.count():
            if self._patience.seconds_left <= 0:
                break
            try:
                call()
            except Refused as error:
                if error.blames_content:
                    return str(error)
                self._outages.failed(error)
                self._wait_for_run(str(error))
            except Exception as error:
                self._outages.failed(error)
                retry_after_seconds = error.retry_after_seconds if isinstance(error, Busy) else None
                num_overtaxed += isinstance(error, Busy | TooLate) and retry_after_seconds is None
                if can_split and num_overtaxed >= _OVERTAXED_TIMES:
                    raise TooLargeError from error
                if retry_after_seconds is None:
                    self._patience.back_off(attempt)
                else:
                    self._patience.pause(min(retry_after_seconds, LONGEST_RETRY_AFTER_SECONDS), is_firm=True)
            else:
                self._outages.succeeded()
                return None
        raise GaveUpError

    def _request(self, points: Sequence[Point]) -> None:
        if (seconds := self._next_request_seconds - self._clock()) > 0:
            self._patience.pause(seconds, is_firm=True)
        left = self._patience.seconds_left
        timeout_seconds = next((seconds for seconds in _REQUEST_SECONDS if seconds <= left), _REQUEST_SECONDS[-1])
        started = self._clock()
        self._next_request_seconds = started + self._request_distance_seconds
        self.stats.num_requests += 1
        try:
            self._door.log_batch(self._run_id, points, timeout_seconds=timeout_seconds)
        finally:
            self.stats.request_seconds += self._clock() - started

    def _wait_for_run(self, reason: str) -> None:
        """Wait until what has nothing to do with the points may have changed; when all has to end, give up."""
        self.stats.last_error = reason
        self._warn(
            "refused",
            f"The tracking server does not let run {self._run_id} be written: {reason}. Metrics are kept on this "
            "machine and tried again every minute; log in again, or restore the run.",
        )
        if self._patience.is_ending:
            raise GaveUpError
        self._patience.pause(REFUSED_RUN_PAUSE_SECONDS)
