"""How long the writer may go on trying, and its pauses, which whoever waits for it cuts short."""

import math
import random
import threading
import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0

_SLICE_SECONDS = 0.2

Wait = Callable[[threading.Event, float], object]
"""Waits so many seconds, less if the event is set meanwhile."""


def backoff_seconds(attempt: int, chance: float) -> float:
    """Return how long to pause after a failed attempt: twice as long each time, less up to half of it by chance.

    Args:
        attempt: Counts from 0.
        chance: From 0 to 1, so that the nodes of a cluster do not come back together.
    """
    doubled = FIRST_PAUSE_SECONDS * 2.0 ** min(attempt, 64)
    return min(doubled, LONGEST_PAUSE_SECONDS) * (1 - chance / 2)


class Patience:
    """The time that the writer has: without end while training goes on, and then until a deadline.

    Args:
        idle: Called several times a second during pauses.
        clock: The time in seconds.
        wait: Sleeps.
        chance: From 0 to 1.

    Attributes:
        is_ending: Whether `end_in` was called.
    """

    def __init__(
        self,
        *,
        idle: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Event.wait,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._idle = idle
        self._clock = clock
        self._wait = wait
        self._chance = chance
        self._woken = threading.Event()
        self._deadline_seconds = math.inf
        self.is_ending = False

    @property
    def seconds_left(self) -> float:
        """Infinite while there is no deadline; not above 0 once it is over."""
        return self._deadline_seconds - self._clock()

    def wake(self) -> None:
        """End a pause, so that what was paused is tried now; any thread's."""
        self._woken.set()

    def end_in(self, seconds: float) -> None:
        """Set a deadline, or bring it forward; an infinite one still says that what fails for good need not wait."""
        self._deadline_seconds = min(self._deadline_seconds, self._clock() + seconds)
        self.is_ending = True
        self._woken.set()

    def pause(self, seconds: float, *, is_firm: bool = False) -> None:
        """Sleep, but not beyond the deadline.

        Args:
            seconds: How long.
            is_firm: Do not let `wake` end it: a server has asked for it.
        """
        until_seconds = self._clock() + seconds
        while (left := min(until_seconds - self._clock(), self.seconds_left)) > 0:
            self._wait(self._woken, min(left, _SLICE_SECONDS))
            self._idle()
            if self._woken.is_set():
                self._woken.clear()
                if not is_firm:
                    return

    def back_off(self, attempt: int, *, at_least_seconds: float = 0.0) -> None:
        """Pause after a failed attempt, counted from 0.

        Args:
            attempt: Which.
            at_least_seconds: A server has asked for that. It may ask for none at all, or for a date that is past.
        """
        self.pause(at_least_seconds, is_firm=True)
        self.pause(backoff_seconds(attempt, self._chance()) - at_least_seconds)
