"""What happens of a save while training goes on: write, meet, publish, and tell every rank how it ended.

Two messages are enough: every rank tells rank 0 what it has written or why it could not, and rank 0 tells every rank
whether the checkpoint is published. So the outcome is the same everywhere, and no rank's error can lead to a
checkpoint.
"""

import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_air.checkpoint.holdings import OwnShare
from lightning_air.checkpoint.lightning_form import KeyPath
from lightning_air.checkpoint.publishing import Described, Details, build_metadata, describe, publish
from lightning_air.checkpoint.ranks import Ranks
from lightning_air.checkpoint.shard_file import Item, WrittenFile
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.staging import StagedCopy
from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.writing import WriteOptions, WrittenShare, discard, write_share

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, in a form that the others can be told."""

    global_rank: int
    summary: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One save, all of it in memory.

    Attributes:
        path: What the checkpoint is to be called; the same on every rank.
        details: For the manifest.
        share: What this rank writes.
        copy: The copy of it; None if it is to be written from where training has it.
        paths: Flat key to the place in the nested state.
        meta: The content of `meta.pt`; rank 0's counts.
    """

    path: str
    details: Details
    share: OwnShare
    copy: StagedCopy | None
    paths: dict[str, KeyPath]
    meta: bytes | None


@dataclass
class Outcome:
    """How a save ended; `failure` and `published_path` are the same on every rank.

    Attributes:
        failure: The first rank's that failed, or None.
        error: This rank's own exception, if it failed itself.
        published_path: Where the checkpoint is.
        total_bytes: Its size.
        written: What this rank has written.
    """

    failure: Failure | None = None
    error: BaseException | None = None
    published_path: str | None = None
    total_bytes: int = 0
    written: WrittenShare = field(default_factory=WrittenShare)


def save_together(job: SaveJob, ranks: Ranks, shelf: Shelf, options: WriteOptions) -> Outcome:
    """Write this rank's share and publish the checkpoint with the others. Collective: every rank calls this.

    Never raises: what went wrong is in the outcome.
    """
    outcome = Outcome()
    try:
        outcome.failure = _save(job, ranks, shelf, options, outcome)
    except BaseException as error:  # noqa: BLE001 - the others cannot be met any more; told by the outcome
        outcome.error = error
        outcome.failure = _failure(error, ranks)
    if outcome.failure is not None:
        outcome.published_path = None
    return outcome


def _save(job: SaveJob, ranks: Ranks, shelf: Shelf, options: WriteOptions, outcome: Outcome) -> Failure | None:
    started = time.monotonic()
    is_first = ranks.global_rank == 0

    def attempt(call: Callable[[], T]) -> T | Failure:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - every rank has to come to the next meeting
            outcome.error = error
            return _failure(error, ranks)

    token = uuid.uuid4().hex[:8]
    folder, token = ranks.broadcast((attempt(lambda: shelf.fresh_folder(job.path)) if is_first else "", token))
    if isinstance(folder, Failure):
        return folder

    def write() -> tuple[WrittenShare, Described]:
        store = shelf.open_store(folder)
        # A local file is never opened twice. Elsewhere an attempt that is still alive could overwrite the same name.
        prefix = f"__{ranks.global_rank}_" if store.is_local else f"__{ranks.global_rank}_{token}_"
        return write_share(store, _items(job), prefix, options), describe(job.share)

    written = attempt(write)
    if not isinstance(written, Failure):
        outcome.written = written[0]
    gathered = ranks.gather(written if isinstance(written, Failure) else (written[0].files, written[1]))
    verdict: Any = None
    if gathered is not None:
        failures = [mine for mine in gathered if isinstance(mine, Failure)]
        done = [mine for mine in gathered if not isinstance(mine, Failure)]
        files = [file for of_rank, _ in done for file in of_rank]
        if failures:
            verdict = failures[0]
            with suppress(OSError):  # what is left is invisible, and swept at a later start
                _delete(shelf.open_store(folder), files)
        else:
            remaining = options.deadline_seconds - (time.monotonic() - started)
            # If this fails all files stay: `.metadata` may be on its way, and arrive yet.
            verdict = attempt(
                lambda: (
                    publish(
                        shelf.open_store(folder),
                        build_metadata([described for _, described in done], files, job.paths),
                        files,
                        job.details,
                        meta=job.meta,
                        deadline_seconds=max(remaining, 0.001),
                    ).num_bytes
                )
            )
    verdict = ranks.broadcast(verdict)
    if isinstance(verdict, Failure):
        return verdict
    outcome.published_path, outcome.total_bytes = folder, verdict
    if is_first:
        with suppress(OSError):  # the new one is published; an old one that cannot be deleted harms nobody
            shelf.remove_older(job.path, folder)
    return None


def _delete(store: Store, files: Sequence[WrittenFile]) -> None:
    """Give the space of a failed save back; its own files only, since another attempt may use the folder."""
    discard(store, [file.name for file in files])
    if store.is_local:
        store.path(METADATA_NAME).parent.rmdir()  # if it is empty


def _items(job: SaveJob) -> list[Item]:
    objects = [Item((MetadataIndex(key),), data) for key, data in job.share.objects.items()]
    if job.copy is None:
        return objects + [Item(piece.indices, piece.source) for piece in job.share.pieces]
    job.copy.wait()
    return objects + job.copy.items


def _failure(error: BaseException, ranks: Ranks) -> Failure:
    return Failure(ranks.global_rank, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
