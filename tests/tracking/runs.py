"""Trainer runs with `AirMLflowLogger`, for its tests: a small model that logs, a store, and what became of it.

All runs are in the test's own process, against a real SQLite store, but where a test says otherwise.
"""

import os
import re
import signal
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from mlflow import MlflowClient
from mlflow.entities import Run
from torch import Tensor

from lightning_air import AirMLflowLogger
from lightning_air.tracking import artifacts, attempts, ending
from lightning_air.tracking import logger as logger_module
from lightning_air.tracking.points import Point
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import loader
from tests.tracking.local_store import local_client

STEPS_PER_EPOCH = 8


# ---- a store ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """A tracking server or database, and what tests ask it."""

    uri: str

    @classmethod
    def new(cls, factory: pytest.TempPathFactory) -> "Store":
        """Return a new SQLite store, with the default experiment only."""
        return cls(local_client(factory)._tracking_client.tracking_uri)

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.uri)

    def run(self, run_id: str) -> Run:
        return self.client.get_run(run_id)

    def runs(self, name: str) -> list[Run]:
        """Return an experiment's runs, the oldest first."""
        experiment = self.client.get_experiment_by_name(name)
        assert experiment is not None, f"there is no experiment {name!r}"
        found = self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
        return list(found)

    def only_run(self, name: str) -> Run:
        [run] = self.runs(name)
        return run

    def status(self, run_id: str) -> str:
        return self.run(run_id).info.status

    def tags(self, run_id: str) -> dict[str, str]:
        return dict(self.run(run_id).data.tags)

    def points(self, run_id: str) -> list[Point]:
        """Return every point that is stored of a run, in the order of keys and steps, with those that stand twice."""
        with closing(sqlite3.connect(self.uri.removeprefix("sqlite:///"), timeout=30)) as connection:
            query = "SELECT key, value, timestamp, step FROM metrics WHERE run_uuid = ? ORDER BY key, step, timestamp"
            return [Point(*row) for row in connection.execute(query, [run_id]).fetchall()]

    def curve(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """Return a metric's points as (step, value)."""
        return [(point.step, point.value) for point in self.points(run_id) if point.key == key]

    def steps(self, run_id: str, key: str) -> list[int]:
        return [step for step, _ in self.curve(run_id, key)]

    def artifacts(self, run_id: str) -> list[str]:
        """Return the paths of a run's artifacts; straight from the disk, since MLflow's own way leaves threads."""
        root = Path(self.run(run_id).info.artifact_uri)
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    def artifact(self, run_id: str, pattern: str) -> str:
        """Return the text of the only artifact whose path matches."""
        [path] = [path for path in self.artifacts(run_id) if re.search(pattern, path)]
        return Path(self.run(run_id).info.artifact_uri, path).read_text()


# ---- a model, a logger, a fit ----------------------------------------------------------------------------------------


class Logs(LightningModule):
    """One weight. Logs `loss` in each batch, as given for each global step or as it is; what else, as told."""

    def __init__(
        self, losses: Callable[[int], float] | None = None, others: Callable[[int], Mapping[str, Any]] = lambda _: {}
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.losses, self.others = losses, others

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.weight * batch[0][0, 0] - batch[1][0, 0]).square().sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, step = self.loss(batch), self.global_step
        self.log("loss", loss.detach() if self.losses is None else torch.tensor(self.losses(step)))
        for name, value in self.others(step).items():
            self.log(name, value)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class At(Callback):
    """Does something at the end of the batch with which so many steps are done."""

    def __init__(self, step: int, action: Callable[[Trainer], object]) -> None:
        self.step, self.action = step, action
        self.answers: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.answers.append(self.action(trainer))

    @property
    def state_key(self) -> str:
        return f"At{id(self)}"


def make_logger(store: Store, experiment_name: str | None = "runs", **options: Any) -> AirMLflowLogger:
    """Return a logger whose spool lies in the current folder, and which does not copy the output."""
    defaults = {"tracking_uri": store.uri, "spool_dir": "spool", "log_console": False}
    return AirMLflowLogger(experiment_name, **{**defaults, **options})


def make_trainer(logger: Logger | Sequence[Logger], *callbacks: Callback, **options: Any) -> Trainer:
    defaults = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "max_epochs": 1, "limit_val_batches": 0}
    return Trainer(
        **fast_trainer_kwargs(Path.cwd(), **{**defaults, "logger": logger, "callbacks": list(callbacks), **options})
    )


def fit(
    logger: Logger | Sequence[Logger],
    *callbacks: Callback,
    module: LightningModule | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Trainer:
    """Train on 8 batches per epoch, one epoch by default, and return the Trainer."""
    trainer = make_trainer(logger, *callbacks, **options)
    with warnings.catch_warnings():
        # The samples of these runs do not matter.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        trainer.fit(module or Logs(), loader(trainer.world_size, trainer.global_rank), loader(), ckpt_path=ckpt_path)
    return trainer


# ---- a process, as far as it matters ---------------------------------------------------------------------------------


class Exit(list[Callable[[], object]]):
    """What the loggers of this test want to do when the process ends; it has not ended until `run` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        mocked = SimpleNamespace(register=self.append, unregister=self._forget)
        monkeypatch.setattr(logger_module, "atexit", mocked)

    def _forget(self, call: Callable[[], object]) -> None:
        self[:] = [each for each in self if each != call]

    def run(self, crash: BaseException | None = None) -> None:
        """End the process, maybe with an exception that nobody has caught."""
        if crash is not None:
            sys.last_value = crash
        try:
            while self:
                self.pop()()  # the last one first, as atexit does
        finally:
            if crash is not None:
                del sys.last_value


@contextmanager
def new_launch(name: str) -> Iterator[None]:
    """Have the code inside take itself for another process than that before, as far as runs tell."""
    functions: tuple[Any, ...] = (
        attempts.attempt_ordinal,
        attempts.attempt_tags,
        artifacts.attempt_folder,
        ending.ending_now,
    )
    before = [function.__defaults__ for function in functions]
    for function in functions:
        defaults = function.__defaults__ or ()
        function.__defaults__ = (*defaults[:-1], f"{name}-{'0' * 24}")
    try:
        yield
    finally:
        for function, defaults in zip(functions, before, strict=True):
            function.__defaults__ = defaults


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Put the handlers back: Lightning leaves Ctrl-C ignored once it has been pressed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def press_ctrl_c(_: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate(_: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Warned:
    """What was warned of inside of `warned`."""

    messages: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.messages)


@contextmanager
def warned() -> Iterator[Warned]:
    """Collect warnings instead of failing for them; also those of other threads."""
    found = Warned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.messages += [str(each.message) for each in caught]
