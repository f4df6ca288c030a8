"""Make the run that was chosen, or adopt it: RUNNING while we train, with the tags of this attempt."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities import Run, RunTag

from lightning_air.tracking.attempts import latest_moments
from lightning_air.tracking.run_identity import RunChoice

_PARENT_TAG = "mlflow.parentRunId"
_NAME_TAG = "mlflow.runName"
_MLFLOW_TAGS = "mlflow."
_MAX_BATCH_TAGS = 100
_ENDED = {"FINISHED", "FAILED", "KILLED"}


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that is RUNNING.

    Attributes:
        run_id: Its number.
        experiment_id: Its experiment.
        name: As the UI shows it.
        artifact_uri: Where its artifacts are.
        params: What it had when it was opened.
        tags: What it has now.
        is_new: It was made now.
        latest: Time in ms and step of the latest value of each metric that it had when it was opened.
        had_ended: An adopted run that was not RUNNING.
        warnings: What the user may not have expected.
    """

    run_id: str
    experiment_id: str
    name: str
    artifact_uri: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    latest: Mapping[str, tuple[int, int]]
    is_new: bool
    had_ended: bool
    warnings: tuple[str, ...]


def open_run(
    client: MlflowClient,
    choice: RunChoice,
    *,
    experiment_id: str | None,
    run_name: str | None = None,
    tags: Mapping[str, str],
) -> OpenRun:
    """Make the chosen run, or adopt it: it is RUNNING then, keeps its name, and what MLflow itself noted of its origin.

    Args:
        client: Of the tracking server.
        choice: From `choose_run`.
        experiment_id: For a run to be made, unless the choice says where.
        run_name: Of a run to be made; None leaves the name to the server.
        tags: Of the run.

    Raises:
        ValueError: A run has to be made, and nobody said in which experiment.
        MlflowException: The server refuses, or cannot be asked.
    """
    if choice.run_id is not None:
        return _adopt(client, client.get_run(choice.run_id), run_name, tags)
    where = choice.experiment_id or experiment_id
    if where is None:
        raise ValueError(f"A {choice.kind} run needs an experiment, got experiment_id=None. Pass the experiment's.")
    all_tags = dict(tags)
    if run_name is not None:
        all_tags.pop(_NAME_TAG, None)  # MLflow refuses two names
    if choice.parent_run_id is not None:
        all_tags[_PARENT_TAG] = choice.parent_run_id
    run = client.create_run(where, tags=all_tags, run_name=run_name)
    return _opened(run, run.data.tags, is_new=True)


def _adopt(client: MlflowClient, run: Run, run_name: str | None, tags: Mapping[str, str]) -> OpenRun:
    has = run.data.tags
    missing = {
        key: value
        for key, value in tags.items()
        if has.get(key) != value and not (key.startswith(_MLFLOW_TAGS) and key in has)
    }
    # The status first: nobody may take for ended what trains, as when a retry continues the run of a killed attempt.
    if run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")
    for batch in _batches(missing):
        client.log_batch(run.info.run_id, tags=batch)
    warning = f"The run keeps its name {run.info.run_name!r}; run_name={run_name!r} names new runs only."
    is_misnamed = run_name is not None and run_name != run.info.run_name
    return _opened(run, {**has, **missing}, warnings=(warning,) if is_misnamed else ())


def _batches(tags: Mapping[str, str]) -> Iterator[list[RunTag]]:
    run_tags = [RunTag(key, value) for key, value in tags.items()]
    for start in range(0, len(run_tags), _MAX_BATCH_TAGS):
        yield run_tags[start : start + _MAX_BATCH_TAGS]


def _opened(run: Run, tags: Mapping[str, str], *, is_new: bool = False, warnings: tuple[str, ...] = ()) -> OpenRun:
    return OpenRun(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        name=run.info.run_name,
        artifact_uri=run.info.artifact_uri,
        params=run.data.params,
        tags=tags,
        latest=latest_moments(run),
        is_new=is_new,
        had_ended=run.info.status in _ENDED,
        warnings=warnings,
    )
