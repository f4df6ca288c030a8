"""What is written down in the spool's folder while the server acknowledges: how far it got, and what it refused."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning_air.tracking.full_record import FullRecord, Kept
from lightning_air.tracking.progress import Progress, save_progress
from lightning_air.tracking.segments import Position
from lightning_air.tracking.spool_folder import SET_ASIDE_NAME, SetAside, add_set_aside
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
    """

    def __init__(self, folder: Path, space: Space, warn: Warn) -> None:
        self._folder = folder
        self._space = space
        self._warn = warn
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._keys_warned: set[str] = set()

    def abandon(self) -> None:
        """Leave the folder alone from now on. Any thread's."""
        with self._lock:
            self._is_abandoned = True

    def save(self, progress: Progress) -> None:
        """Note a progress, and give back the space before it."""
        with self._lock:
            if not self._is_abandoned and self._is_saved(progress):
                self._space.release(progress.position)

    def keep(self, record: FullRecord) -> Kept | None:
        """Write the full record, and return what the next progress is to say of it."""
        with self._lock:
            return None if self._is_abandoned else record.commit()

    def note_set_aside(self, refused: Sequence[SetAside]) -> None:
        """Add points to the list of those that were refused."""
        for item in refused:
            if item.point.key not in self._keys_warned and len(self._keys_warned) < _MOST_KEYS_WARNED:
                self._keys_warned.add(item.point.key)
                self._warn(
                    f"set aside {item.point.key}",
                    f"The tracking server refuses {item.point.key!r} = {item.point.value} of step {item.point.step}: "
                    f"{item.reason}. It is set aside in {self._folder / SET_ASIDE_NAME}; all others arrive.",
                )
        with self._lock:
            if refused and not self._is_abandoned:
                try:
                    add_set_aside(self._folder, refused)
                except OSError as error:
                    self._warn("set aside", f"Points that the tracking server refuses cannot be noted: {error}.")

    def _is_saved(self, progress: Progress) -> bool:
        for is_last in (False, True):
            try:
                save_progress(self._folder, progress)
            except OSError as error:
                self._space.drop_spare()  # if the disk is full, this may do
                if is_last:
                    self._warn(
                        "progress",
                        f"How far metrics were sent cannot be noted ({error}). If the process is killed now, some are "
                        "sent again; the server keeps each once.",
                    )
            else:
                return True
        return False
