"""Write one rank's share of a checkpoint into shard files, and have them where they belong.

In a local folder the files are written in place. For a volume or an object store they are written to a scratch disk and
uploaded, a few at a time, so that a disk smaller than the share is enough.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightning_air.checkpoint.crew import do_all
from lightning_air.checkpoint.local_store import make_folder
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.scratch import scratch_folder
from lightning_air.checkpoint.shard_file import Item, WrittenFile, write_shard_file
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.transfer import upload

# Several files of a share are uploaded side by side; one file is one stream.
TARGET_FILE_BYTES = 256 << 20
# What must stay free on the scratch disk, for the rest of the machine.
_SPARE_STAGING_BYTES = 64 << 20
_DISCARD_SECONDS = 10.0


@dataclass(frozen=True)
class WriteOptions:
    """How shards are written.

    Attributes:
        staging_dir: An existing local folder for files on their way; None: the system's temporary folder.
        max_upload_workers: How many files one rank uploads at once.
        deadline_seconds: How long all uploads of one save may take, retries included.
        num_sharing_disk: How many ranks write to the same scratch disk at once.
        file_bytes: A file is closed once it is this long.
    """

    staging_dir: Path | None = None
    max_upload_workers: int = 8
    deadline_seconds: float = 1800.0
    num_sharing_disk: int = 1
    file_bytes: int = TARGET_FILE_BYTES


@dataclass
class WriteStats:
    """What writing took: seconds by phase, and how much there was."""

    write_seconds: float = 0.0
    upload_seconds: float = 0.0
    verify_seconds: float = 0.0
    num_bytes: int = 0
    num_retries: int = 0


@dataclass(frozen=True)
class WrittenShare:
    """What one rank has written; all of it is where it belongs."""

    files: list[WrittenFile] = field(default_factory=list)
    stats: WriteStats = field(default_factory=WriteStats)


def write_share(store: Store, items: Sequence[Item], prefix: str, options: WriteOptions) -> WrittenShare:
    """Write items into files `<prefix>0.distcp`, `<prefix>1.distcp`, …. Any thread may call this.

    Args:
        store: The checkpoint's folder, without such files.
        items: This rank's share.
        prefix: What this rank's files begin with; `torch.distributed.checkpoint` writes `__<rank>_`.
        options: How.

    Raises:
        OSError: Naming the file that could not be written, uploaded or verified.
    """
    share = WrittenShare()
    started = time.monotonic()
    if store.is_local:
        make_folder(store.path(f"{prefix}0.distcp").parent)
        try:
            for index, group in enumerate(_files(items, options.file_bytes)):
                name = f"{prefix}{index}.distcp"
                _record(share, write_shard_file(store.path(name), name, group))
        except BaseException:
            discard(store, [file.name for file in share.files])  # what was cut off is deleted already
            raise
        share.stats.write_seconds = time.monotonic() - started
        return share
    with scratch_folder(options.staging_dir) as scratch:
        try:
            staged: list[Path] = []
            for index, group in enumerate(_files(items, options.file_bytes)):
                if staged and (len(staged) >= options.max_upload_workers or not _has_room(scratch, group, options)):
                    _send(store, staged, share.stats, options, options.deadline_seconds - (time.monotonic() - started))
                path = scratch / f"{prefix}{index}.distcp"
                begun = time.monotonic()
                _record(share, write_shard_file(path, path.name, group))
                share.stats.write_seconds += time.monotonic() - begun
                staged.append(path)
            if staged:
                _send(store, staged, share.stats, options, options.deadline_seconds - (time.monotonic() - started))
        except BaseException:
            discard(store, [file.name for file in share.files])
            raise
    return share


def discard(store: Store, names: Sequence[str]) -> None:
    """Delete files of a save that failed, as far as that takes no time: their space may be what it lacked.

    What stays is invisible, and swept at a later start.
    """
    work = {name: partial(store.delete, name) for name in names}
    with suppress(OSError):
        do_all("discard", work, where=store.root, max_workers=8, patience=Patience(_DISCARD_SECONDS))


def _files(items: Sequence[Item], file_bytes: int) -> Iterator[list[Item]]:
    group: list[Item] = []
    num_bytes = 0
    for item in items:
        if group and num_bytes + item.num_bytes > file_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += item.num_bytes
    if group:
        yield group


def _record(share: WrittenShare, file: WrittenFile) -> None:
    share.files.append(file)
    share.stats.num_bytes += file.record.num_bytes


def _has_room(scratch: Path, group: Sequence[Item], options: WriteOptions) -> bool:
    free = shutil.disk_usage(scratch).free - _SPARE_STAGING_BYTES
    return free // options.num_sharing_disk > sum(item.num_bytes for item in group)


def _send(store: Store, staged: list[Path], stats: WriteStats, options: WriteOptions, remaining_seconds: float) -> None:
    """Upload the staged files, and free their space."""
    moved = upload(
        store,
        [(path.name, path) for path in staged],
        max_workers=options.max_upload_workers,
        deadline_seconds=max(remaining_seconds, 0.001),
    )
    stats.upload_seconds += moved.seconds
    stats.verify_seconds += moved.verify_seconds
    stats.num_retries += moved.num_retries
    for path in staged:
        path.unlink()
    staged.clear()
