"""Training never waits, and every point arrives once, whatever the server does; a real one, on its bad days."""

import contextlib
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from lightning_air.tracking import ledger as ledger_module
from lightning_air.tracking import sending
from lightning_air.tracking.delivery import Delivery, Options
from lightning_air.tracking.door import open_door
from lightning_air.tracking.door_errors import Unreachable
from lightning_air.tracking.ledger import Ledger
from lightning_air.tracking.patience import Patience
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.progress import Progress, load_progress
from lightning_air.tracking.segments import BEGINNING
from lightning_air.tracking.sending import Sender
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import PROGRESS_NAME
from lightning_air.tracking.writer import THREAD_NAME, Writer
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.tracking.spooling import SECONDS, TWENTY, append, points_until, record_at, writing
from tests.tracking.stand_ins import FakeTime, ListDoor, PassThrough, Warnings, Windows, failing

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


# ---- a real server --------------------------------------------------------------------------------------------------


def test_two_thousand_steps_of_twenty_metrics_take_forty_requests(server: MlflowServer, proxy: FaultyProxy) -> None:
    run_id = server.create_run()
    with writing(open_door(proxy.url), run_id) as (spool, writer):
        for step in range(200):
            append(spool, step)
        assert writer.flush(SECONDS)
        assert server.points_of(run_id) == points_until(200)
        assert proxy.count() == writer.stats().num_requests == 4
        assert writer.close(SECONDS)
    door = ListDoor()
    with writing(door, folder=Path("long").absolute()) as (spool, writer):
        for step in range(2000):
            append(spool, step)
        assert writer.close(SECONDS)
        assert writer.stats().num_sent == 40_000
    # Two of them may be what was there when the writer looked for the first time, and the rest.
    assert len(door.batches) <= 41
    assert sorted(door.stored) == points_until(2000)


def test_with_a_server_that_takes_three_seconds_an_append_takes_none(server: MlflowServer, proxy: FaultyProxy) -> None:
    run_id = server.create_run()
    proxy.set(Fault(seconds=3.0, times=1))
    seconds = []
    with writing(open_door(proxy.url), run_id, flush_seconds=0.01) as (spool, writer):
        append(spool, 0)
        while not proxy.seen:
            time.sleep(0.01)
        for step in range(1, 500):
            record = record_at(step)
            begun = time.perf_counter()
            spool.append(record.timestamp_ms, record.step, record.values)
            seconds.append(time.perf_counter() - begun)
            time.sleep(0.002)
        assert proxy.count() == 1
        assert sorted(seconds)[-5] < 0.005  # the 99th percentile; ordinarily about 0.00005
        assert writer.close(SECONDS)
    assert server.points_of(run_id) == points_until(500)


@pytest.mark.parametrize(
    ("fault", "request_seconds"),
    [
        pytest.param(Fault(status=429, headers={"Retry-After": "1"}, times=1), 30.0, id="too many requests"),
        pytest.param(Fault(status=500, times=1), 30.0, id="broken"),
        pytest.param(Fault(cuts=True, times=1), 30.0, id="cut after storing"),
        pytest.param(Fault(drip_seconds=1.0, times=1), 1.5, id="slow drip"),
        pytest.param(Fault(seconds=20.0, times=1), 1.5, id="silent"),
    ],
)
def test_on_a_bad_day_every_point_arrives_once(
    fault: Fault, request_seconds: float, server: MlflowServer, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_REQUEST_SECONDS", (request_seconds,))
    run_id = server.create_run()
    proxy.set(fault)
    begun = time.monotonic()
    with writing(open_door(proxy.url), run_id) as (spool, writer):
        for step in range(60):  # a batch that is stored already takes the server long
            append(spool, step)
        assert writer.flush(SECONDS)
        stats = writer.stats()
        if fault.headers:
            assert time.monotonic() - begun >= 1
        # On a busy machine, an honest answer too may come after the shorter time limit.
        assert stats.num_requests == proxy.count()
        assert proxy.count() == 3 or (proxy.count() > 3 and request_seconds < SECONDS)
        assert stats.outage_seconds > 0
        assert stats.last_error is None
        assert (stats.num_sent, stats.num_pending_points, stats.num_pending_records) == (1200, 0, 0)
        assert writer.close(SECONDS)
    assert server.points_of(run_id) == points_until(60)


def test_an_outage_longer_than_mlflows_own_retries_costs_nothing(
    server: MlflowServer, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    run_id = server.create_run()
    with writing(open_door(proxy.url), run_id, flush_seconds=0.05) as (spool, writer):
        append(spool, 0)
        assert writer.flush(SECONDS)
        proxy.refuse()
        with pytest.raises(MlflowException):
            MlflowClient(proxy.url).log_metric(run_id, "loss", 1.0)
        for step in range(1, 120):
            append(spool, step)
            time.sleep(0.01)
        begun = time.monotonic()
        assert not writer.flush(0.3)
        assert time.monotonic() - begun < 2
        assert "refused" in (writer.stats().last_error or "")
        proxy.accept()
        assert writer.flush(SECONDS)  # wakes it from its pause
        assert writer.close(SECONDS)
    assert server.points_of(run_id) == points_until(120)


def test_of_twenty_metrics_one_with_a_bad_name_is_named_and_nineteen_arrive(server: MlflowServer) -> None:
    run_id, warnings = server.create_run(), Warnings()
    names = [*TWENTY[:7], "../loss", *TWENTY[8:]]
    with writing(open_door(server.url), run_id, warn=warnings) as (spool, writer):
        for step in range(5):
            append(spool, step, names)
        assert writer.flush(SECONDS)
        stats = writer.stats()
        assert (stats.num_sent, stats.num_set_aside) == (95, 5)
        assert stats.num_requests < 40
        assert writer.close(SECONDS)
        lines = [json.loads(line) for line in (spool.folder / "set_aside.jsonl").read_text().splitlines()]
    assert server.points_of(run_id) == [point for point in points_until(5, names) if point.key != "../loss"]
    assert [(line["key"], line["step"]) for line in lines] == [("../loss", step) for step in range(5)]
    assert "INVALID_PARAMETER_VALUE" in lines[0]["reason"]
    assert len([1 for _, message in warnings if "'../loss'" in message]) == 1


def test_points_of_a_run_that_was_deleted_wait_for_its_return(server: MlflowServer) -> None:
    run_id, warnings = server.create_run(), Warnings()
    server.delete_run(run_id)
    with writing(open_door(server.url), run_id, warn=warnings) as (spool, writer):
        for step in range(10):
            append(spool, step)
        assert not writer.flush(0.5)
        until = time.monotonic() + SECONDS
        while "must be in the 'active' state" not in warnings.text and time.monotonic() < until:
            time.sleep(0.02)
        assert "must be in the 'active' state" in warnings.text
        server.restore_run(run_id)
        assert writer.flush(SECONDS)
        assert writer.stats().num_set_aside == 0
        assert writer.close(SECONDS)
    assert server.points_of(run_id) == points_until(10)


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_by_the_deadline_stays_for_the_next_writer() -> None:
    door = ListDoor(trouble=failing(Unreachable("away"), times=10**9))
    with writing(door) as (spool, writer):
        for step in range(100):
            append(spool, step)
        begun = time.monotonic()
        assert not writer.close(0.5)
        assert 0.4 < time.monotonic() - begun < 3
        assert not writer.close(SECONDS)  # once
        assert writer.stats().num_pending_points + 20 * writer.stats().num_pending_records >= 2000
    assert door.stored == {}
    door.trouble = lambda _: None
    with writing(door) as (spool, writer):
        append(spool, 100)
        assert writer.flush(SECONDS)
        assert sorted(door.stored) == points_until(101)
        assert writer.stats().num_pending_records == 0
        assert writer.close(SECONDS)


def test_a_request_without_end_delays_nobody_and_changes_nothing_afterwards() -> None:
    answer, asked = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        asked.set()
        answer.wait(SECONDS)

    door = ListDoor(trouble=hang)
    with writing(door) as (spool, writer):
        append(spool, 0)
        assert not writer.flush(0.1)
        assert asked.wait(SECONDS)
        begun = time.monotonic()
        assert not writer.close(0.2)
        assert time.monotonic() - begun < 2
        before = (spool.folder / "progress.json").read_bytes()
        answer.set()
        writer._thread.join(SECONDS)
        assert (spool.folder / "progress.json").read_bytes() == before


def test_the_thread_has_a_name_and_an_end_and_starts_when_told() -> None:
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]
    with writing(ListDoor()) as (_, writer):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
        assert thread.daemon  # an exit that does not close it does not wait for it
        assert writer.close(SECONDS)
        assert not thread.is_alive()
        assert writer.close(SECONDS)
        assert writer.flush(SECONDS)


def test_a_writer_that_was_never_started_has_nothing_to_wait_for(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run")
    writer = Writer(spool, PassThrough(), ListDoor(), "run")
    begun = time.monotonic()
    assert not writer.flush(SECONDS)
    assert not writer.close(SECONDS)
    assert time.monotonic() - begun < 1
    spool.close()


def test_in_a_forked_process_nothing_waits() -> None:
    with writing(ListDoor(trouble=failing(Unreachable("away"), times=10**9))) as (spool, writer):
        append(spool, 0)
        reader, sender = os.pipe()
        child = os.fork()
        if child == 0:
            begun = time.monotonic()
            results = [writer.flush(20), writer.close(20), spool.append(1, 1, {"a": 1.0}), writer.stats().num_sent]
            os.write(sender, json.dumps([*results, time.monotonic() - begun < 5]).encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(reader) as file:
            assert json.loads(file.read()) == [False, False, False, 0, True]
        os.waitpid(child, 0)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_flush_seconds_is_positive(seconds: float, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "run")
    with pytest.raises(ValueError, match=f"flush_seconds must be a positive number of seconds, got {seconds}"):
        Writer(spool, PassThrough(), ListDoor(), "run", flush_seconds=seconds)
    spool.close()


# ---- what others hang onto it --------------------------------------------------------------------------------------


def test_points_are_charged_before_they_are_sent() -> None:
    events: list[Any] = []
    door = ListDoor(trouble=lambda _: events.append("request"))

    def charge(num_points: int) -> int:
        events.append(num_points)
        return num_points

    with writing(door, before_send=charge) as (spool, writer):
        for step in range(125):
            append(spool, step)
        assert writer.close(SECONDS)
    charged = [event for event in events if event != "request"]
    assert charged == sorted(charged)
    assert charged[-1] == 2500
    sent = 0
    for before, event in itertools.pairwise(events):
        if event == "request":
            assert before != "request"
    for total, batch in zip(charged, door.batches, strict=True):
        sent += len(batch)
        assert total == sent


def test_a_charge_that_cannot_be_made_holds_the_points_back() -> None:
    door, errors = ListDoor(), [Unreachable("no tag"), Unreachable("no tag")]

    def charge(num_points: int) -> int:
        if errors:
            assert door.stored == {}
            raise errors.pop()
        return num_points

    with writing(door, before_send=charge) as (spool, writer):
        append(spool, 0)
        assert writer.flush(SECONDS)
        assert len(door.stored) == 20


def test_points_beyond_what_may_be_sent_are_dropped_counted_and_warned_of(tmp_path: Path) -> None:
    door, settled, warnings = ListDoor(), list[int](), Warnings()
    with writing(
        door,
        before_send=lambda num_points: min(num_points, 1_010),
        settle=lambda num_points, _: settled.append(num_points),
        warn=warnings,
    ) as (spool, writer):
        for step in range(125):
            append(spool, step)
        assert writer.close(SECONDS)
        stats = writer.stats()
    assert len(door.stored) == stats.num_sent == 1_010
    assert stats.num_cut == 2_500 - 1_010
    assert stats.num_pending_points == 0
    assert settled == [2_500]
    assert [kind for kind, _ in warnings] == ["cut", "cut"]
    assert "budget is used up" in warnings.text


def test_an_end_that_cannot_be_settled_is_an_end() -> None:
    def settle(*_: object) -> None:
        raise Unreachable("away")

    with writing(ListDoor(), settle=settle) as (spool, writer):
        append(spool, 0)
        assert writer.close(SECONDS)


class Counting(Windows):
    """Windows whose size can be changed."""

    width = 3

    def change(self, width: int) -> None:
        self.open["width"] = [[width, 0, 0]]


def test_the_thinner_is_changed_between_chunks_and_what_follows_a_crash_knows_it() -> None:
    seen: list[str] = []
    with writing(ListDoor(), thinner=Counting(), observe=lambda _: seen.append(threading.current_thread().name)) as (
        spool,
        writer,
    ):
        append(spool, 0)
        writer.ask(lambda thinner: thinner.change(7))
        writer.ask(lambda thinner: 1 / 0)
        assert writer.flush(SECONDS)
        assert load_progress(spool.folder).thinner["width"] == [[7, 0, 0]]
        assert set(seen) == {THREAD_NAME}


def test_what_others_do_wrong_stops_nothing_and_is_said_once() -> None:
    warnings = Warnings()

    class Picky(PassThrough):
        def add(self, record: Record) -> list[Point]:
            if record.step == 3:
                raise ValueError("a step of three")
            return super().add(record)

    def complain(_: Any) -> None:
        raise RuntimeError("observer")

    door = ListDoor()
    with writing(door, thinner=Picky(), observe=complain, warn=warnings) as (spool, writer):
        for step in range(6):
            append(spool, step)
        assert writer.close(SECONDS)
    assert sorted({point.step for point in door.stored}) == [0, 1, 2, 4, 5]
    assert "step 3 is left out" in warnings.text
    assert "observer" in warnings.text


def test_a_spool_that_cannot_be_read_for_a_while_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, door, errors = Warnings(), ListDoor(), [OSError("stale"), OSError("stale")]
    read = Spool.read

    def bad_read(self: Spool, *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return read(self, *args)

    monkeypatch.setattr(Spool, "read", bad_read)
    with writing(door, warn=warnings) as (spool, writer):
        append(spool, 0)
        assert writer.flush(SECONDS)
        assert writer.close(SECONDS)
    assert len(door.stored) == 20
    assert {kind for kind, _ in warnings} == {"writer OSError"}


def test_when_progress_cannot_be_noted_points_go_on_arriving(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, door = Warnings(), ListDoor()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ledger_module, "save_progress", full)
    with writing(door, warn=warnings) as (spool, writer):
        for step in range(100):
            append(spool, step)
        assert writer.flush(SECONDS)
        assert len(door.stored) == 2000
        monkeypatch.undo()
        append(spool, 100)
        assert writer.flush(SECONDS)
        assert load_progress(spool.folder).num_sent == 2020
    assert {kind for kind, _ in warnings} == {"progress"}


# ---- one moment ----------------------------------------------------------------------------------------------------


def make_delivery(spool: Spool, thinner: Any, door: ListDoor, progress: Progress) -> Delivery[Any]:
    time_, warnings = FakeTime(), Warnings()
    patience = Patience(clock=time_.clock, wait=time_.wait)
    sender = Sender(door, "run", patience=patience, warn=warnings, clock=time_.clock)
    return Delivery(
        spool,
        thinner,
        sender,
        Ledger(spool.folder, spool, warnings),
        progress,
        options=Options(before_send=lambda num_points: num_points, observe=lambda _: None, flush_seconds=1.0),
        warn=warnings,
        clock=time_.clock,
    )


class Crash(BaseException):
    """The process is killed."""


@settings(law, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 3), st.sampled_from(["turn", "crash", "cut", "lost", "nothing"])),
        max_size=12,
    ),
    st.integers(1, 40),
)
def test_wherever_it_is_killed_the_server_gets_the_points_of_an_undisturbed_run(
    events: list[tuple[int, int, str]], width: int
) -> None:
    names = [f"m{index}" for index in range(width)]
    with tempfile.TemporaryDirectory() as scratch:
        folder, door, step = Path(scratch, "run"), ListDoor(), 0
        undisturbed = Windows()
        expected: list[Point] = []
        spool = Spool(folder, segment_bytes=1 << 12)
        delivery = make_delivery(spool, Windows(), door, load_progress(folder))
        for num_records, num_requests, what in events:
            for _ in range(num_records):
                append(spool, step, names)
                expected += undisturbed.add(record_at(step, names))
                step += 1

            def kill(number: int, last: int = len(door.batches) + num_requests, stores: bool = what == "cut") -> None:
                if number == last:
                    if stores:
                        door.stored.update(dict.fromkeys(door.batches[-1]))
                    raise Crash

            door.trouble = kill if what in ("crash", "cut", "lost") else lambda _: None
            if what != "nothing":
                with contextlib.suppress(Crash):
                    delivery.turn(is_last=False, is_asked=True)
            if what in ("crash", "cut", "lost"):
                spool.close()
                if what == "lost":  # as when the machine goes down too
                    (folder / PROGRESS_NAME).write_bytes(b"")
                spool = Spool(folder, segment_bytes=1 << 12)
                progress = load_progress(folder)
                delivery = make_delivery(spool, Windows(progress.thinner), door, progress)
                door.trouble = lambda _: None
        assert delivery.turn(is_last=True, is_asked=False)
        spool.close()
        expected += undisturbed.flush()
        assert sorted(door.stored) == sorted(expected)
        assert delivery.progress.num_sent == len(expected)


def test_an_outage_takes_no_memory() -> None:
    door = ListDoor(trouble=failing(Unreachable("away"), times=10**9))
    with writing(door) as (spool, writer):
        most = 0
        for step in range(20_000):
            append(spool, step)
            if step % 500 == 0:
                time.sleep(0.002)
                delivery = writer._delivery
                most = max(most, len(delivery._points) + 20 * len(delivery._unread))
        assert spool.num_dropped == 0
        assert most <= 1000 + 20 * 100
        assert len(spool.read(BEGINNING, 10**6)) == 20_000


def test_the_space_of_what_was_acknowledged_is_given_back() -> None:
    with writing(ListDoor(), segment_bytes=1 << 14) as (spool, writer):
        for step in range(1000):
            append(spool, step)
        assert writer.flush(SECONDS)
        # The one in use, the next, and the one to which the progress before the last one leads.
        assert len(list(spool.folder.glob("*.records"))) <= 3


def test_a_point_waits_no_longer_than_it_may() -> None:
    door = ListDoor()
    with writing(door, flush_seconds=0.5) as (spool, _):
        append(spool, 0)
        time.sleep(0.1)
        assert door.stored == {}
        deadline_seconds = time.monotonic() + SECONDS
        while not door.stored:
            assert time.monotonic() < deadline_seconds
            time.sleep(0.01)
