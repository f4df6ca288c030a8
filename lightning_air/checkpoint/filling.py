"""Plan which part of which file some tensors need, so that any number of ranks reads what any other number wrote.

`torch.distributed.checkpoint`'s planner decides; `shard_reading.py` reads.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # private, and what `.metadata` holds
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from lightning_air.checkpoint.shard_reading import Check, read_plan


class Filling:
    """What has to be read to fill some tensors, and where it goes. Nothing is read before `read`.

    Args:
        flat: Flat key to a tensor to fill in place (plain, or this rank's shard of it), or to anything where the
            checkpoint has an object, which will take its place.
        metadata: Of the checkpoint.
        source: What a message calls the checkpoint.

    Attributes:
        files: The names of the files that are needed, and how many bytes of each.

    Raises:
        ValueError: If the checkpoint lacks a key or has a tensor of another size.
    """

    def __init__(self, flat: dict[str, Any], metadata: Metadata, *, source: str) -> None:
        lacking = [key for key in flat if key not in metadata.state_dict_metadata]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""  # noqa: PLR2004 - as many as are shown
            raise ValueError(
                f"{source} does not hold {', '.join(map(repr, lacking[:3]))}{more}. It was saved from another model or "
                "optimizer, or without its optimizer: load it into what it was saved from. With "
                "`strict_loading = False` on the LightningModule, weights that it lacks stay as they are."
            )
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(flat, metadata, is_coordinator=False)
        self._plan = self._planner.finish_plan(self._planner.create_local_plan())
        self._storage: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
        self.files = files_of(self._plan, self._storage)

    def read(
        self,
        path_of: Callable[[str], Path],
        *,
        check: Check | None = None,
        checked: Collection[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Fill the tensors, as `read_plan` does."""
        read_plan(
            self._plan,
            self._planner,
            self._storage,
            path_of,
            check=check,
            checked=checked,
            weights_only=weights_only,
        )


def empty_like_saved(metadata: Metadata) -> dict[str, Any]:
    """Return whole tensors in host memory, with nothing in them, for all that a checkpoint holds; None for objects."""
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def files_of(plan: LoadPlan, storage: Mapping[MetadataIndex, StorageInfo]) -> dict[str, int]:
    """Return the names of the files that a plan reads, and how many bytes it reads of each, about."""
    found: dict[str, int] = {}
    for item in plan.items:
        info = storage[item.storage_index]
        found[info.relative_path] = found.get(info.relative_path, 0) + info.length
    return found
