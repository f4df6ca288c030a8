"""What a checkpoint costs: training blocked, time to durable, CPU seconds, and loading; ours, the peers and the floors.

The state is a model with Adam (a third parameters, two thirds moments). All kinds take turns in one run, in the same
processes, so that whatever else the machine does falls on all; printed are medians and quartiles over the rounds.

- `memcpy`: copying this rank's share of the state once into memory that was used before: the floor of blocking.
- `raw write`: writing and syncing the same bytes to one file per rank: the floor of durability.
- `AsyncCheckpointIO`, `torch.save`: stock Lightning, rank 0 saves and the others wait at the barrier behind it.
- `dcp.save`, `dcp.async_save`: torch's own, into a local folder.

    python -m benchmarks.checkpoints [--ranks 2] [--megabytes 1000] [--rounds 7]
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor

from lightning_air import AsyncUCCheckpointIO
from tests.kit.ranks import run_ranks, values

NUM_TENSORS = 24  # per kind: parameters, first and second moments

Row = dict[str, list[float]]


class Rank:
    """One rank of the benchmark: a state, a folder, and every kind of save."""

    def __init__(self, megabytes: int, folder: str) -> None:
        warnings.simplefilter("ignore")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder = Path(folder)
        numel = megabytes * 1_000_000 // 4 // 3 // NUM_TENSORS
        torch.manual_seed(0)
        self.parameters = {f"layer.{index}.weight": torch.randn(numel) for index in range(NUM_TENSORS)}
        self.moments = {
            name: {"exp_avg": torch.randn(numel), "exp_avg_sq": torch.rand(numel)} for name in self.parameters
        }
        self.share = [torch.randn(numel) for _ in range(3 * NUM_TENSORS // self.world_size)]
        self.target = [torch.zeros_like(tensor) for tensor in self.share]
        self.ours = AsyncUCCheckpointIO(verify="digest")
        self.ours.connect("ddp")
        self.num_saves = 0
        self.timing = dist.new_group()  # dcp.async_save uses the default one, on a thread of its own

    def checkpoint(self) -> dict[str, Any]:
        """Return what Lightning would hand to a CheckpointIO."""
        names = list(self.parameters)
        state = {number: dict(self.moments[name]) for number, name in enumerate(names)}
        optimizer = {"state": state, "param_groups": [{"lr": 1e-3, "params": list(range(len(names)))}]}
        return {
            "global_step": self.num_saves,
            "epoch": 0,
            "state_dict": dict(self.parameters),
            "optimizer_states": [optimizer],
            "lightning_air": {"parameter_names": [[names]]},
        }

    def dcp_state(self) -> dict[str, Any]:
        """Return the same state as torch.distributed.checkpoint takes it."""
        return {"state_dict": dict(self.parameters), "optimizer_0": {"state": self.moments}}

    def place(self) -> str:
        """Return a fresh name, the same on every rank."""
        self.num_saves += 1
        return str(self.folder / f"{self.num_saves}")

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return how long the slowest rank took, and this rank's result."""
        dist.barrier(self.timing)
        begun = time.perf_counter()
        result = call()
        seconds = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, self.timing)
        return float(seconds), result

    # ---- the kinds: each returns seconds blocked, until durable, and CPU seconds of all ranks ----------------------

    def measure(self, kind: str) -> tuple[float, float, float]:
        """Save once, and delete what was saved."""
        gc.collect()
        place = self.place()
        cpu = time.process_time()
        begun = time.perf_counter()
        blocked, finish = self.timed(lambda: getattr(self, "_" + kind)(place))
        if finish is not None:
            finish()
        dist.barrier(self.timing)
        durable = time.perf_counter() - begun
        used = torch.tensor(time.process_time() - cpu)
        dist.all_reduce(used, group=self.timing)
        if self.rank == 0:
            path = Path(place)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        dist.barrier(self.timing)
        return blocked, durable, float(used)

    def _memcpy(self, _: str) -> None:
        for target, source in zip(self.target, self.share, strict=True):
            target.copy_(source)

    def _raw_write(self, place: str) -> None:
        path = f"{place}-{self.rank}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        for tensor in self.share:
            view = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)
        Path(path).unlink()

    def _ours(self, place: str) -> Callable[[], Any]:
        self.ours.save_checkpoint(self.checkpoint(), place)
        return self.ours.settle

    def _lightning_async(self, place: str) -> Callable[[], Any] | None:
        io = AsyncCheckpointIO(TorchCheckpointIO()) if self.rank == 0 else None
        if io is not None:
            io.save_checkpoint(self.checkpoint(), place)
        dist.barrier()  # Trainer.save_checkpoint ends with one
        return None if io is None else io.teardown

    def _torch_save(self, place: str) -> None:
        if self.rank == 0:
            TorchCheckpointIO().save_checkpoint(self.checkpoint(), place)
        dist.barrier()

    def _dcp_save(self, place: str) -> None:
        dcp.save(self.dcp_state(), checkpoint_id=place)

    def _dcp_async_save(self, place: str) -> Callable[[], Any]:
        future = dcp.async_save(self.dcp_state(), checkpoint_id=place)
        return future.result  # type: ignore[union-attr]

    # ---- loading -----------------------------------------------------------------------------------------------------

    def load(self, num_rounds: int) -> dict[str, list[float]]:
        """Return how long loading whole takes, each from a checkpoint of its own making, into memory of its own.

        Making that memory is part of it: what is touched for the first time costs as much as all else together.
        """
        places = {"ours": self.place(), "dcp": self.place()}
        self.ours.save_checkpoint(self.checkpoint(), places["ours"])
        self.ours.settle()
        dcp.save(self.dcp_state(), checkpoint_id=places["dcp"])
        calls = {"ours": lambda: self._load_ours(places["ours"]), "dcp": lambda: self._load_dcp(places["dcp"])}
        seconds: dict[str, list[float]] = {"ours": [], "dcp": []}
        for index in range(num_rounds + 1):
            for kind in ("ours", "dcp") if index % 2 else ("dcp", "ours"):
                gc.collect()
                took, _ = self.timed(calls[kind])
                if index:
                    seconds[kind].append(took)
        dist.barrier()
        if self.rank == 0:
            for place in places.values():
                shutil.rmtree(place)
        return seconds

    def _load_ours(self, place: str) -> None:
        self.ours.load_checkpoint(place)

    def _load_dcp(self, place: str) -> None:
        state: dict[str, Any] = {"state_dict": {name: _empty(value) for name, value in self.parameters.items()}}
        state["optimizer_0"] = {"state": {name: _empty(value) for name, value in self.moments.items()}}
        dcp.load(state, checkpoint_id=place)

    # ---- training on -------------------------------------------------------------------------------------------------

    def steps(self, *, overlap: bool, num_rows: int) -> dict[str, Any]:
        """Return the median step with no save, and by how much saves make steps longer, in rounds of both.

        Args:
            overlap: As `overlap_copy`.
            num_rows: In a batch: how long a step is.
        """
        io = AsyncUCCheckpointIO(overlap_copy=overlap)
        io.connect("ddp")
        layer = torch.nn.Linear(1536, 1536)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        batch = torch.randn(num_rows, 1536)

        def step() -> float:
            begun = time.perf_counter()
            layer(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - begun

        for _ in range(3):
            step()
        io.save_checkpoint(self.checkpoint(), self.place())  # allocates
        io.settle()
        alone, during, first = [], [], []
        for _ in range(5):
            dist.barrier()
            alone.append(statistics.median(step() for _ in range(5)))
            begun = time.perf_counter()
            io.save_checkpoint(self.checkpoint(), self.place())
            blocked = time.perf_counter() - begun
            first.append((blocked + step()) / alone[-1])
            num_steps = 1
            while io.is_saving:
                step()
                num_steps += 1
            during.append((time.perf_counter() - begun) / num_steps / alone[-1])
            io.settle()
        io.teardown()
        return {"alone": statistics.median(alone), "during": during, "first": first}


def _empty(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else {key: _empty(each) for key, each in value.items()}


KINDS = ("memcpy", "raw_write", "ours", "lightning_async", "torch_save", "dcp_save", "dcp_async_save")


def run(megabytes: int, num_rounds: int, folder: str) -> dict[str, Any]:
    """Return all figures. Runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(megabytes, folder)
    rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for index in range(num_rounds + 1):
        order = KINDS if index % 2 else KINDS[::-1]
        for kind in order:
            figures = rank.measure(kind)
            if index:  # the first round allocates
                rows[kind].append(figures)
    loads = rank.load(num_rounds)
    steps = {
        (overlap, num_rows): rank.steps(overlap=overlap, num_rows=num_rows)
        for num_rows in (384, 6144)
        for overlap in (False, True)
    }
    rank.ours.teardown()
    dist.destroy_process_group()
    return {"rows": rows, "loads": loads, "steps": steps}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for world_size in options.ranks or (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            results = values(
                run_ranks(
                    run,
                    world_size,
                    args=(options.megabytes, options.rounds, folder),
                    timeout_seconds=3000,
                    warnings_as_errors=False,
                )
            )
        rows = results[0]["rows"]
        copy = statistics.median(figures[0] for figures in rows["memcpy"])
        raw = statistics.median(figures[1] for figures in rows["raw_write"])
        print(f"\n{world_size} rank(s), {options.megabytes} MB of state, {options.rounds} rounds")
        print("kind | blocked s (quartiles) | ÷ memcpy | durable s | ÷ raw write | CPU s per GB")
        for kind, figures in rows.items():
            blocked, durable, cpu = zip(*figures, strict=True)
            low, middle, high = statistics.quantiles(blocked, n=4)
            print(
                f"{kind} | {middle:.3f} ({low:.3f} to {high:.3f}) | {_ratio(blocked, rows['memcpy'], 0)} | "
                f"{statistics.median(durable):.2f} | {_ratio(durable, rows['raw_write'], 1)} | "
                f"{statistics.median(cpu) / options.megabytes * 1000:.2f}",
                flush=True,
            )
        print(f"floors: memcpy {copy:.3f} s, raw write {raw:.2f} s")
        loads = results[0]["loads"]
        low, ratio, high = statistics.quantiles(
            [ours / theirs for ours, theirs in zip(loads["ours"], loads["dcp"], strict=True)], n=4
        )
        print(
            f"load: ours, verified {statistics.median(loads['ours']):.2f} s, dcp.load "
            f"{statistics.median(loads['dcp']):.2f} s, ratio {ratio:.3f} ({low:.3f} to {high:.3f})"
        )
        for (overlap, _), steps in results[0]["steps"].items():
            print(
                f"step of {1e3 * steps['alone']:.0f} ms, overlap_copy={overlap}: while a save is under way x "
                f"{_spread(steps['during'])}; the first, with the call itself, x {_spread(steps['first'])}"
            )


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _ratio(mine: tuple[float, ...], floor: list[tuple[float, float, float]], column: int) -> str:
    ratios = [value / figures[column] for value, figures in zip(mine, floor, strict=True)]
    return f"{statistics.median(ratios):.2f}"


if __name__ == "__main__":
    main()
