"""Read `.metadata`, the pickle in which `torch.distributed.checkpoint` says what lies where.

torch reads it with Python's own unpickler, and runs what it names. Here `pickle_machine.py` reads it, and every value
is checked before it is set, so that what comes out has the right types, fits together and names no file outside of
the checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # private, and what `.metadata` holds
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_air.checkpoint.pickle_machine import Function, Pairs, Record, unpickle
from lightning_air.checkpoint.untrusted import (
    BadCheckpointError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
    check_name,
    shown,
)

T = TypeVar("T")

_MAX_DIMS = 64
_MAX_PATH_ITEMS = 256
_TOO_LARGE = 2**63


def load_metadata(data: bytes, *, source: str) -> Metadata:
    """Return what a `.metadata` file holds, as `torch.distributed.checkpoint` would, without running anything.

    The path that the writer noted in `storage_meta.checkpoint_id` becomes a pure path, which touches no disk. Fields
    that the installed torch does not know are left out.

    Args:
        data: The whole file.
        source: What a message calls it.

    Returns:
        Metadata in which every chunk lies inside its tensor and has its place in a file, the chunks of a tensor have as
        many elements as it has, and every file has a plain name below the checkpoint.

    Raises:
        UnsafeCheckpointError: If it names what no `.metadata` needs, or a file outside of the checkpoint.
        DamagedCheckpointError: If it is not what DCP of torch 2.9 or newer writes.
    """
    try:
        found = unpickle(data, _NAMES)
        if type(found) is not Metadata:
            raise DamagedCheckpointError(f"holds {shown(found)} instead of DCP's Metadata")
    except BadCheckpointError as error:
        raise type(error)(f"{source} {error}") from error.__cause__
    return found


# ---- the functions that a `.metadata` calls --------------------------------------------------------------------------


def _size(arguments: tuple[object, ...]) -> torch.Size:
    values = arguments[0] if arguments else ()
    if len(arguments) > 1 or type(values) is not tuple or len(values) > _MAX_DIMS:
        raise DamagedCheckpointError("holds a torch.Size that is no list of sizes")
    for value in values:
        _count("a torch.Size", value)
    return torch.Size(values)


def _one_of(what: str, known: Mapping[Any, T]) -> Callable[[tuple[object, ...]], T]:
    def make(arguments: tuple[object, ...]) -> T:
        key = arguments[0] if len(arguments) == 1 else None
        if type(key) not in {str, int} or key not in known:
            raise DamagedCheckpointError(f"holds {what} {shown(key)}, which torch {torch.__version__} does not know")
        return known[key]

    return make


def _path(cls: type[T]) -> Callable[[tuple[object, ...]], T]:
    def make(arguments: tuple[object, ...]) -> T:
        if not all(type(part) is str for part in arguments):
            raise DamagedCheckpointError("holds a path that is no text")
        return cls(*arguments)

    return make


# ---- the records of a `.metadata` ------------------------------------------------------------------------------------

_TEXT = frozenset({str, NoneType})
_SIZE = frozenset({torch.Size})
_COUNT = frozenset({int})
_CHUNK = {"offsets": _SIZE, "sizes": _SIZE}
_TENSOR = {"properties": frozenset({TensorProperties}), "size": _SIZE, "chunks": frozenset({list})}
_INDEX = {"fqn": frozenset({str}), "offset": frozenset({torch.Size, NoneType}), "index": frozenset({int, NoneType})}
_INFO = {
    "relative_path": frozenset({str}),
    "offset": _COUNT,
    "length": _COUNT,
    "transform_descriptors": frozenset({list, NoneType}),
}
_META = {
    "checkpoint_id": frozenset({str, PurePosixPath, PureWindowsPath, NoneType}),
    "save_id": _TEXT,
    "load_id": _TEXT,
    "modules": frozenset({list}),
}
_ALL = {
    "state_dict_metadata": frozenset({Pairs}),
    "planner_data": frozenset({Pairs, NoneType}),
    "storage_data": frozenset({Pairs}),
    "storage_meta": frozenset({StorageMeta, NoneType}),
    "version": _TEXT,
}


def _fill_properties(target: TensorProperties, state: object) -> None:
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or tuple(map(type, state)) != kinds:
        raise DamagedCheckpointError("holds TensorProperties that are none of torch 2.9 or newer")
    target.__setstate__(state)  # type: ignore[no-untyped-call]


def _fill_chunk(target: ChunkStorageMetadata, state: object) -> None:
    fields = _fields(ChunkStorageMetadata, state, _CHUNK)
    if len(fields["offsets"]) != len(fields["sizes"]):
        raise DamagedCheckpointError("holds a chunk whose offsets and sizes differ in number")
    target.__dict__.update(fields)


def _fill_tensor(target: TensorStorageMetadata, state: object) -> None:
    fields = _fields(TensorStorageMetadata, state, _TENSOR)
    size, num_elements = fields["size"], math.prod(fields["size"])
    if num_elements * fields["properties"].dtype.itemsize >= _TOO_LARGE:
        raise DamagedCheckpointError(f"holds a tensor of the size {tuple(size)}, which no memory holds")
    fields["chunks"] = list(fields["chunks"])
    num_found = 0
    for chunk in fields["chunks"]:
        offsets, sizes = _filled(ChunkStorageMetadata, chunk, "a chunk").__dict__.values()
        ends = map(int.__add__, offsets, sizes)
        if len(offsets) != len(size) or not all(map(int.__le__, ends, size)):
            raise DamagedCheckpointError(
                f"holds a chunk at {tuple(offsets)} of the size {tuple(sizes)} that leaves its tensor of {tuple(size)}"
            )
        num_found += math.prod(sizes)
    if num_found != num_elements:
        raise DamagedCheckpointError(
            f"holds a tensor of {num_elements} elements whose chunks have {num_found}: the writer left something out"
        )
    target.__dict__.update(fields)


def _fill_index(target: MetadataIndex, state: object) -> None:
    target.__dict__.update(_fields(MetadataIndex, state, _INDEX))


def _fill_nothing(_: BytesStorageMetadata, state: object) -> None:
    _fields(BytesStorageMetadata, state, {})


def _fill_storage_info(target: StorageInfo, state: object) -> None:
    fields = _fields(StorageInfo, state, _INFO)
    check_name(fields["relative_path"], source="it")
    _count("an offset", fields["offset"])
    _count("a length", fields["length"])
    if fields.get("transform_descriptors") is not None:
        fields["transform_descriptors"] = _texts("a transform descriptor", fields["transform_descriptors"])
    target.__dict__.update(fields)


def _fill_storage_meta(target: StorageMeta, state: object) -> None:
    fields = _fields(StorageMeta, state, _META)
    fields["modules"] = _texts("a module", fields["modules"])
    target.__dict__.update(fields)


def _fill_metadata(target: Metadata, state: object) -> None:
    fields = _fields(Metadata, state, _ALL)
    entries = fields["state_dict_metadata"] = _by_text("state_dict_metadata", fields["state_dict_metadata"])
    for entry in entries.values():
        if type(entry) is not BytesStorageMetadata:
            _filled(TensorStorageMetadata, entry, "an entry")
    if fields.get("planner_data") is not None:
        fields["planner_data"] = _by_text("planner_data", fields["planner_data"])
        for path in fields["planner_data"].values():
            if type(path) is not tuple or len(path) > _MAX_PATH_ITEMS or not {str, int}.issuperset(map(type, path)):
                raise DamagedCheckpointError("holds planner data that are no paths through a state dict")
    fields["storage_data"] = _storage_data(fields["storage_data"], entries)
    if fields.get("storage_meta") is not None:
        _filled(StorageMeta, fields["storage_meta"], "storage_meta")
    target.__dict__.update(fields)


def _storage_data(pairs: Pairs, entries: dict[str, Any]) -> dict[MetadataIndex, StorageInfo]:
    """Return where each chunk lies, if every chunk is somewhere and nothing else is.

    Indices are hashed only after they were found to be inside a tensor: who may choose any numbers can choose a million
    with the same hash.
    """
    found: dict[MetadataIndex, StorageInfo] = {}
    offsets_of: dict[str, set[object]] = {}
    for key, value in pairs:
        index, info = _filled(MetadataIndex, key, "a key"), _filled(StorageInfo, value, "a place")
        size = getattr(entries.get(index.fqn), "size", None)
        offset = index.offset
        is_inside = offset is None or (size is not None and len(offset) == len(size) and _is_inside(offset, size))
        if index.fqn not in entries or (offset is None) != (size is None) or not is_inside:
            raise DamagedCheckpointError(f"gives a place in a file to {shown(index.fqn)}, but lists no such part of it")
        found[index] = info
        offsets_of.setdefault(index.fqn, set()).add(offset)
    for fqn, entry in entries.items():
        wanted = [None] if type(entry) is BytesStorageMetadata else [chunk.offsets for chunk in entry.chunks]
        if not offsets_of.get(fqn, set()).issuperset(wanted):
            raise DamagedCheckpointError(f"lists {shown(fqn)}, but does not say in which file all of it lies")
    return found


def _is_inside(offset: Iterable[int], size: Iterable[int]) -> bool:
    return all(map(int.__le__, offset, size))


# ---- checks ----------------------------------------------------------------------------------------------------------


def _fields(cls: type, state: object, kinds: Mapping[str, frozenset[object]]) -> dict[str, Any]:
    """Return the fields of a dataclass, of the given kinds; those that may be None need not be there."""
    fields = _by_text(cls.__name__, state)
    for name, allowed in kinds.items():
        if type(fields.get(name)) not in allowed:
            raise DamagedCheckpointError(f"holds {shown(fields.get(name))} as {name} of a {cls.__name__}")
    if not fields.keys() <= kinds.keys():
        _sort_out_newer(cls, fields, fields.keys() - kinds.keys())
    return fields


def _sort_out_newer(cls: type, fields: dict[str, Any], unknown: Iterable[str]) -> None:
    # What a newer torch has added, this one may know: a scalar can do no harm. What it does not know, it would ignore.
    known = {field.name for field in dataclasses.fields(cls)}
    for name in unknown:
        if name not in known:
            del fields[name]
        elif type(fields[name]) not in {str, int, bool, NoneType}:
            raise UnsafeCheckpointError(
                f"holds {shown(fields[name])} as {name} of a {cls.__name__}, which this version of lightning_air "
                "cannot check. Update lightning_air."
            )


def _by_text(what: str, pairs: object) -> dict[str, Any]:
    if type(pairs) is not Pairs:
        raise DamagedCheckpointError(f"holds {shown(pairs)} where a dictionary is due")
    found: dict[str, Any] = {key: value for key, value in pairs if type(key) is str}
    if len(found) != len(pairs):
        raise DamagedCheckpointError(f"holds a {what} of which a key is no text or there twice")
    return found


def _texts(what: str, values: Iterable[object]) -> list[str]:
    texts = [value for value in values if type(value) is str]
    if len(texts) != len(list(values)):
        raise DamagedCheckpointError(f"holds {what} that is no text")
    return texts


def _count(what: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < _TOO_LARGE:
        raise DamagedCheckpointError(f"holds {what} of {shown(value)}")


def _filled(cls: type[T], value: object, what: str) -> T:
    """Return an object that was given its state: one without may still get a state that nobody compares."""
    if type(value) is not cls or not value.__dict__:
        raise DamagedCheckpointError(f"holds {shown(value)} as {what} where a {cls.__name__} is due")
    return value


_METADATA = "torch.distributed.checkpoint.metadata"
_STATELESS = Record(BytesStorageMetadata, _fill_nothing, needs_state=False)
_RECORDS = (
    Record(Metadata, _fill_metadata),
    Record(MetadataIndex, _fill_index),
    Record(TensorStorageMetadata, _fill_tensor),
    Record(ChunkStorageMetadata, _fill_chunk),
    Record(TensorProperties, _fill_properties),
    Record(StorageMeta, _fill_storage_meta),
    _STATELESS,
)
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_NAMES: dict[tuple[str, str], object] = {
    ("torch", "Size"): Function(_size),
    ("torch.serialization", "_get_layout"): Function(_one_of("the layout", _LAYOUTS)),
    (_METADATA, "_MEM_FORMAT_ENCODING"): Function(
        _one_of("memory format", {each.value: each for each in _MEM_FORMAT_ENCODING})
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Record(StorageInfo, _fill_storage_info),
    **{(_METADATA, record.cls.__name__): record for record in _RECORDS},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    # Python 3.13 pickles them from `pathlib._local`.
    **{
        (module, name): Function(_path(cls))
        for module in ("pathlib", "pathlib._local")
        for cls, names in (
            (PurePosixPath, ("PosixPath", "PurePosixPath")),
            (PureWindowsPath, ("WindowsPath", "PureWindowsPath")),
        )
        for name in names
    },
}
