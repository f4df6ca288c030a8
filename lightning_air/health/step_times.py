"""How long the optimizer steps took, in as many numbers as there are polls of the GPUs, however fast the steps are."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NONE = -(2**62)


@dataclass(frozen=True)
class StepWindow:
    """A copy of what is known of the steps.

    Attributes:
        start_seconds: Of the first column, in seconds since the epoch.
        column_seconds: What a column stands for.
        counts: How many steps ended in each column; shape (columns,).
        lowest: The shortest of them, in seconds; NaN where none ended.
        mean: Their mean, likewise.
        highest: The longest, likewise.
    """

    start_seconds: float
    column_seconds: float
    counts: npt.NDArray[np.int64]
    lowest: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    highest: npt.NDArray[np.float64]


class StepTimes:
    """A ring of columns of time, each with the number, the shortest, the mean and the longest of its steps.

    A step lasts from the end of the one before it: what was done between them (validation, a checkpoint, waiting for
    data) is part of it. `note` is for one thread and costs about a microsecond; any thread may call `window`.

    Args:
        num_columns: How many are kept.
        column_seconds: What each stands for.
        clock: Seconds, never going back.
        wall_clock: Seconds since the epoch, read once.
    """

    def __init__(
        self,
        num_columns: int,
        column_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._num_columns = num_columns
        self._column_seconds = column_seconds
        self._clock = clock
        self._epoch = wall_clock() - clock()
        self._lock = threading.Lock()
        # Which column of time a place holds, and its count, sum, lowest and highest.
        self._column_of = np.full(num_columns, _NONE, dtype=np.int64)
        self._figures = np.zeros((4, num_columns))
        self._last: float | None = None
        self._current = _NONE
        self._open = [0.0, 0.0, math.inf, 0.0]
        self.num_steps = 0

    def begin(self) -> None:
        """The next step has none before it: training begins, or goes on after a pause."""
        self._last = self._clock()

    def note(self) -> None:
        """A step has ended."""
        now = self._clock()
        last, self._last = self._last, now
        self.num_steps += 1
        if last is None:
            return
        seconds = now - last
        column = int((now + self._epoch) // self._column_seconds)
        with self._lock:
            if column != self._current:
                self._keep()
                self._current = column
                self._open = [0.0, 0.0, math.inf, 0.0]
            figures = self._open
            figures[0] += 1
            figures[1] += seconds
            figures[2] = min(figures[2], seconds)
            figures[3] = max(figures[3], seconds)

    def _keep(self) -> None:
        if self._current != _NONE:
            place = self._current % self._num_columns
            self._column_of[place] = self._current
            self._figures[:, place] = self._open

    def window(self) -> StepWindow | None:
        """Return a copy from the first to the last column with a step; None before the first step."""
        with self._lock:
            self._keep()
            current, column_of, figures = self._current, self._column_of.copy(), self._figures.copy()
        if current == _NONE:
            return None
        first = int(column_of[column_of > current - self._num_columns].min())
        wanted = np.arange(first, current + 1)
        places = wanted % self._num_columns
        is_kept = column_of[places] == wanted
        count, total, lowest, highest = np.where(is_kept, figures[:, places], [[0.0], [0.0], [math.nan], [math.nan]])
        with np.errstate(invalid="ignore"):
            mean = total / np.where(count > 0, count, math.nan)
        start = first * self._column_seconds
        return StepWindow(start, self._column_seconds, count.astype(np.int64), lowest, mean, highest)
