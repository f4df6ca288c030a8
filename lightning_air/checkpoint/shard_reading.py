"""Read a shard file once, from its start to its end: its content goes straight into the tensors, hashed on the way.

A large tensor's bytes are read from the file into the memory where they are to be, with nothing in between, and hashed
while they are still in the processor's cache; so that verifying costs a load neither a second reading nor a copy. Where
that memory is elsewhere, scattered, or of another type, they are read into a buffer first.

The verdict over a file therefore comes after tensors have been filled from it. Objects are unpickled after the verdict.
"""

import io
import struct
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # private, and what `.metadata` holds
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from typing_extensions import override

from lightning_air.checkpoint.manifest import Digest, FileRecord, digest_file
from lightning_air.checkpoint.safe_pickle import load_object
from lightning_air.checkpoint.untrusted import DamagedCheckpointError

Check = Callable[[str, FileRecord], object]
"""Gets a file's name and what was found of it; raises `DamagedCheckpointError` if that is not what was written."""

# From this size on a tensor's bytes are read to where they are to be; below it the detour costs more than a copy.
_MIN_DIRECT_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20  # stays in the second-level cache between reading and hashing
_LOCAL_HEADER_BYTES = 30  # of a zip archive


def read_plan(
    plan: LoadPlan,
    planner: LoadPlanner,
    storage: Mapping[MetadataIndex, StorageInfo],
    path_of: Callable[[str], Path],
    *,
    check: Check | None = None,
    checked: Collection[str] | None = None,
    weights_only: bool | None = None,
) -> None:
    """Read what a plan says, file by file.

    Args:
        plan: What to read.
        planner: Where it goes.
        storage: Where it lies, from `.metadata`.
        path_of: The local path of a file.
        check: Told what each file is found to be; None: nothing is hashed.
        checked: The files to hash in any case; None is all. Another is hashed if it holds an object that is read, or
            cannot be read: then it must be known whether it is damaged, or was written so.
        weights_only: As for `torch.load`, for objects.

    Raises:
        DamagedCheckpointError: If a file is not as it was written, or an item not what `.metadata` says.
        UnsafeCheckpointError: If an object needs more than plain data types.
        OSError: If a file cannot be read.
    """
    by_file: dict[str, list[ReadItem]] = defaultdict(list)
    for item in plan.items:
        by_file[storage[item.storage_index].relative_path].append(item)
    for name, items in sorted(by_file.items()):
        objects = [item for item in items if item.type == LoadItemType.BYTE_IO]
        is_hashed = check is not None and (checked is None or name in checked or bool(objects))
        reading = _Reading(path_of(name), planner, storage)
        try:
            with _Pass(path_of(name), is_hashed=is_hashed) as file:
                reading.tensors_and_bytes(file, items)
                file.pass_to(file.num_bytes)
            if is_hashed:
                cast("Check", check)(name, file.record())
            reading.objects(weights_only=weights_only)
        except OSError:
            raise
        except Exception:
            if check is not None:  # damage explains everything else that may be wrong
                check(name, digest_file(path_of(name)))
            raise


class _Pass:
    """A file that is read once, in order; what is skipped is read too if it is to be hashed."""

    def __init__(self, path: Path, *, is_hashed: bool) -> None:
        self._file = path.open("rb", buffering=0)
        self.num_bytes = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        self._position = 0
        self._path = path
        self._digest = Digest() if is_hashed else None
        self._scratch: memoryview | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._file.close()

    def pass_to(self, position: int) -> None:
        """Go forward to a position, hashing what lies between."""
        if self._digest is None:
            self._position = max(self._position, position)
            return
        while self._position < position:
            if self._scratch is None:
                self._scratch = memoryview(bytearray(_BLOCK_BYTES))
            self.read_into(self._scratch[: min(len(self._scratch), position - self._position)])

    def read_into(self, target: memoryview) -> None:
        """Fill this memory with the next bytes."""
        self._file.seek(self._position)
        done = 0
        while done < len(target):
            block = target[done : done + _BLOCK_BYTES]
            if not (num_read := self._file.readinto(block)):
                raise DamagedCheckpointError(f"{self._path} ends at {self._position + done}, before what is read of it")
            if self._digest is not None:
                self._digest.update(block[:num_read])
            done += num_read
        self._position += len(target)

    def record(self) -> FileRecord:
        """Return the size and the digest of what has passed, which is the whole file."""
        assert self._digest is not None
        return self._digest.record()

    def part(self, start: int, num_bytes: int) -> "_Part":
        """Return a stream over a part, which reads it apart from the pass."""
        return _Part(self._file, start, num_bytes)


class _Reading:
    """What one file's items need, in the order in which it is done."""

    def __init__(self, path: Path, planner: LoadPlanner, storage: Mapping[MetadataIndex, StorageInfo]) -> None:
        self._path = path
        self._planner = planner
        self._storage = storage
        self._objects: list[tuple[ReadItem, bytes, str]] = []

    def tensors_and_bytes(self, file: _Pass, items: Sequence[ReadItem]) -> None:
        """Fill all tensors and keep the objects' bytes."""
        if file.num_bytes == 0:
            raise DamagedCheckpointError(f"{self._path} is empty")
        by_place: dict[tuple[int, int], list[ReadItem]] = defaultdict(list)
        for item in items:
            info = self._storage[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                raise DamagedCheckpointError(
                    f"{self._path}, at {info.offset}: is stored with {info.transform_descriptors}, which only the "
                    "program that wrote it can read. Save it again without storage extensions."
                )
            by_place[info.offset, info.length].append(item)
        for (start, num_bytes), here in sorted(by_place.items()):
            where = f"{self._path}, at {start}"
            if start + num_bytes > file.num_bytes:
                raise DamagedCheckpointError(f"{where}: the file ends at {file.num_bytes}, before this entry does")
            objects = [item for item in here if item.type == LoadItemType.BYTE_IO]
            tensors = [item for item in here if item.type != LoadItemType.BYTE_IO]
            if num_bytes < _MIN_DIRECT_BYTES or objects:
                file.pass_to(start)
                content = bytearray(num_bytes)
                file.read_into(memoryview(content))
                self._objects.extend((item, bytes(content), where) for item in objects)
                if tensors:
                    self._fill(tensors, _loaded(io.BytesIO(content), where), where)
            else:
                self._fill_large(file, start, num_bytes, tensors, where)

    def objects(self, *, weights_only: bool | None) -> None:
        """Unpickle the objects and hand them over."""
        for item, content, where in self._objects:
            value = load_object(content, source=where, weights_only=weights_only)
            safe = io.BytesIO()
            torch.save(value, safe)  # the planner unpickles without restriction; so it gets what we have written
            safe.seek(0)
            self._planner.load_bytes(item, safe)

    def _fill_large(self, file: _Pass, start: int, num_bytes: int, items: list[ReadItem], where: str) -> None:
        saved = _Saved.find(file.part(start, num_bytes), where)
        if saved is None:
            file.pass_to(start)
            content = bytearray(num_bytes)
            file.read_into(memoryview(content))
            self._fill(items, _loaded(io.BytesIO(content), where), where)
            return
        if len(items) == 1:
            target = self._target(items[0], saved.form, where)
            span = _span(_box(items[0]), saved.form)
            memory = _memory(target, saved.form.dtype)
            if span is not None and memory is not None:
                file.pass_to(start + saved.start + span.start)
                file.read_into(memory)
                self._planner.commit_tensor(items[0], target)
                return
        file.pass_to(start + saved.start)
        buffer = torch.empty(saved.num_bytes, dtype=torch.uint8)
        file.read_into(memoryview(buffer.numpy()))  # type: ignore[arg-type]
        flat = buffer.view(saved.form.dtype)
        self._fill(items, flat.as_strided(saved.form.size(), saved.form.stride(), saved.form.storage_offset()), where)

    def _fill(self, items: list[ReadItem], saved: Tensor, where: str) -> None:
        for item in items:
            target = self._target(item, saved, where)
            target.copy_(saved[_box(item)])
            self._planner.commit_tensor(item, target)

    def _target(self, item: ReadItem, saved: Tensor, where: str) -> Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if saved[_box(item)].shape != target.shape:
            raise DamagedCheckpointError(f"{where}: holds a tensor of {tuple(saved.shape)}, too small for what is read")
        return target


@dataclass(frozen=True)
class _Saved:
    """Where in an archive the bytes of its only tensor are.

    Attributes:
        form: The tensor without its content, on the meta device.
        start: Of the content, counted from the archive's.
        num_bytes: Of the content: the tensor's storage.
    """

    form: Tensor
    start: int
    num_bytes: int

    @classmethod
    def find(cls, stream: "_Part", where: str) -> Self | None:
        """Return what an archive of `torch.save` holds; None if that is nothing so simple.

        Raises:
            BadCheckpointError: If it is no such archive.
        """
        form = _loaded(stream, where, map_location="meta")
        if form.layout != torch.strided or form.is_conj() or form.is_neg():
            return None
        stream.seek(0)
        with zipfile.ZipFile(cast("BinaryIO", stream)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        storages = [entry for name, entry in entries.items() if name.startswith("data/")]
        if len(storages) != 1 or storages[0].file_size != form.untyped_storage().nbytes() or "byteorder" not in entries:
            return None
        # Not with `archive.read`, which checks a CRC that our own files leave out.
        stream.seek(_content_start(stream, entries["byteorder"]))
        if stream.read(entries["byteorder"].file_size).decode() != sys.byteorder:
            return None
        return cls(form, _content_start(stream, storages[0]), storages[0].file_size)


def _content_start(stream: "_Part", entry: zipfile.ZipInfo) -> int:
    stream.seek(entry.header_offset)
    name_bytes, extra_bytes = struct.unpack_from("<HH", stream.read(_LOCAL_HEADER_BYTES), _LOCAL_HEADER_BYTES - 4)
    return entry.header_offset + _LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def _loaded(stream: io.IOBase, where: str, *, map_location: str = "cpu") -> Tensor:
    saved = load_object(cast("BinaryIO", stream), source=where, weights_only=True, map_location=map_location)
    if not isinstance(saved, Tensor):
        raise DamagedCheckpointError(f"{where}: holds a {type(saved).__name__} instead of a tensor")
    return saved


def _box(item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True))


def _span(box: tuple[slice, ...], form: Tensor) -> range | None:
    """Return which bytes of a storage are this part of its tensor, in order; None if they do not lie side by side."""
    part = form[box]
    if not form.is_contiguous() or not part.is_contiguous():
        return None
    start = part.storage_offset() * form.element_size()
    return range(start, start + part.nbytes)


def _memory(target: Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return a tensor's memory, if bytes of this type can be read into it; its content is what is in the memory."""
    is_plain = type(target) in (Tensor, torch.nn.Parameter) and target.layout == torch.strided
    if not is_plain or target.device.type != "cpu" or target.dtype != dtype or not target.is_contiguous():
        return None
    if target.is_conj() or target.is_neg():
        return None
    return memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class _Part(io.RawIOBase):
    """A part of an open file, as a stream."""

    def __init__(self, file: io.FileIO, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._num_bytes = num_bytes
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
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._position)]
        self._file.seek(self._start + self._position)
        num_read = self._file.readinto(target)
        self._position += num_read
        return num_read
