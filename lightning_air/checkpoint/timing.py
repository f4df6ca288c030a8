"""Agree on when to save, without a word between the ranks on most steps.

Steps and epochs are the same everywhere; time is not. Rank 0's clock decides, and tells the others at steps that all of
them know: the next one is when half of the time that is left should have passed. How long steps take is known of the
past only, so it is never more steps away than were counted since the one before, doubled, and never more than
`MAX_SILENT_STEPS`.
"""

from collections.abc import Callable
from typing import Any

from lightning_air.checkpoint.cadence import Schedule, auto_interval

# However fast the steps were: those to come may be slow (launches that only queue work on a GPU take milliseconds until
# the first one that does not), and a save is late by as many.
MAX_SILENT_STEPS = 100
# How soon to ask again whether an upload has ended that a save waits for.
_HELD_SECONDS = 1.0
# By how much an interval has to change for the user to be told.
_WORTH_TELLING = 1.25


class SharedSchedule:
    """A schedule that all ranks follow together. Every rank asks it after each batch.

    It answers once for each optimizer step: within gradient accumulation nothing is due, since no checkpoint holds the
    gradients.

    Args:
        schedule: Rank 0's counts where time decides.
        broadcast: Gives rank 0's value to every rank.
        clock: The time in seconds.
    """

    def __init__(self, schedule: Schedule, broadcast: Callable[[Any], Any], clock: Callable[[], float]) -> None:
        self._schedule = schedule
        self._broadcast = broadcast
        self._clock = clock
        self._last_step = self._next_step = self._silent_steps = 0
        self._last_seconds = 0.0
        self._told_seconds: float | None = None

    def start(self, step: int) -> None:
        """Begin when training starts or resumes."""
        now = self._clock()
        self._schedule.start(step, now)
        self._listen_again(step, now)

    def is_due(self, step: int, *, epoch_end: bool = False, is_saving: bool = False) -> bool:
        """Return whether to save now, the same on every rank. Collective at the steps that all ranks know.

        Args:
            step: The optimizer steps done.
            epoch_end: Whether they end an epoch.
            is_saving: Whether a save is under way, which one that is due by "auto" does not wait for: it comes later.
                Rank 0's counts.
        """
        now = self._clock()
        is_due = self._schedule.is_due(step, epoch_end=epoch_end, now=now)
        if self._schedule.interval_seconds is None:
            return is_due
        if step < self._next_step:
            return False
        seconds_left = self._schedule.seconds_left(now)
        if is_due and is_saving and self._schedule.every.unit == "auto":
            is_due, seconds_left = False, _HELD_SECONDS
        is_due, num_steps = self._broadcast((is_due, self._steps_until(seconds_left / 2, step, now)))
        self._last_step, self._last_seconds = step, now
        self._next_step, self._silent_steps = step + num_steps, num_steps
        return bool(is_due)

    def record_save(self, step: int) -> None:
        """Note that a save was begun."""
        now = self._clock()
        self._schedule.record_save(step, now)
        self._listen_again(step, now)

    def measure(
        self, *, blocking_seconds: float, upload_seconds: float, num_gpus: int, failures_per_gpu_day: float
    ) -> str | None:
        """Choose the interval of "auto" by what a save took. Rank 0's counts.

        Args:
            blocking_seconds: As for `auto_interval`; so are the others.
            upload_seconds: See there.
            num_gpus: See there.
            failures_per_gpu_day: See there.

        Returns:
            The interval and its reasons, if it is another than was told before by a quarter or more.
        """
        choice = auto_interval(
            blocking_seconds=blocking_seconds,
            upload_seconds=upload_seconds,
            num_gpus=num_gpus,
            failures_per_gpu_day=failures_per_gpu_day,
        )
        self._schedule.retime(choice.seconds)
        if self._told_seconds is not None and 1 / _WORTH_TELLING < choice.seconds / self._told_seconds < _WORTH_TELLING:
            return None
        self._told_seconds = choice.seconds
        return choice.reason

    def _steps_until(self, seconds: float, step: int, now: float) -> int:
        """Return in how many steps so much time should have passed."""
        per_step = (now - self._last_seconds) / max(1, step - self._last_step)
        most = min(2 * self._silent_steps, MAX_SILENT_STEPS)
        return max(1, int(min(seconds / per_step, most))) if per_step > 0 else most

    def _listen_again(self, step: int, now: float) -> None:
        self._last_step, self._last_seconds = step, now
        self._next_step, self._silent_steps = step + 1, 1
