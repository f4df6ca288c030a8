"""What `AirCheckpoint` refuses before training: options, parts and places with which it could not keep its word."""

import math
import re
from collections.abc import Sequence

from lightning_air._lightning import AsyncCheckpointIO, FSDPStrategy, ModelParallelStrategy, Trainer
from lightning_air.checkpoint.io import AsyncUCCheckpointIO
from lightning_air.checkpoint.keeping import Keeping, Known
from lightning_air.checkpoint.places import check_writable, open_store

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
    if is_ours and is_sharded and not _is_air(trainer):
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


def check_own_folder(dirpath: str, others: Sequence[object]) -> None:
    """Raise if another AirCheckpoint of the Trainer saves to the same folder.

    Raises:
        ValueError: With what to do.
    """
    if dirpath in others:
        raise ValueError(
            f"Two AirCheckpoints save to {dirpath}, and would delete each other's checkpoints. One keeps both the "
            "newest and, with `monitor`, the best; or give each a dirpath of its own."
        )


def check_same_start(trainer: Trainer, found: str | None, dirpath: str) -> None:
    """Raise on every rank if some would load another checkpoint, or none. Collective: every rank calls this.

    Ranks look for "last" before they can talk to each other, and would wait for each other in the load. Where all load
    together rank 0's path counts, and another rank's listing may lag behind; but all have to load.

    Args:
        trainer: Whose ranks they are.
        found: What this rank has found.
        dirpath: Where.

    Raises:
        RuntimeError: With what they found.
    """
    first = trainer.strategy.broadcast(found)
    loads_together = isinstance(trainer.strategy.checkpoint_io, AsyncUCCheckpointIO) and _is_air(trainer)
    differs = (found is None) != (first is None) if loads_together else found != first
    if trainer.strategy.reduce_boolean_decision(differs, all=False):
        other = "others another" if found == first else f"rank {trainer.global_rank} {found or 'none'}"
        raise RuntimeError(
            f"The ranks found different checkpoints to resume from in {dirpath}: rank 0 {first or 'none'}, {other}. "
            "Every node has to see the same ones: use a volume, an object store or a shared folder."
        )


def look_together(trainer: Trainer, folder: str, *, only_ours: bool, monitor: str | None) -> list[Known]:
    """Return what lies in a folder, on every rank, if it can be written to. Collective: every rank calls this.

    Args:
        trainer: Whose ranks they are.
        folder: Where checkpoints go.
        only_ours: As for `Keeping.look`.
        monitor: As for `Keeping.look`.

    Raises:
        OSError: On every rank, with what is wrong with the place.
    """
    found: list[Known] = []
    error: Exception | None = None
    try:
        store = open_store(folder)  # on every rank: a node may lack the mount, or the package for the Files API
        if trainer.is_global_zero:
            check_writable(store)
            found = Keeping.look(folder, only_ours=only_ours, monitor=monitor)
    except Exception as raised:  # noqa: BLE001 - raised below, on every rank
        error = raised
    told, found = trainer.strategy.broadcast((None if error is None else str(error), found))
    if trainer.strategy.reduce_boolean_decision(error is not None, all=False):
        raise OSError(str(error) if error is not None else told or f"Another rank cannot use {folder}.") from error
    return found


def _is_air(trainer: Trainer) -> bool:
    return hasattr(trainer.strategy, "sharding")  # the rooms do not import each other
