"""Turn what is logged into points, so few that a run of any length stays in its budget and is still covered evenly.

A deterministic function of its snapshot and the records: after a crash the same records give the very same points, with
the same timestamps, so that what the server has already is not stored twice. No clock, no thread, no file.

- **Windows.** The values of a metric in a window of steps become one point per aggregate, at the last step and time
  logged in it. A window that holds a value always yields a point, so a metric logged rarely is not lost.
- **Strides** (strides.py). How wide windows are follows from the points left, the metrics and the steps so far: at
  least 320 points in either half of the run, wherever it stops, for up to 610 metrics at the default.
- **Exempt metrics** (validation). Each value is a point, from a reserve. Once half of it is spent, or so little is left
  that the law takes half of it, they are thinned by the same rule; their windows then show the last value, since the
  mean of several validations is none that was ever measured. A reserve that is used up gets a tenth of what the others
  have left, again and again, so that a small one costs detail and not the curve.
- **The cap.** A point is charged before it exists. If nothing is left, values are dropped, counted and warned about.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lightning_air.tracking.budget import DEFAULT_CAP, Budget, round_step
from lightning_air.tracking.octaves import POINTS_PER_HALF, guaranteed_metrics
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.strides import Strides
from lightning_air.tracking.thinning_options import check_aggregates, check_horizon, check_patterns, check_step
from lightning_air.tracking.window import Aggregate, Event
from lightning_air.tracking.windows import Windows

DEFAULT_EXEMPT = ("val*", "test*")
SWEEP_MS = 1_000
"""How often the windows of metrics that went quiet are looked for, in the records' own time."""

_SNAPSHOT_VERSION = 1


class Counts(NamedTuple):
    """What became of the values logged: `logged == windows + thinned + dropped + pending`.

    Attributes:
        logged: Values.
        windows: Windows that became points.
        thinned: Values that such a window held beside its first.
        dropped: Values that no point stands for, since none was left.
        pending: Values in windows that are open.
        points: Points made.
    """

    logged: int = 0
    windows: int = 0
    thinned: int = 0
    dropped: int = 0
    pending: int = 0
    points: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """Return what became of both."""
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: "Counts") -> "Counts":
        """Return what became of those that the other ones are not."""
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))


class Thinner:
    """Thins what one run logs. One thread's."""

    def __init__(
        self,
        *,
        step: Literal["auto"] | int = "auto",
        max_metric_steps: int = DEFAULT_CAP,
        reserve: int | None = None,
        aggregate: Sequence[Aggregate] = ("mean",),
        exempt: Sequence[str] = DEFAULT_EXEMPT,
        spent: int = 0,
        system: int = 0,
        horizon: int | None = None,
        origin: int | None = None,
    ) -> None:
        """Start a run, or go on with one of which only the count of points is known.

        Args:
            step: Steps that one point stands for: as few as last ("auto"), or so many until what is left is needed to
                cover the rest of the run.
            max_metric_steps: Points that the run may have in all, whatever happens.
            reserve: Points kept for exempt metrics; None for a tenth, 0 to thin them like the others.
            aggregate: What a window becomes, a point each: the first by the metric's name, others as `name/min` etc.
            exempt: Patterns (`fnmatch`) of the metrics that are not thinned.
            spent: Points that the run has already; `spend` adds to them.
            system: Points that the platform's own system metrics will take.
            horizon: The run's last step, if known; `set_horizon` corrects it.
            origin: The run's first step; None for the first that is logged, or 0 if the run has points already.

        Raises:
            ValueError: If an option is not as described.
        """
        self._budget = Budget(max_metric_steps, reserve=reserve, system=system, spent=spent)
        self._aggregates = check_aggregates(aggregate)
        self._exempt_patterns = check_patterns(exempt)
        base = check_step(step)
        check_horizon(horizon)
        self._origin = 0 if origin is None and spent else origin
        self._step = self._origin or 0
        self._swept_ms = 0
        self._num_logged = self._num_points = 0
        strides = Strides(
            limit=self._budget.for_steps,
            points_per_window=len(self._aggregates),
            base=base,
            lasting=step != "auto",
            horizon=horizon,
            origin=self._step,
        )
        self._steps = Windows(strides, self._aggregates)
        exempt_strides = Strides(limit=self._budget.for_exempt(0), lasting=True, origin=self._step)
        self._exempt = Windows(exempt_strides, ("last",))
        self._exempt.ask_for_more = self._enlarge_reserve

    @property
    def cap(self) -> int:
        """Points that the run may have in all, but for those that are left to the platform's own system metrics."""
        return self._budget.ours

    @property
    def spent(self) -> int:
        """Points that the run has beside those that are made here."""
        return self._budget.spent

    @property
    def used(self) -> int:
        """Points charged so far: those that the run had before, those made, and those that open windows will become."""
        return self._budget.spent + self._steps.strides.used + self._exempt.strides.used

    @property
    def counts(self) -> Counts:
        """What became of the values logged."""
        both = (self._steps, self._exempt)
        return Counts(
            logged=self._num_logged,
            windows=sum(windows.num_windows for windows in both),
            thinned=sum(windows.num_thinned for windows in both),
            dropped=sum(windows.num_dropped for windows in both),
            pending=sum(windows.num_pending for windows in both),
            points=self._num_points,
        )

    def add(self, record: Record) -> list[Point]:
        """Take a record, and return the points that are complete by it."""
        step, timestamp_ms, values = record.step, record.timestamp_ms, record.values
        self._step = step
        if self._origin is None or step < self._origin:
            self._set_origin(step)
        points: list[Point] = []
        others = self._steps.add(values.items(), step, timestamp_ms, points)
        if others:
            self._add_others(others, step, timestamp_ms, points)
        if not 0 <= timestamp_ms - self._swept_ms < SWEEP_MS:
            for windows in (self._steps, self._exempt):
                windows.sweep(step, self._swept_ms, points)
            self._swept_ms = timestamp_ms
        self._num_logged += len(values)
        self._num_points += len(points)
        return points

    def flush(self) -> list[Point]:
        """Close all windows, as at the end of a run, and return their points."""
        points: list[Point] = []
        self._steps.close_all(points)
        self._exempt.close_all(points)
        self._num_points += len(points)
        return points

    def forget_shown(self, latest: Mapping[str, tuple[int, int]]) -> None:
        """Empty the open windows that somebody has shown with what followed in them.

        Args:
            latest: Time in ms and step of the latest value that is shown of each key.
        """
        self._steps.forget_shown(latest)
        self._exempt.forget_shown(latest)

    def name_by(self, key_of: Callable[[str, str], str]) -> None:
        """Have keys given to metrics and their aspects; without this `metric_names.plain_key` does it."""
        self._steps.key_of = self._exempt.key_of = key_of

    def take_events(self) -> list[Event]:
        """Return the values that were not finite since the last call, the first few of each metric."""
        events = self._steps.events + self._exempt.events
        self._steps.events, self._exempt.events = [], []
        return events

    def set_horizon(self, horizon: int | None) -> None:
        """Say which step is the run's last; None if nobody knows.

        Raises:
            ValueError: If it is negative or no whole number.
        """
        check_horizon(horizon)
        self._steps.strides.set_horizon(horizon)

    def spend(self, num_points: int) -> None:
        """Charge points that are not made here; none if the number is not positive."""
        if num_points <= 0:
            return
        self._budget.spent += num_points
        self._steps.strides.set_limit(self._budget.for_steps)
        self._exempt.strides.set_limit(self._budget.for_exempt(self._steps.strides.used))

    def plan(self) -> str:
        """Return in one line, for the user, how the budget is spent."""
        strides, num_metrics = self._steps.strides, len(self._steps)
        stride = strides.even_stride or strides.stride
        each = "step" if stride == 1 else f"{stride} steps"
        if stride > strides.stride:
            each += ", more at the beginning"
        metrics = f", {num_metrics} metric{'s' * (num_metrics > 1)}" if num_metrics else ""
        reach = strides.reach(self._step)
        if not num_metrics:
            num_guaranteed = guaranteed_metrics(strides.left, strides.points_per_window)
            lasts = f"lasts for {num_guaranteed:,} metrics, however long the run is"
        elif reach is None:
            lasts = f"{strides.points_per_half(self._step)} points per metric for either half of the run"
        else:
            lasts = f"lasts at least to step {round_step(reach)}"
        return f"one point per {each}{metrics}; {self._budget.describe(self.used)}; {lasts}"

    def warnings_due(self) -> list[str]:
        """Return what the user is to be warned of, each warning once in the life of the run."""
        plan, budget = self.plan(), self._budget
        warnings = budget.warnings_due(self.used, plan)
        if len(self._steps) and self._steps.strides.reach(self._step) is None and budget.is_first("metrics"):
            warnings.append(
                f"The metric-step budget is too small for {POINTS_PER_HALF} points of each metric in either half of "
                f"the run, however long; all get fewer alike: {plan}. Log fewer metrics or aggregates to get more."
            )
        if len(self._exempt) and not self._exempt.strides.is_lasting and budget.is_first("exempt"):
            warnings.append(
                f"Exempt metrics ({', '.join(self._exempt_patterns)}) are thinned from now on, since half of their "
                f"reserve of {budget.reserve:,} points is used, or too little of the budget is left: {plan}. A larger "
                "reserve keeps more of them."
            )
        if (dropped := self.counts.dropped) and budget.is_first("dropped"):
            warnings.append(f"The metric-step budget is used up and values are dropped, {dropped:,} so far: {plan}.")
        return warnings

    def snapshot(self) -> dict[str, Any]:
        """Return its whole state, as JSON can have it; `from_snapshot` goes on from it with the very same points."""
        return {
            "version": _SNAPSHOT_VERSION,
            "aggregate": list(self._aggregates),
            "exempt_patterns": list(self._exempt_patterns),
            "budget": self._budget.snapshot(),
            "origin": self._origin,
            "step": self._step,
            "swept_ms": self._swept_ms,
            "logged": self._num_logged,
            "points": self._num_points,
            "steps": self._steps.snapshot(),
            "exempt": self._exempt.snapshot(),
        }

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any]) -> "Thinner":
        """Return one that goes on as that of which the snapshot is, with its options.

        Raises:
            ValueError: If the snapshot is of another version.
        """
        if snapshot.get("version") != _SNAPSHOT_VERSION:
            raise ValueError(
                f"the thinner's snapshot must be of version {_SNAPSHOT_VERSION}, got {snapshot.get('version')!r}. "
                "Go on with the version of lightning_air that wrote it, or with a new run."
            )
        thinner = cls(aggregate=snapshot["aggregate"], exempt=snapshot["exempt_patterns"])
        thinner._budget = Budget.from_snapshot(snapshot["budget"])
        thinner._origin, thinner._step = snapshot["origin"], snapshot["step"]
        thinner._swept_ms = snapshot["swept_ms"]
        thinner._num_logged, thinner._num_points = snapshot["logged"], snapshot["points"]
        thinner._steps = Windows.from_snapshot(snapshot["steps"], thinner._aggregates)
        thinner._exempt = Windows.from_snapshot(snapshot["exempt"], ("last",))
        thinner._exempt.ask_for_more = thinner._enlarge_reserve
        return thinner

    def _set_origin(self, step: int) -> None:
        self._origin = step
        self._steps.strides.set_origin(step)
        self._exempt.strides.set_origin(step)

    def _add_others(self, values: list[tuple[str, float]], step: int, timestamp_ms: int, points: list[Point]) -> None:
        """Add the values of exempt metrics, and of metrics not seen before."""
        new = [key for key, _ in values if key not in self._exempt]
        if new:
            self._exempt.register([key for key in new if self._is_exempt(key)], step)
            self._steps.register([key for key in new if key not in self._exempt], step)
            values = self._steps.add(values, step, timestamp_ms, points)
        for key, value in values:
            self._exempt.add([(key, value)], step, timestamp_ms, points)
            if self._exempt.strides.is_lasting:
                self._exempt.close(key, points)

    def _enlarge_reserve(self) -> bool:
        steps, exempt = self._steps.strides, self._exempt.strides
        if not self._budget.enlarge_reserve(steps.left):
            return False
        steps.set_limit(self._budget.for_steps)
        exempt.set_limit(self._budget.for_exempt(steps.used))
        return True

    def _is_exempt(self, key: str) -> bool:
        is_match = any(fnmatch.fnmatchcase(key, pattern) for pattern in self._exempt_patterns)
        return is_match and self._budget.reserve > 0
