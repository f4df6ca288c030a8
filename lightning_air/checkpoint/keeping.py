"""Which checkpoints a run has, and which of them may go."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.retention import Candidate, orphans, to_delete


@dataclass(frozen=True)
class Known:
    """A checkpoint in the run's folder."""

    path: str
    step: int
    created_seconds: float | None
    is_published: bool
    score: float | None = None


class Keeping:
    """What lies in a run's folder, from this attempt and those before it.

    Args:
        keep_last: How many of the newest valid ones stay.
        mode: "min" or "max": which score is best.
    """

    def __init__(self, keep_last: int, mode: Literal["min", "max"]) -> None:
        self._keep_last = keep_last
        self._mode: Literal["min", "max"] = mode
        self._known: dict[str, Known] = {}
        self._protected: set[str] = set()

    def look(self, folder: str) -> list[Known]:
        """Return what lies in a folder. Rank 0 calls this, before training.

        Raises:
            OSError: If it cannot be listed.
        """
        return [
            Known(found.path, found.step or 0, found.created_seconds, found.has_metadata or found.is_file)
            for found in list_checkpoints(folder)
        ]

    def start(self, found: Sequence[Known], *, resumed_from: str | None) -> None:
        """Begin with what lies in the folder; what the run resumes from is never deleted."""
        self._known = {known.path: known for known in found}
        self._protected = set() if resumed_from is None else {resumed_from}

    def orphans(self, min_age_seconds: float) -> list[str]:
        """Return what killed saves have left, and forget it."""
        names = orphans(self._candidates(), now=time.time(), min_age_seconds=min_age_seconds, in_flight=set())
        for name in names:
            del self._known[name]
        return names

    def begin(self, path: str, step: int, score: Tensor | None) -> None:
        """Note a save that was begun."""
        self._known[path] = Known(path, step, time.time(), is_published=False, score=_number(score))

    def score(self, scores: Mapping[str, Tensor]) -> None:
        """Note the scores of checkpoints, by path."""
        for path, score in scores.items():
            if path in self._known:
                self._known[path] = replace(self._known[path], score=_number(score))

    def publish(self, asked: str, path: str) -> None:
        """Note that a save is published, perhaps under another name."""
        known = self._known.pop(asked)
        self._known[path] = replace(known, path=path, is_published=True)

    def fail(self, asked: str) -> None:
        """Forget a save that failed."""
        self._known.pop(asked, None)

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
        for name in names:
            del self._known[name]
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
