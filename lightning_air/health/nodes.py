"""The nodes of a run know of each other's GPUs: each puts its last readings into the store, and rank 0 reads them all.

No collective, and nothing on the device: the store is the one through which the process group was made, on a connection
of its own, used by one thread only. It also sees to it that silence is noticed, of another node and of this one, whose
sampler may hang in the driver. A run without a second node needs no store.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from lightning_air.health.aggregates import aggregate, combine_hosts
from lightning_air.health.events import EventLog, HealthEvent
from lightning_air.health.history import METRICS, GpuId, History, Row
from lightning_air.health.host import read_host
from lightning_air.health.sampler import Sampler

log = logging.getLogger(__name__)

SILENT_POLLS = 3
# However often it polls, a busy machine may let a thread wait so long.
MIN_SILENT_SECONDS = 2.0
_MAX_EVENTS_SENT = 20
_STORE_SECONDS = 1.0

OpenStore = Callable[[], dist.Store]
TakeNews = Callable[[dict[GpuId, Row]], object]


def open_store(address: str, port: int, prefix: str) -> dist.Store:
    """Return a connection of our own to the store at which the ranks have met. For one thread.

    Args:
        address: Of rank 0's machine, or of whoever holds the store.
        port: Its port.
        prefix: Of our keys; the same on all nodes, and of this run only.

    Raises:
        OSError: Nothing listens there.
        RuntimeError: What listens there is no store.
    """
    # Torch's own wait for a listener cannot be ended, and a thread that comes back from it late aborts the process.
    socket.create_connection((address, port), timeout=_STORE_SECONDS).close()
    timeout = timedelta(seconds=_STORE_SECONDS)
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a node says of itself.

    Attributes:
        num_polls: How many its sampler has made: silence is told by this number standing still.
        gpus: The last readings.
        host: Figures of `read_host`, where there is no NVML.
        num_xids: The driver's errors so far.
        num_events: All events so far.
        events: The newest of them.
        has_left: The node has ended in good order.
    """

    num_polls: int
    gpus: dict[GpuId, Row] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    num_xids: int = 0
    num_events: int = 0
    events: tuple[HealthEvent, ...] = ()
    has_left: bool = False

    def encode(self) -> str:
        """Return it as it stands in the store."""
        gpus = [[asdict(gpu), list(row)] for gpu, row in self.gpus.items()]
        events = [asdict(event) for event in self.events]
        return json.dumps({**vars(self), "metrics": METRICS, "gpus": gpus, "events": events})

    @staticmethod
    def decode(text: bytes) -> "Report":
        """Return what `encode` made.

        Raises:
            ValueError: It is something else, or from another version of this package.
        """
        content = json.loads(text)
        if tuple(content.pop("metrics")) != METRICS:
            raise ValueError("the nodes run different versions of lightning_air")
        content["gpus"] = {GpuId(**gpu): tuple(row) for gpu, row in content["gpus"]}
        content["events"] = tuple(HealthEvent(**event) for event in content["events"])
        return Report(**content)


class _Node:
    """What rank 0 knows of another node, or a node of itself: when its sampler was last seen to be alive."""

    def __init__(self, now: float) -> None:
        self.report: Report | None = None
        self.is_silent = False
        self.seen_seconds = now
        self.num_looks = 0  # since then

    def hear(self, report: Report, now: float) -> bool:
        """Take a report, and return whether it is news."""
        is_new = self.report is None or report.num_polls != self.report.num_polls
        if is_new:
            self.seen_seconds = now
            self.num_looks = 0
        self.report = report
        return is_new


class Nodes:
    """What is known of the GPUs of all nodes; on a node that does not read the others, of its own.

    Args:
        sampler: Of this node.
        events: Get what happens here, and on rank 0 elsewhere.
        history: Gets on rank 0 what the other nodes' GPUs say, too.
        node_rank: Of this node.
        num_nodes: How many there are.
        reads_all: Rank 0 is here.
        poll_seconds: The time between two polls.
        open_store: Opens the store; not called with one node.
        take_news: Told after every exchange the readings that are new; may be none.
        host: Reads what can be told without NVML.
        clock: Seconds, for what takes how long.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        events: EventLog,
        history: History,
        node_rank: int,
        num_nodes: int,
        reads_all: bool,
        poll_seconds: float,
        open_store: OpenStore | None,
        take_news: TakeNews | None = None,
        host: Callable[[], dict[str, float]] = read_host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = sampler
        self._events = events
        self._history = history
        self._node_rank = node_rank
        self._poll_seconds = poll_seconds
        self._silent_seconds = max(SILENT_POLLS * poll_seconds, MIN_SILENT_SECONDS)
        self._open_store = open_store if num_nodes > 1 else None
        self._take_news = take_news
        self._host = host
        self._clock = clock
        self._store: dist.Store | None = None
        self._store_seconds = clock()  # when it last worked
        self._has_told_of_store = False
        self._own = _Node(clock())
        others = range(num_nodes) if reads_all and open_store is not None else ()
        self._others = {rank: _Node(clock()) for rank in others if rank != node_rank}

    def run(self, closed: threading.Event) -> None:
        """Exchange until told to end: soon after the start, and then a little after each poll."""
        seconds = min(0.5, self._poll_seconds / 4)
        while not closed.wait(seconds):
            self.exchange()
            # The sampler polls at multiples of `poll_seconds`.
            seconds = self._poll_seconds - (time.time() - self._poll_seconds / 4) % self._poll_seconds
        self.leave()

    def exchange(self) -> None:
        """Look after this node, tell of it, and on rank 0 hear of the others. Raises nothing."""
        now = self._clock()
        report = self._report()
        news = dict(report.gpus) if self._own.hear(report, now) else {}
        self._judge(self._node_rank, self._own, now)
        if self._open_store is not None:
            self._exchange_with_others(self._open_store, report, news, now)
        if self._take_news is not None:
            try:
                self._take_news(news)
            except Exception:
                self._take_news = None
                log.exception("The rules have failed, and are not looked at from now on; the GPUs are still watched.")

    def _exchange_with_others(self, open_store: OpenStore, report: Report, news: dict[GpuId, Row], now: float) -> None:
        try:
            if self._store is None:
                self._store = open_store()
            self._store.set(_key(self._node_rank), report.encode())
            for rank, node in self._others.items():
                news.update(self._hear(rank, node, self._store, now))
            self._store_seconds = now
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            self._lose_store(error, now)
        for rank, node in self._others.items():
            self._judge(rank, node, now)

    def leave(self) -> None:
        """Tell the others that this node ends in good order. Raises nothing."""
        if self._store is not None:
            try:
                last = replace(self._report(), gpus={}, host={}, has_left=True)
                self._store.set(_key(self._node_rank), last.encode())
            except RuntimeError as error:  # rank 0 was faster
                log.debug("could not take leave: %s", error)
            self._store = None

    def metrics(self) -> dict[str, float]:
        """Return what is logged now, by name: of all nodes on rank 0, elsewhere of this one."""
        nodes = [self._own, *self._others.values()]
        reports = self._fresh_reports()
        rows = list(self.rows().values())
        num_stale = sum(node.is_silent for node in nodes)
        figures = combine_hosts(report.host for report in reports)
        if rows or num_stale:
            num_xids = sum(node.report.num_xids for node in nodes if node.report is not None)
            figures |= aggregate(rows, num_stale_nodes=num_stale, num_xids=num_xids)
        return figures

    def rows(self) -> dict[GpuId, Row]:
        """Return the last readings of all GPUs, but for those of silent nodes: on rank 0 of all nodes, as `metrics`."""
        return {gpu: row for report in self._fresh_reports() for gpu, row in report.gpus.items()}

    def _fresh_reports(self) -> list[Report]:
        nodes = [self._own, *self._others.values()]
        return [node.report for node in nodes if node.report is not None and not node.is_silent]

    def _report(self) -> Report:
        num_events, _ = self._events.own_since(0)
        _, newest = self._events.own_since(max(0, num_events - _MAX_EVENTS_SENT))
        rows = self._sampler.rows
        return Report(
            num_polls=self._sampler.num_polls,
            gpus=rows,
            host={} if rows or self._sampler.num_polls == 0 else self._host(),
            num_xids=self._events.num_xids,
            num_events=num_events,
            events=tuple(newest[-_MAX_EVENTS_SENT:]),
        )

    def _hear(self, rank: int, node: _Node, store: dist.Store, now: float) -> dict[GpuId, Row]:
        """Read what another node says, and return its GPUs' readings if they are new."""
        if not store.check([_key(rank)]):
            return {}
        report = Report.decode(store.get(_key(rank)))
        num_before = node.report.num_events if node.report is not None else 0
        num_new = min(report.num_events - num_before, len(report.events))
        for event in report.events[len(report.events) - num_new :] if num_new > 0 else ():
            self._events.add_from(event)
        if not node.hear(report, now) or not report.gpus:
            return {}
        # By our clock: another one may be hours off, and would move the history there.
        self._history.append(time.time(), report.gpus)
        return report.gpus

    def _judge(self, rank: int, node: _Node, now: float) -> None:
        """Say when a node has fallen silent, and when it is heard again."""
        has_left = node.report is not None and node.report.has_left
        node.num_looks += 1
        # By the clock alone, a process that was stopped for a while would find all others silent when it goes on.
        has_looked = node.num_looks > SILENT_POLLS
        is_silent = not has_left and has_looked and now - node.seen_seconds > self._silent_seconds
        if is_silent == node.is_silent:
            return
        node.is_silent = is_silent
        seconds = now - node.seen_seconds
        if node is self._own:
            self._judge_own(seconds, is_silent=is_silent)
        elif is_silent:
            since = f"for {seconds:.0f} s" if node.report is not None else "since the run began"
            self._events.add(
                "node_stale",
                f"Node {rank} has not told of its GPUs {since}. They are left out of what is logged. Its process or "
                "its driver may hang, or its network be cut: see its log.",
            )
        else:
            self._events.add("node_back", f"Node {rank} tells of its GPUs again.")

    def _judge_own(self, seconds: float, *, is_silent: bool) -> None:
        if is_silent:
            self._events.add(
                "nvml_silent",
                f"NVML has not answered for {seconds:.0f} s: the GPU driver of this node hangs. Training may hang with "
                "it. See `dmesg` there for its errors (XID).",
            )
        else:
            self._events.add("nvml_back", "NVML answers again; the GPUs of this node are watched as before.")

    def _lose_store(self, error: Exception, now: float) -> None:
        self._store = None
        log.debug("the exchange between the nodes failed: %s", error)
        # Rank 0 may just have ended a little earlier than this node.
        if now - self._store_seconds > self._silent_seconds and not self._has_told_of_store:
            self._has_told_of_store = True
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._events.add(
                "store_lost",
                f"This node cannot exchange GPU readings with the others ({lines[0]}), so rank 0 logs without them. "
                "The process group has to be made through MASTER_ADDR and MASTER_PORT for that.",
            )


def _key(node_rank: int) -> str:
    return f"node/{node_rank}"
