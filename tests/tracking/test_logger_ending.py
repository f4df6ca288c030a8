"""How runs begin and end: one for all stages, RUNNING while training, and ended truly, by whoever owns it."""

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_air import AirCheckpoint, AsyncUCCheckpointIO
from lightning_air.tracking import opening
from lightning_air.tracking import tails as tails_module
from lightning_air.tracking.logger_options import LoggerOptions
from tests.kit.faulty_proxy import FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import run_ranks, values
from tests.strategy.training import loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import (
    At,
    Exit,
    Logs,
    Store,
    fit,
    make_logger,
    make_trainer,
    own_signal_handlers,
    press_ctrl_c,
    terminate,
    warned,
)

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with own_signal_handlers():
        yield


# ---- one run ---------------------------------------------------------------------------------------------------------


class Statuses(Callback):
    """Asks the server, in each stage, for the run's status."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seen: list[tuple[str, str]] = []

    def _ask(self, trainer: Trainer) -> None:
        if not trainer.sanity_checking:
            self.seen.append((trainer.state.fn.value, self.store.status(trainer.logger.run_id)))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self._ask(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            self._ask(trainer)

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            self._ask(trainer)


def test_fit_validate_test_and_fit_again_are_one_run(store: Store, exit_: Exit) -> None:
    logger, statuses, module = make_logger(store), Statuses(store), Logs()
    trainer = make_trainer(logger, statuses, max_epochs=2, limit_val_batches=2)
    trainer.fit(module, loader(), loader())
    ended = [store.status(logger.run_id)]
    trainer.validate(module, loader(), verbose=False)
    ended.append(store.status(logger.run_id))
    trainer.test(module, loader(), verbose=False)
    ended.append(store.status(logger.run_id))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), loader())
    ended.append(store.status(logger.run_id))
    assert statuses.seen == [(stage, "RUNNING") for stage in ("fit", "fit", "fit", "validate", "test", "fit")]
    assert ended == ["FINISHED"] * 4
    run_id = store.only_run("runs").info.run_id
    assert store.steps(run_id, "loss") == list(range(24))
    assert store.steps(run_id, "val_loss") == [7, 15, 16, 23]
    assert store.steps(run_id, "test_loss") == [16]
    exit_.run()
    assert store.status(run_id) == "FINISHED"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_alone_is_a_run(store: Store, stage: str) -> None:
    class Predicts(Logs):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.logger.log_metrics({"predicted": 1.0}, step=batch_idx)
            return batch[0]

    logger = make_logger(store)
    trainer = make_trainer(logger, limit_val_batches=2)
    options = {} if stage == "predict" else {"verbose": False}
    getattr(trainer, stage)(Predicts(), loader(), **options)
    run = store.only_run("runs")
    assert run.info.status == "FINISHED"
    assert set(run.data.metrics) & {"val_loss", "test_loss", "predicted"}


def test_one_logger_for_two_trainers_is_one_run(store: Store) -> None:
    logger = make_logger(store)
    fit(logger, max_steps=2)
    fit(logger, max_steps=3)
    run_id = store.only_run("runs").info.run_id
    assert store.steps(run_id, "loss") == [0, 0, 1, 1, 2]


def test_two_loggers_one_after_the_other_are_two_runs(store: Store) -> None:
    fit(make_logger(store), max_steps=1)
    fit(make_logger(store), max_steps=1)
    assert len(store.runs("runs")) == 2


# ---- how it ended ----------------------------------------------------------------------------------------------------


class Fails(Logs):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            raise OSError("the disk is full")


def test_success(store: Store) -> None:
    fit(make_logger(store))
    assert store.only_run("runs").info.status == "FINISHED"


def test_exception(store: Store, exit_: Exit) -> None:
    with pytest.raises(OSError, match="the disk is full"):
        fit(make_logger(store), module=Fails())
    run = store.only_run("runs")
    assert run.info.status == "FAILED"
    assert store.steps(run.info.run_id, "loss") == [0, 1]  # Lightning logs after this hook
    exit_.run()
    assert store.status(run.info.run_id) == "FAILED"


def test_ctrl_c(store: Store) -> None:
    with pytest.raises(SystemExit):
        fit(make_logger(store), At(3, press_ctrl_c))
    run = store.only_run("runs")
    assert run.info.status == "KILLED"
    assert len(store.steps(run.info.run_id, "loss")) >= 2


def test_sigterm(store: Store) -> None:
    with pytest.raises(SIGTERMException):
        fit(make_logger(store), At(3, terminate))
    run = store.only_run("runs")
    assert run.info.status == "KILLED"
    assert store.steps(run.info.run_id, "loss") == [0, 1, 2]


@pytest.mark.parametrize(("action", "status"), [(terminate, "KILLED"), (None, "FAILED")])
def test_the_checkpoint_that_is_saved_at_the_end_is_noted(store: Store, action: Any, status: str) -> None:
    logger = make_logger(store)
    with pytest.raises((SIGTERMException, OSError)):
        fit(
            logger,
            *([] if action is None else [At(3, action)]),
            AirCheckpoint("ckpt", every="100steps"),
            module=Logs() if action is not None else Fails(),
            enable_checkpointing=True,
            plugins=[AsyncUCCheckpointIO()],
        )
    assert store.status(logger.run_id) == status
    assert store.tags(logger.run_id)["lightning_air.last_checkpoint"].endswith("step=3.ckpt")


@pytest.mark.parametrize("gives_id", [False, True])
def test_a_fit_that_goes_well_after_one_that_did_not(store: Store, exit_: Exit, gives_id: bool) -> None:
    given = store.client.create_run("0").info.run_id if gives_id else None
    logger = make_logger(store, run_id=given)
    with pytest.raises(OSError, match="the disk is full"):
        fit(logger, module=Fails())
    fit(logger, max_steps=2)
    exit_.run()
    assert store.status(str(logger.run_id)) == "FINISHED"


def test_a_failure_in_a_later_stage_and_a_success_after_it(store: Store) -> None:
    class FailsOnce(Logs):
        is_broken = True

        def test_step(self, batch: Any, batch_idx: int) -> None:
            if self.is_broken:
                raise ValueError("no such sample")
            super().test_step(batch, batch_idx)

    logger, module = make_logger(store), FailsOnce()
    trainer = make_trainer(logger, max_steps=2)
    trainer.fit(module, loader(), loader())
    with pytest.raises(ValueError, match="no such sample"):
        trainer.test(module, loader(), verbose=False)
    assert store.status(logger.run_id) == "FAILED"
    module.is_broken = False
    trainer.test(module, loader(), verbose=False)
    assert store.status(logger.run_id) == "FINISHED"


@pytest.mark.parametrize("hook", ["setup", "configure_model", "on_fit_start", "on_train_start", "on_fit_end"])
def test_an_exception_outside_of_the_loop(store: Store, hook: str) -> None:
    class FailsThere(Logs):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("not there")

    setattr(FailsThere, hook, fail)
    logger = make_logger(store)
    logger.log_hyperparams({"lr": 1})
    with pytest.raises(OSError, match="not there"):
        fit(logger, module=FailsThere())
    if hook in {"setup", "configure_model", "on_fit_start"}:  # before the run is opened
        assert store.client.get_experiment_by_name("runs") is None
    else:
        assert store.only_run("runs").info.status == "FAILED"


def test_a_run_by_hand_that_ends_with_an_exception(store: Store, exit_: Exit) -> None:
    logger = make_logger(store)
    logger.log_metrics({"a": 1.0}, step=0)
    assert store.status(logger.run_id) == "RUNNING"
    exit_.run(crash=KeyboardInterrupt())
    run = store.only_run("runs")
    assert (run.info.status, store.steps(run.info.run_id, "a")) == ("KILLED", [0])


def test_a_run_by_hand_that_just_ends(store: Store, exit_: Exit) -> None:
    make_logger(store).log_metrics({"a": 1.0}, step=0)
    exit_.run()
    assert store.only_run("runs").info.status == "FINISHED"


# ---- runs of others --------------------------------------------------------------------------------------------------


def test_a_run_of_the_launch_is_running_again_and_ends_with_the_process(
    store: Store, monkeypatch: pytest.MonkeyPatch, exit_: Exit
) -> None:
    run = store.client.create_run(store.client.create_experiment("platform's"), run_name="theirs")
    run_id = run.info.run_id
    store.client.log_metric(run_id, "loss", 9.0, step=0, timestamp=1)
    store.client.log_metric(run_id, "system/cpu", 9.0, step=77, timestamp=1)
    store.client.set_terminated(run_id, "KILLED")
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    logger, statuses, module = make_logger(store, None), Statuses(store), Logs()
    assert logger.run_id == run_id
    trainer = make_trainer(logger, statuses)
    trainer.fit(module, loader(), loader())
    between = store.status(run_id)
    trainer.test(module, loader(), verbose=False)
    after = store.status(run_id)
    assert [status for _, status in statuses.seen] == ["RUNNING", "RUNNING"]
    assert (between, after) == ("RUNNING", "RUNNING")
    assert store.run(run_id).info.run_name == "theirs"
    assert store.steps(run_id, "loss") == [0, *range(8)]
    assert store.steps(run_id, "system/cpu") == [77]
    exit_.run()
    assert store.status(run_id) == "FINISHED"
    assert len(store.runs("platform's")) == 1


@pytest.mark.parametrize(
    ("end", "status"), [("failure", "FAILED"), ("Ctrl-C", "KILLED"), ("crash after training", "FAILED")]
)
def test_a_run_of_the_launch_that_ends_badly(
    store: Store, monkeypatch: pytest.MonkeyPatch, exit_: Exit, end: str, status: str
) -> None:
    run_id = store.client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    crash: Exception | None = None
    if end == "failure":
        with pytest.raises(OSError, match="full") as caught:
            fit(make_logger(store, None), module=Fails())
        crash = caught.value
    elif end == "Ctrl-C":
        with pytest.raises(SystemExit):
            fit(make_logger(store, None), At(3, press_ctrl_c))
    else:
        fit(make_logger(store, None), max_steps=1)
        crash = RuntimeError("in the user's script")
    assert store.status(run_id) == "RUNNING"
    exit_.run(crash)
    assert store.status(run_id) == status


def fit_with_run_of_the_launch(uri: str) -> str:
    logger = make_logger(Store(uri), None)
    fit(logger, max_steps=1)
    return Store(uri).status(logger.run_id)


def test_it_really_ends_with_the_process(store: Store) -> None:
    run_id = store.client.create_run("0").info.run_id
    [status] = values(
        run_ranks(
            fit_with_run_of_the_launch, 1, args=[store.uri], env={"MLFLOW_RUN_ID": run_id}, warnings_as_errors=False
        )
    )
    assert (status, store.status(run_id)) == ("RUNNING", "FINISHED")


def test_a_run_of_the_launch_that_is_gone_costs_a_warning(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    logger = make_logger(store)
    with warned() as found:
        fit(logger, max_steps=1)
    assert "MLFLOW_RUN_ID names the run 00" in found.text
    assert store.only_run("runs").info.run_id == logger.run_id


def test_a_run_that_is_passed(store: Store, exit_: Exit, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_logger(store)
    fit(first, max_steps=2)
    monkeypatch.setenv("MLFLOW_RUN_ID", store.client.create_run("0").info.run_id)  # which it goes before
    logger = make_logger(store, run_id=first.run_id)
    fit(logger, max_steps=1)
    assert logger.run_id == first.run_id
    assert store.status(first.run_id) == "RUNNING"  # ended by whoever passed it, or with the process
    exit_.run()
    assert store.status(first.run_id) == "FINISHED"
    assert store.steps(first.run_id, "loss") == [0, 0, 1, 1]  # it began anew: its last value is said where it had been
    assert store.tags(first.run_id)["lightning_air.rolled_back"].startswith("1->0 at ")


def test_a_run_that_is_passed_and_is_not_there(store: Store) -> None:
    with pytest.raises(ValueError, match=r"run_id='0+' does not exist on this tracking server\. Pass one that does"):
        fit(make_logger(store, run_id="0" * 32), max_steps=1)


# ---- the fluent interface --------------------------------------------------------------------------------------------


@pytest.fixture
def fluent(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow's fluent interface with the store as its server, and as if nothing had used it before."""
    from mlflow.tracking import fluent as module
    from mlflow.tracking._tracking_service import utils

    monkeypatch.setattr(utils, "_tracking_uri", None)
    monkeypatch.setattr(module, "_active_experiment_id", None)
    before = dict(os.environ)
    mlflow.set_tracking_uri(store.uri)
    mlflow.set_experiment("fluent")
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.usefixtures("fluent")
def test_a_child_of_the_active_run(store: Store) -> None:
    with mlflow.start_run(run_name="parent") as parent:
        logger = make_logger(store, None, run_name="child")
        fit(logger, max_steps=1)
        assert mlflow.active_run().info.run_id == parent.info.run_id
        assert store.status(parent.info.run_id) == "RUNNING"
    tags = store.tags(logger.run_id)
    assert (tags["mlflow.parentRunId"], tags["mlflow.runName"]) == (parent.info.run_id, "child")
    assert (store.status(logger.run_id), store.status(parent.info.run_id)) == ("FINISHED", "FINISHED")
    assert store.run(logger.run_id).info.experiment_id == parent.info.experiment_id


@pytest.mark.usefixtures("fluent")
def test_the_active_run_itself(store: Store, exit_: Exit) -> None:
    with mlflow.start_run() as active:
        logger = make_logger(store, None, adopt_active=True)
        fit(logger, max_steps=1)
        assert logger.run_id == active.info.run_id
        assert store.status(logger.run_id) == "RUNNING"
        mlflow.log_metric("after", 1.0)
    assert store.status(logger.run_id) == "FINISHED"
    exit_.run(crash=OSError())  # of another part of the script
    assert store.status(logger.run_id) == "FINISHED"
    assert set(store.run(logger.run_id).data.metrics) == {"after", "epoch", "loss"}


@pytest.mark.usefixtures("fluent")
def test_no_child_where_another_experiment_is_named(store: Store) -> None:
    with mlflow.start_run():
        logger = make_logger(store, "another")
        fit(logger, max_steps=1)
    assert "mlflow.parentRunId" not in store.tags(logger.run_id)
    assert store.only_run("another").info.status == "FINISHED"


@pytest.mark.usefixtures("fluent")
def test_the_active_run_where_another_experiment_is_named(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with mlflow.start_run() as active, warned() as found, caplog.at_level("INFO"):
        logger = make_logger(store, "another", adopt_active=True)
        fit(logger, max_steps=1)
    assert logger.run_id == active.info.run_id
    assert "is not used: a run cannot move" in found.text
    experiment = store.client.get_experiment(active.info.experiment_id)
    assert f"Experiment {experiment.name}:" in caplog.text  # and not the other's name


@pytest.mark.usefixtures("fluent")
def test_a_run_of_the_launch_that_mlflow_has_taken(store: Store, monkeypatch: pytest.MonkeyPatch, exit_: Exit) -> None:
    # As on AI Runtime: `mlflow.start_run()` takes it, and deletes the variable.
    from lightning_air import runtime

    experiment = store.client.get_experiment_by_name("fluent")
    assert experiment is not None
    run_id = store.client.create_run(experiment.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    monkeypatch.setattr(runtime, "_MLFLOW_RUN_ID_AT_IMPORT", run_id)
    with mlflow.start_run() as active:
        assert active.info.run_id == run_id
        assert "MLFLOW_RUN_ID" not in os.environ
        logger = make_logger(store, None)
        fit(logger, max_steps=1)
        assert logger.run_id == run_id
    exit_.run()
    assert store.status(run_id) == "FINISHED"


def test_the_local_default_is_one_place_for_both(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking._tracking_service import utils

    monkeypatch.setattr(utils, "_tracking_uri", None)
    # Nobody has said where: MLflow's fluent interface and the logger both take the database in this folder.
    Path("mlflow.db").write_bytes(Path(Store.new(tmp_path_factory).uri.removeprefix("sqlite:///")).read_bytes())
    store = Store(f"sqlite:///{tmp_path}/mlflow.db")
    assert re.search(r"sqlite:///.*mlflow\.db", mlflow.get_tracking_uri())
    with mlflow.start_run() as parent:
        logger = make_logger(store, None, tracking_uri=None)
        fit(logger, max_steps=1)
    assert store.tags(logger.run_id)["mlflow.parentRunId"] == parent.info.run_id


# ---- a server that is away -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as made:
        yield made


def test_the_end_waits_no_longer_than_it_is_told(
    proxy: FaultyProxy, exit_: Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # or MLflow's own tries outlive the test
    logger = make_logger(Store(proxy.url), close_timeout=2.0, log_console=True, log_model=True)
    begun: list[float] = []

    class Ends(Callback):
        def on_train_end(self, *_: Any) -> None:
            proxy.refuse()
            begun.append(time.monotonic())

    with warned() as found:
        fit(logger, Ends(), max_steps=2, enable_checkpointing=True)
    seconds = time.monotonic() - begun[0]
    assert seconds < 8
    assert f"The run {logger.run_id} has not got all yet (metrics, " in found.text


def test_a_server_that_is_not_there_is_an_error_soon_that_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PATIENCE_SECONDS", 0.5)
    begun = time.monotonic()
    with warned() as found, pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9 does not answer\. Start it"):
        fit(make_logger(Store("http://127.0.0.1:9")), max_steps=1)
    assert time.monotonic() - begun < 5
    assert "does not answer" in found.text  # at once


def test_a_server_that_does_not_answer_at_first(proxy: FaultyProxy, server: MlflowServer) -> None:
    proxy.refuse()
    threading.Timer(0.5, proxy.accept).start()
    logger = make_logger(Store(proxy.url), "slow start")
    with warned() as found:
        fit(logger, max_steps=1)
    assert "does not answer" in found.text
    assert {point.key for point in server.points_of(logger.run_id)} == {"loss", "epoch"}


def test_a_server_that_has_gone_between_two_stages(
    proxy: FaultyProxy, server: MlflowServer, exit_: Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger, module = make_logger(Store(proxy.url), "gone", close_timeout=0.5), Logs()
    trainer = make_trainer(logger, max_steps=2)
    trainer.fit(module, loader(), loader())
    proxy.refuse()
    begun = time.monotonic()
    with warned() as found:
        trainer.test(module, loader(), verbose=False)
    assert time.monotonic() - begun < 10
    assert f"cannot be asked for the run {logger.run_id}" in found.text
    proxy.accept()
    logger.log_metrics({"after": 1.0}, step=2)
    logger.finalize()
    keys = {point.key for point in server.points_of(logger.run_id)}
    assert {"loss", "test_loss", "after"} <= keys
    assert Store(proxy.url).status(logger.run_id) == "FINISHED"


def test_an_end_that_the_server_was_not_told_is_not_shown_as_one(
    proxy: FaultyProxy, server: MlflowServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tails_module, "MAX_TAIL_BYTES", 200)
    logger = make_logger(Store(proxy.url), "away", close_timeout=0.5)
    checkpoint = ModelCheckpoint("ckpt", every_n_train_steps=6)
    with warned() as found, caplog.at_level("INFO"):
        fit(logger, At(1, lambda _: proxy.refuse()), checkpoint, enable_checkpointing=True)
    folder = Path("spool", str(logger.run_id))
    assert "FINISHED, which the server does not know yet" in caplog.text
    [text] = [each for each in found.messages if "these are only in" in each]
    assert text == (
        "The checkpoint of step 6 has the first 0.0 MB of metrics that the server has not taken, and not those after "
        f"them: these are only in {folder}, on this machine."
    )
    assert Store(server.url).status(logger.run_id) == "RUNNING"
    proxy.accept()


def test_a_spool_that_breaks_when_the_run_is_made_is_an_error_and_leaves_no_run_that_is_running(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoggerOptions, "check_spool_dir", lambda _: Path("spool").write_text("a file"))
    with pytest.raises(OSError, match="spool"):
        fit(make_logger(store), max_steps=1)
    assert store.only_run("runs").info.status == "FAILED"
