"""What earlier attempts have left is sent to their runs: from this machine's folders, and from the checkpoint."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_air import AirMLflowLogger
from lightning_air.tracking import leftovers
from lightning_air.tracking.leftovers import send_left, send_leftovers, spools_in
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RUN_NAME
from lightning_air.tracking.tails import Tail
from lightning_air.tracking.thinning import Thinner
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import run_ranks, values
from tests.tracking.killing import fit_forever, killed, open_tracker, stored_mark
from tests.tracking.runs import At, fit, warned
from tests.tracking.stand_ins import Warnings


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self)


def leave(proxy: FaultyProxy, run_id: str, folder: Path, steps: Iterable[int], **options: Any) -> Tail | None:
    """Leave records in a folder, and return what a checkpoint has of them."""
    proxy.refuse()
    tracker = open_tracker(proxy.url, run_id, folder, **options)
    for step in steps:
        tracker.append(step, {"a": float(step)})
    tail = Tail.of({"tail": tracker.tail().to_dict()})
    assert not tracker.close(0.1)
    proxy.accept()
    return tail


def send(
    proxy: FaultyProxy, spool_dir: Path, *, but: str = "", tail: tuple[str, Tail] | None = None
) -> tuple[Said, Warnings]:
    said, warnings = Said(), Warnings()
    send_leftovers(spool_dir, proxy.url, but=but, tail=tail, warn=warnings, say=said)
    return said, warnings


def steps(server: MlflowServer, run_id: str) -> list[int]:
    return sorted(point.step for point in server.points_of(run_id))


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_what_other_runs_have_left_is_sent_and_said(server: MlflowServer, proxy: FaultyProxy, tmp_path: Path) -> None:
    runs = [server.create_run() for _ in range(3)]
    for run_id in runs:
        leave(proxy, run_id, tmp_path / run_id, range(5))

    said, warnings = send(proxy, tmp_path, but=runs[1])

    assert [steps(server, run_id) for run_id in runs] == [[*range(5)], [], [*range(5)]]
    assert [path.name for path in tmp_path.iterdir()] == [runs[1]]
    assert len(said) == 2
    assert {run_id for run_id in runs if run_id in said.text} == {runs[0], runs[2]}
    assert not warnings
    assert stored_mark(server, runs[0]) >= 5


def test_what_is_for_another_server_or_in_use_or_broken_or_something_else_is_left_alone(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    elsewhere, in_use, fine = (server.create_run() for _ in range(3))
    with faulty_proxy(server.url) as other:
        leave(other, elsewhere, tmp_path / elsewhere, range(5))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / RUN_NAME).write_text("{")
    (tmp_path / "no spool").mkdir()
    (tmp_path / "no spool" / "file").touch()
    (tmp_path / "file").touch()
    leave(proxy, fine, tmp_path / fine, range(5))
    tracker = open_tracker(proxy.url, in_use, tmp_path / in_use)

    said, warnings = send(proxy, tmp_path)

    assert steps(server, fine) == [*range(5)]
    assert steps(server, elsewhere) == []
    assert {path.name for path in tmp_path.iterdir()} == {elsewhere, in_use, "broken", "no spool", "file"}
    assert fine in said.text
    assert len(said) == 1
    assert f"What an earlier attempt has left in {tmp_path / 'broken'} is not sent" in warnings.text
    assert len(warnings) == 1
    assert tracker.close(10)


def test_what_cannot_be_sent_in_time_stays_and_is_said(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_DEADLINE_SECONDS", 0.5)
    run_id = server.create_run()
    leave(proxy, run_id, tmp_path / run_id, range(5))
    proxy.set(Fault("log-batch", status=503))

    said, warnings = send(proxy, tmp_path)

    assert not said
    shown = f"What an earlier attempt has left in {tmp_path / run_id} has not all reached the run {run_id}"
    assert shown in warnings.text
    assert "503" in warnings.text
    assert "lightning-air replay" in warnings.text
    proxy.set()
    said, _ = send(proxy, tmp_path)
    assert run_id in said.text
    assert steps(server, run_id) == [*range(5)]


def test_a_run_that_is_deleted_or_unknown_costs_no_time(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    deleted = server.create_run()
    for run_id in (deleted, "0" * 32):
        leave(proxy, run_id, tmp_path / run_id, range(5))
    server.delete_run(deleted)

    said, warnings = send(proxy, tmp_path)

    assert not said
    assert deleted in warnings.text
    assert "RESOURCE_DOES_NOT_EXIST" in warnings.text
    assert len(spools_in(tmp_path)) == 2
    server.restore_run(deleted)
    send(proxy, tmp_path)
    assert steps(server, deleted) == [*range(5)]


def test_what_is_sent_is_counted_beside_what_other_machines_have_sent_meanwhile(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    run_id, options = server.create_run(), {"max_metric_steps": 10_000}
    leave(proxy, run_id, tmp_path / run_id, range(100), **options)
    tracker = open_tracker(server.url, run_id, tmp_path / "another machine", **options)
    for step in range(100, 300):
        tracker.append(step, {"a": float(step)})
    assert tracker.close(30)

    send(proxy, tmp_path)

    assert steps(server, run_id) == [*range(300)]
    assert stored_mark(server, run_id) == 300


def test_no_folder_is_no_trouble(proxy: FaultyProxy, tmp_path: Path) -> None:
    assert send(proxy, tmp_path / "none") == ([], [])


def test_spools_in_a_folder(proxy: FaultyProxy, server: MlflowServer, tmp_path: Path) -> None:
    assert spools_in(tmp_path) == spools_in(tmp_path / "none") == []
    run_id = server.create_run()
    leave(proxy, run_id, tmp_path / "all" / run_id, range(3))
    assert spools_in(tmp_path / "all") == [tmp_path / "all" / run_id] == spools_in(tmp_path / "all" / run_id)
    assert spools_in(tmp_path) == []


# ---- the checkpoint's tail -------------------------------------------------------------------------------------------


def test_the_tail_of_another_run_is_sent_to_that_run(server: MlflowServer, proxy: FaultyProxy, tmp_path: Path) -> None:
    """A retry on a fresh machine makes a run of its own; the old one's last points came with the checkpoint."""
    old, new = server.create_run(), server.create_run()
    tail = leave(proxy, old, tmp_path / "old machine" / old, range(25), step=10, prefix="mine")
    assert tail is not None

    for _ in range(2):  # also by an attempt after that, from the same checkpoint
        said, warnings = send(proxy, tmp_path / "spool", but=new, tail=(old, tail))
        assert old in said.text
        assert not warnings, warnings.text

    found = [(point.key, point.step, point.value) for point in server.points_of(old)]
    assert found == [("mine-a", 9, 4.5), ("mine-a", 19, 14.5), ("mine-a", 24, 22.0)]
    assert steps(server, new) == []
    assert list((tmp_path / "spool").iterdir()) == []
    assert send_left(tmp_path / "old machine" / old).is_complete
    assert len(server.points_of(old)) == 3 <= stored_mark(server, old) <= 3 * 3  # each sender is charged


def test_the_folder_is_sent_where_it_is_here_and_holds_more(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    run_id = server.create_run()
    tail = leave(proxy, run_id, tmp_path / run_id, range(5))
    leave(proxy, run_id, tmp_path / run_id, range(5, 8))
    assert tail is not None

    send(proxy, tmp_path, tail=(run_id, tail))

    assert steps(server, run_id) == [*range(8)]


def test_an_empty_tail_makes_no_folder(server: MlflowServer, proxy: FaultyProxy, tmp_path: Path) -> None:
    tail = Tail(thinner=RunThinner(Thinner()).snapshot())
    assert send(proxy, tmp_path / "spool", tail=(server.create_run(), tail)) == ([], [])
    assert not (tmp_path / "spool").exists()


def test_a_tail_without_records_is_sent_where_windows_are_open(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """All was acknowledged when the checkpoint was saved, and then the machine died within a window."""
    run_id = server.create_run()
    tracker = open_tracker(proxy.url, run_id, tmp_path / "old machine", step=100)
    for step in range(150):
        tracker.append(step, {"a": float(step)})
    assert tracker.flush(30)
    tail = Tail.of({"tail": tracker.tail().to_dict()})
    assert tail is not None
    assert not [*tail.records()]
    proxy.refuse()
    tracker.close(0.1)
    proxy.accept()

    said, _ = send(proxy, tmp_path / "spool", tail=(run_id, tail))

    assert steps(server, run_id) == [99, 149]
    assert run_id in said.text


def test_a_tail_ends_within_a_window_that_the_old_machine_has_sent_whole(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    run_id = server.create_run()
    proxy.refuse()
    tracker = open_tracker(proxy.url, run_id, tmp_path / "old machine", step=10)
    for step in range(100):
        if step == 85:
            tail = Tail.of({"tail": tracker.tail().to_dict()})
            time.sleep(0.01)
        tracker.append(step, {"a": float(step)})
    proxy.accept()
    assert tracker.close(30)
    assert tail is not None

    _, warnings = send(proxy, tmp_path / "spool", tail=(run_id, tail))

    assert steps(server, run_id) == list(range(9, 100, 10))
    assert not warnings


def test_a_tail_of_a_run_that_is_gone_is_warned_about(server: MlflowServer, proxy: FaultyProxy, tmp_path: Path) -> None:
    run_id = server.create_run()
    tail = leave(proxy, run_id, tmp_path / "old machine" / run_id, range(5))
    assert tail is not None

    _, warnings = send(proxy, tmp_path / "spool", tail=("0" * 32, tail))

    assert f"Metrics of the run {'0' * 32} that its server had not taken cannot be sent" in warnings.text


def test_another_training_that_lays_the_same_tail_down_sends_it(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    run_id, other = server.create_run(), server.create_run()
    tail = leave(proxy, run_id, tmp_path / "old machine" / run_id, range(5))
    assert tail is not None
    leave(proxy, other, tmp_path / "spool" / other, range(5))
    others = Spool(tmp_path / "spool" / run_id)

    said, warnings = send(proxy, tmp_path / "spool", tail=(run_id, tail))

    assert steps(server, run_id) == []
    assert steps(server, other) == [*range(5)]
    assert len(said) == 1
    assert not warnings
    others.close()


def test_a_tail_that_finds_no_place_is_warned_about_and_stops_nothing(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, other = server.create_run(), server.create_run()
    tail = leave(proxy, run_id, tmp_path / "old machine" / run_id, range(5))
    assert tail is not None
    leave(proxy, other, tmp_path / "spool" / other, range(5))
    (tmp_path / "spool" / run_id).touch()

    _, warnings = send(proxy, tmp_path / "spool", tail=(run_id, tail))

    assert f"Metrics of the run {run_id}" in warnings.text
    assert steps(server, other) == [*range(5)]


def test_a_tail_that_was_not_laid_down_to_its_end_is_laid_down_again(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = server.create_run()
    tail = leave(proxy, run_id, tmp_path / "old machine" / run_id, range(25), step=10)
    assert tail is not None
    append = Spool.append

    def interrupted(self: Spool, timestamp_ms: int, step: int, values: Mapping[str, float]) -> bool:
        if step == 17:
            raise KeyboardInterrupt
        return append(self, timestamp_ms, step, values)

    with monkeypatch.context() as context:
        context.setattr(Spool, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(proxy, tmp_path / "spool", tail=(run_id, tail))
    assert steps(server, run_id) == []

    send(proxy, tmp_path / "spool", tail=(run_id, tail))

    assert steps(server, run_id) == [9, 19, 24]


# ---- whole trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continues", [True, False], ids=["in the same run", "in a new run"])
def test_what_a_killed_training_has_logged_is_sent_by_the_next_one(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, *, continues: bool
) -> None:
    run_id = server.create_run()
    proxy.set(Fault("log-batch", seconds=0.2))
    safe = killed(tmp_path / "safe", fit_forever, proxy.url, tmp_path / "spool", {"run_id": run_id}, least=20)
    assert len(server.points_of(run_id)) <= stored_mark(server, run_id)
    proxy.set()

    options = {"prefix": "next"} | ({"run_id": run_id} if continues else {})
    values(run_ranks(fit_forever, 1, args=(tmp_path / "safe too", proxy.url, tmp_path / "spool", options, 5)))

    curve = [(point.step, point.key) for point in server.points_of(run_id)]
    losses = [step for step, key in curve if key == "loss"]
    assert set(safe) <= set(losses)
    assert len(set(losses)) == len(losses) <= len(safe) + 1
    assert sum(key == "next-loss" for _, key in curve) == (5 if continues else 0)
    assert len(curve) <= stored_mark(server, run_id)
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize("resume_run", ["continue", "new"])
def test_a_checkpoint_takes_what_the_server_had_not_got_to_another_machine(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_run: str
) -> None:
    """The server goes away in the fourth step, the checkpoint is saved in the sixth, the machine dies after the eighth.

    Lightning logs a step after its callbacks have run, so the checkpoint does not hold the sixth step's values yet.
    """
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    options = {"step": 1, "exempt": (), "flush_seconds": 0.1, "close_timeout": 1.0, "log_console": False}
    path = str(tmp_path / "checkpoint")
    first = AirMLflowLogger(f"tails {resume_run}", tracking_uri=proxy.url, spool_dir=tmp_path / "first", **options)
    with warned():
        fit(first, At(4, lambda _: proxy.refuse()), At(6, lambda trainer: trainer.save_checkpoint(path)), max_steps=8)
    proxy.accept()
    run_id = first.run_id
    assert run_id is not None
    assert spools_in(tmp_path / "first")

    second = AirMLflowLogger(
        f"tails {resume_run}",
        tracking_uri=proxy.url,
        spool_dir=tmp_path / "second",
        resume_run=resume_run,
        **{**options, "close_timeout": 30.0},
    )
    fit(second, ckpt_path=path, max_epochs=2, max_steps=9)

    curves = [
        sorted(point.step for point in server.points_of(each or "") if point.key == "loss")
        for each in (run_id, second.run_id)
    ]
    if resume_run == "continue":
        assert second.run_id == run_id
        assert curves[0] == [0, 1, 2, 3, 4, 6, 7, 8]
    else:
        assert curves == [[0, 1, 2, 3, 4], [6, 7, 8]]
    assert len(server.points_of(run_id)) <= stored_mark(server, run_id)
    assert not spools_in(tmp_path / "second")
