"""Read tensors and objects out of shard files into memory that the caller has.

`torch.distributed.checkpoint`'s planner decides which part of which file a rank needs, so that any number of ranks and
any sharding can read what any other wrote. Files are mapped rather than read, and every object goes through the
restricted loader before it is unpickled.
"""

import io
import mmap
import struct
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # private, and what `.metadata` holds
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from typing_extensions import override

from lightning_air.checkpoint.safe_pickle import load_object
from lightning_air.checkpoint.untrusted import DamagedCheckpointError

# From this size on a tensor is not read but mapped; below it the detour costs more than a copy.
_MIN_MAPPED_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30  # of a zip archive


class Filling:
    """What has to be read to fill some tensors, and where it goes. Nothing is read before `read`.

    Args:
        flat: Flat key to a tensor to fill in place (plain, or this rank's shard of it), or to anything where the
            checkpoint has an object, which will take its place.
        metadata: Of the checkpoint.
        source: What a message calls the checkpoint.

    Attributes:
        files: The names of the files that are needed.

    Raises:
        ValueError: If the checkpoint lacks a key or has a tensor of another size.
    """

    def __init__(self, flat: dict[str, Any], metadata: Metadata, *, source: str) -> None:
        lacking = [key for key in flat if key not in metadata.state_dict_metadata]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""  # noqa: PLR2004 - as many as are shown
            raise ValueError(
                f"{source} does not hold {', '.join(map(repr, lacking[:3]))}{more}. It was saved from another model or "
                "optimizer, or without its optimizer; load it into the one that it was saved from."
            )
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(flat, metadata, is_coordinator=False)
        self._plan = self._planner.finish_plan(self._planner.create_local_plan())
        self._storage: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
        self.files = files_of(self._plan, self._storage)

    def read(self, path_of: Callable[[str], Path], *, weights_only: bool | None = None) -> None:
        """Fill the tensors, as `read_plan` does."""
        read_plan(self._plan, self._planner, self._storage, path_of, weights_only=weights_only)


def empty_like_saved(metadata: Metadata) -> dict[str, Any]:
    """Return whole tensors in host memory, with nothing in them, for all that a checkpoint holds; None for objects."""
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def files_of(plan: LoadPlan, storage: Mapping[MetadataIndex, StorageInfo]) -> set[str]:
    """Return the names of the files that a plan reads."""
    return {storage[item.storage_index].relative_path for item in plan.items}


def read_plan(
    plan: LoadPlan,
    planner: LoadPlanner,
    storage: Mapping[MetadataIndex, StorageInfo],
    path_of: Callable[[str], Path],
    *,
    weights_only: bool | None = None,
) -> None:
    """Read what a plan says, file by file.

    Args:
        plan: What to read.
        planner: Where it goes.
        storage: Where it lies, from `.metadata`.
        path_of: The local path of a file.
        weights_only: As for `torch.load`, for objects.

    Raises:
        DamagedCheckpointError: If an item is not what `.metadata` says.
        UnsafeCheckpointError: If an object needs more than plain data types.
        OSError: If a file cannot be read.
    """
    by_file: dict[str, list[ReadItem]] = defaultdict(list)
    for item in plan.items:
        by_file[storage[item.storage_index].relative_path].append(item)
    for file_name, items in sorted(by_file.items()):
        path = path_of(file_name)
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise DamagedCheckpointError(f"{path} is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped, memoryview(mapped) as content:
                for item in sorted(items, key=lambda item: storage[item.storage_index].offset):
                    info = storage[item.storage_index]
                    where = f"{path}, at {info.offset}"
                    if getattr(info, "transform_descriptors", None):
                        raise DamagedCheckpointError(
                            f"{where}: is stored with {info.transform_descriptors}, which only the program that wrote "
                            "it can read. Save it again without storage extensions."
                        )
                    with content[info.offset : info.offset + info.length] as view:
                        _read_item(item, view, planner, where, weights_only)


def _read_item(item: ReadItem, view: memoryview, planner: LoadPlanner, where: str, weights_only: bool | None) -> None:
    if item.type == LoadItemType.BYTE_IO:
        value = load_object(bytes(view), source=where, weights_only=weights_only)
        safe = io.BytesIO()
        torch.save(value, safe)  # the planner unpickles without restriction; so it gets what we have written
        safe.seek(0)
        planner.load_bytes(item, safe)
        return
    saved = _saved_tensor(view, where)
    box = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True))
    target = planner.resolve_tensor(item).detach()
    part = saved[box]
    if part.shape != target.shape:
        raise DamagedCheckpointError(f"{where}: holds a tensor of {tuple(saved.shape)}, too small for what is read")
    target.copy_(part)
    planner.commit_tensor(item, target)


def _saved_tensor(view: memoryview, where: str) -> Tensor:
    """Return what `torch.save` wrote; a large tensor is the mapped file itself, so that it is copied only once."""
    is_large = len(view) >= _MIN_MAPPED_BYTES
    with _View(view) as stream:
        location = "meta" if is_large else "cpu"
        saved = load_object(cast("BinaryIO", stream), source=where, weights_only=True, map_location=location)
        if not isinstance(saved, Tensor):
            raise DamagedCheckpointError(f"{where}: holds a {type(saved).__name__} instead of a tensor")
        if not is_large:
            return saved
        content = _only_storage(view, stream) if saved.layout == torch.strided else None
        if content is None or len(content) != saved.untyped_storage().nbytes():
            loaded: Tensor = load_object(cast("BinaryIO", stream), source=where, weights_only=True)
            return loaded
    flat = torch.frombuffer(content, dtype=torch.uint8).view(saved.dtype)
    return flat.as_strided(saved.size(), saved.stride(), saved.storage_offset())


def _only_storage(view: memoryview, stream: "_View") -> memoryview | None:
    """Return the one tensor storage of an archive that was checked; None if it has several, or another byte order."""
    stream.seek(0)
    with zipfile.ZipFile(cast("BinaryIO", stream)) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    storages = [entry for name, entry in entries.items() if name.startswith("data/")]
    if len(storages) != 1:
        return None

    def content(entry: zipfile.ZipInfo) -> memoryview:
        header = view[entry.header_offset : entry.header_offset + _LOCAL_HEADER_BYTES]
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, _LOCAL_HEADER_BYTES - 4)
        start = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        return view[start : start + entry.file_size]

    if "byteorder" not in entries or bytes(content(entries["byteorder"])).decode() != sys.byteorder:
        return None
    return content(storages[0])


class _View(io.RawIOBase):
    """A part of a mapped file, as a stream that copies nothing but what is read."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        self._position = max(0, start + offset)
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        part = self._view[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)
