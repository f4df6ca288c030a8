"""Names the nodes that should be left out from now on, for whoever chooses the nodes of the next attempt."""

import json
import logging
import time
from pathlib import Path

from lightning_air.health.incidents import Incident
from lightning_air.health.sending import Sender

log = logging.getLogger(__name__)

FILE_NAME = "excluded_nodes.json"
TAG = "lightning_air.excluded_nodes"


class ExcludedNodes:
    """The nodes of a run that rules with `excludes_node` have found. On rank 0, for one thread.

    Args:
        folder: Gets `excluded_nodes.json`: a list with the node's rank, the GPU's UUID, the rule, the message and the
            time of each incident. It is written anew for each, by a run that has one.
        sender: Sets the tag `lightning_air.excluded_nodes` of the run, such as "1: GPU-…; 3: GPU-…".
    """

    def __init__(self, folder: Path, sender: Sender) -> None:
        self._folder = folder
        self._sender = sender
        self._found: list[dict[str, object]] = []

    def add(self, incident: Incident, message: str) -> None:
        """Add the node of an incident. Raises nothing."""
        gpu = incident.gpu
        self._found.append(
            {
                "node_rank": gpu.node_rank,
                "gpu_uuid": gpu.uuid,
                "rule": incident.rule.name,
                "message": message,
                "time_seconds": time.time(),
            }
        )
        gpus: dict[int, dict[str, None]] = {}
        for each in self._found:
            gpus.setdefault(int(str(each["node_rank"])), {})[str(each["gpu_uuid"])] = None
        path = self._folder / FILE_NAME
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._found, indent=1) + "\n")
            self._sender.send_files([path], "")
        except OSError as error:
            log.warning("%s could not be written: %s", path, error)
        self._sender.send_tag(TAG, "; ".join(f"{node}: {', '.join(uuids)}" for node, uuids in sorted(gpus.items())))
