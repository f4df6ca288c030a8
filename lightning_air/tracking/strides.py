"""Grants windows to metrics that share a limit of points, as wide as it takes for the points to last.

**The plan.** At the beginning of an octave (octaves.py) its share of the points left is `left / octaves left`, and the
stride is the smallest power of two with which all metrics seen so far fit into it. 23 octaves are planned: 22 reach
step 1.3e9, one is spare. As what is left falls no faster than the octaves pass, the law holds up to there for
`limit / (641 * 23)` metrics, however late they appear: 610 at the default, which is 9M points beside the reserve (305
where the platform's own metrics take half of it). Fewer metrics get 2, 4, 8, ... times the points; more get fewer, all
alike, and the same all along the run. Beyond the plan an octave takes half of what is left: it fades, and never ends.

The plan is made anew when the metrics or the limit change, and when the share is used up before the octave is over, as
when a run goes back to an earlier step and passes the octave again.

**With a known last step** strides are even instead: the smallest with which the rest of the run fits, finer at the
beginning, so that the law holds as well if the run stops early. An eighth at most is held back, and less where the law
needs it, for a run that goes on all the same: where it is the eighth, to eight times the length under the law.

Deterministic: no clock, no thread, no file. Steps are absolute here; windows lie at multiples of their stride.
"""

from typing import Any

from lightning_air.tracking.octaves import (
    CUT_OCTAVE_POINTS,
    OCTAVE_POINTS,
    PLANNED_OCTAVES,
    doubled_stride,
    even_stride,
    octave_of,
    octave_start,
    octave_stop,
    octaves_passed,
)

OVERTIME_OCTAVES = 5
FOREVER = 1 << 62
"""Steps; what a server can store is less than twice that."""


class Strides:
    """Says where a window ends, and charges it as it opens, so that it can always be closed. One thread's.

    Attributes:
        points_per_window: What one window of one metric takes.
        stride: How many steps a window is wide that opens now.
        start: The first step for which the present plan holds.
        stop: The first step for which it no longer holds.
        is_lasting: Whether windows are still `base` steps wide because that was asked for, whatever the octave.
    """

    def __init__(
        self,
        *,
        limit: int,
        points_per_window: int = 1,
        base: int = 1,
        lasting: bool = False,
        horizon: int | None = None,
        origin: int = 0,
    ) -> None:
        """Start with nothing spent.

        Args:
            limit: The points that may be spent in all.
            points_per_window: What one window of one metric takes.
            base: Strides are multiples of it, in steps.
            lasting: Keep to `base` until so little is left that it takes half of it to keep the law from there on, or
                until half of the limit is spent. Where the horizon is known, it is the smallest multiple that lasts.
            horizon: The run's last step, if known.
            origin: The run's first step.
        """
        self.points_per_window = points_per_window
        self.stride = base
        self.start = self.stop = origin
        self.is_lasting = lasting
        self._limit = limit
        self._base = base
        self._horizon = horizon
        self._origin = origin
        self._weight = points_per_window
        # What was charged is `_used` and what is missing of the grant: one subtraction per window.
        self._used = self._granted = self._account = 0
        self._even_stride: int | None = None
        self._is_stale = True
        self._is_refused = False

    @property
    def used(self) -> int:
        """Points charged so far."""
        return self._used + self._granted - self._account

    @property
    def left(self) -> int:
        """Points that may still be charged."""
        return max(0, self._limit - self.used)

    @property
    def even_stride(self) -> int | None:
        """How wide windows will be once the beginning is over, if the last step is known and lies ahead, in steps."""
        return self._even_stride if self.stop <= self._origin + self._horizon_stop else None

    def open(self, step: int) -> int | None:
        """Charge a window for a value logged at this step, and return the step at which the next one starts.

        Returns:
            None if nothing is left for it.
        """
        points = self.points_per_window
        if (self._account < points or not self.start <= step < self.stop) and not self._plan(step):
            return None
        self._account -= points
        stride = self.stride
        return step - step % stride + stride

    def charge_one(self, step: int) -> bool:
        """Charge a point beside a window's own; False if none is left."""
        if self._account < 1 and not self._plan(step):
            return False
        self._account -= 1
        return True

    def refund(self, points: int) -> None:
        """Take back a part of what a window was charged."""
        self._account += points

    def set_weight(self, weight: int) -> None:
        """Say what all metrics that are being logged take together for one window each, in points."""
        if (weight := max(weight, self.points_per_window)) != self._weight:
            self._weight = weight
            self._outdate()

    def set_limit(self, limit: int) -> None:
        """Change the points that may be spent in all, those spent so far included."""
        if limit != self._limit:
            self._limit = limit
            self._outdate()

    def set_horizon(self, horizon: int | None) -> None:
        """Say which step is the run's last; None if nobody knows."""
        if horizon != self._horizon:
            self._horizon = horizon
            self._even_stride = None
            self._outdate()

    def set_origin(self, origin: int) -> None:
        """Say which step is the run's first."""
        if origin != self._origin:
            self._origin = origin
            self._outdate()

    def reach(self, step: int) -> int | None:
        """Return up to which step the law will hold with the present metrics; None if it does not hold now."""
        position = self._position(step)
        if self._is_before_horizon(position):
            even = self._even(position)
            widest_steps = max(self._base, self._horizon_stop // OCTAVE_POINTS)
            return self._horizon if even is not None and even[0] <= widest_steps else None
        left = self.left
        if self.is_lasting:
            account = self._lasting(position)
            position += account // self._weight * self._base
            left -= account
        reached = None
        while True:
            share, rest = self._share(left, position)
            if share < rest * OCTAVE_POINTS * self._weight:
                return reached
            left -= int(share)
            position = octave_stop(octave_of(position))
            reached = self._origin + position

    def points_per_half(self, step: int) -> int:
        """Return about how many points of each metric either half of the run gets."""
        position = self._position(step)
        if self._is_before_horizon(position):
            return self.left // (2 * self._weight)
        share, rest = self._share(self.left, position)
        return int(share / (2 * rest * self._weight))

    def snapshot(self) -> dict[str, Any]:
        """Return its whole state: numbers, truth values and None."""
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any]) -> "Strides":
        """Return one that goes on as that of which the snapshot is."""
        strides = cls(limit=0)
        for name in vars(strides):
            setattr(strides, name, snapshot[name.lstrip("_")])
        return strides

    def _position(self, step: int) -> int:
        return max(0, step - self._origin)

    @property
    def _horizon_stop(self) -> int:
        return 0 if self._horizon is None else max(0, self._horizon - self._origin + 1)

    def _is_before_horizon(self, position: int) -> bool:
        return position < self._horizon_stop

    def _outdate(self) -> None:
        self._grant(0)
        self._is_stale = True

    def _grant(self, points: int) -> None:
        self._used = self.used
        self._granted = self._account = points

    def _plan(self, step: int) -> bool:
        """Plan for a step that no plan holds for, or anew if the share is used up; False if nothing is left."""
        is_again = self.start <= step < self.stop and not self._is_stale
        if is_again and self._is_refused:
            return False
        self._grant(0)
        self._is_stale = False
        position = self._position(step)
        octave = octave_of(position)
        self.start, self.stop = self._origin + octave_start(octave), self._origin + octave_stop(octave)
        if self._is_before_horizon(position):
            points = self._plan_evenly(position, is_again=is_again)
        elif self.is_lasting and (points := self._lasting(position)) >= self.points_per_window:
            self.start, self.stop, self.stride = self._origin, self._origin + FOREVER, self._base
        else:
            self.is_lasting = False
            points = self._plan_octave(position, is_again=is_again)
        self._is_refused = points < self.points_per_window
        self._grant(0 if self._is_refused else points)
        return not self._is_refused

    def _plan_octave(self, position: int, *, is_again: bool) -> int:
        share = int(self._share(self.left, position)[0])
        if is_again and share < self._weight:
            return 0  # or one octave would take half of what is left again and again
        num_steps = octave_stop(octave_of(position)) - position
        self.stride = doubled_stride(num_steps, weight=self._weight, budget=share, base=self._base)
        # One window more per metric, as the octave's beginning may cut one.
        return min(share + self._weight, (self.left + 1) // 2)

    def _plan_evenly(self, position: int, *, is_again: bool) -> int:
        self.stop = min(self.stop, self._origin + self._horizon_stop)
        num_steps = self.stop - self._origin - position
        even = self._even(position)
        if even is None:
            self.stride = doubled_stride(num_steps, weight=self._weight, budget=0, base=self._base)
            return 0 if is_again else (self.left + 1) // 2
        smallest, widest = even
        # A curve should not change its spacing for little: keep what still fits.
        if self._even_stride is None or not smallest <= self._even_stride < 2 * smallest:
            self._even_stride = smallest
        self.stride = min(self._even_stride, widest)
        return min(self.left, self._weight * (-(-num_steps // self.stride) + 1))

    def _even(self, position: int) -> tuple[int, int] | None:
        left, octave_cost = self.left, CUT_OCTAVE_POINTS * self._weight
        to_come = octaves_passed(self._horizon_stop) - octaves_passed(position)
        held_back = min(left // 8, OVERTIME_OCTAVES * octave_cost, left - int(octave_cost * (to_come + 1)))
        budget = left - max(left // 32, held_back)
        return even_stride(position, self._horizon_stop, weight=self._weight, budget=budget, base=self._base)

    def _lasting(self, position: int) -> int:
        """Return how many points there are for windows of the base's width."""
        to_come = max(1.0, PLANNED_OCTAVES - octaves_passed(position))
        return self.left - min(self._limit // 2, int(2 * CUT_OCTAVE_POINTS * self._weight * to_come))

    def _share(self, left: int, position: int) -> tuple[float, float]:
        """Return the points for what lies behind a position in its octave, and which part of the octave that is."""
        passed = octaves_passed(position)
        rest = octave_of(position) + 1 - passed
        planned = float(PLANNED_OCTAVES)
        if self._horizon is not None:
            planned = octaves_passed(self._horizon_stop) + OVERTIME_OCTAVES
        return left * rest / max(planned - passed, 2 * rest), rest
