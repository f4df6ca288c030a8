"""`lightning-air replay`: what a killed training has left is sent, once; what it says, and how it exits."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_air.cli import main
from lightning_air.tracking.segments import BEGINNING, segment_path
from lightning_air.tracking.spool_reader import SpoolReader
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.tracking.killing import fit_forever, killed, open_tracker, stored_mark

REFUSAL = b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "not this one"}'


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command set MLflow's variables in this process, and take them back."""
    names = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def left(server: MlflowServer, proxy: FaultyProxy, tmp_path: Path) -> Path:
    """The folder of a run whose five points the server has not got."""
    return leave(server, proxy, tmp_path / "spool")


def leave(server: MlflowServer, proxy: FaultyProxy, spool_dir: Path, num_steps: int = 5) -> Path:
    run_id = server.create_run()
    proxy.refuse()
    tracker = open_tracker(proxy.url, run_id, spool_dir / run_id)
    for step in range(num_steps):
        tracker.append(step, {"a": float(step)})
    assert not tracker.close(0.1)
    proxy.accept()
    return tracker.folder


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str, str]:
    """Return the exit code, what was said, and what was complained about."""
    try:
        code: int | str | None = main(["replay", *map(str, arguments)])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_what_a_killed_training_has_left_is_sent(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id, folder = server.create_run(), tmp_path / "spool"
    proxy.set(Fault("log-batch", seconds=0.2))
    safe = killed(tmp_path / "safe", fit_forever, proxy.url, folder, {"run_id": run_id}, least=20)
    proxy.set(Fault("log-batch", cuts=True, times=1))

    code, shown, complaints = replay(capsys, folder)

    points = server.points_of(run_id)
    losses = [point.step for point in points if point.key == "loss"]
    assert set(safe) <= set(losses)
    assert len(set(losses)) == len(losses) <= len(safe) + 1
    assert len(points) <= stored_mark(server, run_id)
    assert (code, complaints) == (0, "")
    assert shown == f"{folder / run_id}: {len(points)} points of the run {run_id} are on the server\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("is_parent", [True, False], ids=["the folder of runs", "the run's own"])
def test_it_is_said_what_was_sent(
    server: MlflowServer, left: Path, capsys: pytest.CaptureFixture[str], *, is_parent: bool
) -> None:
    assert replay(capsys, left.parent if is_parent else left) == (
        0,
        f"{left}: 5 points of the run {left.name} are on the server\n",
        "",
    )
    assert len(server.points_of(left.name)) == 5
    assert not left.exists()


def test_nothing_there_is_wrong_usage(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(capsys, left)[0] == 0
    for folder in (left, left.parent, left.parent / "none"):
        code, shown, complaints = replay(capsys, folder)
        assert (code, shown) == (2, "")
        assert f"lightning-air replay: {folder} holds nothing that is not sent." in complaints
        assert "spool_dir/<run id>" in complaints


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_timeout_must_be_positive(left: Path, capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    code, _, complaints = replay(capsys, left, f"--timeout={seconds}")
    assert code == 2
    assert f"argument --timeout: must be a positive number of seconds, got '{seconds}'" in complaints
    assert left.exists()


def test_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = replay(capsys, "--help")
    assert code == 0
    assert "each point once" in " ".join(shown.split())
    assert replay(capsys)[0] == 2


@pytest.mark.parametrize("what", ["runs/get", "log-batch", "refused connections"])
def test_a_server_that_is_away_is_given_up_after_the_timeout_and_nothing_is_lost(
    server: MlflowServer, proxy: FaultyProxy, left: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    proxy.refuse() if "refused" in what else proxy.set(Fault(what, status=503))
    begun = time.monotonic()

    code, shown, complaints = replay(capsys, left, "--timeout", 0.5)

    assert time.monotonic() - begun < 10, "not MLflow's minutes"
    assert (code, complaints) == (1, "")
    assert f"{left}: 0 points of the run {left.name} are on the server; the rest stays: " in shown
    assert ("Connection refused" if "refused" in what else "503") in shown
    proxy.accept()
    proxy.set()
    assert replay(capsys, left)[0] == 0
    assert len(server.points_of(left.name)) == 5


def test_one_folder_that_cannot_be_sent_does_not_stop_the_others(
    server: MlflowServer, proxy: FaultyProxy, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deleted = leave(server, proxy, left.parent)
    server.delete_run(deleted.name)
    broken = left.parent / "0"
    broken.mkdir()
    (broken / "run.json").write_text("[]")
    in_use = server.create_run()
    tracker = open_tracker(proxy.url, in_use, left.parent / in_use)

    code, shown, complaints = replay(capsys, left.parent)

    assert code == 1
    assert len(server.points_of(left.name)) == 5
    assert f"{left}: 5 points" in shown
    assert f"{deleted}: 0 points of the run {deleted.name} are on the server; the rest stays: " in shown
    assert "must be in the 'active' state" in shown
    assert f"{broken} is no spool of metrics" in complaints
    assert f"{left.parent / in_use} is in use by" in complaints
    assert tracker.close(10)


def test_a_point_that_the_server_refuses_is_set_aside_and_said(
    server: MlflowServer, proxy: FaultyProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leave(server, proxy, tmp_path, num_steps=1)
    proxy.set(Fault("log-batch", status=400, body=REFUSAL, times=1))

    code, shown, complaints = replay(capsys, folder)

    aside = folder / "set_aside.jsonl"
    assert code == 0
    assert shown == f"{folder}: 0 points of the run {folder.name} are on the server, 1 refused (see {aside})\n"
    assert "not this one" in complaints
    assert "not this one" in aside.read_text()
    assert list(folder.iterdir()) == [aside]


def test_what_the_disk_has_damaged_is_left_out_and_said(
    server: MlflowServer, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [(begin, _), (end, _)] = SpoolReader(left).read(BEGINNING, 2)
    path = segment_path(left, end.segment)
    content = bytearray(path.read_bytes())
    content[(begin.offset + end.offset) // 2] ^= 1
    path.write_bytes(content)

    code, shown, complaints = replay(capsys, left)

    assert code == 0
    assert shown == f"{left}: 4 points of the run {left.name} are on the server, 1 damaged places left out\n"
    assert "not as they were written" in complaints
    assert {point.step for point in server.points_of(left.name)} == {0, 2, 3, 4}


def test_the_server_can_be_another_one(
    server: MlflowServer, proxy: FaultyProxy, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.refuse()
    assert replay(capsys, left, "--tracking-uri", server.url)[0] == 0
    assert len(server.points_of(left.name)) == 5
    proxy.accept()
