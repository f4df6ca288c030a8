"""`VolumeReader`: what `torch.distributed.checkpoint` needs to load from volumes, object stores and local folders."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from lightning_air.checkpoint.filling import files_of
from lightning_air.checkpoint.loading import Verify
from lightning_air.checkpoint.opened import OpenedFolder, read_small_files
from lightning_air.checkpoint.places import open_store, parse_place
from lightning_air.checkpoint.scratch import scratch_folder
from lightning_air.checkpoint.shard_reading import read_plan
from lightning_air.checkpoint.transfer import download
from lightning_air.runtime import staging_area


class VolumeReader(StorageReader):
    """Load with `dcp.load`: what is used is verified as it is read, and nothing that could run code is unpickled.

    Each rank fetches the files that it needs, whatever the number of ranks that wrote them.

    Example:
        `dcp.load(state, storage_reader=VolumeReader("/Volumes/main/default/ckpt/step-100"))`

    Args:
        path: A local path, `/Volumes/…`, `dbfs:/Volumes/…` or a URL. None: each load says it with `checkpoint_id`.
        verify: What is compared with the manifest: "digest" (all bytes of the files that are used), "size", or "off".
        staging_dir: A local folder for files on their way. Default: the system's temporary folder.
        max_download_workers: How many files a rank fetches at once.
        download_timeout: How long one load may spend on moving files, retries included, in seconds.

    Raises:
        ValueError: If an option is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        verify: Verify = "digest",
        staging_dir: str | Path | None = None,
        max_download_workers: int = 8,
        download_timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        if verify not in ("digest", "size", "off"):
            raise ValueError(f"verify must be 'digest', 'size' or 'off', got {verify!r}.")
        if max_download_workers < 1:
            raise ValueError(f"max_download_workers must be at least 1, got {max_download_workers!r}.")
        if not 0 < download_timeout < float("inf"):
            raise ValueError(f"download_timeout must be a positive number of seconds, got {download_timeout!r}.")
        self._root = None if path is None else parse_place(path).root
        self._verify = verify
        self._staging_dir = staging_area(staging_dir).path
        self._max_download_workers = max_download_workers
        self._download_timeout = float(download_timeout)
        self._folder: OpenedFolder | None = None
        self._storage: dict[Any, Any] = {}  # of `.metadata`: where each part of each tensor lies

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is read from."""
        if self._root is None:
            raise ValueError("VolumeReader was given no path. Pass one to it, or `checkpoint_id` to `dcp.load`.")
        return self._root

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._folder = None
        if checkpoint_id is not None:
            self._root = parse_place(checkpoint_id).root

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what lies where.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            BadCheckpointError: If it cannot be used.
        """
        del args, kwargs
        contents = read_small_files(self.checkpoint_id, open_store(self.checkpoint_id))
        if contents is None:
            raise FileNotFoundError(f"There is no checkpoint at {self.checkpoint_id}.")
        self._folder = OpenedFolder.check(self.checkpoint_id, contents)
        return self._folder.metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args, kwargs
        self._storage = metadata.storage_data

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fetch the files that this rank needs, fill its tensors, and verify what they were filled with.

        Raises:
            BadCheckpointError: If a file is not as it was written. Tensors may have been filled from it.
            OSError: If a file cannot be had.
        """
        folder = self._folder
        assert folder is not None, "read_metadata comes first"
        store = open_store(self.checkpoint_id)
        files = sorted(files_of(plan, self._storage))
        if store.is_local:
            self._read(folder, files, store.path, plan, planner)
        else:
            with scratch_folder(self._staging_dir) as cache:
                download(
                    store,
                    [(file, cache / file) for file in files],
                    max_workers=self._max_download_workers,
                    deadline_seconds=self._download_timeout,
                )
                self._read(folder, files, cache.joinpath, plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(
        self,
        folder: OpenedFolder,
        files: list[str],
        path_of: Callable[[str], Path],
        plan: LoadPlan,
        planner: LoadPlanner,
    ) -> None:
        if self._verify != "off":
            for file in files:
                folder.verify_size(file, path_of(file))
        check = folder.compare if self._verify == "digest" else None
        read_plan(plan, planner, self._storage, path_of, check=check)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a place for checkpoints."""
        try:
            parse_place(checkpoint_id)
        except ValueError:
            return False
        return True
