"""Attempts of one job find each other, and a roll-back shows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from lightning_air.runtime import JobRun
from lightning_air.tracking.attempts import (
    LAUNCH_ID,
    Attempt,
    ResumePoint,
    attempt_ordinal,
    attempt_tags,
    find_attempts,
    latest_steps,
    metrics_beyond,
    resumed_sentence,
    rolled_back,
    rolled_back_value,
)
from lightning_air.tracking.texts import MAX_TAG_LENGTH
from tests.tracking.local_store import MLFLOW_WARNING, local_client, new_experiment

law = settings(derandomize=True, deadline=None, database=None)

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")

JOB = JobRun("databricks", "77")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return local_client(tmp_path_factory)


def start(client: MlflowClient, experiment_id: str, job: JobRun, launch_id: str) -> tuple[str, int]:
    """What each attempt does at its start."""
    ordinal = attempt_ordinal(find_attempts(client, experiment_id, job), launch_id)
    run = client.create_run(experiment_id, tags=attempt_tags(job, ordinal, launch_id=launch_id))
    return run.info.run_id, ordinal


def test_attempts_count_up(client: MlflowClient) -> None:
    experiment_id = new_experiment(client, "retries")
    first, one = start(client, experiment_id, JOB, "a")
    client.set_terminated(first, "FAILED")
    second, two = start(client, experiment_id, JOB, "b")
    # A second training of the same process, as in a sweep, is no new attempt.
    sibling, still_two = start(client, experiment_id, JOB, "b")
    # Nobody gets the number of a run that was thrown away.
    client.delete_run(second)
    client.delete_run(sibling)
    _, three = start(client, experiment_id, JOB, "c")
    assert (one, two, still_two, three) == (1, 2, 2, 3)
    assert find_attempts(client, experiment_id, JOB)[-1] == Attempt(first, 1, "a")


def test_other_jobs_do_not_count(client: MlflowClient) -> None:
    experiment_id, other = new_experiment(client, "jobs"), new_experiment(client, "other")
    start(client, experiment_id, JOB, "a")
    assert start(client, experiment_id, JobRun("databricks", "78"), "b")[1] == 1
    assert start(client, experiment_id, JobRun("slurm", "77"), "b")[1] == 1
    assert start(client, other, JOB, "b")[1] == 1


@pytest.mark.parametrize("name", ["it's", 'a"b', "a'b\"c", "`x`; drop", "é" * 300, "%"])
def test_any_name_of_a_job_is_found(client: MlflowClient, name: str) -> None:
    experiment_id = new_experiment(client, f"named {name[:20]}")
    job = JobRun("torchrun", name)
    assert [start(client, experiment_id, job, launch)[1] for launch in "abc"] == [1, 2, 3]


def test_continued_run_counts_on(client: MlflowClient) -> None:
    experiment_id = new_experiment(client, "continued")
    run_id, _ = start(client, experiment_id, JOB, "a")
    assert attempt_ordinal(find_attempts(client, experiment_id, JOB), "b") == 2
    for key, value in attempt_tags(JOB, 2, launch_id="b").items():
        client.set_tag(run_id, key, value)
    assert attempt_ordinal(find_attempts(client, experiment_id, JOB), "c") == 3


def test_a_tag_that_somebody_changed_is_left_out(client: MlflowClient) -> None:
    experiment_id = new_experiment(client, "edited")
    run_id, _ = start(client, experiment_id, JOB, "a")
    client.set_tag(run_id, "lightning_air.attempt", "first")
    assert find_attempts(client, experiment_id, JOB) == []


@law
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc"))))
def test_ordinal_is_above_those_of_other_launches(earlier: list[tuple[int, str]]) -> None:
    attempts = [Attempt("run", ordinal, launch) for ordinal, launch in earlier]
    ordinal = attempt_ordinal(attempts, "a")
    assert ordinal >= 1
    assert all(attempt.ordinal < ordinal for attempt in attempts if attempt.launch_id != "a")


def test_tags_of_an_attempt() -> None:
    assert attempt_tags(None, 1) == {"lightning_air.launch_id": LAUNCH_ID}
    assert attempt_tags(JOB, 2, ResumePoint(run_id="r", step=100, path="/c/step=100"), "x") == {
        "lightning_air.launch_id": "x",
        "lightning_air.scheduler": "databricks",
        "lightning_air.job_run_id": "77",
        "lightning_air.attempt": "2",
        "lightning_air.resumed_from.step": "100",
        "lightning_air.resumed_from.run_id": "r",
        "lightning_air.resumed_from.path": "/c/step=100",
    }
    assert attempt_tags(None, 1, ResumePoint(run_id=None, step=3), "x") == {
        "lightning_air.launch_id": "x",
        "lightning_air.resumed_from.step": "3",
    }


@pytest.mark.parametrize(
    ("resumed_from", "ordinal", "sentence"),
    [
        (None, 1, "training from the start."),
        (None, 3, "Attempt 3: training from the start."),
        (ResumePoint(run_id="old", step=9, path="/c"), 2, "Attempt 2: resumed from step 9 of the run old (/c)."),
        (ResumePoint(run_id="now", step=9), 1, "resumed from step 9 of this run."),
        (ResumePoint(run_id=None, step=9), 1, "resumed from step 9 of an unknown run."),
    ],
)
def test_sentence(resumed_from: ResumePoint | None, ordinal: int, sentence: str) -> None:
    assert resumed_sentence(resumed_from, run_id="now", ordinal=ordinal) == sentence


def test_latest_values_beyond_the_resumed_step(client: MlflowClient) -> None:
    run_id = client.create_run(new_experiment(client, "rolled back")).info.run_id
    for step in (100, 1000, 1200):
        client.log_metric(run_id, "loss", 1.0, step=step)
    client.log_metric(run_id, "val/loss", 1.0, step=1000)
    client.log_metric(run_id, "system/gpu", 1.0, step=99999)
    latest = latest_steps(client.get_run(run_id))
    assert latest == {"loss": 1200, "val/loss": 1000, "system/gpu": 99999}
    assert metrics_beyond(latest, 1000) == ("loss",)
    assert rolled_back(latest, 1000) == 1200
    assert metrics_beyond(latest, 1200) == ()
    assert rolled_back(latest, 1200) is None
    assert rolled_back({}, 0) is None
    # The server goes on showing the abandoned value until the new curve has passed it.
    client.log_metric(run_id, "loss", 2.0, step=1100)
    assert metrics_beyond(latest_steps(client.get_run(run_id)), 1000) == ("loss",)
    client.log_metric(run_id, "loss", 2.0, step=1200)
    assert client.get_run(run_id).data.metrics["loss"] == 2.0


@law
@given(st.dictionaries(st.text(), st.integers(0, 100)), st.integers(0, 100))
def test_roll_back_and_metrics_beyond_agree(latest: dict[str, int], step: int) -> None:
    reached = rolled_back(latest, step)
    assert (reached is None) == (metrics_beyond(latest, step) == ())
    assert reached is None or reached > step


def test_roll_backs_are_listed() -> None:
    first = rolled_back_value(None, 1200, 1000, 1_796_070_254.5)
    assert first == "1200->1000 at 2026-11-30T20:24:14Z"
    assert rolled_back_value(first, 1500, 1400, 0) == f"{first}; 1500->1400 at 1970-01-01T00:00:00Z"


def test_oldest_roll_backs_give_way() -> None:
    value = None
    for index in range(500):
        value = rolled_back_value(value, index + 1, index, 0)
        assert len(value) <= MAX_TAG_LENGTH
    assert value is not None
    assert value.endswith("; 500->499 at 1970-01-01T00:00:00Z")
