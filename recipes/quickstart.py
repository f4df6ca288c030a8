"""Train a small GPT to write Python, on the standard library of the Python that runs it.

    python recipes/quickstart.py                            two CPU processes, or all GPUs of this machine
    torchrun --nproc-per-node=2 recipes/quickstart.py       as torchrun says
    python recipes/quickstart.py --resume --max-steps 1200  go on where the newest run stopped

The file is the same on Databricks AI Runtime, where the workload's command starts it once per node. Nothing is downloaded.
Everything a run leaves is under `quickstart_output/`: the MLflow database, and a folder per run with its checkpoints
and its loss curve.
"""

import argparse
import logging
import math
import sysconfig
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_air import AirStrategy
from lightning_air.runtime import detect_launch

MAX_STEPS = 600
VAL_EVERY_STEPS = 100
NUM_BYTES = 256  # the vocabulary: a token is a byte, so the model needs no tokenizer


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in. `sharding="fsdp"` shards block by block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, length, width of a head)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class ByteGPT(LightningModule):
    """A GPT over bytes: it gives every next byte a probability, from the bytes before it.

    Args:
        width: Size of the activations; a multiple of `num_heads`.
        num_blocks: Number of blocks.
        num_heads: Number of attention heads in a block.
        context_bytes: How far the model can look back.
        learning_rate: The peak, reached after `warmup_steps`.
        warmup_steps: Optimizer steps over which the learning rate rises.
        decay_steps: Optimizer step at which the cosine has brought the learning rate down to a tenth.
        weight_decay: For the matrices; norms and biases are not decayed.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        num_blocks: int = 4,
        num_heads: int = 4,
        context_bytes: int = 128,
        learning_rate: float = 3e-3,
        warmup_steps: int = 40,
        decay_steps: int = 400,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()  # into the checkpoint, and as parameters into the MLflow run
        self.byte_embedding = nn.Embedding(NUM_BYTES, width)
        self.position_embedding = nn.Embedding(context_bytes, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES, bias=False))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Small weights: the untrained model is close to uniform, so its loss starts at ln 256 = 5.545.
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte after each byte: (batch, length) to (batch, length, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.byte_embedding(text) + self.position_embedding(positions)))

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss in nats per byte of a batch of shape (batch, length + 1)."""
        return cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True)  # the mean over all ranks

    def configure_optimizers(self) -> Any:
        hp = self.hparams
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": hp["weight_decay"]},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=hp["learning_rate"], betas=(0.9, 0.95))

        def factor(step: int) -> float:
            progress = min(1.0, step / hp["decay_steps"])
            return min((step + 1) / hp["warmup_steps"], 0.55 + 0.45 * math.cos(math.pi * progress))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, *, num_bytes: int, temperature: float = 0.7) -> str:
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.hparams["context_bytes"] :])[0, -1]
            byte = torch.multinomial((logits / temperature).softmax(-1), 1)
            text = torch.cat([text, byte[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class ByteWindows(Dataset[Tensor]):
    """A text cut into windows of `context_bytes` and the byte after them, side by side."""

    def __init__(self, paths: list[Path], context_bytes: int) -> None:
        text = b"".join(path.read_bytes() for path in paths)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context_bytes = context_bytes

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context_bytes

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context_bytes
        return self.text[start : start + self.context_bytes + 1].long()


class StdlibBytes(LightningDataModule):
    """The source of Python's standard library; every tenth file is held out for validation.

    Args:
        context_bytes: Length of a window; that of the model.
        batch_size: Windows in a batch of one rank.
        num_val_windows: Validate on this many windows, spread over the held-out text.
    """

    def __init__(self, *, context_bytes: int = 128, batch_size: int = 16, num_val_windows: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()

    @staticmethod
    def files() -> tuple[list[Path], list[Path]]:
        """Return the files to train on and the files to validate on, the same on every rank."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        # Installed packages and tests are not the library; the encodings are tables, pydoc_data is prose.
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
        paths = [path for path in sorted(folder.rglob("*.py")) if not skip.intersection(path.relative_to(folder).parts)]
        return [path for index, path in enumerate(paths) if index % 10], paths[::10]

    def setup(self, stage: str) -> None:
        train_paths, val_paths = self.files()
        self.train_windows = ByteWindows(train_paths, self.hparams["context_bytes"])
        val_windows = ByteWindows(val_paths, self.hparams["context_bytes"])
        step = max(1, len(val_windows) // self.hparams["num_val_windows"])
        self.val_windows = Subset(val_windows, range(0, len(val_windows), step))

    # Lightning gives each rank its share of the windows. They are in memory: workers would only cost their start.
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train_windows, batch_size=self.hparams["batch_size"], shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_windows, batch_size=self.hparams["batch_size"])


class Narrator(Callback):
    """Tell on rank 0 what happens, and let the trained model write."""

    def __init__(self) -> None:
        self.samples: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            data = trainer.datamodule
            num_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            print(f"{num_parameters:,} parameters on {trainer.world_size} processes, {data}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            losses = trainer.callback_metrics
            train, val = losses["train/loss"], losses["val/loss"]
            print(f"step {trainer.global_step:5}: {train:.3f} nats per byte in training, {val:.3f} on held-out files")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # On every rank, though rank 0 alone prints: a sharded model answers only when all ranks ask.
        assert isinstance(pl_module, ByteGPT)
        self.samples = [pl_module.generate(prompt, num_bytes=200) for prompt in ("import ", "def ", "class ")]


def draw_losses(logger: MLFlowLogger, path: Path) -> None:
    """Draw the losses that MLflow has recorded for the logger's run."""
    from matplotlib.figure import Figure  # only rank 0 draws, so only rank 0 waits for this import

    uniform = math.log(NUM_BYTES)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(uniform, color="grey", linestyle="--", label=f"all bytes equally likely: {uniform:.3f}")
    for key, label, style in (("train/loss", "training", "-"), ("val/loss", "held-out files", "o-")):
        points = logger.experiment.get_metric_history(logger.run_id, key)
        steps, losses = [point.step for point in points], [point.value for point in points]
        axes.plot(steps, losses, style, label=f"{label}: {losses[-1]:.3f} at the end", linewidth=1)
    axes.set(title="A small GPT on Python's standard library", xlabel="optimizer step", ylabel="loss, nats per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, then show what the model writes and how its loss fell."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--sharding", choices=["ddp", "fsdp", "hsdp"], default="ddp", help="as in AirStrategy")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"), help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint under --output")
    options = parser.parse_args()
    output: Path = options.output.resolve()
    checkpoints = sorted(output.glob("run-*/checkpoints/last.ckpt"))
    if options.resume and not checkpoints:
        parser.error(f"--resume: there is no run-*/checkpoints/last.ckpt in {output}")

    # Lightning's INFO lines advertise; the two warnings are known, and not about this job: Lightning on a newer torch,
    # and a loader without worker processes, which data in memory does not need.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*treespec, LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", r".*does not have many workers")

    seed_everything(0, verbose=False)
    # The ranks may read the clock in different seconds: ModelCheckpoint takes rank 0's folder on all of them.
    run = output / f"run-{datetime.now():%Y-%m-%d-%H%M%S}"
    narrator = Narrator()
    on_gpu = torch.cuda.is_available()
    is_launched = detect_launch().kind != "local"  # AirStrategy then takes the number of processes from the launcher
    trainer = Trainer(
        strategy=AirStrategy(sharding=options.sharding),
        accelerator="gpu" if on_gpu else "cpu",
        devices="auto" if on_gpu or is_launched else 2,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=min(VAL_EVERY_STEPS, options.max_steps),
        check_val_every_n_epoch=None,  # count steps, not epochs: a run is shorter than one
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(run / "checkpoints", filename="best", monitor="val/loss", save_last=True),
            narrator,
        ],
    )
    if trainer.is_global_zero:
        # Rank 0 alone logs. Making the logger on every rank would let two processes create MLflow's tables at once,
        # and one of them would fail.
        trainer.logger = MLFlowLogger(
            "quickstart",
            run_name=run.name,
            tracking_uri=f"sqlite:///{output}/mlflow.db",
            artifact_location=str(output / "artifacts"),
        )
    trainer.fit(
        ByteGPT(decay_steps=options.max_steps), StdlibBytes(), ckpt_path=checkpoints[-1] if options.resume else None
    )
    if trainer.is_global_zero:
        assert isinstance(trainer.logger, MLFlowLogger)
        draw_losses(trainer.logger, run / "loss.png")
        trainer.logger.experiment.log_artifact(trainer.logger.run_id, str(run / "loss.png"))
        for sample in narrator.samples:
            print("-" * 80, sample, sep="\n")
        print("-" * 80)
        print(f"The loss curve and the checkpoints are in {run}")
        print(f"To see all runs: mlflow ui --backend-store-uri sqlite:///{output}/mlflow.db")


if __name__ == "__main__":
    main()
