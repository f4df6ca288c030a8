"""What the training loop adds to each step to learn of a SIGTERM: stock Lightning and AirStrategy, per 100 steps.

Counted on the training thread are the collectives on tensors of the training device that the loop itself starts, the
operators that read a tensor's value into Python (`.item()`, `bool(tensor)`, `torch.equal`, …), each of which waits for
all work queued on a GPU, and the exchanges in host memory that take their place here. Stock Lightning broadcasts one
tensor before each batch and reads it. With a GPU, CUDA's own count of synchronizing calls is printed too.

    python -m benchmarks.synchronizations
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils._python_dispatch import TorchDispatchMode  # private; the only way to see every operator
from torch.utils.data import DataLoader

from benchmarks.step_time import BATCH, WORLD_SIZE, Samples, Stack
from lightning_air import AirStrategy
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

NUM_STEPS = 100


READS = {
    torch.ops.aten._local_scalar_dense.default,  # noqa: SLF001 - what `.item()` and `float(tensor)` call
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


class PlainStack(Stack):
    """A stack whose optimizer reads nothing: AdamW's step counters are tensors, in host memory also on a GPU."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that need a tensor's value in Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count and go on."""
        self.count += func in READS
        return func(*args, **(kwargs or {}))


class Count(Callback):
    """Counts from the first batch to the last."""

    def __init__(self) -> None:
        self.reads = Reads()
        self.device_broadcasts = 0
        self.host_exchanges = 0
        self._restore: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        del trainer
        broadcast, all_reduce = dist.broadcast, dist.all_reduce
        self._restore = (broadcast, all_reduce)

        def counting_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.device_broadcasts += tensor.device.type == pl_module.device.type
            return broadcast(tensor, *args, **kwargs)

        def counting_all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.host_exchanges += tensor.device.type == "cpu" and bool(kwargs.get("async_op"))
            return all_reduce(tensor, *args, **kwargs)

        dist.broadcast, dist.all_reduce = counting_broadcast, counting_all_reduce
        self.reads.__enter__()  # type: ignore[no-untyped-call]
        if pl_module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting."""
        del trainer
        self.reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        dist.broadcast, dist.all_reduce = self._restore
        if pl_module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def count(whose: str) -> tuple[int, int, int, int]:
    """Return device broadcasts, values read, host exchanges and CUDA synchronizations. Runs on every rank."""
    strategy: Strategy = AirStrategy() if whose == "ours" else DDPStrategy(process_group_backend="gloo")
    counter = Count()
    kwargs = fast_trainer_kwargs(".", devices=WORLD_SIZE, strategy=strategy, callbacks=[counter])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**kwargs).fit(PlainStack(), DataLoader(Samples(NUM_STEPS * BATCH * WORLD_SIZE), batch_size=BATCH))
    synchronizations = sum("synchronizing" in str(warning.message) for warning in caught)
    return counter.device_broadcasts, counter.reads.count, counter.host_exchanges, synchronizations


def main() -> None:
    """Print a row for the stock strategy and one for ours."""
    print(f"per {NUM_STEPS} steps | broadcasts on the device | values read | exchanges in host memory | CUDA's count")
    for whose in ("stock", "ours"):
        results = run_ranks(count, WORLD_SIZE, args=(whose,), timeout_seconds=300, warnings_as_errors=False)
        broadcasts, reads, exchanges, synchronizations = values(results)[0]
        shown = synchronizations if torch.cuda.is_available() else "no GPU"
        print(f"{whose} | {broadcasts} | {reads} | {exchanges} | {shown}", flush=True)


if __name__ == "__main__":
    main()
