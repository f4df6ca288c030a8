"""Train a small GPT to write Python, from the standard library of the Python that runs it.

    python recipes/quickstart.py                              all GPUs of this machine, or else two CPU processes
    torchrun --nproc-per-node=2 recipes/quickstart.py         as many processes as torchrun starts
    python recipes/quickstart.py --resume --max-steps=1000    go on where the last run stopped

On Databricks AI Runtime the first line is the workload's command: it runs once per node, and AirStrategy does the rest.
Nothing is downloaded. All files go to `quickstart_output/`: the MLflow database, and for each run a folder with its
checkpoints and its loss curve. `quickstart.yaml` is the same job without a script.
"""

import argparse
import logging
import math
import sysconfig
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, Subset
from typing_extensions import override

from lightning_air import AirCheckpoint, AirMLflowLogger, AirStrategy, AsyncUCCheckpointIO, latest_checkpoint
from lightning_air.runtime import detect_launch

MAX_STEPS = 500
VAL_EVERY_STEPS = 100
NUM_BYTES = 256  # A token is a byte, so there is no tokenizer.


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position: attention then sees how far apart bytes are."""
    length, width = x.shape[-2:]
    speeds = 1000 ** -torch.linspace(0, 1, width // 2, device=x.device)  # radians per byte
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    left, right = x.chunk(2, dim=-1)
    pairs = (left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos())
    return torch.cat(pairs, dim=-1).type_as(x)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input. `sharding="fsdp"` shards the model by these."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the shape that came in: (batch, length, width)."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each of shape (batch, heads, length, width of a head)
        attended = scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed_forward(x)
        return out


class ByteGPT(LightningModule):
    """A GPT over bytes: from the bytes so far it tells how likely each next byte is.

    Args:
        width: Size of the activations, a multiple of twice `num_heads`.
        num_blocks: Number of blocks.
        num_heads: Attention heads in a block.
        context_bytes: How far the model looks back when it writes; as in the data.
        learning_rate: Its highest value.
        decay_steps: The optimizer step by which it has fallen to a tenth. It rises in the first twentieth of them.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        num_blocks: int = 3,
        num_heads: int = 4,
        context_bytes: int = 128,
        learning_rate: float = 3e-3,
        decay_steps: int = MAX_STEPS,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()  # into the checkpoints, and as parameters into the MLflow run
        self.context_bytes = context_bytes
        self.learning_rate = learning_rate
        self.decay_steps = decay_steps
        self.byte_embedding = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES, bias=False))
        for parameter in self.parameters():
            if parameter.ndim == 2:
                # With small weights all bytes start about equally likely, and the loss at ln 256 = 5.545.
                nn.init.normal_(parameter, std=0.02)

    @override
    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next byte: from bytes (batch, length) to (batch, length, 256)."""
        x = self.byte_embedding(text)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss in nats per byte; `windows` has the shape (batch, length + 1)."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    @override
    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(windows)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(windows), prog_bar=True, sync_dist=True)  # the mean over all ranks

    @override
    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim >= 2]
        norms_and_biases = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms_and_biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_factor(self, step: int) -> float:
        warmup = 20 * (step + 1) / self.decay_steps
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.decay_steps))
        return min(warmup, 0.1 + 0.9 * cosine)

    @torch.no_grad()
    def generate(self, prompt: str, *, num_bytes: int, temperature: float = 0.7) -> str:
        """Go on with the prompt. Collective under "fsdp" and "hsdp": every rank calls this."""
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.context_bytes :])[:, -1]
            next_byte = torch.multinomial(torch.softmax(logits / temperature, dim=-1), num_samples=1)
            text = torch.cat([text, next_byte], dim=1)
        written = bytes(text[0].tolist()).decode(errors="replace")
        # An untrained model writes control characters, which would confuse the terminal.
        return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in written)


class ByteWindows(Dataset[Tensor]):
    """The text of files, cut into windows of `context_bytes` and the byte that follows."""

    def __init__(self, paths: list[Path], context_bytes: int) -> None:
        self.text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
        self.context_bytes = context_bytes

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context_bytes

    @override
    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context_bytes
        return self.text[start : start + self.context_bytes + 1].long()


class StdlibBytes(LightningDataModule):
    """The source of Python's standard library; every tenth file is held out for validation.

    Args:
        context_bytes: Length of a window, as in the model.
        batch_size: Windows in a batch, on each rank.
        num_val_windows: How many windows to validate on, spread over the held-out files.
    """

    def __init__(self, *, context_bytes: int = 128, batch_size: int = 8, num_val_windows: int = 256) -> None:
        super().__init__()
        self.context_bytes = context_bytes
        self.batch_size = batch_size
        self.num_val_windows = num_val_windows

    @staticmethod
    def files() -> tuple[list[Path], list[Path]]:
        """Return the files to train on and the files to validate on, the same on all ranks."""
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        # Installed packages and tests are not the library; encodings is tables, and pydoc_data prose.
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
        paths = sorted(path for path in stdlib.rglob("*.py") if skipped.isdisjoint(path.relative_to(stdlib).parts))
        return [path for index, path in enumerate(paths) if index % 10], paths[::10]

    @override
    def setup(self, stage: str) -> None:
        train_paths, val_paths = self.files()
        self.train_windows = ByteWindows(train_paths, self.context_bytes)
        held_out = ByteWindows(val_paths, self.context_bytes)
        self.val_windows = Subset(held_out, range(0, len(held_out), max(1, len(held_out) // self.num_val_windows)))

    # Lightning deals the windows out to the ranks. They are in memory, so worker processes would only cost time.
    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train_windows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_windows, batch_size=2 * self.batch_size)


class Narrator(Callback):
    """Say on rank 0 how it goes, and let the trained model write `samples`."""

    def __init__(self) -> None:
        self.samples: list[str] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            num_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            print(f"{num_parameters:,} parameters, world size {trainer.world_size}")
            print(f"untrained: {math.log(NUM_BYTES):.3f} nats per byte, all bytes being equally likely")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            loss = trainer.callback_metrics["val/loss"]
            print(f"step {trainer.global_step}: {loss:.3f} nats per byte of the held-out files")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ByteGPT)
        # On every rank, though rank 0 alone prints them: a sharded model answers only when all ranks ask.
        self.samples = [pl_module.generate(prompt, num_bytes=200) for prompt in ("def ", "class ")]


def draw_losses(logger: AirMLflowLogger, path: Path) -> None:
    """Draw the losses that MLflow has of the logger's run."""
    uniform = math.log(NUM_BYTES)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(uniform, color="grey", linestyle="--", label=f"all bytes equally likely: {uniform:.3f}")
    for key, label, num_last, style in (
        ("train/loss", "training, mean of the last 50 steps", 50, {"linewidth": 0.7}),
        ("val/loss", "held-out files, at the end", 1, {"marker": "o"}),
    ):
        points = logger.experiment.get_metric_history(logger.run_id, key)
        losses = [point.value for point in points]
        last = f"{fmean(losses[-num_last:]):.3f}"
        axes.plot([point.step for point in points], losses, label=f"{label}: {last}", **style)
    axes.set(title="A small GPT on Python's standard library", xlabel="optimizer step", ylabel="loss, nats per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def make_trainer(options: argparse.Namespace, run: Path, narrator: Narrator) -> Trainer:
    """Return a trainer for all GPUs, or for two processes on the CPU, unless a launcher says how many there are."""
    on_gpu = torch.cuda.is_available()
    is_launched = detect_launch().kind != "local"  # AirStrategy then takes `devices` and `num_nodes` from the launcher
    return Trainer(
        strategy=AirStrategy(sharding=options.sharding),
        accelerator="gpu" if on_gpu else "cpu",
        devices="auto" if on_gpu or is_launched else 2,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=min(VAL_EVERY_STEPS, options.max_steps),
        check_val_every_n_epoch=None,  # the interval counts steps across epochs; a run is shorter than one
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        plugins=[AsyncUCCheckpointIO()],  # training waits only for a copy into host memory
        callbacks=[AirCheckpoint(str(run / "checkpoints"), every="20s", monitor="val/loss"), narrator],
        logger=AirMLflowLogger(
            "quickstart",
            run.name,
            tracking_uri=f"sqlite:///{run.parent}/mlflow.db",
            artifact_location=f"{run.parent}/artifacts",
        ),
        enable_model_summary=False,
    )


def parse_options() -> argparse.Namespace:
    """Read the command line; every rank gets the same."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--sharding", choices=["ddp", "fsdp", "hsdp"], default="ddp", help="as in AirStrategy")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"), help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    options = parser.parse_args()
    runs = sorted(options.output.resolve().glob("run-*/checkpoints"))
    options.checkpoint = latest_checkpoint(runs[-1]) if options.resume and runs else None
    if options.resume and options.checkpoint is None:
        parser.error(f"nothing to resume: there is no checkpoint in run-*/checkpoints of {options.output}")
    return options


def main() -> None:
    """Train, then show what the model writes and how its loss fell."""
    options = parse_options()
    # Lightning's INFO lines are mostly tips. The two warnings are not about this job: one is Lightning's use of a newer
    # torch, the other asks for worker processes, which data in memory does not need.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*treespec, LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", r".*does not have many workers")

    seed_everything(0, verbose=False)
    # Another rank may read the clock a second later. AirCheckpoint takes rank 0's folder on all of them.
    run = options.output.resolve() / time.strftime("run-%Y-%m-%d-%H%M%S")
    narrator = Narrator()
    trainer = make_trainer(options, run, narrator)
    trainer.fit(ByteGPT(decay_steps=options.max_steps), StdlibBytes(), ckpt_path=options.checkpoint)
    if trainer.is_global_zero:
        assert isinstance(trainer.logger, AirMLflowLogger)
        draw_losses(trainer.logger, run / "loss.png")
        trainer.logger.experiment.log_artifact(trainer.logger.run_id, f"{run}/loss.png")
        print("\nWhat it writes now:", *narrator.samples, sep=f"\n{'-' * 80}\n")
        print(f"\nCheckpoints and the loss curve: {run}")
        print(f"All runs: mlflow ui --backend-store-uri sqlite:///{run.parent}/mlflow.db")


if __name__ == "__main__":
    main()
