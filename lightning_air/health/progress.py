"""Where the loop of this rank is, and since when: marked by its hooks, read by a thread that watches for it to stop.

A mark costs a microsecond: one clock, one assignment. What a step usually takes is the median of the last ones, so the
run itself says what is long.
"""

import statistics
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["training", "evaluation", "pause"]

_NUM_KEPT = 101
# Before, a step may compile, allocate, or start workers.
_FIRST_STEPS = 3


class Mark(NamedTuple):
    """A point that the loop has passed.

    Attributes:
        number: How many it has passed before.
        seconds: When, by the clock of the `Progress`.
        kind: What a stop is measured by: batches of training or of evaluation, or something that takes its time once.
        where: In words, such as "in training batch 7".
        num_batches: Training batches that have ended.
    """

    number: int
    seconds: float
    kind: Kind
    where: str
    num_batches: int


class Progress:
    """The marks of one rank. Written by the thread that runs the loop, read by any.

    Args:
        clock: Seconds that do not jump.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.mark = Mark(0, clock(), "pause", "before the first hook", 0)
        self._steps = {"training": _Durations(), "evaluation": _Durations()}

    def pause(self, where: str) -> None:
        """Mark the beginning of something that takes its time: a checkpoint, the start of a validation, of an epoch."""
        before = self.mark
        self.mark = Mark(before.number + 1, self._clock(), "pause", where, before.num_batches)

    def batch_start(self, kind: Literal["training", "evaluation"], batch_idx: int) -> None:
        """Mark the beginning of a batch."""
        before = self.mark
        self.mark = Mark(before.number + 1, self._clock(), kind, f"in {kind} batch {batch_idx}", before.num_batches)

    def batch_end(self, kind: Literal["training", "evaluation"], batch_idx: int) -> None:
        """Mark the end of a batch: what follows is the wait for the next one."""
        before, now = self.mark, self._clock()
        self._steps[kind].add(now - before.seconds)
        num_batches = before.num_batches + (kind == "training")
        self.mark = Mark(before.number + 1, now, kind, f"after {kind} batch {batch_idx}", num_batches)

    @property
    def seconds_since(self) -> float:
        """How long ago the last mark was."""
        return self._clock() - self.mark.seconds

    def usual_seconds(self, kind: Kind) -> float | None:
        """Return the median of the last batches of a kind; None while there were too few, or for a pause."""
        durations = self._steps.get(kind)
        return durations.median() if durations is not None and durations.num >= _FIRST_STEPS else None


class _Durations:
    """The last ones, in a list of fixed length: another thread may copy it at any time."""

    def __init__(self) -> None:
        self.num = 0
        self._seconds = [0.0] * _NUM_KEPT

    def add(self, seconds: float) -> None:
        self._seconds[self.num % _NUM_KEPT] = seconds
        self.num += 1

    def median(self) -> float:
        return statistics.median(self._seconds[:] if self.num >= _NUM_KEPT else self._seconds[: self.num])
