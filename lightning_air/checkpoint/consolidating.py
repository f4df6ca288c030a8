"""A checkpoint of any form as one: a stream for `load_from_checkpoint`, or a file that stock Lightning resumes from.

    model = Model.load_from_checkpoint(open_checkpoint("/Volumes/main/default/ckpt/run"))

What is used is verified before it is used, and nothing that could run code is unpickled unless the caller says so. A
damaged checkpoint that was named is an error; of a folder of them the newest valid one is taken. What comes out is
Lightning's own single-file form, optimizer states numbered, which `torch.load(weights_only=True)` reads.
"""

import io
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_air.checkpoint.filling import Filling, empty_like_saved
from lightning_air.checkpoint.finding import Found, find_checkpoints, is_published
from lightning_air.checkpoint.latest import FILE_SUFFIX, Candidate
from lightning_air.checkpoint.lightning_form import put_together
from lightning_air.checkpoint.local_store import make_folder, naming, sync_folder
from lightning_air.checkpoint.manifest import OBJECTS_NAME
from lightning_air.checkpoint.opened import OpenedFolder, read_small_files
from lightning_air.checkpoint.places import join, name, open_store, parent, parse_place
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.safe_pickle import load_object
from lightning_air.checkpoint.scratch import scratch_folder
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.transfer import download, upload
from lightning_air.checkpoint.untrusted import DamagedCheckpointError

log = logging.getLogger(__name__)

OnSkip = Callable[[str, str], object]
"""Told of a checkpoint that is passed over for an older one, and why."""

_DEADLINE_SECONDS = 7200.0
_MAX_WORKERS = 8
_OPTIMIZER_PREFIX = "optimizer_"


def open_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, staging_dir: str | None = None
) -> io.BytesIO:
    """Return an open stream for `LightningModule.load_from_checkpoint` or `torch.load`: all but the optimizers' states.

    Takes memory twice for what the model takes, for a moment.

    Example:
        `model = Model.load_from_checkpoint(open_checkpoint("/Volumes/main/default/ckpt/run"))`

    Args:
        path: A checkpoint of ours, of stock Lightning or of plain DCP, a pointer to one, or a folder of them, of which
            the newest valid one is taken: a local path, `/Volumes/…`, `dbfs:/Volumes/…` or a URL.
        weights_only: False allows objects of any class to be unpickled, and thereby any code to run; then
            `load_from_checkpoint` needs it too. True and None admit plain data types and tensors only.
        staging_dir: A local folder for files on their way. Default: the system's temporary folder.

    Raises:
        FileNotFoundError: If no checkpoint is there.
        BadCheckpointError: If it is damaged, unsafe or too new; of a folder of them, if none is valid.
        ValueError: If the path is wrong.
        OSError: If a file cannot be had.
    """
    _, checkpoint = _newest_valid(find_checkpoints(path), _Wanted(False, weights_only, staging_dir), _log_skip)
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return stream


def consolidate_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    weights_only: bool | None = None,
    staging_dir: str | None = None,
    on_skip: OnSkip | None = None,
) -> str:
    """Write a checkpoint as a single file, with all that stock Lightning needs to resume from it.

    On a local disk the file appears whole or not at all; elsewhere its size is verified, and its MD5 where the store
    tells one. The whole state is held in memory meanwhile.

    Args:
        source: As for `open_checkpoint`.
        target: The file to write: a local path, `/Volumes/…`, `dbfs:/Volumes/…` or a URL.
        force: Replace a file that is there.
        weights_only: As for `open_checkpoint`.
        staging_dir: A local folder for files on their way. Default: the system's temporary folder.
        on_skip: Told of newer checkpoints in a folder that are not valid. Default: a warning in the log.

    Returns:
        The checkpoint that was written as a file: of a folder of them, the newest valid one.

    Raises:
        FileExistsError: If something is at the target.
        FileNotFoundError: If no checkpoint is at the source.
        BadCheckpointError: As from `open_checkpoint`.
        ValueError: If a path is wrong, or the file would count as one of the run's checkpoints.
        OSError: If a file cannot be had or written.
    """
    place = parse_place(target).root
    if not name(place):
        raise ValueError(f"{place} has no file name. Name the file to write, such as '{join(place, 'model.ckpt')}'.")
    _refuse_taken(place, force=force)
    found = find_checkpoints(source)
    if place.endswith(FILE_SUFFIX) and os.path.realpath(parent(place)) == os.path.realpath(found.folder.root):
        raise ValueError(
            f"{place} would lie among the checkpoints of {found.folder.root} and count as the newest of them: a run "
            f"would resume from it. Write it to another folder, or with another ending than {FILE_SUFFIX}."
        )
    path, checkpoint = _newest_valid(found, _Wanted(True, weights_only, staging_dir), on_skip or _log_skip)
    _write(checkpoint, place, staging_dir)
    return path


# ---- choosing and reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """What is to be read, and how."""

    with_optimizers: bool
    weights_only: bool | None
    staging_dir: str | None


def _newest_valid(found: Found, wanted: _Wanted, on_skip: OnSkip) -> tuple[str, dict[str, Any]]:
    """Return the path and the content of the checkpoint that was named, or of the newest valid one in the folder."""
    published = [candidate for candidate in found.candidates if is_published(candidate)]
    if not published:
        raise DamagedCheckpointError(
            f"{found.candidates[0].path if found.is_one else found.folder.root} holds nothing that was published: a "
            "save is under way, or was killed. Name another checkpoint."
        )
    for candidate in published:
        try:
            checkpoint = _read(candidate, wanted)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            if found.is_one:
                raise error if isinstance(error, DamagedCheckpointError) else _missing(candidate, error) from error
            on_skip(candidate.path, str(error))
        else:
            return candidate.path, checkpoint
    raise DamagedCheckpointError(f"None of the {len(published)} checkpoint(s) in {found.folder.root} is valid.")


def _missing(candidate: Candidate, error: FileNotFoundError) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{candidate.path} is not whole: {error}")


def _log_skip(path: str, why: str) -> None:
    log.warning("Passing over %s: %s", path, why)


def _read(candidate: Candidate, wanted: _Wanted) -> dict[str, Any]:
    """Return a checkpoint in Lightning's form; nothing of it is used before it is verified."""
    if candidate.is_file:
        checkpoint = read_file(candidate.path, weights_only=wanted.weights_only, staging_dir=wanted.staging_dir)
    else:
        checkpoint = _read_folder(candidate.path, wanted)
    if not wanted.with_optimizers:
        checkpoint.pop("optimizer_states", None)
    return checkpoint


def read_file(path: str, *, weights_only: bool | None = None, staging_dir: str | None = None) -> dict[str, Any]:
    """Return what a single-file checkpoint of stock Lightning holds.

    Args:
        path: The file itself, on any place.
        weights_only: As for `open_checkpoint`.
        staging_dir: As for `open_checkpoint`.

    Raises:
        BadCheckpointError: If it is damaged or unsafe.
        OSError: If it cannot be had.
    """
    with (
        _local_copies(open_store(parent(path)), [name(path)], staging_dir) as path_of,
        path_of(name(path)).open("rb") as file,
    ):
        checkpoint = load_object(file, source=path, weights_only=weights_only)
    if not isinstance(checkpoint, dict):
        raise DamagedCheckpointError(f"{path} holds a {type(checkpoint).__name__} instead of a checkpoint")
    return checkpoint


def _read_folder(path: str, wanted: _Wanted) -> dict[str, Any]:
    store = open_store(path)
    contents = ask(store, lambda: read_small_files(path, store), Patience(_DEADLINE_SECONDS))
    if contents is None:
        raise DamagedCheckpointError(f"{path} is no longer published")
    folder = OpenedFolder.check(path, contents)
    meta: dict[str, Any] = {}
    if folder.meta is not None:
        meta = load_object(folder.meta, source=join(path, OBJECTS_NAME), weights_only=wanted.weights_only)
    saved = folder.metadata.state_dict_metadata
    keys = dict.fromkeys(
        [*(folder.metadata.planner_data or {}), *saved]
    )  # first as the model and the optimizer have them
    chosen = {key: saved[key] for key in keys if key in saved and (wanted.with_optimizers or not _is_of_optimizer(key))}
    metadata = replace(folder.metadata, state_dict_metadata=chosen)
    flat = empty_like_saved(metadata)
    filling = Filling(flat, metadata, source=path)
    with _local_copies(store, sorted(filling.files), wanted.staging_dir) as path_of:
        for file in filling.files:
            folder.verify_size(file, path_of(file))
        filling.read(path_of, check=folder.compare, weights_only=wanted.weights_only)
    return put_together(flat, metadata.planner_data or {}, meta)


def _is_of_optimizer(key: str) -> bool:
    return key.startswith(_OPTIMIZER_PREFIX) and key[len(_OPTIMIZER_PREFIX) :].partition(".")[0].isdecimal()


@contextmanager
def _local_copies(store: Store, files: list[str], staging_dir: str | None) -> Iterator[Callable[[str], Path]]:
    """Give what says where local copies of these files are: of a local store, the files themselves."""
    if store.is_local:
        yield store.path
        return
    with scratch_folder(staging_dir) as scratch:
        download(
            store,
            [(file, scratch / file) for file in files],
            max_workers=_MAX_WORKERS,
            deadline_seconds=_DEADLINE_SECONDS,
        )
        yield scratch.joinpath


# ---- writing ---------------------------------------------------------------------------------------------------------


def _refuse_taken(place: str, *, force: bool) -> None:
    folder = open_store(parent(place))
    patience = Patience(_DEADLINE_SECONDS)
    if ask(folder, lambda: folder.list(name(place)), patience) or (
        folder.is_local and folder.path(name(place)).is_dir()
    ):
        raise FileExistsError(f"{place} is a folder. Name a file that is not there yet.")
    if not force and ask(folder, lambda: folder.num_bytes(name(place)), patience) is not None:
        raise FileExistsError(f"{place} exists. Name another file, or replace it: force=True, --force.")


def _write(checkpoint: dict[str, Any], place: str, staging_dir: str | None) -> None:
    folder = open_store(parent(place))
    if folder.is_local:
        _write_local(checkpoint, folder.path(name(place)))
        return
    with scratch_folder(staging_dir) as scratch:
        staged = scratch / "checkpoint"
        torch.save(checkpoint, staged)
        upload(folder, [(name(place), staged)], max_workers=1, deadline_seconds=_DEADLINE_SECONDS)


def _write_local(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file under a name that no listing shows, and rename it."""
    make_folder(path.parent)
    unfinished = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        with naming(path), unfinished.open("xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
