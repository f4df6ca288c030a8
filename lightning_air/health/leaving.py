"""The files that outlive a run: where they lie, and why an attempt was aborted, which the next one says at its start.

On a platform whose retries begin on fresh machines the folder has to lie on a volume for that.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_air.runtime import staging_area

log = logging.getLogger(__name__)

ABORT_EXIT_CODE = 75
"""The exit status of a process that `abort` has ended: EX_TEMPFAIL, "try again"."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """Why a process was aborted.

    Attributes:
        reason: In sentences.
        time_seconds: When, in seconds since the epoch.
        global_rank: Which rank it was.
        node_rank: Its node.
    """

    reason: str
    time_seconds: float
    global_rank: int
    node_rank: int


def choose_folder(folder: str | None, default_root_dir: str) -> Path:
    """Return where files of GPU health go: the folder that was named, or `gpu_health` under the Trainer's.

    A Trainer whose folder is a URL writes to it by other means than files; these go to the system's temporary folder.
    """
    if folder is not None:
        return Path(folder).expanduser().absolute()
    root = default_root_dir.removeprefix("dbfs:") if default_root_dir.startswith("dbfs:/Volumes/") else default_root_dir
    if "://" in root or root.startswith("dbfs:"):
        return staging_area().path / "gpu_health"
    return Path(root).absolute() / "gpu_health"


def leave_marker(folder: Path, marker: Marker) -> None:
    """Write a marker. Raises nothing: who aborts has no time for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _name(marker.node_rank, marker.global_rank)).write_text(json.dumps(asdict(marker), indent=1) + "\n")
    except OSError as error:
        log.warning("Why this process ends could not be written to %s: %s", folder, error)


def take_markers(folder: Path, node_rank: int, num_nodes: int) -> list[Marker]:
    """Return the markers of a node's processes, and remove them. Raises nothing.

    Called on each node: the folder may be its own. Node 0 also takes those of nodes that there are no more.
    """
    markers = []
    for path in sorted(folder.glob("aborted-node-*-rank-*.json")):
        try:
            node = int(path.name.split("-")[2])
            if node != node_rank and not (node_rank == 0 and node >= num_nodes):
                continue
            markers.append(Marker(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s does not say why an attempt was aborted: %s", path, error)
        with suppress(OSError):
            path.unlink()
    return markers


def describe_markers(markers: list[Marker]) -> str:
    """Return why the attempt before was aborted, in a sentence or two."""
    ranks = ", ".join(str(marker.global_rank) for marker in markers)
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(marker.time_seconds for marker in markers)))
    return (
        f"The attempt before was aborted at {at} (rank{'s' if len(markers) > 1 else ''} {ranks}): {markers[0].reason}"
    )


def end_process(code: int, exit_process: Callable[[int], object] = os._exit) -> None:
    """End this process at once, whatever its threads hang in; what was printed is kept."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # such as a notebook's stream that is closed
            stream.flush()
    exit_process(code)


def _name(node_rank: int, global_rank: int) -> str:
    return f"aborted-node-{node_rank}-rank-{global_rank}.json"
