"""What of a state this rank holds, and what of that it is this rank's to write.

A replicated tensor is shared out over all ranks, a sharded one is written by whoever holds the shard, and where several
ranks hold the same shard (HSDP) they share it out. Nothing is gathered, and nothing is decided after it was copied.
"""

import io
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from lightning_air.checkpoint.shares import Leaf, fingerprint, share

# Beside shards, plain tensors smaller than this are rank 0's. They are buffers such as BatchNorm's, which each rank
# updates from its own batches: the mean of one rank with the variance of another would be neither's.
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class OwnPiece:
    """A box of a tensor that this rank writes.

    Attributes:
        keys: The tensor's names, several where weights are tied.
        source: The piece, in the memory where the training has it.
        offsets: Where the piece lies in the whole tensor.
        shape: The shape of the whole tensor.
    """

    keys: tuple[str, ...]
    source: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def indices(self) -> tuple[MetadataIndex, ...]:
        """What `.metadata` calls it."""
        return tuple(MetadataIndex(key, self.offsets) for key in self.keys)


@dataclass(frozen=True)
class OwnShare:
    """What one rank writes.

    Attributes:
        pieces: In the order in which they are to be copied and written.
        objects: Flat key to the bytes of what is no tensor; rank 0's only.
        fingerprint: Equal on ranks that hold the same state.
    """

    pieces: list[OwnPiece]
    objects: dict[str, bytes]
    fingerprint: str

    @property
    def num_bytes(self) -> int:
        """The size of all pieces."""
        return sum(piece.source.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class _Local:
    """One tensor as this rank holds it."""

    keys: tuple[str, ...]
    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def own_share(leaves: Mapping[str, Any], global_rank: int, world_size: int) -> OwnShare:
    """Return what this rank writes of a state that all ranks hold together. Every rank works it out by itself.

    Args:
        leaves: Flat key to plain tensor (a replica of it is on every rank), DTensor, or object (rank 0's counts).
        global_rank: This rank.
        world_size: How many ranks hold the state.
    """
    # Replicas are those ranks that hold the same: as many as the first number says, this one at the second.
    groups: dict[tuple[int, int, str], list[_Local]] = defaultdict(list)
    objects: dict[str, bytes] = {}
    structure: list[Leaf] = []
    is_sharded = any(isinstance(value, DTensor) for value in leaves.values())
    for keys, value in _without_duplicates(leaves):
        if not is_stored_as_tensor(value):
            if global_rank == 0:
                objects.update(dict.fromkeys(keys, saved_bytes(value)))
            structure.extend(Leaf(f"{key} (object)", (), 1) for key in keys)
            continue
        # Of shards the ranks may see differently what is tied: an empty one has no address.
        tied_to = "" if isinstance(value, DTensor) else keys[0]
        structure.extend(
            Leaf(f"{key} {value.dtype} {tied_to}", tuple(value.shape), value.element_size()) for key in keys
        )
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue
            num_replicas, index = _replica(value)
            group = (num_replicas, index, f"{value.device_mesh.mesh.tolist()} {value.placements}")
            for chunk in value.__create_chunk_list__():  # type: ignore[no-untyped-call] # what DCP itself asks
                groups[group].append(_Local(keys, value.to_local(), tuple(chunk.offsets), tuple(value.shape)))
        else:
            whole = _Local(keys, value.detach(), (0,) * value.ndim, tuple(value.shape))
            if not is_sharded or value.nbytes >= _LARGE_BYTES:
                groups[world_size, global_rank, ""].append(whole)
            elif global_rank == 0:
                groups[1, 0, ""].append(whole)
    pieces: list[OwnPiece] = []
    for (num_replicas, index, _), locals_ in sorted(groups.items(), key=lambda item: item[0]):
        pieces += _pieces(locals_, num_replicas, index)
    return OwnShare(pieces, objects, fingerprint(structure))


def is_stored_as_tensor(value: object) -> bool:
    """Return whether the value is stored by its elements; all else is stored as `torch.save` writes it."""
    if isinstance(value, DTensor):
        return True
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def saved_bytes(value: object) -> bytes:
    """Return an object as `torch.save` writes it: a copy of all that it holds, now."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _without_duplicates(leaves: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Put tensors that are the same memory under one entry, so that tied weights are stored once."""
    entries: dict[Any, tuple[list[str], Any]] = {}
    for key, value in leaves.items():
        entries.setdefault(_identity(key, value), ([], value))[0].append(key)
    return [(tuple(keys), value) for keys, value in entries.values()]


def _identity(key: str, value: Any) -> Any:
    if not is_stored_as_tensor(value) or value.numel() == 0:
        return key
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.numel() == 0:  # an empty shard has no address, and other ranks have to agree on what is tied
        return key
    how = (str(value.device_mesh), str(value.placements)) if isinstance(value, DTensor) else ()
    return (local.data_ptr(), local.device, value.dtype, tuple(value.shape), local.stride(), how)


def _replica(value: DTensor) -> tuple[int, int]:
    """Return how many ranks hold the same shard, and which of them this one is."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    num_replicas, index = 1, 0
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            size = value.device_mesh.size(dim)
            num_replicas, index = num_replicas * size, index * size + coordinate[dim]
    return num_replicas, index


def _pieces(locals_: list[_Local], num_replicas: int, index: int) -> list[OwnPiece]:
    by_key = {held.keys[0]: held for held in locals_}
    shards = [Leaf(key, tuple(held.local.shape), held.local.element_size()) for key, held in by_key.items()]
    pieces = []
    for piece in share(shards, num_replicas, index):
        held = by_key[piece.key]
        if math.prod(piece.sizes) == 0 and math.prod(held.shape) > 0:
            continue  # a rank without a shard of this tensor
        box = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
        offsets = tuple(a + b for a, b in zip(held.offsets, piece.offsets, strict=True))
        pieces.append(OwnPiece(held.keys, held.local[box], offsets, held.shape))
    return pieces
