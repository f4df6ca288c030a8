"""All that shows a run's GPUs to people, on rank 0: the report, the page, the table; chosen by two options."""

import logging
from typing import Literal

from lightning_air._lightning import MLFlowLogger, Trainer
from lightning_air.health.page import PageServer
from lightning_air.health.reporter import FILE, Reporter, Upload
from lightning_air.health.scene import Scene
from lightning_air.health.table import LiveTable, table_unavailable
from lightning_air.health.threads import close_all

log = logging.getLogger(__name__)

CLOSE_SECONDS = 0.9

Live = Literal[False, "table", "page"]
_LIVE = (False, "table", "page")


def checked_live(live: object) -> Live:
    """Return the option.

    Raises:
        ValueError: It is none of False, "table" and "page".
    """
    for known in _LIVE:
        if live is known or (isinstance(live, str) and live == known):
            return known  # type: ignore[return-value]
    raise ValueError(f"live must be False, 'table' or 'page', got {live!r}.")


class Showing:
    """Shows a run from `begin` to `close`; for rank 0.

    Args:
        scene: What is shown.
        trainer: Tells where files go.
        report: Whether the report is written.
        live: What is shown meanwhile.
    """

    def __init__(self, scene: Scene, trainer: Trainer, *, report: bool, live: Live) -> None:
        parts: list[Reporter | PageServer | LiveTable] = []
        if report:
            parts.append(Reporter(scene, folder_of(trainer), uploads_of(trainer)))
        if live == "page":
            parts.append(PageServer(scene))
        if live == "table":
            if reason := table_unavailable():
                log.warning("There is no live table of the GPUs: %s", reason)
            else:
                parts.append(LiveTable(scene))
        self._parts = tuple(parts)

    @staticmethod
    def begin(scene: Scene, trainer: Trainer, *, report: bool, live: Live) -> "Showing | None":
        """Return one that has started; None if that is impossible, which is said. Raises nothing, waits for nothing."""
        try:
            showing = Showing(scene, trainer, report=report, live=live)
            for part in showing._parts:
                part.start()
        except Exception:  # such as a logger that raises: the GPUs are watched all the same
            log.exception("The GPUs are watched, but not shown.")
            return None
        return showing

    def close(self) -> None:
        """End all of it together, within `CLOSE_SECONDS`. Idempotent."""
        close_all([part.thread for part in self._parts], CLOSE_SECONDS)


def folder_of(trainer: Trainer) -> str:
    """Return where this run's files go: `log_dir` of a logger that has one, else `default_root_dir`.

    `Trainer.log_dir` would be a collective.
    """
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, str) and folder:
            return folder
    return str(trainer.default_root_dir)


def uploads_of(trainer: Trainer) -> list[Upload]:
    """Return what puts a report among the artifacts of the runs that the Trainer logs to with MLflow."""
    return [_upload_to(logger) for logger in trainer.loggers if isinstance(logger, MLFlowLogger)]


def _upload_to(logger: MLFlowLogger) -> Upload:
    def upload(text: str) -> None:
        logger.experiment.log_text(logger.run_id, text, FILE)

    return upload
