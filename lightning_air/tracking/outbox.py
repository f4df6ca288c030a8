"""What a run is to be told beside its metrics, kept on the disk while its server is away: `outbox.json` in its folder.

Parameters, tags, the configuration, the list of checkpoints, refused points, the end: whoever sends the metrics that an
attempt has left, sends these too, and a run does not stay RUNNING because its server was away when it ended. What is in
an outbox may have arrived all the same, so sending it twice does no harm.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_air.tracking.whole_file import SCRATCH_SUFFIX, write_whole

OUTBOX_NAME = "outbox.json"
OUTPUT_FOLDER = "output"
"""Beside it: what the node has printed, a copy for the outbox alone."""

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a training has ended.

    Attributes:
        status: MLflow's: FINISHED, FAILED or KILLED.
        time_ms: When, since 1970.
        launch_id: Of the process. If another one has opened the run since then, the run does not end by this.
    """

    status: str
    time_ms: int
    launch_id: str


@dataclass(frozen=True, kw_only=True)
class Outbox:
    """What is to be sent.

    Attributes:
        params: Flat parameters by name, as they were logged.
        tags: By name.
        texts: Contents of text artifacts by their path in the run.
        files: Paths of files or folders on this machine, each with the folder in the run to put it into.
        has_record: Parts of the full record lie in the folder.
        ending: How the training has ended; None while it runs, or if the run is somebody else's to end.
    """

    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    files: tuple[tuple[str, str], ...] = ()
    has_record: bool = False
    ending: Ending | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing is in it."""
        return not any(getattr(self, each.name) for each in fields(self))

    def plus(self, later: "Outbox") -> "Outbox":
        """Return what is in both; the later one counts where they differ."""
        new_files = {path for path, _ in later.files}
        return Outbox(
            params={**self.params, **later.params},
            tags={**self.tags, **later.tags},
            texts={**self.texts, **later.texts},
            files=(*(each for each in self.files if each[0] not in new_files), *later.files),
            has_record=self.has_record or later.has_record,
            ending=later.ending or self.ending,
        )


def sum_of(outboxes: Iterable[Outbox]) -> Outbox:
    """Return what is in all of them; later ones count."""
    total = Outbox()
    for each in outboxes:
        total = total.plus(each)
    return total


@dataclass(frozen=True, kw_only=True)
class Addressed:
    """An outbox, and whom it is for.

    Attributes:
        run_id: MLflow's.
        tracking_uri: Of its server.
        outbox: What it is to be told.
    """

    run_id: str
    tracking_uri: str
    outbox: Outbox


def write_outbox(folder: Path, addressed: Addressed) -> None:
    """Replace what a folder has; an empty one is removed.

    Raises:
        OSError: It cannot be written.
    """
    if addressed.outbox.is_empty:
        remove_outbox(folder)
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(folder / OUTBOX_NAME, json.dumps({"version": _VERSION, **asdict(addressed)}))


def read_outbox(folder: Path) -> Addressed | None:
    """Return what a folder has; None if it has none.

    Raises:
        ValueError: It has one that cannot be read.
        OSError: The folder cannot be read.
    """
    try:
        return _parsed(json.loads((folder / OUTBOX_NAME).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / OUTBOX_NAME} cannot be read: {error!r}.") from error


def remove_outbox(folder: Path) -> None:
    """Delete what a folder has, and the folder if nothing else is in it.

    Raises:
        OSError: It cannot be deleted.
    """
    (folder / OUTBOX_NAME).unlink(missing_ok=True)
    for scratch in folder.glob(f"{OUTBOX_NAME}.*{SCRATCH_SUFFIX}"):
        scratch.unlink(missing_ok=True)
    shutil.rmtree(folder / OUTPUT_FOLDER, ignore_errors=True)
    with suppress(OSError):  # something is in it
        folder.rmdir()


def _parsed(content: Mapping[str, Any]) -> Addressed:
    if content["version"] != _VERSION:
        raise ValueError(f"its version is {content['version']!r}")
    return Addressed(
        run_id=_text(content["run_id"]),
        tracking_uri=_text(content["tracking_uri"]),
        outbox=_outbox_of(content["outbox"]),
    )


def _outbox_of(content: Mapping[str, Any]) -> Outbox:
    texts = {
        name: {_text(key): _text(value) for key, value in content[name].items()} for name in ("params", "tags", "texts")
    }
    ending = content["ending"]
    if ending is not None:
        ending = Ending(
            status=_text(ending["status"]), time_ms=int(ending["time_ms"]), launch_id=_text(ending["launch_id"])
        )
    return Outbox(
        **texts,
        files=tuple((_text(path), _text(target)) for path, target in content["files"]),
        has_record=bool(content["has_record"]),
        ending=ending,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
