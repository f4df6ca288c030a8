"""The user is told where to look, and what has become of the run."""

from typing import Any

import pytest

from lightning_air.runtime import JobRun
from lightning_air.tracking.checkpoint_records import CheckpointRecord
from lightning_air.tracking.summary import RunPlace, end_text, job_url, links, run_url, start_text
from lightning_air.tracking.writer import WriterStats

WORKSPACE = "https://dbc-1.cloud.databricks.com"


def place(tracking_uri: str = "https://mlflow.test", **options: Any) -> RunPlace:
    return RunPlace(tracking_uri=tracking_uri, experiment_id="12", run_id="ab34", **options)


def stats(**numbers: Any) -> WriterStats:
    none: dict[str, Any] = dict.fromkeys(WriterStats.__dataclass_fields__, 0)
    return WriterStats(**(none | {"last_error": None} | numbers))


@pytest.mark.parametrize(
    ("where", "url"),
    [
        (place(), "https://mlflow.test/#/experiments/12/runs/ab34"),
        (place("http://user:secret@host:5000/"), "http://host:5000/#/experiments/12/runs/ab34"),
        (place("databricks", workspace_url=WORKSPACE), f"{WORKSPACE}/ml/experiments/12/runs/ab34"),
        (place("databricks://profile", workspace_url=f"{WORKSPACE}/"), f"{WORKSPACE}/ml/experiments/12/runs/ab34"),
        (place("databricks"), None),
        (place("sqlite:////data/mlflow.db"), None),
        (place("./mlruns", workspace_url=WORKSPACE), None),
    ],
)
def test_run_url(where: RunPlace, url: str | None) -> None:
    assert run_url(where) == url


def test_links_on_databricks() -> None:
    where = place(
        "databricks",
        workspace_url=WORKSPACE,
        experiment_name="/Users/me@x.com/train",
        run_name="quick-owl",
        job=JobRun("databricks", "987"),
    )
    assert links(where) == [
        f"Experiment /Users/me@x.com/train: {WORKSPACE}/ml/experiments/12",
        f"Run quick-owl: {WORKSPACE}/ml/experiments/12/runs/ab34",
        f"Job run 987: {WORKSPACE}/jobs/runs/987",
    ]
    assert job_url(place(workspace_url=WORKSPACE, job=JobRun("slurm", "1"))) is None


def test_links_without_the_workspace() -> None:
    assert links(place("databricks", job=JobRun("databricks", "987"))) == [
        "Experiment 12: number 12 in the workspace of 'databricks'",
        "Run ab34: number ab34",
        "Job run 987: databricks",
    ]


def test_links_of_a_database() -> None:
    assert links(place("sqlite:////my data/mlflow.db", job=JobRun("slurm", "5"))) == [
        "Experiment 12: mlflow ui --backend-store-uri 'sqlite:////my data/mlflow.db'",
        "Run ab34: http://127.0.0.1:5000/#/experiments/12/runs/ab34",
        "Job run 5: slurm",
    ]
    assert "secret" not in "".join(links(place("postgresql://me:secret@host/db")))


def test_start() -> None:
    plan = "one point per step; 0 of 10M metric steps used; lasts for 700 metrics, however long the run is"
    text = start_text(place(), resumed="Attempt 2: resumed from step 100 of the run 77.", plan=plan)
    assert text.splitlines()[2:] == ["Attempt 2: resumed from step 100 of the run 77.", f"Metrics: {plan}."]
    assert len(start_text(place(), resumed=None, plan=plan).splitlines()) == 3


def test_end_when_all_is_well() -> None:
    text = end_text(
        place(run_name="quick-owl"),
        status="FINISHED",
        stats=stats(num_sent=12_345, num_thinned=1_000),
        budget="12.3k of 10M metric steps used",
        seconds_blocked=0.4567,
        best=CheckpointRecord(path="/c/step=8.ckpt", saved_seconds=1.0, step=8, score=0.25, monitor="val_loss"),
    )
    assert text.splitlines() == [
        "Run quick-owl: FINISHED, https://mlflow.test/#/experiments/12/runs/ab34",
        "Metrics: 12,345 points sent, 1,000 values thinned; 12.3k of 10M metric steps used; training waited 0.46 s.",
        "All of it is on the server.",
        "Best checkpoint: /c/step=8.ckpt (val_loss 0.25, step 8)",
    ]


def test_end_when_not() -> None:
    numbers = stats(
        num_set_aside=3,
        num_pending_points=5,
        num_pending_records=70,
        num_over_budget=4_816,
        num_cut=12,
        num_dropped=9,
        num_lost=8,
        num_damaged=2,
        last_error="Connection refused",
    )
    text = end_text(
        place("sqlite:///mlflow.db"),
        status="FAILED",
        stats=numbers,
        budget="0 of 10M metric steps used",
        seconds_blocked=3_600.0,
        best=CheckpointRecord(path="/c/last.ckpt", saved_seconds=1.0),
        kept=["logs/node_0/stdout.log"],
    )
    assert text.splitlines() == [
        "Run ab34: FAILED",
        "Metrics: 0 points sent, 0 values thinned; 0 of 10M metric steps used; training waited 3,600.00 s.",
        (
            "Not on the server: 3 points set aside, which the server refuses; "
            "5 points and 70 records pending, kept for the next attempt or `lightning-air replay` (Connection refused)"
            "; 4,816 values and 12 points dropped by the budget of metric steps, which is used up"
            "; 9 records dropped for want of disk space; 8 records lost with files that something has deleted"
            "; records at 2 places that the disk has damaged."
        ),
        "Best checkpoint: /c/last.ckpt",
        "Kept for the next attempt or `lightning-air replay`: logs/node_0/stdout.log.",
    ]
