"""Long runs stay below the cap and are covered evenly; the simulation that shows it agrees with the real thinner."""

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.step_budget import Run, advance, coverage, lengths, simulate
from lightning_air.tracking.octaves import OCTAVE_POINTS, guaranteed_metrics
from lightning_air.tracking.points import Record
from lightning_air.tracking.strides import Strides
from lightning_air.tracking.thinning import Thinner


@settings(max_examples=40, deadline=None)
@given(
    cap=st.integers(50, 6_000),
    starts=st.lists(st.integers(0, 2_500) | st.just(0), min_size=1, max_size=8).map(sorted),
    stop=st.integers(1, 700) | st.integers(1_000, 3_000),
    horizon=st.none() | st.integers(0, 4_000),
    base=st.integers(1, 5),
    lasting=st.booleans(),
)
def test_the_simulation_makes_the_points_of_the_real_thinner(
    *, cap: int, starts: list[int], stop: int, horizon: int | None, base: int, lasting: bool
) -> None:
    step = base if lasting else "auto"
    thinner = Thinner(step=step, max_metric_steps=cap, reserve=0, exempt=(), horizon=horizon, origin=0)
    points = [
        point
        for step in range(stop)
        for point in thinner.add(
            Record(step, step, {f"metric {i}": 1.0 for i, start in enumerate(starts) if start <= step})
        )
    ]
    strides = Strides(limit=cap, horizon=horizon, base=base if lasting else 1, lasting=lasting, origin=0)

    ends = advance(strides, starts, stop)

    assert Counter(end - 1 for curve in ends for end in curve) == Counter(point.step for point in points)
    assert strides.used == thinner.used


@settings(max_examples=30, deadline=None)
@given(
    num_metrics=st.integers(1, 30),
    slack=st.integers(0, 100_000),
    length=st.integers(1, 1_342_177_280) | st.integers(1, 100_000),
    data=st.data(),
)
def test_the_law_holds_for_any_length_and_any_time_at_which_metrics_appear(
    num_metrics: int, slack: int, length: int, data: st.DataObject
) -> None:
    # As small a limit as the law is promised for.
    limit = 641 * 23 * num_metrics + slack
    assert guaranteed_metrics(limit) >= num_metrics
    starts = sorted(
        [0, *data.draw(st.lists(st.integers(0, length), min_size=num_metrics - 1, max_size=num_metrics - 1))]
    )
    strides = Strides(limit=limit)

    curves = advance(strides, starts, length)

    assert strides.used <= limit
    for start, curve in zip(starts, curves, strict=True):
        edges = [start, *curve, max(start, length)]
        widest = max(after - before for before, after in itertools.pairwise(edges))
        assert widest <= max(1, length / OCTAVE_POINTS)


def test_a_run_of_a_million_steps_resumed_three_times_is_below_the_cap_and_covered_evenly() -> None:
    run = Run(
        num_steps=10**6,
        num_metrics=30,
        cap=1_000_000,
        resumes=((30_000, 25_000), (400_000, 390_000), (900_000, 700_000)),
    )
    for attempt in simulate(run):
        assert attempt.points <= attempt.used <= run.cap
        for num_steps in lengths(max(attempt.start, OCTAVE_POINTS), attempt.stop, 40):
            found = coverage(attempt.curves, num_steps)
            assert found.points >= 320, num_steps
            assert found.gap <= 1, num_steps


def test_a_run_without_end_never_passes_the_cap() -> None:
    run = Run(num_steps=10**17, num_metrics=50, cap=2_000_000)

    (attempt,) = simulate(run)

    assert attempt.used <= run.cap
    assert max(int(curve[-1]) for curve in attempt.curves) > 10**12


def test_more_metrics_than_guaranteed_get_fewer_points_alike() -> None:
    run = Run(num_steps=10**6, num_metrics=200, cap=1_000_000)

    (attempt,) = simulate(run)

    assert attempt.used <= run.cap
    found = coverage(attempt.curves, run.num_steps)
    assert found.points >= 80
    assert found.gap <= 4


def test_a_known_last_step_is_covered_more_evenly() -> None:
    unknown, known = (
        coverage(next(simulate(Run(num_steps=10**6, num_metrics=10, cap=1_000_000, horizon=horizon))).curves, 10**6)
        for horizon in (None, 10**6 - 1)
    )

    assert known.gap < unknown.gap / 2
