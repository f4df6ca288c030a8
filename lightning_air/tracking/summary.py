"""What the user is told when a run begins and when it ends: a few lines each."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_air.runtime import JobRun
from lightning_air.tracking.checkpoint_records import CheckpointRecord
from lightning_air.tracking.experiment import is_databricks_uri
from lightning_air.tracking.metric_names import examples
from lightning_air.tracking.writer import WriterStats

_USER_INFO = re.compile(r"(?<=//)[^/@\s]+@")
_LOCAL_UI = "http://127.0.0.1:5000"  # where `mlflow ui` is by default


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where a run is to be seen.

    Attributes:
        tracking_uri: Of its server.
        experiment_id: Its experiment's number.
        run_id: Its number.
        experiment_name: As people call it; None if nobody knows.
        run_name: As people call it; None if nobody knows.
        workspace_url: Of the Databricks workspace, "https://host"; None if nobody knows.
        job: What a scheduler calls this submission.
    """

    tracking_uri: str
    experiment_id: str
    run_id: str
    experiment_name: str | None = None
    run_name: str | None = None
    workspace_url: str | None = None
    job: JobRun | None = None


def experiment_url(place: RunPlace) -> str | None:
    """Return the address of the experiment's page; None where there is no server."""
    if is_databricks_uri(place.tracking_uri):
        host = _host(place)
        return None if host is None else f"{host}/ml/experiments/{place.experiment_id}"
    base = _server(place.tracking_uri)
    return None if base is None else f"{base}/#/experiments/{place.experiment_id}"


def run_url(place: RunPlace) -> str | None:
    """Return the address of the run's page; None where there is no server."""
    experiment = experiment_url(place)
    return None if experiment is None else f"{experiment}/runs/{place.run_id}"


def job_url(place: RunPlace) -> str | None:
    """Return the address of the job run's page; None if it is none of Databricks', or its workspace is not known."""
    host = _host(place)
    is_there = host is not None and place.job is not None and place.job.scheduler == "databricks"
    return f"{host}/jobs/runs/{place.job.id}" if is_there and place.job is not None else None


def links(place: RunPlace) -> list[str]:
    """Return where to look, one line each: the experiment, the run, the job; without a server, how to start one."""
    experiment = f"Experiment {place.experiment_name or place.experiment_id}"
    run = f"Run {place.run_name or place.run_id}"
    page, of_run = experiment_url(place), run_url(place)
    if page is not None and of_run is not None:
        lines = [f"{experiment}: {page}", f"{run}: {of_run}"]
    elif is_databricks_uri(place.tracking_uri):
        lines = [f"{experiment}: number {place.experiment_id} in the workspace of {place.tracking_uri!r}"]
        lines.append(f"{run}: number {place.run_id}")
    else:
        uri = shlex.quote(_USER_INFO.sub("", place.tracking_uri))
        shown = f"{_LOCAL_UI}/#/experiments/{place.experiment_id}/runs/{place.run_id}"
        lines = [f"{experiment}: mlflow ui --backend-store-uri {uri}", f"{run}: {shown}"]
    if place.job is not None:
        lines.append(f"Job run {place.job.id}: {job_url(place) or place.job.scheduler}")
    return lines


def start_text(place: RunPlace, *, resumed: str | None, plan: str) -> str:
    """Return what the user is told when training begins.

    Args:
        place: Of the run.
        resumed: From `attempts.resumed_sentence`; None says nothing.
        plan: The metric-step budget's, from `Thinner.plan`.
    """
    return "\n".join([*links(place), *([resumed] if resumed else []), f"Metrics: {plan}."])


def end_text(
    place: RunPlace,
    *,
    status: str,
    stats: WriterStats,
    budget: str,
    seconds_blocked: float,
    best: CheckpointRecord | None = None,
    kept: Sequence[str] = (),
    lost: Sequence[str] = (),
) -> str:
    """Return what the user is told when the run ends.

    Args:
        place: Of the run.
        status: MLflow's: FINISHED, FAILED or KILLED, with what is to be said of it.
        stats: The writer's, after it was closed.
        budget: What is used of it, from `Budget.describe` or `Thinner.plan`.
        seconds_blocked: How long training has waited for the logger.
        best: The best checkpoint; None where there is none.
        kept: Names of what did not arrive, and is sent by the next attempt.
        lost: Names of what did not arrive, and is not.
    """
    url = run_url(place)
    lines = [f"Run {place.run_name or place.run_id}: {status}{f', {url}' if url is not None else ''}"]
    lines.append(
        f"Metrics: {stats.num_sent:,} points sent, {stats.num_thinned:,} values thinned; "
        f"{budget}; training waited {seconds_blocked:,.2f} s."
    )
    lines += _losses(stats)
    if best is not None:
        lines.append(f"Best checkpoint: {best.path}{_score(best)}")
    if kept:
        lines.append(f"Kept for the next attempt or `lightning-air replay`: {examples(kept)}.")
    if lost:
        lines.append(f"Not done: {examples(lost)}.")
    return "\n".join(lines)


def _losses(stats: WriterStats) -> list[str]:
    """Return a line about all that is not on the server."""
    parts = []
    if stats.num_set_aside:
        parts.append(f"{stats.num_set_aside:,} points set aside, which the server refuses")
    if stats.num_pending_points or stats.num_pending_records:
        pending = f"{stats.num_pending_points:,} points and {stats.num_pending_records:,} records pending"
        reason = f" ({stats.last_error})" if stats.last_error is not None else ""
        parts.append(f"{pending}, kept for the next attempt or `lightning-air replay`{reason}")
    over = [f"{stats.num_over_budget:,} values"] if stats.num_over_budget else []
    over += [f"{stats.num_cut:,} points"] if stats.num_cut else []
    if over:
        parts.append(f"{' and '.join(over)} dropped by the budget of metric steps, which is used up")
    if stats.num_dropped:
        parts.append(f"{stats.num_dropped:,} records dropped for want of disk space")
    if stats.num_lost:
        parts.append(f"{stats.num_lost:,} records lost with files that something has deleted")
    if stats.num_damaged:
        parts.append(f"records at {stats.num_damaged:,} places that the disk has damaged")
    return [f"Not on the server: {'; '.join(parts)}."] if parts else ["All of it is on the server."]


def _score(record: CheckpointRecord) -> str:
    told = [] if record.score is None else [f"{record.monitor or 'score'} {record.score:.6g}"]
    told += [] if record.step is None else [f"step {record.step}"]
    return f" ({', '.join(told)})" if told else ""


def _server(tracking_uri: str) -> str | None:
    """Return the address of an MLflow server, without the password in it; None if the URI is none."""
    if not tracking_uri.startswith(("http://", "https://")):
        return None
    return _USER_INFO.sub("", tracking_uri).rstrip("/")


def _host(place: RunPlace) -> str | None:
    return None if place.workspace_url is None else place.workspace_url.rstrip("/")
