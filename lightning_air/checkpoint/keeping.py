"""Which checkpoints a run has, how good they are, and which of them may go."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lightning_air.checkpoint import places
from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.retention import Candidate, orphans, to_delete
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.scores import read_scores

_ASK_SECONDS = 60.0


@dataclass(frozen=True)
class Known:
    """A checkpoint in the run's folder.

    Attributes:
        path: Where it is, or is to be.
        step: Optimizer steps done.
        created_seconds: When it was saved, in seconds since 1970, as well as that is known.
        is_published: Whether readers see it. One that is not is on its way, or its save was killed.
        score: The monitored metric, if it was among the best.
    """

    path: str
    step: int
    created_seconds: float | None
    is_published: bool
    score: float | None = None


class Keeping:
    """What lies in a run's folder, from this attempt and those before it.

    Attributes:
        begun: The saves of this attempt whose end is not known yet, as they were asked for.

    Args:
        keep_last: How many of the newest valid ones stay.
        mode: "min" or "max": which score is best.
    """

    def __init__(self, keep_last: int, mode: Literal["min", "max"]) -> None:
        self._keep_last = keep_last
        self._mode: Literal["min", "max"] = mode
        self._known: dict[str, Known] = {}
        self._protected: set[str] = set()
        self.begun: set[str] = set()

    @staticmethod
    def look(folder: str, *, only_ours: bool, monitor: str | None = None) -> list[Known]:
        """Return what lies in a folder.

        Args:
            folder: Where checkpoints go.
            only_ours: Leave out published checkpoints of other programs, which then neither count nor go: a model to
                start from, or what an earlier job has left.
            monitor: The metric whose scores, as noted beside the checkpoints, count.

        Raises:
            OSError: If it cannot be listed.
        """
        store = places.open_store(folder)
        scores = {} if monitor is None else ask(store, lambda: read_scores(store, monitor), Patience(_ASK_SECONDS))
        return [
            Known(
                path=found.path,
                step=found.step or 0,
                created_seconds=found.created_seconds,
                is_published=found.has_metadata or found.is_file,
                score=scores.get(found.name),
            )
            for found in list_checkpoints(folder)
            if not only_ours or found.manifest is not None or not (found.has_metadata or found.is_file)
        ]

    def start(self, found: Sequence[Known]) -> None:
        """Begin with what lies in the folder."""
        self._known = {known.path: known for known in found}
        self._protected = set()
        self.begun = set()

    def resume(self, path: str | None, *, damaged: Collection[str], scores: Mapping[str, Tensor]) -> None:
        """Note what the run resumes from and knows from it.

        Args:
            path: What is never deleted.
            damaged: Do not count, and stay for whoever wants to know what happened to them.
            scores: By path. Those that are not there any more are ignored.
        """
        self._protected = set() if path is None else {path}
        for each in damaged:
            self._known.pop(each, None)
        for each, score in scores.items():
            self.score(each, score)

    def orphans(self, min_age_seconds: float) -> list[str]:
        """Return what killed saves have left, and forget it."""
        names = orphans(self._candidates(), now=time.time(), min_age_seconds=min_age_seconds, in_flight=set())
        for each in names:
            del self._known[each]
        return names

    def begin(self, path: str, step: int, score: Tensor | None) -> None:
        """Note a save that is begun."""
        self._known[path] = Known(path, step, time.time(), is_published=False, score=_number(score))
        self.begun.add(path)

    def score(self, path: str, score: Tensor | None) -> None:
        """Note how good a checkpoint is."""
        if path in self._known:
            self._known[path] = replace(self._known[path], score=_number(score))

    def scores(self) -> dict[str, float]:
        """Return the scores of what is published or on its way, by the names in the folder."""
        known = [each for each in self._known.values() if each.is_published or each.path in self.begun]
        return {places.name(each.path): each.score for each in known if each.score is not None}

    def publish(self, asked: str, path: str) -> None:
        """Note that a save is published, perhaps under another name."""
        self.begun.remove(asked)
        self._known[path] = replace(self._known.pop(asked), path=path, is_published=True)

    def fail(self, asked: str) -> None:
        """Forget a save that failed."""
        self.begun.discard(asked)
        self._known.pop(asked, None)

    def best(self, number: int, *, only_published: bool = False) -> dict[str, float]:
        """Return the best scores by path, the best first and of equal ones the newer.

        Args:
            number: How many; -1: all.
            only_published: Leave out what is on its way.
        """
        scored = [
            (known.score if self._mode == "min" else -known.score, -known.step, known.path, known.score)
            for known in self._known.values()
            if known.score is not None and (known.is_published or (known.path in self.begun and not only_published))
        ]
        ranked = sorted(scored)
        return {path: score for *_, path, score in (ranked if number < 0 else ranked[:number])}

    def to_delete(self, keep_best: int) -> list[str]:
        """Return what may go now, and forget it.

        Args:
            keep_best: How many with the best scores stay; -1: all with a score.
        """
        scored = sum(known.score is not None for known in self._known.values())
        names = to_delete(
            self._candidates(),
            keep_last=self._keep_last,
            protected=self._protected,
            keep_best=scored if keep_best < 0 else keep_best,
            mode=self._mode,
        )
        for each in names:
            del self._known[each]
        return names

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(
                name=known.path,
                step=known.step,
                created_seconds=known.created_seconds,
                is_valid=known.is_published,
                score=known.score,
            )
            for known in self._known.values()
        ]


def _number(score: Tensor | None) -> float | None:
    return None if score is None else float(score)
