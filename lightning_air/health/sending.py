"""Sends files and tags to the runs of the Trainer's loggers: in the background, as far as they take any.

A logger that has an MLflow client as its `experiment`, and a `run_id`, takes both. Others keep none. Asking a logger
for its run may open it, which is for the thread that trains: so that asks once, and what comes before waits for it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

ARTIFACT_FOLDER = "gpu_health"
SEND_SECONDS = 30.0
MAX_TAG_CHARACTERS = 5000

_Send = Callable[[Any, str], None]


class Sender:
    """Sends to loggers. On rank 0; any thread may send, and none is waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[tuple[Any, str]] | None = None
        self._early: list[_Send] = []
        self._threads: list[threading.Thread] = []

    def meet(self, loggers: Sequence[Any]) -> None:
        """Learn which runs there are. On the thread that trains, once training begins; later calls do nothing."""
        if self._runs is not None:
            return
        runs = []
        for logger in loggers:
            try:
                client, run_id = getattr(logger, "experiment", None), getattr(logger, "run_id", None)
                if isinstance(run_id, str) and hasattr(client, "log_artifact"):
                    runs.append((client, run_id))
            except Exception as error:  # noqa: BLE001 - a logger's trouble is its own
                log.debug("%s has no run: %r", type(logger).__name__, error)
        with self._lock:
            self._runs, early, self._early = runs, self._early, []
        for send in early:
            self._begin(send)

    def send_files(self, paths: Sequence[Path], folder: str) -> None:
        """Begin to upload files into a folder of the run's artifacts."""
        place = f"{ARTIFACT_FOLDER}/{folder}" if folder else ARTIFACT_FOLDER

        def send(client: Any, run_id: str) -> None:
            for path in paths:
                client.log_artifact(run_id, str(path), place)

        self._begin(send)

    def send_tag(self, name: str, value: str) -> None:
        """Begin to set a tag of the run; what is too long for one is cut."""
        self._begin(lambda client, run_id: client.set_tag(run_id, name, value[:MAX_TAG_CHARACTERS]))

    def wait(self, seconds: float = SEND_SECONDS) -> None:
        """Wait for what was begun, but not longer."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(seconds / len(threads))

    def _begin(self, send: _Send) -> None:
        with self._lock:
            if self._runs is None:
                self._early.append(send)
                return
            if not self._runs:
                return
            thread = threading.Thread(target=self._send, args=(self._runs, send), name="air-gpu-send", daemon=True)
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _send(self, runs: Sequence[tuple[Any, str]], send: _Send) -> None:
        for client, run_id in runs:
            try:
                send(client, run_id)
            except Exception as error:  # noqa: BLE001 - whatever it is, the files lie in the folder
                log.warning("GPU health could not send to the run %s: %r", run_id, error)
