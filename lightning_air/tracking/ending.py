"""Tell the server how a run has ended, within a deadline."""

import time
from pathlib import Path

from mlflow import MlflowClient

from lightning_air.tracking.attempts import LAUNCH_ID
from lightning_air.tracking.background import Background
from lightning_air.tracking.outbox import Addressed, Ending, Outbox, write_outbox
from lightning_air.tracking.warn_once import Warn


def ending_now(status: str, launch_id: str = LAUNCH_ID) -> Ending:
    """Return an end that comes now, of what this process has begun."""
    return Ending(status=status, time_ms=int(time.time() * 1000), launch_id=launch_id)


def tell_end(
    client: MlflowClient, run_id: str, ending: Ending, *, deadline_seconds: float, warn: Warn
) -> tuple[bool, bool]:
    """Tell the server how a run has ended.

    Returns:
        Whether it need not be told again, and whether that is because it refuses.
    """
    background = Background("lightning-air-end", warn=warn)  # of its own: uploads may take long
    background.submit(
        "the run's end",
        lambda: client.set_terminated(run_id, ending.status, end_time=ending.time_ms),
        note=lambda: Outbox(ending=ending),
    )
    return background.close(deadline_seconds), background.num_dropped > 0


def end_reserved(
    client: MlflowClient, run_id: str, status: str, *, uri: str, folder: Path, deadline_seconds: float, warn: Warn
) -> None:
    """End a run that nothing was logged into; if the server is away, leave that to whoever sends what is in the folder.

    Args:
        client: Of the tracking server.
        run_id: MLflow's.
        status: MLflow's.
        uri: Of the server.
        folder: The run's spool.
        deadline_seconds: How long to try.
        warn: Told of trouble.
    """
    ending = ending_now(status)
    is_told, _ = tell_end(client, run_id, ending, deadline_seconds=deadline_seconds, warn=warn)
    if is_told:
        return
    try:
        write_outbox(folder, Addressed(run_id=run_id, tracking_uri=uri, outbox=Outbox(ending=ending)))
    except OSError as error:
        warn("end", f"The run {run_id} stays RUNNING: its server does not answer, and {folder}: {error}")
