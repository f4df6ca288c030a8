"""Names of checkpoints, and what may be deleted of them. Rank 0 only.

A checkpoint's folder is never written twice. If anything lies under a name that is asked for, the checkpoint goes to a
folder of the next generation, `last@2.ckpt`, and the published one before is deleted once the new one is published.
What a killed save has left stays until it is swept: another attempt that is still alive may be writing it.
"""

import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.places import join, name, open_store, parent, parse_place
from lightning_air.checkpoint.pointer import resolve_pointer, write_pointer
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.scores import write_scores
from lightning_air.checkpoint.store import METADATA_NAME, Store

_GENERATION = re.compile(r"(?P<stem>.+)@(?P<number>[1-9][0-9]*)(?P<suffix>\.[^.@]*)?")

# How long one question to a store is tried again.
PATIENCE_SECONDS = 60.0

OpenStore = Callable[[str], Store]
T = TypeVar("T")


class Shelf:
    """The folders that checkpoints lie in.

    Args:
        open_store: What makes a store of a place.
    """

    def __init__(self, open_store: OpenStore = open_store) -> None:
        self.open_store = open_store
        self._protected: set[str] = set()
        self._lock = threading.Lock()

    def protect(self, path: str) -> None:
        """Never delete this checkpoint: the run has resumed from it. Any thread may call this."""
        with self._lock:
            self._protected.add(_identity(path))

    def is_protected(self, path: str) -> bool:
        """Return whether the run has resumed from this checkpoint."""
        with self._lock:
            return _identity(path) in self._protected

    def resolve(self, path: str) -> str:
        """Return the place that a path means, behind pointers."""
        root = parse_place(path).root
        folder = self.open_store(parent(root))
        target = join(parent(root), _ask(folder, lambda: resolve_pointer(folder, name(root))))
        return str(folder.path(name(target)).resolve()) if folder.is_local else target  # what a link leads to

    def newest_first(self, folder: str) -> list[str]:
        """Return the published checkpoints that lie directly in a folder, the one that was saved last first."""
        candidates = list_checkpoints(self.open_store(folder))
        return [found.path for found in candidates if found.has_metadata or found.is_file]

    def fresh_folder(self, path: str) -> str:
        """Return a folder for a new checkpoint of this name, in which nothing lies.

        Raises:
            OSError: If the place cannot be looked at or cleared.
        """
        root = parse_place(path).root
        number = max(self.generations(root), default=0) + 1
        # A listing may not show yet what is there by name.
        while self._is_taken(fresh := _with_generation(root, number)):
            number += 1
        return fresh

    def _is_taken(self, path: str) -> bool:
        store = self.open_store(path)
        return self.exists(path) or len(_ask(store, store.list)) > 0

    def generations(self, path: str) -> dict[int, str]:
        """Return the published checkpoints of a name, and single files, by generation; the name itself is the first."""
        root = parse_place(path).root
        found = {1: root} if self.exists(root) else {}
        folder = self.open_store(parent(root))
        for entry in _ask(folder, folder.list):
            number = _generation_of(entry.name, name(root))
            if number is not None:
                candidate = join(parent(root), entry.name)
                if self.exists(candidate):
                    found[number] = candidate
        return found

    def exists(self, path: str) -> bool:
        """Return whether a checkpoint of any form is there: a published folder, or a single file."""
        store, folder = self.open_store(path), self.open_store(parent(path))
        return (
            _ask(store, lambda: store.num_bytes(METADATA_NAME)) is not None
            or _ask(folder, lambda: folder.num_bytes(name(path))) is not None
        )

    def remove(self, path: str) -> None:
        """Delete a checkpoint with all its generations, but none that the run has resumed from."""
        root = parse_place(path).root
        for candidate in {root, *self.generations(root).values()}:
            self.remove_one(candidate)

    def remove_older(self, path: str, published: str) -> None:
        """Delete the generations of a name before the one that was just published."""
        for candidate in self.generations(path).values():
            if candidate != published:
                self.remove_one(candidate)

    def remove_one(self, path: str) -> None:
        """Delete this folder or file, `.metadata` first, unless the run has resumed from it."""
        if not self.is_protected(path):
            self.clear(path)

    def clear(self, path: str) -> None:
        """Delete this folder or file, `.metadata` first."""
        folder = self.open_store(parent(path))
        if _ask(folder, lambda: folder.num_bytes(name(path))) is not None:
            _ask(folder, lambda: folder.delete(name(path)))
        _ask(folder, lambda: folder.delete_folder(name(path)))

    def note_scores(self, folder: str, monitor: str, scores: Mapping[str, float]) -> None:
        """Note how good checkpoints are, beside them."""
        store = self.open_store(folder)
        _ask(store, lambda: write_scores(store, monitor, scores))

    def point(self, pointer: str, target: str, *, link: bool) -> None:
        """Let a path stand for a published checkpoint beside it, by a link where there are links, else by a file."""
        folder = self.open_store(parent(pointer))
        if not folder.is_local or not link:
            if folder.is_local and folder.path(name(pointer)).is_dir():
                folder.delete_folder(name(pointer))  # a checkpoint that an earlier run kept under this name
            _ask(folder, lambda: write_pointer(folder, name(pointer), name(target)))
            return
        path = folder.path(name(pointer))
        fresh = path.with_name(f".link-{uuid.uuid4().hex}")
        fresh.symlink_to(name(target))
        try:
            if path.is_dir() and not path.is_symlink():
                folder.delete_folder(name(pointer))
            fresh.replace(path)
        except OSError:
            fresh.unlink()
            raise


def _ask(store: Store, call: Callable[[], T]) -> T:
    return ask(store, call, Patience(PATIENCE_SECONDS))


def _identity(path: str) -> str:
    place = parse_place(path)
    return os.path.realpath(place.root) if place.kind == "local" else place.root


def _with_generation(path: str, number: int) -> str:
    if number == 1:
        return path
    stem, dot, suffix = name(path).rpartition(".")
    versioned = f"{stem}@{number}.{suffix}" if stem and dot else f"{name(path)}@{number}"
    return join(parent(path), versioned)


def _generation_of(candidate: str, base: str) -> int | None:
    match = _GENERATION.fullmatch(candidate)
    if match is None or match["stem"] + (match["suffix"] or "") != base:
        return None
    return int(match["number"])
