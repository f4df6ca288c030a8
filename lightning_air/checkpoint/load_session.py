"""One attempt at loading one checkpoint, as one rank sees it: plan what it needs, then read and verify it.

A folder is read by `torch.distributed.checkpoint`'s plan, whoever wrote it: we, Lightning or plain DCP. A single file
is Lightning's `.ckpt`. Either fills a sharded state in place, or comes back whole.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # no public name; what torch itself walks containers with

from lightning_air.checkpoint.filling import Filling, empty_like_saved
from lightning_air.checkpoint.lightning_form import (
    META_KEY,
    is_marker,
    marked_key,
    numbers_to_names,
    put_together,
    take_apart,
)
from lightning_air.checkpoint.manifest import OBJECTS_NAME
from lightning_air.checkpoint.matching import COMPILED, Into, Like, State, by_name, names_by_group, put_objects, wanted
from lightning_air.checkpoint.opened import OpenedFolder
from lightning_air.checkpoint.places import join, name, parent
from lightning_air.checkpoint.safe_pickle import load_object
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.untrusted import DamagedCheckpointError


class Session(Protocol):
    """What a checkpoint's form has to offer for loading. The methods are called in this order, on every rank."""

    store: Store
    files: dict[str, int]  # that this rank needs, and how many bytes of each

    def plan(self, *, weights_only: bool | None) -> None:
        """Find out which files this rank needs."""

    def verify_size(self, file: str, path: Path) -> None:
        """Raise `DamagedCheckpointError` if a local copy of a file is not as long as it was written."""

    def read(self, local: Path | None, *, checked: Collection[str] | None, weights_only: bool | None) -> State:
        """Fill the state and return the rest; from the files in this folder, or from where they are.

        Raises:
            DamagedCheckpointError: If a file that was to be checked by its digest is not as it was written, or another
                cannot be read. The state may be filled in part then.
        """


class FolderSession:
    """A checkpoint that is a folder.

    Args:
        path: Where it is.
        store: Its files.
        contents: `.metadata`, and `manifest.json` and `meta.pt` where they are there, by name.
        into: What to fill in place; None: all is returned.
    """

    def __init__(self, path: str, store: Store, contents: dict[str, bytes], into: Into | None) -> None:
        self.store = store
        self.files: dict[str, int] = {}
        self._path = path
        self._contents = contents
        self._into = into
        self._folder: OpenedFolder
        self._metadata: Metadata
        self._meta: State = {}
        self._flat: State
        self._filling: Filling

    def plan(self, *, weights_only: bool | None) -> None:
        """Find out which files this rank needs."""
        self._folder = OpenedFolder.check(self._path, self._contents)
        self._metadata = self._folder.metadata
        if self._folder.meta is not None:
            source = join(self._path, OBJECTS_NAME)
            self._meta = load_object(self._folder.meta, source=source, weights_only=weights_only)
        if self._into is None:
            self._flat = empty_like_saved(self._metadata)
        else:
            self._metadata = by_name(self._metadata, self._meta, self._into.state)
            needed = wanted(self._into, self._metadata.planner_data or {}, source=self._path)
            self._flat = {**needed, **self._extras(self._into.like)}
        self._filling = Filling(self._flat, self._metadata, source=self._path)
        self.files = self._filling.files

    def _extras(self, like: Like | None) -> State:
        """Return what the tensors go into that `meta.pt` has markers for."""
        found: State = {}
        saved = self._metadata.state_dict_metadata
        for path, node in pytree.tree_flatten_with_path(self._meta, is_leaf=is_marker)[0]:
            if is_marker(node) and (key := marked_key(node)) in saved:
                entry = saved[key]
                last = str(getattr(path[-1], "key", "")) if path else ""
                target = like(last, tuple(entry.size)) if like is not None else None  # type: ignore[union-attr]
                found[key] = empty_like_saved(Metadata({key: entry}))[key] if target is None else target
        return found

    def verify_size(self, file: str, path: Path) -> None:
        """Raise `DamagedCheckpointError` if a local copy of a file is not as long as it was written."""
        self._folder.verify_size(file, path)

    def read(self, local: Path | None, *, checked: Collection[str] | None, weights_only: bool | None) -> State:
        """Fill the state and return the rest; from the files in this folder, or from where they are."""
        self._filling.read(
            self.store.path if local is None else local.joinpath,
            check=None if checked is None else self._folder.compare,
            checked=checked,
            weights_only=weights_only,
        )
        paths = self._metadata.planner_data or {}
        if self._into is None:
            return put_together(self._flat, paths, self._meta)
        put_objects(self._into.state, self._flat)
        extras = {key: value for key, value in self._flat.items() if key.startswith(f"{META_KEY}.")}
        places = {key: (META_KEY, key.partition(".")[2]) for key in extras}
        return put_together(extras, places, self._meta, is_whole=False)


class FileSession:
    """A checkpoint that is a single file, as stock Lightning writes it.

    Args:
        path: Where it is.
        store: The folder that it is in.
        into: What to fill in place; None: all is returned.
    """

    def __init__(self, path: str, store: Store, into: Into | None) -> None:
        self.store = store
        self.files = {name(path): 0}
        self._path = path
        self._into = into

    def plan(self, *, weights_only: bool | None) -> None:
        """Nothing: the whole file is needed."""

    def verify_size(self, file: str, path: Path) -> None:
        """Nothing: stock Lightning leaves nothing to compare with."""

    def read(self, local: Path | None, *, checked: Collection[str] | None, weights_only: bool | None) -> State:
        """Fill the state and return the rest."""
        del checked
        path = self.store.path(name(self._path)) if local is None else local / name(self._path)
        with path.open("rb") as file:
            checkpoint = load_object(file, source=self._path, weights_only=weights_only)
        if not isinstance(checkpoint, dict):
            raise DamagedCheckpointError(f"{self._path} holds a {type(checkpoint).__name__} instead of a checkpoint")
        if self._into is None:
            return checkpoint
        state = self._into.state
        for index, saved in enumerate(checkpoint.get("optimizer_states", [])):
            if f"optimizer_{index}" in state:
                names = names_by_group(state[f"optimizer_{index}"])
                checkpoint["optimizer_states"][index] = numbers_to_names(saved, names)
        if "state_dict" in checkpoint:
            weights = {key.replace(COMPILED, ""): value for key, value in checkpoint["state_dict"].items()}
            checkpoint["state_dict"] = weights
        form = take_apart({key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint})
        flat = wanted(self._into, form.paths, source=self._path)
        lacking = [key for key in flat if key not in form.leaves]
        if lacking:
            raise ValueError(f"{self._path} does not hold {lacking[0]!r} and {len(lacking) - 1} more keys.")
        for key, target in flat.items():
            if isinstance(target, Tensor):
                _copy_part(key, form.leaves[key], target)
            else:
                flat[key] = form.leaves[key]
        put_objects(state, flat)
        return {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}


def _copy_part(key: str, whole: Any, target: Tensor) -> None:
    if not isinstance(whole, Tensor) or whole.shape != target.shape:
        raise ValueError(f"{key!r} is {getattr(whole, 'shape', whole)!r} in the file and {target.shape} in the model.")
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(whole)
            return
        for chunk in target.__create_chunk_list__():  # type: ignore[no-untyped-call] # what DCP itself asks
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            target.to_local().copy_(whole[box])


def session_for(
    path: str, open_store: Callable[[str], Store], contents: dict[str, bytes] | None, into: Into | None
) -> Session:
    """Return the session for a folder with these contents, or for a single file if there are none."""
    if contents is None:
        return FileSession(path, open_store(parent(path)), into)
    return FolderSession(path, open_store(path), contents, into)
