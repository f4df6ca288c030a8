"""A run through odd orders of calls: asked for early, forked, pickled, interrupted, logged into by hand."""

import copy
import gc
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow import MlflowClient

from lightning_air import AirMLflowLogger
from lightning_air.tracking.run_session import RunSession
from lightning_air.tracking.tracker import Tracker
from tests.kit.faulty_proxy import Fault, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import run_ranks, values
from tests.strategy.training import loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Exit, Logs, Store, fit, make_logger, make_trainer, own_signal_handlers, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with own_signal_handlers():
        yield


def saved(logger: AirMLflowLogger, *callbacks: Callback, steps: int = 4, **options: Any) -> str:
    """Train, and return the last checkpoint."""
    checkpoint = ModelCheckpoint("ckpt", every_n_train_steps=2, save_top_k=-1, enable_version_counter=False)
    with warned():
        fit(logger, *callbacks, checkpoint, max_epochs=-1, max_steps=steps, enable_checkpointing=True, **options)
    return f"ckpt/{Path(checkpoint.best_model_path).name}"


# ---- asked for early -------------------------------------------------------------------------------------------------


def test_asking_for_the_id_makes_the_run_and_keeps_nothing_on_the_disk(store: Store) -> None:
    logger = make_logger(store)
    assert store.status(str(logger.run_id)) == "RUNNING"
    assert not any(Path("spool").iterdir())
    assert not [each for each in threading.enumerate() if each.name.startswith("lightning-air")]
    fit(logger, max_steps=2)
    assert store.only_run("runs").info.run_id == logger.run_id
    assert store.steps(str(logger.run_id), "loss") == [0, 1]


def test_a_run_that_was_only_asked_for_ends_with_the_process(store: Store, exit_: Exit) -> None:
    run_id = str(make_logger(store).run_id)
    exit_.run()
    assert store.status(run_id) == "FINISHED"


def test_a_run_that_somebody_put_something_into_is_not_deleted_for_the_one_to_continue(store: Store) -> None:
    first = make_logger(store)
    path = saved(first)
    second = make_logger(store, resume_run="continue")
    notes = str(second.run_id)
    second.experiment.log_text(notes, "precious", "notes.txt")
    with warned() as found:
        saved(second, steps=6, ckpt_path=path)
    assert second.run_id == first.run_id
    assert store.run(notes).info.lifecycle_stage == "active"
    assert store.status(notes) == "FINISHED"
    assert store.artifact(notes, "notes") == "precious"
    assert "What was put into it stays there." not in found.text  # `saved` has caught it
    third = make_logger(store, resume_run="continue")
    empty = str(third.run_id)
    saved(third, steps=8, ckpt_path=path)
    assert store.run(empty).info.lifecycle_stage == "deleted"


@pytest.mark.parametrize("resume_run", ["new", "continue"])
def test_parameters_are_kept_though_model_checkpoint_asks_for_the_run_first(resume_run: Any, store: Store) -> None:
    class Tuned(Logs):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()

    first = make_logger(store)
    path = saved(first, module=Tuned(0.1))
    second = make_logger(store, resume_run=resume_run)
    with warned():
        fit(
            second,
            ModelCheckpoint(every_n_train_steps=2),  # no dirpath: it asks for the run's id
            module=Tuned(0.2),
            ckpt_path=path,
            max_steps=6,
            max_epochs=-1,
            enable_checkpointing=True,
        )
    run = store.run(str(second.run_id)).data
    if resume_run == "new":
        assert run.params["lr"] == "0.2"
    else:
        assert (run.params["lr"], run.tags["param_changed/lr"]) == ("0.1", "0.1 -> 0.2")


# ---- values ----------------------------------------------------------------------------------------------------------


class Awkward:
    def __float__(self) -> float:
        raise KeyError("x")

    def __repr__(self) -> str:
        raise ValueError("nor this")


@pytest.mark.parametrize("beside", [1.0, torch.tensor(1.0)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("value", [10**400, Awkward(), "12", b"1", None, torch.ones(3)], ids=lambda v: type(v).__name__)
def test_no_value_stops_the_training(value: Any, beside: Any, store: Store) -> None:
    logger = make_logger(store)
    with warned() as found:
        logger.log_metrics({"odd": value, "good": beside}, step=0)
        logger.finalize()
    assert store.curve(str(logger.run_id), "good") == [(0, 1.0)]
    assert store.curve(str(logger.run_id), "odd") == []
    assert "'odd'" in found.text


# ---- how it ends -----------------------------------------------------------------------------------------------------


def test_a_success_within_an_except_block_is_one(store: Store) -> None:
    logger = make_logger(store)
    try:
        int("the first try")
    except ValueError:
        fit(logger, max_steps=2)
    assert store.status(str(logger.run_id)) == "FINISHED"


def test_ctrl_c_while_the_end_waits_ends_the_run_and_gives_the_folder_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = make_logger(store)
    logger.log_metrics({"a": 1.0}, step=0)
    close = Tracker.close

    def interrupted(self: Tracker, deadline_seconds: float) -> bool:
        if deadline_seconds > 0:
            raise KeyboardInterrupt
        return close(self, deadline_seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logger.finalize()
    assert store.status(str(logger.run_id)) == "FINISHED"
    logger.log_metrics({"a": 2.0}, step=1)  # nobody else has the folder
    logger.finalize()
    assert store.curve(str(logger.run_id), "a") == [(0, 1.0), (1, 2.0)]


def test_a_failing_registration_ends_the_run_all_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunSession, "_register", lambda _: 1 / 0)
    logger = make_logger(store, register_model="m")
    with warned() as found:
        fit(logger, max_steps=2)
    assert store.status(str(logger.run_id)) == "FINISHED"
    assert "The model is not registered: ZeroDivisionError" in found.text


def test_an_upload_that_takes_too_long_leaves_no_run_that_is_running(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_artifact, is_over = MlflowClient.log_artifact, threading.Event()

    def slow(self: MlflowClient, *args: Any, **kwargs: Any) -> None:
        is_over.wait(20)
        log_artifact(self, *args, **kwargs)

    logger = make_logger(store, close_timeout=1.0)
    logger.log_metrics({"a": 1.0}, step=0)
    with monkeypatch.context() as patch, warned() as found:
        patch.setattr(MlflowClient, "log_artifact", slow)
        logger.log_hyperparams({"lr": 0.1})
        logger.finalize()
        assert store.status(str(logger.run_id)) == "FINISHED"
        is_over.set()
    assert "hyperparameters.yaml" in found.text


def test_an_end_that_did_not_arrive_is_said_again_when_the_process_ends(
    exit_: Exit, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with faulty_proxy(server.url) as proxy:
        logger = make_logger(Store(proxy.url), "late", close_timeout=0.5)
        logger.log_metrics({"a": 1.0}, step=0)
        proxy.set(Fault("runs/update", status=503))
        with warned():
            logger.finalize()
        assert Store(proxy.url).status(str(logger.run_id)) == "RUNNING"
        proxy.set()
        exit_.run()
        assert Store(proxy.url).status(str(logger.run_id)) == "FINISHED"


def test_an_error_of_an_earlier_cell_does_not_fail_the_run_of_the_launch(
    store: Store, exit_: Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = store.client.create_run("0").info.run_id
    monkeypatch.setattr(sys, "last_value", NameError("an hour ago"), raising=False)
    fit(make_logger(store, run_id=run_id), max_steps=2)
    exit_.run()
    assert store.status(run_id) == "FINISHED"


def test_a_note_after_a_failure_that_was_caught_leaves_it_failed(store: Store, exit_: Exit) -> None:
    class Fails(Logs):
        def on_train_batch_end(self, *_: Any) -> None:
            raise OSError("x")

    logger = make_logger(store)
    with pytest.raises(OSError, match="x"):
        fit(logger, module=Fails(), max_steps=2)
    logger.log_metrics({"note": 1.0})
    exit_.run()
    assert store.status(str(logger.run_id)) == "FAILED"
    assert store.curve(str(logger.run_id), "note")


# ---- where a run goes on ---------------------------------------------------------------------------------------------


def test_logged_by_hand_before_a_fit_that_was_to_continue_another_run(store: Store) -> None:
    first = make_logger(store)
    path = saved(first)
    second = make_logger(store, resume_run="continue")
    second.log_metrics({"by hand": 1.0}, step=0)
    with warned() as found:
        fit(second, max_epochs=-1, max_steps=6, ckpt_path=path)
    assert f"The checkpoint's run {first.run_id} is not continued" in found.text
    assert store.curve(str(second.run_id), "by hand") == [(0, 1.0)]
    assert store.steps(str(second.run_id), "loss")[0] == 4


def test_a_run_that_begins_anew_where_it_had_been_further_is_rolled_back(store: Store) -> None:
    first = make_logger(store)
    fit(first, module=Logs(losses=lambda _: 7.0), max_steps=6)
    again = make_logger(store, run_id=first.run_id)
    fit(again, module=Logs(losses=float), max_steps=3)
    assert store.tags(str(first.run_id))["lightning_air.rolled_back"].startswith("5->0")
    assert store.run(str(first.run_id)).data.metrics["loss"] == 2.0


class Adversarial(LightningModule):
    """Two optimizers that both step in each batch: `global_step` goes twice as fast as what is logged at."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, net in zip(self.optimizers(), (self.one, self.two), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(net(batch[0][:, :1]).square().mean())
            optimizer.step()
        self.log("loss", float(batch_idx))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.two)]


def test_a_roll_back_with_two_optimizers_is_seen(store: Store) -> None:
    first = make_logger(store)
    checkpoint = ModelCheckpoint("ckpt", every_n_train_steps=4, save_top_k=-1)  # steps of optimizers: two batches
    with warned():
        fit(first, checkpoint, module=Adversarial(), max_epochs=1, enable_checkpointing=True)
    early = next(path for path in Path("ckpt").iterdir() if "step=4" in path.name)
    second = make_logger(store, resume_run="continue")
    with warned():
        fit(second, module=Adversarial(), ckpt_path=str(early), max_epochs=1)
    assert second.run_id == first.run_id
    assert store.tags(str(first.run_id))["lightning_air.rolled_back"].startswith("7->")


def test_meeting_a_trainer_twice_is_meeting_it_once(store: Store) -> None:
    logger = make_logger(store, resume_run="continue")
    path = saved(logger)
    trainer = make_trainer(logger, max_epochs=-1, max_steps=6)
    module = Logs()
    with warned():
        trainer.fit(module, loader(), loader())
        trainer.fit_loop.epoch_loop.max_steps = 8
        trainer.fit(module, loader(), loader(), ckpt_path=path)
    assert store.tags(str(logger.run_id))["lightning_air.rolled_back"].count("->") == 1


class Graphs(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            assert trainer.logger is not None
            trainer.logger.log_graph(pl_module)  # type: ignore[attr-defined]


def _logs_a_graph_on_rank_zero(uri: str) -> list[str]:
    logger = AirMLflowLogger("ranks", tracking_uri=uri, spool_dir="spool", log_console=False)
    trainer = make_trainer(logger, Graphs(), max_steps=2, strategy="ddp", devices=2, num_nodes=1)
    trainer.fit(Logs(), loader(2, trainer.global_rank))
    return [str(logger.run_id)]


def _trains_in_forked_processes(uri: str) -> str:
    logger = AirMLflowLogger("ranks", tracking_uri=uri, spool_dir="spool", log_console=False)
    run_id = str(logger.run_id)
    trainer = make_trainer(logger, max_steps=4, strategy="ddp_fork", devices=2)
    trainer.fit(Logs(), loader())
    trainer.test(Logs(), loader(), verbose=False)
    logger.finalize()
    assert logger.run_id == run_id
    return run_id


def test_a_graph_that_one_rank_logs_keeps_nobody_waiting(store: Store, tmp_path: Path) -> None:
    store.client.create_experiment("ranks", artifact_location=str(tmp_path / "artifacts"))
    results = run_ranks(_logs_a_graph_on_rank_zero, 2, args=(store.uri,), warnings_as_errors=False, timeout_seconds=60)
    assert values(results)[0] == values(results)[1] == [store.only_run("ranks").info.run_id]


def test_ranks_that_are_forked_log_into_the_run_that_was_asked_for_before(store: Store, tmp_path: Path) -> None:
    store.client.create_experiment("ranks", artifact_location=str(tmp_path / "artifacts"))
    [run_id] = values(run_ranks(_trains_in_forked_processes, 1, args=(store.uri,), warnings_as_errors=False))
    assert store.only_run("ranks").info.run_id == run_id
    assert store.steps(run_id, "loss") == [0, 1, 2, 3]
    assert store.steps(run_id, "test_loss")
    assert store.status(run_id) == "FINISHED"


# ---- copies, and what is left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda logger: pickle.loads(pickle.dumps(logger))])
def test_a_copy_of_one_that_logs_is_of_the_same_run(copied: Any, store: Store) -> None:
    logger = make_logger(store)
    logger.log_metrics({"a": 1.0}, step=0)
    during = copied(logger)
    logger.finalize()
    after = copied(logger)
    assert during.run_id == after.run_id == logger.run_id
    after.log_metrics({"a": 2.0}, step=1)
    after.finalize()
    assert store.curve(str(logger.run_id), "a") == [(0, 1.0), (1, 2.0)]
    assert len(store.runs("runs")) == 1


def test_one_that_is_done_is_not_kept_for_the_end_of_the_process(store: Store, exit_: Exit) -> None:
    logger = make_logger(store)
    fit(logger, max_steps=2)
    assert exit_ == []
    reference = weakref.ref(logger)
    del logger
    gc.collect()
    assert reference() is None


def test_what_is_called_waiting_is_all_of_the_calls(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make_logger(store)
    logger.log_metrics({"a": 1.0}, step=0)
    assert logger.session is not None
    monkeypatch.setattr(Tracker, "append", lambda *_: time.sleep(0.05))
    before = logger.session.seconds_blocked
    logger.log_metrics({"a": torch.tensor(1.0).item()}, step=1)
    assert logger.session.seconds_blocked - before >= 0.05
    logger.finalize()


def test_autolog_in_a_run_of_the_user_whose_id_model_checkpoint_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Autologs(Callback):
        """Stands in for autologging's callback in the Trainer."""

        run_id = ""

    Autologs.__module__ = "mlflow.pytorch._lightning_autolog"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    mlflow.set_tracking_uri(store.uri)
    try:
        with mlflow.start_run(experiment_id=store.client.create_experiment("fluent", "/nowhere")) as active:
            Autologs.run_id = active.info.run_id
            logger = make_logger(store, None)
            assert logger.run_id != active.info.run_id  # a child, as far as can be known
            child = str(logger.run_id)
            with warned():
                fit(logger, Autologs(), max_steps=2)
            assert logger.run_id == active.info.run_id
            assert store.run(child).info.lifecycle_stage == "deleted"
        assert store.steps(active.info.run_id, "loss") == [0, 1]
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type] # as if it had not been set
