"""The ranks join, and the collectives mean the same under every name of the backend.

Where Lightning goes by the group's name, a pair of tests shows what its own strategy makes of a compound name, and what
ours does (FACTS: "cpu:gloo,cuda:nccl" is neither "nccl" nor "gloo"). Without NCCL the compound name is
"cpu:gloo,cuda:gloo".
"""

import atexit
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy

from lightning_air import AirStrategy
from lightning_air.strategy import process_group
from lightning_air.strategy.membership import Membership
from lightning_air.strategy.process_group import (
    backend_for,
    barrier,
    check_existing_group,
    choose_backend,
    join,
    parse_backends,
    reduce,
    wait_until,
)
from tests.kit.environment import current_environment
from tests.kit.ranks import RankResult, run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.joining import join_here, summed
from tests.strategy.training import Regression, loader

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)
COMPOUND = "cpu:gloo,cuda:gloo"


@contextlib.contextmanager
def group_of_one(backend: str = "gloo") -> Iterator[None]:
    """A process group that somebody else has made in this process."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- the backend's name ----------------------------------------------------------------------------------------------

needs_no_nccl = pytest.mark.skipif(dist.is_nccl_available(), reason="is about builds of torch without NCCL")


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [
        ("auto", CPU, "gloo"),
        pytest.param("auto", CUDA, "gloo", marks=needs_no_nccl),
        ("gloo", CPU, "gloo"),
        ("gloo", CUDA, "gloo"),  # gloo carries CUDA tensors too
        ("cpu:gloo", CPU, "cpu:gloo"),
        (COMPOUND, CPU, COMPOUND),
        (COMPOUND, CUDA, COMPOUND),
        ("cuda:gloo,cpu:gloo", CUDA, "cuda:gloo,cpu:gloo"),
        # As people write it in YAML; torch refuses the space and the comma.
        ("cpu:gloo, cuda:gloo", CUDA, COMPOUND),
        (" cpu : Gloo ,", CPU, "cpu:gloo"),
    ],
)
def test_backend(requested: str, device: torch.device, expected: str) -> None:
    assert choose_backend(requested, device) == expected


def test_auto_is_nccl_for_cuda_where_there_is_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend("auto", CUDA) == "cpu:gloo,cuda:nccl"
    assert choose_backend("auto", CPU) == "gloo"


@pytest.mark.parametrize(
    ("requested", "device", "said"),
    [
        pytest.param("nccl", CUDA, ["serves one device only", "Use 'auto', or 'cpu:gloo,cuda:nccl'"], id="plain"),
        pytest.param("nccl", CPU, ["serves one device only", "Use 'auto', or 'cpu:gloo,cuda:nccl'"], id="plain on CPU"),
        pytest.param("mpi", CUDA, ["serves one device only", "'cpu:gloo,cuda:mpi'"], id="another plain"),
        pytest.param("cuda:nccl", CUDA, ["no backend for 'cpu'", "example 'cuda:nccl,cpu:gloo'"], id="no host memory"),
        pytest.param("cuda:gloo", CPU, ["no backend for 'cpu'", "example 'cuda:gloo,cpu:gloo'"], id="not for the CPU"),
        pytest.param("cpu:gloo", CUDA, ["no backend for 'cuda'", "'cpu:gloo,cuda:nccl'"], id="not for the device"),
        pytest.param("cpu:glo", CPU, ["asks for 'glo', which this build of torch does not have"], id="misspelt"),
        pytest.param("cpu:", CPU, ["asks for '', which this build of torch does not have"], id="nothing"),
        pytest.param(
            "cpu:gloo,cuda:nccl", CUDA, ["asks for 'nccl', which this build"], id="no NCCL", marks=needs_no_nccl
        ),
    ],
)
def test_refused_backend(requested: str, device: torch.device, said: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"process_group_backend={requested!r} ")) as error:
        choose_backend(requested, device)
    for words in [*said, "'auto'"]:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("gloo", {}),
        ("", {}),
    ],
)
def test_parse_backends(config: str, expected: dict[str, str]) -> None:
    assert parse_backends(config) == expected


@pytest.mark.parametrize("backend", ["gloo", COMPOUND])
def test_the_backend_of_a_device_whatever_the_group_is_called(backend: str) -> None:
    with group_of_one(backend):
        assert backend_for(CPU) == backend_for(CUDA) == "gloo"
        assert backend_for(torch.device("meta")) == ""


# ---- joining ---------------------------------------------------------------------------------------------------------


def _joins(backend: str) -> tuple[bool, str, str, int]:
    made = join_here(backend=backend)
    return made, dist.get_backend(), backend_for(CPU), summed(10 + dist.get_rank())


@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (2, COMPOUND), (3, "gloo"), (4, "gloo")])
def test_ranks_join(world_size: int, backend: str) -> None:
    total = sum(10 + rank for rank in range(world_size))
    assert values(run_ranks(_joins, world_size, args=(backend,))) == [(True, backend, "gloo", total)] * world_size


def test_ranks_of_two_nodes_join() -> None:
    assert values(run_ranks(_joins, 4, nodes=2, args=("gloo",))) == [(True, "gloo", "gloo", 46)] * 4


def _joins_an_existing_group() -> tuple[bool, bool, int]:
    existing = dist.group.WORLD
    made = join_here()
    return made, dist.group.WORLD is existing, summed(1)


def test_a_suitable_group_is_used_as_it_is() -> None:
    assert values(run_ranks(_joins_an_existing_group, 2, init_process_group="gloo")) == [(False, True, 2)] * 2


@pytest.mark.parametrize(
    ("backend", "device", "lacking"),
    [("cuda:gloo", CPU, "cpu"), ("cuda:gloo", CUDA, "cpu"), ("cpu:gloo", CUDA, "cuda")],
)
def test_an_existing_group_without_a_backend_that_is_needed(backend: str, device: torch.device, lacking: str) -> None:
    here = Membership(global_rank=0, world_size=1, ranks_per_node=1, address="", port=0)
    with group_of_one(backend), pytest.raises(RuntimeError, match="exists already") as error:
        check_existing_group(here, device)
    assert f"the backend {backend!r}" in str(error.value)
    assert f"none for {lacking!r} tensors" in str(error.value)
    assert f"or make it with init_process_group('{choose_backend('auto', device)}')" in str(error.value)


@pytest.mark.parametrize(("global_rank", "world_size"), [(1, 2), (0, 2)])
def test_an_existing_group_of_another_launch(global_rank: int, world_size: int) -> None:
    here = Membership(global_rank=global_rank, world_size=world_size, ranks_per_node=2, address="", port=0)
    with group_of_one(), pytest.raises(RuntimeError, match="exists already") as error:
        join(here, backend="gloo", timeout=timedelta(seconds=1), join_timeout=timedelta(seconds=1), device=CPU)
    assert "rank 0 of 1, but the launch makes it rank" in str(error.value)
    assert f"rank {global_rank} of {world_size}. Destroy that group first, or set devices and num_nodes" in str(
        error.value
    )


# ---- collectives -----------------------------------------------------------------------------------------------------

# Name, the values of ranks 0 and 1, the operation, and the result on both.
REDUCTIONS: list[tuple[str, list[Any], torch.dtype, Any, Any]] = [
    ("mean of floats", [1.0, 2.0], torch.float32, "mean", 1.5),
    ("mean, as torch calls it", [1.0, 2.0], torch.float32, "avg", 1.5),
    ("mean, in capitals", [1.0, 2.0], torch.float32, "MEAN", 1.5),
    ("mean, as an operation", [1.0, 2.0], torch.float32, dist.ReduceOp.AVG, 1.5),
    ("mean of doubles", [0.1, 0.1], torch.float64, "mean", 0.1),
    ("mean of bfloat16", [1.0, 2.0], torch.bfloat16, "mean", 1.5),
    ("mean of float16", [1.0, 2.0], torch.float16, "mean", 1.5),
    ("mean of complex numbers", [1 + 1j, 3 + 3j], torch.complex64, "mean", 2 + 2j),
    ("mean of integers", [4, 8], torch.int64, "mean", 6),
    ("mean of integers, towards zero", [1, 2], torch.int64, "mean", 1),
    ("mean of negative integers, towards zero", [-1, -2], torch.int64, "mean", -1),
    ("mean of large integers", [2**53 + 1, 2**53 + 1], torch.int64, "mean", 2**53 + 1),
    ("mean of small integers", [100, 120], torch.int8, "mean", 110),
    ("mean of bytes", [200, 250], torch.uint8, "mean", 225),
    ("mean of a type that gloo lacks", [1000, 3000], torch.int16, "mean", 2000),
    ("sum", [1.5, 2.0], torch.float32, "sum", 3.5),
    ("sum of integers", [3, 4], torch.int64, dist.ReduceOp.SUM, 7),
    ("sum, when nothing is said", [3, 4], torch.int32, None, 7),
    ("max", [3, 4], torch.int64, "max", 4),
    ("max, as an operation", [4.0, 3.0], torch.float32, dist.ReduceOp.MAX, 4.0),
    ("min", [3, 4], torch.int64, "Min", 3),
    ("product", [3, 4], torch.int64, "product", 12),
]


def _reduces() -> dict[str, tuple[Any, bool]]:
    join_here(backend=COMPOUND)
    found = {}
    for name, given, dtype, op, _ in REDUCTIONS:
        tensor = torch.tensor([given[dist.get_rank()]] * 2, dtype=dtype)
        before = tensor.data_ptr()
        result = reduce(tensor, None, op)
        in_place = result is tensor and result.data_ptr() == before and result.dtype == dtype
        found[name] = (result.tolist(), in_place)
    return found


def test_reduce() -> None:
    expected = {name: ([result, result], True) for name, _, _, _, result in REDUCTIONS}
    for found in values(run_ranks(_reduces, 2)):
        assert found == expected


def _reduces_in_a_group() -> float:
    pair = dist.new_group([0, 2])
    value = torch.tensor(float(dist.get_rank()))
    return float(reduce(value, pair, "mean")) if dist.get_rank() != 1 else -1.0


def test_the_mean_of_a_group_divides_by_its_size() -> None:
    assert values(run_ranks(_reduces_in_a_group, 3, init_process_group="gloo")) == [1.0, -1.0, 1.0]


def test_without_a_group_there_is_nobody_to_ask() -> None:
    tensor = torch.tensor(3)
    assert reduce(tensor, None, "mean") is tensor
    assert int(tensor) == 3
    barrier(CPU)


def _passes_a_barrier(late_seconds: float) -> tuple[float, float]:
    join_here(backend=COMPOUND)
    barrier(CPU)
    if dist.get_rank() == 1:
        time.sleep(late_seconds)
    before = time.time()
    barrier(CPU)
    return before, time.time()


def test_nobody_passes_a_barrier_before_the_last_has_come() -> None:
    times = values(run_ranks(_passes_a_barrier, 3, args=(0.3,)))
    assert min(after for _, after in times) >= max(before for before, _ in times)


def test_wait_until() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), seconds=5, poll_seconds=0.001)
    assert not wait_until(lambda: False, seconds=0.01, poll_seconds=0.001)


# ---- what Lightning makes of the name, and what we do ----------------------------------------------------------------


def stock() -> DDPStrategy:
    return DDPStrategy(process_group_backend=COMPOUND)


def ours() -> AirStrategy:
    return AirStrategy(process_group_backend=COMPOUND)


class Watching(Regression):
    """Says in which mode it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[bool, bool]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))


@dataclass(frozen=True)
class Found:
    """What a fit and a validation after it have seen."""

    backend: str
    modes: set[tuple[bool, bool]]


def _say_whether_the_group_is_left() -> None:
    sys.stdout.write(f"group at exit: {dist.is_initialized()}\n")


def _fits(strategy: Callable[[], ParallelStrategy]) -> Found:
    atexit.register(_say_whether_the_group_is_left)  # registered first, so it runs last
    module = Watching()
    options = fast_trainer_kwargs(Path.cwd(), strategy=strategy(), devices=2, max_steps=1)
    trainer = Trainer(**options, num_sanity_val_steps=0, limit_val_batches=1)
    val_loader = loader(2, trainer.global_rank)
    trainer.fit(module, loader(2, trainer.global_rank), val_loader)
    module.modes.clear()  # inside of a fit, Lightning never uses inference mode
    trainer.validate(module, val_loader, verbose=False)
    return Found(dist.get_backend(), set(module.modes))


@pytest.fixture(scope="module")
def stock_fit() -> list[RankResult]:
    return run_ranks(_fits, 2, args=(stock,))


@pytest.fixture(scope="module")
def our_fit() -> list[RankResult]:
    return run_ranks(_fits, 2, args=(ours,))


def test_both_have_the_compound_name(stock_fit: list[RankResult], our_fit: list[RankResult]) -> None:
    assert [found.backend for found in values(stock_fit) + values(our_fit)] == [COMPOUND] * 4


def test_stock_validates_in_inference_mode(stock_fit: list[RankResult]) -> None:
    # In which not all of gloo's collectives work: Lightning avoids it for "gloo", and misses the compound name.
    assert [found.modes for found in values(stock_fit)] == [{(True, False)}] * 2


def test_ours_validates_without_gradients_and_without_inference_mode(our_fit: list[RankResult]) -> None:
    assert [found.modes for found in values(our_fit)] == [{(False, False)}] * 2


def test_stock_leaves_the_group_at_exit(stock_fit: list[RankResult]) -> None:
    values(stock_fit)
    assert all("group at exit: True" in result.output for result in stock_fit)


def test_ours_destroys_the_group_at_exit(our_fit: list[RankResult]) -> None:
    values(our_fit)
    assert all("group at exit: False" in result.output for result in our_fit)


def _means_of_integers(strategy: Callable[[], ParallelStrategy]) -> float:
    tensor = torch.tensor(4 * dist.get_rank())
    return float(strategy().reduce(tensor, reduce_op="mean"))


def test_stock_cannot_take_a_mean_of_integers() -> None:
    for result in run_ranks(_means_of_integers, 2, args=(stock,), init_process_group=COMPOUND):
        assert result.error is not None
        assert "can't be cast" in result.error or "AVG" in result.error


def test_ours_takes_a_mean_of_integers() -> None:
    assert values(run_ranks(_means_of_integers, 2, args=(ours,), init_process_group=COMPOUND)) == [2.0, 2.0]


SCRIPT = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print("at exit:", dist.is_initialized()))
from datetime import timedelta
import torch
from lightning_air.strategy.membership import Membership
from lightning_air.strategy.process_group import join
alone = Membership(global_rank=0, world_size=1, ranks_per_node=1, address="", port=0)
second = timedelta(seconds=1)
for _ in range(2):
    join(alone, backend="gloo", timeout=second, join_timeout=second, device=torch.device("cpu"))
print("while it ran:", dist.is_initialized())
"""


def test_a_script_ends_without_a_group() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=current_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ended.stdout.splitlines() == ["while it ran: True", "at exit: False"]


@pytest.fixture
def barriers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What is handed to torch's barrier, as there is no NCCL here to hand it to."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "barrier", lambda **options: calls.append(options))
    with group_of_one(COMPOUND):
        yield calls


def test_stock_barrier_names_no_device_under_the_compound_name(
    barriers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = DDPStrategy(parallel_devices=[torch.device("cuda", 0), CUDA])
    for name, said in (("nccl", {"device_ids": [0]}), ("cpu:gloo,cuda:nccl", {})):
        monkeypatch.setattr(dist, "get_backend", lambda name=name: name)
        strategy.barrier()
        assert barriers.pop() == said


def test_our_barrier_names_the_device_where_nccl_carries_it(
    barriers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier(CUDA)
    assert barriers.pop() == {"device_ids": None}  # gloo takes none
    monkeypatch.setattr(process_group, "backend_for", lambda _: "nccl")
    barrier(CUDA)
    assert barriers.pop() == {"device_ids": [1]}
    barrier(CPU)
    assert barriers.pop() == {"device_ids": None}


def _fits_in_a_group_of_another(strategy: Callable[[], ParallelStrategy]) -> tuple[int, int]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module: LightningModule = Regression()
    options = fast_trainer_kwargs(Path.cwd(), strategy=strategy(), devices=2, max_steps=1, limit_val_batches=0)
    trainer = Trainer(**options)
    trainer.fit(module, loader(2, trainer.global_rank), loader(2, trainer.global_rank))
    return trainer.world_size, dist.get_world_size()


def test_stock_trains_two_models_in_two_groups_of_one() -> None:
    assert values(run_ranks(_fits_in_a_group_of_another, 2, args=(stock,))) == [(2, 1), (2, 1)]


def test_ours_refuses_a_group_of_another() -> None:
    for rank, result in enumerate(run_ranks(_fits_in_a_group_of_another, 2, args=(ours,))):
        assert result.error is not None
        assert f"this process is rank 0 of 1, but the launch makes it rank {rank} of 2" in result.error
