"""Tells of incidents: one message when one begins (what, where, since when, what to do), and one when it is over.

On rank 0, on the thread on which `Nodes` has just heard of all nodes.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_air.health.events import EventLog, HealthEvent
from lightning_air.health.history import GpuId, Row
from lightning_air.health.incidents import Change, Incident, Incidents
from lightning_air.health.rules import Rule
from lightning_air.health.signals import XID

_UNITS = {"pct": " %", "c": " °C", "w": " W", "mhz": " MHz", "seconds": " s", "bytes": " bytes"}
# The node on which it happens has said these as they happened; the incident adds what is done about it.
_TOLD_ALREADY = frozenset({XID, "is_lost"})


class Judge:
    """Looks at what is new, tells what has changed, and has it acted upon.

    Args:
        rules: What is looked for.
        poll_seconds: The time between two readings.
        events: Get what is told; the driver's errors are found there.
        act: Called once with each incident that has begun, after it was told.
        seconds_without_step: How long rank 0's loop has not gone on; NaN where nobody knows.
        clock: Seconds that do not jump.
        wall_clock: Seconds since the epoch, for messages.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        poll_seconds: float,
        events: EventLog,
        act: Callable[[Incident, str], object] = lambda *_: None,
        seconds_without_step: Callable[[], float] = lambda: math.nan,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._incidents = Incidents(rules, poll_seconds=poll_seconds)
        self._events = events
        self._act = act
        self._seconds_without_step = seconds_without_step
        self._clock = clock
        self._wall_clock = wall_clock
        self._gpus: dict[tuple[int, str], GpuId] = {}
        # Of the run before, in the same log, the incidents have been told.
        self._num_events, _ = events.since(0)

    @property
    def open(self) -> list[Incident]:
        """The incidents that are not over."""
        return self._incidents.open

    def take(self, rows: Mapping[GpuId, Row]) -> None:
        """Look at new readings, and at what the driver has told since the last call."""
        self._gpus.update({(gpu.node_rank, gpu.uuid): gpu for gpu in rows})
        self._num_events, events = self._events.since(self._num_events)
        for event in events:
            if event.kind == XID and event.value is not None:
                self._tell(self._incidents.take_xid(int(event.value), self._gpu_of(event)))
        self._tell(self._incidents.look(self._clock(), rows, seconds_without_step=self._seconds_without_step()))

    def _gpu_of(self, event: HealthEvent) -> GpuId:
        """Return the GPU of an event; one by itself where it is not among those read, as one in MIG mode."""
        uuid = event.uuid or "unknown"
        return self._gpus.get((event.node_rank, uuid), GpuId(uuid, -1, "", event.node_rank))

    def _tell(self, change: Change) -> None:
        for incident in change.ended:
            rule, gpu = incident.rule, incident.gpu
            self._events.add(
                f"{rule.name}_over",
                f"{_where(gpu)}: {rule.name} is over: {_describe_signal(rule)} is good again.",
                uuid=gpu.uuid,
                node_rank=gpu.node_rank,
                level=logging.INFO,
            )
        for incident in change.begun:
            message = describe(incident, self._wall_clock() - incident.bad_seconds)
            rule, gpu = incident.rule, incident.gpu
            is_quiet = rule.action == "log" or (rule.action == "warn" and rule.signal in _TOLD_ALREADY)
            self._events.add(
                rule.name,
                message,
                uuid=gpu.uuid,
                value=incident.value,
                node_rank=gpu.node_rank,
                level=logging.INFO if is_quiet else logging.WARNING,
            )
            self._act(incident, message)


def describe(incident: Incident, since_seconds: float) -> str:
    """Return an incident in a sentence or two.

    Args:
        incident: What it is.
        since_seconds: When it began, in seconds since the epoch.
    """
    rule, value = incident.rule, incident.value
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since_seconds))
    if rule.signal == XID:
        found = f"XID {value:.0f}"
    elif rule.signal.startswith(("is_", "has_")) and rule.above is not None:
        found = f"{rule.signal}"
    else:
        unit = " %" if rule.compared == "pct_of_median" else _UNITS.get(rule.signal.rpartition("_")[2], "")
        side = "above" if rule.above is not None else "below"
        found = f"{_describe_signal(rule)} is {value:.6g}{unit}, {side} {rule.threshold:g}{unit}"
    lasted = f", for {incident.bad_seconds:.0f} s" if incident.bad_seconds else ""
    advice = f" {rule.advice}" if rule.advice else ""
    name = "" if rule.name == rule.signal else f"{rule.name}: "
    return f"{_where(incident.gpu)}: {name}{found}{lasted} (since {since}).{advice}"


def _describe_signal(rule: Rule) -> str:
    text = rule.signal if rule.over_seconds is None else f"the growth of {rule.signal} in {rule.over_seconds:g} s"
    if rule.compared == "minus_median":
        return f"{text}, less the median of its peers,"
    return f"{text} relative to the median of its peers" if rule.compared == "pct_of_median" else text


def _where(gpu: GpuId) -> str:
    index = f" {gpu.index}" if gpu.index >= 0 else ""
    name = f", {gpu.name}" if gpu.name else ""
    return f"GPU{index} ({gpu.uuid}{name}) of node {gpu.node_rank}"
