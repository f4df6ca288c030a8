"""A run tells what it was: the user's tags, the versions, the machines."""

import platform
from importlib.metadata import version

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils.validation import _validate_tag

import lightning_air
from lightning_air.tracking import run_tags as module
from lightning_air.tracking.run_tags import World, checked_user_tags, run_tags, visible_gpus
from lightning_air.tracking.texts import MAX_TAG_LENGTH
from tests.tracking.local_store import MLFLOW_WARNING, local_client, new_experiment

WORLD = World(launch="torchrun", num_nodes=2, world_size=16)


def test_versions_and_machines() -> None:
    tags = run_tags({}, WORLD)
    assert {name: value for name, value in tags.items() if name.startswith("lightning_air.")} == {
        "lightning_air.version": lightning_air.__version__,
        "lightning_air.lightning": version("lightning"),
        "lightning_air.torch": version("torch"),
        "lightning_air.mlflow": mlflow.__version__,
        "lightning_air.python": platform.python_version(),
        "lightning_air.launch": "torchrun",
        "lightning_air.num_nodes": "2",
        "lightning_air.world_size": "16",
    }


def test_sharding_is_told_where_it_is_known() -> None:
    world = World(launch="local", num_nodes=1, world_size=8, sharding="full")
    assert run_tags({}, world)["lightning_air.sharding"] == "full"


def test_users_tags_go_before_mlflows() -> None:
    found = resolve_tags()
    assert found["mlflow.source.type"] == "LOCAL"
    tags = run_tags({"mlflow.user": "me", "team": "x"}, WORLD)
    assert (tags["mlflow.user"], tags["team"]) == ("me", "x")
    assert (found | {"mlflow.user": "me", "team": "x"}).items() <= tags.items()


def test_what_mlflow_does_not_know_is_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    # As its context of a Databricks job answers outside of a job's task.
    monkeypatch.setattr(module, "resolve_tags", lambda tags: {"mlflow.source.name": None, **tags})
    tags = run_tags({"team": "x"}, WORLD)
    assert "mlflow.source.name" not in tags
    assert tags["team"] == "x"


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_a_server_takes_them_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    client: MlflowClient = local_client(tmp_path_factory)
    user_tags = checked_user_tags({"note": "é" * 9000, "number": 3, "none": None, "file": "\udcff"})
    tags = run_tags(user_tags, WORLD)
    run = client.create_run(new_experiment(client, "tags"), tags=tags)
    stored = client.get_run(run.info.run_id).data.tags
    assert tags.items() <= stored.items()
    assert stored["number"] == "3"
    assert len(stored["note"]) == MAX_TAG_LENGTH
    assert "[cut: 9000 characters" in stored["note"]
    for name, value in tags.items():
        _validate_tag(name, value)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["a@b", "", "../x", "x" * 251, "a//b"])
def test_bad_name_is_refused_with_a_good_one(name: str) -> None:
    with pytest.raises(ValueError, match=r"tags has a name that MLflow does not take: .* for example '"):
        checked_user_tags({name: "x"})


def test_our_names_are_not_the_users() -> None:
    with pytest.raises(ValueError, match=r"must not start with 'lightning_air.', got 'lightning_air.attempt'. Choose"):
        checked_user_tags({"lightning_air.attempt": "3"})


def test_none_is_no_tags() -> None:
    assert checked_user_tags(None) == {}


def test_cuda_is_never_initialised_for_a_tag() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("something else has initialised CUDA in this process")
    assert visible_gpus() == ()
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["H100"] * 8, ("8", "H100")), (["A10", "H100", "A10"], ("3", "A10, H100"))],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, names: list[str], expected: tuple[str, str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    tags = run_tags({}, WORLD)
    assert (tags["lightning_air.gpus_per_node"], tags["lightning_air.gpu_name"]) == expected


@pytest.mark.gpu
def test_real_gpus() -> None:
    torch.zeros(1, device="cuda")
    assert visible_gpus() == tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert module._version("no-such-package") == "unknown"
