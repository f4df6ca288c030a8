"""What a run keeps beside its metrics: parameters, the configuration, checkpoints, and what went wrong with values.

All of it goes through one background thread, in order; training waits for none of it.
"""

import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient

from lightning_air._lightning import ModelCheckpoint, Trainer
from lightning_air.tracking.artifacts import (
    TextArtifact,
    config_artifact,
    events_artifact,
    hyperparameters_artifact,
    log_set_aside,
    log_text,
    outbox_of,
    plain,
    set_aside_outbox,
)
from lightning_air.tracking.background import Background
from lightning_air.tracking.checkpoint_records import (
    CheckpointHistory,
    CheckpointRecord,
    CheckpointUpload,
    CheckpointUploads,
    Sighting,
    look_at,
)
from lightning_air.tracking.flat_params import flatten_params
from lightning_air.tracking.outbox import Outbox
from lightning_air.tracking.params_and_tags import ParamsAndTags
from lightning_air.tracking.run_opening import OpenRun
from lightning_air.tracking.warn_once import Warn
from lightning_air.tracking.window import Event

_MAX_EVENTS = 10_000


class RunRecords:
    """The records of one open run. Training thread, but where a method says otherwise.

    Args:
        client: To the server.
        run: As it was opened.
        background: What talks to the server.
        attempt: The folder of this attempt in the run's artifacts.
        log_model: As the logger's option.
        checkpoints: From `snapshot`, of the checkpoint that is resumed from; None for none.
        warn: Told of trouble.
    """

    def __init__(
        self,
        client: MlflowClient,
        run: OpenRun,
        background: Background,
        *,
        attempt: str,
        log_model: bool | Literal["all"],
        checkpoints: Mapping[str, Any] | None,
        warn: Warn,
    ) -> None:
        self._client = client
        self._run_id = run.run_id
        self._background = background
        self._attempt = attempt
        self._warn = warn
        self._values = self._values_of(run)  # the background thread's
        self._history = CheckpointHistory() if checkpoints is None else CheckpointHistory.from_snapshot(checkpoints)
        self._uploads = CheckpointUploads(log_model, pin_name=f".uploads-{run.run_id[:8]}", warn=warn)
        # Not each in a call of its own: the list takes the place of one that waits, before what was seen since then.
        self._sightings: deque[tuple[Sighting | str, float]] = deque()
        self._hyperparameters: list[Any] = []  # each once
        self._events: list[Event] = []  # the writer's thread's

    def reopen(self, run: OpenRun, background: Background) -> None:
        """Go on in a later stage of training; what belongs to the attempt stays."""
        self._background = background
        self._values = self._values_of(run)

    def _values_of(self, run: OpenRun) -> ParamsAndTags:
        return ParamsAndTags(self._client, run.run_id, run.params, run.tags, warn=self._warn)

    @property
    def best_checkpoint(self) -> CheckpointRecord | None:
        """The best one so far."""
        return self._history.best

    def snapshot(self) -> dict[str, Any]:
        """Return what a later attempt is to know, as a checkpoint can have it."""
        return self._history.snapshot()

    # ---- parameters, tags, configuration ----------------------------------------------------------------------------

    def log_params(self, params: Sequence[dict[str, Any] | Namespace]) -> None:
        """Record parameters: new ones as such, changed ones as tags, and all of them as an artifact."""
        for each in params:
            flat = flatten_params(each)
            self._background.submit(
                "parameters",
                lambda flat=flat: self._values.send_params(flat),  # type: ignore[misc]
                note=lambda flat=flat: Outbox(params=flat),  # type: ignore[misc]
            )
            if (now := plain(each)) not in self._hyperparameters:
                self._hyperparameters.append(now)
        if params:
            known = list(self._hyperparameters)
            self._submit_text(
                "hyperparameters.yaml",
                lambda: hyperparameters_artifact(known[0] if len(known) == 1 else known, self._attempt),
                replaces="hyperparameters",
            )

    def _submit_text(self, name: str, artifact: Callable[[], TextArtifact], *, replaces: str | None = None) -> None:
        """Have a text uploaded; it is made on the background thread, each time that it is needed."""
        self._background.submit(
            name,
            lambda: log_text(self._client, self._run_id, artifact()),
            replaces=replaces,
            note=lambda: outbox_of(artifact()),
        )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags, as far as they are not set yet."""
        self._background.submit("tags", lambda: self._values.send_tags(tags), note=lambda: Outbox(tags=tags))

    def log_config(self, trainer: Trainer) -> None:
        """Keep LightningCLI's whole configuration, if the Trainer was made by it."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set by Trainer's callback connector
            parser, config = getattr(callback, "parser", None), getattr(callback, "config", None)
            if parser is None or config is None or not callable(getattr(parser, "dump", None)):
                continue
            try:
                text = parser.dump(config, skip_none=False)
            except Exception as error:  # noqa: BLE001 - a value that YAML cannot have must not stop the training
                self._warn("config", f"The configuration cannot be kept with the run: {error}")
                continue
            artifact = config_artifact(text, self._attempt)
            self._submit_text(artifact.path, lambda artifact=artifact: artifact)  # type: ignore[misc]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def note_checkpoint(self, callback: ModelCheckpoint) -> None:
        """Note what a callback has saved, and upload it if the user wants it."""
        self._sightings.append((look_at(callback), time.time()))
        self._background.submit(
            "the checkpoints' list", self._send_checkpoints, replaces="checkpoints", note=self._note_of_checkpoints
        )
        self._upload(self._uploads.after_save(callback))

    def _upload(self, uploads: Sequence[CheckpointUpload]) -> None:
        for upload in uploads:
            self._background.submit(
                f"checkpoint {upload.path}",
                lambda upload=upload: upload.send(self._client, self._run_id),  # type: ignore[misc]
                replaces=upload.path,
                note=upload.outbox,
            )

    def note_resumed(self, path: str) -> None:
        """Note the checkpoint that training resumes from."""
        self._sightings.append((path, time.time()))
        self._background.submit("a checkpoint's record", self._take_sightings, note=self._note_of_checkpoints)

    def _take_sightings(self) -> None:
        while True:
            try:
                seen, seconds = self._sightings.popleft()
            except IndexError:  # all are taken, perhaps by the other thread
                return
            if isinstance(seen, str):
                self._history.add_path(seen, seconds=seconds)
            else:
                self._history.add(seen, seconds=seconds)

    def _send_checkpoints(self) -> None:
        self._take_sightings()
        self._values.send_tags(self._history.tags())
        log_text(self._client, self._run_id, self._history.artifact())

    def _note_of_checkpoints(self) -> Outbox:
        self._take_sightings()
        return Outbox(tags=self._history.tags()).plus(outbox_of(self._history.artifact()))

    # ---- what went wrong ---------------------------------------------------------------------------------------------

    def note_events(self, events: Sequence[Event]) -> None:
        """Keep values that are not finite, as an artifact. On the writer's thread."""
        self._events += events[: _MAX_EVENTS - len(self._events)]
        artifact = events_artifact(self._events, self._attempt)
        self._submit_text(artifact.path, lambda: artifact, replaces=artifact.path)

    def finish(self, spool_folder: Path) -> None:
        """Send what is due at the end: refused points, and checkpoints' files."""
        self._upload(self._uploads.at_end())
        self._background.submit(
            "refused points",
            lambda: log_set_aside(self._client, self._run_id, spool_folder, self._attempt),
            note=lambda: set_aside_outbox(spool_folder, self._attempt),
        )
