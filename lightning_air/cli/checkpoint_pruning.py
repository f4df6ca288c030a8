"""`lightning-air checkpoints prune`: delete old checkpoints, and say of each one what happens to it and why.

What is looked at is one folder. Only what is valid counts among the newest and only that is deleted as old; a damaged
one stays for whoever wants to know what happened.
"""

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_air.checkpoint import retention
from lightning_air.checkpoint.finding import Found, find_checkpoints, find_pointers, is_published
from lightning_air.checkpoint.manifest import OBJECTS_NAME
from lightning_air.checkpoint.places import join, name
from lightning_air.checkpoint.report import bytes_text
from lightning_air.checkpoint.safe_pickle import load_object
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.untrusted import BadCheckpointError
from lightning_air.cli.checkpoint_listing import Row, age_text, printable, row_of, say

NOT_DELETED = 1
# A checkpoint whose name was taken is published as "x@2.ckpt"; who asked for it knows it as "x.ckpt".
_GENERATION = re.compile(r"@[1-9][0-9]*(?=(\.[^.@]*)?$)")


@dataclass(frozen=True)
class Verdict:
    """What is to become of one checkpoint."""

    row: Row
    deletes: bool
    why: str


def prune_checkpoints(options: argparse.Namespace) -> int:
    """Do `prune`."""
    if options.keep_last is None and options.orphans is None:
        raise ValueError(
            "nothing to do. Say which may go: --keep-last N for old ones, --orphans AGE for unfinished ones."
        )
    found = find_checkpoints(options.path)
    if found.is_one:
        raise ValueError(f"{found.candidates[0].path} is a checkpoint. Name the folder that it lies in.")
    now = time.time()
    verdicts = _judge(found, options.keep_last, options.orphans, now)
    for verdict in verdicts:
        candidate = verdict.row.candidate
        what = (
            f"step {'?' if candidate.step is None else candidate.step}, {age_text(candidate.created_seconds, now)} old"
        )
        say(
            f"{'delete' if verdict.deletes else 'keep':6}  {candidate.name}  "
            f"({what}, {bytes_text(verdict.row.num_bytes)}): {verdict.why}"
        )
    doomed = [verdict.row for verdict in reversed(verdicts) if verdict.deletes]  # the oldest first
    freed = f"{len(doomed)} checkpoint(s), {bytes_text(sum(row.num_bytes or 0 for row in doomed))}"
    if not options.yes:
        say(f"{freed} would be deleted; nothing was. Say --yes to delete.")
        return 0
    num_failed = _delete(doomed)
    say(f"{freed} deleted" if not num_failed else f"{len(doomed) - num_failed} of {freed} deleted")
    return NOT_DELETED if num_failed else 0


def _delete(rows: Sequence[Row]) -> int:
    """Return how many could not be deleted."""
    shelf, num_failed = Shelf(), 0
    for row in rows:
        try:
            shelf.remove_one(row.candidate.path)
        except OSError as error:
            num_failed += 1
            sys.stderr.write(printable(f"{row.candidate.path} could not be deleted: {error}") + "\n")
    return num_failed


def _judge(found: Found, keep_last: int | None, min_orphan_age: float | None, now: float) -> list[Verdict]:
    """Return what is to become of each checkpoint, the newest first."""
    rows = [row_of(found, candidate, downloads=True) for candidate in found.candidates]
    protected = _protected(found, rows)
    listed = [_listed(row) for row in rows]
    old = set()
    if keep_last is not None:
        old = set(retention.to_delete(listed, keep_last=keep_last, protected=protected.keys()))
    orphaned = set()
    if min_orphan_age is not None:
        unpublished = [each for each, row in zip(listed, rows, strict=True) if not is_published(row.candidate)]
        orphaned = set(
            retention.orphans(unpublished, now=now, min_age_seconds=min_orphan_age, in_flight=protected.keys())
        )
    return [_verdict(row, protected, old, orphaned, keep_last) for row in rows]


def _verdict(
    row: Row, protected: Mapping[str, str], old: set[str], orphaned: set[str], keep_last: int | None
) -> Verdict:
    key = row.candidate.name
    if key in orphaned:
        return Verdict(row, deletes=True, why="unfinished: a save that was killed")
    if key in old:
        return Verdict(row, deletes=True, why=f"older than the newest {keep_last}")
    if not is_published(row.candidate):
        return Verdict(row, deletes=False, why="unfinished, perhaps a save under way; see --orphans")
    if not row.valid:
        return Verdict(row, deletes=False, why=f"damaged: {'; '.join(row.problems)}")
    if key in protected:
        return Verdict(row, deletes=False, why=protected[key])
    return Verdict(row, deletes=False, why="no --keep-last" if keep_last is None else f"among the newest {keep_last}")


def _listed(row: Row) -> retention.Candidate:
    candidate = row.candidate
    return retention.Candidate(
        name=candidate.name,
        step=candidate.step or 0,
        created_seconds=candidate.created_seconds,
        is_valid=bool(row.valid),
    )


def _protected(found: Found, rows: Sequence[Row]) -> dict[str, str]:
    """Return what stays whatever its age, and why."""
    protected = {
        row.candidate.name: "nobody knows how old it is"
        for row in rows
        if row.candidate.step is None and row.candidate.created_seconds is None
    }
    newest = next((row for row in rows if row.valid), None)
    if newest is not None:
        protected |= dict.fromkeys(_best(found, newest), f"among the best, as {newest.candidate.name} notes")
        protected[newest.candidate.name] = "the newest valid one"
    for pointer in find_pointers(found.folder):
        if pointer.target is not None:
            protected.setdefault(pointer.target, f"{pointer.name} leads to it")
    return protected


def _best(found: Found, newest: Row) -> list[str]:
    """Return which checkpoints ModelCheckpoint rated best, as the state of the callbacks in a checkpoint tells."""
    if newest.candidate.is_file:
        return []  # it would have to be loaded whole
    file = f"{newest.candidate.name}/{OBJECTS_NAME}"
    try:
        meta = load_object(found.folder.read(file), source=join(found.folder.root, file))
    except FileNotFoundError:
        return []
    except BadCheckpointError as error:
        say(f"Which checkpoints are the best is not known: {error}")
        return []
    states = meta.get("callbacks") if isinstance(meta, dict) else None
    paths: list[object] = []
    for state in states.values() if isinstance(states, dict) else ():
        # Without a monitor Lightning calls the newest one the best.
        if isinstance(state, dict) and state.get("monitor", "?") is not None:
            best = state.get("best_k_models")
            paths += [state.get("best_model_path"), *(best if isinstance(best, dict) else ())]
    names = {name(path) for path in paths if isinstance(path, str)}
    return [each.name for each in found.candidates if {each.name, _GENERATION.sub("", each.name)} & names]
