"""Which checkpoints lie in a folder, and which of them is the newest that is valid.

The newest is the one that was saved last, as its manifest says: a run that went back to an earlier step goes on from
where it is now. The times of files tell when something was copied; they count only where there is no manifest.
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_air.checkpoint import places
from lightning_air.checkpoint.manifest import MANIFEST_NAME, OBJECTS_NAME, Manifest
from lightning_air.checkpoint.pointer import MAX_POINTER_BYTES, read_pointer
from lightning_air.checkpoint.reading import Reader, ask
from lightning_air.checkpoint.report import CheckpointReport, Level
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.store import METADATA_NAME, Entry, Store
from lightning_air.checkpoint.untrusted import BadCheckpointError
from lightning_air.checkpoint.verify import MAX_MANIFEST_BYTES, step_in_name, verify_checkpoint

log = logging.getLogger(__name__)

FILE_SUFFIX = ".ckpt"
SHARD_SUFFIX = ".distcp"
LAST_POINTER = "last.ckpt"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What may be a checkpoint, directly in a folder.

    Attributes:
        path: Where it is.
        name: Its name in the folder.
        is_file: A single file, as stock Lightning writes it.
        manifest: None if there is none that can be read.
        has_metadata: Whether it is published. A folder that is not is a save under way, or one that was killed.
        modified_seconds: When its newest file was written, as the listing says, in seconds since 1970; None if it does
            not say, or was not asked since there is a manifest.
    """

    path: str
    name: str
    is_file: bool
    manifest: Manifest | None = field(repr=False)
    has_metadata: bool
    modified_seconds: float | None

    @property
    def step(self) -> int | None:
        """Optimizer steps done, as the manifest says, or else the name."""
        return self.manifest.step if self.manifest is not None else step_in_name(self.name)

    @property
    def created_seconds(self) -> float | None:
        """When it was saved, in seconds since 1970, as well as that is known."""
        return self.manifest.created_seconds if self.manifest is not None else self.modified_seconds

    @property
    def order(self) -> tuple[float, int, str]:
        """Grows with the time at which it was saved; then with its step."""
        created, step = self.created_seconds, self.step
        return -math.inf if created is None else created, -1 if step is None else step, self.name


def list_checkpoints(
    path: str | os.PathLike[str] | Store, *, max_workers: int = 8, deadline_seconds: float = 600.0
) -> list[Candidate]:
    """Return what may be a checkpoint directly in a folder, the newest first; nothing if the folder does not exist.

    Nothing is verified. Manifests and `.metadata` are asked for by name, and so is what `last.ckpt` points to, since a
    listing may not show yet what was written last. Pointer files themselves are left out, and so are links to what
    lies beside them: they would count twice.

    Raises:
        OSError: If the place cannot be read.
    """
    store = places.open_store(path) if isinstance(path, str | os.PathLike) else path
    patience = Patience(deadline_seconds)
    entries = {entry.name: entry for entry in ask(store, store.list, patience)}
    last = _last(store, patience)
    if last is not None and last not in entries:
        entries[last] = Entry(last, is_folder=True, num_bytes=0, modified_seconds=None)
    found: list[Candidate] = []

    def look(entry: Entry) -> None:
        if store.is_local and _is_link_beside(store.path(entry.name), entry):
            return
        try:
            candidate = _folder(store, entry, patience) if entry.is_folder else _file(store, entry, patience)
        except OSError as error:
            if not store.is_local:
                raise
            log.warning("Passing over %s in %s, which cannot be read: %s", entry.name, store.root, error)
        else:
            found.extend([candidate] if candidate is not None else [])

    with _reader(store, "", patience, max_workers) as reader:
        reader.for_each(look, entries.values())
    return sorted(found, key=lambda candidate: candidate.order, reverse=True)


def latest_checkpoint(
    path: str | os.PathLike[str] | Store,
    *,
    level: Level = "size",
    weights_only: bool | None = None,
    max_workers: int = 8,
    staging_dir: str | None = None,
    deadline_seconds: float = 7200.0,
    settle_seconds: float = 5.0,
    on_skip: Callable[[CheckpointReport], object] | None = None,
) -> str | None:
    """Return the newest valid checkpoint directly in a folder; None if there is none.

    Candidates are tried from the newest on, and the first valid one ends the search. What was never published is passed
    over in silence: it is invisible to readers.

    Args:
        path: The folder, on any place; or an open store of it.
        level: "size" looks at every file's size and reads `.metadata` and the manifest only: the load that follows
            reads the rest, and checks it then, where "digest" would have it read twice. A single-file `.ckpt`, whose
            size nobody wrote down, is read at both levels.
        weights_only: As for `verify_checkpoint`.
        max_workers: How many files are read at once.
        staging_dir: Where remote files are downloaded to.
        deadline_seconds: How long the search may take.
        settle_seconds: How long a file in a remote store may remain unseen before it counts as missing.
        on_skip: Gets the report of every published checkpoint that is newer and not valid. Default: a warning in the
            log.

    Raises:
        OSError: If the place cannot be read.
    """
    store = places.open_store(path) if isinstance(path, str | os.PathLike) else path
    patience = Patience(deadline_seconds)
    for candidate in list_checkpoints(store, max_workers=max_workers, deadline_seconds=deadline_seconds):
        if not candidate.has_metadata and not candidate.is_file:
            continue
        report = verify_checkpoint(
            store,
            name=candidate.name,
            level=level,
            weights_only=weights_only,
            max_workers=max_workers,
            staging_dir=staging_dir,
            deadline_seconds=max(patience.remaining_seconds, 1e-3),
            settle_seconds=settle_seconds,
        )
        if report.valid:
            return report.path
        (on_skip or _warn)(report)
    return None


def _warn(report: CheckpointReport) -> None:
    log.warning("Skipping a checkpoint. %s", report)


def _is_link_beside(path: Path, entry: Entry) -> bool:
    """Return whether this is a link to what is listed itself."""
    target = path.resolve()
    is_listed = entry.is_folder or target.name.endswith(FILE_SUFFIX)
    return path.is_symlink() and target.parent == path.parent.resolve() and is_listed


def _last(store: Store, patience: Patience) -> str | None:
    try:
        return ask(store, lambda: read_pointer(store, LAST_POINTER), patience)
    except BadCheckpointError:  # a pointer that leads nowhere adds nothing to what is listed
        return None


def _folder(store: Store, entry: Entry, patience: Patience) -> Candidate | None:
    with _reader(store, entry.name, patience) as reader:
        has_metadata = reader.num_bytes(METADATA_NAME, is_due=False) is not None
        manifest = _manifest(reader)
    modified_seconds = None
    if manifest is None:
        listed = ask(store, lambda: store.list(entry.name), patience)
        names = [each.name.rpartition("/")[2] for each in listed]
        if not has_metadata and not any(each == OBJECTS_NAME or each.endswith(SHARD_SUFFIX) for each in names):
            return None
        modified_seconds = max((each.modified_seconds or -math.inf for each in listed), default=-math.inf)
    return Candidate(
        path=places.join(store.root, entry.name),
        name=entry.name,
        is_file=False,
        manifest=manifest,
        has_metadata=has_metadata,
        modified_seconds=modified_seconds if modified_seconds != -math.inf else None,
    )


def _manifest(reader: Reader) -> Manifest | None:
    num_bytes = reader.num_bytes(MANIFEST_NAME, is_due=False)
    if num_bytes is None or num_bytes > MAX_MANIFEST_BYTES:
        return None
    try:
        return Manifest.from_json(reader.read(MANIFEST_NAME))
    except (BadCheckpointError, FileNotFoundError):  # to say what is wrong with it is verification's
        return None


def _file(store: Store, entry: Entry, patience: Patience) -> Candidate | None:
    if not entry.name.endswith(FILE_SUFFIX):
        return None
    if entry.num_bytes <= MAX_POINTER_BYTES:
        try:
            if ask(store, lambda: read_pointer(store, entry.name), patience) is not None:
                return None
        except BadCheckpointError:
            return None
    return Candidate(
        path=places.join(store.root, entry.name),
        name=entry.name,
        is_file=True,
        manifest=None,
        has_metadata=False,
        modified_seconds=entry.modified_seconds,
    )


def _reader(store: Store, folder: str, patience: Patience, max_workers: int = 1) -> Reader:
    return Reader(store, folder, staging_dir=None, max_workers=max_workers, patience=patience, settle_seconds=0.0)
