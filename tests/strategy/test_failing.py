"""A rank that raises ends the others soon, with its error in their message, wherever they are."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_air import AirStrategy
from tests.kit.points import reach
from tests.kit.ranks import run_ranks
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader

# What the docstring of lightning_air/strategy/failure.py promises, and the time to start and train a little.
DEADLINE_SECONDS = 31 + 15


class FailsOn(Callback):
    """Raises on one rank, at one place; the others go on and meet it in a collective."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank = rank
        self.where = where

    def _maybe(self, where: str, trainer: Trainer) -> None:
        if where == self.where and trainer.global_rank == self.rank:
            reach("before raising")
            raise ValueError(f"boom in {where}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._maybe("setup", trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self._maybe("training", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._maybe("validation", trainer)


class FailsInEvaluation(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.3)  # rank 0 has minutes of them to go
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("boom in predict")
        return batch[0]


def predict() -> None:
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(), use_distributed_sampler=False))
    trainer.predict(FailsInEvaluation(), loader(batch_size=1))


def test_a_rank_in_a_prediction_learns_of_it_at_its_next_batch() -> None:
    healthy, failing = run_ranks(predict, 2)
    assert "ValueError: boom in predict" in (failing.error or "")
    assert "RuntimeError: rank 1 (node 0, local rank 1) failed first: ValueError: boom" in (healthy.error or "")
    assert healthy.seconds < 15


def fit_saving_on_exception(sharding: str) -> None:
    """A stock callback that saves, together with all ranks, when this rank alone has failed."""
    saver = ModelCheckpoint(dirpath=Path.cwd() / "saved", save_on_exception=True, every_n_train_steps=1000)
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(sharding),
            use_distributed_sampler=False,
            callbacks=[saver, FailsOn(1, "training")],
            enable_checkpointing=True,
            max_epochs=20,
        )
    )
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_callback_that_saves_on_exception_hangs_nobody(sharding: str) -> None:
    healthy, failing = run_ranks(fit_saving_on_exception, 2, args=(sharding,), warnings_as_errors=False)
    assert "ValueError: boom in training" in (failing.error or "")
    assert "rank 1 (node 0, local rank 1) failed first: ValueError: boom in training" in (healthy.error or "")
    assert max(healthy.seconds, failing.seconds) < DEADLINE_SECONDS


class FailsBuilding(Regression):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def setup(self, stage: str) -> None:
        if self.where == "setup" and self.global_rank == 1:
            raise ValueError("boom in setup")

    def configure_model(self) -> None:
        if self.where == "configure_model" and self.global_rank == 1:
            raise ValueError("boom in configure_model")


def fit_failing_early(sharding: str, where: str) -> None:
    callbacks: list[Callback] = [OnExceptionCheckpoint(Path.cwd() / "saved")]
    strategy = AirStrategy(sharding)
    trainer = Trainer(
        **fast_trainer_kwargs(Path.cwd(), strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
    )
    trainer.fit(FailsBuilding(where), loader())


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("where", ["setup", "configure_model"])
def test_a_callback_that_saves_on_an_exception_before_training_hangs_nobody(sharding: str, where: str) -> None:
    healthy, failing = run_ranks(fit_failing_early, 2, args=(sharding, where), warnings_as_errors=False)
    assert f"ValueError: boom in {where}" in (failing.error or "")
    assert f"failed first: ValueError: boom in {where}" in (healthy.error or "")
    assert max(healthy.seconds, failing.seconds) < DEADLINE_SECONDS


class CannotBeShown(Exception):  # noqa: N818 - what a user may do
    def __str__(self) -> str:
        raise RuntimeError("no text")


class RaisesWhatCannotBeShown(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            raise CannotBeShown


def fit_raising_what_cannot_be_shown() -> None:
    try:
        fit("ddp", None, (RaisesWhatCannotBeShown(),))
    except CannotBeShown:
        raise ValueError("raised what cannot be shown") from None


def test_an_exception_without_a_text_is_announced_by_its_type() -> None:
    healthy, failing = run_ranks(fit_raising_what_cannot_be_shown, 2)
    assert "raised what cannot be shown" in (failing.error or "")
    assert "failed first: CannotBeShown: (its text cannot be shown" in (healthy.error or "")


class UnusedParameter(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


def fit_with_unused_parameter() -> None:
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(), use_distributed_sampler=False))
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(UnusedParameter(), batches, batches)


def test_the_advice_about_unused_parameters_keeps_the_strategy() -> None:
    for result in run_ranks(fit_with_unused_parameter, 2):
        assert "AirStrategy(find_unused_parameters=True)" in (result.error or "")
        assert "DDPStrategy(find_unused_parameters" not in (result.error or "")


def fit(sharding: str, failing: FailsOn | None, extra: tuple[Callback, ...] = ()) -> None:
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(sharding),
            use_distributed_sampler=False,
            callbacks=[*([failing] if failing else []), *extra],
            max_epochs=20,
        )
    )
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)


@pytest.mark.parametrize("where", ["setup", "training", "validation"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_with_the_first_error_in_their_message(sharding: str, rank: int, where: str) -> None:
    started = time.monotonic()
    results = run_ranks(fit, 2, args=(sharding, FailsOn(rank, where)))
    assert time.monotonic() - started < DEADLINE_SECONDS
    assert f"ValueError: boom in {where}" in (results[rank].error or "")
    assert "failed first" not in (results[rank].error or "")
    other = results[1 - rank].error or ""
    assert f"rank {rank} (node 0, local rank {rank}) failed first: ValueError: boom in {where}" in other


class BusyOutsideOfCollectives(Callback):
    """Rank 1 computes for a while, and would train on alone for long if nobody told it."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                time.sleep(0.01)


def test_a_rank_that_is_not_in_a_collective_learns_of_it_at_its_next_batch() -> None:
    results = run_ranks(fit, 2, args=("ddp", FailsOn(0, "training"), (BusyOutsideOfCollectives(),)))
    assert "RuntimeError: rank 0 (node 0, local rank 0) failed first: ValueError: boom" in (results[1].error or "")


def test_a_killed_rank_ends_the_others_over_gloo() -> None:
    results = run_ranks(fit, 2, args=("ddp", FailsOn(1, "training")), signals={(1, "before raising"): signal.SIGKILL})
    assert results[1].exitcode == -signal.SIGKILL
    assert "RuntimeError" in (results[0].error or "")
    assert results[0].seconds < DEADLINE_SECONDS


def test_every_rank_raising_the_same_is_said_once() -> None:
    results = run_ranks(fit_and_fail_everywhere, 2)
    for result in results:
        assert "ValueError: the same everywhere" in (result.error or "")
        assert "failed first" not in (result.error or "")


class FailsEverywhere(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        raise ValueError("the same everywhere")


def fit_and_fail_everywhere() -> None:
    fit("ddp", None, (FailsEverywhere(),))


SCRIPT = """
    import os, sys, atexit
    import torch.distributed as dist
    def show():
        print(f"at exit, rank {os.environ.get('LOCAL_RANK')}: group alive: {dist.is_initialized()}", flush=True)
    atexit.register(show)
    sys.path.insert(0, os.environ["PROJECT"])
    from lightning_air import AirStrategy
    from lightning.pytorch import Trainer
    from tests.strategy.test_failing import FailsOn
    from tests.strategy.training import Regression, loader
    from tests.kit.trainers import fast_trainer_kwargs
    failing = [FailsOn(1, "training")] if "fail" in sys.argv else []
    trainer = Trainer(**fast_trainer_kwargs(".", strategy=AirStrategy(), devices=2, max_epochs=3, callbacks=failing))
    trainer.fit(Regression(), loader(), loader())
    print(f"rank {trainer.global_rank} of {trainer.world_size} done", flush=True)
"""


def run_script(tmp_path: Path, *arguments: str) -> tuple[int, str, float]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    project = str(Path(__file__).parents[2])
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PROJECT": project, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def test_ranks_started_by_lightnings_launcher_train_and_the_group_is_destroyed_at_exit(tmp_path: Path) -> None:
    code, output, _ = run_script(tmp_path)
    assert code == 0, output
    for rank in (0, 1):
        assert f"rank {rank} of 2 done" in output
        assert f"at exit, rank {rank}: group alive: False" in output


def test_ranks_started_by_lightnings_launcher_fail_together(tmp_path: Path) -> None:
    code, output, seconds = run_script(tmp_path, "fail")
    assert code != 0
    assert "rank 1 (node 0, local rank 1) failed first: ValueError: boom in training" in output
    assert seconds < 60
