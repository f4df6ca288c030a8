"""`VolumeWriter`: what `torch.distributed.checkpoint` needs to save on volumes, object stores and local folders."""

import dataclasses
import io
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_air.checkpoint.places import open_store, parse_place
from lightning_air.checkpoint.publishing import Details, publish
from lightning_air.checkpoint.shard_file import Item, WrittenFile
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.writing import WriteOptions, write_share
from lightning_air.runtime import staging_area


class VolumeWriter(StorageWriter):
    """Save with `dcp.save` or `dcp.async_save`: `.metadata` is published last, once all else has arrived.

    The checkpoint's folder is a fresh one: an existing checkpoint is refused, and what a killed save left is deleted.
    Any number of ranks; with `dcp.async_save`, in a process group with a backend for host memory.

    Example:
        `dcp.async_save(state, storage_writer=VolumeWriter("/Volumes/main/default/ckpt/step-100"))`

    Args:
        path: A local path, `/Volumes/…`, `dbfs:/Volumes/…` or a URL. None: each save says it with `checkpoint_id`.
        staging_dir: A local folder for files on their way to a volume or store. Default: the system's temporary folder.
        max_upload_workers: How many files a rank sends at once.
        upload_timeout: How long one save may spend on writing and moving files, retries included, in seconds.
        step: Optimizer steps done, for the manifest.

    Raises:
        ValueError: If an option is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        staging_dir: str | Path | None = None,
        max_upload_workers: int = 8,
        upload_timeout: float = 1800.0,
        step: int = 0,
    ) -> None:
        super().__init__()
        if max_upload_workers < 1:
            raise ValueError(f"max_upload_workers must be at least 1, got {max_upload_workers!r}.")
        if not 0 < upload_timeout < float("inf"):
            raise ValueError(f"upload_timeout must be a positive number of seconds, got {upload_timeout!r}.")
        self._root = None if path is None else parse_place(path).root
        self._options = WriteOptions(staging_area(staging_dir).path, max_upload_workers, float(upload_timeout))
        self._step = step
        self._num_ranks = 1
        self._started = 0.0

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is written."""
        if self._root is None:
            raise ValueError("VolumeWriter was given no path. Pass one to it, or `checkpoint_id` to `dcp.save`.")
        return self._root

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._root = parse_place(checkpoint_id).root

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del args
        if not kwargs.get("use_collectives", True):
            raise ValueError("VolumeWriter publishes one `.metadata` for all ranks: save with use_collectives=True.")
        self._started = time.monotonic()
        if is_coordinator:
            shelf = Shelf()
            if shelf.exists(self.checkpoint_id):
                raise FileExistsError(
                    f"There is a checkpoint at {self.checkpoint_id}, and none is ever overwritten. Save under another "
                    "name."
                )
            shelf.clear(self.checkpoint_id)

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._num_ranks = len(plans)
        return [dataclasses.replace(plan, storage_data=f"__{rank}_") for rank, plan in enumerate(plans)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        items = [Item((item.index,), _resolve(planner, item)) for item in plan.items]
        share = write_share(self._store(), items, plan.storage_data, self._options)
        results = [
            WriteResult(index, info.length, info) for file in share.files for index, info in file.entries
        ]  # as every storage writer returns them; and the files, for the manifest
        results += [WriteResult(MetadataIndex(file.name), file.record.num_bytes, file) for file in share.files]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        mine = [result for of_rank in results for result in of_rank]
        files = [result.storage_data for result in mine if isinstance(result.storage_data, WrittenFile)]
        metadata.storage_data = {
            result.index: result.storage_data for result in mine if not isinstance(result.storage_data, WrittenFile)
        }
        publish(
            self._store(),
            metadata,
            files,
            Details(step=self._step, world_size=self._num_ranks, sharding="dcp"),
            meta=None,
            deadline_seconds=max(self._options.deadline_seconds - (time.monotonic() - self._started), 0.001),
        )

    @override
    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a place for checkpoints."""
        try:
            parse_place(checkpoint_id)
        except ValueError:
            return False
        return True

    def exists(self) -> bool:
        """Return whether the checkpoint is published. Any thread may call this."""
        return self._store().num_bytes(METADATA_NAME) is not None

    def _store(self) -> Store:
        return open_store(self.checkpoint_id)


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor | bytes:
    data = planner.resolve_data(item)
    return data.getvalue() if isinstance(data, io.BytesIO) else data
