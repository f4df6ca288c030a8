"""Sends files and tags to the runs of the Trainer's loggers: in the background, as far as they take any.

A logger that has an MLflow client as its `experiment`, and a `run_id`, takes both. Others keep none.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

ARTIFACT_FOLDER = "gpu_health"
SEND_SECONDS = 30.0


class Sender:
    """Sends to loggers. On rank 0; any thread may call it, and none is waited for.

    Args:
        loggers: Of the Trainer.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)
        self._threads: list[threading.Thread] = []

    def send_files(self, paths: Sequence[Path], folder: str) -> None:
        """Begin to upload files into a folder of the run's artifacts."""
        place = f"{ARTIFACT_FOLDER}/{folder}" if folder else ARTIFACT_FOLDER

        def send(client: Any, run_id: str) -> None:
            for path in paths:
                client.log_artifact(run_id, str(path), place)

        self._begin("files", send)

    def send_tag(self, name: str, value: str) -> None:
        """Begin to set a tag of the run."""
        self._begin("a tag", lambda client, run_id: client.set_tag(run_id, name, value))

    def wait(self, seconds: float = SEND_SECONDS) -> None:
        """Wait for what was begun, but not longer."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(seconds)

    def _begin(self, what: str, send: Callable[[Any, str], None]) -> None:
        if not self._loggers:
            return
        thread = threading.Thread(target=self._send, args=(what, send), name="air-gpu-send", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _send(self, what: str, send: Callable[[Any, str], None]) -> None:
        for logger in self._loggers:
            try:
                client, run_id = getattr(logger, "experiment", None), getattr(logger, "run_id", None)
                if run_id is not None and hasattr(client, "log_artifact"):
                    send(client, run_id)
            except Exception as error:  # noqa: BLE001 - whatever it is, the files lie in the folder
                log.warning("GPU health could not send %s to %s: %r", what, type(logger).__name__, error)
