"""What a report shows of the events: alike ones as one with all their times, and which of them are trouble."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_air.health.events import HealthEvent

MAX_GROUPS = 400
MAX_TEXT = 600
_GOOD_TO_KNOW = frozenset(
    {"not_read", "selection", "nvml_absent", "store_lost", "memory_full", "power_capped", "xid_application"}
)
_GOOD_ENDINGS = ("_back", "_over")
_ENDED_BY = {"gpu_lost": "gpu_back", "node_stale": "node_back", "nvml_lost": "nvml_back", "nvml_silent": "nvml_back"}


@dataclass(frozen=True, kw_only=True)
class EventGroup:
    """Events that say the same of the same GPU or node.

    Attributes:
        kind: Of `HealthEvent`.
        text: Its message, cut if it is very long.
        node_rank: The node.
        uuid: The GPU, or None.
        is_trouble: Whether it is bad news about a GPU or a node.
        times: When each happened, in seconds since the epoch, in order.
        ends: When each was over; None where it is not, or where nobody tells.
    """

    kind: str
    text: str
    node_rank: int
    uuid: str | None
    is_trouble: bool
    times: tuple[float, ...]
    ends: tuple[float | None, ...]


def is_trouble(kind: str) -> bool:
    """Return whether events of a kind are bad news; those of an unknown kind are."""
    return kind not in _GOOD_TO_KNOW and not kind.endswith(_GOOD_ENDINGS)


def words_of(kind: str) -> str:
    """Return a kind as a person writes it: "GPU lost", "XID"."""
    words = kind.replace("_", " ")
    for name in ("gpu", "nvml", "xid", "ecc", "pcie"):
        words = " ".join(word.upper() if word == name else word for word in words.split(" "))
    return words.replace("PCIE", "PCIe").replace("nvlink", "NVLink")


def group_events(events: Iterable[HealthEvent]) -> tuple[list[EventGroup], int]:
    """Return the events in the order in which each first happened, and how many were left out.

    Of very many different ones the trouble and then the newest are kept.
    """
    times: dict[tuple[str, str, int, str | None], list[float]] = {}
    told = list(events)
    ends = _Ends(told)
    for event in told:
        text = event.message if len(event.message) <= MAX_TEXT else f"{event.message[: MAX_TEXT - 1]}…"
        times.setdefault((event.kind, text, event.node_rank, event.uuid), []).append(event.time_seconds)
    groups = [
        EventGroup(
            kind=kind,
            text=text,
            node_rank=node_rank,
            uuid=uuid,
            is_trouble=is_trouble(kind),
            times=tuple(sorted(when)),
            ends=tuple(ends.of(kind, node_rank, uuid, seconds) for seconds in sorted(when)),
        )
        for (kind, text, node_rank, uuid), when in times.items()
    ]
    kept = sorted(groups, key=lambda group: (not group.is_trouble, -group.times[-1]))[:MAX_GROUPS]
    num_left_out = sum(len(group.times) for group in groups) - sum(len(group.times) for group in kept)
    return sorted(kept, key=lambda group: group.times[0]), num_left_out


class _Ends:
    """When what began was over: "hot" by "hot_over", "gpu_lost" by "gpu_back"."""

    def __init__(self, events: Sequence[HealthEvent]) -> None:
        self._times: dict[tuple[str, int, str | None], list[float]] = {}
        for event in sorted(events, key=lambda event: event.time_seconds):
            if event.kind.endswith(_GOOD_ENDINGS):
                self._times.setdefault((event.kind, event.node_rank, event.uuid), []).append(event.time_seconds)

    def of(self, kind: str, node_rank: int, uuid: str | None, seconds: float) -> float | None:
        """Return when it was over that began then."""
        ends = self._times.get((_ENDED_BY.get(kind, f"{kind}_over"), node_rank, uuid), [])
        place = bisect_left(ends, seconds)
        return ends[place] if place < len(ends) else None
