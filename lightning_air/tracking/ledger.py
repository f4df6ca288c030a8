"""What is written down in the spool's folder while the server acknowledges: how far it got, and what it refused.

Nothing here raises for the disk: what cannot be written is said, and tried again with the next acknowledgement.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lightning_air.tracking.full_record import FullRecord
from lightning_air.tracking.progress import Progress, forget_damaged, save_progress
from lightning_air.tracking.segments import BEGINNING, Position
from lightning_air.tracking.set_aside import SET_ASIDE_NAME, SetAside, add_set_aside, whole_bytes
from lightning_air.tracking.spool_folder import RUN_NAME, RunInfo, write_run_info
from lightning_air.tracking.warn_once import Warn

_MOST_KEYS_WARNED = 20


class Space(Protocol):
    """What the records in the folder take."""

    def release(self, position: Position) -> None:
        """Give the space before a position back."""

    def drop_spare(self) -> None:
        """Give the space back that was taken ahead of time."""


class Ledger:
    """Writes progress and refusals down. The writer's thread's, but for `abandon`.

    Args:
        folder: The spool's.
        space: Of its records.
        warn: Told what cannot be written, and of points that are refused: of each key once, and not of too many.
        info: Whose the records are: noted again wherever that is not there, as after something has removed the folder.
            None for a folder that nobody logs into any more.
    """

    def __init__(self, folder: Path, space: Space, warn: Warn, *, info: RunInfo | None = None) -> None:
        self._folder = folder
        self._space = space
        self._warn = warn
        self._info = info
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._keys_warned: set[str] = set()
        self._saved: Position = BEGINNING  # of the progress that is there

    def abandon(self, seconds: float) -> None:
        """Leave the folder alone from now on. Any thread's.

        Args:
            seconds: To wait for a write that is under way. On a disk that takes longer it finds out at its end that it
                is not wanted any more.
        """
        self._is_abandoned = True
        if self._lock.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            self._lock.release()

    def begin(self, progress: Progress) -> Progress:
        """Note where it begins, and return that with what is known of the folder only now."""
        self._saved = progress.position
        with self._lock:
            forget_damaged(self._folder)
            if progress.set_aside_bytes is None:
                try:
                    progress = replace(progress, set_aside_bytes=whole_bytes(self._folder))
                except OSError as error:
                    self._warn("set aside", f"The list of refused points in {self._folder} cannot be read: {error}.")
            self._save(progress)
        return progress

    def keep(self, progress: Progress) -> None:
        """Note it all again if something has removed the folder; to be called often."""
        if self._info is not None and not (self._folder / RUN_NAME).exists():
            with self._lock:
                if not self._is_abandoned:
                    self._save(progress)

    def commit(
        self, progress: Progress, *, refused: Sequence[SetAside] = (), record: FullRecord | None = None
    ) -> Progress:
        """Note a progress and all that belongs to its moment, and give back the space that nobody needs any more.

        Args:
            progress: The moment.
            refused: Points that were refused since the one before.
            record: The full record, with all records up to there; None if none is kept.

        Returns:
            The progress as it was noted.
        """
        self._warn_of(refused)
        with self._lock:
            if self._is_abandoned:
                return progress
            if record is not None:
                progress = replace(progress, kept=record.commit())
            if refused:
                progress = replace(progress, set_aside_bytes=self._add(refused, progress.set_aside_bytes))
            before = self._saved
            if self._save(progress):
                self._release(before)  # the progress before this one leads there, should this one be lost
        return progress

    def _warn_of(self, refused: Sequence[SetAside]) -> None:
        for item in refused:
            if item.point.key not in self._keys_warned and len(self._keys_warned) < _MOST_KEYS_WARNED:
                self._keys_warned.add(item.point.key)
                self._warn(
                    f"set aside {item.point.key}",
                    f"The tracking server refuses {item.point.key!r} = {item.point.value} of step {item.point.step}: "
                    f"{item.reason}. It is set aside in {self._folder / SET_ASIDE_NAME}; all others arrive.",
                )

    def _add(self, refused: Sequence[SetAside], after_bytes: int | None) -> int | None:
        try:
            num_bytes, num_left_out = add_set_aside(self._folder, refused, after_bytes=after_bytes)
        except OSError as error:
            self._warn("set aside", f"Points that the tracking server refuses cannot be noted: {error}.")
            return after_bytes
        if num_left_out:
            path = self._folder / SET_ASIDE_NAME
            self._warn("set aside full", f"{path} is full: more points that the server refuses are counted only.")
        return num_bytes

    def _save(self, progress: Progress) -> bool:
        for is_last in (False, True):
            try:
                self._note_run()
                if save_progress(self._folder, progress, is_wanted=lambda: not self._is_abandoned):
                    self._saved = progress.position
                    return True
            except OSError as error:
                with suppress(OSError):
                    self._space.drop_spare()  # if the disk is full, this may do
                if is_last:
                    self._warn(
                        "progress",
                        f"How far metrics were sent cannot be noted ({error}). If the process is killed now, some are "
                        "sent again; the server keeps each once.",
                    )
            else:
                break
        return False

    def _note_run(self) -> None:
        if self._info is not None and not (self._folder / RUN_NAME).exists():
            write_run_info(self._folder, self._info)

    def _release(self, position: Position) -> None:
        try:
            self._space.release(position)
        except OSError as error:
            self._warn("release", f"Space in {self._folder} cannot be given back: {error}. It is tried again.")
