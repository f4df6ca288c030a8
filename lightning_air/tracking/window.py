"""One metric's window of steps: sums of the values logged in it, from which its points are made."""

import sys
from typing import Any, Literal, NamedTuple

Aggregate = Literal["mean", "min", "max", "last"]

SCALE = 2.0**-32
"""Of a window's sum: that of 2**32 finite values is finite too. A power of two, so it costs no digit above 1e-298."""


class Event(NamedTuple):
    """A value that is not finite.

    Attributes:
        key: The metric's name as it was logged.
        step: On the horizontal axis.
        timestamp_ms: Milliseconds since 1970.
        value: "nan", "inf" or "-inf".
    """

    key: str
    step: int
    timestamp_ms: int
    value: str


class Window:
    """One metric and its window; empty if nothing was logged since the last one closed.

    Attributes:
        key: The metric's name as it was logged.
        end: The first step beyond the window.
        step: The last one logged.
        timestamp_ms: When that was.
        count: How many finite values it holds.
        total: Their sum, times `SCALE`.
        low: The least of them.
        high: The greatest of them.
        last: The last of them.
        num_nonfinite: How many others it holds.
        num_events: How many others there were in all windows.
        is_active: Whether the metric counts in the plan.
    """

    __slots__ = (
        "count",
        "end",
        "high",
        "is_active",
        "key",
        "last",
        "low",
        "num_events",
        "num_nonfinite",
        "step",
        "timestamp_ms",
        "total",
    )

    def __init__(self, key: str, step: int) -> None:
        self.key = key
        self.end = self.step = step
        self.timestamp_ms = self.count = self.num_nonfinite = self.num_events = 0
        self.total = self.last = 0.0
        self.low, self.high = float("inf"), float("-inf")
        self.is_active = True

    @property
    def num_values(self) -> int:
        """How many values it holds."""
        return self.count + self.num_nonfinite

    def aggregate(self, aggregate: Aggregate) -> float:
        """Return an aggregate of the finite values; there must be one."""
        if aggregate == "mean":
            if self.count == 1:
                return self.last
            mean = self.total / self.count / SCALE
            # The mean of the very largest numbers may be rounded up to infinity. A point is finite.
            return max(-sys.float_info.max, min(mean, sys.float_info.max))
        if aggregate == "min":
            return self.low
        return self.high if aggregate == "max" else self.last

    def empty(self) -> None:
        """Forget what is in it, and close it."""
        self.end = self.step
        self.count = self.num_nonfinite = 0
        self.total = 0.0
        self.low, self.high = float("inf"), float("-inf")

    def snapshot(self) -> list[Any]:
        """Return its state, as JSON can have it."""
        state = [self.step, self.timestamp_ms, self.num_events, int(self.is_active)]
        if self.num_values:
            sums = [repr(number) for number in (self.total, self.low, self.high, self.last)]
            return [*state, self.end, self.count, self.num_nonfinite, *sums]
        return state

    def restore(self, state: list[Any]) -> None:
        """Take over a state."""
        self.step, self.timestamp_ms, self.num_events = state[:3]
        self.is_active = bool(state[3])
        self.end = self.step
        if len(state) > 4:  # noqa: PLR2004
            self.end, self.count, self.num_nonfinite = state[4:7]
            self.total, self.low, self.high, self.last = (float(number) for number in state[7:])
