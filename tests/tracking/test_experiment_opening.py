"""An experiment is found or made, also when another process makes it at the same moment, and never a deleted one."""

import threading
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from lightning_air.tracking.experiment import ExperimentChoice
from lightning_air.tracking.experiment_opening import OpenExperiment, get_or_create_experiment
from tests.tracking.local_store import MLFLOW_WARNING, local_client, new_experiment

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return local_client(tmp_path_factory)


def by_name(name: str) -> ExperimentChoice:
    return ExperimentChoice(name=name, experiment_id=None, is_named_by="experiment_name")


def by_number(number: str) -> ExperimentChoice:
    return ExperimentChoice(name=None, experiment_id=number, is_named_by="MLFLOW_EXPERIMENT_ID")


def test_made_once_then_found(client: MlflowClient) -> None:
    made = get_or_create_experiment(client, by_name("twice"), artifact_location="/place/a")
    assert made == OpenExperiment(
        experiment_id=made.experiment_id, name="twice", artifact_location="/place/a", is_new=True, warning=None
    )
    found = get_or_create_experiment(client, by_name("twice"), artifact_location="/place/a/")
    assert (found.experiment_id, found.is_new, found.warning) == (made.experiment_id, False, None)
    assert get_or_create_experiment(client, by_number(made.experiment_id)) == found


def test_another_artifact_location_is_warned_about(client: MlflowClient) -> None:
    get_or_create_experiment(client, by_name("placed"), artifact_location="/place/a")
    found = get_or_create_experiment(client, by_name("placed"), artifact_location="/place/b")
    assert found.artifact_location == "/place/a"
    assert found.warning is not None
    assert "keeps its artifacts at '/place/a'" in found.warning
    assert "artifact_location='/place/b' has no effect" in found.warning


class Late(MlflowClient):
    """Another process makes the experiment after we looked for it."""

    def create_experiment(self, name: str, *args: Any, **kwargs: Any) -> str:
        super().create_experiment(name, *args, **kwargs)
        return super().create_experiment(name, *args, **kwargs)


def test_another_process_is_faster(client: MlflowClient) -> None:
    found = get_or_create_experiment(Late(client.tracking_uri), by_name("raced"), artifact_location="/place")
    assert not found.is_new
    assert client.get_experiment_by_name("raced").experiment_id == found.experiment_id


def test_many_at_once_find_the_same(client: MlflowClient) -> None:
    start = threading.Barrier(4)
    opened: list[OpenExperiment] = []

    def open_it() -> None:
        start.wait()
        opened.append(get_or_create_experiment(client, by_name("crowd"), artifact_location="/place"))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    assert len({experiment.experiment_id for experiment in opened}) == 1
    assert sum(experiment.is_new for experiment in opened) == 1


def test_deleted_one_is_refused_with_the_way_back(client: MlflowClient) -> None:
    number = new_experiment(client, "deleted")
    client.delete_experiment(number)
    for choice in (by_name("deleted"), by_number(number)):
        with pytest.raises(RuntimeError, match=rf"'deleted' was deleted.*restore_experiment\('{number}'\), or pass"):
            get_or_create_experiment(client, choice)
    client.restore_experiment(number)
    assert get_or_create_experiment(client, by_name("deleted")).experiment_id == number


@pytest.mark.parametrize("number", ["999999", "no/number"])
def test_unknown_number_is_refused(client: MlflowClient, number: str) -> None:
    with pytest.raises(RuntimeError, match=f"MLFLOW_EXPERIMENT_ID is '{number}', but .* no such experiment. Unset it"):
        get_or_create_experiment(client, by_number(number))


class Workspace(MlflowClient):
    """Databricks, where the name may be a notebook's."""

    def __init__(self, uri: str, error_code: Any) -> None:
        super().__init__(uri)
        self.error_code = error_code

    def create_experiment(self, name: str, *args: Any, **kwargs: Any) -> str:
        raise MlflowException(f"Node named {name!r} already exists", self.error_code)


def test_name_of_a_notebook_is_refused_with_another(client: MlflowClient) -> None:
    from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS

    workspace = Workspace(client.tracking_uri, RESOURCE_ALREADY_EXISTS)
    with pytest.raises(RuntimeError, match=r"a notebook, folder or file has that name.*'/Users/me/train-runs'"):
        get_or_create_experiment(workspace, by_name("/Users/me/train"))


def test_any_other_refusal_is_passed_on(client: MlflowClient) -> None:
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

    with pytest.raises(MlflowException, match="Node named"):
        get_or_create_experiment(Workspace(client.tracking_uri, PERMISSION_DENIED), by_name("/Users/other/train"))
