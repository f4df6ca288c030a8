"""What a run is to be told beside its metrics outlives a dead server, and a killed process."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from mlflow.entities import Run

from lightning_air import AirMLflowLogger
from lightning_air.cli import main
from lightning_air.tracking.leftovers import send_left, spools_in
from lightning_air.tracking.outbox import (
    OUTBOX_NAME,
    Addressed,
    Ending,
    Outbox,
    read_outbox,
    sum_of,
    write_outbox,
)
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.tracking.killing import Reporter, killed
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import At, Exit, Logs, Store, fit, make_logger, new_launch, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # or MLflow's own tries outlive the test
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    return Exit(monkeypatch)


class Away(Callback):
    """The server is away from the first batch on."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self.proxy = proxy

    def on_train_batch_start(self, *_: Any) -> None:
        self.proxy.refuse()


def run_of(server: MlflowServer, run_id: str | None) -> Run:
    return Store(server.url).run(str(run_id))


# ---- the server is away at the end -----------------------------------------------------------------------------------


def left_by_a_fit(proxy: FaultyProxy, **options: Any) -> AirMLflowLogger:
    logger = make_logger(Store(proxy.url), close_timeout=1.0, **options)
    module = Logs()
    module.save_hyperparameters({"rate": 0.5})
    with warned() as found:
        logger.log_hyperparams({"early": 1})
        late = At(2, lambda _: (logger.log_hyperparams({"late": 2}), sys.stdout.write("said\n")))
        fit(logger, Away(proxy), late, module=module, max_steps=3, enable_checkpointing=True)
    assert f"The run {logger.run_id} has not got all yet (metrics, " in found.text
    return logger


def test_all_of_it_comes_later(
    proxy: FaultyProxy, server: MlflowServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        logger = left_by_a_fit(proxy, log_model=True, full_record=True, log_console=True)
    ended_ms = time.time() * 1000
    assert "FINISHED, which the server does not know yet" in caplog.text
    assert "Kept for the next attempt or `lightning-air replay`: " in caplog.text
    assert run_of(server, logger.run_id).info.status == "RUNNING"
    folder = Path("spool", str(logger.run_id))
    time.sleep(0.3)
    proxy.accept()

    capfd.readouterr()
    assert main(["replay", "spool"]) == 0
    shown = capfd.readouterr().out
    assert shown == f"{folder}: 6 points of the run {logger.run_id} are on the server, so is all else\n"

    run = run_of(server, logger.run_id)
    assert run.info.status == "FINISHED"
    assert ended_ms - 5_000 < run.info.end_time <= ended_ms  # when it ended, and not when that was said
    assert run.data.params["late"] == "2"
    assert "lightning_air.best_checkpoint" in run.data.tags
    names = [path.split("/")[-1] for path in paths_of(server, logger.run_id)]
    assert {"hyperparameters.yaml", "manifest.json", "metadata.yaml", "stdout.log"} <= set(names)
    assert [name for name in names if name.endswith(".ckpt")]
    assert [name for name in names if name.endswith(".jsonl.gz")]
    assert not folder.exists()


def paths_of(server: MlflowServer, run_id: str | None) -> list[str]:
    client, found, folders = Store(server.url).client, [], [""]
    while folders:
        for item in client.list_artifacts(str(run_id), folders.pop() or None):
            (folders if item.is_dir else found).append(item.path)
    return found


def test_the_next_attempt_sends_it(proxy: FaultyProxy, server: MlflowServer, caplog: pytest.LogCaptureFixture) -> None:
    logger = left_by_a_fit(proxy)
    proxy.accept()
    with new_launch("later"), caplog.at_level("INFO"):
        fit(make_logger(Store(proxy.url)), max_steps=1)
    run = run_of(server, logger.run_id)
    assert (run.info.status, run.data.params["late"]) == ("FINISHED", "2")
    assert f"What an earlier attempt had not sent has reached the run {logger.run_id} now." in caplog.text
    assert spools_in(Path("spool")) == []


def test_an_attempt_that_continues_the_run_sends_it_but_for_the_end(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = left_by_a_fit(proxy)
    proxy.accept()
    statuses: list[str] = []
    with new_launch("later"):
        again = make_logger(Store(proxy.url), run_id=logger.run_id)
        fit(again, At(2, lambda _: statuses.append(run_of(server, logger.run_id).info.status)), max_steps=2)
    assert statuses == ["RUNNING"]
    assert run_of(server, logger.run_id).data.params["late"] == "2"
    assert spools_in(Path("spool")) == []


def test_a_run_that_another_launch_has_taken_over_is_not_ended(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = left_by_a_fit(proxy)
    proxy.accept()
    Store(server.url).client.set_tag(logger.run_id, "lightning_air.launch_id", "elsewhere")
    result = send_left(Path("spool", str(logger.run_id)))
    assert result.is_complete
    run = run_of(server, logger.run_id)
    assert (run.info.status, run.data.params["late"]) == ("RUNNING", "2")


def test_a_later_stage_sends_it(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = left_by_a_fit(proxy)
    proxy.accept()
    fit(logger, max_steps=4)
    run = run_of(server, logger.run_id)
    assert (run.info.status, run.data.params["late"]) == ("FINISHED", "2")
    assert spools_in(Path("spool")) == []


def test_what_is_cut_off_in_between_goes_on_later(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = left_by_a_fit(proxy, log_console=True)
    folder = Path("spool", str(logger.run_id))
    proxy.accept()
    proxy.set(Fault("artifacts", status=503))
    result = send_left(folder)
    assert not result.is_complete
    assert "503" in str(result.reason)
    run = run_of(server, logger.run_id)
    assert (run.info.status, run.data.params["late"]) == ("RUNNING", "2")
    left = read_outbox(folder)
    assert left is not None
    assert not left.outbox.params
    assert left.outbox.texts
    proxy.set()
    assert send_left(folder).is_complete
    assert run_of(server, logger.run_id).info.status == "FINISHED"
    assert not folder.exists()


def test_a_run_whose_id_was_asked_for_and_no_more(proxy: FaultyProxy, server: MlflowServer, exit_: Exit) -> None:
    logger = make_logger(Store(proxy.url), close_timeout=0.5)
    run_id = logger.run_id
    proxy.refuse()
    with warned():
        exit_.run()
    proxy.accept()
    assert run_of(server, run_id).info.status == "RUNNING"
    assert send_left(Path("spool", str(run_id))).is_complete
    assert run_of(server, run_id).info.status == "FINISHED"


def test_a_run_that_is_gone_keeps_it(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = left_by_a_fit(proxy)
    proxy.accept()
    server.delete_run(str(logger.run_id))
    folder = Path("spool", str(logger.run_id))
    assert not send_left(folder, deadline_seconds=2).is_complete
    server.restore_run(str(logger.run_id))
    assert send_left(folder).is_complete
    assert run_of(server, logger.run_id).info.status == "FINISHED"


def test_a_run_that_was_deleted_and_restored_gets_its_end(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = make_logger(Store(proxy.url), close_timeout=5.0)
    gone = At(1, lambda _: server.delete_run(str(logger.run_id)))
    late = At(2, lambda _: logger.log_hyperparams({"late": 2}))
    with warned():
        fit(logger, gone, late, max_steps=3)
    folder = Path("spool", str(logger.run_id))
    result = send_left(folder, deadline_seconds=2)
    assert not result.is_complete
    server.restore_run(str(logger.run_id))
    assert send_left(folder).is_complete
    run = run_of(server, logger.run_id)
    assert (run.info.status, run.data.params["late"]) == ("FINISHED", "2")


def test_a_damaged_one_does_not_keep_the_metrics_and_the_record(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = left_by_a_fit(proxy, full_record=True)
    proxy.accept()
    folder = Path("spool", str(logger.run_id))
    (folder / OUTBOX_NAME).write_text("{")
    warnings: list[str] = []
    assert send_left(folder, warn=lambda _, text: warnings.append(text)).is_complete
    assert f"{OUTBOX_NAME} cannot be read" in warnings[0]
    assert [path for path in paths_of(server, logger.run_id) if path.endswith(".jsonl.gz")]
    assert [path.name for path in folder.iterdir()] == [f"{OUTBOX_NAME}.damaged"]


# ---- the process is killed -------------------------------------------------------------------------------------------


class Begins(Callback):
    """Logs parameters when training begins."""

    def __init__(self, logger: AirMLflowLogger) -> None:
        self.logger = logger

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.logger.log_hyperparams({"late": 2})


def fit_until_killed(path: Path, uri: str, run_id: str, spool_dir: Path) -> None:
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    logger = AirMLflowLogger("kills", tracking_uri=uri, run_id=run_id, spool_dir=spool_dir, log_console=False)
    reporter = Reporter(path)
    wait = At(3, lambda _: _await(spool_dir / run_id / OUTBOX_NAME))
    fit([logger, reporter], Begins(logger), wait, max_epochs=-1, max_steps=-1)


def _await(path: Path) -> None:
    until_seconds = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until_seconds:
        time.sleep(0.01)


def test_what_waits_for_a_server_outlives_a_kill(proxy: FaultyProxy, server: MlflowServer, tmp_path: Path) -> None:
    run_id = server.create_run()
    proxy.set(Fault("mlflow-artifacts", status=503))
    killed(tmp_path / "safe", fit_until_killed, proxy.url, run_id, tmp_path / "spool", least=10)
    assert paths_of(server, run_id) == []
    proxy.set()
    assert send_left(tmp_path / "spool" / run_id).is_complete
    assert "hyperparameters.yaml" in [path.split("/")[-1] for path in paths_of(server, run_id)]
    assert run_of(server, run_id).info.status == "RUNNING"  # nobody knows how it ended
    assert not (tmp_path / "spool" / run_id).exists()


# ---- the file --------------------------------------------------------------------------------------------------------

texts = st.text(max_size=5)
maps = st.dictionaries(texts, texts, max_size=3)
endings = st.builds(Ending, status=texts, time_ms=st.integers(0, 2**50), launch_id=texts)
outboxes = st.builds(
    Outbox,
    params=maps,
    tags=maps,
    texts=maps,
    files=st.lists(st.tuples(texts, texts), unique_by=lambda pair: pair[0], max_size=3).map(tuple),
    has_record=st.booleans(),
    ending=st.none() | endings,
)


@settings(deadline=None)
@given(outboxes)
def test_it_is_read_as_it_was_written(outbox: Outbox) -> None:
    addressed = Addressed(run_id="r", tracking_uri="http://server", outbox=outbox)
    write_outbox(Path("folder"), addressed)
    assert read_outbox(Path("folder")) == (None if outbox.is_empty else addressed)
    write_outbox(Path("folder"), replace(addressed, outbox=Outbox()))
    assert not Path("folder").exists()


@given(st.lists(outboxes, max_size=4))
def test_of_several_the_later_ones_count(several: list[Outbox]) -> None:
    total = sum_of(several)
    for name in ("params", "tags", "texts"):
        expected: dict[str, str] = {}
        for each in several:
            expected |= getattr(each, name)
        assert getattr(total, name) == expected
    targets: dict[str, str] = {}
    for each in several:
        targets |= dict(each.files)
    assert dict(total.files) == targets
    assert len(total.files) == len(targets)
    assert total.has_record == any(each.has_record for each in several)
    assert total.ending == next((each.ending for each in reversed(several) if each.ending), None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"version": 2}',
        b'{"version": 1, "run_id": 3, "tracking_uri": "u", "outbox": {}}',
        b'{"version": 1, "run_id": "r", "tracking_uri": "u", "outbox": {"params": {"a": 1}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_one_is_an_error_that_says_where(content: bytes, tmp_path: Path) -> None:
    (tmp_path / OUTBOX_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{OUTBOX_NAME} cannot be read"):
        read_outbox(tmp_path)
    with pytest.raises(ValueError, match=OUTBOX_NAME):
        send_left(tmp_path)


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    ending = Ending(status="FINISHED", time_ms=1, launch_id="l")
    addressed = Addressed(run_id="r", tracking_uri="http://me:secret@server", outbox=Outbox(ending=ending))
    write_outbox(tmp_path / "run", addressed)
    assert (tmp_path / "run" / OUTBOX_NAME).stat().st_mode & 0o077 == 0
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / "run" / OUTBOX_NAME).read_text())["run_id"] == "r"
