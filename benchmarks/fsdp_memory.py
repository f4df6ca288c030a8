"""Peak resident memory per rank of sharding="fsdp" ÷ (state/world + one block).

The model is large enough for parameters, gradients and Adam's two moments (16 bytes a parameter in float32) to
dominate, and is built on the meta device, as large models are: otherwise its whole float32 copy on each rank is the
peak. One block is gathered at a time: its parameters and their gradients, 8 bytes a parameter.

On the CPU glibc keeps freed buffers of up to 32 MiB in its heap and fragments it (three times the memory here),
which says nothing about a GPU's allocator. So buffers from 1 MiB on are mapped one by one.

    python -m benchmarks.fsdp_memory
"""

import ctypes
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_air import AirStrategy
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

WIDTH, NUM_BLOCKS = 2048, 24
STATE_BYTES_PER_PARAMETER = 16
BLOCK_BYTES_PER_PARAMETER = 8
_M_MMAP_THRESHOLD = -3  # <malloc.h>


class Block(nn.Module):
    """A residual layer of WIDTH² parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, width)."""
        output: Tensor = x + self.linear(x).tanh()
        return output


class Stack(LightningModule):
    """Parameters, and next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def training_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        """Return a loss."""
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, with its two moments."""
        return torch.optim.AdamW(self.parameters())


class Baseline(Callback):
    """Notes the memory before anything of the model is there."""

    resident_bytes = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the resident bytes."""
        del trainer, pl_module, stage
        self.resident_bytes = _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Train a few steps and return the peak of the resident memory above the baseline. Runs on every rank."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (proc(5))
    baseline = Baseline()
    kwargs = fast_trainer_kwargs(".", strategy=AirStrategy("fsdp"), callbacks=[baseline], max_steps=4, max_epochs=-1)
    Trainer(**kwargs).fit(Stack(), DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=2))
    return _status_bytes("VmHWM") - baseline.resident_bytes


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    """Print a row per number of ranks."""
    num_parameters = NUM_BLOCKS * WIDTH * WIDTH
    state = STATE_BYTES_PER_PARAMETER * num_parameters
    block = BLOCK_BYTES_PER_PARAMETER * WIDTH * WIDTH
    print("ranks | expected MB | worst peak MB | ratio")
    for world_size in (2, 4):
        results = run_ranks(peak_bytes, world_size, timeout_seconds=1200, warnings_as_errors=False)
        peak = max(values(results))
        expected = state // world_size + block
        print(f"{world_size} | {expected / 1e6:.0f} | {peak / 1e6:.0f} | {peak / expected:.3f}", flush=True)


if __name__ == "__main__":
    main()
