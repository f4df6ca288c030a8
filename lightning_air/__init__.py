"""Five parts for training Lightning models on Databricks AI Runtime, a laptop, torchrun or SLURM."""

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
from lightning_air.strategy import AirStrategy

__all__ = [
    "AirCheckpoint",
    "AirStrategy",
    "AsyncUCCheckpointIO",
    "BadCheckpointError",
    "CheckpointFailedError",
    "VolumeReader",
    "VolumeWriter",
    "__version__",
    "consolidate_checkpoint",
    "latest_checkpoint",
    "open_checkpoint",
    "verify_checkpoint",
]
