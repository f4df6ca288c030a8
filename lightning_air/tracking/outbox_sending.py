"""Send what an outbox holds, piece by piece: what has arrived, or is refused for good, leaves it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from lightning_air.tracking.artifacts import FileUpload, TextArtifact, log_text
from lightning_air.tracking.attempts import LAUNCH_TAG
from lightning_air.tracking.door_errors import Refused
from lightning_air.tracking.full_record import send_record
from lightning_air.tracking.outbox import OUTPUT_FOLDER, Addressed, Ending, Outbox, remove_outbox, write_outbox
from lightning_air.tracking.params_and_tags import ParamsAndTags
from lightning_air.tracking.upload_errors import trouble_of
from lightning_air.tracking.warn_once import Warn

_OPEN = {"RUNNING", "SCHEDULED"}


def send_outbox(folder: Path, addressed: Addressed, client: MlflowClient, *, warn: Warn) -> None:
    """Send what is in a folder's outbox, the end of the run last; the outbox goes when all has.

    Args:
        folder: The run's spool, which nobody else changes meanwhile.
        addressed: What it has.
        client: Of the server to send it to.
        warn: Told of what the server refuses, which is given up then.

    Raises:
        Exception: Whatever MLflow, or what it uploads with, raises where to try again may help, or where the run is
            gone; the rest stays in the outbox.
    """
    run = client.get_run(addressed.run_id)
    if run.info.lifecycle_stage == "deleted":
        raise RuntimeError(f"the run is deleted; MlflowClient().restore_run({addressed.run_id!r}) restores it")
    sending = _Sending(folder, addressed, client, warn)
    values = ParamsAndTags(client, addressed.run_id, run.data.params, run.data.tags, warn=warn)
    left = addressed.outbox
    if left.params:
        sending.do("parameters", lambda: values.send_params(addressed.outbox.params), replace(left, params={}))
    if left.tags:
        sending.do("tags", lambda: values.send_tags(addressed.outbox.tags), replace(sending.left, tags={}))
    for path, text in left.texts.items():
        artifact = TextArtifact(path, text)
        texts = {key: value for key, value in sending.left.texts.items() if key != path}
        sending.do(
            path,
            lambda artifact=artifact: log_text(client, addressed.run_id, artifact),  # type: ignore[misc]
            replace(sending.left, texts=texts),
        )
    for source, target in left.files:
        upload = FileUpload(Path(source), target)
        sending.do(
            source,
            lambda upload=upload: upload.send(client, addressed.run_id),  # type: ignore[misc]
            replace(sending.left, files=tuple(each for each in sending.left.files if each[0] != source)),
        )
        if Path(source).parent == folder.absolute() / OUTPUT_FOLDER:  # the only copy, which nobody needs any more
            Path(source).unlink(missing_ok=True)
    if left.has_record:
        sending.do(
            "the full record of metrics",
            lambda: send_record(client, addressed.run_id, folder),
            replace(sending.left, has_record=False),
        )
    if left.ending is not None:
        sending.do("the run's end", _ending(client, run, left.ending), replace(sending.left, ending=None))
    remove_outbox(folder)


class _Sending:
    def __init__(self, folder: Path, addressed: Addressed, client: MlflowClient, warn: Warn) -> None:
        self.left = addressed.outbox
        self._folder, self._addressed, self._client, self._warn = folder, addressed, client, warn

    def do(self, name: str, call: Callable[[], object], rest: Outbox) -> None:
        """Send a piece; `rest` is what is left then."""
        try:
            call()
        except Exception as error:
            trouble = trouble_of(error)
            if not isinstance(trouble, Refused):
                raise
            self._warn(
                f"outbox {name}",
                f"The run {self._addressed.run_id} has not got {name}, left by an earlier attempt: {trouble}",
            )
        self.left = rest
        write_outbox(self._folder, replace(self._addressed, outbox=rest))


def _ending(client: MlflowClient, run: Run, ending: Ending) -> Callable[[], object]:
    """Return what ends a run, unless it has ended, or goes on in another process."""
    is_ours = run.data.tags.get(LAUNCH_TAG, ending.launch_id) == ending.launch_id
    if run.info.status not in _OPEN or not is_ours:
        return lambda: None
    return lambda: client.set_terminated(run.info.run_id, ending.status, end_time=ending.time_ms)
