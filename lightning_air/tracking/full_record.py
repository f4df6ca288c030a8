"""Everything that was logged, before it is thinned: gzipped JSON lines beside the spool, part by part.

A part that is written to is called `.part`. It grows by one member of gzip with each acknowledged chunk, and how long
it is then is noted in the spool's progress, in the same moment. So an attempt after a crash cuts the part there, and
takes the records behind it again: each is in the parts once. A part that is complete is uploaded into the run, as
`metrics/<part>.jsonl.gz`, and then deleted here.
"""

import gzip
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from mlflow import MlflowClient

from lightning_air.tracking.points import Record
from lightning_air.tracking.warn_once import Warn

RECORD_FOLDER = "record"
ARTIFACT_FOLDER = "metrics"
PART_BYTES = 16 << 20

_COMPLETE, _GROWING = ".jsonl.gz", ".part"
_TRIES = 3


class Kept(NamedTuple):
    """How much of the record belongs to a moment; JSON keeps it as a list.

    Attributes:
        part: The name of the part that was written to last, without its suffix.
        num_bytes: Of it.
    """

    part: str
    num_bytes: int


class FullRecord:
    """The full record of one run, as far as it is here. The writer's thread's, but for `finish`.

    Args:
        folder: The spool's.
        kept: What the spool's progress says; what is there beyond it goes.
        warn: Told if the disk does not take it; then it has gaps.
        on_part: Called when a part is complete. Must not raise.
        part_bytes: A part with more is complete.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        kept: Kept | None,
        *,
        warn: Warn,
        on_part: Callable[[], object] = lambda: None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._folder = folder / RECORD_FOLDER
        self._kept = kept
        self._warn = warn
        self._on_part = on_part
        self._part_bytes = part_bytes
        self._lines: list[str] = []
        self._pid = os.getpid()
        for path in self._folder.glob(f"*{_GROWING}"):
            if kept is None or path.name != kept.part + _GROWING:
                path.unlink()
        self._complete()
        if any(self._folder.glob(f"*{_COMPLETE}")):
            self._on_part()

    def add(self, record: Record) -> None:
        """Take a record; it is written with the next `commit`."""
        line = {"timestamp_ms": record.timestamp_ms, "step": record.step, "values": dict(record.values)}
        self._lines.append(json.dumps(line) + "\n")

    def commit(self) -> Kept | None:
        """Write what was added; return how much of the record there is then, for the progress that is saved next."""
        lines, self._lines = self._lines, []
        if not lines:
            return self._kept
        if self._kept is None or self._kept.num_bytes >= self._part_bytes:
            self.finish()
        kept = self._kept or Kept(f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid4().hex[:8]}", 0)
        path = self._folder / (kept.part + _GROWING)
        member = gzip.compress("".join(lines).encode(), compresslevel=3)
        try:
            with _opened(path) as file:
                file.truncate(kept.num_bytes)  # of a commit that failed half-way
                file.write(member)
        except OSError as error:
            self._warn("full record", f"The full record of metrics has a gap from now on: {path}: {error}.")
            return self._kept
        self._kept = Kept(kept.part, kept.num_bytes + len(member))
        return self._kept

    def finish(self) -> None:
        """Say that no more is added to the part that grows. Once the progress with it is saved, or nobody writes."""
        if self._kept is not None and os.getpid() == self._pid:  # not a forked process that ends
            self._complete()
            self._on_part()

    def _complete(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        path = self._folder / (kept.part + _GROWING)
        try:
            if path.exists():
                os.truncate(path, kept.num_bytes)
                path.rename(self._folder / (kept.part + _COMPLETE))
        except OSError as error:
            self._warn("full record", f"A part of the full record of metrics stays in {path}: {error}.")


def _opened(path: Path) -> BinaryIO:
    """Open a part at its end. `send_record` on another thread removes the folder when all that was in it is sent."""
    for _ in range(_TRIES):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            return path.open("ab")
    return path.open("ab")


def send_record(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Upload the parts that are complete into the run, and delete them here; may be called again after a failure.

    Args:
        client: Of the tracking server.
        run_id: MLflow's.
        folder: The spool's; it goes too if nothing else is left in it.

    Raises:
        Exception: Whatever MLflow, or what it uploads with, raises.
    """
    for path in sorted((folder / RECORD_FOLDER).glob(f"*{_COMPLETE}")):
        client.log_artifact(run_id, str(path), ARTIFACT_FOLDER)
        path.unlink()
    for each in (folder / RECORD_FOLDER, folder):
        with suppress(OSError):  # something is in it
            each.rmdir()
