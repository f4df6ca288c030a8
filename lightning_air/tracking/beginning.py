"""How a tracker begins in a spool's folder: anew, or with what another process or a checkpoint has left.

A disk that is full is no hindrance: what it does not take is known here, and the writer notes it once there is space.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_air.tracking.charging import BEFORE, new_writer
from lightning_air.tracking.progress import Progress, forget_damaged, load_progress, save_progress
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.segments import Position, put_segments_aside
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import NoSpoolError, RunInfo, is_full, read_run_info, write_run_info
from lightning_air.tracking.tails import Tail, lay_down
from lightning_air.tracking.warn_once import Warn


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Where a tracker begins.

    Attributes:
        thinner: As it is there.
        info: Whose the records are.
        progress: How far they are sent.
    """

    thinner: RunThinner
    info: RunInfo
    progress: Progress


class Beginning:
    """The ways to begin in one run's folder. The training thread's, before there is a writer.

    Args:
        folder: The run's spool.
        run_id: MLflow's.
        tracking_uri: Of the server that has the run.
        found: Points that the run had when no writer had come to it.
        full_record: Keep all records.
        warn: Told of trouble.
    """

    def __init__(
        self, folder: Path, run_id: str, tracking_uri: str, *, found: int, full_record: bool, warn: Warn
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._tracking_uri = tracking_uri
        self._found = found
        self._full_record = full_record
        self._warn = warn

    def lay_down(self, tail: Tail, shown: Mapping[str, tuple[int, int]]) -> None:
        """Put what a checkpoint has into a spool of its own: so it is then what another process has left.

        Args:
            tail: Of the checkpoint.
            shown: As in `tails.lay_down`.

        Raises:
            OSError: The folder cannot be written. Not if only the disk is full.
        """
        try:
            with closing(Spool(self._folder, warn=self._warn)) as spool:
                lay_down(
                    spool,
                    tail,
                    run_id=self._run_id,
                    tracking_uri=self._tracking_uri,
                    shown=shown,
                    found=self._found,
                    full_record=self._full_record,
                )
        except OSError as error:
            if not _has_no_space(error):
                raise
            self._warn(
                "tail", f"Metrics that the checkpoint has, and the server not, are not sent: {error}. They stay in it."
            )

    def known(self, spool: Spool) -> Begun | None:
        """Return where what is in the folder was left; None if there is nothing, or of nobody knows whom.

        Raises:
            OSError: The folder cannot be read or written.
        """
        progress = load_progress(self._folder)
        forget_damaged(self._folder)
        try:
            info = read_run_info(self._folder)
        except ValueError as error:
            if progress.thinner is None:
                if not isinstance(error, NoSpoolError):
                    put_segments_aside(self._folder, spool.end.segment)
                    self._warn("unknown", f"{error} The metrics in it are put aside there, and not sent.")
                return None
            # Then only its writer is not known, which stays charged.
            info = RunInfo(run_id=self._run_id, tracking_uri=self._tracking_uri, thinner=progress.thinner)
            self._try_to(lambda: write_run_info(self._folder, info))
        return Begun(thinner=restore_thinner(progress.thinner or info.thinner), info=info, progress=progress)

    def anew(self, spool: Spool, thinner: RunThinner, writer: str | None = None, num_charged: int = 0) -> Begun:
        """Begin in a folder that has nothing of the run.

        Args:
            spool: In it.
            thinner: The first.
            writer: Who is charged; None for a new one.
            num_charged: Points that it had sent before.

        Raises:
            OSError: The folder cannot be written. Not if only the disk is full.
        """
        spool.release(Position(spool.end.segment + 1, 0))  # nobody knows whose it is
        info = RunInfo(
            run_id=self._run_id,
            tracking_uri=self._tracking_uri,
            thinner=thinner.snapshot(),
            full_record=self._full_record,
            writer=writer or new_writer(),
            charged=num_charged,
            found=self._found,
        )
        self._try_to(lambda: write_run_info(self._folder, info))
        return Begun(thinner=thinner, info=info, progress=Progress())

    def take_over(
        self, spool: Spool, left: Begun, new_thinner: Callable[[int], RunThinner], charged: Mapping[str, int]
    ) -> Begun:
        """Begin behind what another process has left, or a tail.

        Args:
            spool: With what is left.
            left: What is known of it.
            new_thinner: Makes the thinner that takes over, given the points that the run has already.
            charged: What the run's tags say.

        Raises:
            OSError: The folder cannot be read or written. Not if only the disk is full.
        """
        info, progress = left.info, left.progress
        if progress.thinner is None:  # as in a replay
            info = replace(info, writer=new_writer(), charged=0)
            self._try_to(lambda: write_run_info(self._folder, info))
        num_left = spool.count_left(progress.position)
        elsewhere = sum(points for writer, points in charged.items() if writer != info.writer) + info.charged
        if BEFORE not in charged:
            elsewhere += info.found
        thinner, new = left.thinner, new_thinner(elsewhere + progress.num_sent)
        thinner.hand_over(new, after=num_left, elsewhere=elsewhere)
        # Before the first record of this attempt, or the next one would not know where it begins.
        progress = replace(progress, thinner=thinner.snapshot())
        self._try_to(lambda: save_progress(self._folder, progress))
        return Begun(thinner=thinner, info=info, progress=progress)

    def _try_to(self, write: Callable[[], object]) -> None:
        """Write into the folder; the writer tries again what a full disk does not take."""
        try:
            write()
        except OSError as error:
            if not _has_no_space(error):
                raise
            self._warn(
                "no space",
                f"There is no space in {self._folder} ({error}). Metrics are sent all the same, as far as there is "
                "any; but if this process is killed now, some are lost or sent again. Free space, or choose another "
                "spool_dir.",
            )


def has_run(folder: Path) -> bool:
    """Return whether a spool's folder holds what somebody has logged into a run, readable or not."""
    try:
        read_run_info(folder)
    except NoSpoolError:
        return load_progress(folder).thinner is not None
    except ValueError:
        return True
    return True


def restore_thinner(snapshot: Mapping[str, Any]) -> RunThinner:
    """Return the thinner of a spool's folder, for `replay`."""
    return RunThinner.from_snapshot(snapshot)


def _has_no_space(error: OSError) -> bool:
    """Return whether a full disk is the reason; then the folder may not even be there."""
    return is_full(error) or isinstance(error, FileNotFoundError)
