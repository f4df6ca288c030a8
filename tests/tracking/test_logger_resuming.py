"""Attempts: runs that are linked, or one run that goes on; and what a checkpoint carries from one to the next."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_air import AirCheckpoint, AirMLflowLogger, latest_checkpoint
from tests.checkpoint.runs import fit as fit_checkpointing
from tests.checkpoint.runs import make_trainer as make_checkpointing_trainer
from tests.kit.faulty_proxy import FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.strategy.training import loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import At, Exit, Logs, Store, fit, make_logger, make_trainer, new_launch, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")

RESUMED = "lightning_air.resumed_from."


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


def attempt(
    logger: AirMLflowLogger,
    max_steps: int,
    *callbacks: Callback,
    ckpt_path: str | None = None,
    name: str = "",
    dirpath: str | None = "ckpt",
    **options: Any,
) -> str:
    """Train up to a step as a process of its own, and return the last checkpoint."""
    callback = ModelCheckpoint(dirpath, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    with new_launch(name or f"launch{max_steps}"), warned():
        fit(
            logger,
            callback,
            *callbacks,
            module=Logs(float),
            max_epochs=-1,
            max_steps=max_steps,
            ckpt_path=ckpt_path,
            enable_checkpointing=True,
            **options,
        )
    return str(callback._last_checkpoint_saved)


def resumed_tags(store: Store, run_id: str | None) -> dict[str, str]:
    tags = store.tags(str(run_id)).items()
    return {key.removeprefix(RESUMED): value for key, value in tags if key.startswith(RESUMED)}


# ---- linked runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "scheduler"),
    [("TORCHELASTIC_RUN_ID", "torchrun"), ("SERVERLESS_GPU_COMPUTE_ASSOCIATED_JOB_RUN_ID", "databricks")],
)
def test_attempts_of_one_job(store: Store, monkeypatch: pytest.MonkeyPatch, variable: str, scheduler: str) -> None:
    monkeypatch.setenv(variable, "job 7")
    if variable.startswith("TORCHELASTIC"):
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
    loggers = [make_logger(store, "a job") for _ in range(3)]
    path: str | None = None
    for number, logger in enumerate(loggers, start=1):
        if number == 2:
            attempt(make_logger(store, "a job"), 1, name="2")  # another run of the same attempt
        path = attempt(logger, 4 * number, ckpt_path=path, name=str(number))
    tags = [store.tags(logger.run_id) for logger in loggers]
    assert len({logger.run_id for logger in loggers}) == 3
    assert [each["lightning_air.attempt"] for each in tags] == ["1", "2", "3"]
    assert {each["lightning_air.scheduler"] for each in tags} == {scheduler}
    assert {each["lightning_air.job_run_id"] for each in tags} == {"job_7"}
    assert len({each["lightning_air.launch_id"] for each in tags}) == 3
    assert resumed_tags(store, loggers[0].run_id) == {}
    for number in (1, 2):
        found = resumed_tags(store, loggers[number].run_id)
        assert (found["run_id"], found["step"]) == (loggers[number - 1].run_id, str(4 * number))
        assert found["path"].endswith(f"step={4 * number}.ckpt")
    assert store.steps(loggers[2].run_id, "loss") == [8, 9, 10, 11]
    # Another job counts from one.
    monkeypatch.setenv(variable, "job 8")
    other = make_logger(store, "a job")
    attempt(other, 1, name="other")
    assert store.tags(other.run_id)["lightning_air.attempt"] == "1"


def test_attempts_of_a_slurm_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    loggers = [make_logger(store) for _ in range(2)]
    for number, logger in enumerate(loggers):
        attempt(logger, 1, name=str(number), dirpath=f"ckpt{number}")
    assert [store.tags(logger.run_id)["lightning_air.attempt"] for logger in loggers] == ["1", "2"]


def test_outside_of_a_job_there_is_no_ordinal(store: Store) -> None:
    logger = make_logger(store)
    attempt(logger, 2)
    assert "lightning_air.attempt" not in store.tags(logger.run_id)


def test_resumed_from_a_checkpoint_without_us(store: Store) -> None:
    callback = ModelCheckpoint("ckpt", filename="{step}")
    fit(False, callback, max_steps=2, enable_checkpointing=True)
    logger = make_logger(store)
    attempt(logger, 4, ckpt_path=callback.best_model_path)
    found = resumed_tags(store, logger.run_id)
    assert found == {"step": "2", "path": callback.best_model_path}


def test_a_checkpoint_of_ours_without_us(store: Store) -> None:
    path = attempt(make_logger(store), 2)
    with warned():
        trainer = fit(
            False,
            ModelCheckpoint("ckpt", every_n_train_steps=2),
            max_steps=4,
            ckpt_path=path,
            enable_checkpointing=True,
        )
    assert trainer.global_step == 4


def test_weights_only_checkpoints_can_be_tested(store: Store) -> None:
    callback = ModelCheckpoint("ckpt", save_weights_only=True)
    first = make_logger(store)
    fit(first, callback, max_steps=2, enable_checkpointing=True)
    logger = make_logger(store)
    trainer = make_trainer(logger)
    trainer.test(Logs(), loader(), ckpt_path=callback.best_model_path, verbose=False)
    assert store.status(logger.run_id) == "FINISHED"
    assert resumed_tags(store, logger.run_id) == {}  # it resumes nothing


@pytest.mark.parametrize(("strategy", "io"), [("single", "lightning's"), ("single", "ours")])
def test_resumed_from_with_air_checkpoint(store: Store, strategy: str, io: str) -> None:
    loggers = [make_logger(store) for _ in range(2)]
    for number, logger in enumerate(loggers, start=1):
        with warned():
            trainer = make_checkpointing_trainer(
                strategy,
                io,
                AirCheckpoint("run", every="2steps"),
                logger=logger,
                max_steps=4 * number,
                log_every_n_steps=1,
            )
            fit_checkpointing(trainer, Logs(float), ckpt_path="last")
    found = resumed_tags(store, loggers[1].run_id)
    assert (found["run_id"], found["step"]) == (loggers[0].run_id, "4")
    assert found["path"].endswith("step=4.ckpt")
    assert store.steps(loggers[1].run_id, "loss") == [4, 5, 6, 7]
    assert latest_checkpoint("run") is not None


# ---- one run that goes on --------------------------------------------------------------------------------------------


def test_continued_where_it_ended(store: Store) -> None:
    first = make_logger(store)
    path = attempt(first, 6)
    second = make_logger(store, resume_run="continue")
    statuses = At(8, lambda trainer: store.status(trainer.logger.run_id))
    attempt(second, 10, statuses, ckpt_path=path)
    assert second.run_id == first.run_id
    assert len(store.runs("runs")) == 1
    assert statuses.answers == ["RUNNING"]
    assert store.status(first.run_id) == "FINISHED"
    assert store.curve(first.run_id, "loss") == [(step, float(step)) for step in range(10)]
    assert "lightning_air.rolled_back" not in store.tags(first.run_id)
    assert resumed_tags(store, first.run_id)["run_id"] == first.run_id


def test_continued_from_before_where_it_ended(store: Store) -> None:
    first = make_logger(store)
    attempt(first, 10)
    second = make_logger(store, resume_run="continue")
    attempt(second, 6, ckpt_path=str(Path("ckpt/step=4.ckpt").absolute()))
    tag = store.tags(first.run_id)["lightning_air.rolled_back"]
    assert re.fullmatch(r"9->4 at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", tag)
    run = store.run(first.run_id)
    assert run.data.metrics["loss"] == 5.0  # not 9.0, of the part that was abandoned
    assert store.steps(first.run_id, "loss") == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 8, 9, 9]


def test_continued_beyond_where_it_ended(store: Store) -> None:
    first = make_logger(store)
    attempt(first, 6)
    second = make_logger(store, resume_run="continue")
    attempt(second, 10, ckpt_path=str(Path("ckpt/step=4.ckpt").absolute()))
    assert store.tags(first.run_id)["lightning_air.rolled_back"].startswith("5->4 at ")
    assert store.steps(first.run_id, "loss") == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 8, 9]
    assert store.run(first.run_id).data.metrics["loss"] == 9.0


@pytest.mark.parametrize("resume_run", ["continue", "new"])
def test_where_model_checkpoint_asks_for_the_run_first(store: Store, resume_run: Any) -> None:
    # Without a folder it takes one that is named after the run, before any checkpoint is loaded.
    first = make_logger(store, "first")
    path = attempt(first, 4, dirpath=None)
    assert str(first.run_id) in path
    second = make_logger(store, "first", resume_run=resume_run)
    attempt(second, 8, ckpt_path=path, dirpath=None)
    runs = store.runs("first")
    if resume_run == "continue":
        assert [run.info.run_id for run in runs] == [first.run_id]
        assert store.steps(first.run_id, "loss") == list(range(8))
    else:
        assert [run.info.run_id for run in runs] == [first.run_id, second.run_id]
        assert resumed_tags(store, second.run_id)["run_id"] == first.run_id
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_run_to_continue_that_is_deleted(store: Store) -> None:
    first = make_logger(store)
    path = attempt(first, 4)
    store.client.delete_run(first.run_id)
    for dirpath in ("other", None):
        second = make_logger(store, resume_run="continue")
        with warned() as found, new_launch("second"):
            fit(
                second,
                ModelCheckpoint(dirpath, every_n_train_steps=2),
                module=Logs(float),
                max_epochs=-1,
                max_steps=6,
                ckpt_path=path,
                enable_checkpointing=True,
            )
        assert f"The checkpoint names the run {first.run_id}, which" in found.text
        assert "it is not used" in found.text
        assert store.status(second.run_id) == "FINISHED"
        assert store.steps(second.run_id, "loss") == [4, 5]


def test_the_parameters_and_checkpoints_of_a_run_that_goes_on(store: Store) -> None:
    first = make_logger(store)
    first.log_hyperparams({"lr": 0.1, "seed": 1})
    path = attempt(first, 4, At(3, lambda trainer: trainer.logger.session.background.flush(5)))
    second = make_logger(store, resume_run="continue")
    second.log_hyperparams({"lr": 0.2, "seed": 1, "more": 2})
    attempt(second, 8, ckpt_path=path)
    run = store.run(first.run_id)
    assert run.data.params == {"lr": "0.1", "seed": "1", "more": "2"}
    assert run.data.tags["param_changed/lr"] == "0.1 -> 0.2"
    names = [name for name in store.artifacts(first.run_id) if name.endswith("hyperparameters.yaml")]
    assert len(names) == 2  # each attempt's
    manifest = store.artifact(first.run_id, "manifest")
    assert re.findall(r'"step": (\d+)', manifest) == ["2", "4", "6", "8"]


def test_continued_from_a_checkpoint_saved_by_hand_after_training(store: Store) -> None:
    first = make_logger(store)
    trainer = fit(first, module=Logs(float), max_steps=4, max_epochs=-1)
    trainer.save_checkpoint("by_hand.ckpt")
    second = make_logger(store, resume_run="continue")
    fit(second, module=Logs(float), max_steps=6, max_epochs=-1, ckpt_path="by_hand.ckpt")
    assert second.run_id == first.run_id
    assert store.steps(first.run_id, "loss") == list(range(6))


def test_continued_in_the_same_process(store: Store) -> None:
    logger = make_logger(store)
    path = attempt(logger, 4, name="same")
    attempt(logger, 8, ckpt_path=path, name="same")
    assert store.steps(logger.run_id, "loss") == list(range(8))
    assert len(store.runs("runs")) == 1


def test_requeued_with_the_run_of_the_launch(store: Store, monkeypatch: pytest.MonkeyPatch, exit_: Exit) -> None:
    run_id = store.client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    path = attempt(make_logger(store, None), 4)
    exit_.run()
    assert store.status(run_id) == "FINISHED"
    statuses = At(6, lambda _: store.status(run_id))
    attempt(make_logger(store, None), 8, statuses, ckpt_path=path)
    exit_.run()
    assert statuses.answers == ["RUNNING"]
    assert store.curve(run_id, "loss") == [(step, float(step)) for step in range(8)]
    assert store.status(run_id) == "FINISHED"


# ---- what the server had not taken -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # MLflow's own tries would outlive the test
    with faulty_proxy(server.url) as made:
        yield made


@pytest.mark.parametrize(("resume_run", "dirpath"), [("new", None), ("continue", "ckpt"), ("continue", None)])
def test_a_checkpoint_carries_what_the_server_has_not_taken(
    proxy: FaultyProxy, server: MlflowServer, resume_run: Any, dirpath: str | None
) -> None:
    store = Store(proxy.url)
    first = make_logger(store, "tail", close_timeout=0.3)
    path = attempt(first, 6, At(2, lambda _: proxy.refuse()), dirpath=dirpath)
    shutil.rmtree("spool")  # the node's disk dies with the node
    assert len([point for point in server.points_of(first.run_id) if point.key == "loss"]) <= 2
    proxy.accept()
    second = make_logger(store, "tail", resume_run=resume_run)
    attempt(second, 8, ckpt_path=path, dirpath=dirpath)
    assert (second.run_id == first.run_id) is (resume_run == "continue")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and len(_losses(server, first.run_id)) < 5:
        time.sleep(0.02)
    # Lightning logs a batch after the callbacks have seen it, so that of the save itself is in no checkpoint.
    left = list(range(5))
    assert _losses(server, first.run_id) == ([*left, 6, 7] if resume_run == "continue" else left)
    assert resume_run == "continue" or _losses(server, second.run_id) == [6, 7]


def _losses(server: MlflowServer, run_id: str | None) -> list[int]:
    return [point.step for point in server.points_of(str(run_id)) if point.key == "loss"]
