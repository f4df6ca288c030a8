"""`lightning-air gpus --report FILE`: watches the GPUs of this machine for some time, and writes the report."""

import logging
import math
import re
import sys
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path

from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.node_watch import NodeWatch, Place
from lightning_air.health.report import write_report
from lightning_air.health.scene import Scene

_LOOK_SECONDS = 0.1


def report_gpus(
    path: Path,
    *,
    seconds: float,
    interval: float,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str | None:
    """Write the report, over an older one, and say so; Ctrl-C ends the watching sooner.

    Args:
        path: Of the report.
        seconds: How long the GPUs are watched.
        interval: The time between two readings, in seconds.
        pause: Waits so many seconds.
        clock: Seconds.

    Returns:
        None, or why there is no report.
    """
    if not path.parent.is_dir() or path.is_dir():
        return f"{path} cannot be written: {path.parent if not path.is_dir() else path} is no folder with room for it."
    events, history = EventLog(), History(max(1, math.ceil(seconds / interval) + 1), interval)
    node = NodeWatch(Place(), poll_seconds=interval, history=history, events=events)
    health_log = logging.getLogger("lightning_air.health")
    level = health_log.level
    health_log.setLevel(logging.CRITICAL)  # events are in the report
    sys.stderr.write(f"Watching the GPUs for {seconds:g} s; Ctrl-C ends it sooner.\n")
    node.start()
    try:
        _wait(node, seconds, pause, clock)
    except KeyboardInterrupt:
        pass
    finally:
        node.close()
        health_log.setLevel(level)
    if node.sampler.is_absent:
        return events.all[-1].message
    if not history.window().values:
        return "No GPU was read: " + (
            events.all[-1].message if events.all else "the driver does not answer, or has none."
        )
    text = Scene(history, events).render()
    try:
        write_report(path, text)
    except OSError as error:
        return f"{path} cannot be written: {error}."
    (headline,) = re.findall("<h1>(.*?)</h1>", text)
    sys.stdout.write(f"{unescape(headline)} See {path}\n")
    return None


def _wait(node: NodeWatch, seconds: float, pause: Callable[[float], None], clock: Callable[[], float]) -> None:
    end = clock() + seconds
    while (left := end - clock()) > 0 and not node.sampler.is_absent:
        pause(min(left, _LOOK_SECONDS))
