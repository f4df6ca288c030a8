"""Try again what may pass, wait for what may still appear, and give up in time.

All the tries of one piece of work share one `Patience`: a deadline that no pause reaches beyond, and an event that
ends every pause at once. What cannot get better by waiting (no space, no permission, nothing there) is never tried
again.
"""

import errno
import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Sleep = Callable[[threading.Event, float], object]
"""Waits so many seconds, less if the event is set meanwhile."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0

_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,  # "slow down", HTTP 429
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,  # also a server's own errors, HTTP 5xx
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,  # a FUSE mount whose daemon is being restarted
    errno.ENOTEMPTY,  # a folder that was listed too early to be emptied
    errno.ESTALE,
}


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed a little later."""
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and error.errno in _TRANSIENT
    )


def backoff_seconds(
    attempt: int,
    chance: float,
    *,
    first_seconds: float = FIRST_PAUSE_SECONDS,
    longest_seconds: float = LONGEST_PAUSE_SECONDS,
) -> float:
    """Return how long to pause after a failed attempt: twice as long each time, less up to half of it by chance.

    Args:
        attempt: Counts from 0.
        chance: From 0 to 1, so that workers that failed together do not come back together.
        first_seconds: The pause after attempt 0.
        longest_seconds: No pause is longer.
    """
    doubled = first_seconds * 2.0 ** min(attempt, 64)
    return min(doubled, longest_seconds) * (1 - chance / 2)


class Patience:
    """How long one piece of work may still take, shared by all threads that do it.

    Attributes:
        cancelled: Set it to end the pauses of all threads; no further try follows.
        num_retries: How often something was tried again.
    """

    def __init__(
        self,
        deadline_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = threading.Event.wait,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if not deadline_seconds > 0 or math.isinf(deadline_seconds):
            raise ValueError(f"deadline_seconds must be a positive number of seconds, got {deadline_seconds!r}.")
        self.cancelled = threading.Event()
        self.num_retries = 0
        self.deadline_seconds = deadline_seconds
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._begun = clock()
        self._lock = threading.Lock()

    @property
    def elapsed_seconds(self) -> float:
        """How long the work has taken so far."""
        return self._clock() - self._begun

    @property
    def remaining_seconds(self) -> float:
        """How long the work may still take; negative once the deadline is over."""
        return self.deadline_seconds - self.elapsed_seconds

    def pause(
        self,
        attempt: int,
        *,
        first_seconds: float = FIRST_PAUSE_SECONDS,
        longest_seconds: float = LONGEST_PAUSE_SECONDS,
    ) -> bool:
        """Sleep as `backoff_seconds` says, and return whether there is time for another try.

        No pause takes more than half of the time that is left. Returns False, without sleeping, once that half is
        shorter than any first pause.
        """
        wanted = backoff_seconds(attempt, self._chance(), first_seconds=first_seconds, longest_seconds=longest_seconds)
        seconds = min(wanted, self.remaining_seconds / 2)
        if self.cancelled.is_set() or seconds < min(first_seconds, longest_seconds) / 2:
            return False
        self._sleep(self.cancelled, seconds)
        return not self.cancelled.is_set() and self.remaining_seconds > 0

    def count_retry(self) -> None:
        """Count one more try of something that had failed."""
        with self._lock:
            self.num_retries += 1


def retry(call: Callable[[], T], patience: Patience) -> T:
    """Call until it succeeds, fails for good, or the patience is at its end; then its last error is raised."""
    for attempt in itertools.count():
        try:
            return call()
        except OSError as error:
            if not is_transient(error) or not patience.pause(attempt):
                raise
            patience.count_retry()
    raise AssertionError("unreachable")
