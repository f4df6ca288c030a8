"""Parameters fit into a run, a changed one is shown instead of refused, and a long one stays whole."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Param, RunTag
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

from lightning_air.tracking.params import (
    MAX_CHANGE_TAGS,
    Change,
    change_tags,
    left_out_warning,
    param_batches,
    plan_params,
)
from lightning_air.tracking.texts import MAX_PARAM_LENGTH, MAX_TAG_LENGTH
from tests.tracking.local_store import MLFLOW_WARNING, local_client, new_experiment

law = settings(derandomize=True, deadline=None, database=None)

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")

params = st.dictionaries(st.text(max_size=8), st.text(max_size=5), max_size=12)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return local_client(tmp_path_factory)


@pytest.fixture(scope="module")
def experiment_id(client: MlflowClient) -> str:
    return new_experiment(client, "params")


def log(client: MlflowClient, run_id: str, wanted: dict[str, str]) -> None:
    """What the logger does at the start of each attempt."""
    data = client.get_run(run_id).data
    plan = plan_params(wanted, data.params)
    for batch in param_batches(plan.new):
        client.log_batch(run_id, params=[Param(key, value) for key, value in batch.items()])
    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in change_tags(plan, data.tags).items()])


def test_limits_are_mlflows() -> None:
    assert MAX_PARAM_LENGTH == MAX_PARAM_VAL_LENGTH
    assert MAX_PARAMS_TAGS_PER_BATCH == 100


def test_changed_parameter_is_visible_and_nothing_is_refused(client: MlflowClient, experiment_id: str) -> None:
    """CASES 20."""
    run_id = client.create_run(experiment_id).info.run_id
    log(client, run_id, {"lr": "0.1", "bad[key]": "x", "same": "1"})
    log(client, run_id, {"lr": "0.2", "bad[key]": "x", "same": "1", "added": "2"})
    data = client.get_run(run_id).data
    assert data.params["lr"] == "0.1"
    assert data.params["added"] == "2"
    assert {tag: value for tag, value in data.tags.items() if tag.startswith("param_changed")} == {
        "param_changed/lr": "0.1 -> 0.2"
    }
    # When it comes back, the tag says that too, once.
    for _ in range(2):
        log(client, run_id, {"lr": "0.1"})
    assert client.get_run(run_id).data.tags["param_changed/lr"] == "0.1 -> 0.2 -> 0.1"


def test_long_parameter_is_whole(client: MlflowClient, experiment_id: str) -> None:
    """CASES 21."""
    run_id = client.create_run(experiment_id).info.run_id
    log(client, run_id, {"prompt": "p" * 5000, "longer": "q" * 9000, "none": ""})
    log(client, run_id, {"prompt": "p" * 5000, "longer": "q" * 8999 + "r"})
    data = client.get_run(run_id).data
    assert data.params["prompt"] == "p" * 5000
    assert data.params["none"] == ""
    assert "[cut: 9000 characters, sha256 " in data.params["longer"]
    change = data.tags["param_changed/longer"]
    assert change.count("[cut: ") == 2
    assert len(change) <= MAX_TAG_LENGTH


def test_1600_parameters_are_sent_and_the_rest_is_named(client: MlflowClient, experiment_id: str) -> None:
    run_id = client.create_run(experiment_id).info.run_id
    wanted = {f"p{index}": str(index) for index in range(1700)}
    log(client, run_id, wanted)
    log(client, run_id, wanted)
    assert client.get_run(run_id).data.params == dict(list(wanted.items())[:1600])
    plan = plan_params(wanted, {})
    assert list(plan.left_out) == list(wanted)[1600:]
    warning = left_out_warning(plan)
    assert warning is not None
    assert "A run takes 1600 parameters, so 100 stand only" in warning
    assert "p1600, p1601" in warning
    assert left_out_warning(plan_params({"a": "1"}, {})) is None


@law
@given(wanted=params, existing=params, max_params=st.integers(0, 15))
def test_every_parameter_is_planned_once(wanted: dict[str, str], existing: dict[str, str], max_params: int) -> None:
    plan = plan_params(wanted, existing, max_params=max_params)
    groups = [plan.new, plan.changed, plan.unchanged, plan.left_out]
    assert sum(map(len, groups)) == len(wanted) == len(set().union(*groups))
    assert len(plan.new) <= max(0, max_params - len(existing))
    assert not plan.new.keys() & existing.keys()
    assert plan.changed.keys() | plan.unchanged.keys() <= existing.keys()
    assert all(change.old != change.new for change in plan.changed.values())


@law
@given(wanted=params, existing=params)
def test_change_tags_are_said_once(wanted: dict[str, str], existing: dict[str, str]) -> None:
    plan = plan_params(wanted, existing)
    tags = change_tags(plan, {})
    assert len(tags) == len(plan.changed)
    assert change_tags(plan, tags) == {}


def test_history_that_grows_too_long_keeps_its_ends() -> None:
    tags: dict[str, str] = {}
    for index in range(10):
        plan = plan_params({"p": str(index) * 1400}, {"p": "x" * 1400})
        tags |= change_tags(plan, tags)
        assert len(tags["param_changed/p"]) <= MAX_TAG_LENGTH
    history = tags["param_changed/p"].split(" -> ")
    assert history[0] == "x" * 1400
    assert "…" in history
    assert history[-1] == "9" * 1400


def test_change_tags_are_limited() -> None:
    existing = {f"p{index}": "a" for index in range(150)}
    plan = plan_params(dict.fromkeys(existing, "b"), existing)
    tags = change_tags(plan, {})
    assert len(tags) == MAX_CHANGE_TAGS + 1
    assert tags["param_changed_more"].startswith("50 more: p100, p101, ")
    assert change_tags(plan, tags) == {}


def test_renamed_parameters_are_told() -> None:
    plan = plan_params({"a b": "1", "a(b)": "2"}, {})
    assert list(plan.renamed) == ["a(b)"]
    assert plan.new == {"a b": "1", plan.renamed["a(b)"]: "2"}
    assert plan_params({"a(b)": "3"}, plan.new).changed == {plan.renamed["a(b)"]: Change("2", "3")}


long_texts = {f"p{index}": "🔥" * 6000 for index in range(30)}


@law
@given(st.dictionaries(st.text("ab", max_size=20), st.sampled_from(["x", "🔥" * 6000, "y" * 6000]), max_size=300))
@example(long_texts)
def test_batches_fit_into_requests(values: dict[str, str]) -> None:
    batches = list(param_batches(values))
    assert {key: value for batch in batches for key, value in batch.items()} == values
    for batch in batches:
        body = json.dumps({"run_id": "0" * 32, "params": [{"key": k, "value": v} for k, v in batch.items()]})
        assert 1 <= len(batch) <= 100
        assert len(body) < 1_000_000
