"""When to save: every so much time, so many steps or epochs, or as often as pays off.

An answer follows from what is passed in: the step, the end of an epoch, the time. Saves are due on a grid, counted from
the start of training (time) or from the first step or epoch of the run, so a cadence never drifts. After a save that
took longer than the cadence one save follows, not all that were missed.

Steps and epochs are due at the same call on every rank. Clocks differ: where time decides, one rank asks and the others
do as it says.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

EveryUnit = Literal["seconds", "steps", "epochs", "auto"]

DAY_SECONDS = 86_400.0
LONGEST = timedelta(days=365)

# Llama Team, "The Llama 3 Herd of Models", 2024: 419 unexpected interruptions of the 405B run in 54 days on
# 16,384 GPUs. One GPU ends a run every 2,112 days.
FAILURES_PER_GPU_DAY = 419 / (54 * 16_384)
# On a few GPUs that would be one interruption in a year. But GPUs are not all that ends a run: a preemption, the user's
# own bug, a run on AI Runtime after 7 days at the latest. So expect one in that time, however few GPUs there are.
MAX_DAYS_BETWEEN_FAILURES = 7.0
MAX_AUTO_SECONDS = 3600.0
# A save costs more than the time that training waits: files, requests, and the processor in the background. Counted as
# nothing, a model that is copied in no time would be saved all the time.
MIN_COST_SECONDS = 0.01
# Until something has been measured. Early, because a measurement is what it is for.
FIRST_AUTO_SECONDS = 300.0

EXAMPLES = "Write '30min', '90s', '1h30min', '500steps', '2epochs' or 'auto'."
_UNIT_SECONDS = {"d": DAY_SECONDS, "h": 3600.0, "min": 60.0, "s": 1.0}
_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)"
# Each unit once, the largest first: "30min1h" is more likely a slip than a wish.
_DURATION = re.compile(
    rf"(?:{_NUMBER} ?d(?:ays?)?)? ?(?:{_NUMBER} ?h(?:ours?)?)? ?"
    rf"(?:{_NUMBER} ?m(?:in(?:ute)?s?)?)? ?(?:{_NUMBER} ?s(?:ec(?:ond)?s?)?)?",
    re.ASCII,
)
_COUNT = re.compile(r"(\d{1,15}) ?(step|epoch)s?", re.ASCII)


@dataclass(frozen=True)
class Every:
    """A cadence, as `parse_every` read it. `str(every)` can be parsed again.

    Attributes:
        unit: What is counted; "auto" is seconds that `auto_interval` chooses.
        count: How many; a whole number of steps or epochs, and 0 for "auto".
    """

    unit: EveryUnit
    count: float = 0

    def __str__(self) -> str:
        if self.unit == "auto":
            return "auto"
        if self.unit == "seconds":
            return _duration(self.count)
        return f"{self.count:.0f}{self.unit[:-1] if self.count == 1 else self.unit}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The interval that `auto_interval` chose, and why.

    Attributes:
        seconds: From one save to the next.
        optimum_seconds: What it would be without bounds.
        days_between_failures: What was assumed.
        reason: One line that names every figure used.
    """

    seconds: float
    optimum_seconds: float
    days_between_failures: float
    reason: str


def parse_every(value: object) -> Every:
    """Return the cadence that a text or a duration stands for; case and spaces do not matter.

    Args:
        value: Days, hours, minutes and seconds ("30min", "1h30min", "1.5 h"), steps ("500steps"), epochs ("1epoch"), or
            "auto"; or a `timedelta`.

    Raises:
        ValueError: If it is anything else, a number without a unit, zero, negative or longer than a year.
    """
    if isinstance(value, timedelta):
        return _seconds(value.total_seconds(), value)
    if not isinstance(value, str):
        of_what = " A number alone does not say of what." if isinstance(value, int | float) else ""
        raise ValueError(f"every must be a text or a timedelta, got {value!r}.{of_what} {EXAMPLES}")  # noqa: TRY004
    text = " ".join(value.lower().split())
    if text == "auto":
        return Every("auto")
    if count := _COUNT.fullmatch(text):
        number = int(count[1])
        if number == 0:
            raise ValueError(f"every must be at least 1{count[2]}, got {value!r}. {EXAMPLES}")
        return Every("steps" if count[2] == "step" else "epochs", number)
    parts = _DURATION.fullmatch(text)
    if parts is None or not any(parts.groups()):
        raise ValueError(f"every must be a duration, a number of steps or epochs, or 'auto', got {value!r}. {EXAMPLES}")
    amounts = zip(parts.groups(), _UNIT_SECONDS.values(), strict=True)
    return _seconds(sum(float(amount) * seconds for amount, seconds in amounts if amount), value)


def _seconds(seconds: float, value: str | timedelta) -> Every:
    if not 0 < seconds <= LONGEST.total_seconds():
        raise ValueError(f"every must be longer than zero and at most {LONGEST.days} days, got {value!r}. {EXAMPLES}")
    return Every("seconds", seconds)


def auto_interval(
    *,
    blocking_seconds: float,
    upload_seconds: float,
    num_gpus: int,
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY,
) -> Choice:
    """Return how often to save so that saving and repeating lost work together cost the least.

    The optimum is `sqrt(2 * cost * time between failures)` from one save to the next, to first order (J. W. Young, "A
    first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher order
    estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006). Only the blocking time is a cost:
    training goes on during an upload, and the work that a failure in it loses is the same for every interval.

    Args:
        blocking_seconds: How long training waits for a save, as measured; counts as at least 0.01 s.
        upload_seconds: How long a save takes until it is durable, as measured. No save starts before the last one is.
        num_gpus: In the whole run.
        failures_per_gpu_day: Interruptions per GPU and day. At least one in 7 days is assumed in all.

    Returns:
        The choice; at most 1 h, unless the upload takes longer than that.

    Raises:
        ValueError: If a figure is negative or not finite.
    """
    figures = {
        "blocking_seconds": blocking_seconds,
        "upload_seconds": upload_seconds,
        "num_gpus": num_gpus,
        "failures_per_gpu_day": failures_per_gpu_day,
    }
    for name, figure in figures.items():
        if not math.isfinite(figure) or figure < 0:
            raise ValueError(f"{name} must be a finite number that is not negative, got {figure!r}.")
    failures_per_day = num_gpus * failures_per_gpu_day
    days = min(1 / failures_per_day, MAX_DAYS_BETWEEN_FAILURES) if failures_per_day > 0 else MAX_DAYS_BETWEEN_FAILURES
    cost_seconds = max(blocking_seconds, MIN_COST_SECONDS)
    optimum_seconds = math.sqrt(2 * cost_seconds * days * DAY_SECONDS)
    seconds = max(min(optimum_seconds, MAX_AUTO_SECONDS), upload_seconds)
    counts_as = "" if cost_seconds == blocking_seconds else f" (counts as {_rounded(cost_seconds)})"
    between = f"{days:.3g}d"
    reason = (
        f"a save every {_rounded(seconds)}: it blocks training for {_rounded(blocking_seconds)}{counts_as}; {num_gpus} "
        f"GPU(s) at {failures_per_gpu_day:.3g} failures per GPU and day, but at least one in "
        f"{MAX_DAYS_BETWEEN_FAILURES:g}d, fail every {between}; Young/Daly: sqrt(2 x {_rounded(cost_seconds)} x "
        f"{between}) = {_rounded(optimum_seconds)}, at most {_rounded(MAX_AUTO_SECONDS)} and at least the "
        f"{_rounded(upload_seconds)} of an upload"
    )
    return Choice(seconds=seconds, optimum_seconds=optimum_seconds, days_between_failures=days, reason=reason)


class Schedule:
    """Says when a save is due. One rank's, one thread's; call `start`, then `is_due` after every step.

    Time is not part of its state: who resumes has just read a checkpoint, so nothing is at risk yet and the grid starts
    anew. Steps and epochs are counted on, also after a resume.

    Args:
        every: The cadence; "auto" is `FIRST_AUTO_SECONDS` until `retime` says what was measured.
        clock: The time in seconds.
    """

    def __init__(self, every: Every, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = every
        self._clock = clock
        self._interval_seconds = FIRST_AUTO_SECONDS if every.unit == "auto" else every.count
        self._is_started = False
        self._origin_seconds = self._due_seconds = self._saved_seconds = math.nan
        self._saved_step = self._saved_epochs = 0
        self._num_epochs = self._epoch_step = 0

    @property
    def interval_seconds(self) -> float | None:
        """The time between two saves; None where time does not decide."""
        return self._interval_seconds if self.every.unit in ("seconds", "auto") else None

    def start(self, step: int, now: float | None = None) -> None:
        """Begin when training starts or resumes, after `load_state_dict`.

        Args:
            step: The optimizer steps done before.
            now: The clock's time, which is asked otherwise.
        """
        self._is_started = True
        self._epoch_step = min(self._epoch_step, step)  # a second fit may count from zero
        self._remember_save(step, now)
        self._start_grid()

    def is_due(self, step: int, *, epoch_end: bool = False, now: float | None = None) -> bool:
        """Return whether to save now. What is due stays due until `record_save`.

        Args:
            step: The optimizer steps done.
            epoch_end: Whether they end an epoch. Asking twice at the same step counts it once.
            now: The clock's time, which is asked otherwise.

        Raises:
            RuntimeError: If the schedule has not started.
        """
        self._require_start()
        if epoch_end and step > self._epoch_step:
            self._num_epochs += 1
            self._epoch_step = step
        count = int(self.every.count)
        if self.every.unit == "steps":
            return step // count > self._saved_step // count
        if self.every.unit == "epochs":
            return self._num_epochs // count > self._saved_epochs // count
        return self._now(now) >= self._due_seconds

    def seconds_left(self, now: float | None = None) -> float:
        """Return how long it is until a save is due; 0 if one is. Only where time decides."""
        self._require_start()
        return max(0.0, self._due_seconds - self._now(now))

    def record_save(self, step: int, now: float | None = None) -> None:
        """Note that training goes on after a save, be it one that was due or another (SIGTERM, a best score).

        Time is next due on the grid, but a quarter of the interval from now at the earliest: so two saves are at most
        one and a quarter apart, and training gets somewhere even if each save takes longer than the interval. With
        "auto" it is next due a whole interval from now, which is never shorter than an upload.

        Raises:
            RuntimeError: If the schedule has not started.
        """
        self._require_start()
        self._remember_save(step, now)
        if self.every.unit == "auto":
            self._start_grid()
            return
        passed = (self._saved_seconds - self._origin_seconds) / self._interval_seconds
        self._due_seconds = self._origin_seconds + math.ceil(passed + 0.25) * self._interval_seconds

    def retime(self, seconds: float) -> None:
        """Set the interval that `auto_interval` chose, counted from the last save on.

        Raises:
            ValueError: If it is not a positive time.
            RuntimeError: If the user has chosen the interval, or the schedule has not started.
        """
        self._require_start()
        if self.every.unit != "auto":
            raise RuntimeError(f"every is {str(self.every)!r}, not 'auto'; the interval is not to be changed.")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be positive and finite, got {seconds!r}.")
        self._interval_seconds = seconds
        self._start_grid()

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run goes on from; plain numbers. It belongs in every checkpoint."""
        state: dict[str, float] = {"num_epochs": self._num_epochs, "epoch_step": self._epoch_step}
        if self.every.unit == "auto":
            state["interval_seconds"] = self._interval_seconds
        return state

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state, also from one of another cadence. Call `start` afterwards."""
        self._is_started = False
        self._num_epochs = int(state["num_epochs"])
        self._epoch_step = int(state["epoch_step"])
        if self.every.unit == "auto":
            self._interval_seconds = state.get("interval_seconds", FIRST_AUTO_SECONDS)

    def _require_start(self) -> None:
        if not self._is_started:
            raise RuntimeError("the schedule has not started. Call start() when training starts or resumes.")

    def _now(self, now: float | None) -> float:
        return self._clock() if now is None else now

    def _remember_save(self, step: int, now: float | None) -> None:
        self._saved_step, self._saved_epochs, self._saved_seconds = step, self._num_epochs, self._now(now)

    def _start_grid(self) -> None:
        self._origin_seconds = self._saved_seconds
        self._due_seconds = self._saved_seconds + self._interval_seconds


def _duration(seconds: float) -> str:
    """Return a duration in the largest units that it fills, such as "1h30min"."""
    seconds = round(seconds, 9)
    parts = []
    for unit, unit_seconds in _UNIT_SECONDS.items():
        if unit != "s" and seconds >= unit_seconds:
            parts.append(f"{seconds // unit_seconds:.0f}{unit}")
            seconds %= unit_seconds
    if seconds or not parts:
        parts.append(f"{seconds:.9f}".rstrip("0").rstrip(".") + "s")
    return "".join(parts)


def _rounded(seconds: float) -> str:
    return _duration(float(f"{seconds:.3g}"))
