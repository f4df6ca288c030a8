"""Ranks agree on when to save whatever their clocks say, talk rarely, and are not late by more than a few steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint.cadence import Schedule, parse_every
from lightning_air.checkpoint.timing import MAX_SILENT_STEPS, SharedSchedule
from tests.checkpoint.runs import FakeClock


@dataclass
class Talk:
    """A broadcast among simulated ranks that are asked one after the other, rank 0 first."""

    told: list[object] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)

    def broadcast_of(self, rank: int) -> "object":
        def broadcast(value: object) -> object:
            at = self.heard.get(rank, 0)
            self.heard[rank] = at + 1
            if rank == 0:
                self.told.append(value)
            assert at < len(self.told), f"rank {rank} listens, and rank 0 says nothing"
            return self.told[at]

        return broadcast


@dataclass
class Seen:
    saves: list[int]
    seconds: list[float]
    num_broadcasts: int


def run(
    every: str,
    step_seconds: Iterable[float],
    *,
    speeds: Sequence[float] = (1.0,),
    upload_seconds: float = 0.0,
    retime: float | None = None,
) -> Seen:
    """Train with ranks whose clocks run at these speeds, and return at which steps, and times of rank 0, all save."""
    clocks = [FakeClock(1000.0 * rank) for rank in range(len(speeds))]
    talk = Talk()
    schedules = [Schedule(parse_every(every)) for _ in speeds]
    ranks = [
        SharedSchedule(schedule, talk.broadcast_of(rank), clocks[rank])  # type: ignore[arg-type]
        for rank, schedule in enumerate(schedules)
    ]
    for rank in ranks:
        rank.start(0)
    if retime is not None:
        for schedule in schedules:
            schedule.retime(retime)
    seen = Seen([], [], 0)
    published = 0.0
    for step, seconds in enumerate(step_seconds, start=1):
        for clock, speed in zip(clocks, speeds, strict=True):
            clock.now += seconds * speed
        answers = {rank.is_due(step, is_saving=clocks[0].now < published) for rank in ranks}
        assert len(answers) == 1, f"the ranks disagree at step {step}"
        assert set(talk.heard.values()) <= {len(talk.told)}, "a rank missed a broadcast"
        if answers == {True}:
            for rank in ranks:
                rank.record_save(step)
            seen.saves.append(step)
            seen.seconds.append(clocks[0].now)
            published = clocks[0].now + upload_seconds
    seen.num_broadcasts = len(talk.told)
    return seen


step_times = st.lists(st.sampled_from([0.0, 0.001, 0.1, 1.0, 30.0, 400.0]), min_size=1, max_size=200)
clock_speeds = st.lists(st.sampled_from([0.01, 0.9, 1.0, 1.1, 50.0]), min_size=1, max_size=3)


@given(times=step_times, speeds=clock_speeds, every=st.sampled_from(["1s", "10min", "auto", "7steps", "2epochs"]))
def test_ranks_agree_however_their_clocks_run(times: list[float], speeds: list[float], every: str) -> None:
    run(every, times, speeds=speeds)  # asserts it at every step


@pytest.mark.parametrize(
    ("every", "step_seconds", "most"),
    [("30min", 0.01, 30), ("30min", 0.3, 40), ("30min", 2.0, 80), ("10s", 0.1, 140), ("auto", 0.1, 40)],
)
def test_a_thousand_steps_take_few_broadcasts(every: str, step_seconds: float, most: int) -> None:
    seen = run(every, [step_seconds] * 1000, speeds=(1.0, 1.0))
    assert 0 < seen.num_broadcasts <= most


@pytest.mark.parametrize("every", ["500steps", "2epochs"])
def test_steps_and_epochs_take_none(every: str) -> None:
    assert run(every, [0.1] * 1000, speeds=(1.0, 1.0)).num_broadcasts == 0


@pytest.mark.parametrize("step_seconds", [0.01, 0.5, 7.0, 100.0, 4000.0])
def test_a_save_is_on_time_when_steps_are_even(step_seconds: float) -> None:
    seen = run("30min", [step_seconds] * 6000)
    for number, seconds in enumerate(seen.seconds, start=1):
        if step_seconds < 1800:
            assert number * 1800 - 1e-6 <= seconds < number * 1800 + 1.5 * step_seconds
    if step_seconds > 1800:
        assert seen.saves == list(range(1, 6001))


def test_steps_that_become_slow_make_a_save_late_by_a_bounded_number_of_them() -> None:
    # Launches that only queue work, for a while: the same number of real steps would be a day.
    for num_fast in (10, 1000, 50_000):
        seen = run("30min", [0.001] * num_fast + [10.0] * 500)
        assert seen.seconds[0] < 1800 + MAX_SILENT_STEPS * 10 + 10
    # What was counted before is not exceeded either.
    seen = run("30min", [0.001] * 10 + [600.0] * 50)
    assert seen.seconds[0] < 1800 + 20 * 600


def test_auto_does_not_wait_for_an_upload_and_asks_for_its_end_rarely() -> None:
    seen = run("auto", [0.1] * 20_000, retime=20.0, upload_seconds=333.0)
    assert len(seen.seconds) >= 5
    for before, after in zip(seen.seconds, seen.seconds[1:], strict=False):
        assert 333.0 <= after - before < 333.0 + 2.5
    assert seen.num_broadcasts < 20_000 * 0.25


def test_the_interval_of_auto_is_told_when_it_has_changed_by_a_quarter() -> None:
    schedule = Schedule(parse_every("auto"))
    rank = SharedSchedule(schedule, lambda value: value, FakeClock())
    rank.start(0)

    def measure(blocking_seconds: float) -> str | None:
        return rank.measure(
            blocking_seconds=blocking_seconds, upload_seconds=0.0, num_gpus=8, failures_per_gpu_day=0.01
        )

    first = measure(0.1)
    assert first is not None
    assert "it blocks training for 0.1s" in first
    before = schedule.interval_seconds or 0.0
    assert [measure(seconds) for seconds in (0.11, 0.12, 0.14, 0.12, 0.1)] == [None] * 5
    assert schedule.interval_seconds == pytest.approx(before)  # it follows all the same
    measure(0.15)
    assert (schedule.interval_seconds or 0.0) > before * 1.1
    assert "it blocks training for 0.2s" in (measure(0.2) or "")


def test_a_cadence_of_the_users_own_does_not_wait_for_an_upload() -> None:
    seen = run("20s", [0.1] * 2000, upload_seconds=333.0)
    assert len(seen.seconds) >= 9


def test_the_end_of_an_epoch_is_counted_on_every_rank() -> None:
    clock = FakeClock()
    ranks = [SharedSchedule(Schedule(parse_every("2epochs")), lambda value: value, clock) for _ in range(2)]
    for rank in ranks:
        rank.start(0)
    due = []
    for step in range(1, 41):
        for rank in ranks:
            answers = [rank.is_due(step), rank.is_due(step, epoch_end=True) if step % 8 == 0 else False]
            if any(answers):
                rank.record_save(step)
                due.append(step)
    assert due == [16, 16, 32, 32]
