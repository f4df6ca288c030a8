"""With `mlflow.pytorch.autolog()` there is one run with every point once, whatever came first.

Autologging imports `pytorch_lightning`, which the other tests' process must not: the scenarios run in one of their own,
each with a store of its own, and the tests look at what became of them.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_air.tracking.autolog import (
    AutologNote,
    end_autolog_run,
    find_autolog,
    mute_autolog_metrics,
    settle_autolog,
    stray_run_warning,
)
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.tracking.local_store import MLFLOW_WARNING, local_client

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")

EPOCHS, BATCHES = 2, 4


# ---- a logger as ours, as far as autologging is concerned ------------------------------------------------------------


class Place(NamedTuple):
    """Where a scenario logs: an experiment is quicker made than a store."""

    tracking_uri: str
    experiment_id: str = "0"

    def new_run(self) -> str:
        return MlflowClient(self.tracking_uri).create_run(self.experiment_id, run_name="ours").info.run_id


class ClientLogger(Logger):
    """Opens its run in `log_graph`, and sends the points at the end."""

    def __init__(self, place: Place, run_id: str | None = None) -> None:
        super().__init__()
        self.place, self.run_id = place, run_id
        self.notes: list[AutologNote] = []
        self.stray: str | None = None
        self.is_own: list[bool] = []
        self.params: dict[str, Any] = {}
        self.rows: list[Metric] = []

    name = version = property(lambda self: "ours")

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.place.tracking_uri)

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.params = dict(params)

    def log_graph(self, model: LightningModule, input_array: Tensor | None = None) -> None:
        trainer = model.trainer
        if trainer.is_global_zero:
            self.open(trainer)
        self.run_id = trainer.strategy.broadcast(self.run_id)
        if not trainer.is_global_zero:
            self.stray = stray_run_warning(trainer, self.run_id)

    def open(self, trainer: Trainer) -> None:
        autolog = find_autolog(trainer, self.client)
        if self.run_id is None and autolog is not None and autolog.run is not None:
            self.run_id = autolog.run.run_id
        elif self.run_id is None:
            self.run_id = self.place.new_run()
        if autolog is not None:
            self.is_own.append(autolog.is_own)
            self.notes.append(settle_autolog(trainer, autolog, self.client, self.run_id))
        self.client.log_batch(self.run_id, params=[Param(key, str(value)) for key, value in self.params.items()])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows += [Metric(key, value, 1, step or 0) for key, value in metrics.items() if key != "epoch"]

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.client.log_batch(self.run_id, metrics=self.rows)
        self.rows = []


class Model(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch

    def step(self, name: str, batch: list[Tensor], **options: bool) -> Tensor:
        loss = self(batch[0]).pow(2).mean()
        self.log(name, loss, **options)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step("loss", batch, on_step=True, on_epoch=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step("val_loss", batch, sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step("test_loss", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Breaks(Model):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def on_train_epoch_end(self) -> None:
        raise self.error


class AnotherWay(Callback):
    """Makes of MLflow a version that logs metrics in a way that we do not know."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        [callback] = [each for each in trainer.callbacks if hasattr(each, "metrics_logger")]
        records = callback.metrics_logger.record_metrics
        callback._log_metrics = lambda trainer, step, items: records({key: float(value) for key, value in items}, step)
        del callback.metrics_logger


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(BATCHES, 2)), batch_size=1)


def make_trainer(logger: Logger, **options: Any) -> Trainer:
    defaults = {"max_epochs": EPOCHS, "log_every_n_steps": 1, "logger": logger, "num_sanity_val_steps": 0}
    return Trainer(**fast_trainer_kwargs(".", **(defaults | options)))


def fit(logger: Logger, model: Model | None = None, **options: Any) -> Trainer:
    trainer = make_trainer(logger, **options)
    trainer.fit(model or Model(), data(), data())
    return trainer


@contextmanager
def autologging(place: Place, **options: Any) -> Iterator[None]:
    """Autologging, quick unless the scenario is about what takes its time."""
    mlflow.set_tracking_uri(place.tracking_uri)
    mlflow.set_experiment(experiment_id=place.experiment_id)
    mlflow.pytorch.autolog(**({"log_models": False, "checkpoint": False} | options))
    try:
        yield
    finally:
        mlflow.pytorch.autolog(disable=True)
        mlflow.end_run()


# ---- the scenarios ---------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[Place], Any]] = {}


def scenario(play: Callable[[Place], Any]) -> Callable[[Place], Any]:
    """Have it played at a place; it returns what the store does not tell."""
    SCENARIOS[play.__name__] = play
    return play


@scenario
def generic_autolog(place: Place) -> ClientLogger:
    """Comes first: it leaves alone what `mlflow.pytorch.autolog` has said."""
    mlflow.set_tracking_uri(place.tracking_uri)
    mlflow.set_experiment(experiment_id=place.experiment_id)
    mlflow.autolog(log_models=False)
    try:
        logger = ClientLogger(place)
        fit(logger)
    finally:
        mlflow.autolog(disable=True)
    return logger


@scenario
def autolog_last(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    trainer = make_trainer(logger)
    with autologging(place, checkpoint=True, log_every_n_step=1):
        trainer.fit(Model(), data(), data())
    return logger


@scenario
def autolog_first(place: Place) -> ClientLogger:
    with autologging(place, log_models=True):
        logger = ClientLogger(place)
        trainer = fit(logger)
        trainer.test(Model(), data(), verbose=False)
    return logger


@scenario
def params_that_differ(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    with autologging(place):
        fit(logger, Model(lr=0.5))
    return logger


@scenario
def within_the_users_run(place: Place) -> tuple[ClientLogger, str, str]:
    logger = ClientLogger(place)
    with autologging(place), mlflow.start_run(run_name="the user's") as run:
        fit(logger)
        end_autolog_run(run.info.run_id, "KILLED")
        status = mlflow.get_run(run.info.run_id).info.status
    return logger, run.info.run_id, status


@scenario
def failing(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    with autologging(place), pytest.raises(OSError, match="the disk is full"):
        fit(logger, Breaks(OSError("the disk is full")))
    return logger


@scenario
def interrupted(place: Place) -> ClientLogger:
    """As Lightning passes Ctrl-C and SIGTERM on."""
    logger = ClientLogger(place)
    with autologging(place):
        with pytest.raises(SystemExit):
            fit(logger, Breaks(SystemExit(1)))
        end_autolog_run("another", "KILLED")
        assert mlflow.active_run().info.run_id == logger.run_id
        end_autolog_run(logger.run_id, "KILLED")
        assert mlflow.active_run() is None
    return logger


@scenario
def exclusive(place: Place) -> list[ClientLogger]:
    loggers = [ClientLogger(place), ClientLogger(place)]
    with autologging(place, exclusive=True):
        with mlflow.start_run(run_name="the user's"):
            fit(loggers[0])
        fit(loggers[1])
    return loggers


@scenario
def disabled(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    with autologging(place, disable=True):
        fit(logger)
    return logger


@scenario
def disabled_since(place: Place) -> list[ClientLogger]:
    """The Trainer still has autologging's callback."""
    loggers = [ClientLogger(place), ClientLogger(place)]
    with autologging(place):
        trainer = fit(loggers[0])
        mlflow.pytorch.autolog(disable=True)
        trainer.logger = loggers[1]
        trainer.fit_loop.max_epochs = 2 * EPOCHS
        trainer.fit(Model(), data(), data())
    return loggers


@scenario
def named_run(place: Place) -> ClientLogger:
    logger = ClientLogger(place, place.new_run())
    with autologging(place):
        fit(logger)
    return logger


@scenario
def named_run_opened_first(place: Place) -> ClientLogger:
    logger = ClientLogger(place, place.new_run())
    with autologging(place), mlflow.start_run(run_id=logger.run_id):
        fit(logger)
    return logger


@scenario
def second_fit(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    with autologging(place):
        trainer = fit(logger)
        trainer.fit_loop.max_epochs = 2 * EPOCHS
        trainer.fit(Model(), data(), data())
    return logger


@scenario
def two_servers(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    with autologging(Place(f"{place.tracking_uri}-other")):
        fit(logger)
    return logger


@scenario
def another_version(place: Place) -> ClientLogger:
    logger = ClientLogger(place)
    with autologging(place):
        fit(logger, callbacks=[AnotherWay()])
    return logger


class Outcome(NamedTuple):
    value: Any
    error: str | None


def play_all(places: dict[str, Place]) -> dict[str, Outcome]:
    """Play each scenario, in one process: starting one, and its first store, takes longer than all of them."""
    outcomes = {}
    for name, play in SCENARIOS.items():
        try:
            outcomes[name] = Outcome(play(places[name]), None)
            assert mlflow.active_run() is None
        except Exception:  # noqa: BLE001 - of any scenario
            outcomes[name] = Outcome(None, traceback.format_exc())
    return outcomes


# ---- what became of them ---------------------------------------------------------------------------------------------

# MLflow would import Lightning in a process of its own to see what a model requires.
QUICK = {"MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT": "1"}


class Run:
    """A run, as the store has it."""

    def __init__(self, client: MlflowClient, run: Any) -> None:
        self.run_id, self.status = run.info.run_id, run.info.status
        self.params, self.tags = run.data.params, run.data.tags
        self.is_autologs = self.tags.get("mlflow.autologging") == "pytorch"
        self.steps = {
            key: sorted(row.step for row in client.get_metric_history(self.run_id, key)) for key in run.data.metrics
        }
        self.artifacts = {file.path for file in client.list_artifacts(self.run_id)}

    def has_each_point_once(self, epochs: int = EPOCHS, batches: int = BATCHES) -> bool:
        """Tell whether it has what a logger is given while fitting, and nothing else."""
        ends = [batches * epoch - 1 for epoch in range(1, epochs + 1)]
        expected = {"loss_step": list(range(batches * epochs)), "loss_epoch": ends, "val_loss": ends}
        return {key: steps for key, steps in self.steps.items() if key != "test_loss"} == expected


class Store(NamedTuple):
    client: MlflowClient
    experiment_id: str = "0"

    @property
    def place(self) -> Place:
        return Place(self.client.tracking_uri, self.experiment_id)

    @property
    def runs(self) -> list[Run]:
        """The oldest first."""
        return [Run(self.client, run) for run in reversed(self.client.search_runs([self.experiment_id]))]

    @property
    def run(self) -> Run:
        [run] = self.runs
        return run


def new_store(factory: pytest.TempPathFactory, path: Path | None = None) -> Store:
    database = Path(local_client(factory).tracking_uri.removeprefix("sqlite:///"))
    return Store(MlflowClient(f"sqlite:///{database.rename(path or database)}"))


class Played(NamedTuple):
    stores: dict[str, Store]
    outcomes: dict[str, Outcome]

    def __call__(self, play: Callable[[Place], Any]) -> tuple[Any, Store]:
        """Return what a scenario returned, and where it logged."""
        value, error = self.outcomes[play.__name__]
        assert error is None, error
        return value, self.stores[play.__name__]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    client, _ = store = new_store(tmp_path_factory)
    new_store(tmp_path_factory, Path(f"{client.tracking_uri}-other".removeprefix("sqlite:///")))
    artifacts = client.get_experiment("0").artifact_location
    stores = {name: store._replace(experiment_id=client.create_experiment(name, artifacts)) for name in SCENARIOS}
    places = {name: each.place for name, each in stores.items()}
    [outcomes] = values(run_ranks(play_all, 1, args=[places], env=QUICK, warnings_as_errors=False))
    return Played(stores, outcomes)


# ---- one run ---------------------------------------------------------------------------------------------------------


def test_one_run_with_every_point_once(played: Played) -> None:
    for order in (autolog_last, autolog_first, generic_autolog):
        logger, store = played(order)
        run = store.run
        assert run.has_each_point_once()
        assert (run.run_id, run.is_autologs, run.status) == (logger.run_id, True, "FINISHED")
        assert {"lr": "0.1", "momentum": "0", "optimizer_name": "SGD", "epochs": "2"}.items() <= run.params.items()
        assert logger.is_own == [True]
        assert [note.is_warning for note in logger.notes] == [False]


def test_autolog_keeps_its_model_and_checkpoints(played: Played) -> None:
    logger, store = played(autolog_last)
    assert store.run.artifacts == {"checkpoints", "model_summary.txt"}
    assert store.client.search_logged_models([store.experiment_id]) == []
    assert logger.notes[0].text == (
        f"mlflow.pytorch.autolog() and AirMLflowLogger share the run {logger.run_id}: autolog logs its parameters, the "
        "model's summary and its checkpoints; AirMLflowLogger logs all metrics, of which autolog would log each "
        "epoch's again."
    )
    logger, store = played(autolog_first)
    assert store.run.artifacts == {"model_summary.txt"}
    assert [model.source_run_id for model in store.client.search_logged_models([store.experiment_id])] == [
        logger.run_id
    ]
    assert "autolog logs its parameters, the model's summary and the model;" in logger.notes[0].text


def test_a_test_after_the_fit(played: Played) -> None:
    _, store = played(autolog_first)
    assert store.run.steps["test_loss"] == [EPOCHS * BATCHES]  # autologging's would be at 0
    assert store.run.tags["Mode"] == "testing"


def test_params_that_the_run_has_with_another_value(played: Played) -> None:
    """Without our doing, MLflow refuses all of autologging's."""
    _, store = played(params_that_differ)
    run = store.run
    assert (run.params["lr"], run.params["autolog/lr"]) == ("0.5", "0.1")
    assert {"optimizer_name": "SGD", "epochs": "2", "momentum": "0"}.items() <= run.params.items()
    assert not {"autolog/momentum", "autolog/epochs"} & set(run.params)


def test_run_of_the_user(played: Played) -> None:
    (logger, run_id, status), store = played(within_the_users_run)
    assert store.run.run_id == logger.run_id == run_id
    assert store.run.has_each_point_once()
    assert (status, store.run.status) == ("RUNNING", "FINISHED")
    assert (logger.is_own, [note.is_warning for note in logger.notes]) == ([False], [False])


def test_run_of_a_failure(played: Played) -> None:
    _, store = played(failing)
    assert store.run.status == "FAILED"
    assert store.run.steps["loss_step"] == list(range(BATCHES))
    assert "loss" not in store.run.steps


def test_run_of_an_interruption(played: Played) -> None:
    """MLflow would call it FINISHED."""
    _, store = played(interrupted)
    assert store.run.status == "KILLED"


# ---- autologging leaves the fit alone --------------------------------------------------------------------------------


def test_exclusive_autolog(played: Played) -> None:
    (beside, shared), store = played(exclusive)
    users, ours, both = store.runs
    assert (users.steps, ours.run_id, both.run_id) == ({}, beside.run_id, shared.run_id)
    assert (beside.notes, len(shared.notes)) == ([], 1)
    assert ours.has_each_point_once()
    assert both.has_each_point_once()


def test_autolog_that_is_off(played: Played) -> None:
    logger, store = played(disabled)
    assert store.run.has_each_point_once()
    assert (store.run.run_id, store.run.is_autologs, logger.notes) == (logger.run_id, False, [])


def test_autolog_that_is_off_since(played: Played) -> None:
    loggers, store = played(disabled_since)
    assert [run.run_id for run in store.runs] == [logger.run_id for logger in loggers]
    assert [len(logger.notes) for logger in loggers] == [1, 0]
    assert store.runs[0].has_each_point_once()


def test_costs_nothing_where_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow.pytorch", raising=False)  # other tests use it

    class Nobody:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"The server was asked: {name}")

    trainer = Trainer(**fast_trainer_kwargs("."))
    assert find_autolog(trainer, Nobody()) is None
    assert stray_run_warning(trainer, "a") is None
    assert not mute_autolog_metrics(trainer)
    assert "mlflow.pytorch" not in sys.modules


# ---- two runs --------------------------------------------------------------------------------------------------------


def test_run_that_the_user_named(played: Played) -> None:
    logger, store = played(named_run)
    ours, autologs = store.runs
    assert (ours.run_id, ours.is_autologs, autologs.is_autologs) == (logger.run_id, False, True)
    assert ours.has_each_point_once()
    assert autologs.steps["val_loss"] == list(range(EPOCHS))
    [note] = logger.notes
    assert note.is_warning
    assert note.text == (
        f"There are two runs: mlflow.pytorch.autolog() logs into {autologs.run_id}, which it had before "
        f"AirMLflowLogger was asked, and AirMLflowLogger into {ours.run_id}. For one, train inside of "
        f"`with mlflow.start_run(run_id='{ours.run_id}'):`."
    )


def test_what_the_warning_says_leaves_one(played: Played) -> None:
    logger, store = played(named_run_opened_first)
    assert store.run.run_id == logger.run_id
    assert store.run.has_each_point_once()
    assert [note.is_warning for note in logger.notes] == [False]


def test_second_fit_of_a_trainer(played: Played) -> None:
    """Autologging's callback keeps the first fit's run, and the rest of it starts another."""
    logger, store = played(second_fit)
    first, second = store.runs
    assert first.run_id == logger.run_id
    assert first.has_each_point_once(epochs=2 * EPOCHS)
    assert second.steps == {}
    assert (first.params["epochs"], first.params["autolog/epochs"]) == ("2", "4")
    assert [note.is_warning for note in logger.notes] == [False, True]
    assert logger.notes[1].text.startswith(f"There are two runs: mlflow.pytorch.autolog() logs into {second.run_id},")


def test_two_servers(played: Played) -> None:
    logger, store = played(two_servers)
    other = Store(MlflowClient(f"{store.client.tracking_uri}-other"))
    assert store.run.run_id == logger.run_id
    assert store.run.has_each_point_once()
    assert other.run.steps["val_loss"] == list(range(EPOCHS))
    [note] = logger.notes
    assert not note.is_warning
    assert f"logs into the run {other.run.run_id} on another tracking server than AirMLflowLogger" in note.text


def test_version_that_logs_metrics_in_another_way(played: Played) -> None:
    logger, store = played(another_version)
    assert {0, BATCHES - 1} < set(store.run.steps["val_loss"])
    [note] = logger.notes
    assert note.is_warning
    assert f"the autologging of MLflow {mlflow.__version__} cannot be kept from logging metrics" in note.text


# ---- several ranks ---------------------------------------------------------------------------------------------------


def fit_forked(place: Place) -> None:
    with autologging(place, checkpoint=True):
        logger = ClientLogger(place)
        trainer = fit(logger, devices=2, strategy="ddp_fork")
        assert logger.run_id is None  # it is a rank's
        trainer.test(Model(), data(), verbose=False)


def test_ranks_that_the_trainer_forks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in a notebook: the run is active in the notebook's process, where no rank is."""
    store = new_store(tmp_path_factory)
    unset = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"))
    values(run_ranks(fit_forked, 1, args=[store.place], env=unset, warnings_as_errors=False))
    run = store.run
    assert run.has_each_point_once(batches=BATCHES // 2)
    assert len(run.steps["test_loss"]) == 1
    assert run.artifacts == {"checkpoints", "model_summary.txt"}
    assert set(run.params) >= {"epochs", "optimizer_name", "momentum"}


def fit_sharded(place: Place) -> ClientLogger:
    from lightning_air.strategy.air import AirStrategy

    logger = ClientLogger(place)
    with autologging(place, checkpoint=True):
        fit(logger, strategy=AirStrategy("fsdp"), max_epochs=3)
    return logger


def test_ranks_that_each_call_autolog(tmp_path_factory: pytest.TempPathFactory) -> None:
    """MLflow starts a run on each, and saves checkpoints on rank 0 alone: with shards, for ever."""
    store = new_store(tmp_path_factory)
    first, second = values(run_ranks(fit_sharded, 2, args=[store.place], warnings_as_errors=False))
    [shared] = [run for run in store.runs if run.run_id == first.run_id]
    [stray] = [run for run in store.runs if run.run_id != first.run_id]
    assert shared.has_each_point_once(epochs=3, batches=BATCHES // 2)
    assert (shared.artifacts, stray.steps) == ({"model_summary.txt"}, {})
    [note] = first.notes
    assert note.is_warning
    assert note.text.startswith(f"mlflow.pytorch.autolog() and AirMLflowLogger share the run {first.run_id}: ")
    assert "The checkpoints of mlflow.pytorch.autolog() are turned off" in note.text
    assert (first.stray, second.run_id) == (None, first.run_id)
    assert f"has started the run {stray.run_id} for rank 1, beside the one of rank 0 ({first.run_id})" in second.stray
