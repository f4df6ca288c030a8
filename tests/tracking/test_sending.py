"""Every good point arrives, in order and once; every bad one is named; and nothing takes longer than it may."""

import itertools
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.tracking.batches import batches_of
from lightning_air.tracking.door_errors import Busy, DoorError, Refused, TooLate, Unreachable
from lightning_air.tracking.patience import Patience, backoff_seconds
from lightning_air.tracking.points import Point
from lightning_air.tracking.rest_door import batch_json
from lightning_air.tracking.sending import Sender
from tests.tracking.stand_ins import FakeTime, ListDoor, Warnings, failing

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Bench:
    """A sender with a false clock and a server that is a list."""

    def __init__(self, door: ListDoor | None = None, **options: Any) -> None:
        self.time = FakeTime()
        self.door = door or ListDoor()
        self.warnings = Warnings()
        self.idled = 0
        self.patience = Patience(idle=self.idle, clock=self.time.clock, wait=self.time.wait, chance=lambda: 0.0)
        self.sender = Sender(
            self.door, "run", patience=self.patience, warn=self.warnings, clock=self.time.clock, **options
        )

    def idle(self) -> None:
        self.idled += 1


def points_of(keys: list[str]) -> list[Point]:
    return [Point(key, step / 2, 1000 + step, step) for step, key in enumerate(keys)]


def twenty(num_steps: int = 1) -> list[Point]:
    return points_of([f"m{index}" for _ in range(num_steps) for index in range(20)])


# ---- batches --------------------------------------------------------------------------------------------------------


@law
@given(st.lists(st.text(max_size=300)), st.integers(1, 40), st.integers(2_000, 10_000))
def test_batches_are_the_points_in_order_each_within_the_limits(
    keys: list[str], max_points: int, max_bytes: int
) -> None:
    points = points_of(keys)
    batches = list(batches_of(points, max_points=max_points, max_bytes=max_bytes))
    assert [point for batch in batches for point in batch] == points
    for batch, following in itertools.zip_longest(batches, batches[1:]):
        assert 1 <= len(batch) <= max_points
        assert len(batch) == 1 or len(batch_json("f" * 32, batch)) <= max_bytes
        if following is not None and len(batch) < max_points:  # no batch ends before it has to
            assert len(batch_json("f" * 32, [*batch, following[0]])) + 1_000 + 120 * max_points > max_bytes


def test_a_request_stays_below_a_megabyte_whatever_the_names(tmp_path: Any) -> None:
    points = points_of(["\N{PILE OF POO}" * 250] * 1000)
    batches = list(batches_of(points))
    assert sum(len(batch) for batch in batches) == 1000
    assert all(len(batch_json("f" * 32, batch)) <= 1_000_000 for batch in batches)
    assert len(list(batches_of(twenty(100)))) == 2


# ---- what the server refuses ----------------------------------------------------------------------------------------


keys_of_ten = st.sampled_from("abcdefghij")


@law
@given(st.lists(keys_of_ten, max_size=120), st.sets(keys_of_ten), st.integers(1, 50))
def test_all_good_points_arrive_in_order_and_all_bad_ones_are_named(
    keys: list[str], bad: set[str], max_points: int
) -> None:
    bench = Bench(ListDoor(bad_keys=sorted(bad)), max_points=max_points)
    points = points_of(keys)
    outcome = bench.sender.send(points)
    assert outcome.num_done == len(points)
    assert list(bench.door.stored) == [point for point in points if point.key not in bad]
    assert [item.point for item in outcome.set_aside] == [point for point in points if point.key in bad]
    assert all(item.reason == f"bad name {item.point.key!r}" for item in outcome.set_aside)


def test_one_bad_point_of_a_thousand_takes_few_requests() -> None:
    bench = Bench(ListDoor(bad_keys=["bad"]))
    points = twenty(50)
    points[617] = points[617]._replace(key="bad")
    assert [item.point for item in bench.sender.send(points).set_aside] == [points[617]]
    assert len(bench.door.stored) == 999
    assert len(bench.door.batches) <= 2 + 2 * 10


def test_a_name_that_is_always_bad_is_not_asked_for_again_and_again() -> None:
    bench = Bench(ListDoor(bad_keys=["m7"]))
    points = twenty(50 * 20)
    outcome = bench.sender.send(points)
    assert len(outcome.set_aside) == 1000
    assert len(bench.door.stored) == 19_000
    assert len(bench.door.batches) < 20 + 50


def test_a_name_that_is_good_now_is_good() -> None:
    door = ListDoor(bad_keys=["m7"])
    bench = Bench(door)
    for _ in range(2):
        assert len(bench.sender.send(twenty()).set_aside) == 1
    door.bad_keys = []
    assert bench.sender.send(twenty()).set_aside == []
    door.bad_keys = ["m7"]
    bench.sender.send(twenty())
    num_batches = len(door.batches)
    bench.sender.send(twenty())
    assert len(door.batches) > num_batches + 1  # it was asked for again


@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_a_run_that_is_deleted_while_a_batch_is_taken_apart_costs_no_point(at: int) -> None:
    door = ListDoor(bad_keys=["m7"])
    bench = Bench(door)

    def delete_and_restore(number: int) -> None:
        door.refuses_all = "The run must be in the 'active' state" if at <= number < at + 5 else None

    door.trouble = delete_and_restore
    for _ in range(3):
        outcome = bench.sender.send(twenty(10))
        assert outcome.num_done == 200
        assert {item.point.key for item in outcome.set_aside} == {"m7"}
    assert len(door.stored) == 190


def test_what_was_refused_for_long_is_asked_about_again_now_and_then() -> None:
    door = ListDoor(bad_keys=["m7"])
    bench = Bench(door)
    bench.sender.send(twenty(5))
    num_batches = len(door.batches)
    assert len(bench.sender.send(twenty(5)).set_aside) == 5
    assert len(door.batches) == num_batches + 1
    bench.time.now += 601
    assert len(bench.sender.send(twenty(5)).set_aside) == 5  # asked, and no better
    num_batches = len(door.batches)
    bench.time.now += 601
    bench.sender.send(twenty(5))
    assert len(door.batches) == num_batches + 1  # more seldom then
    door.bad_keys = []
    bench.time.now += 601
    assert bench.sender.send(twenty(5)).set_aside == []
    assert bench.sender.send(twenty(5)).set_aside == []


@law
@given(st.floats(0, 3), st.lists(keys_of_ten, min_size=1, max_size=60))
def test_each_point_is_stored_or_set_aside_also_when_it_is_asked_about_again(pace: float, keys: list[str]) -> None:
    door = ListDoor(bad_keys=["a", "b"])
    bench = Bench(door, max_points=7)
    bench.sender.send(points_of(["a", "b"] * 3))

    def go_on(number: int) -> None:
        bench.time.now += 100 * pace

    door.trouble = go_on
    points = points_of(keys)
    outcome = bench.sender.send(points)
    assert outcome.num_done == len(points)
    assert [item.point for item in outcome.set_aside] == [point for point in points if point.key in "ab"]


def doubtful() -> Refused:
    return Refused("HTTP 400 BAD_REQUEST: QueuePool limit reached", blames_content=True, is_doubtful=True)


@pytest.mark.parametrize("num_refusals", [1, 8, 14])
def test_a_database_without_a_free_connection_costs_no_point(num_refusals: int) -> None:
    bench = Bench(ListDoor(trouble=failing(doubtful(), times=num_refusals)))
    outcome = bench.sender.send(twenty(10))
    assert (outcome.num_done, outcome.set_aside, len(bench.door.stored)) == (200, [], 200)
    assert sorted(bench.door.stored, key=lambda point: point.step) == list(bench.door.stored)


def test_a_point_that_the_database_refuses_for_minutes_is_set_aside() -> None:
    door = ListDoor()
    bench = Bench(door)

    def refuse(_: int) -> None:
        if any(point.key == "m7" for point in door.batches[-1]):
            raise doubtful()

    door.trouble = refuse
    begun = bench.time.now
    outcome = bench.sender.send(twenty())
    assert [item.point.key for item in outcome.set_aside] == ["m7"]
    assert len(door.stored) == 19
    assert 300 <= bench.time.now - begun < 600


def test_a_run_that_takes_nothing_is_no_reason_to_set_points_aside() -> None:
    # MLflow answers "must be in the 'active' state" with the code of a bad point.
    door = ListDoor()
    door.refuses_all = "The run must be in the 'active' state"
    bench = Bench(door)

    def restore(number: int) -> None:
        if number > 6:
            door.refuses_all = None

    door.trouble = restore
    begun = bench.time.now
    outcome = bench.sender.send(twenty())
    assert outcome.num_done == 20
    assert outcome.set_aside == []
    assert len(door.stored) == 20
    assert bench.time.now - begun >= 60  # not asked all the time
    assert len(bench.warnings) > 0
    assert "'active' state" in bench.warnings.text
    assert "kept on this machine" in bench.warnings.text


def test_credentials_that_ran_out_are_an_outage_that_is_said_at_once() -> None:
    bench = Bench(ListDoor(trouble=failing(Refused("HTTP 401", blames_content=False), times=3)))
    begun = bench.time.now
    assert bench.sender.send(twenty()).num_done == 20
    assert bench.time.now - begun >= 3 * 60
    assert "HTTP 401" in bench.warnings.text
    assert bench.sender.stats.last_error is None


def test_when_all_has_to_end_what_cannot_get_better_is_not_waited_for() -> None:
    bench = Bench(ListDoor(trouble=failing(Refused("HTTP 403", blames_content=False), times=1000)))
    bench.patience.end_in(600)
    begun = bench.time.now
    assert bench.sender.send(twenty()).num_done == 0
    assert bench.time.now - begun < 1
    assert bench.sender.stats.last_error == "HTTP 403"


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (Refused("HTTP 401", blames_content=False), 1),  # the credentials are new for the next request
        (Refused("HTTP 404 <html>", blames_content=False, is_mlflows=False), 5),  # a gateway that starts up
    ],
)
def test_when_all_has_to_end_what_may_get_better_is_tried_again(error: Refused, times: int) -> None:
    bench = Bench(ListDoor(trouble=failing(error, times=times)))
    bench.patience.end_in(60)
    assert bench.sender.send(twenty()).num_done == 20


# ---- when it is away ------------------------------------------------------------------------------------------------


def test_an_outage_of_hours_is_waited_for_and_said_once_it_is_long() -> None:
    bench = Bench(ListDoor(trouble=failing(Unreachable("refused"), times=500)))
    begun = bench.time.now
    outcome = bench.sender.send(twenty())
    assert outcome.num_done == 20
    assert len(bench.door.batches) == 501
    seconds = bench.time.now - begun
    assert 3 * 3600 < seconds < 5 * 3600
    assert bench.sender.stats.outage_seconds == pytest.approx(seconds, rel=0.01)
    assert bench.idled > seconds  # meanwhile the spool is looked after
    kinds = [kind for kind, _ in bench.warnings]
    assert set(kinds) == {"outage 1"}
    assert "has taken no metrics for" in bench.warnings[0][1]


def test_an_outage_of_another_day_is_said_again() -> None:
    door = ListDoor(trouble=failing(Unreachable("refused"), times=20))
    bench = Bench(door)
    for _ in range(2):
        assert bench.sender.send(twenty()).num_done == 20
        door.trouble = failing(Unreachable("refused"), times=len(door.batches) + 20)
        bench.time.now += 86_400
    assert {kind for kind, _ in bench.warnings} == {"outage 1", "outage 2"}


def test_a_short_outage_is_nobodys_concern() -> None:
    bench = Bench(ListDoor(trouble=failing(Unreachable("reset"), times=4)))
    assert bench.sender.send(twenty()).num_done == 20
    assert bench.warnings == []


@pytest.mark.parametrize(("asked", "waited"), [(7.0, 7.0), (1e6, 300.0)])
def test_a_busy_server_is_given_the_time_that_it_asks_for_within_reason(asked: float, waited: float) -> None:
    bench = Bench(ListDoor(trouble=failing(Busy("429", asked), times=1)))
    begun = bench.time.now
    bench.patience.wake()  # somebody flushes: it is left alone all the same
    assert bench.sender.send(twenty()).num_done == 20
    assert bench.time.now - begun == pytest.approx(waited, abs=1e-6)


@pytest.mark.parametrize("asked", [0.0, 0.2, None])
def test_a_busy_server_that_asks_for_no_time_is_not_stormed(asked: float | None) -> None:
    # Also one whose clock is behind ours: the date in Retry-After has passed then.
    bench = Bench(ListDoor(trouble=failing(Busy("429", asked), times=6)))
    begun, charged = bench.time.now, []

    def charge() -> int:
        charged.append(bench.time.now)
        if len(charged) <= 6:
            raise Busy("429", asked)
        return 20

    assert bench.sender.send(twenty(), before=charge).num_done == 20
    assert charged[6] - begun == pytest.approx(31.5, abs=0.1)  # 0.5 s, and twice as long each time
    assert bench.time.now - charged[6] == pytest.approx(31.5, abs=0.1)


@pytest.mark.parametrize("error", [TooLate("30 s"), Busy("HTTP 504")])
def test_a_batch_that_is_too_much_for_the_server_goes_in_parts(error: DoorError) -> None:
    # It stores the batch, but too late; then that it is stored already takes it even longer.
    bench = Bench()
    points = twenty(50)

    def overtax(_: int) -> None:
        batch = bench.door.batches[-1]
        if len(batch) > 200:
            bench.door.stored.update(dict.fromkeys(batch))
            raise error

    bench.door.trouble = overtax
    assert bench.sender.send(points).num_done == 1000
    assert list(bench.door.stored) == points
    assert len(bench.door.batches) < 30


def test_an_outage_does_not_make_batches_smaller() -> None:
    bench = Bench(ListDoor(trouble=failing(Unreachable("refused"), times=20)))
    bench.sender.send(twenty(50))
    assert {len(batch) for batch in bench.door.batches} == {1000}


def test_whoever_waits_cuts_a_pause_short() -> None:
    bench = Bench()
    begun = bench.time.now
    bench.patience.wake()
    bench.patience.pause(30)
    assert bench.time.now - begun < 0.5
    bench.patience.pause(30)
    assert bench.time.now - begun >= 30


@law
@given(st.floats(0.01, 500), st.integers(0, 40), st.lists(st.sampled_from(["busy", "away", "fault"]), max_size=40))
def test_nothing_begins_after_the_deadline(deadline_seconds: float, num_batches: int, troubles: list[str]) -> None:
    errors = {"busy": Busy("x", 20.0), "away": Unreachable("x"), "fault": ZeroDivisionError("x")}
    begun: list[float] = []

    def trouble(number: int) -> None:
        begun.append(bench.time.now - 1000.0)
        bench.time.now += 0.3
        if number <= len(troubles):
            raise errors[troubles[number - 1]]

    bench = Bench(ListDoor(trouble=trouble), max_points=10)
    bench.patience.end_in(deadline_seconds)
    outcome = bench.sender.send(twenty())
    assert all(seconds < deadline_seconds for seconds in begun)
    assert bench.time.now - 1000.0 <= deadline_seconds + 0.3 + 1e-6
    assert list(bench.door.stored) == twenty()[: outcome.num_done]
    for seconds, timeout_seconds in zip(begun, bench.door.timeouts, strict=True):
        assert timeout_seconds <= max(1.0, deadline_seconds - seconds)


def test_a_deadline_ends_a_pause_of_another_thread() -> None:
    door = ListDoor(trouble=failing(Busy("429", 200.0), times=1000))
    patience = Patience()
    sender = Sender(door, "run", patience=patience, warn=Warnings())
    thread = threading.Thread(target=sender.send, args=(twenty(),))
    thread.start()
    patience.end_in(0.05)
    thread.join(10)
    assert not thread.is_alive()


# ---- manners --------------------------------------------------------------------------------------------------------


def test_the_platforms_limit_of_requests_is_kept() -> None:
    bench = Bench(max_points=1)
    begun: list[float] = []
    bench.door.trouble = lambda _: begun.append(bench.time.now)
    bench.sender.send(twenty(10))
    assert len(begun) == 200
    per_second = [sum(first <= at < first + 1 for at in begun) for first in begun]
    assert max(per_second) <= 41


def test_points_are_charged_before_they_are_sent_and_not_sent_before_they_are_charged() -> None:
    bench, events = Bench(), []
    bench.door.trouble = lambda _: events.append("sent")
    errors: list[Exception] = [Unreachable("x"), Refused("no", blames_content=True), ValueError("x")]

    def charge() -> int:
        if errors:
            raise errors.pop()
        events.append("charged")
        return 2000

    assert bench.sender.send(twenty(100), before=charge).num_done == 2000
    assert events == ["charged", "sent", "sent"]


@pytest.mark.parametrize(("allowed", "num_sent"), [(1_500, 1_500), (0, 0), (-5, 0), (9_999, 2_000)])
def test_what_may_not_be_sent_is_cut_from_the_end(allowed: int, num_sent: int) -> None:
    bench, points = Bench(), twenty(100)

    outcome = bench.sender.send(points, before=lambda: allowed)

    assert (outcome.num_done, outcome.num_cut) == (num_sent, 2_000 - num_sent)
    assert [*bench.door.stored] == points[:num_sent]


def test_nothing_to_send_is_no_request() -> None:
    bench = Bench()
    assert bench.sender.send([]).num_done == 0
    assert bench.door.batches == []


@law
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_a_pause_is_bounded_and_does_not_shrink(attempt: int, chance: float) -> None:
    seconds = backoff_seconds(attempt, chance)
    assert 0.25 <= seconds <= 30
    assert seconds <= backoff_seconds(attempt + 1, chance)


def test_pauses_double() -> None:
    assert [backoff_seconds(attempt, 0.0) for attempt in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
