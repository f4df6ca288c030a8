"""Five parts for training Lightning models on Databricks AI Runtime, a laptop, torchrun or SLURM."""

import typing as _typing

from lightning_air._version import __version__
from lightning_air.checkpoint import (
    AirCheckpoint,
    AsyncUCCheckpointIO,
    BadCheckpointError,
    CheckpointFailedError,
    VolumeReader,
    VolumeWriter,
    consolidate_checkpoint,
    latest_checkpoint,
    open_checkpoint,
    verify_checkpoint,
)
from lightning_air.data import (
    DataPosition,
    ResumableBatchSampler,
    ResumableSampler,
    ResumableShards,
    sample_order,
    sample_rng,
)
from lightning_air.health import GPUHealth, GPUSample, HangRule, Rule, default_rules, read_gpus
from lightning_air.strategy import AirStrategy

if _typing.TYPE_CHECKING:
    from lightning_air.tracking import AirMLflowLogger

__all__ = [
    "AirCheckpoint",
    "AirMLflowLogger",
    "AirStrategy",
    "AsyncUCCheckpointIO",
    "BadCheckpointError",
    "CheckpointFailedError",
    "DataPosition",
    "GPUHealth",
    "GPUSample",
    "HangRule",
    "ResumableBatchSampler",
    "ResumableSampler",
    "ResumableShards",
    "Rule",
    "VolumeReader",
    "VolumeWriter",
    "__version__",
    "consolidate_checkpoint",
    "default_rules",
    "latest_checkpoint",
    "open_checkpoint",
    "read_gpus",
    "sample_order",
    "sample_rng",
    "verify_checkpoint",
]


def __getattr__(name: str) -> _typing.Any:
    """Import what needs MLflow when it is asked for: that takes a second, and checkpoints need none of it."""
    if name == "AirMLflowLogger":
        from lightning_air.tracking import AirMLflowLogger  # noqa: PLC0415

        return AirMLflowLogger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
