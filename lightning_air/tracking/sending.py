"""Bring points to the server, in order, whatever it takes: wait, try again, and find out which ones it refuses.

A point that the server refuses for its own sake is set aside, with the server's reason, and all others arrive. What is
refused for another reason (the credentials have run out, the run is deleted) is kept and tried again, as in an outage;
and where the reason is in doubt, for minutes, before it is set aside.
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
from lightning_air.tracking.set_aside import SetAside
from lightning_air.tracking.warn_once import Warn

MAX_REQUESTS_PER_SECOND = 40.0
"""The platform allows about 47 per workspace."""

REFUSED_TAG = f"{TAG_PREFIX}refused_points"
"""Of runs with points that the server refused."""

LONGEST_RETRY_AFTER_SECONDS = 300.0
REFUSED_RUN_PAUSE_SECONDS = 60.0
DOUBT_SECONDS = 300.0
"""A point is refused for longer than that, alone, before it is believed that a doubtful answer is about the point."""

_DOUBTFUL_TIMES = 8
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
        self._refusals = Refusals(clock)

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
            bad = self._refusals.bad_keys()
            points = [point for point in part if point.key not in bad] if bad else part
            halves = _halves(part, points)
            try:
                reason = self._reason_against(points) if points else None
            except TooLargeError:
                waiting += halves
                continue
            # Is it the points, or the run? Asked before a batch is taken apart, and again before a point is set aside:
            # meanwhile the run may have been deleted.
            if reason is not None and not (is_run_open and halves):
                if not self._is_run_open():
                    is_run_open = False
                    waiting.append(part)
                    continue
                is_run_open = True
            if reason is not None and halves:
                waiting += halves
                continue
            if reason is None:
                self._refusals.stored(points)
            else:
                self._refusals.refused(points[0], reason)
                bad[points[0].key] = reason
            outcome.set_aside += [SetAside(point, bad[point.key]) for point in part if point.key in bad]
            outcome.num_done += len(part)

    def _is_run_open(self) -> bool:
        """Return whether the run takes anything; if not, after a while. The tag is of use in itself."""
        reason = self._insist(self._tag_refused)
        if reason is not None:
            self._wait_for_run(reason)
        return reason is None

    def _tag_refused(self) -> None:
        self._keep_distance()
        self._door.set_tag(self._run_id, REFUSED_TAG, "true")

    def _reason_against(self, points: Sequence[Point]) -> str | None:
        """Return None once the server has stored the points, or why it refuses them."""
        return self._insist(
            lambda: self._request(points), can_split=len(points) > _SMALL_BATCH, is_alone=len(points) == 1
        )

    def _insist(self, call: Callable[[], object], *, can_split: bool = False, is_alone: bool = False) -> str | None:
        """Call until it succeeds, or is refused for what it carries; then return the reason.

        Raises:
            GaveUpError: If there is no more time.
            TooLargeError: If it may be, and the server fails at it or is too slow, again and again.
        """
        num_overtaxed = num_refused = 0
        begun_seconds = self._clock()
        for attempt in itertools.count():
            if self._patience.seconds_left <= 0:
                break
            try:
                call()
            except Refused as error:
                num_refused += 1
                seconds = self._clock() - begun_seconds
                is_sure = not error.is_doubtful or (num_refused >= _DOUBTFUL_TIMES and seconds >= DOUBT_SECONDS)
                if error.blames_content and (is_sure or not is_alone):
                    return str(error)
                self._outages.failed(error)
                # When all has to end: the door renews its credentials for the next request, and a gateway may start up.
                may_pass = num_refused == 1 or not error.is_mlflows
                if error.is_doubtful or (self._patience.is_ending and may_pass):
                    self._patience.back_off(attempt)
                else:
                    self._wait_for_run(str(error))
            except Exception as error:
                self._outages.failed(error)
                asked_seconds = error.retry_after_seconds if isinstance(error, Busy) else None
                num_overtaxed += isinstance(error, Busy | TooLate) and asked_seconds is None
                if can_split and num_overtaxed >= _OVERTAXED_TIMES:
                    raise TooLargeError from error
                self._patience.back_off(attempt, at_least_seconds=min(asked_seconds or 0, LONGEST_RETRY_AFTER_SECONDS))
            else:
                self._outages.succeeded()
                return None
        raise GaveUpError

    def _request(self, points: Sequence[Point]) -> None:
        self._keep_distance()
        left = self._patience.seconds_left
        timeout_seconds = next((seconds for seconds in _REQUEST_SECONDS if seconds <= left), _REQUEST_SECONDS[-1])
        started = self._clock()
        self.stats.num_requests += 1
        try:
            self._door.log_batch(self._run_id, points, timeout_seconds=timeout_seconds)
        finally:
            self.stats.request_seconds += self._clock() - started

    def _keep_distance(self) -> None:
        """Wait until the next request may begin."""
        if (seconds := self._next_request_seconds - self._clock()) > 0:
            self._patience.pause(seconds, is_firm=True)
        self._next_request_seconds = self._clock() + self._request_distance_seconds

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


def _halves(part: Sequence[Point], asked: Sequence[Point]) -> list[Sequence[Point]]:
    """Return a part in two, the latter first, each with half of the points that are asked about; none of a single one.

    Args:
        part: A part of a batch.
        asked: Those of its points that are sent, in their order.
    """
    if len(asked) < 2:  # noqa: PLR2004
        return []
    middle = len(asked) // 2
    if len(asked) == len(part):
        return [part[middle:], part[:middle]]
    keys = {point.key for point in asked}
    at = [index for index, point in enumerate(part) if point.key in keys][middle]
    return [part[at:], part[:at]]
