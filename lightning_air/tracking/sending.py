"""Bring points to the server, in order, whatever it takes: wait, try again, and find out which ones it refuses.

A point that the server refuses for its own sake is set aside, with the server's reason, and all others arrive. What is
refused for another reason (the credentials have run out, the run is deleted) is kept and tried again, as in an outage.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_air.tracking.batches import MAX_BYTES, MAX_POINTS, batches_of
from lightning_air.tracking.door import Door
from lightning_air.tracking.door_errors import Busy, DoorError, Refused
from lightning_air.tracking.patience import Patience
from lightning_air.tracking.points import Point
from lightning_air.tracking.rest_door import REQUEST_SECONDS
from lightning_air.tracking.spool_folder import SetAside
from lightning_air.tracking.warn_once import Warn

logger = logging.getLogger(__name__)

MAX_REQUESTS_PER_SECOND = 40.0
"""The platform allows about 47 per workspace."""

LONGEST_RETRY_AFTER_SECONDS = 300.0
REFUSED_RUN_PAUSE_SECONDS = 60.0
WARN_AFTER_SECONDS = 30.0
"""A shorter outage is nobody's concern."""

_REFUSALS_OF_A_KEY = 3
# Few different ones: the Databricks SDK keeps a client for each.
_REQUEST_SECONDS = (REQUEST_SECONDS, 10.0, 3.0, 1.0)


class GaveUpError(Exception):
    """The deadline is over, or waiting until it would be of no use."""


@dataclass
class Outcome:
    """What became of some points.

    Attributes:
        num_done: The first so many are acknowledged or set aside; the others are to be sent again.
        set_aside: Those of them that the server refuses.
    """

    num_done: int = 0
    set_aside: list[SetAside] = field(default_factory=list)


@dataclass
class SendingStats:
    """What sending has cost.

    Attributes:
        num_requests: Also those that failed.
        request_seconds: In requests.
        outage_seconds: From failed requests to the next acknowledgement.
        last_error: The last failure since an acknowledgement; None if all is well.
    """

    num_requests: int = 0
    request_seconds: float = 0.0
    outage_seconds: float = 0.0
    last_error: str | None = None


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
        self._outage_since_seconds: float | None = None
        self._refusals: dict[str, tuple[int, str]] = {}

    def send(self, points: Sequence[Point], *, before: Callable[[], object] = lambda: None) -> Outcome:
        """Send points until all are acknowledged or set aside, or the patience is at its end.

        Args:
            points: In the order in which the server is to get them.
            before: Called first. If it raises it is called again later; nothing is sent before it has returned.
        """
        outcome = Outcome()
        try:
            while (reason := self._insist(before)) is not None:
                self._wait_for_run(reason)
            for batch in batches_of(points, max_points=self._max_points, max_bytes=self._max_bytes):
                self._send_batch(batch, outcome)
        except GaveUpError:
            pass
        return outcome

    def _send_batch(self, batch: Sequence[Point], outcome: Outcome) -> None:
        """Send a batch; if it is refused its halves, and their halves, until the bad points are alone."""
        waiting = [batch]
        is_run_open = False
        while waiting:
            part = waiting.pop()
            # Of a name that it has refused again and again the server is not asked any more.
            asked = [index for index, point in enumerate(part) if not self._is_bad(point)]
            points = [part[index] for index in asked]
            reason = self._reason_against(points) if points else None
            if reason is not None and not is_run_open:
                of_run = self._reason_against([])
                if of_run is not None:
                    self._wait_for_run(of_run)
                    waiting.append(part)
                    continue
            is_run_open = is_run_open or bool(points)
            if len(points) > 1 and reason is not None:
                middle = asked[len(asked) // 2]
                waiting += [part[middle:], part[:middle]]
                continue
            for point in points:
                self._note(point, reason)
            refused = [point for point in part if reason is not None or self._is_bad(point)]
            outcome.set_aside += [SetAside(point, self._refusals[point.key][1]) for point in refused]
            outcome.num_done += len(part)

    def _is_bad(self, point: Point) -> bool:
        return bool(self._refusals) and self._refusals.get(point.key, (0, ""))[0] >= _REFUSALS_OF_A_KEY

    def _note(self, point: Point, reason: str | None) -> None:
        """Remember what the server says of the names of points."""
        if reason is not None:
            self._refusals[point.key] = self._refusals.get(point.key, (0, ""))[0] + 1, reason
        elif self._refusals:
            self._refusals.pop(point.key, None)

    def _reason_against(self, points: Sequence[Point]) -> str | None:
        """Return None once the server has stored the points, or why it refuses them."""
        return self._insist(lambda: self._request(points))

    def _insist(self, call: Callable[[], object]) -> str | None:
        """Call until it succeeds, or is refused for what it carries; then return the reason.

        Raises:
            GaveUpError: If there is no more time.
        """
        for attempt in itertools.count():
            if self._patience.seconds_left <= 0:
                break
            try:
                call()
            except Refused as error:
                if error.blames_content:
                    return str(error)
                self._failed(error)
                self._wait_for_run(str(error))
            except Busy as error:
                self._failed(error)
                if error.retry_after_seconds is None:
                    self._patience.back_off(attempt)
                else:
                    self._patience.pause(min(error.retry_after_seconds, LONGEST_RETRY_AFTER_SECONDS), is_firm=True)
            except Exception as error:  # noqa: BLE001 - unreachable, or a fault of ours: nothing is lost by waiting
                self._failed(error)
                self._patience.back_off(attempt)
            else:
                self._succeeded()
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

    def _failed(self, error: Exception) -> None:
        now = self._clock()
        self.stats.last_error = str(error) if isinstance(error, DoorError) else repr(error)
        if self._outage_since_seconds is None:
            self._outage_since_seconds = now
        elif now - self._outage_since_seconds >= WARN_AFTER_SECONDS:
            self._warn(
                "outage",
                f"The tracking server has taken no metrics for {now - self._outage_since_seconds:.0f} s "
                f"({self.stats.last_error}). They are kept on this machine and sent when it answers; training goes on.",
            )

    def _succeeded(self) -> None:
        self.stats.last_error = None
        if self._outage_since_seconds is not None:
            seconds = self._clock() - self._outage_since_seconds
            self._outage_since_seconds = None
            self.stats.outage_seconds += seconds
            logger.info("The tracking server takes metrics again, after %.1f s.", seconds)
