"""A cadence is read strictly, "auto" is the cheapest interval in its bounds, and saves neither drift nor pile up."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint.cadence import (
    DAY_SECONDS,
    FAILURES_PER_GPU_DAY,
    FIRST_AUTO_SECONDS,
    MAX_AUTO_SECONDS,
    MAX_DAYS_BETWEEN_FAILURES,
    MIN_COST_SECONDS,
    Choice,
    Every,
    Schedule,
    auto_interval,
    parse_every,
)

MINUTE, HOUR = 60.0, 3600.0

# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("30min", Every("seconds", 30 * MINUTE)),
        ("90s", Every("seconds", 90)),
        ("1h30min", Every("seconds", 90 * MINUTE)),
        ("2h", Every("seconds", 2 * HOUR)),
        ("1d", Every("seconds", DAY_SECONDS)),
        ("1d2h3min4s", Every("seconds", DAY_SECONDS + 2 * HOUR + 3 * MINUTE + 4)),
        ("1.5h", Every("seconds", 90 * MINUTE)),
        ("0.5s", Every("seconds", 0.5)),
        ("90min", Every("seconds", 90 * MINUTE)),
        ("30m", Every("seconds", 30 * MINUTE)),
        ("2 hours 1 minute 5 seconds", Every("seconds", 2 * HOUR + MINUTE + 5)),
        ("  1 H  30 Min ", Every("seconds", 90 * MINUTE)),
        ("365d", Every("seconds", 365 * DAY_SECONDS)),
        ("500steps", Every("steps", 500)),
        ("1 step", Every("steps", 1)),
        (" 500 STEPS", Every("steps", 500)),
        ("1epoch", Every("epochs", 1)),
        ("2epochs", Every("epochs", 2)),
        ("auto", Every("auto")),
        (" Auto ", Every("auto")),
        (timedelta(minutes=30), Every("seconds", 30 * MINUTE)),
        (timedelta(milliseconds=500), Every("seconds", 0.5)),
    ],
)
def test_a_cadence_is_read(text: Any, every: Every) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "30",
        "min",
        "every 30min",
        "30 min 1h",  # smallest first
        "30min30min",
        "1h30",
        "1:30",
        "1,5h",
        "1e3s",
        "3 0min",
        "-30min",
        "+30min",
        "30min ago",
        "2weeks",
        "1month",
        "500 batches",
        "1.5steps",
        "1.5epochs",
        "-1steps",
        "500steps1epoch",
        "auto 30min",
        "automatic",
        "infs",
        "nan",
        "٣min",
        "9" * 5000 + "steps",
        "9" * 5000 + "h",
        "0s",
        "0min",
        "0h0min",
        "0.0s",
        "0steps",
        "0epochs",
        "366d",
        "365d1s",
        timedelta(0),
        timedelta(seconds=-1),
        timedelta(days=366),
        timedelta.max,
        30,
        0,
        -1,
        30.0,
        math.nan,
        True,
        None,
        ["30min"],
        {"minutes": 30},
        b"30min",
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_cadence_is_refused_with_its_value_and_examples(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^every must be") as error:
        parse_every(value)
    assert f"got {value!r}" in str(error.value)
    assert "Write '30min', '90s', '1h30min', '500steps', '2epochs' or 'auto'" in str(error.value)


@pytest.mark.parametrize("value", [30, 1.5, True])
def test_a_number_is_told_what_it_lacks(value: float) -> None:
    with pytest.raises(ValueError, match="A number alone does not say of what"):
        parse_every(value)


@given(st.text())
def test_any_text_is_a_cadence_or_refused(text: str) -> None:
    try:
        every = parse_every(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - most texts are refused, a few are not
    else:
        assert every.unit == "auto" or every.count > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("90min", "1h30min"),
        ("0.5 s", "0.5s"),
        ("61s", "1min1s"),
        ("48h", "2d"),
        ("3599.999999999s", "59min59.999999999s"),
        (timedelta(minutes=1.1), "1min6s"),
        ("1 steps", "1step"),
        ("1000000steps", "1000000steps"),
        ("2 epochs", "2epochs"),
        ("AUTO", "auto"),
    ],
)
def test_a_cadence_is_written_briefly(value: Any, text: str) -> None:
    assert str(parse_every(value)) == text


def test_a_duration_that_is_all_but_an_hour_is_one() -> None:
    assert str(Every("seconds", HOUR - 1e-11)) == "1h"  # not 59min60s


@given(
    st.one_of(
        st.builds(Every, st.just("seconds"), st.floats(1e-6, 365 * DAY_SECONDS)),
        st.builds(Every, st.sampled_from(["steps", "epochs"]), st.integers(1, 10**14)),
        st.just(Every("auto")),
    )
)
def test_what_is_written_is_read_again(every: Every) -> None:
    again = parse_every(str(every))
    assert again.unit == every.unit
    assert again.count == pytest.approx(every.count, rel=1e-9, abs=1e-9)


# ---- auto ------------------------------------------------------------------------------------------------------------

amounts = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))


def choose(**changes: float) -> Choice:
    figures: dict[str, Any] = {"blocking_seconds": 0.3, "upload_seconds": 12.0, "num_gpus": 8, **changes}
    return auto_interval(**figures)


def test_the_default_rate_is_the_published_one() -> None:
    assert pytest.approx(419) == FAILURES_PER_GPU_DAY * 16_384 * 54
    assert pytest.approx(2112, abs=1) == 1 / FAILURES_PER_GPU_DAY
    assert choose(num_gpus=16_384).days_between_failures * 24 == pytest.approx(3.1, abs=0.05)  # "every three hours"


def test_many_gpus_save_at_the_young_daly_optimum() -> None:
    choice = choose(num_gpus=1000, failures_per_gpu_day=0.001, blocking_seconds=2.0)
    assert choice.days_between_failures == 1.0
    assert choice.seconds == choice.optimum_seconds == pytest.approx(math.sqrt(2 * 2 * DAY_SECONDS))


@pytest.mark.parametrize("num_gpus", [0, 1, 8, 64, 256])
def test_few_gpus_still_expect_one_failure_a_week(num_gpus: int) -> None:
    choice = choose(num_gpus=num_gpus)
    assert choice.days_between_failures == MAX_DAYS_BETWEEN_FAILURES == 7
    assert choice.seconds == pytest.approx(math.sqrt(2 * 0.3 * 7 * DAY_SECONDS))  # ten minutes


def test_the_optimum_costs_less_than_its_neighbours() -> None:
    choice = choose(num_gpus=2000, blocking_seconds=5.0)
    between = choice.days_between_failures * DAY_SECONDS

    def lost(seconds: float) -> float:
        """The share of time that goes into saving and into repeating what a failure lost (half an interval)."""
        return 5.0 / seconds + seconds / 2 / between

    assert lost(choice.seconds) < min(lost(choice.seconds * 0.9), lost(choice.seconds * 1.1))


def test_no_save_starts_before_the_last_is_durable() -> None:
    assert choose(upload_seconds=900.0).seconds == 900.0
    assert choose(upload_seconds=2 * HOUR).seconds == 2 * HOUR  # also beyond the longest interval


def test_an_hour_is_the_longest() -> None:
    assert choose(blocking_seconds=600.0).seconds == MAX_AUTO_SECONDS == HOUR


def test_a_save_that_blocks_for_no_time_still_costs_something() -> None:
    seconds = math.sqrt(2 * MIN_COST_SECONDS * 7 * DAY_SECONDS)  # two minutes
    assert choose(blocking_seconds=0.0, upload_seconds=0.0).seconds == pytest.approx(seconds)
    assert choose(blocking_seconds=MIN_COST_SECONDS, upload_seconds=0.0).seconds == pytest.approx(seconds)


@given(blocking=amounts, upload=amounts, num_gpus=st.integers(0, 10**6), rate=amounts)
def test_every_choice_keeps_the_bounds(blocking: float, upload: float, num_gpus: int, rate: float) -> None:
    choice = auto_interval(
        blocking_seconds=blocking, upload_seconds=upload, num_gpus=num_gpus, failures_per_gpu_day=rate
    )
    assert upload <= choice.seconds <= max(upload, MAX_AUTO_SECONDS)
    assert choice.seconds > 0
    assert choice.seconds in (upload, MAX_AUTO_SECONDS, choice.optimum_seconds)
    assert 0 < choice.days_between_failures <= 7
    assert "\n" not in choice.reason


@given(
    figures=st.fixed_dictionaries({"upload_seconds": amounts, "failures_per_gpu_day": amounts}),
    gpus=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)).map(sorted),
    blocking=st.tuples(amounts, amounts).map(sorted),
)
def test_more_gpus_save_more_often_and_dearer_saves_are_rarer(
    figures: dict[str, float], gpus: list[int], blocking: list[float]
) -> None:
    few, many = (choose(**figures, num_gpus=number) for number in gpus)
    assert many.seconds <= few.seconds
    cheap, dear = (choose(**figures, blocking_seconds=seconds) for seconds in blocking)
    assert cheap.seconds <= dear.seconds


def test_the_reason_names_every_figure() -> None:
    assert choose().reason == (
        "a save every 10min2s: it blocks training for 0.3s; "
        "8 GPU(s) at 0.000474 failures per GPU and day, but at least one in 7d, fail every 7d; "
        "Young/Daly: sqrt(2 x 0.3s x 7d) = 10min2s, at most 1h and at least the 12s of an upload"
    )
    assert choose(num_gpus=512, blocking_seconds=120.0, failures_per_gpu_day=0.002).reason == (
        "a save every 1h: it blocks training for 2min; "
        "512 GPU(s) at 0.002 failures per GPU and day, but at least one in 7d, fail every 0.977d; "
        "Young/Daly: sqrt(2 x 2min x 0.977d) = 1h15min, at most 1h and at least the 12s of an upload"
    )
    assert choose(blocking_seconds=0.002, upload_seconds=5000.0).reason == (
        "a save every 1h23min20s: it blocks training for 0.002s (counts as 0.01s); "
        "8 GPU(s) at 0.000474 failures per GPU and day, but at least one in 7d, fail every 7d; "
        "Young/Daly: sqrt(2 x 0.01s x 7d) = 1min50s, at most 1h and at least the 1h23min20s of an upload"
    )


@pytest.mark.parametrize("name", ["blocking_seconds", "upload_seconds", "num_gpus", "failures_per_gpu_day"])
@pytest.mark.parametrize("figure", [-1, math.nan, math.inf])
def test_figures_that_cannot_be_measured_are_refused(name: str, figure: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a finite number that is not negative, got {figure!r}"):
        choose(**{name: figure})


def test_a_choice_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        choose().seconds = 1.0  # type: ignore[misc]


# ---- the schedule ----------------------------------------------------------------------------------------------------


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def started(every: str, clock: Callable[[], float] | None = None, step: int = 0) -> Schedule:
    schedule = Schedule(parse_every(every), clock=clock or FakeClock())
    schedule.start(step)
    return schedule


def save_times(every: str, step_seconds: Sequence[float], save_seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Train with these steps, starting at 1000 s, and return when each save started and when training went on."""
    clock = FakeClock(1000.0)
    schedule = started(every, clock)
    saves, durations = [], itertools.cycle(save_seconds)
    for step, seconds in enumerate(step_seconds, start=1):
        clock.now += seconds
        if schedule.is_due(step):
            start = clock.now
            clock.now += next(durations)
            schedule.record_save(step)
            saves.append((start - 1000.0, clock.now - 1000.0))
    return saves


def test_time_is_due_at_the_first_step_after_it() -> None:
    assert save_times("10s", [3.0] * 9, [0.0]) == [(12.0, 12.0), (21.0, 21.0)]


def test_a_thousand_saves_do_not_drift() -> None:
    # Each save is up to a step late; added up that would be hours.
    starts = [start for start, _ in save_times("10min", [7.0] * 90_000, [0.5])]
    assert len(starts) == 1050
    assert all(0 <= start - 600 * number < 8 for number, start in enumerate(starts, start=1))


def test_a_save_that_took_long_is_followed_by_one_not_by_many() -> None:
    # Due at 10; training goes on at 67, when 20 to 60 are over.
    assert save_times("10s", [1.0] * 25, [57.0, 0.0, 0.0]) == [(10.0, 67.0), (70.0, 70.0), (80.0, 80.0)]


def test_training_gets_a_quarter_of_the_interval_between_two_saves() -> None:
    # Training goes on at 68, and 70 is too near.
    assert save_times("10s", [1.0] * 25, [58.0, 0.0, 0.0]) == [(10.0, 68.0), (80.0, 80.0)]


@given(
    steps=st.lists(st.floats(0.01, 30.0), max_size=300),
    saves=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=5),
)
def test_two_saves_are_about_an_interval_apart_whatever_steps_and_saves_take(
    steps: list[float], saves: list[float]
) -> None:
    found = save_times("20s", steps, saves)
    for (_, end), (start, _) in itertools.pairwise([(0.0, 0.0), *found]):
        assert 5.0 - 1e-6 <= start - end <= 25.0 + 30.0  # one and a quarter, and the step that was under way
    for number, (start, _) in enumerate(found, start=1):
        assert start >= 20.0 * number - 1e-6  # no more saves than the grid has places


def test_time_counts_from_the_start() -> None:
    schedule = Schedule(Every("seconds", 10.0), clock=FakeClock(503.0))
    schedule.start(0, now=1000.0)
    assert [schedule.is_due(1, now=now) for now in (1009.0, 1010.0)] == [False, True]
    schedule.record_save(1, now=1013.0)
    assert [schedule.is_due(2, now=now) for now in (1019.0, 1020.0)] == [False, True]


def test_another_save_does_not_move_the_grid() -> None:
    clock = FakeClock()
    schedule = started("10min", clock)
    schedule.record_save(1, now=300.0)  # a best score
    assert [schedule.is_due(2, now=now) for now in (599.0, 600.0)] == [False, True]
    schedule.record_save(2, now=600.0)
    schedule.record_save(3, now=1190.0)
    assert [schedule.is_due(4, now=now) for now in (1200.0, 1799.0, 1800.0)] == [False, False, True]


def test_what_is_due_stays_due_until_it_is_saved() -> None:
    for every, steps, now in [("10s", 1, 11.0), ("5steps", 7, 0.0)]:
        schedule = started(every)
        assert schedule.is_due(steps, now=now)
        assert schedule.is_due(steps + 1, now=now + 1)
        schedule.record_save(steps + 1, now=now + 1)
        assert not schedule.is_due(steps + 2, now=now + 2)


def due_steps(schedule: Schedule, steps: Sequence[int], *, epoch_steps: int | None = None) -> list[int]:
    due = []
    for step in steps:
        if schedule.is_due(step, epoch_end=epoch_steps is not None and step % epoch_steps == 0):
            schedule.record_save(step)
            due.append(step)
    return due


def test_steps_are_due_at_multiples() -> None:
    assert due_steps(started("5steps"), range(1, 18)) == [5, 10, 15]
    assert due_steps(started("1step"), range(1, 4)) == [1, 2, 3]


def test_steps_are_not_missed_when_not_asked_for_every_one() -> None:
    assert due_steps(started("5steps"), [3, 6, 9, 12, 29, 30, 31]) == [6, 12, 29, 30]


def test_steps_of_a_resumed_run_stay_at_multiples() -> None:
    assert due_steps(started("5steps", step=7), range(8, 18)) == [10, 15]
    assert due_steps(started("5steps", step=10), range(11, 18)) == [15]


def test_epochs_are_due_at_their_ends() -> None:
    assert due_steps(started("1epoch"), range(1, 20), epoch_steps=4) == [4, 8, 12, 16]
    assert due_steps(started("2epochs"), range(1, 20), epoch_steps=4) == [8, 16]


def test_an_epoch_counts_once_however_often_it_is_asked_for() -> None:
    schedule = started("2epochs")
    assert [schedule.is_due(4, epoch_end=True) for _ in range(4)] == [False] * 4
    assert schedule.is_due(8, epoch_end=True)


def test_epochs_of_a_second_fit_count_too() -> None:
    schedule = started("1epoch")
    assert due_steps(schedule, range(1, 9), epoch_steps=4) == [4, 8]
    schedule.start(0)
    assert due_steps(schedule, range(1, 9), epoch_steps=4) == [4, 8]


@pytest.mark.parametrize("every", ["10s", "auto"])
def test_a_clock_is_asked_only_where_time_decides(every: str) -> None:
    clock = FakeClock()
    schedule = started(every, clock)
    clock.now = 1e6
    assert schedule.is_due(1)
    assert not schedule.is_due(1, now=0.0)


# ---- auto in the schedule --------------------------------------------------------------------------------------------


def test_auto_starts_early_and_follows_what_was_measured() -> None:
    clock = FakeClock()
    schedule = started("auto", clock)
    assert schedule.interval_seconds == FIRST_AUTO_SECONDS
    assert [schedule.is_due(1, now=now) for now in (299.0, 300.0)] == [False, True]
    schedule.record_save(1, now=301.0)
    schedule.retime(700.0)  # when the upload is over; counted from the save
    assert schedule.interval_seconds == 700.0
    assert [schedule.is_due(2, now=now) for now in (1000.0, 1001.0)] == [False, True]


@given(
    steps=st.lists(st.floats(1.0, 700.0), max_size=50),
    saves=st.lists(st.floats(0.0, 2000.0), min_size=1, max_size=5),
)
def test_auto_never_saves_before_a_whole_interval_is_over(steps: list[float], saves: list[float]) -> None:
    for (_, end), (start, _) in itertools.pairwise([(0.0, 0.0), *save_times("auto", steps, saves)]):
        assert FIRST_AUTO_SECONDS - 1e-6 <= start - end <= FIRST_AUTO_SECONDS + 700.0


def test_a_new_interval_that_is_over_already_makes_one_save_due() -> None:
    schedule = started("auto")
    schedule.record_save(1, now=300.0)
    schedule.retime(1.0)
    assert schedule.is_due(2, now=400.0)
    schedule.record_save(2, now=400.5)
    assert not schedule.is_due(3, now=400.6)


@pytest.mark.parametrize("every", ["10s", "5steps", "1epoch"])
def test_a_chosen_cadence_is_not_retimed(every: str) -> None:
    with pytest.raises(RuntimeError, match=rf"every is '{every}', not 'auto'"):
        started(every).retime(60.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_an_interval_is_positive_and_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"seconds must be positive and finite, got"):
        started("auto").retime(seconds)


@pytest.mark.parametrize(
    ("every", "seconds"), [("10s", 10.0), ("auto", FIRST_AUTO_SECONDS), ("5steps", None), ("1epoch", None)]
)
def test_the_interval_is_known_where_time_decides(every: str, seconds: float | None) -> None:
    assert started(every).interval_seconds == seconds


# ---- resuming --------------------------------------------------------------------------------------------------------


def resumed(schedule: Schedule, step: int, clock: Callable[[], float] | None = None) -> Schedule:
    """A schedule in another process, from what the checkpoint holds."""
    again = Schedule(schedule.every, clock=clock or FakeClock())
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    again.start(step)
    return again


@given(stops=st.lists(st.integers(1, 12), max_size=6), count=st.integers(1, 4))
def test_epochs_go_on_counting_whenever_the_run_is_interrupted(stops: list[int], count: int) -> None:
    # Saved at any step for another reason, killed, resumed from that.
    schedule, step, due = started(f"{count}epochs"), 0, []
    for num_steps in [*stops, 40]:
        due += due_steps(schedule, range(step + 1, step + num_steps + 1), epoch_steps=4)
        step += num_steps
        schedule = resumed(schedule, step)
    assert due == list(range(4 * count, step + 1, 4 * count))


def test_a_checkpoint_at_the_end_of_an_epoch_is_not_repeated_on_resume() -> None:
    schedule = started("2epochs")
    assert not schedule.is_due(4, epoch_end=True)
    assert schedule.is_due(8, epoch_end=True)
    again = resumed(schedule, 8)  # the state is taken while saving, before the save is recorded
    assert not again.is_due(8, epoch_end=True)
    assert due_steps(again, range(9, 18), epoch_steps=4) == [16]


def test_time_starts_anew_on_resume() -> None:
    schedule = started("10min")
    assert schedule.is_due(1, now=600.0)
    again = resumed(schedule, 1, clock=FakeClock(5.0))  # another machine, another clock
    assert [again.is_due(2, now=now) for now in (604.0, 605.0)] == [False, True]


def test_auto_keeps_its_interval_on_resume() -> None:
    schedule = started("auto")
    schedule.retime(700.0)
    assert resumed(schedule, 1).interval_seconds == 700.0


@pytest.mark.parametrize("before", ["10s", "5steps", "2epochs", "auto"])
@pytest.mark.parametrize("after", ["10s", "5steps", "2epochs", "auto"])
def test_a_run_may_resume_with_another_cadence(before: str, after: str) -> None:
    schedule = Schedule(parse_every(after), clock=FakeClock())
    schedule.load_state_dict(started(before).state_dict())
    schedule.start(3)
    assert not schedule.is_due(4)


@pytest.mark.parametrize(
    "call",
    [
        lambda schedule: schedule.is_due(1),
        lambda schedule: schedule.record_save(1),
        lambda schedule: schedule.retime(1),
    ],
    ids=["is_due", "record_save", "retime"],
)
def test_a_schedule_has_to_be_started(call: Callable[[Schedule], object]) -> None:
    with pytest.raises(RuntimeError, match=r"Call start\(\) when training starts or resumes"):
        call(Schedule(Every("auto")))
    schedule = started("auto")
    schedule.load_state_dict(schedule.state_dict())
    with pytest.raises(RuntimeError, match=r"Call start\(\) when training starts or resumes"):
        call(schedule)
