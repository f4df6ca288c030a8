"""How many points a run may have: who gets which share, what the user is told, and how far ahead they are charged.

A point is one value of one metric at one step; the platform counts each against a cap per run.
"""

from typing import Any

from lightning_air.tracking.octaves import POINTS_PER_HALF

WARN_PERCENTS = (50, 80, 95)
DEFAULT_CAP = 10_000_000
"""Metric steps per run, on the platform."""

LEASES_PER_CAP = 1_000
LEASES_PER_REST = 100

RESERVE_DIVISOR = 10
"""The share of the points that is kept for exempt metrics: a tenth.

They are thinned once half of it is spent (thinning.py). At the default half of it is 500,000 points: 50 validation
metrics once a minute for 7 days, the longest that the platform lets a run last.
"""


class Budget:
    """Shares a cap out.

    Attributes:
        cap: Points that the run may have in all.
        spent: Points that it has beside those that are shared out here: of earlier attempts, and of others.
        system: Points that the platform's own system metrics will take.
    """

    def __init__(self, cap: int = DEFAULT_CAP, *, reserve: int | None = None, system: int = 0, spent: int = 0) -> None:
        """Check the shares.

        Args:
            cap: Points that the run may have in all.
            reserve: Points for exempt metrics; a tenth of ours if None.
            system: Points that the platform's own system metrics will take.
            spent: Points that the run has already.

        Raises:
            ValueError: If a number is negative or no whole number, or the reserve leaves nothing.
        """
        self.cap = whole_number("max_metric_steps", cap, least=1)
        self.spent = whole_number("spent", spent)
        self._reserve = None if reserve is None else whole_number("reserve", reserve)
        if self._reserve is not None and self._reserve >= cap:
            raise ValueError(
                f"reserve must be less than max_metric_steps, {cap}, got {reserve!r}. "
                "It is for exempt metrics only; leave it out to keep a tenth for them."
            )
        self._warned: set[str] = set()
        self.system = whole_number("system", system)

    @property
    def ours(self) -> int:
        """Points that are not left to the platform's own system metrics; at least half of the cap."""
        return self.cap - min(self.system, self.cap // 2)

    @property
    def reserve(self) -> int:
        """Points for exempt metrics."""
        return self.ours // RESERVE_DIVISOR if self._reserve is None else min(self._reserve, self.ours)

    @property
    def for_steps(self) -> int:
        """Points for all other metrics, beside what the run had before; those used of them since included."""
        return max(0, self.ours - self.reserve - self.spent)

    def enlarge_reserve(self, left: int) -> bool:
        """Move a tenth of what is left for the other metrics to the reserve, which is used up.

        Returns:
            Whether it was: there must be enough left to be worth a new plan for all.
        """
        more = left // RESERVE_DIVISOR
        if more < POINTS_PER_HALF:
            return False
        self._reserve = self.reserve + more
        return True

    def for_exempt(self, steps_used: int) -> int:
        """Return the points for exempt metrics.

        Args:
            steps_used: Points that the others have used; more than their share if that has shrunk since.
        """
        return max(0, min(self.reserve, self.ours - self.spent - steps_used))

    def describe(self, used: int) -> str:
        """Return what is used of what, for the user."""
        system = f", {compact(self.cap - self.ours)} left to the platform's system metrics" if self.system else ""
        return f"{compact(used)} of {compact(self.cap)} metric steps used{system}"

    def warnings_due(self, used: int, plan: str) -> list[str]:
        """Return a warning per threshold that was passed since the last call, the highest only.

        Args:
            used: Points charged so far, the spent ones included.
            plan: What the user is told in one line.
        """
        passed = [percent for percent in WARN_PERCENTS if 100 * used >= percent * self.ours]
        new = [percent for percent in passed if self.is_first(f"{percent}%")]
        return [f"{new[-1]}% of the run's metric-step budget is used: {plan}."] if new else []

    def is_first(self, warning: str) -> bool:
        """Return whether a warning has not been given yet, and take it as given."""
        is_new = warning not in self._warned
        self._warned.add(warning)
        return is_new

    def snapshot(self) -> dict[str, Any]:
        """Return its state, as JSON can have it."""
        return {
            "cap": self.cap,
            "reserve": self._reserve,
            "system": self.system,
            "spent": self.spent,
            "warned": sorted(self._warned),
        }

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any]) -> "Budget":
        """Return what the snapshot was taken of."""
        budget = cls(snapshot["cap"], reserve=snapshot["reserve"], system=snapshot["system"], spent=snapshot["spent"])
        budget._warned = set(snapshot["warned"])
        return budget


def lease(cap: int, left: int) -> int:
    """Return how many points to charge ahead of those that are sent, so that it need not be done for each.

    What a killed attempt had charged ahead is lost to the run if nobody goes on with its spool. So it is 0.1% of the
    cap at most, and 1% of what is left: no number of such attempts uses the budget up.

    Args:
        cap: Points that the run may have in all.
        left: Points that it may still have.
    """
    return max(0, min(cap // LEASES_PER_CAP, left // LEASES_PER_REST))


def compact(number: int) -> str:
    """Return a count in three digits and a unit, such as 1.23M; never more than it is."""
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= size:
            whole, hundredths = divmod(number * 100 // size, 100)
            decimals = f"{hundredths:02d}"[: max(0, 3 - len(str(whole)))].rstrip("0")
            return f"{whole}{'.' if decimals else ''}{decimals}{letter}"
    return str(number)


def round_step(step: int) -> str:
    """Return a step, in two digits where it is large, such as 1.3e9; never more than it is."""
    digits = str(step)
    if len(digits) <= 6:  # noqa: PLR2004
        return digits
    decimals = "" if digits[1] == "0" else f".{digits[1]}"
    return f"{digits[0]}{decimals}e{len(digits) - 1}"


def whole_number(name: str, value: object, *, least: int = 0, remedy: str = "") -> int:
    """Return an option's value.

    Raises:
        ValueError: If it is no whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}.{remedy and ' '}{remedy}")
    return value
