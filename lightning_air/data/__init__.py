"""Resuming at the exact sample: any topology, O(1), or a refusal that says why."""

from lightning_air.data.callback import DataPosition
from lightning_air.data.permutation import SampleOrder, sample_order, sample_rng
from lightning_air.data.record import DataChangedError, PositionRecord
from lightning_air.data.samplers import ResumableBatchSampler, ResumableSampler
from lightning_air.data.shards import ResumableShards, ShardedDataset
from lightning_air.data.stream_record import StreamRecord

__all__ = [
    "DataChangedError",
    "DataPosition",
    "PositionRecord",
    "ResumableBatchSampler",
    "ResumableSampler",
    "ResumableShards",
    "SampleOrder",
    "ShardedDataset",
    "StreamRecord",
    "sample_order",
    "sample_rng",
]
