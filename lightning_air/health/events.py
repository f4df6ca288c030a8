"""What happened to the GPUs of a run, in the order in which it became known; bounded, and said in the log.

What is about all machines alike (no driver, a value that this model does not tell) is said by each node in its own log
only: rank 0 would repeat it for every node. What happens again and again is said a few times, and kept.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

MAX_EVENTS = 1000
MAX_XIDS = 16
# A broken GPU may tell the same error a thousand times a second.
_MAX_SAID = 5
_SAID_BY_OWN_NODE_ONLY = frozenset({"nvml_absent", "not_read"})


@dataclass(frozen=True, kw_only=True)
class HealthEvent:
    """Something that happened.

    Attributes:
        kind: "xid", "double_bit_ecc", "gpu_lost", "gpu_back", "nvml_absent", "nvml_lost", "nvml_back", "nvml_silent",
            "not_read", "node_stale", "node_back", "store_lost", …; the name of a rule that a GPU has broken, and with
            "_over" behind it when that is over.
        message: What, where and what to do, in a sentence.
        time_seconds: When, in seconds since the epoch, by the clock of the node where it happened.
        node_rank: The node.
        uuid: The GPU; None where it concerns all of them, or none.
        value: The XID, for "xid"; what a rule has looked at.
    """

    kind: str
    message: str
    time_seconds: float
    node_rank: int
    uuid: str | None = None
    value: float | None = None


class EventLog:
    """The last `MAX_EVENTS` events of all nodes that this process knows of. Any thread may use it.

    Args:
        node_rank: Of this process.
        clock: Seconds since the epoch.
    """

    def __init__(self, node_rank: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._node_rank = node_rank
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[HealthEvent] = deque(maxlen=MAX_EVENTS)
        self._own: deque[HealthEvent] = deque(maxlen=MAX_EVENTS)
        self._num_said: Counter[tuple[object, ...]] = Counter()
        self._num_events = 0
        self._num_own = 0
        self._num_xids = 0

    def add(
        self,
        kind: str,
        message: str,
        *,
        uuid: str | None = None,
        value: float | None = None,
        node_rank: int | None = None,
        level: int = logging.WARNING,
    ) -> None:
        """Add an event that was seen here, and log its message.

        Args:
            kind: Of the event.
            message: Of the event.
            uuid: The GPU.
            value: Of the event.
            node_rank: Where it happened; default: on this node.
            level: Of `logging`.
        """
        event = HealthEvent(
            kind=kind,
            message=message,
            time_seconds=self._clock(),
            node_rank=self._node_rank if node_rank is None else node_rank,
            uuid=uuid,
            value=value,
        )
        with self._lock:
            self._own.append(event)
            self._append(event)
            self._num_own += 1
            self._num_xids += kind == "xid"
        self._log(event, message, level)

    def add_from(self, event: HealthEvent) -> None:
        """Add an event of another node, and log it with the node's number."""
        with self._lock:
            self._append(event)
        if event.kind not in _SAID_BY_OWN_NODE_ONLY:
            self._log(event, f"Node {event.node_rank}: {event.message}")

    def own_since(self, number: int) -> tuple[int, list[HealthEvent]]:
        """Return how many events this node has had, and those after the first `number`, if they are still kept."""
        with self._lock:
            num_new = min(self._num_own - number, len(self._own))
            return self._num_own, list(self._own)[len(self._own) - num_new :]

    def since(self, number: int) -> tuple[int, list[HealthEvent]]:
        """Return how many events there have been, and those after the first `number`, if they are still kept."""
        with self._lock:
            num_new = min(self._num_events - number, len(self._events))
            return self._num_events, list(self._events)[len(self._events) - num_new :]

    @property
    def num_xids(self) -> int:
        """How many XIDs the driver of this node has told."""
        return self._num_xids

    def xids_of(self, uuid: str) -> tuple[int, ...]:
        """Return the last XIDs of a GPU of this node, oldest first."""
        with self._lock:
            xids = [int(event.value or 0) for event in self._own if event.kind == "xid" and event.uuid == uuid]
        return tuple(xids[-MAX_XIDS:])

    @property
    def all(self) -> list[HealthEvent]:
        """The events, oldest first."""
        with self._lock:
            return list(self._events)

    def _append(self, event: HealthEvent) -> None:
        self._events.append(event)
        self._num_events += 1

    def _log(self, event: HealthEvent, message: str, level: int = logging.WARNING) -> None:
        alike = (event.kind, event.node_rank, event.uuid, event.value if event.kind == "xid" else None)
        with self._lock:
            self._num_said[alike] += 1
            number = self._num_said[alike]
        if number <= _MAX_SAID:
            log.log(level, "%s%s", message, " (Not said again; it is still counted.)" if number == _MAX_SAID else "")
