"""What `AirCheckpoint` refuses before training: options and parts with which it could not keep its word."""

import math
import re

from lightning_air._lightning import AsyncCheckpointIO, FSDPStrategy, ModelParallelStrategy, Trainer
from lightning_air.checkpoint.io import AsyncUCCheckpointIO
from lightning_air.checkpoint.places import open_store

_FIELD = re.compile(r"\{([^}:]*)[^}]*\}")


def check_filename(filename: str | None, *, auto_insert_metric_name: bool) -> None:
    """Raise unless every checkpoint gets a name of its own, directly in the folder.

    Raises:
        ValueError: With what to write instead.
    """
    if filename is None:
        return
    if "step" not in _FIELD.findall(filename):
        raise ValueError(
            f"filename must contain {{step}}, or the checkpoints of one epoch have the same name, got {filename!r}. "
            f"Write {filename + '-{step}'!r}."
        )
    if "/" in (filename if auto_insert_metric_name else _FIELD.sub("", filename)):
        raise ValueError(
            f"filename must not contain a slash, which makes a folder of its own, got {filename!r}. Leave it out; for "
            "a metric with a slash in its name write '{step}-loss={val/loss:.2f}' and auto_insert_metric_name=False."
        )


def check_seconds(name: str, value: object) -> None:
    """Raise unless the value is a finite number of at least 0.

    Raises:
        ValueError: Naming the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")


def check_parts(trainer: Trainer, dirpath: str, *, has_pointer: bool) -> None:
    """Raise if the Trainer has a part that would save otherwise than asked for.

    Args:
        trainer: Whose strategy and CheckpointIO are known.
        dirpath: Where checkpoints go.
        has_pointer: Whether `last.ckpt` stands for the newest.

    Raises:
        ValueError: Naming the part, and what to use instead.
    """
    strategy, io = trainer.strategy, trainer.strategy.checkpoint_io
    is_ours = isinstance(io, AsyncUCCheckpointIO)
    is_sharded = isinstance(strategy, FSDPStrategy | ModelParallelStrategy)
    if is_ours and is_sharded and not hasattr(strategy, "sharding"):  # which AirStrategy has
        raise ValueError(
            f"{type(strategy).__name__} never calls a CheckpointIO, so its checkpoints would not be those of "
            "AsyncUCCheckpointIO. Use AirStrategy(sharding='fsdp'), or leave the plugin out."
        )
    if isinstance(io, AsyncCheckpointIO):
        raise ValueError(  # noqa: TRY004 - the type is fine elsewhere
            "AsyncCheckpointIO does not say when a checkpoint is written, so AirCheckpoint would delete the one before "
            "too early. Use AsyncUCCheckpointIO, or leave the plugin out."
        )
    if has_pointer and not is_ours and not open_store(dirpath).is_local:
        raise ValueError(
            f"save_last needs links, which {dirpath} does not have, or AsyncUCCheckpointIO, which reads pointer files. "
            "Add the plugin, or leave save_last out: ckpt_path='last' does not need it."
        )
