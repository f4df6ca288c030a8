"""`lightning-air checkpoints verify` and `consolidate`: what reads all bytes of a checkpoint."""

import argparse
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from lightning_air.checkpoint.consolidating import consolidate_checkpoint
from lightning_air.checkpoint.finding import find_checkpoints, is_published
from lightning_air.checkpoint.places import name, open_store, parent, parse_place
from lightning_air.checkpoint.report import bytes_text
from lightning_air.checkpoint.verify import verify_checkpoint
from lightning_air.cli.checkpoint_listing import printable, say

LINE_SECONDS = 10.0
"""Where there is no terminal, a line says so often how far it is."""

BAR_SECONDS = 0.1
"""A bar moves so often."""

INVALID = 1


class Progress:
    """Tells how far the reading of a checkpoint is: a bar on a terminal, a line now and then elsewhere.

    Args:
        what: The checkpoint's name.
        stream: Where to.
        clock: The time in seconds.
    """

    def __init__(self, what: str, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = printable(what)
        self._stream = stream
        self._clock = clock
        self._said = clock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, num_bytes_done: int, num_bytes: int) -> None:
        """Take note of how far it is."""
        if self._stream.isatty():
            if self._bar is None:
                self._bar = _bar(self._what, num_bytes, self._stream)
            self._bar.update(num_bytes_done - self._bar.n)
        elif self._clock() - self._said >= LINE_SECONDS:
            self._said = self._clock()
            percent = 100 * num_bytes_done // max(num_bytes, 1)
            self._stream.write(f"{self._what}: {percent} % of {bytes_text(num_bytes)} verified\n")
            self._stream.flush()


def _bar(what: str, num_bytes: int, stream: TextIO) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - for terminals only

    class Bar(tqdm):  # type: ignore[misc] # untyped
        monitor_interval = 0  # no thread that outlives it

    return Bar(
        total=num_bytes,
        desc=what,
        unit="B",
        unit_scale=True,
        leave=False,
        file=stream,
        mininterval=BAR_SECONDS,
    )


def verify_checkpoints(options: argparse.Namespace) -> int:
    """Do `verify`."""
    found = find_checkpoints(options.path)
    num_valid = num_checked = 0
    for candidate in found.candidates:
        if not is_published(candidate) and not found.is_one:
            say(f"{candidate.path}: unfinished, so no reader sees it; not verified")
            continue
        with Progress(candidate.name, sys.stderr) as progress:
            report = verify_checkpoint(found.folder, name=candidate.name, on_progress=progress)
        for line in str(report).splitlines():
            say(line)
        num_checked += 1
        num_valid += report.valid
    if not found.is_one:
        say(f"{num_valid} of {num_checked} published checkpoint(s) valid")
    return 0 if num_valid == num_checked > 0 else INVALID


def consolidate_checkpoints(options: argparse.Namespace) -> int:
    """Do `consolidate`."""

    def tell(path: str, why: str) -> None:
        sys.stderr.write(f"{printable(f'Passing over {path}: {why}')}\n")

    source = consolidate_checkpoint(options.source, options.target, force=options.force, on_skip=tell)
    target = parse_place(options.target).root
    num_bytes = open_store(parent(target)).num_bytes(name(target))
    say(f"wrote {target} ({bytes_text(num_bytes)}) from {source}")
    return 0
