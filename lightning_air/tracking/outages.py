"""How long the server has been away, and when to say so."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_air.tracking.door_errors import DoorError
from lightning_air.tracking.warn_once import Warn

logger = logging.getLogger(__name__)

WARN_AFTER_SECONDS = 30.0
"""A shorter outage is nobody's concern."""

_SAY_AGAIN_SECONDS = 3600.0  # after the last failure of one that was said


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


class Outages:
    """Notes failures and acknowledgements. One thread's.

    Args:
        stats: It keeps the outages there.
        warn: Told of an outage that is long.
        clock: The time in seconds.
    """

    def __init__(self, stats: SendingStats, warn: Warn, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._warn = warn
        self._clock = clock
        self._since_seconds: float | None = None
        self._num_times_said, self._said_seconds = 0, -math.inf

    def failed(self, error: Exception) -> None:
        """Note that a request was not acknowledged."""
        now = self._clock()
        self._stats.last_error = str(error) if isinstance(error, DoorError) else repr(error)
        if self._since_seconds is None:
            self._since_seconds = now
        elif now - self._since_seconds >= WARN_AFTER_SECONDS:
            self._num_times_said += now - self._said_seconds > _SAY_AGAIN_SECONDS
            self._said_seconds = now
            self._warn(
                f"outage {self._num_times_said}",
                f"The tracking server has taken no metrics for {now - self._since_seconds:.0f} s "
                f"({self._stats.last_error}). They are kept on this machine and sent when it does; training goes on.",
            )

    def succeeded(self) -> None:
        """Note that a request was acknowledged."""
        self._stats.last_error = None
        if self._since_seconds is not None:
            seconds = self._clock() - self._since_seconds
            self._since_seconds = None
            self._stats.outage_seconds += seconds
            logger.info("The tracking server takes metrics again, after %.1f s.", seconds)
