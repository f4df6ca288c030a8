"""All that GPUHealth runs on one rank for one run of a Trainer, from `start` to `close`; nothing of it needs Lightning.

The first rank of a node watches its GPUs, and rank 0 judges those of all nodes. Every rank watches its own loop.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_air.health.aborting import Aborting
from lightning_air.health.events import EventLog
from lightning_air.health.excluding import ExcludedNodes
from lightning_air.health.hang_watch import FILE_SECONDS, HangWatch, RankPlace
from lightning_air.health.hangs import HangRule
from lightning_air.health.history import History
from lightning_air.health.incidents import Incident
from lightning_air.health.judge import Judge
from lightning_air.health.leaving import (
    ABORT_EXIT_CODE,
    Marker,
    describe_markers,
    end_process,
    leave_marker,
    take_markers,
)
from lightning_air.health.node_watch import CLOSE_SECONDS, NodeWatch, Place
from lightning_air.health.nodes import OpenStore
from lightning_air.health.progress import Progress
from lightning_air.health.rank_watch import RankWatch
from lightning_air.health.rules import Rule
from lightning_air.health.sending import Sender
from lightning_air.health.stop_agreement import StopAgreement
from lightning_air.health.threads import Background, close_all, done_within

log = logging.getLogger(__name__)

MAX_CHECK_SECONDS = 5.0
ABORTED_TAG = "lightning_air.aborted_before"


@dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """What the user has chosen.

    Attributes:
        poll_seconds: The time between two readings.
        rules: What is an incident.
        hang: When a loop hangs; None is never.
        folder: Where files go.
    """

    poll_seconds: float
    rules: Sequence[Rule]
    hang: HangRule | None
    folder: Path

    @property
    def check_seconds(self) -> float:
        """The time between two looks of a rank after itself."""
        hang_seconds = self.hang.min_seconds / 10 if self.hang is not None else MAX_CHECK_SECONDS
        return min(MAX_CHECK_SECONDS, self.poll_seconds, hang_seconds)

    @property
    def watches_ranks(self) -> bool:
        """Whether every rank needs a thread: to be found hanging, or to take orders."""
        return self.hang is not None or any(rule.action in ("checkpoint_stop", "abort") for rule in self.rules)


class HealthRun:
    """The threads of one rank, from `start` to `close`.

    Args:
        place: Of its node.
        rank: Of itself.
        options: What the user has chosen.
        history: Gets the readings; on the first rank of a node.
        events: Get what happens; likewise. None elsewhere.
        open_rank_store: Opens the store in which all ranks meet; None where they cannot.
    """

    def __init__(
        self,
        place: Place,
        rank: RankPlace,
        options: HealthOptions,
        *,
        history: History | None,
        events: EventLog | None,
        open_rank_store: OpenStore | None,
    ) -> None:
        self.progress = Progress()
        self.stop = StopAgreement(rank.global_rank, rank.world_size, lambda: self.progress.mark.num_batches)
        self._place = place
        self._rank = rank
        self._options = options
        self._events = events
        self._sender = Sender()
        self._excluded = ExcludedNodes(options.folder, self._sender)
        check_seconds = options.check_seconds
        self._aborting = Aborting(rank.global_rank, rank.world_size, self._leave, check_seconds=check_seconds)
        hangs = HangWatch(
            rank,
            self.progress,
            options.hang,
            options.folder,
            tell=self._tell,
            sender=self._sender,
            leave=self._leave,
            check_seconds=check_seconds,
        )
        watch = RankWatch([self._aborting, self.stop, hangs], open_store=open_rank_store, check_seconds=check_seconds)
        self._rank_threads = [Background("air-health-rank", watch.run)] if options.watches_ranks else []
        self._node_watch: NodeWatch | None = None
        if history is not None and events is not None:
            judge = Judge(
                options.rules,
                poll_seconds=options.poll_seconds,
                events=events,
                act=self._act,
                seconds_without_step=lambda: self.progress.seconds_since,
            )
            self._node_watch = NodeWatch(
                place, poll_seconds=options.poll_seconds, history=history, events=events, judge=judge
            )

    def start(self) -> None:
        """Begin; say first why the attempt before was aborted, if it was. Waits for nothing but a few small files."""
        if self._events is not None:
            markers = take_markers(self._options.folder, self._place.node_rank, self._place.num_nodes)
            if markers:
                message = describe_markers(markers)
                self._events.add("aborted_before", message)
                self._sender.send_tag(ABORTED_TAG, message)
        for thread in self._rank_threads:
            thread.start()
        if self._node_watch is not None:
            self._node_watch.start()

    def meet(self, loggers: Sequence[Any]) -> None:
        """Learn to which runs files and tags go; on the thread that trains, once training begins. May be repeated."""
        self._sender.meet(loggers if self._place.is_rank_zero else ())

    def close(self) -> None:
        """End, within one and a half `CLOSE_SECONDS`. Idempotent."""
        for thread in close_all(self._rank_threads, CLOSE_SECONDS / 2):
            log.warning("Left behind, since the network or a file system does not answer: %s.", thread)
        self._rank_threads = []
        if self._node_watch is not None:
            self._node_watch.close()

    def metrics(self) -> dict[str, float]:
        """Return what is logged now: of all nodes on rank 0, elsewhere of this one."""
        return self._node_watch.metrics() if self._node_watch is not None else {}

    def _act(self, incident: Incident, message: str) -> None:
        """On rank 0: do what a rule asks for."""
        if incident.rule.excludes_node:
            self._excluded.add(incident, message)
        if incident.rule.action == "checkpoint_stop":
            self.stop.request(message)
        elif incident.rule.action == "abort":
            self._aborting.request(message)

    def _tell(self, kind: str, message: str, level: int) -> None:
        if self._events is not None:
            self._events.add(kind, message, level=level)
        else:
            log.log(level, message)

    def _leave(self, reason: str) -> None:
        """End this process."""
        told = "." if self._place.is_rank_zero else f": {reason}"  # rank 0 has just told why
        log.error("This process is aborted, with exit status %d%s", ABORT_EXIT_CODE, told)
        marker = Marker(
            reason=reason,
            time_seconds=time.time(),
            global_rank=self._rank.global_rank,
            node_rank=self._rank.node_rank,
        )
        done_within(FILE_SECONDS, lambda: leave_marker(self._options.folder, marker))
        self._sender.wait()
        end_process(ABORT_EXIT_CODE)
