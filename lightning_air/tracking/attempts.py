"""The attempts of one job: which is the how-manieth, what it resumed from, and what a roll-back leaves behind.

A scheduler starts a job again without telling that it does. So each attempt marks its run with the name of the job, and
counts the earlier ones that it finds in the experiment: they compare side by side in the UI.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from lightning_air.runtime import JobRun
from lightning_air.tracking.run_tags import TAG_PREFIX
from lightning_air.tracking.texts import MAX_TAG_LENGTH, storable

LAUNCH_ID = uuid4().hex
"""Of this process, or of the one it was forked from: the runs that one process makes belong to one attempt."""

ROLLED_BACK_TAG = f"{TAG_PREFIX}rolled_back"

_SCHEDULER_TAG = f"{TAG_PREFIX}scheduler"
_JOB_TAG = f"{TAG_PREFIX}job_run_id"
ATTEMPT_TAG = f"{TAG_PREFIX}attempt"
LAUNCH_TAG = f"{TAG_PREFIX}launch_id"
_RESUMED_TAG = f"{TAG_PREFIX}resumed_from"
_SYSTEM_METRICS = "system/"
_MAX_RUNS = 1_000


class Attempt(NamedTuple):
    """A run that an earlier or this attempt made.

    Attributes:
        run_id: Of the run.
        ordinal: 1 for the first attempt.
        launch_id: Of the process that made it.
    """

    run_id: str
    ordinal: int
    launch_id: str


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a training goes on from.

    Attributes:
        run_id: The run that it was saved in; None where it does not tell.
        step: On the horizontal axis of the curves.
        path: Of the checkpoint; None where it is not known.
    """

    run_id: str | None
    step: int
    path: str | None = None


def find_attempts(client: MlflowClient, experiment_id: str, job: JobRun) -> list[Attempt]:
    """Return the runs in the experiment that belong to the job, deleted ones too, latest first; one request.

    Raises:
        MlflowException: The server cannot be asked.
    """
    runs = client.search_runs(
        [experiment_id],
        filter_string=f"tags.`{_JOB_TAG}` = '{_job_id(job)}' and tags.`{_SCHEDULER_TAG}` = '{job.scheduler}'",
        run_view_type=ViewType.ALL,
        max_results=_MAX_RUNS,
        order_by=["attributes.start_time DESC"],
    )
    tags = [(run.info.run_id, run.data.tags) for run in runs]
    return [
        Attempt(run_id, int(has[ATTEMPT_TAG]), has.get(LAUNCH_TAG, ""))
        for run_id, has in tags
        if has.get(ATTEMPT_TAG, "").isdecimal()
    ]


def attempt_ordinal(earlier: Iterable[Attempt], launch_id: str = LAUNCH_ID) -> int:
    """Return which attempt this is: one after the latest of other launches.

    Args:
        earlier: From `find_attempts`.
        launch_id: Runs with this one are of the same attempt.
    """
    return 1 + max((attempt.ordinal for attempt in earlier if attempt.launch_id != launch_id), default=0)


def attempt_tags(
    job: JobRun | None, ordinal: int, resumed_from: ResumePoint | None = None, launch_id: str = LAUNCH_ID
) -> dict[str, str]:
    """Return the tags that link the run of an attempt to its job and to what it resumed from.

    Args:
        job: None outside of a job that anything starts again.
        ordinal: From `attempt_ordinal`.
        resumed_from: None for a training from scratch.
        launch_id: Of this process.
    """
    tags = {LAUNCH_TAG: launch_id}
    if job is not None:
        tags |= {_SCHEDULER_TAG: job.scheduler, _JOB_TAG: _job_id(job), ATTEMPT_TAG: str(ordinal)}
    if resumed_from is not None:
        tags[f"{_RESUMED_TAG}.step"] = str(resumed_from.step)
        if resumed_from.run_id is not None:
            tags[f"{_RESUMED_TAG}.run_id"] = storable(resumed_from.run_id, MAX_TAG_LENGTH)
        if resumed_from.path is not None:
            tags[f"{_RESUMED_TAG}.path"] = storable(resumed_from.path, MAX_TAG_LENGTH)
    return tags


def resumed_sentence(resumed_from: ResumePoint | None, *, run_id: str, ordinal: int = 1) -> str:
    """Say for the user which attempt this is and where it goes on.

    Args:
        resumed_from: None for a training from scratch.
        run_id: The run that is logged into now.
        ordinal: From `attempt_ordinal`.
    """
    attempt = f"Attempt {ordinal}: " if ordinal > 1 else ""
    if resumed_from is None:
        return f"{attempt}training from the start."
    where = f" ({resumed_from.path})" if resumed_from.path is not None else ""
    source = "of an unknown run" if resumed_from.run_id is None else f"of the run {resumed_from.run_id}"
    source = "of this run" if resumed_from.run_id == run_id else source
    return f"{attempt}resumed from step {resumed_from.step} {source}{where}."


def latest_steps(run: Run) -> dict[str, int]:
    """Return the step of the value that the server shows as the latest of each metric."""
    return {metric.key: metric.step for metric in run.data.to_proto().metrics}


def latest_moments(run: Run) -> dict[str, tuple[int, int]]:
    """Return the time in ms and the step of the value that the server shows as the latest of each metric."""
    return {metric.key: (metric.timestamp, metric.step) for metric in run.data.to_proto().metrics}


def metrics_beyond(latest: Mapping[str, int], resumed_step: int) -> tuple[str, ...]:
    """Return the metrics whose latest value is from after the step that the training resumed at.

    The server shows the value at the highest step as the latest, so theirs comes from the abandoned part of the
    curve until the training passes that step. The platform's own system metrics, which count samples, are left out.

    Args:
        latest: Metric to the step of its latest value.
        resumed_step: The last step that still counts.
    """
    beyond = (key for key, step in latest.items() if step > resumed_step and not key.startswith(_SYSTEM_METRICS))
    return tuple(sorted(beyond))


def rolled_back(latest: Mapping[str, int], resumed_step: int) -> int | None:
    """Return the step that a continued run had reached, if it goes on from an earlier one; None otherwise.

    Args:
        latest: Metric to the step of its latest value.
        resumed_step: Where the run goes on.
    """
    return max((latest[key] for key in metrics_beyond(latest, resumed_step)), default=None)


def rolled_back_value(previous: str | None, from_step: int, to_step: int, seconds: float) -> str:
    """Return the value of `ROLLED_BACK_TAG` after one more roll-back: "1200->1000 at 2026-11-30T20:24:14Z; …".

    Args:
        previous: Its value before; None if there is none. The oldest go when it grows too long.
        from_step: What had been reached.
        to_step: Where the training resumes.
        seconds: When, since 1970.
    """
    time = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entries: Sequence[str] = [*(previous or "").split("; "), f"{from_step}->{to_step} at {time}"]
    while len(value := "; ".join(filter(None, entries))) > MAX_TAG_LENGTH:
        entries = entries[1:]
    return value


def _job_id(job: JobRun) -> str:
    # torchrun's is free text, and a search has no way to escape a quote in it.
    return re.sub(r"[^\w.:@/-]", "_", job.id)[:250]
