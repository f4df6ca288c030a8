"""What was found wrong with a checkpoint, as data."""

from dataclasses import dataclass, field
from typing import Literal

from torch.distributed.checkpoint.metadata import Metadata

from lightning_air.checkpoint.manifest import Manifest

Level = Literal["size", "digest"]


def bytes_text(num_bytes: int | None) -> str:
    """Return a size in the unit that suits it: "1.23 GB"; "?" if it is not known."""
    if num_bytes is None:
        return "?"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 999.5 * size else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes} B"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one file.

    Attributes:
        file: Its path below the checkpoint.
        what: What is wrong: "missing", "wrong size", "wrong digest", …
        expected: What it should be, if that can be said in a word.
        found: What it is instead.
    """

    file: str
    what: str
    expected: str | int | None = None
    found: str | int | None = None

    def __str__(self) -> str:
        expected = "" if self.expected is None else f", expected {self.expected}"
        found = "" if self.found is None else f", found {self.found}"
        return f"{self.file}: {self.what}{expected}{found}"


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What `verify_checkpoint` found.

    Attributes:
        path: The checkpoint; where a pointer led, if it was given one.
        level: "size": every file is there and as long as it should be, and `.metadata` is intact. "digest": so is every
            other byte.
        problems: What is wrong; nothing in a valid checkpoint.
        notes: What could not be checked, and what a load will need.
        step: Optimizer steps done, as the manifest says; else as the name says; else None.
        num_files: How many files it should have, without the manifest.
        num_bytes: Their size.
        manifest: None without a manifest that can be read.
        metadata: What `.metadata` holds, for a load that follows; None if there is none that can be read.
    """

    path: str
    level: Level
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    step: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    manifest: Manifest | None = field(default=None, repr=False)
    metadata: Metadata | None = field(default=None, repr=False)

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong, as far as the level tells."""
        return not self.problems

    def __str__(self) -> str:
        verdict = "valid" if self.valid else f"NOT valid, {len(self.problems)} problem(s)"
        step = "" if self.step is None else f", step {self.step}"
        size = f", {self.num_files} file(s), {bytes_text(self.num_bytes)}"
        lines = [f"{self.path}: {verdict}{step}{size}, checked by {self.level}"]
        return "\n  ".join([*lines, *map(str, self.problems), *(f"note: {note}" for note in self.notes)])
