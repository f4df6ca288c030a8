"""Simulate long runs under the metric-step cap: is it ever passed, and do the curves cover every half of the run?

Every metric is logged in every step, from step 0. Going through all values is out of the question (3e10 of them), but
what a window costs and where it ends is decided only where one ends: so the simulation goes from end to end, with the
very `Strides` that the logger uses. tests/tracking/test_step_budget.py checks it against the real thinner, value by
value. A resumed attempt knows only what was charged, goes back to a checkpoint, and has lost what was open.

    python -m benchmarks.step_budget
"""

import argparse
import bisect
import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_air.tracking.budget import DEFAULT_CAP, Budget, lease
from lightning_air.tracking.octaves import OCTAVE_POINTS
from lightning_air.tracking.strides import Strides

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to simulate.

    Attributes:
        num_steps: It stops before this one.
        num_metrics: Each logged in every step.
        resumes: Where it is killed, and at which step it goes on.
        cap: Points that it may have.
        system: Points that the platform's own metrics will take.
        horizon: The last step, if the logger is told.
    """

    num_steps: int
    num_metrics: int
    resumes: Sequence[tuple[int, int]] = ()
    cap: int = DEFAULT_CAP
    system: int = 0
    horizon: int | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a run had shown when an attempt of it ended.

    Attributes:
        start: The attempt's first step.
        stop: The first that it did not do.
        used: Points charged so far, ahead of those that were sent.
        points: Points shown so far, those of windows that are open not counted.
        curves: The steps done at each point, ascending, all attempts so far; each curve once, though metrics share it.
    """

    start: int
    stop: int
    used: int
    points: int
    curves: list[Steps]


def simulate(run: Run) -> Iterator[Attempt]:
    """Yield the attempts of a run."""
    starts = [0, *(resumed for _, resumed in run.resumes)]
    stops = [*(killed for killed, _ in run.resumes), run.num_steps]
    used = 0
    ends: list[list[list[int]]] = [[] for _ in range(run.num_metrics)]
    for start, stop in zip(starts, stops, strict=True):
        budget = Budget(run.cap, system=run.system, spent=used)
        strides = Strides(limit=budget.for_steps, horizon=run.horizon)
        for curve, new in zip(ends, advance(strides, [start] * run.num_metrics, stop), strict=True):
            curve.append(new)
        used = budget.spent + strides.used
        used += lease(budget.ours, budget.ours - used)
        curves = {tuple(map(tuple, curve)): curve for curve in ends}
        yield Attempt(
            start=start,
            stop=stop,
            used=used,
            points=sum(len(part) for curve in ends for part in curve),
            curves=[np.unique(np.concatenate([np.asarray(part) for part in curve])) for curve in curves.values()],
        )


def advance(strides: Strides, starts: Sequence[int], stop: int) -> list[list[int]]:
    """Log metrics in each step of a range, and return the ends of the windows that closed, by metric.

    A window closes when its end is logged, and the next one opens there.

    Args:
        strides: New ones.
        starts: The first step of each metric, ascending.
        stop: The first step that is not logged.
    """
    ends: list[list[int]] = [[] for _ in starts]
    by_end: dict[int, list[int]] = {}
    first_steps = {*starts}
    boundaries = sorted(first_steps)
    num_seen = 0
    waiting: set[int] = set()
    while boundaries and (step := heapq.heappop(boundaries)) < stop:
        known = by_end.pop(step, [])
        new = range(num_seen, bisect.bisect_right(starts, step))
        for metric in (*known, *new):
            if metric == num_seen:
                num_seen = new.stop
                strides.set_weight(num_seen)
            if metric < new.start and metric not in waiting:
                ends[metric].append(step)
            end = strides.open(step)
            waiting.discard(metric)
            if end is None:  # nothing is left in this octave, until another metric has the plan made anew
                waiting.add(metric)
                end = min([strides.stop, *(start + 1 for start in first_steps if start >= step)])
            if end not in by_end:
                by_end[end] = []
                if end not in first_steps:
                    heapq.heappush(boundaries, end)
            by_end[end].append(metric)
    return ends


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How well curves cover the halves of a run, at the worst.

    Attributes:
        points: In a half.
        gap: The widest in a half, in units of 1/320 of the half, or of one step where that is more.
    """

    points: int
    gap: float


def coverage(curves: Sequence[Steps], num_steps: int) -> Coverage:
    """Return how well the worst curve covers the halves of a run that stops after so many steps."""
    points, gap = num_steps, 0.0
    half = num_steps // 2
    for curve in curves:
        # What is open becomes a point when the run stops.
        shown = np.append(curve[: np.searchsorted(curve, num_steps)], num_steps)
        middle = int(np.searchsorted(shown, half, side="right"))
        for first, last, inside in ((0, half, shown[:middle]), (half, num_steps, shown[middle:])):
            points = min(points, len(inside))
            edges = np.concatenate([[first], inside, [last]])
            gap = max(gap, float(np.diff(edges).max()) / max(1.0, num_steps / OCTAVE_POINTS))
    return Coverage(points=points, gap=gap)


def lengths(start: int, stop: int, count: int) -> list[int]:
    """Return lengths from a range: its end, evenly spread ones by their logarithm, and around the octaves' ends."""
    spread = np.geomspace(max(start, 1), stop, count).astype(np.int64)
    octaves = [OCTAVE_POINTS << octave for octave in range(40)]
    near = [octave + offset for octave in octaves for offset in (-1, 0, 1)]
    return sorted({length for length in (*map(int, spread), *near) if start < length <= stop} | {stop})


SCENARIOS = {
    "300 metrics, 3 resumes": Run(
        num_steps=10**8,
        num_metrics=300,
        resumes=((3_000_000, 2_500_000), (40_000_000, 39_000_000), (90_000_000, 70_000_000)),
    ),
    "300 metrics, half of the cap is the platform's": Run(num_steps=10**8, num_metrics=300, system=DEFAULT_CAP),
    "610 metrics, as many as the law is for": Run(num_steps=1_300_000_000, num_metrics=610),
    "2,000 metrics": Run(num_steps=10**8, num_metrics=2_000),
    "300 metrics, last step known": Run(num_steps=10**8, num_metrics=300, horizon=10**8 - 1),
    "300 metrics, 4 times as long as it should": Run(num_steps=10**8, num_metrics=300, horizon=25 * 10**6 - 1),
    "20 metrics, last step known": Run(num_steps=10**6, num_metrics=20, horizon=10**6 - 1),
}


def main() -> None:
    """Print a line per scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=200, help="at how many lengths each attempt is checked")
    arguments = parser.parse_args()
    print("| run | steps | points (M) | charged (M) | of (M) | least points in a half | widest gap x 320 / half | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, run in SCENARIOS.items():
        begun = time.perf_counter()
        worst = Coverage(points=run.num_steps, gap=0.0)
        for attempt in simulate(run):
            if attempt.used > run.cap:
                raise SystemExit(f"{name}: {attempt.used:,} points of {run.cap:,} at step {attempt.stop:,}")
            for num_steps in lengths(max(attempt.start, OCTAVE_POINTS), attempt.stop, arguments.lengths):
                found = coverage(attempt.curves, num_steps)
                worst = Coverage(points=min(worst.points, found.points), gap=max(worst.gap, found.gap))
        print(
            f"| {name} | {run.num_steps:.3g} | {attempt.points / 1e6:.2f} | {attempt.used / 1e6:.2f} "
            f"| {run.cap / 1e6:g} | {worst.points} | {worst.gap:.2f} | {time.perf_counter() - begun:.0f} |"
        )


if __name__ == "__main__":
    main()
