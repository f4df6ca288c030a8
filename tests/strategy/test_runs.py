"""One process makes several runs, with several Trainers, in several process groups: each finds what it needs."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_air import AirStrategy
from lightning_air.strategy.world import current_world
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader


def new_trainer(sharding: str = "ddp") -> Trainer:
    strategy = AirStrategy(sharding, timeout=20, join_timeout=10)
    return Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=strategy, use_distributed_sampler=False))


def fit(trainer: Trainer) -> None:
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)


def evaluate(trainer: Trainer) -> float:
    batches = loader(trainer.world_size, trainer.global_rank)
    (metrics,) = trainer.validate(Regression(), batches, verbose=False)
    return float(metrics["val_loss"])


def run_in_two_groups(own_trainers: bool) -> list[int]:
    first = new_trainer()
    fit(first)
    dist.destroy_process_group()  # `first` lives on, and what it holds
    second = new_trainer() if own_trainers else first
    evaluate(second)
    return [trainer.world_size for trainer in (first, second)]


@pytest.mark.parametrize("own_trainers", [False, True], ids=["the same Trainer", "another one"])
def test_after_the_group_was_destroyed_a_trainer_makes_another(own_trainers: bool) -> None:
    assert values(run_ranks(run_in_two_groups, 2, args=(own_trainers,))) == [[2, 2]] * 2


def count_what_is_open() -> tuple[int, int, int]:
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def run_with_many_strategies() -> tuple[list[tuple[int, int, int]], list[str]]:
    counts = []
    for _ in range(4):
        trainer = new_trainer()
        evaluate(trainer)
        del trainer
        counts.append(count_what_is_open())
    return counts, [thread.name for thread in threading.enumerate() if thread.name.startswith("air-")]


def test_a_further_strategy_opens_no_group_socket_or_thread() -> None:
    for counts, threads in values(run_ranks(run_with_many_strategies, 2)):
        groups, descriptors, tasks = zip(*counts, strict=True)
        assert groups == (2, 2, 2, 2)  # the default one, and one for stops
        assert max(descriptors[1:]) <= descriptors[0]
        assert min(tasks[1:]) <= tasks[0]  # one that ends may still be there
        assert threads == []


def leave_a_world() -> list[bool]:
    found = [current_world() is None]
    fit(new_trainer())
    found.append(current_world() is not None)
    dist.destroy_process_group()
    found.append(current_world() is None)
    return found


def test_what_goes_with_a_group_goes_with_it() -> None:
    assert values(run_ranks(leave_a_world, 2)) == [[True, True, True]] * 2


def fit_with(shardings: list[Any]) -> None:
    fit(new_trainer(shardings[int(os.environ["RANK"])]))


def test_ranks_of_different_shardings_are_refused_before_they_train() -> None:
    for result in run_ranks(fit_with, 2, args=(["ddp", "fsdp"],)):
        said = "Rank 1 has world size 2, sharding='fsdp' and rank 0 has world size 2, sharding='ddp'. "
        assert f"RuntimeError: {said}" in (result.error or "")
        assert result.seconds < 8
