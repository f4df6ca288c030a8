"""Several ranks: one run, whose id all of them know and which rank 0 alone writes; and none that waits for ever."""

import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow import MlflowClient

from lightning_air import AirCheckpoint, AirMLflowLogger
from lightning_air.tracking import folder_claim, opening
from tests.checkpoint.runs import fit, make_trainer
from tests.kit.nodes import Namespace
from tests.kit.ranks import run_ranks, values
from tests.strategy.training import Regression, loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Store

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Store:
    made = Store.new(tmp_path_factory)
    # By default they would be in the folder in which a rank has been started.
    made.client.create_experiment("ranks", artifact_location=str(tmp_path / "artifacts"))
    return made


class Logs(Regression):
    """An ordinary module, for any sharding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach())
        return loss


class Asks(Callback):
    """What a rank knows while it trains, and which of our threads it has."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        logger = trainer.logger
        assert isinstance(logger, AirMLflowLogger)
        ids = (logger.run_id, logger.experiment_id, logger.version, logger.name)
        self.seen = {
            "ids": ids,
            "experiment": type(logger.experiment).__name__,
            "threads": sorted(each.name for each in threading.enumerate() if each.name.startswith("lightning-air")),
        }


def train(
    strategy: str,
    uri: str,
    *,
    num_ranks: int = 2,
    max_steps: int = 3,
    resume_run: Any = "new",
    tests: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return what this rank has seen."""
    logger = AirMLflowLogger(
        "ranks", tracking_uri=uri, spool_dir=f"spool{os.environ.get('RANK', '')}", resume_run=resume_run, step=1
    )
    before = logger.version if int(os.environ.get("RANK", "0")) else None
    asks = Asks()
    callbacks = options.pop("callbacks", [])
    trainer = make_trainer(
        strategy,
        options.pop("io", "lightning's"),
        asks,
        *callbacks,
        num_ranks=num_ranks,
        logger=logger,
        log_every_n_steps=1,
        max_steps=max_steps,
        **{key: value for key, value in options.items() if key != "ckpt_path"},
    )
    module = Logs()
    fit(trainer, module, ckpt_path=options.get("ckpt_path"))
    if tests:
        trainer.test(module, loader(trainer.world_size, trainer.global_rank), verbose=False)
    return asks.seen | {
        "rank": trainer.global_rank,
        "before": before,
        "after": logger.run_id,
        "spool": Path(f"spool{os.environ.get('RANK', '')}").exists(),
        "dirpath": getattr(trainer.checkpoint_callback, "dirpath", None),
    }


def check(store: Store, found: list[dict[str, Any]]) -> str:
    """Assert what is so with any strategy, and return the run."""
    run = store.only_run("ranks")
    run_id, experiment_id = run.info.run_id, run.info.experiment_id
    for each in found:
        assert each["ids"] == (run_id, experiment_id, run_id, experiment_id)
        assert each["after"] == run_id
        assert each["spool"] is (each["rank"] == 0)
    first, *others = found
    assert first["experiment"] == "MlflowClient"
    assert {"lightning-air-tracking", "lightning-air-output"} <= set(first["threads"])
    for each in others:
        assert (each["before"], each["experiment"]) == (None, "_DummyExperiment")
        assert "lightning-air-tracking" not in each["threads"]
    assert run.info.status == "FINISHED"
    assert run.data.tags["lightning_air.world_size"] == str(len(found))
    return run_id


@pytest.mark.parametrize("strategy", ["air ddp", "stock ddp"])
def test_all_ranks_know_the_run_and_one_writes(store: Store, strategy: str) -> None:
    # With a ModelCheckpoint of Lightning's, which asks rank 0 for the run before the Trainer is met.
    options = {"callbacks": [ModelCheckpoint()], "enable_checkpointing": True, "tests": True}
    found = values(run_ranks(_train, 2, args=[strategy, store.uri, options], warnings_as_errors=False))
    run_id = check(store, found)
    assert store.steps(run_id, "loss") == [0, 1, 2]
    assert store.steps(run_id, "test_loss") == [3]
    assert [path for path in store.artifacts(run_id) if "logs" in path and "node_0" not in path] == []
    assert all(each["threads"] == [] for each in found[1:])
    assert len({each["dirpath"].split("/", 4)[-1] for each in found}) == 1


def _train(strategy: str, uri: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(strategy, uri, **options)


def test_two_nodes(store: Store, two_networks: list[Namespace]) -> None:
    results = run_ranks(
        _train, 2, args=["air ddp", store.uri, {}], nodes=2, namespaces=two_networks, warnings_as_errors=False
    )
    found = values(results)
    run = store.only_run("ranks")
    assert [each["after"] for each in found] == [run.info.run_id] * 2
    assert run.data.tags["lightning_air.num_nodes"] == "2"
    assert store.steps(run.info.run_id, "loss") == [0, 1, 2]
    nodes = {path.split("/")[1] for path in store.artifacts(run.info.run_id) if path.startswith("logs/")}
    assert nodes == {"node_0", "node_1"}


# ---- resumed ---------------------------------------------------------------------------------------------------------


def resumed(uri: str, strategy: str, max_steps: int, resume_run: Any) -> dict[str, Any]:
    callbacks = [AirCheckpoint("run", every="2steps")]
    return train(
        strategy, uri, max_steps=max_steps, resume_run=resume_run, callbacks=callbacks, ckpt_path="last", io="ours"
    )


@pytest.mark.parametrize(("strategy", "resume_run"), [("air ddp", "new"), ("air fsdp", "continue")])
def test_resumed(store: Store, tmp_path: Path, strategy: str, resume_run: str) -> None:
    # Under fsdp Lightning reads the checkpoint only after the logger has met the Trainer.
    for steps in (2, 4):
        arguments = [store.uri, strategy, steps, resume_run]
        found = values(run_ranks(resumed, 2, args=arguments, cwd=tmp_path, warnings_as_errors=False))
    runs = store.runs("ranks")
    assert len(runs) == (1 if resume_run == "continue" else 2)
    first, last = runs[0].info.run_id, runs[-1].info.run_id
    assert {each["after"] for each in found} == {last}
    tags = store.tags(last)
    assert tags["lightning_air.resumed_from.run_id"] == first
    assert tags["lightning_air.resumed_from.step"] == "2"
    assert store.steps(last, "loss") == ([0, 1, 2, 3] if resume_run == "continue" else [2, 3])
    assert {run.info.status for run in runs} == {"FINISHED"}


# ---- rank 0 cannot ---------------------------------------------------------------------------------------------------


def cannot_open(strategy: str, uri: str, kind: str) -> str:
    broken = {
        "no server": mock.patch.object(opening, "PATIENCE_SECONDS", 0.2),
        "no disk": mock.patch.object(folder_claim, "FolderLock", side_effect=OSError(30, "Read-only file system")),
        "no permission": mock.patch.object(
            MlflowClient, "get_experiment_by_name", side_effect=RuntimeError("not yours")
        ),
    }[kind]
    callbacks = {"callbacks": [ModelCheckpoint()], "enable_checkpointing": True} if kind == "no permission" else {}
    with broken:
        try:
            train(strategy, "http://127.0.0.1:9" if kind == "no server" else uri, **callbacks)
        except Exception as error:  # noqa: BLE001 - that is the test
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("strategy", "kind", "message"),
    [
        ("air ddp", "no server", "does not answer"),
        ("stock ddp", "no disk", "Read-only file system"),
        ("air ddp", "no permission", "not yours"),  # which ModelCheckpoint has rank 0 find out alone
    ],
)
def test_an_error_of_rank_0_is_one_of_all(store: Store, strategy: str, kind: str, message: str) -> None:
    found = values(
        run_ranks(cannot_open, 2, args=[strategy, store.uri, kind], warnings_as_errors=False, timeout_seconds=60)
    )
    assert all(message in each for each in found), found
    if kind != "no permission":
        assert "Rank 0 cannot open the run" in found[1]


# ---- a rank that dies ------------------------------------------------------------------------------------------------


def one_fails(uri: str) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 2:
                raise OSError("rank 1 is out of disk")

    train("air ddp", uri, max_steps=8, callbacks=[Fails()])


def one_is_terminated(uri: str) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    train("air ddp", uri, max_steps=10_000, callbacks=[Ends()])


def test_sigterm_to_another_rank(store: Store) -> None:
    results = run_ranks(one_is_terminated, 2, args=[store.uri], warnings_as_errors=False)
    assert [each.exitcode for each in results] == [143, 143]
    assert store.only_run("ranks").info.status == "KILLED"


def test_an_error_of_another_rank(store: Store) -> None:
    results = run_ranks(one_fails, 2, args=[store.uri], warnings_as_errors=False)
    assert all("rank 1 is out of disk" in str(each.error) for each in results)
    run = store.only_run("ranks")
    assert run.info.status == "FAILED"
    assert store.steps(run.info.run_id, "loss")[:1] == [0]
