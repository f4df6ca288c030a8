"""Checkpoints that are never lost: asynchronous, verified, published whole, and loaded anywhere."""

from lightning_air.checkpoint.callback import AirCheckpoint
from lightning_air.checkpoint.consolidating import consolidate_checkpoint, open_checkpoint
from lightning_air.checkpoint.io import AsyncUCCheckpointIO
from lightning_air.checkpoint.latest import latest_checkpoint
from lightning_air.checkpoint.saver import CheckpointFailedError, SaveReport
from lightning_air.checkpoint.untrusted import BadCheckpointError
from lightning_air.checkpoint.verify import verify_checkpoint
from lightning_air.checkpoint.volume_reader import VolumeReader
from lightning_air.checkpoint.volume_writer import VolumeWriter

__all__ = [
    "AirCheckpoint",
    "AsyncUCCheckpointIO",
    "BadCheckpointError",
    "CheckpointFailedError",
    "SaveReport",
    "VolumeReader",
    "VolumeWriter",
    "consolidate_checkpoint",
    "latest_checkpoint",
    "open_checkpoint",
    "verify_checkpoint",
]
