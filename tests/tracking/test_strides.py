"""Windows are charged as they open, the limit holds whatever happens, and what is left always lasts for more."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.step_budget import advance
from lightning_air.tracking.octaves import OCTAVE_POINTS, guaranteed_metrics
from lightning_air.tracking.strides import Strides

BILLION = 10**9


def opened(strides: Strides, step: int) -> int:
    """The width of a window opened at a step."""
    end = strides.open(step)
    assert end is not None
    assert end > step
    assert end % strides.stride == 0
    return strides.stride


def test_a_window_ends_at_the_next_multiple_of_its_stride_and_is_charged_when_it_opens() -> None:
    strides = Strides(limit=100_000, base=10, points_per_window=3)

    assert strides.open(14) == 20
    assert (strides.used, strides.left) == (3, 99_997)
    assert strides.open(20) == 30
    assert strides.used == 6


def test_a_refund_can_be_spent_again() -> None:
    strides = Strides(limit=1_000, points_per_window=3)
    strides.open(0)

    strides.refund(2)

    assert strides.used == 1


def test_few_metrics_get_a_point_for_every_step_for_long() -> None:
    strides = Strides(limit=9_000_000)
    strides.set_weight(20)

    assert opened(strides, 0) == 1
    assert opened(strides, 10_000) == 1
    assert 1 < opened(strides, 100_000) <= 100_000 / OCTAVE_POINTS


@settings(deadline=None)
@given(st.integers(1, 610), st.integers(0, 1_342_177_279))
def test_a_stride_obeys_the_law_wherever_so_many_metrics_appear(num_metrics: int, step: int) -> None:
    strides = Strides(limit=9_000_000)
    strides.set_weight(num_metrics)

    assert opened(strides, step) <= max(1, step / OCTAVE_POINTS)


def test_a_limit_lowered_below_what_was_used_lets_nothing_through() -> None:
    strides = Strides(limit=1_000)
    for step in range(100):
        strides.open(step)

    strides.set_limit(50)

    assert strides.open(100) is None
    assert not strides.charge_one(100)
    assert (strides.used, strides.left) == (100, 0)


def test_an_octave_beyond_the_plan_takes_half_of_what_is_left() -> None:
    strides = Strides(limit=1_000_000)
    left = [strides.left]
    for octave in range(30, 40):
        start, stop = OCTAVE_POINTS << octave, OCTAVE_POINTS << (octave + 1)
        advance(strides, [start], stop)
        left.append(strides.left)

    assert all(after >= before // 2 for before, after in itertools.pairwise(left))
    assert left[-1] < left[0] / 100


def test_going_back_again_and_again_does_not_use_up_the_limit() -> None:
    strides = Strides(limit=100_000)
    strides.set_weight(2)
    for _ in range(200):
        step = 10_000
        while step < 20_000:
            end = strides.open(step)
            if end is None:
                break
            step = end

    assert 0 < strides.left < 100_000
    assert opened(strides, 20_480) > 1


def test_a_fixed_stride_is_kept_until_what_is_left_is_needed_for_the_rest_of_the_run() -> None:
    strides = Strides(limit=900_000, base=10, lasting=True)
    ends = advance(strides, [0, 0], 6_000_000)[0]
    gaps = [after - before for before, after in itertools.pairwise(ends)]

    assert gaps[0] == 10
    kept = gaps.index(next(gap for gap in gaps if gap != 10))
    assert kept * 10 > 4_000_000  # 2 metrics * 400,000 points of 900,000
    # Then as wide as it takes for 1e9 steps, which is still finer than the law asks for.
    assert all(gap <= max(10, end / OCTAVE_POINTS) for gap, end in zip(gaps, ends, strict=False))


def test_a_fixed_stride_that_does_not_reach_the_known_end_is_widened_to_the_smallest_multiple_that_does() -> None:
    strides = Strides(limit=900_000, base=10, lasting=True, horizon=10**7 - 1)
    strides.set_weight(10)

    ends = advance(strides, [0] * 10, 10**7)[0]

    gaps = {after - before for before, after in itertools.pairwise(ends)}
    assert max(gaps) == 130  # 10 metrics of 87,000 points each, 5,000 of them for the beginning
    assert all(gap % 10 == 0 for gap in gaps)


def test_a_fixed_stride_that_reaches_the_known_end_stays() -> None:
    strides = Strides(limit=900_000, base=10, lasting=True, horizon=10**6 - 1)
    strides.set_weight(8)

    assert {opened(strides, step) for step in range(0, 10**6, 10)} == {10}


def test_a_metric_that_appears_widens_the_windows_at_once() -> None:
    strides = Strides(limit=20_000, horizon=9_999)
    strides.set_weight(1)
    assert opened(strides, 5_000) == 1

    strides.set_weight(10)

    assert opened(strides, 5_001) > 1


def test_a_known_end_that_comes_later_makes_the_stride_even() -> None:
    strides = Strides(limit=9_000_000)
    strides.set_weight(300)
    wide = opened(strides, 50_000)

    strides.set_horizon(99_999)

    assert opened(strides, 50_001) < wide
    strides.set_horizon(None)
    assert opened(strides, 50_002) == wide


@pytest.mark.parametrize("times", [1.5, 2, 4, 8])
def test_a_run_that_goes_on_beyond_its_known_end_keeps_the_law(times: float) -> None:
    strides = Strides(limit=900_000, horizon=10**6 - 1)

    ends = advance(strides, [0] * 30, int(10**6 * times))[0]

    for before, after in itertools.pairwise(ends):
        assert after - before <= max(1, before / OCTAVE_POINTS)


@pytest.mark.parametrize("num_metrics", [1, 10, 30, 61])
@pytest.mark.parametrize("horizon", [10**6, 10**9])
def test_a_known_end_leaves_the_law_to_a_run_that_stops_early(num_metrics: int, horizon: int) -> None:
    strides = Strides(limit=900_000, horizon=horizon)

    ends = advance(strides, [0] * num_metrics, horizon)[0]

    for before, after in itertools.pairwise(ends):
        assert after - before <= max(1, before / OCTAVE_POINTS)


@pytest.mark.parametrize("horizon", [None, 10**6])
def test_more_metrics_than_points_get_half_of_what_is_left_and_no_more_in_the_same_octave(horizon: int | None) -> None:
    strides = Strides(limit=100, horizon=horizon)
    strides.set_weight(300)

    granted = sum(strides.open(0) is not None for _ in range(300))

    assert granted == 50  # half of what is left
    assert strides.left == 50


@settings(deadline=None)
@given(
    limit=st.integers(0, 3_000),
    num_metrics=st.integers(1, 40),
    points_per_window=st.integers(1, 4),
    base=st.integers(1, 50),
    lasting=st.booleans(),
    horizon=st.none() | st.integers(0, 10**5),
    steps=st.lists(st.integers(-100, 10**6) | st.integers(0, 10**19), max_size=400),
)
def test_the_limit_holds_for_any_steps_in_any_order(
    *,
    limit: int,
    num_metrics: int,
    points_per_window: int,
    base: int,
    lasting: bool,
    horizon: int | None,
    steps: list[int],
) -> None:
    strides = Strides(limit=limit, points_per_window=points_per_window, base=base, lasting=lasting, horizon=horizon)
    strides.set_weight(num_metrics * points_per_window)
    charged = 0
    for step in steps:
        if strides.open(step) is not None:
            charged += points_per_window
        charged += strides.charge_one(step)

    assert strides.used == charged <= limit


@settings(deadline=None)
@given(st.integers(1, 2_000), st.integers(1, 2_000_000))
def test_what_is_said_to_be_reached_is_reached(num_metrics: int, step: int) -> None:
    strides = Strides(limit=9_000_000)
    strides.set_weight(num_metrics)
    strides.open(step)

    reach = strides.reach(step)

    if reach is None:
        assert num_metrics > guaranteed_metrics(9_000_000)
        assert strides.points_per_half(step) <= 320
    else:
        assert reach >= 1_342_177_280
        assert strides.points_per_half(step) >= 320


def test_reach_of_a_known_end_is_that_end_if_it_gets_enough_points() -> None:
    strides = Strides(limit=9_000_000, horizon=10**6)
    strides.set_weight(300)
    assert strides.reach(0) == 10**6

    strides.set_weight(15_000)
    assert strides.reach(0) is None


def test_reach_of_a_fixed_stride_lies_beyond_what_it_lasts_for() -> None:
    strides = Strides(limit=9_000_000, base=10, lasting=True)
    strides.set_weight(20)
    strides.open(0)

    assert (strides.reach(0) or 0) >= 1_342_177_280


@settings(deadline=None)
@given(st.data())
def test_a_snapshot_goes_on_as_what_it_was_taken_of(data: st.DataObject) -> None:
    strides = Strides(
        limit=data.draw(st.integers(10, 5_000)),
        base=data.draw(st.integers(1, 3)),
        lasting=data.draw(st.booleans()),
        horizon=data.draw(st.none() | st.integers(0, 5_000)),
    )
    strides.set_weight(data.draw(st.integers(1, 20)))
    steps = st.lists(st.integers(0, 10_000), max_size=60)
    for step in data.draw(steps):
        strides.open(step)

    copy = Strides.from_snapshot(json.loads(json.dumps(strides.snapshot())))

    assert vars(copy) == vars(strides)
    for step in data.draw(steps):
        assert copy.open(step) == strides.open(step)


def test_the_run_counts_from_its_first_step() -> None:
    strides = Strides(limit=9_000_000, origin=BILLION)
    strides.set_weight(600)
    assert opened(strides, BILLION) == 1

    strides.set_origin(0)

    assert 1 < opened(strides, BILLION) <= BILLION / OCTAVE_POINTS
