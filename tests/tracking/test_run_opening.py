"""A run is made with its tags, or adopted as it is: RUNNING while we train, under its own name."""

import pytest
from mlflow import MlflowClient

from lightning_air.tracking.run_identity import RunChoice, RunFacts, choose_run, look_up_run
from lightning_air.tracking.run_opening import OpenRun, open_run
from tests.tracking.local_store import MLFLOW_WARNING, local_client, new_experiment

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return local_client(tmp_path_factory)


@pytest.fixture(scope="module")
def experiment_id(client: MlflowClient) -> str:
    return new_experiment(client, "runs")


def choose(client: MlflowClient, **wishes: object) -> RunChoice:
    return choose_run(look_up=lambda run_id: look_up_run(client, run_id), **wishes)


def adopt(client: MlflowClient, run_id: str, *, run_name: str | None = None, **tags: str) -> OpenRun:
    return open_run(client, choose(client, run_id=run_id), experiment_id=None, run_name=run_name, tags=tags)


def test_new_run(client: MlflowClient, experiment_id: str) -> None:
    tags = {"a": "b", "mlflow.runName": "of the tags"}
    opened = open_run(client, choose(client), experiment_id=experiment_id, run_name="mine", tags=tags)
    run = client.get_run(opened.run_id)
    assert (run.info.status, run.info.run_name, run.info.experiment_id) == ("RUNNING", "mine", experiment_id)
    assert run.data.tags == opened.tags == {"a": "b", "mlflow.runName": "mine"}
    assert (opened.name, opened.is_new, opened.had_ended, opened.params) == ("mine", True, False, {})
    assert opened.artifact_uri == run.info.artifact_uri


def test_new_run_without_a_name_gets_one(client: MlflowClient, experiment_id: str) -> None:
    assert open_run(client, choose(client), experiment_id=experiment_id, tags={}).name
    named = open_run(client, choose(client), experiment_id=experiment_id, tags={"mlflow.runName": "of the tags"})
    assert named.name == "of the tags"


def test_new_run_needs_an_experiment(client: MlflowClient) -> None:
    with pytest.raises(ValueError, match="A new run needs an experiment, got experiment_id=None"):
        open_run(client, choose(client), experiment_id=None, tags={})


def test_child_is_nested_where_its_parent_is(client: MlflowClient, experiment_id: str) -> None:
    parent = client.create_run(experiment_id).info
    choice = choose(client, active=RunFacts(parent.run_id, experiment_id))
    opened = open_run(client, choice, experiment_id=None, tags={})
    assert opened.experiment_id == experiment_id
    assert client.get_run(opened.run_id).data.tags["mlflow.parentRunId"] == parent.run_id


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_run_that_had_ended_runs_again(client: MlflowClient, experiment_id: str, status: str) -> None:
    """CASES 18."""
    run_id = client.create_run(experiment_id, run_name="first").info.run_id
    client.set_terminated(run_id, status)
    opened = adopt(client, run_id)
    assert (opened.had_ended, opened.is_new) == (True, False)
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("RUNNING", "first")


def test_run_of_a_killed_attempt_goes_on(client: MlflowClient, experiment_id: str) -> None:
    run_id = client.create_run(experiment_id).info.run_id
    client.log_param(run_id, "lr", "0.1")
    opened = adopt(client, run_id)
    assert not opened.had_ended
    assert opened.params == {"lr": "0.1"}
    assert client.get_run(run_id).info.status == "RUNNING"


def test_adopted_run_keeps_its_name_and_origin(client: MlflowClient, experiment_id: str) -> None:
    origin = {"mlflow.source.git.commit": "abc", "lightning_air.torch": "1"}
    run_id = client.create_run(experiment_id, run_name="first", tags=origin).info.run_id
    tags = {"mlflow.source.git.commit": "def", "mlflow.user": "me", "lightning_air.torch": "2", "mlflow.runName": "x"}
    opened = adopt(client, run_id, run_name="second", **tags)
    run = client.get_run(run_id)
    assert run.info.run_name == opened.name == "first"
    assert opened.warnings == ("The run keeps its name 'first'; run_name='second' names new runs only.",)
    assert run.data.tags == opened.tags
    assert run.data.tags == {
        "mlflow.runName": "first",
        "mlflow.source.git.commit": "abc",
        "mlflow.user": "me",
        "lightning_air.torch": "2",
    }
    assert adopt(client, run_id, run_name="first").warnings == ()


def test_many_tags_come_in_batches(client: MlflowClient, experiment_id: str) -> None:
    run_id = client.create_run(experiment_id).info.run_id
    tags = {f"t{index}": str(index) for index in range(250)}
    adopt(client, run_id, **tags)
    assert tags.items() <= client.get_run(run_id).data.tags.items()


def test_look_up(client: MlflowClient, experiment_id: str) -> None:
    run_id = client.create_run(experiment_id).info.run_id
    assert look_up_run(client, run_id) == RunFacts(run_id, experiment_id)
    client.delete_run(run_id)
    assert look_up_run(client, run_id) == RunFacts(run_id, experiment_id, is_deleted=True)
    for unknown in ("0" * 32, "no/run", ""):
        assert look_up_run(client, unknown) is None
