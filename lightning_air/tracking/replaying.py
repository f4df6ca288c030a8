"""Send what an earlier process has left in a spool's folder: it was killed, or its server did not answer in time."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_air.tracking.charging import Charging, Uncharged, new_writer
from lightning_air.tracking.delivery import Thinner
from lightning_air.tracking.door import Door, open_door
from lightning_air.tracking.folder_lock import FolderLock
from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.points import Record
from lightning_air.tracking.progress import Progress, load_progress
from lightning_air.tracking.segments import Position, segment_numbers, segment_path
from lightning_air.tracking.spool_folder import RunInfo, read_run_info, remove_folder, write_run_info
from lightning_air.tracking.spool_reader import SpoolReader
from lightning_air.tracking.warn_once import Warn, WarnOnce
from lightning_air.tracking.writer import Writer, WriterStats


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What became of a folder.

    Attributes:
        run_id: The run that its records belong to.
        tracking_uri: Where they were sent.
        is_complete: All is acknowledged or set aside, and the folder is gone; if points were set aside, all but their
            list.
        stats: What was sent, the earlier process' part included. If it is not complete, `last_error` says why.
    """

    run_id: str
    tracking_uri: str
    is_complete: bool
    stats: WriterStats


class LeftRecords:
    """The records that an earlier spool has left; nobody appends to them.

    Args:
        folder: The spool's. Nobody else may change it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_appended = self.num_dropped = 0
        self._reader = SpoolReader(folder)

    def read(self, position: Position, max_records: int) -> list[tuple[Position, Record]]:
        """Return the records after a position, at most so many, each with the position after it."""
        return self._reader.read(position, max_records)

    def count_left(self, position: Position) -> int:
        """Return how many records there are after a position."""
        reader = SpoolReader(self.folder)
        try:
            return reader.count(position)
        finally:
            reader.close()

    def release(self, position: Position) -> None:
        """Delete what is before a position."""
        for number in segment_numbers(self.folder):
            if number < position.segment:
                segment_path(self.folder, number).unlink(missing_ok=True)

    @property
    def num_damaged(self) -> int:
        """Places where records were left out by `read`, because they are not as they were written."""
        return self._reader.num_damaged

    def prepare(self) -> None:
        """Do nothing: no records will come."""

    def seal(self, seconds: float) -> bool:  # noqa: ARG002 - a spool's
        """Do nothing: no records will come."""
        return True

    def drop_spare(self) -> None:
        """Do nothing: there is none."""

    def close(self) -> None:
        """Let go of the files."""
        self._reader.close()


def charged_anew(folder: Path, info: RunInfo, progress: Progress) -> RunInfo:
    """Return whose records a folder holds, with another writer if its progress is lost.

    Nobody knows then what the old one has sent, and so it stays charged with all that it may have.

    Raises:
        OSError: The folder cannot be written.
    """
    if progress.thinner is None:
        info = replace(info, writer=new_writer(), charged=0)
        write_run_info(folder, info)
    return info


def replay(
    folder: str | os.PathLike[str],
    *,
    restore_thinner: Callable[[Mapping[str, Any]], Thinner],
    tracking_uri: str | None = None,
    deadline_seconds: float = math.inf,
    charge_for: Callable[[RunInfo, Door], Charging] = lambda *_: Uncharged(),
    warn: Warn | None = None,
    open_door: Callable[[str], Door] = open_door,
) -> ReplayResult:
    """Send the records that are left in a folder, so that the server has each point once, and remove the folder.

    Args:
        folder: Of one run, `spool_dir/<run id>`.
        restore_thinner: Makes a thinner of its snapshot.
        tracking_uri: The server to send to; None for the one that the records were meant for.
        deadline_seconds: What is not sent by then stays in the folder, for the next time.
        charge_for: Makes what charges the run, given whose records they are and the door to its server; sends all
            otherwise.
        warn: Told of trouble.
        open_door: Opens the door to a server.

    Raises:
        SpoolInUseError: The process that left it is still alive, or someone else replays it; it says who.
        ValueError: It is no spool's folder.
        OSError: It cannot be read or written.
    """
    path = Path(folder).absolute()
    info = read_run_info(path)
    uri = tracking_uri or info.tracking_uri
    lock = FolderLock(path)
    try:
        progress = load_progress(path)
        info = charged_anew(path, info, progress)
        thinner = restore_thinner(info.thinner if progress.thinner is None else progress.thinner)
        warn = WarnOnce() if warn is None else warn
        record = FullRecord(path, progress.kept, warn=warn) if info.full_record else None
        source = LeftRecords(path)
        door = open_door(uri)
        charge = charge_for(info, door)
        writer = Writer(
            source,
            thinner,
            door,
            info.run_id,
            progress=progress,
            before_send=charge,
            settle=charge.settle,
            record=record,
            warn=warn,
        )
        writer.start()
        try:
            is_complete = writer.close(deadline_seconds)
        finally:  # Ctrl-C
            writer.close(0)
            source.close()
        if record is not None:
            record.finish()
        if is_complete:
            remove_folder(path)
    finally:
        lock.release()
    return ReplayResult(run_id=info.run_id, tracking_uri=uri, is_complete=is_complete, stats=writer.stats())
