"""What torch's flight recorder tells of the collectives of this process: which it has begun, and which have not ended.

torch keeps the last ones by itself: for gloo always, for NCCL if TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE
before 2.9) is above 0. Where it keeps none, nothing is told.
"""

import json
import logging
from typing import Any, NamedTuple

import torch

log = logging.getLogger(__name__)

# Private: a process can ask for its own record by no other way. Of gloo, and of NCCL, in its own builds.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


class Collective(NamedTuple):
    """A collective that a rank has begun.

    Attributes:
        name: Such as "gloo:all_reduce".
        number: Its place in the order of its group, the same on all ranks.
        group: Of its group, such as "default_pg".
    """

    name: str
    number: int
    group: str

    def __str__(self) -> str:
        return f"{self.name} (number {self.number} of {self.group})"


def recorded_collectives() -> list[dict[str, Any]]:
    """Return what the recorders hold, oldest first, as torch writes it. Raises nothing."""
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        try:
            dump = getattr(torch._C._distributed_c10d, name, None)  # noqa: SLF001
            entries += json.loads(dump())["entries"] if dump is not None else []
        except Exception as error:  # noqa: BLE001 - private, and what comes may be anything; stacks tell enough
            log.debug("torch's flight recorder tells nothing: %r", error)
    return entries


def pending(entries: list[dict[str, Any]]) -> list[Collective]:
    """Return the collectives that were begun and have not ended, oldest first."""
    return [
        Collective(
            str(entry.get("profiling_name", "a collective")),
            int(entry.get("collective_seq_id", 0)),
            str((entry.get("process_group") or ["", "its group"])[-1] or "its group"),
        )
        for entry in entries
        if not entry.get("retired", True) and not entry.get("time_discovered_completed_ns")
    ]
