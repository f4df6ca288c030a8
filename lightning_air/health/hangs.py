"""When a run hangs, and which rank is to blame: pure functions of what the ranks tell of themselves."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from lightning_air.health.collectives import Collective
from lightning_air.health.progress import Progress

HangAction = Literal["log", "warn", "abort"]
_ACTIONS: tuple[HangAction, ...] = ("log", "warn", "abort")
_MAX_NAMED = 8


@dataclass(frozen=True)
class HangRule:
    """When the loop of a rank has stopped for too long, and what is done about it.

    A rank hangs when no batch has begun or ended for `multiple_of_step` times the run's own median step, and for
    `min_seconds` at least. What takes its time once has `pause_seconds` instead: the start, the first three batches of
    training and of evaluation (which may compile), checkpoints, and the beginnings and ends of epochs and validations.

    Args:
        multiple_of_step: Times the median of the last hundred batches, of the same kind (training, evaluation).
        min_seconds: However short a step is.
        pause_seconds: For what is no batch.
        action: "log" tells it at level INFO, "warn" as a warning; "abort" also ends all processes. A checkpoint is not
            to be had from a rank that hangs.

    Raises:
        ValueError: A value cannot be meant.
        TypeError: A value is no number.
    """

    multiple_of_step: float = field(default=20.0, kw_only=True)
    min_seconds: float = field(default=300.0, kw_only=True)
    pause_seconds: float = field(default=1800.0, kw_only=True)
    action: HangAction = field(default="warn", kw_only=True)

    def __post_init__(self) -> None:
        for name, minimum in (("multiple_of_step", 1.0), ("min_seconds", 1.0), ("pause_seconds", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}.")
            if not minimum <= value < math.inf:
                raise ValueError(f"{name} must be at least {minimum:g} and finite, got {value!r}.")
            object.__setattr__(self, name, float(value))
        if self.pause_seconds < self.min_seconds:
            raise ValueError(
                f"pause_seconds must be at least min_seconds={self.min_seconds:g}, got {self.pause_seconds:g}."
            )
        if self.action not in _ACTIONS:
            raise ValueError(f"action must be one of {', '.join(map(repr, _ACTIONS))}, got {self.action!r}.")

    def limit_seconds(self, progress: Progress) -> float:
        """Return how long the loop may stay where it is."""
        usual = progress.usual_seconds(progress.mark.kind)
        return self.pause_seconds if usual is None else max(self.min_seconds, self.multiple_of_step * usual)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank tells of itself in a hang.

    Attributes:
        global_rank: The rank.
        node_rank: Its node.
        local_rank: Its place there.
        number: Of the marks that its loop has passed.
        where: Of the last one.
        seconds: How long ago that was.
        line: Where the thread of its loop is.
        collectives: That it has begun and that have not ended.
        stacks: Of all its threads.
    """

    global_rank: int
    node_rank: int
    local_rank: int
    number: int
    where: str
    seconds: float
    line: str
    collectives: tuple[Collective, ...] = ()
    stacks: str = ""

    def encode(self) -> str:
        """Return it as it stands in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes | str) -> "RankReport":
        """Return what `encode` made."""
        content = json.loads(text)
        content["collectives"] = tuple(Collective(*each) for each in content["collectives"])
        return RankReport(**content)

    @property
    def place(self) -> str:
        """Which rank, in words."""
        return f"rank {self.global_rank} (node {self.node_rank}, local rank {self.local_rank})"

    def describe(self) -> str:
        """Return where it is, in a clause."""
        waits = f", waiting in {self.collectives[0]}" if self.collectives else ""
        return f"{self.place} is {self.where} since {self.seconds:.0f} s, at {self.line}{waits}"


@dataclass(frozen=True)
class Verdict:
    """Which ranks hold up the others.

    Attributes:
        culprits: Their global ranks.
        text: What is known, in sentences.
    """

    culprits: tuple[int, ...]
    text: str


def judge(reports: Sequence[RankReport], silent: Sequence[int], gone: Sequence[int]) -> Verdict:
    """Tell whom the others wait for.

    In this order: ranks that do not answer, ranks whose run has ended already, ranks that wait in no collective while
    others do, the ranks that are furthest behind; or all, if nothing sets one apart.

    Args:
        reports: Of the ranks that have answered.
        silent: Ranks that have not.
        gone: Ranks that have ended their run.
    """
    waiting = [report for report in reports if report.collectives]
    busy = [report for report in reports if not report.collectives]
    fewest = min((report.number for report in reports), default=0)
    behind = [report for report in reports if report.number == fewest]
    if silent:
        culprits = tuple(silent)
        head = f"No answer from {_ranks(culprits)}: stopped, dead, or stuck outside of Python."
    elif gone:
        culprits = tuple(gone)
        head = f"The others wait for {_ranks(culprits)}, whose run has ended: its log says why."
    elif waiting and busy:
        culprits = tuple(report.global_rank for report in busy)
        head = f"The others wait for {_ranks(culprits)}: {_those(busy)}."
    elif len(behind) < len(reports):
        culprits = tuple(report.global_rank for report in behind)
        head = f"Behind the others: {_those(behind)}."
    else:
        culprits = tuple(report.global_rank for report in reports)
        return Verdict(culprits, f"{_those(reports, capital=True)}.{_mismatch(waiting)}")
    others = [report for report in reports if report.global_rank not in culprits]
    return Verdict(culprits, head + (f" {_those(others, capital=True)}." if others else ""))


def _mismatch(waiting: Sequence[RankReport]) -> str:
    by_group: dict[str, set[Collective]] = {}
    for report in waiting:
        by_group.setdefault(report.collectives[0].group, set()).add(report.collectives[0])
    if any(len(different) > 1 for different in by_group.values()):
        return " They wait in different collectives: the ranks have not taken the same way through the program."
    return ""


def _those(reports: Sequence[RankReport], *, capital: bool = False) -> str:
    texts = [report.describe() for report in reports[:_MAX_NAMED]]
    if len(reports) > _MAX_NAMED:
        texts.append(f"and {len(reports) - _MAX_NAMED} more")
    text = "; ".join(texts)
    return text[0].upper() + text[1:] if capital else text


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"


def by_rank(reports: Mapping[int, RankReport]) -> list[RankReport]:
    """Return reports in order of their ranks."""
    return [reports[rank] for rank in sorted(reports)]
