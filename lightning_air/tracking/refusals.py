"""Which names of metrics the server refuses, so that it is not asked about them again and again."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_air.tracking.points import Point

ASK_AGAIN_SECONDS = 600.0

_TIMES = 3
_LONGEST_DOUBLINGS = 6  # 10 minutes to 10 hours


@dataclass(frozen=True)
class _Refusal:
    num_times: int
    reason: str
    ask_again_at_seconds: float


class Refusals:
    """Remembers why points were refused, by their names.

    A name is bad once that happened three times in a row. Now and then, ever more seldom, it is asked about all the
    same: what was refused may have been the server's fault.

    Args:
        clock: The time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_key: dict[str, _Refusal] = {}

    def bad_keys(self) -> dict[str, str]:
        """Return the names that there is no use in asking about now, each with the reason it was refused for last."""
        if not self._by_key:
            return {}
        now = self._clock()
        return {
            key: refusal.reason
            for key, refusal in self._by_key.items()
            if refusal.num_times >= _TIMES and now < refusal.ask_again_at_seconds
        }

    def refused(self, point: Point, reason: str) -> None:
        """Note that a point was refused alone."""
        before = self._by_key.get(point.key)
        num_times = 1 if before is None else before.num_times + 1
        doublings = min(max(0, num_times - _TIMES), _LONGEST_DOUBLINGS)
        self._by_key[point.key] = _Refusal(num_times, reason, self._clock() + ASK_AGAIN_SECONDS * 2**doublings)

    def stored(self, points: Iterable[Point]) -> None:
        """Note that points were stored."""
        if self._by_key:
            for point in points:
                self._by_key.pop(point.key, None)
