"""A background thread that is told to end, waited for a little, and else left behind: it may be stuck in a driver."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


class Background:
    """A named daemon thread.

    Args:
        name: Of the thread.
        body: Runs on it; told an event that is set when it has to end. What it raises is logged, and ends it.
    """

    def __init__(self, name: str, body: Callable[[threading.Event], None]) -> None:
        self._body = body
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """Of the thread."""
        return self._thread.name

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join_until(self, deadline: float) -> None:
        """Wait for the end, until a time of `time.monotonic`."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._body(self.closed)
        except Exception:  # an observer's defect must not end what it observes
            log.exception("The thread %s has failed; GPU health knows less from now on.", self._thread.name)


def done_within(seconds: float, body: Callable[[], object]) -> bool:
    """Do something on a thread of its own, and return whether it has ended in that time; else it is left behind.

    For files: a file system whose server is gone blocks for ever whoever touches it.
    """

    def run(closed: threading.Event) -> None:
        del closed  # nothing ends it
        body()

    thread = Background("air-health-files", run)
    thread.start()
    thread.join_until(time.monotonic() + seconds)
    return not thread.is_running


def close_all(threads: Sequence[Background], seconds: float) -> list[str]:
    """Tell threads to end, wait so long for all of them together, and return the names of those that have not ended."""
    for thread in threads:
        thread.closed.set()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join_until(deadline)
    return [thread.name for thread in threads if thread.is_running]
