"""Send what earlier attempts have left: in the spool's folder on this machine, and in the checkpoint resumed from."""

import math
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient

from lightning_air.tracking.attempts import latest_moments
from lightning_air.tracking.charging import Charge
from lightning_air.tracking.door import Door
from lightning_air.tracking.folder_lock import SpoolInUseError
from lightning_air.tracking.full_record import send_record
from lightning_air.tracking.progress import Progress, load_progress
from lightning_air.tracking.replaying import ReplayResult, replay
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RUN_NAME, RunInfo, read_run_info
from lightning_air.tracking.tails import Tail, lay_down
from lightning_air.tracking.tracker import restore_thinner
from lightning_air.tracking.warn_once import Warn, WarnOnce

# Of one run; a server that is away then is away for this attempt's own points too.
_DEADLINE_SECONDS = 600.0


def send_leftovers(
    spool_dir: Path,
    tracking_uri: str,
    *,
    but: str,
    tail: tuple[str, Tail] | None,
    warn: Warn,
    say: Callable[[str], object],
) -> None:
    """Send the records of other runs that have a spool here. On the background thread.

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
            if read_run_info(folder).tracking_uri != tracking_uri:
                continue
            num_sent = load_progress(folder).num_sent
            result = send_left(folder, deadline_seconds=_DEADLINE_SECONDS, warn=warn)
        except SpoolInUseError:
            continue  # another training on this machine
        except (ValueError, OSError) as error:
            warn(f"leftovers {folder}", f"Metrics in {folder}, left by an earlier attempt, are not sent: {error}")
            continue
        if result.is_complete and result.stats.num_sent == num_sent:
            continue  # the server had it all
        if result.is_complete:
            say(f"Metrics that an earlier attempt had not sent have reached the run {result.run_id} now.")
        else:
            warn(
                f"leftovers {folder}",
                f"Metrics in {folder}, left by an earlier attempt, have not all reached the run {result.run_id}: "
                f"{result.stats.last_error}. They stay there for the next attempt, or for `lightning-air replay`.",
            )


def spools_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's spool, else those directly in it."""
    candidates = [folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())]
    found = [each for each in candidates if (each / RUN_NAME).is_file()]
    return found[:1] if found[:1] == [folder] else found


def send_left(
    folder: Path, *, tracking_uri: str | None = None, deadline_seconds: float = math.inf, warn: Warn | None = None
) -> ReplayResult:
    """Send what is left in one run's spool, within the budget that the run keeps.

    Args:
        folder: The spool.
        tracking_uri: None for the server that the records were meant for.
        deadline_seconds: What is not sent by then stays.
        warn: Told of trouble.

    Raises:
        SpoolInUseError: A process is still using it.
        ValueError: It is no spool.
        OSError: It cannot be read.
    """
    info = read_run_info(folder)
    uri = tracking_uri or info.tracking_uri
    result = replay(
        folder,
        restore_thinner=restore_thinner,
        tracking_uri=uri,
        deadline_seconds=deadline_seconds,
        charge_for=lambda info, door: _charge(info, door, load_progress(folder)),
        warn=warn,
    )
    try:
        send_record(MlflowClient(uri), info.run_id, folder)
    except Exception as error:  # noqa: BLE001 - whatever MLflow and its stores raise
        (warn or WarnOnce())("full record", f"The full record of metrics stays in {folder}: {error}")
    return result


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
