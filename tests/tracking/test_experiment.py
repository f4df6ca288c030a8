"""Server and experiment come from the argument, the environment or a default, and Databricks gets full paths."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.runtime import Platform, detect_platform
from lightning_air.tracking.experiment import (
    ExperimentChoice,
    absolute_experiment_name,
    choose_experiment,
    choose_tracking_uri,
    is_databricks_uri,
    known_user,
    script_name,
)

law = settings(derandomize=True, deadline=None, database=None)

NOWHERE = detect_platform({})
ON_DATABRICKS = {"DATABRICKS_RUNTIME_VERSION": "16.4"}


def platform(**environ: str) -> Platform:
    return detect_platform(environ)


def choose(argument: str | None = None, /, *, uri: str = "databricks", ask: Any = lambda: None, **environ: str) -> Any:
    return choose_experiment(argument, platform(**environ), tracking_uri=uri, script="train", ask_user=ask)


def named(name: str, source: str) -> ExperimentChoice:
    return ExperimentChoice(name=name, experiment_id=None, is_named_by=source)


def test_tracking_uri_is_the_arguments_then_the_environments() -> None:
    both = platform(MLFLOW_TRACKING_URI="http://env", **ON_DATABRICKS)
    assert choose_tracking_uri("http://argument", both) == "http://argument"
    assert choose_tracking_uri(None, both) == "http://env"
    assert choose_tracking_uri(None, platform(**ON_DATABRICKS)) == "databricks"


def test_default_tracking_uri_is_a_file_that_moves_with_nobody(tmp_path: Path) -> None:
    assert choose_tracking_uri(None, NOWHERE) == f"sqlite:///{tmp_path}/mlflow.db"
    assert choose_tracking_uri("", NOWHERE, "runs") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert choose_tracking_uri(None, NOWHERE, "/data") == "sqlite:////data/mlflow.db"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("databricks", True),
        ("databricks://lab", True),
        ("databricks-uc", False),
        ("sqlite:///databricks", False),
        ("", False),
    ],
)
def test_databricks_uri(uri: str, expected: bool) -> None:
    assert is_databricks_uri(uri) == expected


@pytest.mark.parametrize(
    ("argv0", "notebook_path", "expected"),
    [
        ("/code/train.py", None, "train"),
        ("train", None, "train"),
        ("/code/pkg/__main__.py", None, "pkg"),
        ("/code/train.py", "/Users/me/My notebook", "My notebook"),
        ("", None, "lightning_air"),
        ("-c", None, "lightning_air"),
        ("-m", None, "lightning_air"),
        ("/x/ipykernel_launcher.py", None, "lightning_air"),
        ("/databricks/python_shell/scripts/db_ipykernel_launcher.py", None, "lightning_air"),
    ],
)
def test_script_name(argv0: str, notebook_path: str | None, expected: str) -> None:
    assert script_name(argv0, notebook_path) == expected


def test_experiment_elsewhere_has_any_name() -> None:
    assert choose("mine", uri="http://x", MLFLOW_EXPERIMENT_NAME="env") == named("mine", "experiment_name")
    assert choose(uri="http://x", MLFLOW_EXPERIMENT_NAME="env") == named("env", "MLFLOW_EXPERIMENT_NAME")
    assert choose(uri="sqlite:///x") == named("train", "default")
    for name in (" ", "", "x" * 501):
        with pytest.raises(ValueError, match=r"experiment_name must have 1 to 500 characters, got '"):
            choose(name, uri="http://x")


def test_set_experiment_goes_before_the_environments_name() -> None:
    choice = choose(MLFLOW_EXPERIMENT_ID="12", MLFLOW_EXPERIMENT_NAME="/Shared/x")
    assert choice == ExperimentChoice(name=None, experiment_id="12", is_named_by="MLFLOW_EXPERIMENT_ID")
    assert choose("/Shared/y", MLFLOW_EXPERIMENT_ID="12") == named("/Shared/y", "experiment_name")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/Users/me@x.example/runs", "/Users/me@x.example/runs"),
        ("/Shared/a/b", "/Shared/a/b"),
        ("/Workspace/Users/me@x.example/runs", "/Users/me@x.example/runs"),
        ("/Workspace/Shared/runs/", "/Shared/runs"),
        ("//Shared//runs", "/Shared/runs"),
        ("/Workspace/Workspace/Shared/runs", "/Shared/runs"),
        ("/Repos/me/repo/runs", "/Repos/me/repo/runs"),
    ],
)
def test_name_in_a_workspace_has_one_spelling(name: str, expected: str) -> None:
    assert absolute_experiment_name(name) == expected
    assert choose(name) == named(expected, "experiment_name")
    assert choose(MLFLOW_EXPERIMENT_NAME=name) == named(expected, "MLFLOW_EXPERIMENT_NAME")


@pytest.mark.parametrize(
    ("name", "proposal"),
    [
        ("runs", "/Users/me@x.example/runs"),
        ("Users/me/runs", "/Users/me@x.example/runs"),
        ("/runs", "/Users/me@x.example/runs"),
        ("/Workspace/runs", "/Users/me@x.example/runs"),
        ("/", "/Users/me@x.example/training"),
        ("", "/Users/me@x.example/training"),
    ],
)
def test_relative_name_in_a_workspace_is_refused_with_the_right_one(name: str, proposal: str) -> None:
    with pytest.raises(ValueError, match=rf"experiment_name must be the absolute path .* got '{name}'.*'{proposal}'"):
        choose(name, DATABRICKS_USERNAME="me@x.example")
    assert absolute_experiment_name(proposal) == proposal


def test_relative_name_in_the_environment_is_refused_by_its_name() -> None:
    with pytest.raises(
        ValueError, match=r"MLFLOW_EXPERIMENT_NAME must be .* got 'runs'. Use '/Users/<your e-mail>/runs'"
    ):
        choose(MLFLOW_EXPERIMENT_NAME="runs")


@law
@given(st.text() | st.lists(st.sampled_from(["/", "Workspace", "a", " "])).map("".join))
def test_absolute_name_is_idempotent(name: str) -> None:
    try:
        absolute = absolute_experiment_name(name)
    except ValueError:
        return
    assert absolute.startswith("/")
    assert "//" not in absolute
    assert absolute_experiment_name(absolute) == absolute


def test_default_in_a_workspace_is_the_users() -> None:
    assert choose(DATABRICKS_USERNAME="a@b.c") == named("/Users/a@b.c/train", "default")
    assert choose(DATABRICKS_NOTEBOOK_PATH="/Workspace/Users/a@b.c/x/n") == named("/Users/a@b.c/train", "default")
    assert choose(ask=lambda: "asked@b.c") == named("/Users/asked@b.c/train", "default")
    with pytest.raises(ValueError, match=r"Pass experiment_name='/Users/<your e-mail>/train', or set MLFLOW_"):
        choose()


def test_user_is_asked_for_only_when_needed() -> None:
    def ask() -> str:
        raise AssertionError

    choose("/Shared/x", ask=ask)
    choose(MLFLOW_EXPERIMENT_NAME="/Shared/x", ask=ask)
    choose(uri="http://x", ask=ask)
    choose(DATABRICKS_USERNAME="a@b.c", ask=ask)


@pytest.mark.parametrize(
    ("notebook_path", "user"),
    [("/Users/a@b.c/n", "a@b.c"), ("/Workspace/Users/a@b.c/n", "a@b.c"), ("/Repos/a@b.c/n", None), ("/Users", None)],
)
def test_user_of_a_notebook(notebook_path: str, user: str | None) -> None:
    assert known_user(platform(DATABRICKS_NOTEBOOK_PATH=notebook_path)) == user


@pytest.mark.parametrize("uri", ["localhost:5000", "127.0.0.1:5000", "mlflow.example.com:8080/path"])
def test_an_address_without_its_scheme_is_refused_with_what_to_write(uri: str) -> None:
    with pytest.raises(ValueError, match=rf"tracking_uri must say how to reach the server.*Write 'http://{uri}'"):
        choose_tracking_uri(uri, platform())


@pytest.mark.parametrize("uri", ["http://localhost:5000", "databricks://me:scope", "file:///a", "mlruns", "a/b:1"])
def test_what_is_no_bare_address_is_left_alone(uri: str) -> None:
    assert choose_tracking_uri(uri, platform()) == uri
