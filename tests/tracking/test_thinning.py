"""Whatever is logged: the cap holds, points are exact and repeatable, and nothing vanishes without being counted."""

import fnmatch
import itertools
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.thinning import SWEEP_MS, Thinner

NUMPY: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "last": lambda values: values[-1],
}


def thinned(thinner: Thinner, records: Iterable[Record]) -> list[Point]:
    return [point for record in records for point in thinner.add(record)]


def per_step(num_steps: int, *keys: str, start: int = 0, interval: int = 1) -> list[Record]:
    """Records of metrics that are the step itself, 10 ms apart."""
    return [
        Record(1_000 + 10 * step, step, dict.fromkeys(keys, float(step)))
        for step in range(start, start + num_steps, interval)
    ]


def steps_of(points: Iterable[Point], key: str) -> list[int]:
    return [point.step for point in points if point.key == key]


# ---- strategies ------------------------------------------------------------------------------------------------------

KEYS = ("loss", "lr", "grad/norm", "rare", "val/loss", "val_acc", "test")
finite = st.floats(allow_nan=False, allow_infinity=False)
any_float = st.floats(width=32) | finite


@st.composite
def logs(draw: st.DrawFn, max_size: int = 60) -> list[Record]:
    """Records of a run: steps that mostly go on, sometimes far, sometimes back; metrics that come and go."""
    step, timestamp_ms, records = draw(st.integers(-5, 2_000)), 1_000_000, []
    for _ in range(draw(st.integers(0, max_size))):
        kind = draw(st.integers(0, 9))
        if kind < 7:
            step += draw(st.integers(0, 3))
        elif kind == 7:
            step += draw(st.integers(0, 100_000))
        elif kind == 8:
            step -= draw(st.integers(0, 2_000))
        else:
            step = draw(st.integers(0, 50))
        timestamp_ms += draw(st.integers(1, 2 * SWEEP_MS))
        records.append(Record(timestamp_ms, step, draw(st.dictionaries(st.sampled_from(KEYS), any_float, max_size=4))))
    return records


@st.composite
def options(draw: st.DrawFn, least: int = 1, most: int = 400) -> dict[str, Any]:
    # With much left, a small reserve grows.
    max_metric_steps = draw(st.integers(least, most) | st.integers(100 * most, 200 * most))
    return {
        "step": draw(st.just("auto") | st.integers(1, 20)),
        "max_metric_steps": max_metric_steps,
        "reserve": draw(st.none() | st.integers(0, max_metric_steps - 1) | st.just(min(9, max_metric_steps - 1))),
        "aggregate": draw(st.permutations(list(NUMPY)).map(lambda names: tuple(names[: len(names) // 2]))),
        "exempt": draw(st.sampled_from([(), ("val*", "test*"), ("*",)])),
        "system": draw(st.integers(0, 300)),
        "horizon": draw(st.none() | st.integers(0, 5_000)),
    }


# ---- the cap ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(options(), st.lists(logs(max_size=40), min_size=1, max_size=4), st.data())
def test_the_cap_holds_over_all_attempts_whatever_is_logged(
    options: dict[str, Any], attempts: list[list[Record]], data: st.DataObject
) -> None:
    """Attempts know only what was charged before; the horizon, and what others have, change on the way."""
    cap = options["max_metric_steps"]
    charged = num_points = 0
    for records in attempts:
        thinner = Thinner(**options, spent=charged)
        for record in records:
            points = thinner.add(record)
            num_points += len(points)
            assert num_points <= thinner.used
            match data.draw(st.integers(0, 19)):
                case 0:
                    thinner.set_horizon(data.draw(st.none() | st.integers(0, 10_000)))
                case 1:
                    others = data.draw(st.integers(-5, max(0, cap - thinner.used)))
                    thinner.spend(others)
                    num_points += max(0, others)
                case 2:
                    num_points += len(thinner.flush())
        if data.draw(st.booleans()):  # else it was killed
            num_points += len(thinner.flush())
        charged = thinner.used + data.draw(st.integers(0, 20)) * (thinner.used < cap - 20)
        assert num_points <= thinner.used <= cap

    assert num_points <= cap


@settings(max_examples=50, deadline=None)
@given(options(1, 30), logs())
def test_nothing_vanishes_without_being_counted(options: dict[str, Any], records: list[Record]) -> None:
    thinner = Thinner(**options)
    points = thinned(thinner, records)

    for is_flushed in (False, True):
        counts = thinner.counts
        assert counts.logged == sum(len(record.values) for record in records)
        assert counts.logged == counts.windows + counts.thinned + counts.dropped + counts.pending
        assert counts.points == len(points)
        if not is_flushed:
            points += thinner.flush()
    assert thinner.counts.pending == 0
    assert thinner.used == len(points)


def test_a_cap_of_one_point() -> None:
    thinner = Thinner(max_metric_steps=1, reserve=0)

    points = [*thinned(thinner, per_step(5_000, "loss")), *thinner.flush()]

    assert len(points) == 1
    assert thinner.counts.dropped > 0


# ---- the points ------------------------------------------------------------------------------------------------------


def told_apart(records: Sequence[Record], points: Sequence[Point], key: str) -> list[tuple[list[float], list[Point]]]:
    """Each window's values, as its end and the one before tell, with its points."""
    by_end = defaultdict(list)
    for point in points:
        if point.key in (key, f"nonfinite/{key}", *(f"{key}/{name}" for name in NUMPY)):
            by_end[point.timestamp_ms].append(point)
    values = [(record.timestamp_ms, record.step, record.values[key]) for record in records if key in record.values]
    windows, begin = [], 0
    for end_ms in sorted(by_end):
        window = [(step, value) for time_ms, step, value in values if begin < time_ms <= end_ms]
        begin = end_ms
        assert {point.step for point in by_end[end_ms]} == {window[-1][0]}
        assert [step for step, _ in window] == sorted(step for step, _ in window)
        windows.append(([value for _, value in window], by_end[end_ms]))
    assert not [value for time_ms, _, value in values if time_ms > begin]
    return windows


@settings(max_examples=50, deadline=None)
@given(options(100_000, 100_000), st.sampled_from([None, 0, 50_000]), logs())
def test_points_are_numpys_aggregates_of_all_that_was_logged(
    options: dict[str, Any], reserve: int | None, records: list[Record]
) -> None:
    thinner = Thinner(**options | {"reserve": reserve})
    points = [*thinned(thinner, records), *thinner.flush()]
    assert thinner.counts.dropped == 0

    for key in KEYS:
        is_match = any(fnmatch.fnmatchcase(key, pattern) for pattern in options["exempt"])
        is_exempt = is_match and reserve != 0
        names = ("last",) if is_exempt else options["aggregate"]
        for values, shown in told_apart(records, points, key):
            inside = [value for value in values if math.isfinite(value)]
            by_key = {point.key: point.value for point in shown}
            for index, name in enumerate(names):
                found = by_key.pop(f"{key}/{name}" if index else key, None)
                if not inside:
                    assert found is None
                    continue
                assert math.isfinite(found)
                with np.errstate(over="ignore", invalid="ignore"):
                    expected = float(NUMPY[name](np.array(inside)))
                if math.isfinite(expected) and abs(expected) < sys.float_info.max / 100:
                    scale = max(map(abs, inside))
                    assert found == pytest.approx(expected, rel=1e-12, abs=scale * 1e-12)
            num_nonfinite = len(values) - len(inside)
            assert by_key == ({f"nonfinite/{key}": num_nonfinite} if num_nonfinite else {})


@settings(max_examples=50, deadline=None)
@given(options(), logs())
def test_the_same_records_give_the_same_points(options: dict[str, Any], records: list[Record]) -> None:
    def points() -> list[Point]:
        thinner = Thinner(**options)
        return [*thinned(thinner, records), *thinner.flush()]

    assert points() == points()


@settings(max_examples=50, deadline=None)
@given(options(1, 2_000), logs(), st.data())
def test_a_snapshot_goes_on_with_the_very_same_points(
    options: dict[str, Any], records: list[Record], data: st.DataObject
) -> None:
    thinner = Thinner(**options)
    middle = data.draw(st.integers(0, len(records)))
    for record in records[:middle]:
        thinner.add(record)
        if data.draw(st.booleans()):
            thinner.take_events()
        thinner.warnings_due()

    text = json.dumps(thinner.snapshot(), allow_nan=False)
    copy = Thinner.from_snapshot(json.loads(text))

    assert json.dumps(copy.snapshot(), allow_nan=False) == text
    for record in records[middle:]:
        assert copy.add(record) == thinner.add(record)
        assert copy.warnings_due() == thinner.warnings_due()
    assert copy.flush() == thinner.flush()
    assert copy.take_events() == thinner.take_events()
    assert copy.counts == thinner.counts
    assert copy.plan() == thinner.plan()
    assert copy.used == thinner.used


def test_a_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="must be of version 1, got 2"):
        Thinner.from_snapshot({**Thinner().snapshot(), "version": 2})


# ---- the law ---------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2_000) | st.integers(6_000, 12_000), st.integers(0, 3), st.data())
def test_either_half_of_a_run_of_any_length_has_320_even_points(
    num_metrics: int, length: int, num_resumes: int, data: st.DataObject
) -> None:
    """Also if metrics appear late, and the run goes back a little and on."""
    keys = [f"metric{number}" for number in range(num_metrics)]
    starts = {key: data.draw(st.integers(0, length - 1)) if index else 0 for index, key in enumerate(keys)}
    thinner = Thinner(max_metric_steps=50_000 * num_metrics, reserve=0)
    step, points = 0, []
    kills = sorted(data.draw(st.lists(st.integers(1, length), min_size=num_resumes, max_size=num_resumes)))
    for kill in [*kills, length]:
        while step < kill:
            points += thinner.add(Record(step, step, {key: 0.0 for key in keys if starts[key] <= step}))
            step += 1
        step = max(0, step - data.draw(st.integers(0, 200))) if kill != length else step
    points += thinner.flush()

    for key in keys:
        shown = sorted({*steps_of(points, key)})
        assert shown[-1] == length - 1
        edges = [starts[key] - 1, *shown]
        assert max(after - before for before, after in itertools.pairwise(edges)) <= max(1, length / 640)
        for half in (range(length // 2), range(length // 2, length)):
            num_logged = max(0, half.stop - max(half.start, starts[key]))
            if starts[key] == 0:
                assert sum(half.start <= step < half.stop for step in shown) >= min(320, num_logged)


def test_a_run_that_continues_another_by_its_mark_is_as_coarse_as_if_it_had_never_stopped() -> None:
    thinner = Thinner(max_metric_steps=100_000, spent=20_000)

    thinned(thinner, per_step(10, *"abc", start=10_000_000))

    assert thinner.snapshot()["origin"] == 0
    assert thinner.snapshot()["steps"]["strides"]["stride"] > 100


def test_a_run_that_starts_late_counts_from_its_first_step() -> None:
    thinner = Thinner(max_metric_steps=100_000)

    thinned(thinner, per_step(10, *"abc", start=10_000_000))

    assert thinner.snapshot()["origin"] == 10_000_000
    assert thinner.snapshot()["steps"]["strides"]["stride"] == 1


def test_a_run_that_goes_back_behind_its_first_step_counts_from_there() -> None:
    thinner = Thinner(max_metric_steps=100_000)
    thinned(thinner, per_step(10, "loss", start=1_000))

    thinned(thinner, per_step(10, "loss", start=500))

    assert thinner.snapshot()["origin"] == 500


# ---- options ---------------------------------------------------------------------------------------------------------


def test_a_fixed_step_makes_one_point_per_that_many_steps() -> None:
    thinner = Thinner(step=50)

    points = [*thinned(thinner, per_step(1_000, "loss")), *thinner.flush()]

    assert steps_of(points, "loss") == list(range(49, 1_000, 50))
    assert points[0].value == np.mean(range(50))


def test_a_fixed_step_becomes_wider_before_the_budget_ends() -> None:
    thinner = Thinner(step=10, max_metric_steps=2_000, reserve=0)

    points = [*thinned(thinner, per_step(200_000, "loss", interval=5)), *thinner.flush()]

    shown = steps_of(points, "loss")
    assert len(shown) < 2_000
    assert shown[1] - shown[0] == 10
    assert shown[-1] == 199_995
    assert thinner.counts.dropped == 0


def test_a_known_horizon_gives_the_smallest_even_stride() -> None:
    thinner = Thinner(max_metric_steps=22_000, reserve=2_000, horizon=99_999)

    points = [*thinned(thinner, per_step(100_000, "loss")), *thinner.flush()]

    gaps = [after - before for before, after in itertools.pairwise(steps_of(points, "loss"))]
    # Of 20,000 points 2,500 are held back, and some 2,600 make the first 5,120 steps finer; so 6 would not fit.
    assert statistics.mode(gaps) == max(gaps) == 7
    assert len(points) > 14_000


def test_a_horizon_that_is_wrong_either_way_does_not_end_the_curve() -> None:
    for horizon in (999, 10**9):
        thinner = Thinner(max_metric_steps=20_000, horizon=horizon)

        points = [*thinned(thinner, per_step(50_000, "loss")), *thinner.flush()]

        shown = steps_of(points, "loss")
        assert max(after - before for before, after in itertools.pairwise(shown)) <= 50_000 / 640
        assert thinner.counts.dropped == 0


def test_exempt_metrics_are_points_each_also_at_the_same_step() -> None:
    thinner = Thinner(step=100)

    points = thinned(thinner, [Record(10 * i, 5 * (i // 2), {"val/loss": float(i), "loss": 1.0}) for i in range(10)])

    assert [point.value for point in points if point.key == "val/loss"] == [float(i) for i in range(10)]


def test_exempt_metrics_are_thinned_to_their_last_value_once_half_of_the_reserve_is_used() -> None:
    thinner = Thinner(max_metric_steps=10_000, reserve=100)

    points = [*thinned(thinner, per_step(10_000, "val/loss")), *thinner.flush()]

    assert steps_of(points, "val/loss")[:50] == list(range(50))
    assert len(points) <= 100
    assert points[-1] == Point("val/loss", 9_999.0, 1_000 + 99_990, 9_999)
    assert all(point.value == point.step for point in points)
    assert thinner.counts.dropped == 0
    assert any("Exempt metrics (val*, test*) are thinned" in warning for warning in thinner.warnings_due())
    assert not any("Exempt" in warning for warning in thinner.warnings_due())


def test_exempt_metrics_do_not_take_from_the_others_nor_the_others_from_them() -> None:
    thinner = Thinner(max_metric_steps=1_000, reserve=100)

    thinned(thinner, per_step(20_000, "loss", "val/loss"))

    counts = thinner.counts
    assert counts.dropped == 0
    assert thinner._exempt.strides.used <= 100
    assert thinner._steps.strides.used <= 900


@pytest.mark.parametrize("reserve", [1, 10])
def test_a_reserve_that_is_too_small_costs_detail_and_no_values(reserve: int) -> None:
    thinner = Thinner(reserve=reserve, max_metric_steps=100_000)
    points = thinned(thinner, per_step(200_000, "loss", "val_loss")) + thinner.flush()
    assert thinner.counts.dropped == 0
    assert len(points) <= 100_000
    for key in ("loss", "val_loss"):
        steps = steps_of(points, key)
        assert sum(step >= 100_000 for step in steps) >= 320
        assert sum(step < 100_000 for step in steps) >= 320
    assert steps_of(points, "val_loss")[-1] == 199_999


def test_without_a_reserve_exempt_metrics_are_thinned_like_the_others() -> None:
    thinner = Thinner(step=10, reserve=0)

    points = thinned(thinner, per_step(101, "loss", "val/loss"))

    assert steps_of(points, "val/loss") == steps_of(points, "loss") == list(range(9, 100, 10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 0}, 'step must be a whole number, at least 1, got 0. Or write "auto"'),
        ({"step": "often"}, "step must be a whole number, at least 1, got 'often'. Or write \"auto\""),
        ({"step": True}, "step must be a whole number, at least 1, got True"),
        ({"aggregate": ()}, r"aggregate must be a list of some of mean, min, max, last, each once, got \(\)"),
        ({"aggregate": "mean"}, "got 'mean'. Write \\(\"mean\",\\)"),
        ({"aggregate": ["mean", "median"]}, "aggregate must be .* got \\['mean', 'median'\\]"),
        ({"aggregate": ("min", "min")}, "each once, got"),
        ({"aggregate": [["mean"]]}, "aggregate must be"),
        ({"exempt": "val*"}, "exempt must be a list of patterns, got 'val\\*'"),
        ({"exempt": [1]}, "exempt must be a list of patterns, got \\[1\\]"),
        ({"horizon": -1}, "horizon must be a whole number, at least 0, got -1. Leave it out"),
        ({"max_metric_steps": 0}, "max_metric_steps must be"),
        ({"spent": -1}, "spent must be"),
        ({"reserve": 10_000_000}, "reserve must be less than max_metric_steps"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thinner(**options)


# ---- what the user is told -------------------------------------------------------------------------------------------


def test_the_plan_before_anything_is_logged() -> None:
    assert Thinner().plan() == (
        "one point per step; 0 of 10M metric steps used; lasts for 610 metrics, however long the run is"
    )


def test_the_plan_while_running() -> None:
    thinner = Thinner(max_metric_steps=100_000)
    thinned(thinner, per_step(20_000, *"abcde"))

    assert (
        thinner.plan()
        == "one point per 16 steps, 5 metrics; 19k of 100k metric steps used; lasts at least to step 1.3e9"
    )


def test_the_plan_with_a_known_horizon_and_one_metric() -> None:
    thinner = Thinner(horizon=99_999)
    thinned(thinner, per_step(1, "loss"))

    assert thinner.plan() == "one point per step, 1 metric; 1 of 10M metric steps used; lasts at least to step 99999"


def test_the_plan_with_a_known_horizon_tells_what_is_to_come() -> None:
    thinner = Thinner(max_metric_steps=100_000, horizon=999_999)
    thinned(thinner, per_step(10, "a", "b"))

    assert thinner.plan().startswith(
        "one point per 26 steps, more at the beginning, 2 metrics; 20 of 100k metric steps"
    )


def test_too_many_metrics_are_warned_of_once_with_what_they_get() -> None:
    thinner = Thinner(max_metric_steps=100_000)
    thinned(thinner, per_step(10, *(f"metric{number}" for number in range(100))))

    (warning,) = thinner.warnings_due()

    assert "too small for 320 points of each metric in either half" in warning
    assert "19 points per metric for either half" in warning
    assert thinner.warnings_due() == []


def test_half_used_is_warned_of_with_the_plan() -> None:
    thinner = Thinner(max_metric_steps=40_000, horizon=9_999)
    records = per_step(10_000, "a", "b", "c")
    thinned(thinner, records[:5_000])
    assert thinner.warnings_due() == []

    thinned(thinner, records[5_000:])

    (warning,) = thinner.warnings_due()
    assert warning == f"50% of the run's metric-step budget is used: {thinner.plan()}."


def test_dropped_values_are_warned_of() -> None:
    thinner = Thinner(max_metric_steps=4, reserve=0)
    thinned(thinner, per_step(100, *"abcdef"))

    assert any("values are dropped" in warning for warning in thinner.warnings_due())


def test_values_that_are_not_finite_become_events_once() -> None:
    thinner = Thinner()
    thinner.add(Record(5, 1, {"loss": math.nan, "val/loss": -math.inf}))

    assert [(event.key, event.value) for event in thinner.take_events()] == [("loss", "nan"), ("val/loss", "-inf")]
    assert thinner.take_events() == []


# ---- quiet metrics, cost ---------------------------------------------------------------------------------------------


def test_the_last_value_of_a_metric_that_went_quiet_is_out_within_two_seconds() -> None:
    thinner = Thinner(step=10)
    thinner.add(Record(0, 5, {"epoch_loss": 1.0, "loss": 1.0}))

    points = thinned(thinner, [Record(100 * i, 5 + i, {"loss": 1.0}) for i in range(1, 30)])

    assert steps_of(points, "epoch_loss") == [5]


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    thinner = Thinner(step=10)
    thinner.add(Record(10**12, 5, {"epoch_loss": 1.0, "loss": 1.0}))

    points = thinned(thinner, [Record(100 * i, 5 + i, {"loss": float(i)}) for i in range(1, 100)])

    assert len(steps_of(points, "loss")) == 10


def test_a_record_of_20_metrics_takes_microseconds() -> None:
    thinner = Thinner()
    records = per_step(2_000, *(f"train/metric_{number}" for number in range(20)))
    nanoseconds = []
    for record in records:
        begun = time.perf_counter_ns()
        thinner.add(record)
        nanoseconds.append(time.perf_counter_ns() - begun)

    # Every step is a point of each here, the dearest case: 26 us on an idle machine, which this one seldom is.
    assert statistics.median(nanoseconds) < 150_000
