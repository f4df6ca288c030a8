"""SIGTERM on any rank ends all ranks at the same step; a request does the same; nothing touches the device."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_air import AirStrategy
from tests.kit.points import reach
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader

STEP_SECONDS = 0.02


class Watch(Callback):
    """Slow steps, named points, and what `on_exception` sees."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        time.sleep(STEP_SECONDS)
        reach(f"step:{trainer.global_step}")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        time.sleep(STEP_SECONDS)
        reach(f"validation:{trainer.global_step}:{args[2]}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.seen = {
            "exception": type(exception).__name__,
            "step": trainer.global_step,
            "validating": trainer.validating,
            "batch": trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready,
            "stop": trainer.strategy.stop,
        }
        dist.barrier()  # a checkpoint would be saved here by all ranks together


def fit_until_stopped(sharding: str, trainer_options: dict[str, Any], request_at: int | None = None) -> dict[str, Any]:
    watch = Watch()
    callbacks: list[Callback] = [watch]
    if request_at is not None:
        callbacks.append(RequestStop(request_at))
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(sharding),
            use_distributed_sampler=False,
            callbacks=callbacks,
            num_sanity_val_steps=0,
            **{"max_epochs": 1000, **trainer_options},
        )
    )
    batches = loader(trainer.world_size, trainer.global_rank, batch_size=4)
    try:
        trainer.fit(Regression(), batches, batches)
    except SIGTERMException as exception:
        watch.seen["exit code"] = exception.code
    return watch.seen


class RequestStop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            trainer.strategy.request_stop("GPU 3 is too hot")


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_on_one_rank_ends_all_at_the_same_step(sharding: str, rank: int) -> None:
    results = run_ranks(
        fit_until_stopped, 2, args=(sharding, {"limit_val_batches": 0}), signals={(rank, "step:5"): signal.SIGTERM}
    )
    seen = values(results)
    assert [one["exception"] for one in seen] == ["SIGTERMException"] * 2
    assert seen[0]["step"] == seen[1]["step"]
    # About a second of steps, and one or two more until the answer is read; never a minute of them.
    assert 5 <= seen[0]["step"] < 5 + 10 / STEP_SECONDS
    assert [(one["stop"].global_rank, one["stop"].reason) for one in seen] == [(rank, "SIGTERM")] * 2
    assert [one["exit code"] for one in seen] == [143, 143]
    said = f"Training stops after step {seen[0]['step']}: SIGTERM on rank {rank}."
    assert [result.output.count(said) for result in results] == [1, 0]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_sigterm_during_validation_ends_all_at_the_same_validation_batch(sharding: str) -> None:
    options = {"val_check_interval": 2, "limit_val_batches": 1.0, "max_epochs": 1000}
    results = run_ranks(fit_until_stopped, 2, args=(sharding, options), signals={(1, "validation:2:1"): signal.SIGTERM})
    first, second = values(results)
    assert first["exception"] == second["exception"] == "SIGTERMException"
    assert (first["step"], first["validating"], first["batch"]) == (
        second["step"],
        second["validating"],
        second["batch"],
    )
    assert first["stop"].global_rank == 1


def test_one_rank_alone_stops_after_its_batch() -> None:
    results = run_ranks(
        fit_until_stopped, 1, args=("ddp", {"limit_val_batches": 0}), signals={(0, "step:5"): signal.SIGTERM}
    )
    (seen,) = values(results)
    assert (seen["exception"], seen["step"], seen["stop"].reason) == ("SIGTERMException", 5, "SIGTERM")
    assert seen["exit code"] == 143
    assert "Training stops after step 5: SIGTERM on rank 0." in results[0].output


class SlowEvaluation(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_SECONDS)
        reach(f"batch:{batch_idx}")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_SECONDS)
        reach(f"batch:{batch_idx}")
        return batch[0]


def evaluate_until_stopped(function: str) -> int | str | None:
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy()))
    try:
        getattr(trainer, function)(SlowEvaluation(), loader())
    except SIGTERMException as exception:
        return exception.code
    return "not stopped"


@pytest.mark.parametrize("function", ["test", "predict"])
def test_sigterm_in_an_evaluation_ends_it_with_the_same_status(function: str) -> None:
    results = run_ranks(evaluate_until_stopped, 1, args=(function,), signals={(0, "batch:3"): signal.SIGTERM})
    assert values(results) == [143]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_callback_can_ask_for_a_stop_with_a_reason(world_size: int) -> None:
    seen = values(run_ranks(fit_until_stopped, world_size, args=("ddp", {"limit_val_batches": 0}, 3)))
    assert len({one["step"] for one in seen}) == 1
    assert {one["stop"].reason for one in seen} == {"GPU 3 is too hot"}
    assert {one["stop"].global_rank for one in seen} == {world_size - 1}


def test_asking_without_a_fit_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"No fit is running that could be stopped \('why'\)"):
        AirStrategy().request_stop("why")


class SignalAtTheEnd(Callback):
    """SIGTERM on the last rank when its fit is over but for the end."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            signal.raise_signal(signal.SIGTERM)


class SignalInTeardown(TorchCheckpointIO):
    """SIGTERM on the last rank while it waits for its uploads."""

    def __init__(self) -> None:
        self.num_signals = int(os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1))

    def teardown(self) -> None:
        if self.num_signals:
            self.num_signals -= 1
            signal.raise_signal(signal.SIGTERM)


def outcomes(trainer: Trainer, module: LightningModule, functions: list[str]) -> list[str]:
    """How one run after the other ends, as long as the user goes on."""
    batches = loader(trainer.world_size, trainer.global_rank)
    found = []
    for function in functions:
        options = {"val_dataloaders": batches} if function == "fit" else {}
        try:
            getattr(trainer, function)(module, batches, **options)
        except SIGTERMException as exception:
            found.append(f"{function} stopped with {exception.code}")
        else:
            found.append(f"{function} went well")
    return found


def fit_then_test(where: str) -> list[str]:
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(),
            use_distributed_sampler=False,
            callbacks=[SignalAtTheEnd()] if where == "on_train_end" else [],
            plugins=[SignalInTeardown()] if where == "teardown" else [],
        )
    )
    found = outcomes(trainer, Regression(), ["fit", "test", "predict"])
    assert trainer.global_step > 0
    return found


@pytest.mark.parametrize("where", ["on_train_end", "teardown"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_at_the_end_of_a_fit_stops_all_ranks_before_what_follows(world_size: int, where: str) -> None:
    expected = ["fit went well", "test stopped with 143", "predict went well"]
    assert values(run_ranks(fit_then_test, world_size, args=(where,))) == [expected] * world_size


class SignalInTest(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            signal.raise_signal(signal.SIGTERM)


def run_a_test_then_predict() -> list[str]:
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy()))
    return outcomes(trainer, SignalInTest(), ["test", "predict"])


def test_a_stop_that_was_heeded_stops_nothing_else() -> None:
    assert values(run_ranks(run_a_test_then_predict, 1)) == [["test stopped with 143", "predict went well"]]


class FailsInSetup(Regression):
    def setup(self, stage: str) -> None:
        if stage == "validate":
            raise ValueError("no validation")


def stop_fail_and_go_on() -> list[str]:
    trainer = Trainer(
        **fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(), callbacks=[SignalAtTheEnd()], max_epochs=1)
    )
    module = FailsInSetup()
    found = outcomes(trainer, module, ["fit"])
    with pytest.raises(ValueError, match="no validation"):
        trainer.validate(module, loader())
    return found + outcomes(trainer, module, ["test"])


def test_a_stop_is_not_forgotten_for_a_run_that_fails_before_it_can_stop() -> None:
    assert values(run_ranks(stop_fail_and_go_on, 1)) == [["fit went well", "test stopped with 143"]]


def uneven_validation() -> list[int]:
    """Ranks with different numbers of validation batches, as DDP allows them."""
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(),
            use_distributed_sampler=False,
            max_steps=40,
            max_epochs=-1,
            val_check_interval=3,
            num_sanity_val_steps=0,
        )
    )
    batches = loader(2, trainer.global_rank, batch_size=4)
    uneven = loader(2, trainer.global_rank, batch_size=4 + 4 * trainer.global_rank)

    class NoSync(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(STEP_SECONDS)
            counts.append(batch_idx)

    counts: list[int] = []
    trainer.fit(NoSync(), batches, uneven)
    assert trainer.global_step == 40
    return counts


def test_ranks_with_different_numbers_of_validation_batches_still_train() -> None:
    first, second = values(run_ranks(uneven_validation, 2))
    assert len(first) == 2 * len(second) > 0


def cycled_validation() -> int:
    """Fewer batches run than the loaders announce, and differently many on each rank."""
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(), strategy=AirStrategy(), use_distributed_sampler=False, max_epochs=2, num_sanity_val_steps=0
        )
    )

    class NoSync(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(STEP_SECONDS)

    rank = trainer.global_rank
    uneven = [loader(2, rank, batch_size=4 + 4 * rank) for _ in range(2)]
    exchange: list[Any] = []
    trainer.callbacks.append(KeepExchange(exchange))
    trainer.fit(NoSync(), loader(2, rank), CombinedLoader(uneven, "max_size"))
    return exchange[0].num_steps


def test_ranks_exchange_equally_often_whatever_their_loaders_do() -> None:
    first, second = values(run_ranks(cycled_validation, 2))
    assert first == second > 16  # the training batches, and those of the validations


class CountCollectives(Callback):
    """Counts what the training loop itself sends, by what carries it."""

    def __init__(self) -> None:
        self.broadcasts = 0

    def on_train_start(self, *_: Any) -> None:
        broadcast = dist.broadcast

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.broadcasts += 1
            return broadcast(*args, **kwargs)

        dist.broadcast = counting


def count_exchanges(own: bool) -> tuple[int, int]:
    from lightning.pytorch.strategies import DDPStrategy

    counter = CountCollectives()
    strategy = AirStrategy() if own else DDPStrategy(process_group_backend="gloo")
    devices = {} if own else {"devices": 2, "num_nodes": 1}
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=strategy,
            max_steps=100,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[counter],
            **devices,
        )
    )
    exchange: list[Any] = []
    if own:
        trainer.callbacks.append(KeepExchange(exchange))
    trainer.fit(Regression(), torch.utils.data.DataLoader(loader().dataset, batch_size=4))
    return counter.broadcasts, exchange[0].num_exchanges if own else 0


class KeepExchange(Callback):
    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.kept.append(trainer.strategy._loop_stop._exchange)


def test_no_broadcast_per_step_where_stock_lightning_makes_one() -> None:
    """Stock Lightning broadcasts a device tensor before each batch and reads it back."""
    for broadcasts, _ in values(run_ranks(count_exchanges, 2, args=(False,), warnings_as_errors=False)):
        assert broadcasts == 100
    for broadcasts, exchanges in values(run_ranks(count_exchanges, 2, args=(True,), warnings_as_errors=False)):
        assert broadcasts == 0
        assert 1 <= exchanges < 50
