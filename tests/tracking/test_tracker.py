"""What was logged is on the server once: through SIGKILL, outages, other machines, other options, and roll-backs."""

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lightning_air.tracking import tails as tails_module
from lightning_air.tracking import tracker as tracker_module
from lightning_air.tracking.attempts import latest_moments
from lightning_air.tracking.charging import BEFORE
from lightning_air.tracking.delivery import Delivery
from lightning_air.tracking.folder_lock import SpoolInUseError
from lightning_air.tracking.leftovers import send_left
from lightning_air.tracking.points import Point
from lightning_air.tracking.segments import Position
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RUN_NAME
from lightning_air.tracking.tails import Tail
from lightning_air.tracking.tracker import Tracker
from lightning_air.tracking.writer import THREAD_NAME
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import run_ranks
from tests.tracking.killing import NAMES, append_forever, killed, open_tracker, stored_charges, stored_mark
from tests.tracking.stand_ins import Warnings

DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


@pytest.fixture
def run_id(server: MlflowServer) -> str:
    return server.create_run()


def log(tracker: Tracker, steps: Iterable[int], *names: str, offset: float = 0.0) -> None:
    for step in steps:
        tracker.append(step, dict.fromkeys(names or ("a",), step + offset))


def in_checkpoint(tail: Tail) -> Tail | None:
    """Return what another process finds in the checkpoint."""
    return Tail.of({"tail": tail.to_dict()})


def curve(server: MlflowServer, run_id: str, key: str = "a") -> list[tuple[int, float]]:
    found = [(point.step, point.value) for point in server.points_of(run_id) if point.key == key]
    return sorted(found)


def assert_once(server: MlflowServer, run_id: str, attempts: Iterable[Iterable[int]]) -> list[Point]:
    """Check that each safe step is there once with all its metrics, and at most one more of each attempt."""
    points = server.points_of(run_id)
    steps = Counter(point.step for point in points)
    safe = {step for attempt in attempts for step in attempt}
    assert safe <= steps.keys()
    assert set(steps.values()) == {len(NAMES)}, "some are twice, or not whole"
    assert len(steps) <= len(safe) + len(list(attempts))
    assert len({point.key for point in points}) == len(NAMES)
    return points


# ---- SIGKILL ---------------------------------------------------------------------------------------------------------


def test_records_of_killed_attempts_arrive_once_and_the_mark_is_never_below(
    server: MlflowServer, run_id: str, tmp_path: Path
) -> None:
    attempts = []
    for attempt in range(3):
        safe = tmp_path / f"safe {attempt}"
        options = {"charged": stored_charges(server, run_id)}
        spool = server.url, run_id, tmp_path / "spool"
        attempts.append(killed(safe, append_forever, spool, 10_000 * attempt, options))
        assert len(server.points_of(run_id)) <= stored_mark(server, run_id)

    tracker = open_tracker(server.url, run_id, tmp_path / "spool", charged=stored_charges(server, run_id))
    assert tracker.close(DEADLINE_SECONDS)

    points = assert_once(server, run_id, attempts)
    assert len(points) == stored_mark(server, run_id)
    assert tracker.used >= len(points)
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize("fault", [Fault("log-batch", cuts=True), Fault("log-batch", status=500, seconds=0.05)])
def test_records_arrive_once_though_the_server_did_not_say_that_it_had_them(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path, fault: Fault
) -> None:
    """Each attempt sends what the one before has sent without knowing it; the last one is a replay."""
    proxy.set(fault)
    attempts = []
    for attempt in range(2):
        safe = tmp_path / f"safe {attempt}"
        options = {"charged": stored_charges(server, run_id)}
        spool = proxy.url, run_id, tmp_path / "spool"
        attempts.append(killed(safe, append_forever, spool, 10_000 * attempt, options, least=200))
    proxy.set(Fault("log-batch", cuts=True, times=1))

    assert send_left(tmp_path / "spool", deadline_seconds=DEADLINE_SECONDS).is_complete

    assert len(assert_once(server, run_id, attempts)) <= stored_mark(server, run_id)


def test_the_cap_holds_over_three_killed_attempts_on_one_machine(
    server: MlflowServer, run_id: str, tmp_path: Path
) -> None:
    options = {"max_metric_steps": 100, "reserve": 0, "step": "auto"}
    for attempt in range(3):
        safe = tmp_path / f"safe {attempt}"
        spool = server.url, run_id, tmp_path / "spool"
        killed(safe, append_forever, spool, 150 * attempt, options, least=150)
        options["charged"] = stored_charges(server, run_id)
        assert len(server.points_of(run_id)) <= stored_mark(server, run_id) <= 100
    send_left(tmp_path / "spool", deadline_seconds=DEADLINE_SECONDS)
    assert len(NAMES) < len(server.points_of(run_id)) <= stored_mark(server, run_id) <= 100


def test_the_cap_holds_over_attempts_on_fresh_machines_that_resume_from_one_checkpoint(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    """The checkpoint knows nothing of what was sent after it; the tags do. At last the first machine comes back."""
    options = {"max_metric_steps": 60, "reserve": 0, "step": 1}
    first = open_tracker(proxy.url, run_id, tmp_path / "0", **options)
    log(first, range(5))
    first.flush(DEADLINE_SECONDS)
    tail = in_checkpoint(first.tail())
    log(first, range(5, 20))
    first.flush(DEADLINE_SECONDS)
    proxy.refuse()
    log(first, range(20, 50))
    assert not first.close(0.1)
    for machine in range(1, 4):
        before = stored_charges(server, run_id)
        tracker = open_tracker(server.url, run_id, tmp_path / str(machine), charged=before, tail=tail, **options)
        log(tracker, range(5, 30))
        tracker.close(DEADLINE_SECONDS)
        assert len(server.points_of(run_id)) <= stored_mark(server, run_id)
        assert sum(before.values()) <= stored_mark(server, run_id) <= 60
    proxy.accept()

    warnings = Warnings()
    result = send_left(tmp_path / "0", deadline_seconds=DEADLINE_SECONDS, warn=warnings)

    assert result.is_complete
    assert result.stats.num_cut > 0
    assert "points are dropped now" in warnings.text
    assert len(server.points_of(run_id)) <= stored_mark(server, run_id) <= 60


def test_two_attempts_at_once_keep_to_the_cap_together(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    """A zombie and the retry that took its place; neither curve ends before its attempt does."""
    options = {"max_metric_steps": 4_000, "reserve": 0, "step": "auto"}
    trackers = [open_tracker(server.url, run_id, tmp_path / name, **options) for name in "ab"]
    for start in range(0, 12_000, 1_000):
        for tracker, name in zip(trackers, "ab", strict=True):
            log(tracker, range(start, start + 1_000), name)
            tracker.flush(DEADLINE_SECONDS)
    for tracker in trackers:
        assert tracker.close(DEADLINE_SECONDS)

    assert 1_000 < len(server.points_of(run_id)) <= 4_000
    assert len(server.points_of(run_id)) <= stored_mark(server, run_id) <= 4_000
    assert min(curve(server, run_id, name)[-1][0] for name in "ab") > 11_000
    assert sum(tracker.stats.num_cut for tracker in trackers) < 500

    third = open_tracker(server.url, run_id, tmp_path / "c", charged=stored_charges(server, run_id), **options)
    log(third, range(9_000), "c")
    assert third.close(DEADLINE_SECONDS)
    assert len(server.points_of(run_id)) <= 4_000


def test_a_machine_that_comes_back_knows_what_others_have_sent_meanwhile(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    options = {"max_metric_steps": 10_000}
    first = open_tracker(proxy.url, run_id, tmp_path / "0", **options)
    log(first, range(100))
    assert first.flush(DEADLINE_SECONDS)
    proxy.refuse()
    log(first, range(100, 200))
    assert not first.close(0.1)
    second = open_tracker(server.url, run_id, tmp_path / "1", charged=stored_charges(server, run_id), **options)
    log(second, range(200, 400))
    assert second.close(DEADLINE_SECONDS)
    proxy.accept()

    third = open_tracker(proxy.url, run_id, tmp_path / "0", charged=stored_charges(server, run_id), **options)
    log(third, range(400, 500))
    assert third.close(DEADLINE_SECONDS)

    assert [step for step, _ in curve(server, run_id)] == list(range(500))
    assert stored_mark(server, run_id) == 500
    assert len(stored_charges(server, run_id)) == 2, "the third goes on as the writer of the folder"
    assert third.used >= 500


def test_attempts_that_end_well_are_charged_with_what_they_sent(
    server: MlflowServer, run_id: str, tmp_path: Path
) -> None:
    for attempt in range(3):
        tracker = open_tracker(server.url, run_id, tmp_path / "spool", charged=stored_charges(server, run_id))
        log(tracker, range(attempt, attempt + 1))
        assert tracker.close(DEADLINE_SECONDS)

    assert stored_mark(server, run_id) == len(server.points_of(run_id)) == 3


def test_what_the_run_had_before_is_stored_before_more_is_sent(
    server: MlflowServer, run_id: str, tmp_path: Path
) -> None:
    tracker = open_tracker(server.url, run_id, tmp_path / "spool", found=500, max_metric_steps=510, reserve=0)
    assert stored_charges(server, run_id) == {}
    assert "of 510 metric steps used" in tracker.plan()
    log(tracker, range(100))
    assert tracker.close(DEADLINE_SECONDS)
    assert stored_charges(server, run_id)[BEFORE] == 500
    assert 0 < len(server.points_of(run_id)) <= 10
    assert tracker.stats.num_over_budget > 0 or tracker.stats.num_thinned > 0


# ---- a damaged folder ------------------------------------------------------------------------------------------------


def leave(server: MlflowServer, proxy: FaultyProxy, run_id: str, folder: Path) -> None:
    """Leave the steps from 10 to 99, of which windows of 7 are made; the steps before them are sent."""
    tracker = open_tracker(proxy.url, run_id, folder, step=7)
    log(tracker, range(10))
    assert tracker.flush(DEADLINE_SECONDS)
    proxy.refuse()
    log(tracker, range(10, 100))
    assert not tracker.close(0.1)
    proxy.accept()


@pytest.mark.parametrize("damage", ["cut", "deleted"])
def test_what_is_left_arrives_though_it_cannot_be_read_whose_it_is(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path, damage: str
) -> None:
    """The folder's name and the progress tell all but the writer, whose charge stays."""
    leave(server, proxy, run_id, tmp_path / "spool")
    path = tmp_path / "spool" / RUN_NAME
    path.unlink()
    if damage == "cut":
        path.write_text('{"run_id": "')

    tracker = open_tracker(proxy.url, run_id, tmp_path / "spool", step=7, charged=stored_charges(server, run_id))
    log(tracker, range(100, 106))
    assert tracker.close(DEADLINE_SECONDS)

    assert curve(server, run_id)[:14] == [(step + 6, step + 3.0) for step in range(0, 98, 7)]
    assert len(server.points_of(run_id)) <= stored_mark(server, run_id)


def test_what_is_left_of_nobody_knows_whom_is_put_aside_and_not_deleted(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    leave(server, proxy, run_id, tmp_path / "spool")
    for path in (tmp_path / "spool").glob("*.json"):
        path.write_text("{")
    records = sorted(path.read_bytes() for path in (tmp_path / "spool").glob("*.records"))
    warnings = Warnings()

    tracker = open_tracker(server.url, run_id, tmp_path / "spool", warn=warnings)
    log(tracker, range(200, 203))
    assert tracker.close(DEADLINE_SECONDS)

    assert {step for step, _ in curve(server, run_id)} >= {200, 201, 202}
    assert sorted(path.read_bytes() for path in (tmp_path / "spool").glob("*.aside")) == records
    assert "put aside" in warnings.text


# ---- stages of one process -------------------------------------------------------------------------------------------


def test_a_stage_after_an_outage_goes_on_with_the_windows_as_they_are(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    """More is left than fits into a chunk, so that the first stage's thinner stands in the middle of it."""
    first = open_tracker(proxy.url, run_id, tmp_path / "spool", step=10)
    log(first, range(2))
    assert first.flush(DEADLINE_SECONDS)
    proxy.refuse()
    log(first, range(2, 6_005), *"xyz")
    assert not first.close(0.5)
    proxy.accept()

    second = open_tracker(proxy.url, run_id, tmp_path / "spool", step=10, earlier=first)
    log(second, range(6_005, 6_050), *"xyz")
    assert second.close(DEADLINE_SECONDS)

    whole = [(step + 9, step + 4.5) for step in range(0, 6_050, 10)]
    assert curve(server, run_id, "x") == [(9, 5.5), *whole[1:]]
    assert stored_mark(server, run_id) == len(server.points_of(run_id))
    assert len(stored_charges(server, run_id)) == 1


def test_a_stage_that_resumes_from_a_checkpoint_of_an_earlier_one_leaves_its_tail_alone(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    first = open_tracker(proxy.url, run_id, tmp_path / "spool", step=10)
    proxy.refuse()
    log(first, range(15))
    tail = in_checkpoint(first.tail())
    proxy.accept()
    log(first, range(15, 20))
    assert first.close(DEADLINE_SECONDS)

    second = open_tracker(proxy.url, run_id, tmp_path / "spool", step=10, earlier=first, tail=tail)
    log(second, range(20, 30))
    assert second.close(DEADLINE_SECONDS)

    assert curve(server, run_id) == [(9, 4.5), (19, 14.5), (29, 24.5)]
    assert [*stored_charges(server, run_id).values()] == [3]


def test_stages_that_end_well_are_one_writer_and_count_each_for_itself(
    server: MlflowServer, run_id: str, tmp_path: Path
) -> None:
    tracker = None
    for stage in range(3):
        tracker = open_tracker(server.url, run_id, tmp_path / "spool", step=5, earlier=tracker)
        log(tracker, range(10 * stage, 10 * stage + 10))
        assert tracker.close(DEADLINE_SECONDS)
        assert (tracker.stats.num_sent, tracker.stats.num_thinned) == (2, 8)
        assert [*stored_charges(server, run_id).values()] == [2 * stage + 2]


# ---- a tail ----------------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_holds_is_sent_once_from_another_machine_and_from_the_old_one_too(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    old = open_tracker(proxy.url, run_id, tmp_path / "old")
    log(old, range(50))
    assert old.flush(DEADLINE_SECONDS)
    proxy.refuse()
    log(old, range(50, 80))
    tail = in_checkpoint(old.tail())
    log(old, range(80, 90))
    assert not old.close(0.1)
    proxy.accept()

    new = open_tracker(proxy.url, run_id, tmp_path / "new", tail=tail, charged=stored_charges(server, run_id))
    log(new, range(100, 120))
    assert new.close(DEADLINE_SECONDS)

    assert curve(server, run_id) == [(step, step) for step in (*range(80), *range(100, 120))]
    assert send_left(tmp_path / "old", deadline_seconds=DEADLINE_SECONDS).is_complete
    assert curve(server, run_id) == [(step, step) for step in (*range(90), *range(100, 120))]
    assert stored_mark(server, run_id) >= 110


@pytest.mark.parametrize("saved_at", [80, 84])
def test_a_tail_that_the_server_has_got_meanwhile_changes_nothing(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path, saved_at: int
) -> None:
    """Also where it ends within a window, which the old attempt has closed and sent as a whole."""
    proxy.refuse()
    old = open_tracker(proxy.url, run_id, tmp_path / "old", step=10)
    log(old, range(saved_at))
    tail = in_checkpoint(old.tail())
    proxy.accept()
    time.sleep(0.01)
    log(old, range(saved_at, 100))
    assert old.close(DEADLINE_SECONDS)
    before = server.points_of(run_id)

    new = open_tracker(
        server.url,
        run_id,
        tmp_path / "new",
        tail=tail,
        step=10,
        charged=stored_charges(server, run_id),
        shown=latest_moments(MlflowClient(server.url).get_run(run_id)),
    )
    assert new.close(DEADLINE_SECONDS)

    assert server.points_of(run_id) == before


def test_what_the_folder_holds_is_sent_and_not_the_tail_which_is_a_part_of_it(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    proxy.refuse()
    first = open_tracker(proxy.url, run_id, tmp_path / "spool")
    log(first, range(20))
    tail = in_checkpoint(first.tail())
    log(first, range(20, 40))
    assert not first.close(0.1)
    proxy.accept()

    second = open_tracker(proxy.url, run_id, tmp_path / "spool", tail=tail)
    log(second, range(40, 50))
    assert second.close(DEADLINE_SECONDS)

    assert curve(server, run_id) == [(step, step) for step in range(50)]


def test_a_tail_that_was_not_laid_down_to_its_end_is_laid_down_again(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.refuse()
    first = open_tracker(proxy.url, run_id, tmp_path / "first")
    log(first, range(20))
    tail = in_checkpoint(first.tail())
    assert not first.close(0.1)
    proxy.accept()
    with monkeypatch.context() as context:  # killed before it could say whose records they are
        context.setattr(tails_module, "write_run_info", lambda *_: os.kill(0, "no such signal"))
        with pytest.raises(TypeError):
            open_tracker(proxy.url, run_id, tmp_path / "second", tail=tail)
    assert not (tmp_path / "second" / RUN_NAME).exists()

    third = open_tracker(proxy.url, run_id, tmp_path / "second", tail=tail)
    assert third.close(DEADLINE_SECONDS)

    assert curve(server, run_id) == [(step, step) for step in range(20)]


def test_a_killed_attempt_that_had_a_tail_leaves_all_of_it(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    """Killed while the server is still away; the third attempt, on the same machine, finds both attempts' records."""
    proxy.refuse()
    first = open_tracker(proxy.url, run_id, tmp_path / "first")
    for step in range(30):
        first.append(step, {name: step + index / 7 for index, name in enumerate(NAMES)})
    tail = in_checkpoint(first.tail())
    assert not first.close(0.1)
    spool = proxy.url, run_id, tmp_path / "second"
    killed_steps = killed(tmp_path / "safe", append_forever, spool, 1_000, {"tail": tail, "prefix": "x"})
    proxy.accept()

    third = open_tracker(proxy.url, run_id, tmp_path / "second", tail=tail)
    assert third.close(DEADLINE_SECONDS)

    points = server.points_of(run_id)
    assert Counter(point.step for point in points).keys() >= {*range(30), *killed_steps}
    assert set(Counter(point.step for point in points).values()) == {len(NAMES)}
    assert {point.key.startswith("x-") for point in points if point.step < 30} == {False}
    assert {point.key.startswith("x-") for point in points if point.step >= 1_000} == {True}


def test_records_of_nobody_are_not_sent_as_ours(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    """A process was killed while it laid a tail down, and the next one has no tail."""
    with contextlib.closing(Spool(tmp_path / "spool")) as spool:
        spool.append(1_000, 100, {"other": 1.0})

    tracker = open_tracker(server.url, run_id, tmp_path / "spool")
    log(tracker, range(3))
    assert tracker.close(DEADLINE_SECONDS)

    assert {point.key for point in server.points_of(run_id)} == {"a"}


def test_a_long_tail_is_cut_and_says_so(
    proxy: FaultyProxy, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails_module, "MAX_TAIL_BYTES", 400)
    proxy.refuse()
    tracker = open_tracker(proxy.url, run_id, tmp_path / "spool")
    log(tracker, range(5))
    assert not tracker.tail().is_cut
    log(tracker, range(5, 100))
    tail = in_checkpoint(tracker.tail())
    assert tail is not None
    assert tail.is_cut
    assert tail.num_bytes == 400
    steps = [record.step for record in tail.records()]
    assert steps == list(range(len(steps)))
    assert 5 <= len(steps) < 20
    tracker.close(0.1)


def test_a_tail_takes_no_more_of_a_save_than_a_few_megabytes_and_milliseconds(
    proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    """20,000 records of 100 metrics were 28 MB, and took 0.7 s. The limit here is for a machine that is busy."""
    proxy.refuse()
    tracker = open_tracker(proxy.url, run_id, tmp_path / "spool")
    values = {f"metric_{index}": 1.5 for index in range(100)}
    for step in range(20_000):
        tracker.append(step, values)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        state = tracker.tail().to_dict()
        seconds.append(time.perf_counter() - begun)
    assert state["is_cut"]
    assert sum(len(piece["data"]) for piece in state["pieces"]) < 5e6
    assert len(json.dumps(state)) < 5e6
    assert min(seconds) < 0.1
    tail = Tail.of({"tail": state})
    assert tail is not None
    assert sum(1 for _ in tail.records()) > 2_000
    tracker.close(0.1)


def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool.__init__
    monkeypatch.setattr(
        Spool, "__init__", lambda self, folder, **options: spool(self, folder, segment_bytes=4096, **options)
    )


def test_a_tail_is_whole_while_the_writer_deletes_what_is_sent(
    server: MlflowServer, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is taken: the thinner in it and the records in it give what is not sent, without a gap between."""
    small_segments(monkeypatch)
    tracker = open_tracker(server.url, run_id, tmp_path / "spool", step=10, flush_seconds=0.01)
    for step in range(3_000):
        tracker.append(step, {"a": float(step % 7)})
        if step % 100 == 99:
            tail = in_checkpoint(tracker.tail())
            assert tail is not None
            logged = tail.thinner["thinner"]["logged"]
            assert [(record.step, record.values["a"]) for record in tail.records()] == [
                (each, each % 7) for each in range(logged, step + 1)
            ]
            time.sleep(random.random() / 50)
    assert tracker.close(DEADLINE_SECONDS)
    assert len(curve(server, run_id)) == 300


def test_a_tail_has_no_gap_where_the_writer_has_deleted_a_segment_meanwhile(
    server: MlflowServer, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    small_segments(monkeypatch)

    def late(folder: Path, position: Position) -> Any:
        made.append(tracker.flush(DEADLINE_SECONDS))
        return tails_module.copy_tail(folder, position)

    tracker = open_tracker(server.url, run_id, tmp_path / "spool", step=100, flush_seconds=60)
    log(tracker, range(250))
    monkeypatch.setattr(tracker_module, "copy_tail", late)

    tail = tracker.tail()

    assert made[0] is True
    assert tail.thinner["thinner"]["logged"] + sum(1 for _ in tail.records()) == 250
    assert tracker.close(DEADLINE_SECONDS)


def test_a_checkpoint_of_a_logger_without_a_tail_has_none() -> None:
    assert Tail.of({}) is None
    assert Tail.of({"tail": None}) is None


# ---- other options ---------------------------------------------------------------------------------------------------


def test_what_is_left_keeps_the_options_that_it_was_logged_with(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    proxy.refuse()
    first = open_tracker(proxy.url, run_id, tmp_path / "spool", step=10, prefix="old", aggregate=("mean", "max"))
    log(first, range(25))
    assert not first.close(0.1)
    second = open_tracker(proxy.url, run_id, tmp_path / "spool", step=5, prefix="new")
    log(second, range(25, 35))
    assert not second.close(0.1)
    proxy.accept()
    third = open_tracker(proxy.url, run_id, tmp_path / "spool", max_metric_steps=1_000)
    log(third, range(35, 37))
    assert third.close(DEADLINE_SECONDS)

    assert curve(server, run_id, "old-a") == [(9, 4.5), (19, 14.5), (24, 22.0)]
    assert curve(server, run_id, "old-a/max") == [(9, 9.0), (19, 19.0), (24, 24.0)]
    assert curve(server, run_id, "new-a") == [(29, 27.0), (34, 32.0)]
    assert curve(server, run_id, "a") == [(35, 35.0), (36, 36.0)]
    assert "1k metric steps" in third.plan()


def test_the_length_of_training_concerns_this_attempt_and_not_what_is_left(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path
) -> None:
    """More is left than fits into one request, so that it is still being sent when the length is said."""
    proxy.refuse()
    first = open_tracker(proxy.url, run_id, tmp_path / "spool")
    log(first, range(1_500))
    assert not first.close(0.1)
    proxy.accept()

    second = open_tracker(proxy.url, run_id, tmp_path / "spool")
    second.set_horizon(10_000)
    second.flush(DEADLINE_SECONDS)
    log(second, range(1_500, 1_503))
    assert second.close(DEADLINE_SECONDS)

    assert len(curve(server, run_id)) == 1_503
    assert second._thinner.snapshot()["thinner"]["steps"]["strides"]["horizon"] == 10_000


def test_a_lower_cap_holds_for_what_is_logged_from_now_on(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    first = open_tracker(server.url, run_id, tmp_path / "spool")
    log(first, range(50))
    assert first.close(DEADLINE_SECONDS)
    charged = stored_charges(server, run_id)
    warnings = Warnings()

    second = open_tracker(
        server.url, run_id, tmp_path / "spool", charged=charged, max_metric_steps=40, reserve=0, warn=warnings
    )
    log(second, range(50, 60))
    assert second.close(DEADLINE_SECONDS)

    assert len(curve(server, run_id)) == 50
    assert "95%" in warnings.text
    assert "10" in warnings.text


# ---- two processes ---------------------------------------------------------------------------------------------------


def open_while_in_use(tracking_uri: str, run_id: str, folder: Path) -> str:
    try:
        open_tracker(tracking_uri, run_id, folder)
    except SpoolInUseError as error:
        return str(error)
    return "granted"


def test_a_second_process_on_the_run_is_told_who_has_it(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    tracker = open_tracker(server.url, run_id, tmp_path / "spool")
    log(tracker, range(3))

    (result,) = run_ranks(open_while_in_use, 1, args=(server.url, run_id, tmp_path / "spool"))

    assert f"{tmp_path / 'spool'} is in use by process {os.getpid()} on " in result.value
    assert "Wait for its end, or give each its own folder." in result.value
    with pytest.raises(SpoolInUseError, match="by this process already"):
        open_tracker(server.url, run_id, tmp_path / "spool")
    with pytest.raises(SpoolInUseError):
        send_left(tmp_path / "spool", deadline_seconds=1)
    assert tracker.close(DEADLINE_SECONDS)
    assert len(curve(server, run_id)) == 3


# ---- a roll-back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_folder", [True, False], ids=["same machine", "other machine"])
def test_after_a_roll_back_the_latest_values_are_the_last_ones(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path, *, has_folder: bool
) -> None:
    """`stays` never gets again as far as it was, `passes` does, `kept` had not gone beyond."""
    first = open_tracker(proxy.url, run_id, tmp_path / "spool")
    log(first, range(40), "kept")
    log(first, range(90), "stays", "passes")
    assert first.flush(DEADLINE_SECONDS)
    proxy.refuse()
    tail = in_checkpoint(first.tail())
    log(first, range(90, 100), "stays", "passes")
    first.close(0.1)
    proxy.accept()
    if not has_folder:
        shutil.rmtree(tmp_path / "spool")
    client = MlflowClient(server.url)

    second = open_tracker(proxy.url, run_id, tmp_path / "spool", tail=tail, charged=stored_charges(server, run_id))
    second.roll_back(50, {"stays": 89, "passes": 89})
    second.flush(DEADLINE_SECONDS)
    log(second, range(51, 70), "stays", offset=0.5)
    log(second, range(51, 120), "passes", offset=0.5)
    assert second.close(DEADLINE_SECONDS)

    assert client.get_run(run_id).data.metrics == {"kept": 39.0, "stays": 69.5, "passes": 119.5}
    reached = 99 if has_folder else 89
    assert (reached, 69.5) in curve(server, run_id, "stays")
    assert curve(server, run_id, "stays").count((69, 69.5)) == 1


# ---- its end ---------------------------------------------------------------------------------------------------------


def test_closing_again_leaves_alone_what_another_one_has_made(
    server: MlflowServer, run_id: str, tmp_path: Path
) -> None:
    first = open_tracker(server.url, run_id, tmp_path / "spool")
    log(first, range(3))
    assert first.close(DEADLINE_SECONDS)
    second = open_tracker(server.url, run_id, tmp_path / "spool", charged=stored_charges(server, run_id))
    log(second, range(3, 6))

    assert first.close(DEADLINE_SECONDS)

    assert second.close(DEADLINE_SECONDS)
    assert len(curve(server, run_id)) == 6


def test_a_folder_that_cannot_be_deleted_ends_no_training(
    server: MlflowServer, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(tracker_module, "remove_folder", refuse)
    warnings = Warnings()
    tracker = open_tracker(server.url, run_id, tmp_path / "spool", warn=warnings)
    log(tracker, range(3))

    assert tracker.close(DEADLINE_SECONDS)

    assert "not yours. All that it held has arrived." in warnings.text


def test_what_can_be_known_of_it(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    events: list[Any] = []
    warnings = Warnings()
    tracker = open_tracker(
        server.url, run_id, tmp_path / "spool", step="auto", system=500, warn=warnings, on_events=events.extend
    )
    tracker.set_horizon(1_000)
    tracker.append(1, {"a": float("nan"), "b": 1.0, "c$": 2.0})
    assert tracker.flush(DEADLINE_SECONDS)
    assert [(event.key, event.value) for event in events] == [("a", "nan")]
    assert "3 metrics" in tracker.plan()
    assert 0 < tracker.seconds_blocked < 1
    assert tracker.stats.num_pending_records == 0
    assert tracker.close(DEADLINE_SECONDS)
    assert "'c$' as 'c_-" in warnings.text
    assert tracker._thinner.snapshot()["thinner"]["steps"]["strides"]["horizon"] == 1_000


def test_after_a_ctrl_c_in_close_there_is_still_one_writer(
    server: MlflowServer, proxy: FaultyProxy, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working: set[str] = set()
    turn = Delivery.turn

    def noted(self: Delivery[Any], **options: bool) -> bool:
        working.add(threading.current_thread().name)
        return turn(self, **options)

    monkeypatch.setattr(Delivery, "turn", noted)
    proxy.set(Fault("log-batch", seconds=2))
    tracker = open_tracker(proxy.url, run_id, tmp_path / "spool")
    log(tracker, range(3))
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        tracker.close(DEADLINE_SECONDS)
    assert tracker.close(DEADLINE_SECONDS)
    assert working == {THREAD_NAME}
    assert [point.step for point in server.points_of(run_id)] == [0, 1, 2]
