"""What DataPosition costs: to resume at half of an epoch, per sample, and per training step.

- Resume: from a saved position to the first batch of a loader over indices, and the most memory that Python and numpy
  had for it. Beside it what stock Lightning can do, which is to shuffle all and pass over half of it.
- Per sample: a whole epoch of batches of indices, ours ÷ torch's `RandomSampler` and `BatchSampler`.
- Per step: the median step of a Trainer with DataPosition ÷ without, the two in turn.

    python -m benchmarks.data_position
"""

import argparse
import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.step_time import BATCH, Clock, Samples, Stack
from lightning_air import DataPosition, ResumableBatchSampler
from tests.kit.trainers import fast_trainer_kwargs

BATCH_SIZE = 64
MOST_FOR_STOCK = 10**7


class Indices(Dataset[int]):
    """Sample number i is i."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> int:
        return index


def resume_ours(n: int, state: dict[str, Any]) -> Any:
    """Return the first batch behind a position."""
    dataset = Indices(n)
    sampler = ResumableBatchSampler(dataset, batch_size=BATCH_SIZE)
    sampler.load_state_dict(state)
    return next(iter(DataLoader(dataset, batch_sampler=sampler)))


def resume_stock(n: int) -> Any:
    """Return the first batch behind a half of the epoch, as one who keeps the generator's state gets it."""
    sampler = RandomSampler(range(n), generator=torch.Generator().manual_seed(1))
    rest = itertools.islice(iter(sampler), n // 2, None)
    return torch.tensor(list(itertools.islice(rest, BATCH_SIZE)))


def seconds_and_bytes(function: Callable[[], Any], rounds: int) -> tuple[float, int]:
    """Return the median time, and the most memory of one more call, which is slower for being traced."""
    times = []
    for _ in range(rounds):
        gc.collect()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return statistics.median(times), peak


def half_way(n: int) -> dict[str, Any]:
    """Return the state of a sampler that has committed half of its epoch."""
    sampler = ResumableBatchSampler(Indices(n), batch_size=BATCH_SIZE)
    sampler.commit(len(sampler) // 2)
    return sampler.state_dict()


def print_resumes(rounds: int) -> None:
    """Print a row per length."""
    print("resume at 50 % of | ours ms | ours MB | stock ms")
    first = 0.0
    for n in (10**6, 10**7, 10**8, 10**9, 10**12):
        state = half_way(n)
        seconds, peak = seconds_and_bytes(lambda n=n, state=state: resume_ours(n, state), rounds)  # type: ignore[misc]
        first = first or seconds
        stock = "-"
        if n <= MOST_FOR_STOCK:
            begin = time.perf_counter()
            resume_stock(n)
            stock = f"{1e3 * (time.perf_counter() - begin):.0f}"
        print(f"{n:.0e} | {1e3 * seconds:.2f} ({seconds / first:.2f} x 1e6's) | {peak / 1e6:.2f} | {stock}", flush=True)


def seconds_per_sample(batches: Iterator[list[int]], n: int) -> float:
    """Return what it takes to go through an epoch's indices, per index."""
    begin = time.perf_counter()
    for _ in batches:
        pass
    return (time.perf_counter() - begin) / n


def print_samples(rounds: int, n: int = 10**6) -> None:
    """Print the time per sample."""
    ours, torchs = [], []
    for epoch in range(rounds):
        sampler = ResumableBatchSampler(n, batch_size=BATCH_SIZE)
        sampler.set_epoch(epoch)
        ours.append(seconds_per_sample(iter(sampler), n))
        torchs.append(seconds_per_sample(iter(BatchSampler(RandomSampler(range(n)), BATCH_SIZE, drop_last=False)), n))
    ratios = [a / b for a, b in zip(ours, torchs, strict=True)]
    print(f"\nper sample (n = {n:.0e}) | ours ns | torch ns | ratio")
    print(
        f"| {1e9 * statistics.median(ours):.0f} | {1e9 * statistics.median(torchs):.0f} | {_spread(ratios)}", flush=True
    )


def step_seconds(num_steps: int, *, with_position: bool) -> tuple[float, float]:
    """Return the median step in wall-clock seconds and the mean one in CPU seconds."""
    clock = Clock()
    callbacks = [clock, *([DataPosition()] if with_position else [])]
    torch.manual_seed(0)
    loader = DataLoader(Samples(num_steps * BATCH), batch_size=BATCH, shuffle=True)
    Trainer(**fast_trainer_kwargs(".", callbacks=callbacks)).fit(Stack(), loader)
    return clock.medians()


def print_steps(rounds: int, num_steps: int) -> None:
    """Print the time per step."""
    wall, cpu, plain = [], [], []
    for number in range(rounds + 1):
        seconds = {}
        for with_position in (True, False) if number % 2 else (False, True):
            seconds[with_position] = step_seconds(num_steps, with_position=with_position)
        if number:  # the first round warms up
            plain.append(seconds[False][0])
            wall.append(seconds[True][0] / seconds[False][0])
            cpu.append(seconds[True][1] / seconds[False][1])
    print("\nper step | without ms | wall ratio (quartiles) | CPU ratio (quartiles)")
    print(f"| {1e3 * statistics.median(plain):.2f} | {_spread(wall)} | {_spread(cpu)}", flush=True)


def _spread(ratios: list[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print_resumes(options.rounds)
    print_samples(options.rounds)
    print_steps(options.rounds, options.steps)


if __name__ == "__main__":
    main()
