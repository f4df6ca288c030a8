"""What a run keeps as files beside its curves: its configuration, its odd values, logs, checkpoints.

A run may be continued by several attempts, and none may overwrite what another has left: so what belongs to an attempt
lies in a folder that is named after it. Within an attempt the same content goes to the same place, so that it can be
uploaded again when there is more of it.

Files go up one by one with `log_artifact`, never with `log_artifacts`: that uses a pool of threads, which cannot start
one any more when the process ends.
"""

import enum
import json
import posixpath
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, MutableSequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient

from lightning_air.tracking.attempts import LAUNCH_ID
from lightning_air.tracking.outbox import Outbox
from lightning_air.tracking.set_aside import SET_ASIDE_NAME
from lightning_air.tracking.window import Event

_MAX_DEPTH = 50
_NO_BREAKS = 1 << 20
_UNICODE_BREAKS = re.compile("[\x85\u2028\u2029]")


@dataclass(frozen=True)
class TextArtifact:
    """A text that becomes an artifact.

    Attributes:
        path: In the run.
        text: All of it.
    """

    path: str
    text: str


def attempt_folder(ordinal: int, launch_id: str = LAUNCH_ID) -> str:
    """Return what the folders of an attempt are called, such as "attempt_2-1a2b3c4d".

    Args:
        ordinal: 1 for the first attempt; outside of a job it is always 1.
        launch_id: Tells launches with the same ordinal apart.
    """
    return f"attempt_{ordinal}-{launch_id[:8]}"


def config_artifact(config: object, attempt: str) -> TextArtifact:
    """Return an attempt's whole configuration, as `config/<attempt>/config.yaml`.

    Args:
        config: A text, such as LightningCLI's YAML, as it is; or anything nested.
        attempt: From `attempt_folder`.
    """
    text = storable_text(config) if isinstance(config, str) else yaml_text(config)
    return TextArtifact(f"config/{attempt}/config.yaml", text)


def hyperparameters_artifact(hyperparameters: object, attempt: str) -> TextArtifact:
    """Return an attempt's hyperparameters, nested and whole, as `config/<attempt>/hyperparameters.yaml`.

    Args:
        hyperparameters: All that were logged so far, since the file is replaced by the next one.
        attempt: From `attempt_folder`.
    """
    return TextArtifact(f"config/{attempt}/hyperparameters.yaml", yaml_text(hyperparameters))


def events_artifact(events: Iterable[Event], attempt: str) -> TextArtifact:
    """Return an attempt's values that were not finite, one JSON object per line, as `tracking/<attempt>/events.jsonl`.

    Args:
        events: All so far, since the file is replaced by the next one.
        attempt: From `attempt_folder`.
    """
    lines = [json.dumps(event._asdict()) + "\n" for event in events]
    return TextArtifact(f"tracking/{attempt}/events.jsonl", "".join(lines))


def log_text(client: MlflowClient, run_id: str, artifact: TextArtifact) -> None:
    """Upload a text; the artifact of that path is replaced.

    Raises:
        Exception: Whatever MLflow, or what it uploads with, raises.
    """
    client.log_text(run_id, artifact.text, artifact.path)


def outbox_of(artifact: TextArtifact) -> Outbox:
    """Return what keeps a text on the disk until it can be uploaded."""
    return Outbox(texts={artifact.path: artifact.text})


def set_aside_outbox(spool_folder: Path, attempt: str) -> Outbox:
    """Return what keeps the list of points that the server refused, as `log_set_aside`, until it can be uploaded."""
    path = spool_folder / SET_ASIDE_NAME
    return Outbox(files=((str(path), f"tracking/{attempt}"),)) if path.exists() else Outbox()


def log_set_aside(client: MlflowClient, run_id: str, spool_folder: Path, attempt: str) -> bool:
    """Upload the list of points that the server refused, as `tracking/<attempt>/set_aside.jsonl`.

    Args:
        client: Of the tracking server.
        run_id: MLflow's.
        spool_folder: Where the list is, if there is one.
        attempt: From `attempt_folder`.

    Returns:
        Whether there is one.

    Raises:
        Exception: Whatever MLflow, or what it uploads with, raises.
    """
    return log_growing_file(client, run_id, spool_folder / SET_ASIDE_NAME, f"tracking/{attempt}")


def log_growing_file(client: MlflowClient, run_id: str, path: Path, folder: str) -> bool:
    """Upload what a file holds now, under its own name.

    It is copied first: an upload announces the size that it saw at its beginning, and a server that gets more than
    that refuses it, or keeps a broken file.

    Args:
        client: Of the tracking server.
        run_id: MLflow's.
        path: Of a file that somebody appends to.
        folder: In the run.

    Returns:
        Whether there is such a file.

    Raises:
        Exception: Whatever MLflow, or what it uploads with, raises.
    """
    if not path.exists():
        return False
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, path.name)
        shutil.copyfile(path, copy)
        client.log_artifact(run_id, str(copy), folder)
    return True


class FileUpload:
    """A file, or a folder with all that is in it, on its way into a run.

    `send` may be called again after it has failed: it goes on with the file that failed.

    Args:
        source: The file or folder; symbolic links to files are followed.
        folder: In the run; the file or folder is put into it, under its own name.
    """

    def __init__(self, source: Path, folder: str) -> None:
        self.source = source
        self.folder = folder
        self._sent: set[Path] = set()

    def send(self, client: MlflowClient, run_id: str) -> None:
        """Upload what has not been uploaded yet.

        Raises:
            FileNotFoundError: The file or folder is gone.
            Exception: Whatever MLflow, or what it uploads with, raises.
        """
        for path in files_of(self.source):
            if path not in self._sent:
                below = path.relative_to(self.source.parent).parent
                folder = posixpath.normpath(posixpath.join(self.folder, below.as_posix()))
                client.log_artifact(run_id, str(path), folder)
                self._sent.add(path)


def files_of(source: Path) -> list[Path]:
    """Return a file itself, or all files below a folder, sorted.

    Raises:
        FileNotFoundError: There is neither.
    """
    if source.is_dir():
        return sorted(path for path in source.rglob("*") if path.is_file())
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist any more.")
    return [source]


# ---- YAML ------------------------------------------------------------------------------------------------------------


def yaml_text(content: object) -> str:
    """Return nested content as YAML that any reader understands: what is no plain value stands there as its text.

    Never raises: a value whose text cannot be had is described.

    Args:
        content: Mappings, namespaces, dataclasses, sequences, sets and values, as deep as anybody writes them.
    """
    text = yaml.dump(plain(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NO_BREAKS)
    return storable_text(text)


def plain(content: object) -> Any:
    """Return nested content as it is now, of plain values only: for YAML, later. Never raises."""
    return _plain(content, ())


class _Dumper(yaml.SafeDumper):
    """Escapes Unicode's own line breaks, which PyYAML writes as they are, and which a reader folds into spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if _UNICODE_BREAKS.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def storable_text(text: str) -> str:
    """Return a text that UTF-8 can have: halves of surrogate pairs, as in undecodable file names, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object, parents: tuple[int, ...]) -> Any:
    """Return what YAML has a word for."""
    try:
        scalar = _scalar(value)
        if scalar is None or isinstance(scalar, bool | int | float | str):
            return scalar
        # One that contains itself, or that no person wrote, is a value.
        is_value = id(value) in parents or len(parents) == _MAX_DEPTH
        return _text(value) if is_value else _parts(value, (*parents, id(value)))
    except Exception as error:  # noqa: BLE001 - a user's own __str__ or __len__ must not stop the training
        return f"<{type(value).__qualname__}: {type(error).__name__}>"


def _scalar(value: object) -> object:
    """Return the value as one of Python's own plain ones, or as it is where it is none."""
    if isinstance(value, enum.Enum):
        return value.name
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # NumPy's float, torch's version
            return kind(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a tensor or an array of one number
        return _scalar(value.item())
    return value


def _parts(value: object, parents: tuple[int, ...]) -> Any:
    mapping: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        mapping = value
    elif isinstance(value, Namespace):
        mapping = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        mapping = {field.name: getattr(value, field.name, None) for field in fields(value)}
    if mapping is not None:
        return {_key(key): _plain(_get(mapping, key), parents) for key in mapping}
    if isinstance(value, list | tuple | MutableSequence):
        return [_plain(_get(value, index), parents) for index in range(len(value))]
    if isinstance(value, AbstractSet):
        return [_plain(each, parents) for each in sorted(value, key=_text)]
    return _text(value)


def _key(key: object) -> Any:
    scalar = _scalar(key)
    return scalar if scalar is None or isinstance(scalar, bool | int | float | str) else _text(key)


def _get(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except Exception as error:  # noqa: BLE001 - OmegaConf raises on access for a value that is missing
        return f"<{type(error).__name__}>"


def _text(value: Any) -> str:
    is_named = isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))
    return f"{value.__module__}.{value.__qualname__}" if is_named else str(value)
