"""What a run knows of its checkpoints: records of all, tags for the best and the last one, and, opt-in, their files.

On the training thread only attributes of the callback are read (and, to upload each checkpoint, links made); whatever
opens a file is for a thread in the background. A checkpoint's own manifest is read as JSON that may be anybody's.
"""

import json
import math
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient

from lightning_air.tracking.artifacts import FileUpload, TextArtifact, files_of, log_text, yaml_text
from lightning_air.tracking.outbox import Outbox
from lightning_air.tracking.run_tags import TAG_PREFIX
from lightning_air.tracking.texts import MAX_TAG_LENGTH, storable
from lightning_air.tracking.warn_once import Warn, WarnOnce

MANIFEST_ARTIFACT = "checkpoints/manifest.json"
BEST_TAG = f"{TAG_PREFIX}best_checkpoint"
LAST_TAG = f"{TAG_PREFIX}last_checkpoint"

MAX_RECORDS = 1_000
"""A checkpoint, and the artifact, carry so many; of more the oldest are forgotten."""

MAX_PINNED = 4
"""Checkpoints that are kept for uploading although their run may delete them: disks are finite, and servers away."""

_VERSION = 1
_IN_NAME = re.compile(r"(?<![A-Za-z0-9_])(epoch|step)=(\d+)")
_MOST_MANIFEST_BYTES = 1 << 26
_LATEST_SECONDS = 253_402_300_799.0  # the last second that a date can have
# Lightning's MLFlowLogger has these in metadata.yaml.
_SETTINGS = (
    "monitor",
    "mode",
    "save_last",
    "save_top_k",
    "save_weights_only",
    "_every_n_train_steps",
    "_every_n_val_epochs",
)


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What a checkpoint callback tells at one moment, as plain values.

    Attributes:
        source: Which callback; the same for all its sightings.
        saved: The checkpoint that it has just saved, or has begun to; empty where it does not tell.
        step: Optimizer steps done, of that one; None where it does not tell.
        best: The best one, by `monitor` if there is one; empty where there is none.
        last: What `save_last` has made; empty where there is none.
        scores: The best ones that are kept, with their scores.
        current_score: Of what was saved last because of its score.
        monitor: The metric that scores are of; None where there are none.
        save_top_k: How many of the best are kept; -1 for all.
        settings: Of the callback, by the names of its attributes.
    """

    source: str
    saved: str
    step: int | None
    best: str
    last: str
    scores: Mapping[str, float]
    current_score: float | None
    monitor: str | None
    save_top_k: int
    settings: Mapping[str, Any]


def look_at(callback: Any) -> Sighting:
    """Return what a checkpoint callback tells; any callback will do, and what it has not is left out.

    Args:
        callback: What `Logger.after_save_checkpoint` gets: a ModelCheckpoint or a proxy of one.
    """
    kept = _get(callback, "best_k_models", {})
    scores = {_path(path): _number(score) for path, score in kept.items()} if isinstance(kept, Mapping) else {}
    step = _get(callback, "_last_global_step_saved", None)
    top_k = _get(callback, "save_top_k", 1)
    return Sighting(
        source=str(_get(callback, "state_key", "")),
        saved=_path(_get(callback, "_last_checkpoint_saved", "")),
        step=step if isinstance(step, int) and step >= 0 else None,
        best=_path(_get(callback, "best_model_path", "")),
        last=_path(_get(callback, "last_model_path", "")),
        scores={path: score for path, score in scores.items() if score is not None},
        current_score=_number(_get(callback, "current_score", None)),
        monitor=_get(callback, "monitor", None),
        save_top_k=top_k if isinstance(top_k, int) else 1,
        settings={name: getattr(callback, name) for name in _SETTINGS if hasattr(callback, name)},
    )


def _get(callback: Any, name: str, default: Any) -> Any:
    found = getattr(callback, name, default)
    return default if found is None else found


def _path(path: Any) -> str:
    return os.fspath(path) if isinstance(path, str | os.PathLike) else ""


def _number(score: Any) -> float | None:
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError):  # no number, or a tensor of several
        return None


def is_remote(path: str) -> bool:
    """Return whether only a client of some store could open the path: `dbfs:/Volumes/…`, `s3://…`."""
    return "://" in path or path.startswith("dbfs:/")


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint of the run; it may be deleted since.

    Attributes:
        path: As the callback calls it.
        saved_seconds: When, in seconds since 1970.
        step: Optimizer steps done; None where nothing tells.
        epoch: From 0; None where nothing tells.
        num_bytes: Its size; None where it cannot be seen from here.
        digest: Of its manifest, which has those of its files; None where it has none.
        score: None where it was not among the best.
        monitor: What the score is of.
    """

    path: str
    saved_seconds: float
    step: int | None = None
    epoch: int | None = None
    num_bytes: int | None = None
    digest: str | None = None
    score: float | None = None
    monitor: str | None = None


class CheckpointHistory:
    """The checkpoints of a run, over all its attempts. Any thread; `add` and `add_path` open files.

    Args:
        max_records: How many are kept.
    """

    def __init__(self, *, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._lock = threading.Lock()
        self._records: dict[str, CheckpointRecord] = {}  # in the order of their last saves
        self._num_forgotten = 0
        self._last = ""
        self._best: dict[str, str] = {}  # by callback
        self._rated_by = ""

    @property
    def best(self) -> CheckpointRecord | None:
        """The best one, of the callback that has a monitor if several save; None while there is none."""
        with self._lock:
            return self._records.get(self._best.get(self._rated_by, ""))

    @property
    def last(self) -> CheckpointRecord | None:
        """The one that was saved last; None while there is none."""
        with self._lock:
            return self._records.get(self._last)

    def add(self, sighting: Sighting, *, seconds: float) -> None:
        """Take note of all that a callback has told.

        Args:
            sighting: From `look_at`.
            seconds: Now, since 1970.
        """
        told = dict.fromkeys(path for path in (*sighting.scores, sighting.best, sighting.last) if path)
        # One that the callback does not rate may be on its way still: only what is there counts.
        is_there = sighting.saved in told or (not is_remote(sighting.saved) and _is_whole(sighting.saved))
        saved = sighting.saved if is_there else ""
        found = [_described(path, seconds) for path in told if path != saved and self._lacks(path)]
        if saved:
            found.append(_described(saved, seconds, step=sighting.step))
        with self._lock:
            new = [record for record in found if record.path not in self._records]
            for record in found:
                self._put(record, is_saved=record.path == saved)
            for path, score in sighting.scores.items():
                self._records[path] = replace(self._records[path], score=score, monitor=sighting.monitor)
            newest = max(new, key=lambda record: (record.step or 0, record.saved_seconds), default=None)
            self._last = saved or sighting.last or (newest.path if newest is not None else self._last)
            self._best[sighting.source] = sighting.best
            is_first = self._rated_by not in self._best
            if sighting.best and (sighting.monitor is not None or is_first or self._rated_by == sighting.source):
                self._rated_by = sighting.source
            self._forget()

    def add_path(self, path: str, *, seconds: float) -> None:
        """Take note of the checkpoint that training resumes from: what is saved in it cannot tell of it."""
        if self._lacks(path):
            record = _described(path, seconds)
            with self._lock:
                self._put(record, is_saved=False)
                self._last = self._last or path

    def _lacks(self, path: str) -> bool:
        with self._lock:
            return path not in self._records or self._records[path].num_bytes is None

    def _put(self, record: CheckpointRecord, *, is_saved: bool) -> None:
        """Have a record; one that was saved under an old name is a new one."""
        before = self._records.get(record.path)
        if is_saved:
            self._records.pop(record.path, None)
        elif before is not None:
            known = {name: value for name, value in asdict(before).items() if value is not None}
            record = replace(record, **known)
        self._records[record.path] = record

    def _forget(self) -> None:
        kept = {self._last, *self._best.values()}
        for path in [path for path in self._records if path not in kept][: len(self._records) - self._max_records]:
            del self._records[path]
            self._num_forgotten += 1

    def tags(self) -> dict[str, str]:
        """Return the run's tags that name the best and the last checkpoint, as far as there are any."""
        found = {BEST_TAG: self.best, LAST_TAG: self.last}
        return {tag: storable(record.path, MAX_TAG_LENGTH) for tag, record in found.items() if record is not None}

    def artifact(self) -> TextArtifact:
        """Return all records as JSON, for people and programs."""
        best, last = self.best, self.last
        with self._lock:
            records = list(self._records.values())
            all_best = set(self._best.values())
            num_forgotten = self._num_forgotten
        rows = [
            {
                **_json_values(record),
                "saved_at": datetime.fromtimestamp(record.saved_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "is_best": record.path in all_best,
                "is_last": record is last,
            }
            for record in records
        ]
        content = {
            "format_version": _VERSION,
            "best": None if best is None else best.path,
            "last": None if last is None else last.path,
            "num_forgotten": num_forgotten,
            "checkpoints": rows,
        }
        return TextArtifact(MANIFEST_ARTIFACT, json.dumps(content, indent=1))

    def snapshot(self) -> dict[str, Any]:
        """Return its state, as JSON can have it: for a checkpoint."""
        with self._lock:
            return {
                "version": _VERSION,
                "records": [_json_values(record) for record in self._records.values()],
                "num_forgotten": self._num_forgotten,
                "last": self._last,
                "best": dict(self._best),
                "rated_by": self._rated_by,
            }

    @classmethod
    def from_snapshot(cls, snapshot: Mapping[str, Any], *, max_records: int = MAX_RECORDS) -> "CheckpointHistory":
        """Return what the snapshot was taken of; an empty one for the snapshot of another version."""
        history = cls(max_records=max_records)
        if snapshot.get("version") == _VERSION:
            for values in snapshot["records"]:
                score = values["score"]
                record = CheckpointRecord(**{**values, "score": None if score is None else float(score)})
                history._records[record.path] = record
            history._num_forgotten = snapshot["num_forgotten"]
            history._last, history._rated_by = snapshot["last"], snapshot["rated_by"]
            history._best = dict(snapshot["best"])
        return history


def _json_values(record: CheckpointRecord) -> dict[str, Any]:
    values = asdict(record)
    if record.score is not None and not math.isfinite(record.score):
        values["score"] = str(record.score)
    return values


def _described(path: str, seconds: float, *, step: int | None = None) -> CheckpointRecord:
    """Return what can be seen of a checkpoint from here."""
    named = {name: int(number) for name, number in _IN_NAME.findall(Path(path).name)}
    record = CheckpointRecord(
        path=path, saved_seconds=seconds, step=named.get("step") if step is None else step, epoch=named.get("epoch")
    )
    if is_remote(path):
        return record
    with suppress(OSError):
        place = Path(path)
        record = replace(record, saved_seconds=place.stat().st_mtime)
        if place.is_dir():
            return _by_manifest(record, place)
        return replace(record, num_bytes=place.stat().st_size)
    return record


def _by_manifest(record: CheckpointRecord, folder: Path) -> CheckpointRecord:
    try:
        with (folder / "manifest.json").open("rb") as file:
            manifest = json.loads(file.read(_MOST_MANIFEST_BYTES))
        digest, created_seconds = manifest["digest"], float(manifest["created_seconds"])
        if not isinstance(digest, str) or not 0 <= created_seconds <= _LATEST_SECONDS:
            raise ValueError("it is of another kind")  # noqa: TRY301 - as everything else that may be wrong with it
        return replace(
            record,
            step=int(manifest["step"]),
            epoch=int(manifest["epoch"]),
            num_bytes=sum(int(file["num_bytes"]) for file in manifest["files"].values()),
            digest=digest,
            saved_seconds=created_seconds,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):  # none of ours
        return replace(record, num_bytes=sum(path.stat().st_size for path in files_of(folder)))


def _is_whole(path: str) -> bool:
    """Return whether a checkpoint is on this machine's disk, all of it: DCP writes `.metadata` last."""
    place = Path(path)
    with suppress(OSError):
        if path and place.is_dir():
            return (place / ".metadata").exists() or not any(place.glob("*.distcp"))
        return bool(path) and place.is_file()
    return False


# ---- their files -----------------------------------------------------------------------------------------------------


class CheckpointUpload:
    """A checkpoint on its way into a run: its files, `metadata.yaml`, `aliases.txt`, as Lightning's logger has them.

    Args:
        path: Of the checkpoint.
        source: Where its files are read from.
        score: Of the monitored metric.
        sighting: Of the callback that saved it.

    Attributes:
        path: Of the checkpoint; a later upload of the same replaces this one.
        folder: In the run.
    """

    def __init__(self, path: str, source: Path, *, score: float | None, sighting: Sighting) -> None:
        self.path = path
        self.folder = Path(path).stem
        self._files = FileUpload(source, self.folder)
        metadata = {"score": score, "original_filename": Path(path).name, "Checkpoint": dict(sighting.settings)}
        aliases = ["latest", "best"] if path == sighting.best else ["latest"]
        self._texts = [
            TextArtifact(f"{self.folder}/metadata.yaml", yaml_text(metadata)),
            TextArtifact(f"{self.folder}/aliases.txt", str(aliases)),
        ]

    def send(self, client: MlflowClient, run_id: str) -> None:
        """Upload what has not been uploaded yet; after a failure it may be called again.

        Raises:
            Exception: Whatever MLflow, or what it uploads with, raises; FileNotFoundError if the checkpoint is gone.
        """
        self._files.send(client, run_id)
        for text in self._texts:
            log_text(client, run_id, text)

    def outbox(self) -> Outbox:
        """Return what another process needs to upload it, if the checkpoint is still there then."""
        # Not from the second names, which go with this process.
        return Outbox(
            files=((str(Path(self.path).absolute()), self.folder),),
            texts={text.path: text.text for text in self._texts},
        )


class CheckpointUploads:
    """Which checkpoints to upload when; by the rules of Lightning's `log_model`, also those that are folders.

    A checkpoint that is to be uploaded during training may be deleted by its callback before its turn. So its files
    get a second name (a hard link) until then, where that can be had; a few at a time.

    Args:
        log_model: False: none. True: at the end those that are there; during training if all are kept
            (`save_top_k=-1`). "all": during training, each.
        pin_name: Of the folder beside the checkpoints for the second names. Nobody else's, since what a killed process
            has left there is deleted. None: checkpoints are uploaded if they are still there.
        warn: Told of those that cannot be uploaded.
    """

    def __init__(
        self, log_model: bool | Literal["all"], *, pin_name: str | None = None, warn: Warn | None = None
    ) -> None:
        self._log_model = log_model
        self._pin_name = pin_name
        self._swept: set[Path] = set()
        self._warn = warn or WarnOnce()
        self._seen: dict[str, tuple[Any, Sighting]] = {}
        self._modified: dict[str, float] = {}
        self._pinned: weakref.WeakSet[CheckpointUpload] = weakref.WeakSet()

    def after_save(self, callback: Any) -> list[CheckpointUpload]:
        """Return what to upload now.

        Args:
            callback: What `Logger.after_save_checkpoint` gets.
        """
        if self._log_model is False:
            return []
        sighting = look_at(callback)
        if self._log_model == "all" or sighting.save_top_k == -1:
            return self._due(sighting, pins=True)
        self._seen[sighting.source] = (callback, sighting)
        return []

    def at_end(self) -> list[CheckpointUpload]:
        """Return what to upload when training has ended; of every callback, where Lightning's logger takes one."""
        due = []
        for callback, sighting in self._seen.values():
            try:
                latest = look_at(callback)
            except ReferenceError:  # a proxy whose callback is gone
                latest = sighting
            due += self._due(latest, pins=False)
        self._seen.clear()
        return due

    def _due(self, sighting: Sighting, *, pins: bool) -> list[CheckpointUpload]:
        told = {sighting.last: sighting.current_score, sighting.best: None, **sighting.scores}
        remote = [path for path in told if is_remote(path)]
        if remote:
            self._warn(
                "checkpoint remote",
                f"{remote[0]} is not on this machine's disk: such checkpoints are recorded, but not uploaded.",
            )
        found = [(_modified(path), path) for path in told if path not in remote and _is_whole(path)]
        new = sorted(pair for pair in found if pair[0] > self._modified.get(pair[1], -math.inf))
        self._modified |= {path: modified for modified, path in new}
        return [self._upload(path, told[path], sighting, pins=pins) for _, path in new]

    def _upload(self, path: str, score: float | None, sighting: Sighting, *, pins: bool) -> CheckpointUpload:
        folder = self._pin(Path(path)) if pins and len(self._pinned) < MAX_PINNED else None
        source = Path(path) if folder is None else folder / Path(path).name
        upload = CheckpointUpload(path, source, score=score, sighting=sighting)
        if folder is not None:
            self._pinned.add(upload)
            weakref.finalize(upload, _unpin, folder, os.getpid())  # uploaded, or given up
        return upload

    def _pin(self, path: Path) -> Path | None:
        """Return a folder with the files under second names; None where that cannot be."""
        if self._pin_name is None:
            return None
        pins = path.parent / self._pin_name
        if pins not in self._swept:
            shutil.rmtree(pins, ignore_errors=True)
            self._swept.add(pins)
        folder = None
        try:
            pins.mkdir(exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=pins))
            for file in files_of(path):
                link = folder / file.relative_to(path.parent)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.hardlink_to(file.resolve())
        except OSError:  # another file system, or one that knows no links
            if folder is not None:
                _unpin(folder, os.getpid())
            return None
        return folder


def _unpin(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not a forked process that ends
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # others are in it
            folder.parent.rmdir()


def _modified(path: str) -> float:
    modified = 0.0
    for part in (Path(path), Path(path, ".metadata"), Path(path, "manifest.json")):
        with suppress(OSError):  # a file has no parts
            modified = max(modified, part.stat().st_mtime)
    return modified
