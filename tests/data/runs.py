"""Runs on several real ranks, each attempt in processes of its own, that write down what each rank was given."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_air import AirCheckpoint, AirStrategy, AsyncUCCheckpointIO, DataPosition
from tests.data.streams import SAMPLES_PER_SHARD, Plain, Stateful, shards
from tests.data.training import loader
from tests.kit.points import reach
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import full_weights

NUM_FEATURES = 4


class Model(LightningModule):
    """Writes what it is given to a file as it goes, since its process is to be killed."""

    def __init__(self, log: str, n: int) -> None:
        super().__init__()
        self.log_path = log
        self.net = torch.nn.Linear(NUM_FEATURES, 1)
        self.register_buffer("table", torch.randn(n, NUM_FEATURES, generator=torch.Generator().manual_seed(1)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        reach(f"batch:{self.trainer.fit_loop.total_batch_idx + 1}")
        with Path(self.log_path).open("a") as file:
            told = {"rank": self.global_rank, "step": self.global_step, "epoch": self.current_epoch}
            file.write(
                json.dumps({**told, "batch": batch_idx, "samples": batch.tolist() if self.counts else []}) + "\n"
            )
        return self.net(self.table[batch]).square().mean()

    @property
    def counts(self) -> bool:
        """Whether the batch weighs anything: a rank without a sample of its own runs one of another's."""
        (position,) = (each for each in self.trainer.callbacks if isinstance(each, DataPosition))
        return position._feed.loss_weight(self.trainer.fit_loop.batch_idx) > 0

    def configure_model(self) -> None:
        if type(self.trainer.strategy) is ModelParallelStrategy:
            fully_shard(self.net, mesh=self.trainer.strategy.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def strategy_of(name: str, num_ranks: int) -> Any:
    if name.startswith("air "):
        return AirStrategy(name.removeprefix("air "))  # type: ignore[arg-type]
    stock: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "model parallel": lambda: ModelParallelStrategy(num_ranks, 1, process_group_backend="gloo"),
    }
    return stock[name]() if name in stock else "auto"


def run(
    folder: str,
    attempt: int,
    strategy: str,
    *,
    n: int = 96,
    batch_size: int = 2,
    accumulate: int = 1,
    num_workers: int = 0,
    max_epochs: int = 2,
    is_ours: bool = True,
    every_steps: int = 1,
    use_distributed_sampler: bool = True,
    tail: Any = "drop",
    num_ranks: int = 1,
    model: type[Model] = Model,
    stream: str = "",
    limit: int | None = None,
) -> dict[str, Any]:
    """One attempt of a job, in each of its ranks: resumes from the newest checkpoint in the folder, if there is one."""
    checkpoint: Callback
    if is_ours:
        checkpoint = AirCheckpoint(f"{folder}/checkpoints", every=f"{every_steps}steps", keep_last=3)
    else:
        checkpoint = ModelCheckpoint(
            f"{folder}/checkpoints/{attempt}", every_n_train_steps=every_steps, save_top_k=-1, filename="{step}"
        )
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "enable_checkpointing": True, "max_epochs": max_epochs}
    if not strategy.startswith("air "):
        options["devices"] = num_ranks
    trainer = Trainer(
        **fast_trainer_kwargs(
            folder,
            strategy=strategy_of(strategy, num_ranks),
            plugins=[AsyncUCCheckpointIO()] if is_ours else None,
            callbacks=[DataPosition(seed=3, tail=tail), checkpoint],
            accumulate_grad_batches=accumulate,
            use_distributed_sampler=use_distributed_sampler,
            limit_train_batches=limit,
            **options,
        )
    )
    torch.manual_seed(1)
    module = model(f"{folder}/{attempt}-{trainer.global_rank}.jsonl", n)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*there is no last checkpoint available")
        warnings.filterwarnings("ignore", "The dirpath has changed from")
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        data = loader(n, batch_size, num_workers=num_workers)
        if stream:
            data = DataLoader(dataset_of(stream, n), batch_size=batch_size, num_workers=num_workers)
        trainer.fit(module, data, ckpt_path="last" if is_ours else newest(folder))
    told = {"steps": trainer.global_step, "weights": full_weights(module)["net.weight"].flatten().tolist()}
    if dist.is_initialized():
        dist.barrier()
    return told


def dataset_of(stream: str, n: int) -> Any:
    """Return an iterable dataset, of which each rank reads a part."""
    if stream == "shards":
        return shards(n // SAMPLES_PER_SHARD)
    return {"stateful": Stateful, "plain": Plain}[stream](n, (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


def steps_of(folder: str | Path, num_attempts: int) -> dict[int, tuple[int, list[int]]]:
    """Return (epoch, samples) of each optimizer step that counts: as the last attempt that made it was given them.

    A step that an attempt has made after its last checkpoint is made again by the next one.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    for attempt in range(num_attempts):
        own: dict[int, list[tuple[int, int, int, list[int]]]] = {}
        for path in sorted(Path(folder).glob(f"{attempt}-*.jsonl")):
            for line in path.read_text().splitlines():
                told = json.loads(line)
                entry = (told["epoch"], told["batch"], told["rank"], told["samples"])
                own.setdefault(told["step"], []).append(entry)
        for step, given in own.items():
            samples: list[int] = []
            for batch in sorted({batch for _, batch, _, _ in given}):
                shares = [share for _, number, _, share in sorted(given, key=lambda each: each[2]) if number == batch]
                samples += [
                    share[turn] for turn in range(max(map(len, shares))) for share in shares if turn < len(share)
                ]
            found[step] = given[0][0], samples
    return found


def epochs_of(folder: str | Path, num_attempts: int) -> dict[int, list[int]]:
    """Return the samples of each epoch, in order, as the weights have seen them."""
    epochs: dict[int, list[int]] = {}
    for _, (epoch, samples) in sorted(steps_of(folder, num_attempts).items()):
        epochs.setdefault(epoch, []).extend(samples)
    return epochs


def newest(folder: str) -> str | None:
    """Return the newest of Lightning's own checkpoints: a file, or a directory, whose `meta.pt` is written last."""
    found = [
        path for path in Path(folder).glob("checkpoints/*/*.ckpt") if path.is_file() or (path / "meta.pt").exists()
    ]
    return str(max(found, key=lambda path: (int(path.stem.removeprefix("step=")), path.parent.name))) if found else None


def first_step(folder: str | Path, attempt: int) -> int:
    """Return the optimizer step that an attempt began with."""
    (line, *_) = Path(folder, f"{attempt}-0.jsonl").read_text().splitlines()
    return int(json.loads(line)["step"])
