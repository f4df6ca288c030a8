"""Spools with a writer, for its tests: records whose every value is known, and the points that a server should have."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.progress import load_progress
from lightning_air.tracking.spool import SEGMENT_BYTES, Spool
from lightning_air.tracking.writer import Writer
from tests.tracking.stand_ins import PassThrough, Warnings

TWENTY = [f"train/metric_{index}" for index in range(20)]
SECONDS = 30.0
"""More than anything should take on a busy machine."""


def record_at(step: int, names: list[str] = TWENTY) -> Record:
    return Record(1_700_000_000_000 + step, step, {name: step + index / 64 for index, name in enumerate(names)})


def append(spool: Spool, step: int, names: list[str] = TWENTY) -> None:
    record = record_at(step, names)
    assert spool.append(record.timestamp_ms, record.step, record.values)


def points_until(num_steps: int, names: list[str] = TWENTY) -> list[Point]:
    """What the server should have of these steps, each value being a point, sorted."""
    return sorted(point for step in range(num_steps) for point in PassThrough().add(record_at(step, names)))


@contextlib.contextmanager
def writing(door: Any, run_id: str = "run", **options: Any) -> Iterator[tuple[Spool, Writer[Any]]]:
    """Open a spool with a running writer, of which everything is left as it is when the block ends."""
    warnings = options.setdefault("warn", Warnings())
    folder = options.pop("folder", None) or Path("spool").absolute()
    spool = Spool(folder, warn=warnings, segment_bytes=options.pop("segment_bytes", SEGMENT_BYTES))
    writer = Writer(
        spool, options.pop("thinner", None) or PassThrough(), door, run_id, progress=load_progress(folder), **options
    )
    writer.start()
    try:
        yield spool, writer
    finally:
        writer.close(0)
        if writer._thread is not None:
            writer._thread.join(SECONDS)
        spool.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition, which a busy machine may take long for."""
    until_seconds = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < until_seconds
        time.sleep(0.01)
