"""Step time of AirStrategy ÷ the stock strategy below it: DDPStrategy, or ModelParallelStrategy wrapped by hand.

Two ranks on gloo train the same model with the two in turn, in the same processes and the same process group, so that
whatever else the machine does falls on both. Per round and strategy the median step counts; printed is the median of
the rounds' ratios, with their quartiles, for wall-clock and for CPU time (of all threads of a rank).

    python -m benchmarks.step_time
"""

import argparse
import os
import statistics
import time
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lightning_air import AirStrategy
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

WIDTH, NUM_BLOCKS, BATCH = 256, 6, 16
WORLD_SIZE = 2
Kind = Literal["ddp", "fsdp"]


class Samples(Dataset[Tensor]):
    """Enough of one random vector."""

    def __init__(self, num_samples: int) -> None:
        self._sample = torch.randn(WIDTH)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return self._sample


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, width)."""
        output: Tensor = x + self.layers(x)
        return output


class Network(nn.Module):
    """A projection, a stack of blocks, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, width)."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.output(x)
        return output


class Stack(LightningModule):
    """What a user writes around a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: Tensor, _batch_idx: int) -> Tensor:
        """Return a loss."""
        loss: Tensor = self.network(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


class HandWrappedStack(Stack):
    """What a user of the stock ModelParallelStrategy writes."""

    def configure_model(self) -> None:
        """Shard every block, then the network around them, all options at their defaults.

        So the documentation of `fully_shard` and of `ModelParallelStrategy` has it. (Blocks without a sharded module
        around them would each count as a root, and by default stay gathered until their backward: fewer collectives,
        and the memory of the whole model. That is another trade, not another way to make this one.)
        """
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


class Clock(Callback):
    """Times from one batch's start to the next one's, so that everything between counts."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note the time."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def medians(self) -> tuple[float, float]:
        """Return the median step in wall-clock and CPU seconds, without the first quarter."""
        skip = len(self.wall) // 4
        wall, cpu = ([b - a for a, b in zip(t[skip:], t[skip + 1 :], strict=False)] for t in (self.wall, self.cpu))
        return statistics.median(wall), statistics.mean(cpu)


def step_seconds(strategy: Strategy, module: LightningModule, num_steps: int) -> tuple[float, float]:
    """Return the median step in wall-clock seconds and the mean one in CPU seconds."""
    clock = Clock()
    kwargs = fast_trainer_kwargs(".", devices=WORLD_SIZE, strategy=strategy, callbacks=[clock], max_epochs=1)
    torch.manual_seed(0)
    Trainer(**kwargs).fit(module, DataLoader(Samples(num_steps * BATCH * WORLD_SIZE), batch_size=BATCH))
    return clock.medians()


def measure(kind: Kind, num_rounds: int, num_steps: int) -> list[tuple[float, float, float, float]]:
    """Return per round: stock wall, ours wall, stock CPU, ours CPU. Runs on every rank."""
    rounds = []
    for index in range(num_rounds + 1):
        seconds = {}
        for whose in ("stock", "ours") if index % 2 else ("ours", "stock"):
            os.environ["WORLD_SIZE"] = str(WORLD_SIZE)  # stock Lightning's environment deletes it at the end of a fit
            if whose == "ours":
                strategy: Strategy = AirStrategy(kind)
                module: LightningModule = Stack()
            elif kind == "ddp":
                strategy, module = DDPStrategy(process_group_backend="gloo"), Stack()
            else:
                strategy = ModelParallelStrategy(WORLD_SIZE, 1, process_group_backend="gloo")
                module = HandWrappedStack()
            seconds[whose] = step_seconds(strategy, module, num_steps)
        rounds.append((seconds["stock"][0], seconds["ours"][0], seconds["stock"][1], seconds["ours"][1]))
    return rounds[1:]  # the first one warms up


def main() -> None:
    """Print a row per sharding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--sharding", choices=("ddp", "fsdp"), action="append", help="by default both")
    options = parser.parse_args()
    print("sharding | stock ms | ours ms | wall ratio (quartiles) | CPU ratio (quartiles)")
    for kind in options.sharding or ("ddp", "fsdp"):
        results = run_ranks(
            measure,
            WORLD_SIZE,
            args=(kind, options.rounds, options.steps),
            timeout_seconds=3000,
            warnings_as_errors=False,
        )
        rounds = values(results)[0]
        stock, ours = (1e3 * statistics.median(column) for column in list(zip(*rounds, strict=True))[:2])
        wall = _spread([row[1] / row[0] for row in rounds])
        cpu = _spread([row[3] / row[2] for row in rounds])
        print(f"{kind} | {stock:.2f} | {ours:.2f} | {wall} | {cpu}", flush=True)


def _spread(ratios: list[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
