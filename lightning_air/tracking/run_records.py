"""What a run keeps beside its metrics: parameters, the configuration, checkpoints, and what went wrong with values.

All of it goes through one background thread, in order; training waits for none of it.
"""

import time
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient
from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException

from lightning_air._lightning import ModelCheckpoint, Trainer
from lightning_air.tracking.artifacts import (
    config_artifact,
    events_artifact,
    hyperparameters_artifact,
    log_set_aside,
    log_text,
    plain,
)
from lightning_air.tracking.background import Background
from lightning_air.tracking.checkpoint_records import (
    CheckpointHistory,
    CheckpointRecord,
    CheckpointUploads,
    Sighting,
    look_at,
)
from lightning_air.tracking.door_errors import Refused
from lightning_air.tracking.flat_params import flatten_params
from lightning_air.tracking.metric_names import renamed_warning
from lightning_air.tracking.params import change_tags, left_out_warning, param_batches, plan_params
from lightning_air.tracking.run_opening import OpenRun
from lightning_air.tracking.upload_errors import trouble_of
from lightning_air.tracking.warn_once import Warn
from lightning_air.tracking.window import Event

_MAX_BATCH_TAGS = 100
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
        self._params, self._tags = dict(run.params), dict(run.tags)  # the background thread's
        self._history = CheckpointHistory() if checkpoints is None else CheckpointHistory.from_snapshot(checkpoints)
        self._uploads = CheckpointUploads(log_model, pin_name=f".uploads-{run.run_id[:8]}", warn=warn)
        # Not each in a call of its own: the list takes the place of one that waits, before what was seen since then.
        self._sightings: deque[tuple[Sighting | str, float]] = deque()
        self._hyperparameters: list[Any] = []  # each once
        self._events: list[Event] = []  # the writer's thread's
        self._refusal = ""  # the background thread's

    def reopen(self, run: OpenRun, background: Background) -> None:
        """Go on in a later stage of training; what belongs to the attempt stays."""
        self._background = background
        self._params, self._tags = dict(run.params), dict(run.tags)

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
            self._background.submit("parameters", lambda flat=flat: self._send_params(flat))  # type: ignore[misc]
            if (now := plain(each)) not in self._hyperparameters:
                self._hyperparameters.append(now)
        if params:
            known = list(self._hyperparameters)
            self._background.submit(
                "hyperparameters.yaml", lambda: self._send_hyperparameters(known), replaces="hyperparameters"
            )

    def _send_hyperparameters(self, known: Sequence[Any]) -> None:
        artifact = hyperparameters_artifact(known[0] if len(known) == 1 else known, self._attempt)
        log_text(self._client, self._run_id, artifact)

    def _send_params(self, flat: Mapping[str, str]) -> None:
        plan = plan_params(flat, self._params)
        if not all(self._takes(batch) for batch in param_batches(plan.new)):
            # Somebody else, such as autologging, has logged one with another value, or one is never taken.
            self._params |= self._client.get_run(self._run_id).data.params
            plan = plan_params(flat, self._params)
            for batch in param_batches(plan.new):
                self._send_what_it_takes(list(batch.items()))
        self._send_tags(change_tags(plan, self._tags))
        if plan.renamed:
            text = renamed_warning("parameter", plan.renamed)
            self._warn(text, text)
        if (text_or_none := left_out_warning(plan)) is not None:
            self._warn(text_or_none, text_or_none)

    def _takes(self, batch: Mapping[str, str]) -> bool:
        """Send parameters; return False if the server refuses them."""
        try:
            self._client.log_batch(self._run_id, params=[Param(key, value) for key, value in batch.items()])
        except MlflowException as error:
            trouble = trouble_of(error)
            if not (isinstance(trouble, Refused) and trouble.blames_content):
                raise
            self._refusal = str(trouble)
            return False
        self._params |= batch
        return True

    def _send_what_it_takes(self, params: Sequence[tuple[str, str]]) -> None:
        if self._takes(dict(params)):
            return
        if len(params) > 1:
            self._send_what_it_takes(params[: len(params) // 2])
            self._send_what_it_takes(params[len(params) // 2 :])
            return
        [(key, value)] = params
        self._warn(
            f"parameter {key}",
            f"MLflow refuses the parameter {key!r} = {value[:80]!r} ({self._refusal}); it stands only in "
            "hyperparameters.yaml among the run's artifacts.",
        )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags, as far as they are not set yet."""
        self._background.submit("tags", lambda: self._send_tags(tags))

    def _send_tags(self, tags: Mapping[str, str]) -> None:
        changed = [(key, value) for key, value in tags.items() if self._tags.get(key) != value]
        for start in range(0, len(changed), _MAX_BATCH_TAGS):
            batch = dict(changed[start : start + _MAX_BATCH_TAGS])
            self._client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in batch.items()])
            self._tags |= batch

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
            self._background.submit(
                artifact.path,
                lambda artifact=artifact: log_text(self._client, self._run_id, artifact),  # type: ignore[misc]
            )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def note_checkpoint(self, callback: ModelCheckpoint) -> None:
        """Note what a callback has saved, and upload it if the user wants it."""
        self._sightings.append((look_at(callback), time.time()))
        self._background.submit("the checkpoints' list", self._send_checkpoints, replaces="checkpoints")
        for upload in self._uploads.after_save(callback):
            self._background.submit(
                f"checkpoint {upload.path}",
                lambda upload=upload: upload.send(self._client, self._run_id),  # type: ignore[misc]
                replaces=upload.path,
            )

    def note_resumed(self, path: str) -> None:
        """Note the checkpoint that training resumes from."""
        self._sightings.append((path, time.time()))
        self._background.submit("a checkpoint's record", self._take_sightings)

    def _take_sightings(self) -> None:
        while self._sightings:
            seen, seconds = self._sightings.popleft()
            if isinstance(seen, str):
                self._history.add_path(seen, seconds=seconds)
            else:
                self._history.add(seen, seconds=seconds)

    def _send_checkpoints(self) -> None:
        self._take_sightings()
        self._send_tags(self._history.tags())
        log_text(self._client, self._run_id, self._history.artifact())

    # ---- what went wrong ---------------------------------------------------------------------------------------------

    def note_events(self, events: Sequence[Event]) -> None:
        """Keep values that are not finite, as an artifact. On the writer's thread."""
        self._events += events[: _MAX_EVENTS - len(self._events)]
        artifact = events_artifact(self._events, self._attempt)
        self._background.submit(
            artifact.path, lambda: log_text(self._client, self._run_id, artifact), replaces=artifact.path
        )

    def finish(self, spool_folder: Path) -> None:
        """Send what is due at the end: refused points, and checkpoints' files."""
        for upload in self._uploads.at_end():
            self._background.submit(
                f"checkpoint {upload.path}",
                lambda upload=upload: upload.send(self._client, self._run_id),  # type: ignore[misc]
                replaces=upload.path,
            )
        self._background.submit(
            "refused points", lambda: log_set_aside(self._client, self._run_id, spool_folder, self._attempt)
        )
