"""Keep a node's output with the run: `logs/node_<i>/…`, updated while it runs.

One process per node, its local rank 0, copies what it writes, and uploads it now and then.
"""

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient

from lightning_air.runtime import staging_area
from lightning_air.tracking.console import ConsoleCapture
from lightning_air.tracking.warn_once import Warn

_UPLOAD_SECONDS = 60.0


class NodeOutput:
    """The output of this process, on its way into a run, while a stage of training runs. Training thread.

    What a later stage says comes behind it, so the copy is kept until this is gone, or the process ends.

    Args:
        make_client: Makes a client of the server.
        run_id: MLflow's.
        folder: Of this node and attempt, in the run's artifacts.
        warn: Told of trouble, once.
        upload_seconds: From one upload to the next.

    Attributes:
        folder: In the run's artifacts.
    """

    def __init__(
        self,
        make_client: Callable[[], MlflowClient],
        run_id: str,
        folder: str,
        *,
        warn: Warn,
        upload_seconds: float = _UPLOAD_SECONDS,
    ) -> None:
        self._make_client = make_client
        self._run_id = run_id
        self.folder = folder
        self._warn = warn
        self._upload_seconds = upload_seconds
        area = staging_area().path
        area.mkdir(parents=True, exist_ok=True)
        self._local = Path(tempfile.mkdtemp(prefix="lightning_air_console-", dir=area))
        self._capture = ConsoleCapture(self._local / "live", warn=warn)
        self._sent: dict[str, bytes] = {}
        self._is_sent = True
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _remove, self._local, os.getpid())

    def start(self) -> None:
        """Begin, or go on in a later stage. Idempotent."""
        if self._thread is None:
            self._capture.start()
            self._is_over = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._is_over,), name="lightning-air-output", daemon=True
            )
            self._thread.start()

    def close(self, deadline_seconds: float) -> bool:
        """Stop, and upload the end of it within the deadline; return whether all has arrived. Idempotent."""
        self._capture.stop()
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(deadline_seconds)
            self._is_sent = self._is_sent and not thread.is_alive()
        return self._is_sent

    def copy_into(self, folder: Path) -> list[Path]:
        """Copy what was printed so far into a folder, a file per stream that something was written to.

        Returns:
            The copies.

        Raises:
            OSError: It cannot be written.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [path for path in self._capture.copy_into(folder) if path.stat().st_size]

    def _run(self, is_over: threading.Event) -> None:
        client: MlflowClient | None = None
        is_last = False
        while not is_last:
            is_last = is_over.wait(self._upload_seconds)
            try:
                client = client or self._make_client()
                self._upload(client)
                self._is_sent = True
            except Exception as error:  # noqa: BLE001 - training must not end because its output is not kept
                self._is_sent = False
                self._warn("output", f"The output of this node cannot be uploaded to {self.folder!r}: {error}")

    def _upload(self, client: MlflowClient) -> None:
        with tempfile.TemporaryDirectory(dir=self._local) as scratch:
            for path in self._capture.copy_into(Path(scratch)):
                content = path.read_bytes()
                if content and self._sent.get(path.name) != content:
                    client.log_artifact(self._run_id, str(path), self.folder)
                    self._sent[path.name] = content


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not a forked process that ends
        shutil.rmtree(folder, ignore_errors=True)
