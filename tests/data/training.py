"""Trainer runs whose model writes down which samples it was given, and whose checkpoints remember those it learnt from.

What a run has trained on is part of the model's own state here, as it is of real weights: after a resume it is what the
checkpoint's weights have seen, not what some killed process had.
"""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_air import sample_order
from tests.kit.trainers import fast_trainer_kwargs

NUM_SAMPLES = 40


class Numbers(Dataset[int]):
    """Sample number i is i."""

    def __init__(self, n: int = NUM_SAMPLES) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Learner(LightningModule):
    """Learns a weight per sample: its weights show how often each sample was in an optimizer's step."""

    def __init__(self, n: int = NUM_SAMPLES, loader: DataLoader | None = None) -> None:
        super().__init__()
        self.n = n
        self.loader = loader
        self.seen = nn.Parameter(torch.zeros(n))
        self.batches: list[tuple[int, int, list[int]]] = []  # (epoch, batch_idx, samples) of this process
        self.validated: list[tuple[int, int]] = []  # (epoch, batches before)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches.append((self.current_epoch, batch_idx, batch.tolist()))
        return -self.seen[batch].mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, self.trainer.fit_loop.batch_idx + 1))

    def train_dataloader(self) -> Any:
        return self.loader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def samples(self, epoch: int) -> list[int]:
        """What this process was given in an epoch, in order."""
        return [sample for e, _, samples in self.batches if e == epoch for sample in samples]


def loader(n: int = NUM_SAMPLES, batch_size: int = 4, *, shuffle: bool = True, **options: Any) -> DataLoader:
    return DataLoader(Numbers(n), batch_size=batch_size, shuffle=shuffle, **options)


def order(epoch: int, n: int = NUM_SAMPLES, seed: int = 0) -> list[int]:
    return sample_order(n, seed=seed, epoch=epoch)[:].tolist()


class SaveAt(Callback):
    """Saves in the hooks that are named, each time to a file of its own: `<hook>-<number>.ckpt`."""

    def __init__(self, *hooks: str, folder: str | Path = ".") -> None:
        self.paths: list[str] = []
        for hook in hooks:
            setattr(self, hook, self._saver(hook, Path(folder)))

    def _saver(self, hook: str, folder: Path) -> Any:
        numbers = iter(range(1, 10**6))

        def save(trainer: Trainer, *_: Any) -> None:
            if not trainer.sanity_checking:
                path = str(folder / f"{hook}-{next(numbers)}.ckpt")
                trainer.save_checkpoint(path)
                self.paths.append(path)

        return save


class Died(Exception):  # noqa: N818 - it is none
    """What a run dies of."""


class DieAfter(Callback):
    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.num_batches:
            raise Died


def fit(
    module: LightningModule,
    data: Any,
    *callbacks: Callback,
    ckpt_path: str | None = None,
    val: Any = None,
    **options: Any,
) -> Trainer:
    """Train in one process, and return the Trainer; a `Died` ends it early."""
    defaults = {"num_sanity_val_steps": 0, "limit_val_batches": 0 if val is None else 1}
    folder = options.pop("default_root_dir", Path.cwd())
    trainer = Trainer(**fast_trainer_kwargs(folder, **{**defaults, **options}), callbacks=list(callbacks))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to create")
        with contextlib.suppress(Died):
            trainer.fit(module, data, loader(shuffle=False) if val is None else val, ckpt_path=ckpt_path)
    return trainer
