"""A failure between two runs reaches the other ranks too, and every rank goes through the same failures in order."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_air import AirStrategy
from lightning_air.strategy.process_group import wait_until
from lightning_air.strategy.world import current_world
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader


class FailsBetween(Regression):
    """Raises on one rank, at one place around the test that follows a fit."""

    def __init__(self, where: str, rank: int = 1) -> None:
        super().__init__()
        self.where = where
        self.rank = rank
        self.num_configured = 0

    def _maybe(self, where: str) -> None:
        if where == self.where and self.trainer.global_rank == self.rank:
            raise ValueError(f"boom in {where}")

    def on_train_end(self) -> None:
        self._maybe("on_train_end")

    def on_fit_end(self) -> None:
        self._maybe("on_fit_end")

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self._maybe("teardown")

    def configure_callbacks(self) -> list[Callback]:
        self.num_configured += 1
        if self.num_configured == 2:
            self._maybe("configure_callbacks")
        return []

    def setup(self, stage: str) -> None:
        if stage == "test":
            self._maybe("setup")


class TeardownFails(TorchCheckpointIO):
    """As the checkpoints' end does when an upload has failed, here on one rank."""

    is_to_fail = False

    def teardown(self) -> None:
        if self.is_to_fail:
            self.is_to_fail = False
            raise ValueError("boom in the IO's teardown")


@dataclass
class Ending:
    error: str
    seconds: float


def wait_for_a_post() -> None:
    world = current_world()
    assert world is not None
    store = dist.PrefixStore(f"failure/{world.num_failures}", world.store)
    wait_until(lambda: store.check(["first"]), seconds=5)


def fit_then_test(where: str, rank: int, module: LightningModule, trainers: tuple[Trainer, Trainer]) -> Ending:
    fitting, testing = trainers
    batches = loader(fitting.world_size, fitting.global_rank)
    started = time.monotonic()
    try:
        fitting.fit(module, batches, batches)
        if fitting.global_rank != rank and where != "setup":
            wait_for_a_post()  # over gloo nothing ends a collective that has begun but the end of a process
        testing.test(module, batches, verbose=False)
    except (ValueError, RuntimeError) as error:
        ending = Ending(f"{type(error).__name__}: {error}", time.monotonic() - started)
        if fitting.global_rank == rank:
            time.sleep(3)  # the others are not to be saved by the end of this process
        return ending
    raise AssertionError("nobody has failed")


def fail_between(where: str, rank: int, own_trainers: bool) -> Ending:
    io = TeardownFails()

    def trainer() -> Trainer:
        callbacks: list[Callback] = [OnExceptionCheckpoint(Path.cwd() / "saved")]  # alone it would wait for the others
        return Trainer(
            **fast_trainer_kwargs(
                Path.cwd(),
                strategy=AirStrategy(timeout=20),
                callbacks=callbacks,
                plugins=[io],
                enable_checkpointing=True,
                use_distributed_sampler=False,
            )
        )

    first = trainer()
    io.is_to_fail = where == "the IO's teardown" and first.global_rank == rank
    return fit_then_test(where, rank, FailsBetween(where, rank), (first, trainer() if own_trainers else first))


BETWEEN = ["on_train_end", "on_fit_end", "teardown", "the IO's teardown", "configure_callbacks", "setup"]


@pytest.mark.parametrize(
    ("where", "rank", "own_trainers"),
    [*((where, 1, False) for where in BETWEEN), ("on_fit_end", 0, False), ("configure_callbacks", 1, True)],
)
def test_a_failure_between_two_runs_meets_the_others_in_the_second(where: str, rank: int, own_trainers: bool) -> None:
    results = run_ranks(fail_between, 2, args=(where, rank, own_trainers), warnings_as_errors=False)
    endings = values(results)
    healthy, failing = endings[1 - rank], endings[rank]
    assert failing.error == f"ValueError: boom in {where}"
    said = f"RuntimeError: rank {rank} (node 0, local rank {rank}) failed first: ValueError: boom in {where}"
    assert healthy.error.splitlines()[0] == said
    # They do not begin to wait for it, unless it fails when all have begun; then gloo ends them with its process.
    assert healthy.seconds < failing.seconds + (2 if where != "setup" else 6)


def fail_then_run_again(where: str) -> list[str]:
    """Every rank goes through one failure, in whichever run; then all of them train, and one fails again."""
    trainer = Trainer(
        **fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(timeout=20), use_distributed_sampler=False)
    )
    ending = fit_then_test(where, 1, FailsBetween(where), (trainer, trainer))
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(Regression(), batches, batches)
    healthy = trainer.state.finished
    again = FailsBetween("setup")
    try:
        trainer.test(again, batches, verbose=False)
    except (ValueError, RuntimeError) as error:
        return [ending.error, str(healthy), str(error)]
    raise AssertionError("nobody has failed again")


@pytest.mark.parametrize("where", ["on_train_end", "on_fit_end", "configure_callbacks"])
def test_after_a_failure_between_two_runs_the_ranks_hear_each_other_again(where: str) -> None:
    healthy, failing = values(run_ranks(fail_then_run_again, 2, args=(where,), warnings_as_errors=False))
    assert failing == [f"ValueError: boom in {where}", "True", "boom in setup"]
    assert healthy[:2] == [
        f"RuntimeError: rank 1 (node 0, local rank 1) failed first: ValueError: boom in {where}",
        "True",
    ]
    assert healthy[2].startswith("rank 1 (node 0, local rank 1) failed first: ValueError: boom in setup")


class AsksForAStop(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            trainer.strategy.request_stop("enough")


def stop_then_fail(where: str) -> tuple[str, Ending]:
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(timeout=20),
            callbacks=[AsksForAStop()],
            use_distributed_sampler=False,
            max_epochs=1000,
        )
    )
    batches = loader(trainer.world_size, trainer.global_rank)
    module = FailsBetween(where)
    with contextlib.suppress(SIGTERMException):
        trainer.fit(module, batches, batches)
    stop = trainer.strategy.stop
    trainer.fit = lambda *_: None  # type: ignore[method-assign]
    return stop.reason, fit_then_test(where, 1, module, (trainer, trainer))


@pytest.mark.parametrize("where", ["configure_callbacks", "setup"])
def test_a_stop_of_one_run_silences_no_failure_of_the_next(where: str) -> None:
    for rank, (reason, ending) in enumerate(values(run_ranks(stop_then_fail, 2, args=(where,)))):
        assert reason == "enough"
        assert f"ValueError: boom in {where}" in ending.error
        assert ("failed first" in ending.error) == (rank == 0)
        assert ending.seconds < 8


class FailsAtOnce(Callback):
    def on_train_start(self, *_: Any) -> None:
        raise ValueError("the user's own error")


def test_callbacks_may_go_on_to_a_trainer_of_another_strategy() -> None:
    def trainer(strategy: Any, callbacks: list[Callback]) -> Trainer:
        return Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=strategy, callbacks=callbacks))

    first = trainer(AirStrategy(), [])
    first.fit(Regression(), loader(), loader())
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="the user's own error"):
        trainer("auto", [*first.callbacks, FailsAtOnce()]).fit(Regression(), loader(), loader())
