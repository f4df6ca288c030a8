"""What GPUHealth costs: a sweep, the rules, its hook, a training step with it ÷ without, memory, points in 30 days.

The GPUs are those of the tests' stub of NVML, loaded through pynvml as NVIDIA's library is: the cost of Python and of
ctypes is real, that of the driver is missing. On ÷ off is a ratio of two Trainers in one process that take turns; on a
CPU they and the sampler share the cores. Beside it stands Lightning's `DeviceStatsMonitor`, if psutil is
there, which it needs on a CPU.

    python -m benchmarks.gpu_health
"""

import argparse
import importlib.util
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from torch.utils.data import DataLoader

from benchmarks.step_time import BATCH, Samples, Stack
from lightning_air import GPUHealth
from lightning_air.health.aggregates import NAMES
from lightning_air.health.default_rules import default_rules
from lightning_air.health.events import EventLog
from lightning_air.health.history import METRICS, GpuId, History, row_of
from lightning_air.health.judge import Judge
from lightning_air.health.reader import GpuReader
from tests.health.records import KeepRecords
from tests.kit.nvml_stub import stub_in_use
from tests.kit.trainers import fast_trainer_kwargs

NUM_GPUS = 8
SECONDS_IN_30_DAYS = 30 * 24 * 3600


class Times(Callback):
    """The wall-clock and CPU seconds of each step, of the whole process."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._last: tuple[float, float] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the time of the step that has ended, with all its hooks."""
        del trainer, pl_module, batch, batch_idx
        now = (time.perf_counter(), time.process_time())
        if self._last is not None:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = now


def sweep_milliseconds(num_sweeps: int) -> tuple[float, float]:
    """Return the first sweep, which finds out what there is, and the median of the later ones."""
    reader = GpuReader()
    times = []
    for _ in range(num_sweeps):
        begun = time.perf_counter()
        reader.sweep()
        times.append(1000 * (time.perf_counter() - begun))
    reader.close()
    return times[0], statistics.median(times[1:])


def rules_milliseconds(num_gpus: int, num_polls: int) -> float:
    """Return the median of looking at all default rules for the GPUs of a run, whose values change a little."""
    judge = Judge(default_rules(), poll_seconds=10.0, events=EventLog(), clock=itertools.count(0.0, 10.0).__next__)
    samples = GpuReader().sweep()
    rows = {
        GpuId(f"GPU-{number}", number % NUM_GPUS, samples[0].name, number // NUM_GPUS): row_of(
            samples[number % len(samples)], None
        )
        for number in range(num_gpus)
    }
    times = []
    for _ in range(num_polls):
        begun = time.perf_counter()
        judge.take(rows)
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def train(callbacks: list[Callback], num_steps: int) -> tuple[float, float, Trainer]:
    """Return the median wall-clock step and the mean CPU step, in seconds."""
    times = Times()
    options = fast_trainer_kwargs(Path.cwd(), callbacks=[*callbacks, times], logger=KeepRecords(), max_steps=num_steps)
    trainer = Trainer(**options, log_every_n_steps=50)
    trainer.fit(Stack(), DataLoader(Samples(BATCH * num_steps), batch_size=BATCH))
    return statistics.median(times.wall), statistics.fmean(times.cpu), trainer


def hook_microseconds() -> float:
    """Return what the hooks of one step cost together while nothing is due."""
    health = GPUHealth()
    _, _, trainer = train([health], 3)
    begun = time.perf_counter()
    for _ in range(100_000):
        health.on_train_batch_start(trainer, trainer.lightning_module, None, 0)
        health.on_train_batch_end(trainer, trainer.lightning_module, None, None, 0)
    return (time.perf_counter() - begun) * 10


def on_and_off(make: Callable[[], list[Callback]], num_rounds: int, num_steps: int) -> str:
    """Return the ratios of steps with callbacks to steps without, which take turns."""
    wall, cpu = [], []
    for number in range(num_rounds):
        kinds = [make(), []] if number % 2 else [[], make()]
        told = {bool(callbacks): train(callbacks, num_steps) for callbacks in kinds}
        wall.append(told[True][0] / told[False][0])
        cpu.append(told[True][1] / told[False][1])
    quartiles = [statistics.quantiles(each, n=4) for each in (wall, cpu)]
    low, middle, high = quartiles[0]
    return (
        f"wall {middle:.4f} ({low:.4f} to {high:.4f}), "
        f"CPU {quartiles[1][1]:.4f} ({quartiles[1][0]:.4f} to {quartiles[1][2]:.4f})"
    )


def history_megabytes(num_gpus: int) -> float:
    """Return what two hours at ten seconds take."""
    history = History(720, 10.0)
    history.append(0.0, {GpuId(f"GPU-{number}", number, "", 0): [0.0] * len(METRICS) for number in range(num_gpus)})
    return history.num_bytes / 1e6


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # or the sampler would have to wait for a core
    with tempfile.TemporaryDirectory() as folder, stub_in_use(Path(folder, "nvml"), NUM_GPUS):
        first, later = sweep_milliseconds(500)
        print(f"sweep of {NUM_GPUS} GPUs: {later:.2f} ms (the first {first:.2f} ms)")
        print(f"{len(default_rules())} rules, 64 GPUs: {rules_milliseconds(64, 200):.2f} ms per poll")
        print(f"hooks per step: {hook_microseconds():.2f} us")
        for poll_seconds in (10.0, 0.1):
            ratios = on_and_off(lambda: [GPUHealth(poll_seconds=poll_seconds)], options.rounds, options.steps)  # noqa: B023
            print(f"step on / off, a poll every {poll_seconds:g} s: {ratios}")
        if importlib.util.find_spec("psutil"):
            print(f"DeviceStatsMonitor: {on_and_off(lambda: [DeviceStatsMonitor()], options.rounds, options.steps)}")
    print(f"history of two hours: {history_megabytes(8):.2f} MB for 8 GPUs, {history_megabytes(64):.2f} MB for 64")
    print(f"points in 30 days, whatever the number of GPUs: {len(NAMES) * SECONDS_IN_30_DAYS // 60:,}")


if __name__ == "__main__":
    main()
