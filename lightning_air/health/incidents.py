"""From readings to incidents: which rule is broken by which GPU since when, each told once until it is over.

Runs on rank 0 over the rows of all nodes, on the thread that has just heard of them; costs some milliseconds for 64
GPUs. Only told values count: a gap neither begins an incident nor ends one, and no time passes in a longer one.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_air.health.history import GpuId, Row
from lightning_air.health.rules import Rule
from lightning_air.health.signals import OF_ROW, SECONDS_WITHOUT_STEP, XID

MAX_BRIDGED_POLLS = 3
"""Two values that are further apart have a gap between them, whose time is not counted."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A rule that a GPU has broken.

    Attributes:
        rule: The rule.
        gpu: The GPU.
        value: That the rule looks at, when it was found to be broken.
        bad_seconds: How long it had been bad by then, gaps left out.
    """

    rule: Rule
    gpu: GpuId
    value: float
    bad_seconds: float


@dataclass(frozen=True)
class Change:
    """What one look has brought: incidents that have begun, and those that are over."""

    begun: tuple[Incident, ...] = ()
    ended: tuple[Incident, ...] = ()


class Incidents:
    """The incidents of a run. For one thread.

    Args:
        rules: What is looked for.
        poll_seconds: The time between two readings.
    """

    def __init__(self, rules: Sequence[Rule], *, poll_seconds: float) -> None:
        self._rules = [(number, rule) for number, rule in enumerate(rules) if rule.signal != XID]
        self._xid_rules = [rule for rule in rules if rule.signal == XID]
        self._bridged_seconds = MAX_BRIDGED_POLLS * poll_seconds + poll_seconds / 2
        self._tracks: dict[tuple[int, GpuId], _Track] = {}
        self._growths: dict[tuple[int, GpuId], _Growth] = {}
        self._xids: dict[tuple[str, GpuId, int], Incident] = {}

    @property
    def open(self) -> list[Incident]:
        """Those that are not over, oldest first."""
        tracked = [track.incident for track in self._tracks.values() if track.incident is not None]
        return [*self._xids.values(), *tracked]

    def look(self, now: float, rows: Mapping[GpuId, Row], *, seconds_without_step: float = math.nan) -> Change:
        """Take new readings.

        Args:
            now: The time in seconds, by a clock that does not jump.
            rows: Of the GPUs that have told something new; all others have a gap.
            seconds_without_step: How long rank 0's loop has not gone on; NaN where nobody knows.

        Returns:
            What has changed.
        """
        begun, ended = [], []
        for number, rule in self._rules:
            for gpu, value in self._values(number, rule, now, rows, seconds_without_step).items():
                track = self._tracks.get((number, gpu))
                if track is None:
                    track = self._tracks[number, gpu] = _Track(rule, gpu, self._bridged_seconds)
                before = track.incident
                track.take(now, value)
                if before is None and track.incident is not None:
                    begun.append(track.incident)
                elif before is not None and track.incident is None:
                    ended.append(before)
        return Change(tuple(begun), tuple(ended))

    def take_xid(self, xid: int, gpu: GpuId) -> Change:
        """Take an error of the driver: the first of each number on a GPU begins an incident that is never over."""
        begun = []
        for rule in self._xid_rules:
            if xid in rule.any_of and (rule.name, gpu, xid) not in self._xids:
                incident = Incident(rule=rule, gpu=gpu, value=float(xid), bad_seconds=0.0)
                self._xids[rule.name, gpu, xid] = incident
                begun.append(incident)
        return Change(tuple(begun))

    def _values(
        self, number: int, rule: Rule, now: float, rows: Mapping[GpuId, Row], seconds_without_step: float
    ) -> dict[GpuId, float]:
        """Return what a rule looks at, by GPU; NaN is a gap, and a GPU that does not meet `given` has a good value."""

        def signal(name: str, row: Row) -> float:
            return seconds_without_step if name == SECONDS_WITHOUT_STEP else OF_ROW[name](row)

        values = {gpu: signal(rule.signal, row) for gpu, row in rows.items()}
        if rule.over_seconds is not None:
            values = {gpu: self._growth(number, rule.over_seconds, gpu, now, value) for gpu, value in values.items()}
        is_met = {gpu: _are_met(rule, [signal(name, row) for name in rule.given]) for gpu, row in rows.items()}
        if rule.compared != "plainly":
            values = _compared(rule, values, [gpu for gpu, met in is_met.items() if met])
        good = -math.inf if rule.above is not None else math.inf
        return {
            gpu: value if is_met[gpu] else (math.nan if is_met[gpu] is None else good) for gpu, value in values.items()
        }

    def _growth(self, number: int, seconds: float, gpu: GpuId, now: float, value: float) -> float:
        growth = self._growths.get((number, gpu))
        if growth is None:
            growth = self._growths[number, gpu] = _Growth(seconds)
        return growth.take(now, value)


class _Track:
    """How long one GPU has been on the bad or the good side of one rule."""

    def __init__(self, rule: Rule, gpu: GpuId, bridged_seconds: float) -> None:
        self.incident: Incident | None = None
        self._rule = rule
        self._gpu = gpu
        self._bridged_seconds = bridged_seconds
        self._seconds = 0.0
        self._has_begun = False  # a stretch of values that are on the side that would change something
        self._last: float | None = None

    def take(self, now: float, value: float) -> None:
        if math.isnan(value):
            return
        apart = now - self._last if self._last is not None else 0.0
        self._last = now
        if not (self._rule.is_good(value) if self.incident is not None else self._rule.is_bad(value)):
            self._seconds, self._has_begun = 0.0, False
            return
        if self._has_begun and apart <= self._bridged_seconds:
            self._seconds += apart
        self._has_begun = True
        if self._seconds >= self._rule.for_seconds:
            bad_seconds, self._seconds, self._has_begun = self._seconds, 0.0, False
            is_new = self.incident is None
            self.incident = (
                Incident(rule=self._rule, gpu=self._gpu, value=value, bad_seconds=bad_seconds) if is_new else None
            )


class _Growth:
    """What a counter has grown by in the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def take(self, now: float, value: float) -> float:
        """Return the growth since the newest value that is old enough, or since the first; NaN for a gap."""
        if math.isnan(value):
            return math.nan
        if self._values and value < self._values[-1][1]:
            self._values.clear()  # the driver was loaded again, and counts from zero
        self._values.append((now, value))
        while len(self._values) > 1 and self._values[1][0] <= now - self._seconds:
            self._values.popleft()
        return value - self._values[0][1]


def _are_met(rule: Rule, values: Iterable[float]) -> bool | None:
    """Whether the conditions of a rule are met; None where it cannot be told."""
    pairs = list(zip(values, rule.given.values(), strict=True))
    if any(not math.isnan(value) and not low <= value <= high for value, (low, high) in pairs):
        return False
    return None if any(math.isnan(value) for value, _ in pairs) else True


def _compared(rule: Rule, values: Mapping[GpuId, float], peers: Sequence[GpuId]) -> dict[GpuId, float]:
    """Return the values as compared with the median of the peers of the same model."""
    by_model: dict[str, list[float]] = {}
    for gpu in peers:
        if not math.isnan(values[gpu]):
            by_model.setdefault(gpu.name, []).append(values[gpu])
    medians = {model: statistics.median(each) for model, each in by_model.items()}
    compared = {}
    for gpu, value in values.items():
        median = medians.get(gpu.name, math.nan)
        if rule.compared == "minus_median":
            compared[gpu] = value - median
        else:
            compared[gpu] = 100.0 * value / median if median else math.nan
    return compared
