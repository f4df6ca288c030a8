"""A window becomes its aggregates at its last step and time, whatever was logged in it, and whoever else logs."""

import json
import math
import sys

import pytest

from lightning_air.tracking.points import Point
from lightning_air.tracking.strides import Strides
from lightning_air.tracking.window import Aggregate, Event, Window
from lightning_air.tracking.windows import MAX_EVENTS_PER_METRIC, Windows

NAN, INF = math.nan, math.inf


def windows_of(
    *keys: str, aggregates: tuple[Aggregate, ...] = ("mean",), width: int = 10, limit: int = 10**6
) -> Windows:
    strides = Strides(limit=limit, points_per_window=len(aggregates), base=width, lasting=True)
    windows = Windows(strides, aggregates)
    windows.register(keys, 0)
    return windows


def logged(windows: Windows, step: int, **values: float) -> list[Point]:
    """Log at a step, a second after the one before."""
    points: list[Point] = []
    assert windows.add(values.items(), step, step * 1_000, points) == []
    return points


def flushed(windows: Windows) -> list[Point]:
    points: list[Point] = []
    windows.close_all(points)
    return points


def test_a_window_becomes_a_point_at_its_last_step_and_time() -> None:
    windows = windows_of("loss")

    assert logged(windows, 0, loss=1.0) == []
    assert logged(windows, 7, loss=2.0) == []
    assert logged(windows, 10, loss=9.0) == [Point("loss", 1.5, 7_000, 7)]
    assert flushed(windows) == [Point("loss", 9.0, 10_000, 10)]
    assert flushed(windows) == []


def test_several_aggregates_are_a_point_each_and_the_first_has_the_plain_name() -> None:
    windows = windows_of("loss", aggregates=("mean", "min", "max", "last"))
    for step, value in enumerate([3.0, -1.0, 4.0, 2.0]):
        logged(windows, step, loss=value)

    assert flushed(windows) == [
        Point("loss", 2.0, 3_000, 3),
        Point("loss/min", -1.0, 3_000, 3),
        Point("loss/max", 4.0, 3_000, 3),
        Point("loss/last", 2.0, 3_000, 3),
    ]
    assert windows.strides.used == 4


def test_a_metric_logged_rarely_gets_a_point_each_time() -> None:
    windows = windows_of("loss", "epoch")
    points = [
        point
        for step in range(0, 5_000, 5)
        for point in logged(windows, step, loss=0.0, **({"epoch": step / 1_000} if step % 1_000 == 0 else {}))
    ]

    epochs = [point for point in [*points, *flushed(windows)] if point.key == "epoch"]
    assert [point.step for point in epochs] == [0, 1_000, 2_000, 3_000, 4_000]


def test_an_earlier_step_closes_the_window_and_opens_one_there() -> None:
    windows = windows_of("loss")
    logged(windows, 25, loss=1.0)

    assert logged(windows, 21, loss=2.0) == [Point("loss", 1.0, 25_000, 25)]
    assert logged(windows, 25, loss=4.0) == []
    assert flushed(windows) == [Point("loss", 3.0, 25_000, 25)]


def test_the_same_step_twice_is_one_window() -> None:
    windows = windows_of("loss", width=1)
    logged(windows, 3, loss=1.0)

    assert logged(windows, 3, loss=2.0) == []
    assert flushed(windows) == [Point("loss", 1.5, 3_000, 3)]


def test_an_axis_of_its_own_does_not_disturb_the_others() -> None:
    windows = windows_of("loss", "by_sample")
    points = []
    for step in range(1_000, 1_100):
        points += logged(windows, step, loss=1.0)
        points += logged(windows, step * 7 % 100_000, by_sample=1.0)

    assert len([point for point in points if point.key == "loss"]) == 9
    assert len([point for point in points if point.key == "by_sample"]) == 69


def test_values_that_are_not_finite_are_kept_out_counted_and_told() -> None:
    windows = windows_of("loss", "accuracy")
    for step, value in enumerate([1.0, NAN, INF, 3.0, -INF]):
        logged(windows, step, loss=value, accuracy=NAN)

    assert flushed(windows) == [
        Point("loss", 2.0, 4_000, 4),
        Point("nonfinite/loss", 3.0, 4_000, 4),
        Point("nonfinite/accuracy", 5.0, 4_000, 4),
    ]
    assert [event for event in windows.events if event.key == "loss"] == [
        Event("loss", 1, 1_000, "nan"),
        Event("loss", 2, 2_000, "inf"),
        Event("loss", 4, 4_000, "-inf"),
    ]
    assert windows.strides.used == 3


def test_a_window_of_nothing_finite_costs_one_point_whatever_the_aggregates() -> None:
    windows = windows_of("loss", aggregates=("mean", "min", "max"))
    logged(windows, 0, loss=NAN)

    assert flushed(windows) == [Point("nonfinite/loss", 1.0, 0, 0)]
    assert windows.strides.used == 1


def test_only_the_first_few_values_that_are_not_finite_are_told() -> None:
    windows = windows_of("loss")
    for step in range(100):
        logged(windows, step, loss=NAN)

    assert len(windows.events) == MAX_EVENTS_PER_METRIC


def test_the_mean_of_large_values_is_their_mean() -> None:
    windows = windows_of("loss")
    for step, value in enumerate([1e308, 1e308, 1.0, 1e308]):
        logged(windows, step, loss=value)

    (point,) = flushed(windows)
    assert point.value == pytest.approx(0.75e308)


def test_the_mean_of_one_tiny_value_is_that_value() -> None:
    windows = windows_of("loss")
    logged(windows, 0, loss=5e-324)

    assert flushed(windows)[0].value == 5e-324


def test_a_window_that_is_shown_with_what_followed_in_it_makes_no_point() -> None:
    windows = windows_of("shown", "open", "new", width=100)
    logged(windows, 5, shown=1.0, open=1.0, new=1.0)
    used = windows.strides.used

    windows.forget_shown({"shown": (5_000, 6), "open": (5_000, 5)})

    assert [point.key for point in flushed(windows)] == ["open", "new"]
    assert windows.strides.used == used - 1
    assert (windows.num_windows, windows.num_thinned, windows.num_pending) == (2, 1, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_overflows_does_not_become_an_infinite_point(sign: int) -> None:
    windows = windows_of("loss")
    for step in range(5):
        logged(windows, step, loss=sign * sys.float_info.max)

    (point,) = flushed(windows)
    assert math.isfinite(point.value)
    assert point.value == pytest.approx(sign * sys.float_info.max)


def test_values_of_unknown_metrics_are_handed_back() -> None:
    assert windows_of("loss").add([("loss", 1.0), ("other", 2.0)], 0, 0, []) == [("other", 2.0)]


def test_what_nothing_is_left_for_is_dropped_and_counted() -> None:
    windows = windows_of("a", "b", "c", limit=2)
    points = [point for step in range(100) for point in logged(windows, step, a=1.0, b=1.0, c=1.0)]
    points += flushed(windows)

    assert len(points) <= 2
    assert windows.num_windows == len(points)
    assert windows.num_windows + windows.num_thinned + windows.num_dropped == 300


def test_the_count_of_values_that_are_not_finite_is_dropped_if_no_point_is_left_for_it() -> None:
    windows = windows_of("loss", limit=2, width=1_000)
    for step in range(10):
        logged(windows, step, loss=NAN if step % 2 else 1.0)
    windows.strides.set_limit(1)

    assert flushed(windows) == [Point("loss", 1.0, 9_000, 9)]
    assert windows.num_dropped == 5
    assert windows.strides.used == 1


# ---- sweeping --------------------------------------------------------------------------------------------------------


def swept(windows: Windows, step: int, before_ms: int) -> list[str]:
    points: list[Point] = []
    windows.sweep(step, before_ms, points)
    return [point.key for point in points]


def test_the_window_of_a_metric_that_went_quiet_is_closed_once_a_step_lies_beyond() -> None:
    windows = windows_of("loss", "epoch")
    logged(windows, 3, loss=1.0, epoch=1.0)
    logged(windows, 9, loss=1.0)

    assert swept(windows, 9, 9_000) == []
    assert swept(windows, 10, 9_000) == ["epoch"]
    assert swept(windows, 10, 9_000) == []


def test_the_window_of_an_earlier_timeline_is_closed_once_a_step_lies_before() -> None:
    windows = windows_of("loss", "epoch")
    logged(windows, 8, loss=1.0, epoch=1.0)

    assert swept(windows, 7, 9_000) == ["loss", "epoch"]


def test_the_window_of_a_metric_that_is_being_logged_is_not_swept() -> None:
    windows = windows_of("loss")
    logged(windows, 8, loss=1.0)

    assert swept(windows, 1_000, 8_000) == []


# ---- metrics that come and go ----------------------------------------------------------------------------------------


def test_metrics_that_were_silent_for_an_octave_make_room_for_the_others() -> None:
    windows = Windows(Strides(limit=20_000), ("mean",))
    windows.register([f"once{number}" for number in range(50)], 0)
    windows.register(["loss"], 0)
    logged(windows, 0, **{f"once{number}": 1.0 for number in range(50)})
    widths = []
    for step in range(6_000):
        logged(windows, step, loss=1.0)
        widths.append(windows.strides.stride)

    assert widths[0] > 1
    assert widths[-1] < widths[0]
    logged(windows, 6_000, **{f"once{number}": 1.0 for number in range(50)})
    assert windows.strides.stride > widths[-1]


def test_all_metrics_of_a_record_are_planned_for_together() -> None:
    strides = Strides(limit=9_000_000)
    windows = Windows(strides, ("mean",))
    keys = [f"metric{number}" for number in range(600)]
    windows.register(keys, 1_000_000)

    windows.add([(key, 1.0) for key in keys], 1_000_000, 0, [])

    ends = {json.dumps(window.snapshot()[4]) for window in windows._windows.values()}
    assert len(ends) == 1


# ---- snapshots -------------------------------------------------------------------------------------------------------


def test_an_empty_window_has_a_short_snapshot() -> None:
    window = Window("loss", 7)

    assert len(window.snapshot()) == 4


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, sys.float_info.max, NAN])
def test_a_window_comes_back_exactly(value: float) -> None:
    windows = windows_of("loss", "other", aggregates=("mean", "min", "max", "last"))
    logged(windows, 3, loss=value)
    logged(windows, 4, loss=value)

    copy = Windows.from_snapshot(
        json.loads(json.dumps(windows.snapshot(), allow_nan=False)), ("mean", "min", "max", "last")
    )

    assert copy.snapshot() == windows.snapshot()
    assert flushed(copy) == flushed(windows)
