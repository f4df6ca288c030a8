"""One attempt at loading one checkpoint, as one rank sees it: plan what it needs, verify it, read it.

A folder is read by `torch.distributed.checkpoint`'s plan, whoever wrote it: we, Lightning or plain DCP. A single file
is Lightning's `.ckpt`. Either fills a sharded state in place, or comes back whole.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # no public name; what torch itself walks containers with

from lightning_air.checkpoint.filling import Filling, empty_like_saved
from lightning_air.checkpoint.lightning_form import (
    META_KEY,
    KeyPath,
    flatten,
    is_marker,
    marked_key,
    numbers_to_names,
    put_together,
    set_at,
    take_apart,
)
from lightning_air.checkpoint.manifest import OBJECTS_NAME
from lightning_air.checkpoint.opened import OpenedFolder
from lightning_air.checkpoint.places import join, name, parent
from lightning_air.checkpoint.safe_pickle import load_object
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.untrusted import DamagedCheckpointError

State = dict[str, Any]

# What `torch.compile` of a submodule puts into its parameters' names. A state to be filled never has it.
_COMPILED = "_orig_mod."


class Like(Protocol):
    """Chooses what a tensor that is stored beside the model's is loaded into."""

    def __call__(self, last_key: str, shape: tuple[int, ...], /) -> Tensor | None:
        """Return a tensor (a shard, perhaps) to fill, or None for a whole one in host memory."""


class Session(Protocol):
    """What a checkpoint's form has to offer for loading. The methods are called in this order, on every rank."""

    store: Store
    files: set[str]

    def plan(self, *, weights_only: bool | None) -> None:
        """Find out which files this rank needs."""

    def verify(self, file: str, path: Path, *, by_digest: bool) -> None:
        """Raise `DamagedCheckpointError` if a local copy of a file is not as it was written."""

    def read(self, local: Path | None, *, weights_only: bool | None) -> State:
        """Fill the state and return the rest; from the files in this folder, or from where they are."""


class FolderSession:
    """A checkpoint that is a folder.

    Args:
        path: Where it is.
        store: Its files.
        contents: `.metadata`, and `manifest.json` and `meta.pt` where they are there, by name.
        state: Nested tensors to fill in place; None: all is returned.
        like: With `state`: where further tensors go.
    """

    def __init__(
        self, path: str, store: Store, contents: dict[str, bytes], state: State | None, like: Like | None
    ) -> None:
        self.store = store
        self.files: set[str] = set()
        self._path = path
        self._contents = contents
        self._state = state
        self._like = like
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
        if self._state is None:
            self._flat = empty_like_saved(self._metadata)
        else:
            self._metadata = _by_name(self._metadata, self._meta, self._state)
            self._flat = {**_wanted(self._state, self._metadata.planner_data or {}), **self._extras(self._like)}
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

    def verify(self, file: str, path: Path, *, by_digest: bool) -> None:
        """Raise `DamagedCheckpointError` if a local copy of a file is not as it was written."""
        self._folder.verify(file, path, by_digest=by_digest)

    def read(self, local: Path | None, *, weights_only: bool | None) -> State:
        """Fill the state and return the rest; from the files in this folder, or from where they are."""
        path_of = self.store.path if local is None else local.joinpath
        self._filling.read(path_of, weights_only=weights_only)
        paths = self._metadata.planner_data or {}
        if self._state is None:
            return put_together(self._flat, paths, self._meta)
        _put_objects(self._state, self._flat)
        extras = {key: value for key, value in self._flat.items() if key.startswith(f"{META_KEY}.")}
        places = {key: (META_KEY, key.partition(".")[2]) for key in extras}
        return put_together(extras, places, self._meta, is_whole=False)


class FileSession:
    """A checkpoint that is a single file, as stock Lightning writes it.

    Args:
        path: Where it is.
        store: The folder that it is in.
        state: Nested tensors to fill in place; None: all is returned.
    """

    def __init__(self, path: str, store: Store, state: State | None) -> None:
        self.store = store
        self.files = {name(path)}
        self._path = path
        self._state = state

    def plan(self, *, weights_only: bool | None) -> None:
        """Nothing: the whole file is needed."""

    def verify(self, file: str, path: Path, *, by_digest: bool) -> None:
        """Nothing: stock Lightning leaves nothing to compare with."""

    def read(self, local: Path | None, *, weights_only: bool | None) -> State:
        """Fill the state and return the rest."""
        path = self.store.path(name(self._path)) if local is None else local / name(self._path)
        with path.open("rb") as file:
            checkpoint = load_object(file, source=self._path, weights_only=weights_only)
        if not isinstance(checkpoint, dict):
            raise DamagedCheckpointError(f"{self._path} holds a {type(checkpoint).__name__} instead of a checkpoint")
        if self._state is None:
            return checkpoint
        for index, saved in enumerate(checkpoint.get("optimizer_states", [])):
            if f"optimizer_{index}" in self._state:
                names = _names_by_group(self._state[f"optimizer_{index}"])
                checkpoint["optimizer_states"][index] = numbers_to_names(saved, names)
        if "state_dict" in checkpoint:
            weights = {key.replace(_COMPILED, ""): value for key, value in checkpoint["state_dict"].items()}
            checkpoint["state_dict"] = weights
        form = take_apart({key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint})
        flat = _wanted(self._state, form.paths)
        lacking = [key for key in flat if key not in form.leaves]
        if lacking:
            raise ValueError(f"{self._path} does not hold {lacking[0]!r} and {len(lacking) - 1} more keys.")
        for key, target in flat.items():
            if isinstance(target, Tensor):
                _copy_part(key, form.leaves[key], target)
            else:
                flat[key] = form.leaves[key]
        _put_objects(self._state, flat)
        return {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}


def _put_objects(state: State, flat: State) -> None:
    """Set what is no tensor in the nested state; but the parameters' names, which are the state's own."""
    before, paths = flatten(state)
    for key, value in flat.items():
        is_own = key not in paths or (key.endswith(".params") and key.startswith("optimizer_"))
        if not is_own and not isinstance(before[key], Tensor):
            set_at(state, paths[key], value)


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


def _wanted(state: State, saved: Mapping[str, KeyPath]) -> State:
    """Return, by flat key, what of the state a checkpoint has to hold.

    Not the optimizer's state of a parameter that had never been stepped when it was saved (one without gradients, or of
    an optimizer that had not begun): its tensors become zero, as an optimizer begins. Nor options of a group that the
    optimizer, of a newer torch, has got since.
    """
    leaves, paths = flatten(state)
    parts: dict[KeyPath, list[str]] = defaultdict(list)
    for key, path in paths.items():
        if path[0] in state and str(path[0]).startswith("optimizer_"):
            parts[path[:3]].append(key)
    saved_parts = {path[:3] for path in saved.values()}
    for part, keys in parts.items():
        if part[1:2] == ("state",) and part not in saved_parts and (part[0], "param_groups", 0) in saved_parts:
            for key in keys:
                value = leaves.pop(key)
                if isinstance(value, Tensor):
                    (value.to_local() if isinstance(value, DTensor) else value).zero_()
        elif part[1:2] == ("param_groups",) and part in saved_parts:
            for key in keys:
                if key not in saved:
                    del leaves[key]
    return leaves


def _names_by_group(state: State) -> list[list[str]]:
    return [list(group["params"]) for group in state["param_groups"]]


def _by_name(metadata: Metadata, meta: State, state: State) -> Metadata:
    """Rename what a checkpoint holds as the state does: without what `torch.compile` adds, and never by number.

    Raises:
        ValueError: If an optimizer's groups had other numbers of parameters.
    """
    paths = metadata.planner_data or {}
    renamed: dict[str, KeyPath] = {
        flat_key: tuple(part.replace(_COMPILED, "") if isinstance(part, str) else part for part in path)
        for flat_key, path in paths.items()
        if _COMPILED in flat_key
    }
    notes = meta.get(META_KEY, {})
    for index, keyed_by in enumerate(notes.get("optimizers_keyed_by", [])):
        key = f"optimizer_{index}"
        if keyed_by == "number" and key in state:
            by_group = _names_by_group(state[key])
            counts = notes.get("parameters_by_group", [])[index : index + 1]
            if counts and counts != [[len(group) for group in by_group]]:
                raise ValueError(
                    f"Optimizer {index} had {counts[0]} parameters in its groups when it was saved, and has "
                    f"{[len(group) for group in by_group]} now. Give it the same groups."
                )
            names = [each for group in by_group for each in group]
            for flat_key, path in paths.items():
                if path[:2] == (key, "state") and str(path[2]).isdecimal() and int(path[2]) < len(names):
                    renamed[flat_key] = (key, "state", names[int(path[2])], *path[3:])
    if not renamed:
        return metadata

    def new(key: str) -> str:
        return ".".join(map(str, renamed[key])) if key in renamed else key

    return replace(
        metadata,
        planner_data={new(key): renamed.get(key, path) for key, path in paths.items()},
        state_dict_metadata={new(key): entry for key, entry in metadata.state_dict_metadata.items()},
        storage_data={
            MetadataIndex(new(index.fqn), index.offset, index.index): info
            for index, info in metadata.storage_data.items()
        },
    )


def session_for(
    path: str, open_store: Any, contents: dict[str, bytes] | None, state: State | None, like: Like | None
) -> Session:
    """Return the session for a folder with these contents, or for a single file if there are none."""
    if contents is None:
        return FileSession(path, open_store(parent(path)), state)
    return FolderSession(path, open_store(path), contents, state, like)
