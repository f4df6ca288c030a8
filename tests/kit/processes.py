"""Look at processes from outside: which ones descend from another, and whether one has ended."""

import time
from pathlib import Path

_POLL_SECONDS = 0.01


def descendants(ancestor: int) -> dict[int, str]:
    """Return the processes below this one, zombies included, with their names; none where /proc is missing."""
    found: dict[int, str] = {}
    pending = [ancestor]
    while pending:
        for path in Path("/proc", str(pending.pop()), "task").glob("*/children"):
            children = [int(pid) for pid in _read_if_alive(path).split()]
            found.update({pid: _read_if_alive(Path("/proc", str(pid), "comm")).strip() for pid in children})
            pending += children
    return found


def assert_ends(pid: int, timeout_seconds: float = 30.0) -> None:
    """Wait until the process, not necessarily a child of ours, has ended; a zombie has.

    Raises:
        AssertionError: If it still runs after the timeout.
    """
    deadline_seconds = time.monotonic() + timeout_seconds
    while _read_if_alive(Path("/proc", str(pid), "stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"]):
        assert time.monotonic() < deadline_seconds, f"process {pid} still runs after {timeout_seconds:g} s"
        time.sleep(_POLL_SECONDS)


def _read_if_alive(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
