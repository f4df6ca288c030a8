"""Which checkpoints may go: never the newest, never one in use, and nothing for the sake of one that is not there yet.

A listing in, names out. Who deletes removes `.metadata` first: killed half-way, it leaves an orphan and no checkpoint.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One checkpoint folder, as a listing shows it.

    Attributes:
        name: The folder's; no other candidate has it.
        step: The optimizer steps done.
        created_seconds: When it was published, or when the last file of an unpublished one was written, in seconds
            since 1970; None where the store does not say.
        is_valid: Whether it is published: its `.metadata` is there. A published one that turned out to be damaged
            belongs in no list here: so it does not count, and stays for whoever wants to know what happened.
        score: What the best are told by; None, or not a number, is never among them.
    """

    name: str
    step: int
    created_seconds: float | None
    is_valid: bool
    score: float | None = None


def to_delete(
    candidates: Sequence[Candidate],
    *,
    keep_last: int,
    protected: AbstractSet[str],
    keep_best: int = 0,
    mode: Literal["min", "max"] = "min",
) -> list[str]:
    """Return the names of the checkpoints to delete, the oldest first.

    Only valid ones count and only valid ones are deleted. The newest are those with the highest step and those created
    last: after going back to an older checkpoint these differ until the run is as far as it was, and until then both
    stay.

    Args:
        candidates: All checkpoints of one run, in any order.
        keep_last: How many of the newest stay, at least 1.
        protected: Names that stay besides: the one resumed from, those in flight, the best.
        keep_best: How many of those with the best scores stay besides.
        mode: Whether the lowest or the highest score is the best.

    Raises:
        ValueError: If a number is out of range, or two candidates have the same name.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last!r}. Without it nothing is left to resume from.")
    if keep_best < 0:
        raise ValueError(f"keep_best must not be negative, got {keep_best!r}. Use 0 to keep none for its score.")
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")
    _check_names(candidates)
    valid = sorted((candidate for candidate in candidates if candidate.is_valid), key=_step_then_time)
    kept = set(protected)
    for newest in (valid, sorted(valid, key=_time_then_step)):
        kept.update(candidate.name for candidate in newest[-keep_last:])
    kept.update(candidate.name for candidate in _best(valid, keep_best, mode))
    return [candidate.name for candidate in valid if candidate.name not in kept]


def orphans(
    candidates: Sequence[Candidate], *, now: float, min_age_seconds: float, in_flight: AbstractSet[str]
) -> list[str]:
    """Return the names of what killed runs left without `.metadata`, the oldest first.

    Another run that is alive may be writing a folder, and only its age tells: so the age has to be longer than any
    save takes. A folder of unknown age stays.

    Args:
        candidates: All folders, in any order.
        now: Seconds since 1970, by the clock that dates the folders.
        min_age_seconds: How long nothing has been written to a folder that is nobody's.
        in_flight: Names that this run is writing.

    Raises:
        ValueError: If the age is negative, or two candidates have the same name.
    """
    if not min_age_seconds >= 0:
        raise ValueError(f"min_age_seconds must not be negative, got {min_age_seconds!r}.")
    _check_names(candidates)
    return [
        candidate.name
        for candidate in sorted(candidates, key=_time_then_step)
        if not candidate.is_valid
        and candidate.name not in in_flight
        and candidate.created_seconds is not None
        and now - candidate.created_seconds > min_age_seconds
    ]


def _best(valid: Sequence[Candidate], number: int, mode: Literal["min", "max"]) -> list[Candidate]:
    """Return the best-scored ones; of equal ones the newer."""
    scored = [(candidate.score, candidate) for candidate in reversed(valid) if candidate.score is not None]
    ranked = sorted(
        ((score, candidate) for score, candidate in scored if not math.isnan(score)),
        key=lambda pair: pair[0] if mode == "min" else -pair[0],
    )
    return [candidate for _, candidate in ranked[:number]]


def _check_names(candidates: Sequence[Candidate]) -> None:
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        twice = next(name for name in sorted(names) if names.count(name) > 1)
        raise ValueError(f"checkpoint {twice!r} is listed more than once. List every folder once.")


def _created(candidate: Candidate) -> float:
    return -math.inf if candidate.created_seconds is None else candidate.created_seconds


def _step_then_time(candidate: Candidate) -> tuple[int, float, str]:
    return candidate.step, _created(candidate), candidate.name


def _time_then_step(candidate: Candidate) -> tuple[float, int, str]:
    return _created(candidate), candidate.step, candidate.name
