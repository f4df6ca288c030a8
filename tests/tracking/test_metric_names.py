"""Every name has a key that MLflow takes, a valid one keeps its name, and no two names share a key."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

from lightning_air.tracking.metric_names import (
    MAX_KEY_LENGTH,
    MetricNames,
    examples,
    is_valid_key,
    renamed_warning,
    valid_key,
)

law = settings(derandomize=True, deadline=None, database=None)

pieces = st.sampled_from(["a", "/", "..", ".", " ", "loss", "é", "[", "\n", "\0", "-", ":", "b" * 130, "\ud800"])
names = st.text(max_size=40) | st.lists(pieces, max_size=12).map("".join)


def mlflow_takes(name: str) -> bool:
    try:
        _validate_metric_name(name)  # type: ignore[no-untyped-call]
    except MlflowException:
        return False
    # Its pattern ends in `$`, which lets one trailing line break pass.
    return len(name) <= MAX_ENTITY_KEY_LENGTH and not name.endswith("\n")


def test_limit_is_mlflows() -> None:
    assert MAX_KEY_LENGTH == MAX_ENTITY_KEY_LENGTH


@law
@given(names)
def test_valid_is_what_mlflow_takes(name: str) -> None:
    assert is_valid_key(name) == mlflow_takes(name)


@law
@given(names)
def test_key_is_valid_and_stays_as_it_is(name: str) -> None:
    key = valid_key(name)
    assert mlflow_takes(key)
    assert valid_key(key) == key
    assert (key == name) == mlflow_takes(name)


@law
@given(st.lists(names, unique=True, max_size=20), st.sampled_from(["", "run", "a/b", "["]))
def test_no_two_names_share_a_key(many: list[str], prefix: str) -> None:
    mapping = MetricNames(prefix)
    keys = [mapping.key(name) for name in many]
    assert len(set(keys)) == len(many)
    assert all(map(mlflow_takes, keys))
    assert [mapping.key(name) for name in many] == keys


@pytest.mark.parametrize(
    "name",
    ["loss", "val/acc@5", "a//b", "/x", "../x", ".", "", "x/", "a/./b", "..x", "é", "x" * 251, "layer[0]", "a\n"],
)
def test_a_name_that_looks_like_anothers_key_gets_its_own(name: str) -> None:
    mapping = MetricNames()
    key = mapping.key(name)
    assert (mapping.key(key) == key) == (key == name)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("val/acc@5", "val/acc_5-"),
        ("a//b", "a/b-"),
        ("/x", "x-"),
        ("../x", "_/x-"),
        ("a/../b", "a/_/b-"),
        ("..hidden", "_hidden-"),
        (".", "-"),
        ("", "-"),
        ("loss\n", "loss_-"),
        ("x" * 300, "x" * 241 + "-"),
    ],
)
def test_key_stays_readable(name: str, start: str) -> None:
    assert valid_key(name).startswith(start)
    assert len(valid_key(name)) == len(start) + 8


def test_prefix_is_joined_as_lightning_does() -> None:
    mapping = MetricNames("exp")
    assert mapping.key("train/loss") == "exp-train/loss"
    assert mapping.take_renamed() == {}


def test_change_is_told_once() -> None:
    mapping = MetricNames()
    mapping.key("loss")
    key = mapping.key("acc@5")
    assert mapping.take_renamed() == {"acc@5": key}
    mapping.key("acc@5")
    assert mapping.take_renamed() == {}
    assert "1 metric name(s)" in renamed_warning("metric", {"acc@5": key})
    assert f"'acc@5' as '{key}'" in renamed_warning("metric", {"acc@5": key})


def test_examples_end_after_ten() -> None:
    assert examples(map(str, range(10))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert examples(map(str, range(12))).endswith("8, 9 and 2 more")


def test_key_is_the_same_in_every_process() -> None:
    # Loaded by its path: the package imports Lightning, which takes seconds.
    from lightning_air.tracking import metric_names

    source = f"import runpy; print(runpy.run_path({metric_names.__file__!r})['valid_key']('a@b'))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", source], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {valid_key("a@b")}
