"""`lightning-air checkpoints list` and `show`: what lies there, for people and, as JSON, for programs.

Names, of files and of tensors, are somebody else's text: what could not be printed, such as a terminal's own commands,
is replaced.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_air.checkpoint.consolidating import read_file
from lightning_air.checkpoint.finding import Found, find_checkpoints, find_pointers, is_published
from lightning_air.checkpoint.latest import Candidate
from lightning_air.checkpoint.lightning_form import take_apart
from lightning_air.checkpoint.reading import ask
from lightning_air.checkpoint.report import CheckpointReport, bytes_text
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.verify import verify_checkpoint

DEFAULT_TOP = 20
_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """One checkpoint, and what can be said of it without reading its tensors.

    Attributes:
        candidate: What it is.
        report: By the sizes of its files; None if it is not published, or is a single file that is not local, which
            would have to be downloaded.
        num_bytes: Its size; None if nobody says.
        pointers: Which pointers and links lead to it.
    """

    candidate: Candidate
    report: CheckpointReport | None
    num_bytes: int | None
    pointers: tuple[str, ...] = ()

    @property
    def valid(self) -> bool | None:
        """Whether it is whole, as far as sizes tell; None if that was not looked at."""
        if not is_published(self.candidate):
            return False
        return None if self.report is None else self.report.valid

    @property
    def problems(self) -> list[str]:
        """What is wrong with a published one."""
        return [] if self.report is None else [str(problem) for problem in self.report.problems]


def row_of(found: Found, candidate: Candidate, pointers: Sequence[str] = (), *, downloads: bool = False) -> Row:
    """Return what can be said of a checkpoint.

    Args:
        found: Where it lies.
        candidate: Which one.
        pointers: What leads to it.
        downloads: Whether to download a single file that is not local, to see whether it is whole.
    """
    report, folder = None, found.folder
    if is_published(candidate) and (downloads or folder.is_local or not candidate.is_file):
        report = verify_checkpoint(folder, name=candidate.name, level="size")
    if report is not None and report.num_bytes:
        num_bytes: int | None = report.num_bytes
    elif candidate.manifest is not None:
        num_bytes = candidate.manifest.num_bytes
    elif candidate.is_file:
        num_bytes = ask(folder, lambda: folder.num_bytes(candidate.name), Patience(_DEADLINE_SECONDS))
    else:
        listed = ask(folder, lambda: folder.list(candidate.name), Patience(_DEADLINE_SECONDS))
        num_bytes = sum(entry.num_bytes for entry in listed)
    return Row(candidate, report, num_bytes, tuple(pointers))


# ---- list ------------------------------------------------------------------------------------------------------------


def list_checkpoints(options: argparse.Namespace) -> int:
    """Do `list`."""
    found = find_checkpoints(options.path)
    pointers = find_pointers(found.folder)
    rows = [
        row_of(found, each, [pointer.name for pointer in pointers if pointer.target == each.name])
        for each in found.candidates
    ]
    if options.json:
        _write_json([_as_dict(row) for row in rows])
        return 0
    now = time.time()
    header = ("step", "epoch", "age", "size", "ranks", "sharding", "valid", "name")
    lines = [header, *(_cells(row, now) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    for line in lines:
        say("  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))
    for row in rows:
        for problem in row.problems:
            say(f"NOT valid: {row.candidate.name}: {problem}")
    for pointer in pointers:
        if pointer.target is None and not found.is_one:
            say(f"leads nowhere: {pointer.problem}")
    return 0


def _cells(row: Row, now: float) -> tuple[str, ...]:
    manifest, step = row.candidate.manifest, row.candidate.step
    leads = f" <- {', '.join(row.pointers)}" if row.pointers else ""
    valid = {True: "yes", False: "NO", None: "?"}[row.valid]
    return (
        "?" if step is None else str(step),
        "?" if manifest is None else str(manifest.epoch),
        age_text(row.candidate.created_seconds, now),
        bytes_text(row.num_bytes),
        "?" if manifest is None else str(manifest.world_size),
        "?" if manifest is None else printable(manifest.sharding),
        valid if is_published(row.candidate) else "unfinished",
        row.candidate.name + leads,
    )


def _as_dict(row: Row) -> dict[str, Any]:
    candidate, manifest = row.candidate, row.candidate.manifest
    return {
        "name": candidate.name,
        "path": candidate.path,
        "published": is_published(candidate),
        "single_file": candidate.is_file,
        "valid": row.valid,
        "problems": row.problems,
        "step": candidate.step,
        "epoch": None if manifest is None else manifest.epoch,
        "created_seconds": candidate.created_seconds,
        "num_bytes": row.num_bytes,
        "world_size": None if manifest is None else manifest.world_size,
        "sharding": None if manifest is None else manifest.sharding,
        "pointers": list(row.pointers),
    }


# ---- show ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorLine:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def part(self) -> str:
        """Whose it is."""
        first = self.name.partition(".")[0]
        return "model" if first == "state_dict" else "optimizer" if first.startswith("optimizer_") else "other"


def show_checkpoints(options: argparse.Namespace) -> int:
    """Do `show`."""
    found = find_checkpoints(options.path)
    row = _first_valid(found)
    tensors = sorted(_tensors(row), key=lambda tensor: (-tensor.num_bytes, tensor.name))
    files = _files(found, row)
    if options.json:
        shown = tensors if options.top is None else tensors[: options.top]
        listed = [vars(tensor) | {"shape": list(tensor.shape), "part": tensor.part} for tensor in shown]
        _write_json(_as_dict(row) | {"files": dict(files), "num_tensors": len(tensors), "tensors": listed})
        return 0
    _say_head(row)
    say(f"{len(files)} file(s)")
    for name, num_bytes in files.items():
        say(f"  {bytes_text(num_bytes):>9}  {name}")
    for part in ("model", "optimizer", "other"):
        of_part = [tensor for tensor in tensors if tensor.part == part]
        if of_part:
            total = sum(tensor.num_bytes for tensor in of_part)
            num_elements = sum(math.prod(tensor.shape) for tensor in of_part)
            say(f"{part}: {len(of_part)} tensor(s), {num_elements:,} element(s), {bytes_text(total)}")
    top = tensors[: DEFAULT_TOP if options.top is None else options.top]
    for tensor in top:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        say(f"  {bytes_text(tensor.num_bytes):>9}  {tensor.dtype:>8}  {shape:>16}  {tensor.name}")
    if len(top) < len(tensors):
        say(f"  … and {len(tensors) - len(top)} smaller; --top {len(tensors)} shows all")
    return 0


def _first_valid(found: Found) -> Row:
    """Return the checkpoint that was named, or of a folder the newest valid one, or else the newest."""
    if found.is_one:
        return row_of(found, found.candidates[0])
    newest = None
    for candidate in found.candidates:
        row = row_of(found, candidate)
        if row.valid is not False:
            return row
        newest = newest or row
    assert newest is not None, "a folder of checkpoints has one"
    return newest


def _say_head(row: Row) -> None:
    candidate, manifest = row.candidate, row.candidate.manifest
    say(candidate.path)
    created = candidate.created_seconds
    when = "" if created is None else f", saved {datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M:%S} UTC"
    say(
        f"  step {'unknown' if candidate.step is None else candidate.step}{when} ({age_text(created, time.time())} ago)"
    )
    if manifest is not None:
        say(f"  epoch {manifest.epoch}, by {manifest.world_size} rank(s), sharding {manifest.sharding}")
        say(f"  manifest: format {manifest.format_version}")
    if not is_published(candidate):
        say("  unfinished: a save is under way, or was killed; no reader sees it")
    elif row.report is not None:
        say("  nothing wrong, as far as sizes tell; `verify` reads it all" if row.valid else "  NOT valid")
        for line in [*row.problems, *(f"note: {note}" for note in row.report.notes)]:
            say(f"  {line}")


def _files(found: Found, row: Row) -> Mapping[str, int]:
    manifest, name = row.candidate.manifest, row.candidate.name
    if manifest is not None:
        return {file: record.num_bytes for file, record in sorted(manifest.files.items())}
    if row.candidate.is_file:
        return {name: row.num_bytes or 0}
    return {entry.name.removeprefix(f"{name}/"): entry.num_bytes for entry in found.folder.list(name)}


def _tensors(row: Row) -> list[_TensorLine]:
    if row.candidate.is_file:
        leaves = take_apart(read_file(row.candidate.path)).leaves
        return [
            _TensorLine(key, _dtype(each.dtype), tuple(each.shape), each.nbytes)
            for key, each in leaves.items()
            if isinstance(each, Tensor)
        ]
    metadata: Metadata | None = None if row.report is None else row.report.metadata
    saved = metadata.state_dict_metadata if metadata is not None else {}
    tensors = {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    return [
        _TensorLine(
            key,
            _dtype(entry.properties.dtype),
            tuple(entry.size),
            math.prod(entry.size) * entry.properties.dtype.itemsize,
        )
        for key, entry in tensors.items()
    ]


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# ---- text ------------------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Write one line to the user."""
    sys.stdout.write(f"{printable(line)}\n")


def printable(text: str) -> str:
    """Return the text without what could do something to a terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def age_text(created_seconds: float | None, now: float) -> str:
    """Return how long ago something was saved: "5 min"."""
    if created_seconds is None:
        return "?"
    age = max(0.0, now - created_seconds)
    for unit, seconds in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if age >= 2 * seconds:
            return f"{age / seconds:.0f} {unit}"
    return f"{age:.0f} s"


def _write_json(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value, indent=1)}\n")
