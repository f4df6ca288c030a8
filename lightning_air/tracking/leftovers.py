"""Send what earlier attempts have left: in the spool's folder on this machine, and in the checkpoint resumed from."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow import MlflowClient

from lightning_air.tracking.attempts import latest_moments
from lightning_air.tracking.charging import Charge
from lightning_air.tracking.door import Door
from lightning_air.tracking.door_errors import one_line
from lightning_air.tracking.folder_lock import FolderLock, SpoolInUseError
from lightning_air.tracking.full_record import RECORD_FOLDER
from lightning_air.tracking.outbox import OUTBOX_NAME, Addressed, Outbox, read_outbox, remove_outbox, write_outbox
from lightning_air.tracking.outbox_sending import send_outbox
from lightning_air.tracking.progress import Progress, load_progress
from lightning_air.tracking.replaying import ReplayResult, replay
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RUN_NAME, RunInfo, read_run_info
from lightning_air.tracking.tails import Tail, lay_down
from lightning_air.tracking.tracker import restore_thinner
from lightning_air.tracking.warn_once import Warn, WarnOnce
from lightning_air.tracking.writer import WriterStats

# A server that is away then is away for this attempt's own points too. While it lasts nobody else can open the run from
# this machine, so it is short; it begins anew as long as something goes.
_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class LeftSent:
    """What became of what a run had left.

    Attributes:
        run_id: The run.
        tracking_uri: Where it was sent.
        is_complete: Nothing is left, but for the list of points that the server refuses.
        stats: Of the metrics, the earlier process' part included; None if only other things were left.
        has_told: What was left beside metrics, such as the end of the run, has been sent now.
        reason: Why something is left; None if nothing is.
    """

    run_id: str
    tracking_uri: str
    is_complete: bool
    stats: WriterStats | None
    has_told: bool
    reason: str | None


def send_leftovers(
    spool_dir: Path,
    tracking_uri: str,
    *,
    but: str,
    tail: tuple[str, Tail] | None,
    warn: Warn,
    say: Callable[[str], object],
) -> None:
    """Send what other runs have left here. On the background thread.

    Args:
        spool_dir: Where runs have their spools, each a folder named by its run.
        tracking_uri: Of the server; what is for another server is left alone.
        but: The run that is open now.
        tail: The run that the checkpoint was saved in, and what the server had not taken then; what is on this
            machine of that run holds more, and is sent instead.
        warn: Told of trouble.
        say: Told what was sent.
    """
    if tail is not None:
        _keep_tail(spool_dir / tail[0], tracking_uri, *tail, warn=warn)
    for folder in spools_in(spool_dir):
        if folder.name == but:
            continue
        try:
            if address_of(folder)[1] != tracking_uri:
                continue
            num_before = load_progress(folder).num_sent
            result = _insist(folder, warn)
        except SpoolInUseError:
            continue  # another training on this machine
        except Exception as error:  # noqa: BLE001 - one damaged folder must not keep the others
            warn(f"leftovers {folder}", f"What an earlier attempt has left in {folder} is not sent: {error}")
            continue
        if not result.is_complete:
            warn(
                f"leftovers {folder}",
                f"What an earlier attempt has left in {folder} has not all reached the run {result.run_id}: "
                f"{result.reason}. It stays there for the next attempt, or for `lightning-air replay`; to give it "
                "up, delete that folder.",
            )
        elif result.has_told or (result.stats is not None and result.stats.num_sent > num_before):
            say(f"What an earlier attempt had not sent has reached the run {result.run_id} now.")


def _insist(folder: Path, warn: Warn) -> LeftSent:
    """Send what a folder holds, as long as something goes."""
    num_sent = load_progress(folder).num_sent
    while True:
        result = send_left(folder, deadline_seconds=_DEADLINE_SECONDS, warn=warn)
        if result.is_complete or result.stats is None or result.stats.num_sent <= num_sent:
            return result
        num_sent = result.stats.num_sent


def spools_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's spool, else those directly in it."""
    try:
        candidates = [folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())]
    except OSError:  # somebody else's
        return []
    found = [each for each in candidates if any((each / name).is_file() for name in (RUN_NAME, OUTBOX_NAME))]
    return found[:1] if found[:1] == [folder] else found


def address_of(folder: Path) -> tuple[str, str]:
    """Return the run and the tracking URI of its server.

    Raises:
        ValueError: It is no spool, or damaged.
    """
    addressed = None if (folder / RUN_NAME).exists() else read_outbox(folder)
    if addressed is not None:
        return addressed.run_id, addressed.tracking_uri
    info = read_run_info(folder)
    return info.run_id, info.tracking_uri


def send_left(
    folder: Path, *, tracking_uri: str | None = None, deadline_seconds: float = math.inf, warn: Warn | None = None
) -> LeftSent:
    """Send what is left in one run's spool, its metrics within the budget that the run keeps, and then all else.

    Args:
        folder: The spool.
        tracking_uri: None for the server that it was meant for.
        deadline_seconds: Metrics that are not sent by then stay.
        warn: Told of trouble.

    Raises:
        SpoolInUseError: A process is still using it.
        ValueError: It is no spool, or damaged.
        OSError: It cannot be read.
    """
    run_id, meant_for = address_of(folder)
    uri = tracking_uri or meant_for
    warn = WarnOnce() if warn is None else warn
    replayed: ReplayResult | None = None
    if (folder / RUN_NAME).exists():
        replayed = replay(
            folder,
            restore_thinner=restore_thinner,
            tracking_uri=uri,
            deadline_seconds=deadline_seconds,
            charge_for=lambda info, door: _charge(info, door, load_progress(folder)),
            warn=warn,
        )
    if replayed is not None and not replayed.is_complete:
        return LeftSent(
            run_id=run_id,
            tracking_uri=uri,
            is_complete=False,
            stats=replayed.stats,
            has_told=False,
            reason=replayed.stats.last_error or "the server did not take it in time",
        )
    has_told, reason = _tell(folder, run_id, uri, warn)
    return LeftSent(
        run_id=run_id,
        tracking_uri=uri,
        is_complete=reason is None,
        stats=None if replayed is None else replayed.stats,
        has_told=has_told,
        reason=reason,
    )


def _tell(folder: Path, run_id: str, uri: str, warn: Warn) -> tuple[bool, str | None]:
    """Send what is not metrics; return whether there was something, and why it is still there."""
    try:
        left = read_outbox(folder)
    except ValueError as error:
        aside = (folder / OUTBOX_NAME).rename(folder / f"{OUTBOX_NAME}.damaged")
        warn(
            f"outbox {folder}",
            f"What the run {run_id} is to get beside metrics is not all sent: {error} It is kept as {aside}.",
        )
        left = None
    if (folder / RECORD_FOLDER).is_dir():  # the end of it was made only now
        kept = Outbox(has_record=True) if left is None else replace(left.outbox, has_record=True)
        left = Addressed(run_id=run_id, tracking_uri=uri if left is None else left.tracking_uri, outbox=kept)
        write_outbox(folder, left)
    if left is None:
        return False, None
    lock = FolderLock(folder)
    try:
        send_outbox(folder, left, MlflowClient(uri), warn=warn)
    except Exception as error:  # noqa: BLE001 - whatever MLflow and its stores raise
        return False, one_line(f"{type(error).__name__}: {error}")
    finally:
        lock.release()
    (folder / "lock").unlink(missing_ok=True)
    remove_outbox(folder)
    return True, None


def _charge(info: RunInfo, door: Door, progress: Progress) -> Charge:
    """Return what keeps the points within the cap that was in force when they were logged last."""
    return Charge(
        door,
        info.run_id,
        writer=info.writer,
        cap=restore_thinner(progress.thinner or info.thinner).newest.cap,
        earlier=info.charged,
        found=info.found,
    )


def _keep_tail(folder: Path, tracking_uri: str, run_id: str, tail: Tail, *, warn: Warn) -> None:
    """Make a spool of a checkpoint's tail, unless there is one."""
    if (folder / RUN_NAME).exists() or tail.is_empty:
        return
    try:
        shown = latest_moments(MlflowClient(tracking_uri).get_run(run_id))
        spool = Spool(folder, warn=warn)
        try:
            lay_down(spool, tail, run_id=run_id, tracking_uri=tracking_uri, shown=shown)
        finally:
            spool.close()
    except SpoolInUseError:
        pass  # another training on this machine, which sends it
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises; the checkpoint still has it
        warn("tail", f"Metrics of the run {run_id} that its server had not taken cannot be sent: {error}")
