"""A run's points over all its attempts: repeatable, named apart, within the cap, the latest values right."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.metric_names import is_valid_key, valid_key
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.thinning import Counts, Thinner

# "loss$" becomes "loss_-<hash>", which is what the last one is called.
NAMES = ("loss", "val/loss", "loss$", "../up", "x" * 251, "", valid_key("loss$"))
law = settings(max_examples=30, deadline=None)


@st.composite
def logs(draw: st.DrawFn, *, names: Sequence[str] = NAMES, max_size: int = 25) -> list[Record]:
    """Records of one attempt: steps that mostly go on, sometimes back."""
    step, timestamp_ms, records = draw(st.integers(0, 300)), 1_000_000, []
    for _ in range(draw(st.integers(0, max_size))):
        step = max(0, step + draw(st.integers(-20, 3) | st.integers(0, 30)))
        timestamp_ms += draw(st.integers(1, 2_000))
        values = draw(st.dictionaries(st.sampled_from(names), st.floats(width=32), max_size=4))
        records.append(Record(timestamp_ms, step, values))
    return records


thinners = st.builds(
    lambda step, cap, prefix, exempt: RunThinner(
        Thinner(step=step, max_metric_steps=cap, reserve=cap // 4, aggregate=("mean", "last"), exempt=exempt),
        prefix=prefix,
    ),
    step=st.just("auto") | st.integers(1, 20),
    cap=st.integers(4, 200) | st.just(10**6),
    prefix=st.sampled_from(["", "mine", "a/b", "$"]),
    exempt=st.sampled_from([(), ("val*",)]),
)


def saved(thinner: RunThinner) -> RunThinner:
    """Return what a process finds that reads the snapshot from a file."""
    return RunThinner.from_snapshot(json.loads(json.dumps(thinner.snapshot())))


def thinned(thinner: RunThinner, records: Iterable[Record]) -> list[Point]:
    return [point for record in records for point in thinner.add(record)]


def every_step(steps: Iterable[int], *names: str, start_ms: int = 0) -> list[Record]:
    """Records whose values are their steps."""
    return [Record(start_ms + 10 * step, step, dict.fromkeys(names, float(step))) for step in steps]


def latest(points: Iterable[Point]) -> dict[str, Point]:
    """Return what the server shows as each metric's latest value."""
    found: dict[str, Point] = {}
    for point in points:
        found[point.key] = max(
            point, found.get(point.key, point), key=lambda each: (each.step, each.timestamp_ms, each.value)
        )
    return found


# ---- repeatable ------------------------------------------------------------------------------------------------------


@law
@given(
    thinners,
    thinners,
    st.tuples(logs(), logs()),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 400)),
    st.data(),
)
def test_a_snapshot_at_any_moment_goes_on_with_the_same_points(
    thinner: RunThinner,
    follower: RunThinner,
    both: tuple[list[Record], list[Record]],
    beyond: dict[str, int],
    data: st.DataObject,
) -> None:
    """Killed anywhere: among what an earlier attempt has left, at the hand-over, after a roll-back."""
    left, records = both
    other, restart = saved(thinner), data.draw(st.integers(0, len(left) + len(records)))
    handed, rolled = (data.draw(st.integers(0, len(left))) for _ in range(2))
    spent, step = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 300))
    for index, record in enumerate([*left, *records]):
        if index == restart:
            other = saved(other)
        for each in (thinner, other):
            if index == handed:
                each.hand_over(saved(follower), after=len(left) - index, elsewhere=spent)
            if index == rolled:
                each.roll_back(step, beyond)
        assert repr(other.add(record)) == repr(thinner.add(record))
    other = saved(other)
    assert repr(other.flush()) == repr(thinner.flush())
    assert other.take_events() == thinner.take_events()
    assert other.thinner.used == thinner.thinner.used
    assert json.dumps(other.snapshot()) == json.dumps(thinner.snapshot())


def test_a_snapshot_is_a_copy() -> None:
    thinner = RunThinner(Thinner(step=1))
    thinner.hand_over(RunThinner(Thinner(step=1)), after=5, elsewhere=0)
    before = json.dumps(snapshot := thinner.snapshot())

    thinned(thinner, every_step(range(3), "a"))

    assert json.dumps(snapshot) == before
    assert RunThinner.from_snapshot(snapshot).thinner.used == 0


def test_a_snapshot_of_another_version_is_refused() -> None:
    snapshot = RunThinner(Thinner()).snapshot() | {"version": 99}

    with pytest.raises(ValueError, match="version 2, got 99"):
        RunThinner.from_snapshot(snapshot)


# ---- names -----------------------------------------------------------------------------------------------------------


@law
@given(st.permutations(NAMES), st.sampled_from(["", "mine", "$"]), st.integers(0, len(NAMES)))
def test_names_have_keys_of_their_own_also_after_a_restart(names: list[str], prefix: str, restart: int) -> None:
    thinner, points = RunThinner(Thinner(step=1, exempt=()), prefix=prefix), []
    for round_ in range(2):
        for index, name in enumerate(names):
            if index == restart:
                thinner = saved(thinner)
            number = float(names.index(name))
            points += thinner.add(Record(round_ * 1_000 + index, round_, {name: number}))
    points += thinner.flush()

    numbers = defaultdict(set)
    for point in points:
        assert is_valid_key(point.key)
        numbers[point.key].add(point.value)
    assert sorted(value for values in numbers.values() for value in values) == list(range(len(names)))
    assert all(len(values) == 1 for values in numbers.values())


def test_the_prefix_stands_before_each_key_and_is_no_part_of_what_patterns_match() -> None:
    thinner = RunThinner(Thinner(step=10, exempt=("val*",)), prefix="mine")

    points = thinned(thinner, every_step(range(3), "loss", "val/loss"))

    assert [point.key for point in points] == ["mine-val/loss"] * 3
    assert [point.key for point in thinner.flush()] == ["mine-loss"]
    assert thinner.take_renamed() == {}


def test_what_was_renamed_is_said_once_in_each_process() -> None:
    thinner = RunThinner(Thinner(step=1, exempt=()), prefix="mine")
    thinned(thinner, every_step(range(2), "a$", "b"))

    assert thinner.take_renamed() == {"a$": valid_key("mine-a$")}
    assert thinner.take_renamed() == {}
    assert saved(thinner).take_renamed() == {"a$": valid_key("mine-a$")}


# ---- attempts --------------------------------------------------------------------------------------------------------


@law
@given(
    thinners.filter(lambda each: each.thinner.cap == 10**6),
    thinners.filter(lambda each: each.thinner.cap == 10**6),
    logs(names=("a", "b$")),
    logs(names=("a", "b$")),
    st.data(),
)
def test_each_attempt_s_records_are_thinned_with_its_own_options(
    first: RunThinner, second: RunThinner, left: list[Record], records: list[Record], data: st.DataObject
) -> None:
    killed = data.draw(st.integers(0, len(left)))
    both = saved(first)
    points = thinned(both, left[:killed])
    both = saved(both)
    both.hand_over(saved(second), after=len(left) - killed, elsewhere=len(points))
    points += thinned(both, left[killed:])
    points += thinned(both, records)
    points += both.flush()

    alone = thinned(first, left) + first.flush()
    assert repr(points[: len(alone)]) == repr(alone)
    after = thinned(second, records) + second.flush()
    assert Counter(point.key for point in points[len(alone) :]) == Counter(point.key for point in after)


def test_a_new_attempt_has_its_own_step_and_prefix_from_its_first_record_on() -> None:
    thinner = RunThinner(Thinner(step=10, exempt=()), prefix="old")
    points = thinned(thinner, every_step(range(25), "a"))
    thinner.hand_over(RunThinner(Thinner(step=5, exempt=()), prefix="new"), after=10, elsewhere=2)
    points += thinned(saved(thinner), every_step(range(25, 50), "a"))

    thinner = saved(thinner)
    thinned(thinner, every_step(range(25, 50), "a"))
    points += thinner.flush()

    assert [(point.key, point.step) for point in points] == [
        *[("old-a", step) for step in (9, 19, 29, 34)],
        *[("new-a", step) for step in (39, 44, 49)],
    ]


def test_two_names_that_would_share_a_key_have_one_each() -> None:
    thinner = RunThinner(Thinner(step=10, aggregate=("mean", "max"), exempt=()))
    values = {"loss": 1.0, "loss/max": -1.0, "x": math.nan, "nonfinite/x": 7.0}
    points = [point for step in range(20) for point in thinner.add(Record(step, step, values))]
    points += saved(thinner).flush()

    by_moment = Counter((point.key, point.step) for point in points)
    assert set(by_moment.values()) == {1}
    shown = defaultdict(set)
    for point in points:
        shown[point.key].add(point.value)
    assert all(len(found) == 1 for found in shown.values())
    assert shown["loss"] == shown["loss/max"] == {1.0}
    assert len(shown) == 2 * 3 + 1  # two aggregates of three metrics, and the count of what is not finite
    assert "max of loss" not in (renamed := thinner.take_renamed())
    assert {"loss/max", "nonfinite/x"} <= {name.removeprefix("nonfinite of ") for name in renamed} | {"nonfinite/x"}


def test_what_changes_concerns_the_attempt_that_is_to_take_over() -> None:
    thinner = RunThinner(Thinner())
    thinner.hand_over(RunThinner(Thinner()), after=1, elsewhere=0)
    thinner.hand_over(RunThinner(Thinner(max_metric_steps=5)), after=2, elsewhere=0)
    before = thinner.thinner.snapshot()

    thinner.newest.set_horizon(1_000)
    thinner.spend_elsewhere(3)

    assert thinner.thinner.snapshot() == before
    assert thinner.newest.cap == 5
    thinned(thinner, every_step(range(3), "a"))
    assert thinner.newest is thinner.thinner
    assert thinner.thinner.spent == 3 + 2  # and what was left
    assert thinner.thinner.cap == 5
    assert thinner.snapshot()["thinner"]["steps"]["strides"]["horizon"] == 1_000


def test_events_of_an_earlier_attempt_are_not_lost() -> None:
    thinner = RunThinner(Thinner(exempt=()))
    thinner.hand_over(RunThinner(Thinner(exempt=())), after=1, elsewhere=0)
    thinner.add(Record(1, 1, {"a": math.nan}))
    thinner.add(Record(2, 2, {"a": math.inf}))

    assert [(event.step, event.value) for event in saved(thinner).take_events()] == [(1, "nan"), (2, "inf")]
    assert [(event.step, event.value) for event in thinner.take_events()] == [(1, "nan"), (2, "inf")]
    assert thinner.take_events() == []


# ---- the budget ------------------------------------------------------------------------------------------------------


def test_who_takes_over_plans_with_what_is_left_after_all_others() -> None:
    options = {"step": "auto", "max_metric_steps": 20_000, "reserve": 0, "exempt": ()}
    thinner = RunThinner(Thinner(**options))
    points = thinned(thinner, every_step(range(10), "a"))
    thinner.hand_over(RunThinner(Thinner(**options)), after=5, elsewhere=18_000)

    points += thinned(thinner, every_step(range(10, 20_000), "a")) + thinner.flush()

    assert [point.step for point in points[:15]] == [*range(15)], "what was left is thinned as it would have been"
    assert 18_000 + len(points) <= thinner.thinner.used <= 20_000
    assert points[-1].step == 19_999


def test_what_others_take_meanwhile_is_planned_for() -> None:
    thinner = RunThinner(Thinner(max_metric_steps=20_000, reserve=0, exempt=()))
    first = thinned(thinner, every_step(range(1_000), "a"))
    thinner.spend_elsewhere(18_000)
    thinner.spend_elsewhere(5)  # a late answer

    points = first + thinned(saved(thinner), every_step(range(1_000, 20_000), "a"))

    assert 18_000 + len(points) <= 20_000
    assert points[-1].step > 19_000


def test_counts_are_of_all_attempts_and_begin_anew_in_a_new_spool() -> None:
    thinner = RunThinner(Thinner(step=10, exempt=()))
    thinned(thinner, every_step(range(25), "a"))
    thinner.hand_over(RunThinner(Thinner(step=5, exempt=())), after=0, elsewhere=0)
    thinned(thinner, every_step(range(25, 30), "a"))
    points = saved(thinner).flush()

    assert len(points) == 1
    thinner.flush()
    counts = thinner.counts
    assert (counts.logged, counts.windows, counts.thinned, counts.points) == (30, 4, 26, 4)
    thinner.begin_anew()
    assert thinner.counts == Counts()
    thinned(thinner, every_step(range(30, 33), "a"))
    assert saved(thinner).counts == Counts(logged=3, pending=3)


# ---- on another machine ----------------------------------------------------------------------------------------------


def test_a_part_of_a_window_that_the_old_machine_has_sent_whole_makes_no_point() -> None:
    """The checkpoint was saved at step 84; the attempt that saved it went on to 99, but not with `b`."""
    old = RunThinner(Thinner(step=10, exempt=()))
    points = thinned(old, every_step(range(85), "a", "b"))
    new = saved(old)
    points += thinned(old, every_step(range(85, 100), "a"))
    shown = {key: (point.timestamp_ms, point.step) for key, point in latest(points).items()}
    assert shown["a"][1] == 89

    new.continue_elsewhere(shown)
    new = saved(new)
    new.hand_over(RunThinner(Thinner(step=10, exempt=())), after=0, elsewhere=0)
    again = thinned(new, every_step(range(85, 90), "c")) + new.flush()

    assert [(point.key, point.step) for point in again] == [("b", 84), ("c", 89)]
    assert new.counts.pending == 0


# ---- a roll-back -----------------------------------------------------------------------------------------------------


@law
@given(
    reached=st.integers(0, 60),
    resumed=st.integers(0, 60),
    stop=st.integers(1, 60),
    acknowledged=st.integers(0, 60),
    step=st.integers(1, 7),
)
def test_the_latest_value_is_the_last_one_logged(
    *, reached: int, resumed: int, stop: int, acknowledged: int, step: int
) -> None:
    """In the same folder: what was left is sent first, some of it beyond the step at which the run resumes."""
    records = every_step(range(reached + 1), "a", "b")
    acknowledged = min(acknowledged, len(records))
    thinner = RunThinner(Thinner(step=step, exempt=()))
    stored = thinned(thinner, records[:acknowledged])
    thinner = saved(thinner)
    thinner.hand_over(
        RunThinner(Thinner(step=step, exempt=())), after=len(records) - acknowledged, elsewhere=len(stored)
    )
    thinner.roll_back(resumed, {key: point.step for key, point in latest(stored).items() if point.step > resumed})

    again = [
        Record(10**6 + step, step, {"a": 1_000.0 + step}) for step in range(min(resumed, reached) + 1, resumed + stop)
    ]
    stored += thinned(thinner, records[acknowledged:])
    stored += thinned(thinner, again)
    stored += thinner.flush()

    found = latest(stored)
    assert found["b"].step == reached
    steps = [point.step for point in stored if point.key == "b"]
    assert len(steps) == len({*steps}), "said again though nothing was logged"
    if again:
        last_window = [record.values["a"] for record in again if record.step // step == again[-1].step // step]
        assert found["a"].value == pytest.approx(sum(last_window) / len(last_window))
        assert found["a"].step == max(reached, again[-1].step)


def test_a_value_is_said_again_only_where_it_stays_below_what_the_server_has() -> None:
    thinner = RunThinner(Thinner(step=1, exempt=()), prefix="mine")
    thinner.roll_back(3, {"mine-a": 100, "mine-b": 5, "mine-c": 100, "mine-never": 100})
    points = thinned(thinner, every_step(range(10), "a", "b"))
    points += thinned(thinner, every_step([100], "c"))
    points += thinned(thinner, every_step(range(101, 103), "b"))

    points += thinner.flush()

    counts = Counter((point.key, point.step) for point in points if point.step in (5, 100))
    assert counts == dict.fromkeys([("mine-a", 5), ("mine-a", 100), ("mine-b", 5), ("mine-c", 100)], 1)
    assert latest(points)["mine-a"] == Point("mine-a", 9.0, 90, 100)
    assert latest(points)["mine-b"].step == 102


def test_what_counts_is_the_highest_step_that_any_attempt_had_reached() -> None:
    thinner = RunThinner(Thinner(step=1, exempt=()))
    thinner.roll_back(2, {"a": 100, "c": 3})
    thinned(thinner, every_step([*range(10), *range(5)], "a", "b", "c"))
    for _ in range(2):
        thinner.hand_over(RunThinner(Thinner(step=1, exempt=())), after=0, elsewhere=0)
        thinner.roll_back(2, {})
        points = thinned(thinner, every_step(range(3), "a", "b", "c"))

    points += thinner.flush()

    assert {key: point.step for key, point in latest(points).items()} == {"a": 100, "b": 9, "c": 9}


def test_values_are_said_again_at_the_end_of_each_stage_and_charged() -> None:
    thinner = RunThinner(Thinner(step=1, exempt=()))
    thinner.roll_back(9, {"a": 100, "b": 100})
    used = thinner.thinner.used
    assert used == 2
    ends = []
    for stage in range(3):
        points = thinned(thinner, every_step(range(10 * stage, 10 * stage + 10), "a")) + thinner.flush()
        ends.append([point for point in points if point.step == 100])
    assert [[(point.key, point.value) for point in end] for end in ends] == [[("a", 9.0)], [("a", 19.0)], [("a", 29.0)]]
    assert thinner.flush() == []
    assert thinner.thinner.used >= 30 + 3


def test_who_takes_over_is_charged_for_what_may_be_said_again() -> None:
    thinner = RunThinner(Thinner(step=1, exempt=()))
    thinned(thinner, every_step(range(10), "a", "b"))
    thinner.hand_over(RunThinner(Thinner(step=1, exempt=())), after=0, elsewhere=0)
    thinner.roll_back(4, {"c": 5})

    thinned(thinner, every_step(range(3), "a", "b"))

    assert thinner.thinner.used == 2 * (10 + 3) + len("abc")


def test_nothing_is_said_again_without_a_roll_back() -> None:
    """A metric may have an axis of its own, that starts anew in each epoch."""
    thinner = RunThinner(Thinner(step=1, exempt=()))
    points = thinned(thinner, every_step([*range(10), *range(5)], "a"))
    thinner.hand_over(RunThinner(Thinner(step=1, exempt=())), after=0, elsewhere=0)
    points += thinned(thinner, every_step(range(4), "a", start_ms=10_000)) + thinner.flush()
    assert [point.step for point in points] == [*range(10), *range(5), *range(4)]


def test_only_what_is_beyond_the_step_of_a_roll_back_is_said_again() -> None:
    thinner = RunThinner(Thinner(step=1, exempt=()))
    points = thinned(thinner, every_step(range(10), "kept", "beyond"))
    points += thinned(thinner, every_step(range(10, 30), "beyond"))
    thinner.hand_over(RunThinner(Thinner(step=1, exempt=())), after=0, elsewhere=0)
    thinner.roll_back(15, {})
    points = thinned(thinner, every_step(range(4), "kept")) + thinned(thinner, every_step([16, 17], "beyond"))

    points += thinner.flush()

    ours = [(point.key, point.step, point.value) for point in points[2:]]  # the first two are what was open
    assert sorted(ours[:-1]) == [
        ("beyond", 16, 16.0),
        ("beyond", 17, 17.0),
        *(("kept", step, step) for step in range(4)),
    ]
    assert ours[-1] == ("beyond", 29, 17.0)
