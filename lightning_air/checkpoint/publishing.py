"""Make a checkpoint visible: `meta.pt`, then `manifest.json`, then `.metadata`, each in one write, once all shards lie.

A reader that finds `.metadata` finds a whole checkpoint; whatever is killed before leaves none.
"""

import errno
import io
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_air.checkpoint.holdings import OwnShare
from lightning_air.checkpoint.local_store import sync_folder
from lightning_air.checkpoint.manifest import (
    MANIFEST_NAME,
    OBJECTS_NAME,
    WRITTEN_BY,
    FileRecord,
    Manifest,
    digest_bytes,
)
from lightning_air.checkpoint.shard_file import WrittenFile
from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.transfer import upload


@dataclass(frozen=True, kw_only=True)
class Details:
    """Where in training a checkpoint is taken, for its manifest."""

    step: int = 0
    epoch: int = 0
    world_size: int = 1
    sharding: str = "none"


@dataclass(frozen=True)
class Described:
    """What one rank tells of its share, for `.metadata`."""

    tensors: dict[str, tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]]]
    objects: list[str]


def describe(share: OwnShare) -> Described:
    """Return what `.metadata` needs to know of a share."""
    tensors: dict[str, tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]]] = {}
    for piece in share.pieces:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.source.shape)
        for key in piece.keys:
            properties = TensorProperties(dtype=piece.source.dtype)
            tensors.setdefault(key, (properties, torch.Size(piece.shape), []))[2].append(chunk)
    return Described(tensors, list(share.objects))


def build_metadata(
    described: Sequence[Described], files: Sequence[WrittenFile], paths: Mapping[str, tuple[str | int, ...]]
) -> Metadata:
    """Return the content of `.metadata`.

    Args:
        described: What each rank told.
        files: All shard files.
        paths: Flat key to the place in the nested state.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for one in described:
        state.update({key: BytesStorageMetadata() for key in one.objects})
        for key, (properties, size, chunks) in one.tensors.items():
            entry = state.setdefault(key, TensorStorageMetadata(properties, size, []))
            assert isinstance(entry, TensorStorageMetadata)
            entry.chunks.extend(chunks)
    storage = {index: info for file in files for index, info in file.entries}
    return Metadata(state, planner_data=dict(paths), storage_data=storage)


def publish(
    store: Store,
    metadata: Metadata,
    shards: Sequence[WrittenFile],
    details: Details,
    *,
    meta: bytes | None,
    deadline_seconds: float,
) -> Manifest:
    """Publish a checkpoint whose shards all lie at the store. Rank 0 calls this, once per checkpoint.

    Args:
        store: The checkpoint's folder.
        metadata: What `.metadata` is to hold.
        shards: All shard files of all ranks.
        details: Of the training.
        meta: The content of `meta.pt`, if it is to have one.
        deadline_seconds: How long it may take, retries included.

    Raises:
        OSError: Naming the file; then nothing is published.
    """
    started = time.monotonic()
    if store.num_bytes(METADATA_NAME) is not None:
        raise FileExistsError(errno.EEXIST, f"another save has published a checkpoint in {store.root}", METADATA_NAME)
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta(checkpoint_id=store.root, modules=[WRITTEN_BY])
    content = pickle.dumps(metadata, protocol=4)
    before: dict[str, bytes] = {} if meta is None else {OBJECTS_NAME: meta}
    records: dict[str, FileRecord] = {file.name: file.record for file in shards}
    records.update({name: digest_bytes(data) for name, data in before.items()})
    records[METADATA_NAME] = digest_bytes(content)
    manifest = Manifest(
        step=details.step,
        epoch=details.epoch,
        world_size=details.world_size,
        sharding=details.sharding,
        created_seconds=time.time(),
        files=records,
    )
    before[MANIFEST_NAME] = manifest.to_json()
    if store.is_local:
        sync_folder(store.path(METADATA_NAME).parent)  # the shards' names must not be younger than `.metadata`
    for name, data in [*before.items(), (METADATA_NAME, content)]:
        remaining = deadline_seconds - (time.monotonic() - started)
        upload(store, [(name, data)], max_workers=1, deadline_seconds=max(remaining, 0.001))
    return manifest


def meta_bytes(meta: Mapping[str, Any]) -> bytes:
    """Return the content of `meta.pt`: a copy of all that it holds, now."""
    stream = io.BytesIO()
    torch.save(dict(meta), stream)
    return stream.getvalue()
