"""Trainer runs with `AirCheckpoint`, for its tests: every strategy, either CheckpointIO, a slow or failing volume.

All of it is made for the processes of `run_ranks`, but a run of one rank works in the test's own process too.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from lightning_air import AirCheckpoint, AirStrategy, AsyncUCCheckpointIO
from lightning_air.checkpoint import last_path, places, suitable
from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.store import Store
from tests.kit.hostile import Behaviour, HostileStore
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader

VOLUME = "/Volumes/main/default/hostile"
STEPS_PER_EPOCH = 8


# ---- a run -----------------------------------------------------------------------------------------------------------


def make_trainer(strategy: str, io: str, *callbacks: Callback, num_ranks: int = 1, **options: Any) -> Trainer:
    """Return a Trainer.

    Args:
        strategy: "single", "stock ddp", "air ddp" or "air fsdp".
        io: "ours" or "lightning's".
        *callbacks: In this order.
        num_ranks: For the stock strategies, which do not read it from the launch.
        **options: Of the Trainer; `io_options` are the CheckpointIO's.
    """
    made: Any = "auto"
    if strategy.startswith("air "):
        made = AirStrategy(strategy.removeprefix("air "))  # type: ignore[arg-type]
    elif strategy == "stock ddp":
        made = DDPStrategy(process_group_backend="gloo")
        options["devices"] = num_ranks
    plugins = [AsyncUCCheckpointIO(**options.pop("io_options", {}))] if io == "ours" else None
    defaults = {"max_epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0, "use_distributed_sampler": False}
    kwargs = fast_trainer_kwargs(
        options.pop("default_root_dir", Path.cwd()),
        **{**defaults, "strategy": made, "plugins": plugins, "callbacks": list(callbacks), **options},
    )
    if "enable_checkpointing" not in options:
        kwargs["enable_checkpointing"] = any(isinstance(each, AirCheckpoint) for each in callbacks)
    return Trainer(**kwargs)


def fit(trainer: Trainer, module: LightningModule | None = None, ckpt_path: str | None = None) -> None:
    """Train on 8 batches per epoch."""
    torch.manual_seed(1)
    batches = loader(trainer.world_size, trainer.global_rank)
    with warnings.catch_warnings():
        # The samples of these runs do not matter.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        trainer.fit(module or Regression(), batches, batches, ckpt_path=ckpt_path)
    if dist.is_initialized():
        dist.barrier()  # rank 0 has then deleted what it was to delete


class Scored(Regression):
    """Logs given scores, one per validation, as `score`, and the rank as `noise`."""

    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__()
        self.scores = [float(score) for score in scores]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("noise", float(self.global_rank))  # another value on each rank, as what is not reduced has
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.log("score", torch.tensor(self.scores[0]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.scores.pop(0)


class TwoOptimizers(Regression):
    """Optimizes by hand, with two optimizers that both step in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc,attr-defined]
        loss = self.loss(batch)
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss + self.other(loss.detach().reshape(1, 1)).square().sum())
        for optimizer in (first, second):
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters()), torch.optim.SGD(self.other.parameters(), lr=0.1)


# ---- what happened ---------------------------------------------------------------------------------------------------


def published(folder: str | Path) -> list[str]:
    """Return the names of what a reader finds, the oldest first."""
    found = list_checkpoints(str(folder))
    return [each.name for each in reversed(found) if each.has_metadata or each.is_file]


def steps(folder: str | Path) -> list[int]:
    """Return their steps."""
    found = list_checkpoints(str(folder))
    return [each.step or 0 for each in reversed(found) if each.has_metadata or each.is_file]


class Saves(Callback):
    """Notes at which steps the Trainer is asked to save, and to what name."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.names: list[str] = []
        self.batches: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        save = trainer.save_checkpoint

        def noted(filepath: Any, *args: Any, **kwargs: Any) -> None:
            self.steps.append(trainer.global_step)
            self.names.append(Path(filepath).name)
            self.batches.append(trainer.fit_loop.epoch_loop.total_batch_idx + 1)
            save(filepath, *args, **kwargs)

        trainer.save_checkpoint = noted  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(trainer).pop("save_checkpoint", None)


class CuriousLogger(Logger):
    """Looks, when it is told of a checkpoint, whether a reader finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.told: list[str] = []
        self.unpublished: list[str] = []

    @property
    def name(self) -> str:
        return "curious"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = {name: value for name, value in metrics.items() if name.startswith("checkpoint/")}
        if ours:
            self.metrics.append((step or 0, ours))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        shown = {checkpoint_callback.best_model_path, checkpoint_callback.last_model_path}
        shown |= set(checkpoint_callback.best_k_models)
        for path in shown - {""}:
            self.told.append(Path(path).name)
            if not Shelf().exists(path):
                self.unpublished.append(path)


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class PassTime(Callback):
    """Lets a callback's clock go on by so much in each batch."""

    def __init__(self, checkpoint: AirCheckpoint, seconds: float, start: float = 0.0) -> None:
        self.clock = FakeClock(start)
        self.seconds = seconds
        checkpoint._clock = self.clock

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.now += self.seconds


# ---- places ----------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What a hostile volume went through; only the rank that deletes sees it."""

    directory: Path
    fewest_while_deleting: list[int] = field(default_factory=list)

    def num_published(self) -> int:
        return len(list(self.directory.glob("*/*/.metadata")))


@contextmanager
def hostile_volume(directory: Path, behaviour: Behaviour | None = None, only: str = "") -> Iterator[Watched]:
    """Have all that lies below `VOLUME` in a hostile store, kept in a directory; other places are as they are.

    Args:
        directory: The same for all ranks.
        behaviour: How hostile, in the folders whose name contains `only`.
        only: See there.
    """
    stores: dict[str, HostileStore] = {}
    lock = threading.Lock()
    real = places.open_store

    def on_point(name: str) -> None:
        if name.startswith("delete ") and name.endswith(".metadata"):
            watched.fewest_while_deleting.append(watched.num_published())

    def open_place(path: Any, **options: Any) -> Store:
        root = places.parse_place(path).root
        if not root.startswith(VOLUME):
            return real(path, **options)
        with lock:
            if root not in stores:
                below = directory / root.removeprefix(VOLUME).strip("/")
                how = behaviour if only in root else None
                stores[root] = HostileStore(below, how, root=root, on_point=on_point)
            return stores[root]

    watched = Watched(directory)
    with (
        mock.patch.object(places, "open_store", open_place),
        mock.patch.object(suitable, "open_store", open_place),
        mock.patch.object(last_path, "open_store", open_place),
        mock.patch.object(Shelf.__init__, "__defaults__", (open_place,)),
    ):
        yield watched


def wait_until(is_so: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait for a background thread."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.005)
