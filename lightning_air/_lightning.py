"""The only door to Lightning: every name of it that the package uses comes through here.

Public names, or a comment that says why a private one is needed and what would break without it; the
contract tests fail when a Lightning release moves one. The package speaks `lightning`, not
`pytorch_lightning`: the two are disjoint class trees, and a mix of them is refused by name.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

# Private: moves optimizer state to the device, which the stock strategies do at the end of `setup`.
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

# Private: the type of a path in the signatures that we override.
from lightning.fabric.utilities.types import _PATH as PathLike  # noqa: N811
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger, MLFlowLogger

# Private: by its type Lightning's loop goes, too; without it a step that reads batches itself would look like others.
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
    StrategyRegistry,
)

# Private: there is no public launcher that forks the ranks of a notebook.
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

__all__ = [
    "AsyncCheckpointIO",
    "Callback",
    "CheckpointIO",
    "ClusterEnvironment",
    "CombinedLoader",
    "DDPStrategy",
    "DataLoaderIterDataFetcher",
    "FSDPStrategy",
    "LightningCLI",
    "LightningEnvironment",
    "LightningModule",
    "Logger",
    "MLFlowLogger",
    "MisconfigurationException",
    "ModelCheckpoint",
    "ModelParallelStrategy",
    "MultiProcessingLauncher",
    "ParallelStrategy",
    "PathLike",
    "ReduceOp",
    "SIGTERMException",
    "SaveConfigCallback",
    "Strategy",
    "StrategyRegistry",
    "Tqdm",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
    "all_parts",
    "batches_that_stepped",
    "change_counters",
    "end_restart",
    "hands_out_its_iterator",
    "is_overridden",
    "loaded_checkpoint",
    "optimizers_to_device",
    "other_package_hint",
    "rank_zero_experiment",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "read_anew",
    "refuse_other_package",
    "set_num_batches",
    "to_uncompiled",
    "unwrap_train_dataloaders",
    "will_read_anew",
    "wrap_train_dataloaders",
]

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        """Import what LightningCLI is made of when it is asked for: that imports the extra `cli`."""
        if name not in {"LightningCLI", "SaveConfigCallback"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning.pytorch import cli  # noqa: PLC0415

        return getattr(cli, name)


def refuse_other_package(trainer: object, *parts: object) -> None:
    """Raise when a Trainer or one of the parts it runs comes from `pytorch_lightning`.

    Lightning checks this for the model only; a foreign callback is taken silently and none of the
    `isinstance` checks that its hooks make can hold.

    Args:
        trainer: The Trainer that called us.
        *parts: Callbacks, loggers and plugins that it runs.

    Raises:
        TypeError: Naming the part and both packages.
    """
    for part in (trainer, *parts):
        module = type(part).__module__
        if module == "pytorch_lightning" or module.startswith("pytorch_lightning."):
            raise TypeError(
                f"{type(part).__qualname__} comes from the package `pytorch_lightning`, but lightning_air's parts are "
                "built on `lightning`, and the two cannot be mixed. Import everything from `lightning.pytorch`."
            )


def other_package_hint() -> str:
    """Return a sentence about `pytorch_lightning` when it is imported in this process, else an empty string.

    A `pytorch_lightning` Trainer refuses a foreign strategy before any hook of ours runs, with a message that
    shows our `repr`: the hint stands there.
    """
    if "pytorch_lightning" not in sys.modules:
        return ""
    return ": a strategy of the package `lightning`, which a Trainer of `pytorch_lightning` cannot run"


def loaded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return what a Trainer is resuming from, from when it has read it until training begins; {} otherwise.

    Private, for want of a public way: a logger has no hook in which it is given.
    """
    loaded: dict[str, Any] = trainer._checkpoint_connector._loaded_checkpoint  # noqa: SLF001
    return loaded


def batches_that_stepped(run: Trainer | Mapping[str, Any]) -> int:
    """Return how many batches have ended in an optimizer's step, which is what Lightning logs at.

    With several optimizers these are fewer than `global_step`, which counts each of them.

    Private: of a Trainer as of a checkpoint, the state of the loops has no public reader.

    Args:
        run: A Trainer (within a batch: without that batch), or what a checkpoint holds.
    """
    if isinstance(run, Trainer):
        return run.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
    global_step = int(run.get("global_step", 0))
    try:
        stepped = int(run["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"])
    except (KeyError, TypeError):  # of another tool
        return global_step
    return global_step if global_step <= stepped + 1 else stepped  # the last batch is counted after a save in it


def all_parts(trainer: Trainer) -> list[Any]:
    """Return the callbacks and loggers of a Trainer."""
    return [*trainer.callbacks, *trainer.loggers]  # type: ignore[attr-defined] # set by Trainer's callback connector


def wrap_train_dataloaders(trainer: Trainer, wrap: Callable[[Any], Any]) -> None:
    """Have a Trainer train on what a function makes of the loaders that the user gave, whenever it asks for them.

    Private, for want of a public way that sees the training loaders only, and before Lightning has replaced their
    samplers: `Strategy.process_dataloader` comes after that, and is for validation's, too.
    """
    source = trainer.fit_loop._data_source  # noqa: SLF001
    ask = type(source).dataloader
    source.dataloader = lambda: wrap(ask(source))  # type: ignore[method-assign]


def unwrap_train_dataloaders(trainer: Trainer) -> None:
    """Undo `wrap_train_dataloaders`."""
    vars(trainer.fit_loop._data_source).pop("dataloader", None)  # noqa: SLF001


def set_num_batches(trainer: Trainer, num_batches: int) -> None:
    """Let the epoch that begins, or goes on, end after its batch of this number.

    Lightning settles that when it sets up the loader, for all epochs to come. Its iterator over the loader is made
    anew; private, as there is no other way to it.
    """
    loop = trainer.fit_loop
    loop.max_batches = num_batches
    fetcher = loop._data_fetcher  # noqa: SLF001
    assert fetcher is not None  # since `setup_data`
    fetcher.combined_loader.limits = [num_batches]
    read_anew(trainer)
    is_by_batches = getattr(trainer, "val_check_batch", None) not in {None, float("inf")}
    if is_by_batches and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def read_anew(trainer: Trainer) -> None:
    """Let Lightning ask its loader for a new iterator, and read as far ahead as it does.

    Private, as is what keeps the iterator.
    """
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    assert fetcher is not None  # since `setup_data`
    iter(fetcher)


def will_read_anew(trainer: Trainer) -> bool:
    """Say, in `on_train_epoch_start`, whether Lightning asks for a new iterator for the epoch that begins.

    It does not for the first epoch of a run, for which it asked when it set up the loader.
    """
    loop = trainer.fit_loop
    is_resuming = getattr(loop, "is_resuming", False)  # from Lightning 2.6 on
    return trainer.current_epoch > 0 and not is_resuming and not loop.epoch_loop.restarting


def hands_out_its_iterator(trainer: Trainer) -> bool:
    """Say whether `training_step` takes `dataloader_iter`, and so itself decides how many batches it reads.

    Private: the kind of what keeps the iterator, by which Lightning goes.
    """
    return isinstance(trainer.fit_loop._data_fetcher, DataLoaderIterDataFetcher)  # noqa: SLF001


def change_counters(trainer: Trainer, change: Callable[[dict[str, Any]], None]) -> None:
    """Let a Trainer go on from changed counters as from those of a checkpoint, before it trains.

    Args:
        trainer: Between two trainings.
        change: Gets what a checkpoint would hold as `["loops"]["fit_loop"]`.
    """
    state = trainer.fit_loop.state_dict()
    change(state)
    trainer.fit_loop.load_state_dict(state)


def end_restart(trainer: Trainer) -> None:
    """Let an epoch begin as any other after a checkpoint was loaded; with `max_steps` Lightning would not."""
    loop = trainer.fit_loop
    for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        each.on_iteration_done()
