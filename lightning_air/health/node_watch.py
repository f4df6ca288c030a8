"""All that runs on a node for its GPUs: a sampler, the driver's events, the exchange with other nodes; three threads.

Nothing here waits for NVML. `close` waits for the threads for a second, and leaves behind what hangs in the driver: a
daemon thread that does not keep the process from ending.
"""

import logging
from dataclasses import dataclass

from lightning_air.health.driver_events import DriverEvents
from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.judge import Judge
from lightning_air.health.nodes import Nodes, OpenStore
from lightning_air.health.sampler import Sampler
from lightning_air.health.threads import Background, close_all

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among the nodes.

    Attributes:
        node_rank: Of its node.
        num_nodes: How many there are.
        is_rank_zero: Whether it hears of all nodes.
        num_gpus_used: How many GPUs the ranks of the node use; 0 where they use none.
        open_store: Opens the store in which they meet; None where there is one node.
    """

    node_rank: int = 0
    num_nodes: int = 1
    is_rank_zero: bool = True
    num_gpus_used: int = 0
    open_store: OpenStore | None = None


class NodeWatch:
    """Watches the GPUs of a node, from `start` to `close`. To be had once per node.

    Args:
        place: Where this process stands.
        poll_seconds: The time between two polls.
        history: Gets what is read; kept from one watch to the next, it goes on.
        events: Get what happens; kept likewise.
        judge: Looks at what is new, on rank 0.
    """

    def __init__(
        self,
        place: Place,
        *,
        poll_seconds: float,
        history: History,
        events: EventLog,
        judge: Judge | None = None,
    ) -> None:
        self.history = history
        self.events = events
        self.sampler = Sampler(
            events=events,
            history=history,
            node_rank=place.node_rank,
            poll_seconds=poll_seconds,
            num_used=place.num_gpus_used,
        )
        self.nodes = Nodes(
            sampler=self.sampler,
            events=events,
            history=history,
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            reads_all=place.is_rank_zero,
            poll_seconds=poll_seconds,
            open_store=place.open_store,
            take_news=judge.take if judge is not None and place.is_rank_zero else None,
        )
        self._threads = (
            Background("air-gpu-sampler", self.sampler.run),
            Background("air-gpu-events", DriverEvents(events).run),
            Background("air-gpu-nodes", self.nodes.run),
        )

    def start(self) -> None:
        """Begin; returns at once."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End, within `CLOSE_SECONDS`. Idempotent."""
        hanging = close_all(self._threads, CLOSE_SECONDS)
        if hanging:
            log.warning("Left behind, since the GPU driver or the network does not answer: %s.", ", ".join(hanging))

    def metrics(self) -> dict[str, float]:
        """Return what is logged now: of all nodes on rank 0, elsewhere of this one."""
        return self.nodes.metrics()
