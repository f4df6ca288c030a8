"""Agree on when to save, without a word between the ranks on most steps.

Steps and epochs are the same everywhere; time is not. Rank 0's clock decides, and tells the others at steps that all of
them know: the next one is when half of the time that is left should have passed, and never more than a minute away.
"""

from collections.abc import Callable
from typing import Any

from lightning_air.checkpoint.cadence import Schedule

LONGEST_SILENCE_SECONDS = 60.0


class SharedSchedule:
    """A schedule that all ranks follow together. Every rank asks it after each optimizer step.

    Args:
        schedule: Rank 0's counts where time decides.
        broadcast: Gives rank 0's value to every rank.
        clock: The time in seconds.
    """

    def __init__(self, schedule: Schedule, broadcast: Callable[[Any], Any], clock: Callable[[], float]) -> None:
        self.schedule = schedule
        self._broadcast = broadcast
        self._clock = clock
        self._last_step = self._next_step = 0
        self._last_seconds = 0.0

    def start(self, step: int) -> None:
        """Begin when training starts or resumes."""
        self.schedule.start(step)
        self._listen_again(step)

    def is_due(self, step: int, *, epoch_end: bool = False) -> bool:
        """Return whether to save now, the same on every rank. Collective at the steps that all ranks know."""
        is_due = self.schedule.is_due(step, epoch_end=epoch_end)
        if self.schedule.interval_seconds is None:
            return is_due
        if step < self._next_step:
            return False
        seconds_left = 0.0 if is_due else self.schedule.seconds_left()
        per_step = (self._clock() - self._last_seconds) / max(1, step - self._last_step)
        silence = min(seconds_left / 2, LONGEST_SILENCE_SECONDS)
        num_steps = max(1, int(silence / per_step)) if per_step > 0 else 1
        told: tuple[bool, int] = self._broadcast((is_due, num_steps))
        is_due, num_steps = told
        self._last_step, self._last_seconds = step, self._clock()
        self._next_step = step + num_steps
        return is_due

    def record_save(self, step: int) -> None:
        """Note that a save was begun."""
        self.schedule.record_save(step)
        self._listen_again(step)

    def _listen_again(self, step: int) -> None:
        self._last_step, self._last_seconds = step, self._clock()
        self._next_step = step + 1
