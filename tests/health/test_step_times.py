"""How long steps took: every step is counted once, in the column in which it ended, and old ones are let go."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.health.step_times import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def steps_of(durations: list[float], *, num_columns: int = 1_000, column_seconds: float = 10) -> StepTimes:
    clock = Clock()
    steps = StepTimes(num_columns, column_seconds, clock=clock, wall_clock=lambda: 1_000_000.0)
    steps.begin()
    for duration in durations:
        clock.now += duration
        steps.note()
    return steps


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 60), min_size=1, max_size=100))
def test_every_step_is_in_the_column_in_which_it_ended(durations: list[float]) -> None:
    window = steps_of(durations).window()
    assert window is not None
    ends = 1_000_000 + np.cumsum(durations)
    for number, count in enumerate(window.counts):
        start = window.start_seconds + 10 * number
        # Not those on the border: sums of floats differ in their last digits.
        inside = [d for d, end in zip(durations, ends, strict=True) if start + 1e-6 < end < start + 10 - 1e-6]
        around = [d for d, end in zip(durations, ends, strict=True) if start - 1e-6 <= end <= start + 10 + 1e-6]
        assert len(inside) <= count <= len(around)
        if inside and len(inside) == len(around):
            assert window.lowest[number] == pytest.approx(min(inside))
            assert window.highest[number] == pytest.approx(max(inside))
            assert window.mean[number] == pytest.approx(sum(inside) / len(inside))
    assert window.counts.sum() == len(durations)
    assert window.counts[0] > 0
    assert window.counts[-1] > 0


def test_columns_without_a_step_are_gaps() -> None:
    window = steps_of([1, 1, 35, 1]).window()
    assert window is not None
    assert window.counts.tolist() == [2, 0, 0, 2]
    assert window.highest.tolist()[::3] == [1.0, 35.0]
    assert np.isnan(window.mean[1:3]).all()


def test_only_the_last_columns_are_kept_and_memory_stays_the_same() -> None:
    window = steps_of([1.0] * 1_000, num_columns=20).window()
    assert window is not None
    assert window.counts.tolist() == [10] * 19 + [1]
    assert window.start_seconds == 1_000_810
    alone = steps_of([1.0, 500.0], num_columns=20).window()
    assert alone is not None
    assert alone.counts.tolist() == [1]


def test_nothing_before_the_first_step() -> None:
    assert steps_of([]).window() is None


def test_a_pause_between_two_trainings_is_no_step() -> None:
    clock = Clock()
    steps = StepTimes(10, 10, clock=clock, wall_clock=lambda: 0.0)
    for start in (0.0, 50.0):
        clock.now = start
        steps.begin()
        clock.now = start + 1
        steps.note()
    window = steps.window()
    assert window is not None
    assert [each for each in window.highest.tolist() if not math.isnan(each)] == [1.0, 1.0]


def test_noting_a_step_costs_microseconds() -> None:
    steps = StepTimes(720, 10)
    steps.begin()
    best = math.inf
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(1_000):
            steps.note()
        best = min(best, time.perf_counter() - begun)
    assert best / 1_000 < 20e-6
