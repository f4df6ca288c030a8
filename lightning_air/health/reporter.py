"""Writes the report while a run goes on and when it ends, to a folder and to the run's artifacts; delays nobody.

Two threads: one draws and writes, which takes a fraction of a second, one uploads, which may take as long as the
tracking server likes. At the end the first is waited for; the second only when the process ends, for some seconds. A
run that is killed leaves the report of ten minutes before.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_air.health.report import write_report
from lightning_air.health.scene import Scene
from lightning_air.health.threads import Background, close_all

log = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
EVERY_SECONDS = 600.0
CLOSE_SECONDS = 0.9
EXIT_SECONDS = 5.0
FILE = "gpu_health/report.html"

Upload = Callable[[str], None]
"""Puts a report where it is to be found, over an older one; may take its time, and raise anything."""


class Reporter:
    """Writes reports from `start` to `close`.

    Args:
        scene: What they show.
        folder: They are `gpu_health/report.html` in it; a path, or a URL that fsspec knows.
        uploads: Where else they go.
        first_seconds: When the first is written.
        every_seconds: The time between two others.

    Attributes:
        place: Where they are written.
        thread: On which they are.
    """

    def __init__(
        self,
        scene: Scene,
        folder: str,
        uploads: Sequence[Upload] = (),
        *,
        first_seconds: float = FIRST_SECONDS,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        self.place = f"{folder.rstrip('/')}/{FILE}"
        self._scene = scene
        self._first_seconds = first_seconds
        self._every_seconds = every_seconds
        self._has_complained = False
        self.thread = Background("air-gpu-report", self._write_until)
        self._uploader = _Uploader(uploads) if uploads else None

    def start(self) -> None:
        """Begin; returns at once."""
        self.thread.start()

    def close(self) -> None:
        """Have the last report written, and wait for it for `CLOSE_SECONDS`; it goes on being uploaded. Idempotent."""
        close_all([self.thread], CLOSE_SECONDS)

    def _write_until(self, closed: threading.Event) -> None:
        seconds = self._first_seconds
        try:
            while not closed.wait(seconds):
                self._write()
                seconds = self._every_seconds
            self._write()
        finally:
            if self._uploader is not None:
                self._uploader.finish()

    def _write(self) -> None:
        if not self._scene.has_news:
            return
        text = self._scene.render()
        if self._uploader is not None:
            self._uploader.put(text)
        try:
            put(self.place, text)
        except Exception as error:  # noqa: BLE001 (whatever a file system raises: it is only a report)
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.warning("The GPU report could not be written to %s (%s). It is tried again.", self.place, error)


def put(place: str, text: str) -> None:
    """Write a report to a path or a URL.

    Raises:
        Exception: Whatever its file system raises.
    """
    if "://" not in place:
        write_report(Path(place), text)
        return
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - a tenth of a second, for URLs only

    with fsspec.open(place, "wb") as file:
        file.write(text.encode())


class _Uploader:
    """Uploads the newest report; one that has come meanwhile replaces one that waits. Raises nothing."""

    def __init__(self, uploads: Sequence[Upload]) -> None:
        self._uploads = uploads
        self._changed = threading.Condition()
        self._waiting: str | None = None
        self._is_last = False
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def put(self, text: str) -> None:
        """Upload this one as soon as may be."""
        with self._changed:
            self._waiting = text
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="air-gpu-upload", daemon=True)
            self._thread.start()
            atexit.register(self._wait)

    def finish(self) -> None:
        """No other comes."""
        with self._changed:
            self._is_last = True
            self._changed.notify()

    def _wait(self) -> None:
        """Give it some time, as the process ends."""
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        while (text := self._next()) is not None:
            for upload in self._uploads:
                begun = time.monotonic()
                try:
                    upload(text)
                except Exception as error:  # noqa: BLE001 (whatever MLflow raises: it is only a report)
                    self._complain(error, time.monotonic() - begun)
        with suppress(RuntimeError):  # the process ends already
            atexit.unregister(self._wait)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_last)
            text, self._waiting = self._waiting, None
            return text

    def _complain(self, error: Exception, seconds: float) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.warning("The GPU report could not be uploaded (after %.0f s: %s). It is tried again.", seconds, error)
