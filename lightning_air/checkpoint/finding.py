"""What a path that a user names stands for: one checkpoint, or a folder that checkpoints lie in.

One checkpoint is a folder or a single file, behind pointers and links, in the newest of its generations; published or
not. Everything else is a folder of them.
"""

import math
import os
from dataclasses import dataclass
from functools import partial

from lightning_air.checkpoint.latest import FILE_SUFFIX, SHARD_SUFFIX, Candidate, list_checkpoints
from lightning_air.checkpoint.manifest import MANIFEST_NAME, OBJECTS_NAME, Manifest
from lightning_air.checkpoint.places import join, name, open_store, parent, parse_place
from lightning_air.checkpoint.pointer import MAX_POINTER_BYTES, read_pointer, resolve_pointer
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.untrusted import BadCheckpointError

_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Found:
    """What a path stands for.

    Attributes:
        folder: Where the checkpoints lie.
        candidates: The newest first; at least one.
        is_one: Whether the path named this one checkpoint.
    """

    folder: Store
    candidates: list[Candidate]
    is_one: bool


@dataclass(frozen=True)
class Pointer:
    """A pointer file, or a link, beside the checkpoint that it stands for.

    Attributes:
        name: Its own name.
        target: The checkpoint's name; None if it leads nowhere.
        problem: Why it leads nowhere.
    """

    name: str
    target: str | None
    problem: str | None = None


def is_published(candidate: Candidate) -> bool:
    """Return whether readers see it. What a killed save has left, and a save under way, they do not."""
    return candidate.has_metadata or candidate.is_file


def find_checkpoints(path: str | os.PathLike[str]) -> Found:
    """Return what lies where a path leads. Verifies nothing.

    Args:
        path: A local path, `/Volumes/…`, `dbfs:/Volumes/…` or a URL.

    Raises:
        FileNotFoundError: If no checkpoint is there.
        ValueError: If the path is wrong.
        BadCheckpointError: If it is a pointer that leads nowhere.
        OSError: If the place cannot be read.
    """
    root = parse_place(path).root
    patience = Patience(_DEADLINE_SECONDS)
    above = _folder_above(root)
    if above is not None:
        leads_to = ask(above, lambda: _newest_generation(root), patience)
        if leads_to is not None:
            folder = open_store(parent(leads_to))
            return Found(folder, [_look(folder, name(leads_to), patience)], is_one=True)
    store = open_store(root)
    candidates = list_checkpoints(store, deadline_seconds=_DEADLINE_SECONDS)
    if candidates:
        return Found(store, candidates, is_one=False)
    names = [entry.name for entry in ask(store, store.list, patience)]
    if above is not None and any(
        each in {MANIFEST_NAME, OBJECTS_NAME} or each.endswith(SHARD_SUFFIX) for each in names
    ):
        return Found(above, [_look(above, name(root), patience)], is_one=True)  # never published
    if store.is_local and not os.path.lexists(root):
        raise FileNotFoundError(f"{root} does not exist. Name a checkpoint, or the folder that checkpoints lie in.")
    raise FileNotFoundError(
        f"There is no checkpoint at {root}. Name one (a folder with {METADATA_NAME}, a single file, a pointer), or the "
        "folder that checkpoints lie directly in."
    )


def find_pointers(store: Store) -> list[Pointer]:
    """Return what stands for a checkpoint in this folder: pointer files, and links to what lies beside them.

    Raises:
        OSError: If the folder cannot be read.
    """
    patience = Patience(_DEADLINE_SECONDS)
    found = []
    for entry in ask(store, store.list, patience):
        if store.is_local and (path := store.path(entry.name)).is_symlink():
            target = path.resolve()
            if target.parent == path.parent.resolve():
                found.append(Pointer(entry.name, target.name))
        elif entry.name.endswith(FILE_SUFFIX) and not entry.is_folder and entry.num_bytes <= MAX_POINTER_BYTES:
            try:
                if ask(store, partial(read_pointer, store, entry.name), patience) is not None:
                    target_name = ask(store, partial(resolve_pointer, store, entry.name), patience)
                    found.append(Pointer(entry.name, target_name))
            except BadCheckpointError as error:
                found.append(Pointer(entry.name, None, str(error)))
    return found


def _folder_above(root: str) -> Store | None:
    """Return the folder that a place lies in; None for a bucket's, a volume's or a file system's root."""
    if not name(root):
        return None
    try:
        return open_store(parent(root))
    except ValueError:  # above a volume's root there is no place
        return None


def _newest_generation(root: str) -> str | None:
    """Return where the published checkpoint lies that a name stands for; None if there is none."""
    shelf = Shelf()
    generations = shelf.generations(shelf.resolve(root))
    return generations[max(generations)] if generations else None


def _look(folder: Store, child: str, patience: Patience) -> Candidate:
    """Return one checkpoint, as `list_checkpoints` does."""
    metadata = f"{child}/{METADATA_NAME}"
    is_file = ask(folder, lambda: folder.num_bytes(child), patience) is not None
    manifest = None
    if not is_file:
        try:
            manifest = Manifest.from_json(ask(folder, lambda: folder.read(f"{child}/{MANIFEST_NAME}"), patience))
        except (BadCheckpointError, FileNotFoundError):  # to say what is wrong with it is verification's
            manifest = None
    listed = ask(folder, lambda: folder.list("" if is_file else child), patience)
    times = [entry.modified_seconds for entry in listed if not is_file or entry.name == child]
    modified = max((each for each in times if each is not None), default=-math.inf)
    return Candidate(
        path=join(folder.root, child),
        name=child,
        is_file=is_file,
        manifest=manifest,
        has_metadata=not is_file and ask(folder, partial(folder.num_bytes, metadata), patience) is not None,
        modified_seconds=None if modified == -math.inf else modified,
    )
