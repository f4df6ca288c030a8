"""A spool's hold on its folder: from the beginning, or as soon as there is space; and again if something deletes it."""

from pathlib import Path

from lightning_air.tracking.folder_lock import FolderLock, SpoolInUseError
from lightning_air.tracking.spool_folder import is_full
from lightning_air.tracking.warn_once import Warn


class FolderClaim:
    """Makes a folder and keeps it to this spool, until `release`.

    Args:
        folder: Of the spool.
        warn: Told if something deletes it, or if somebody else has taken it then.

    Raises:
        SpoolInUseError: Somebody else has it.
        OSError: It cannot be made. Not if only the disk is full.
    """

    def __init__(self, folder: Path, warn: Warn) -> None:
        self._folder = folder
        self._warn = warn
        self._lock: FolderLock | None = None
        try:
            self._claim()
        except OSError as error:
            if not is_full(error):
                raise

    @property
    def is_held(self) -> bool:
        """Whether the folder was there and ours when somebody looked last."""
        return self._lock is not None

    def keep(self) -> None:
        """Make the folder if it is not there. The writer's thread's; to be called often.

        Raises:
            OSError: It cannot be made.
        """
        if self._lock is not None and self._lock.is_there:
            return
        if self._lock is not None:
            self._warn(
                "spool-removed",
                f"{self._folder} was removed by something else while metrics are logged into it. It is made again, but "
                "what it held is safe no more if this process is killed. Choose a spool_dir that nothing cleans up.",
            )
        try:
            self._claim()
        except SpoolInUseError as error:
            self._warn("spool-taken", f"{error} Metrics may be lost.")

    def release(self) -> None:
        """Let others have the folder; again is as good as once."""
        if self._lock is not None:
            self._lock.release()

    def _claim(self) -> None:
        # Others on the machine have no business in it, nor in what holds the folders of all runs.
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._lock is None:
            self._lock = FolderLock(self._folder)
        else:
            self._lock.renew()
