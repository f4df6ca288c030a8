"""The budget of a run that somebody else logs into too, with the logger and a Trainer: what is counted, and is said."""

import json
from typing import Any

import pytest

from lightning_air.tracking.charging import BEFORE, charges_of, writer_tag
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Exit, Store, fit, loader, make_logger, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    return Store.new(tmp_path_factory)


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


def run_with(store: Store, *points: tuple[str, int]) -> str:
    run_id = str(store.client.create_run("0").info.run_id)
    for key, step in points:
        store.client.log_metric(run_id, key, 0.0, step=step)
    return run_id


def test_what_an_adopted_run_has_without_a_tag_of_ours_is_taken_from_its_budget_and_said(store: Store) -> None:
    run_id = run_with(store, ("theirs", 99), ("lr", 0))
    logger = make_logger(store, run_id=run_id, max_metric_steps=110, reserve=0)
    with warned() as found:
        fit(logger)

    assert "101 points at most are taken from its budget" in found.text
    assert writer_tag(BEFORE) in found.text
    charges = charges_of(store.tags(run_id))
    assert charges.pop(BEFORE) == 101
    assert sum(charges.values()) == len(store.points(run_id)) - 2 <= 9


def test_who_knows_better_sets_the_tag(store: Store) -> None:
    run_id = run_with(store, ("theirs", 10**9))
    store.client.set_tag(run_id, writer_tag(BEFORE), "1")
    logger = make_logger(store, run_id=run_id)
    fit(logger)

    assert charges_of(store.tags(run_id))[BEFORE] == 1
    assert store.steps(run_id, "loss")


def test_a_run_of_ours_has_nothing_that_is_not_counted(store: Store) -> None:
    logger = make_logger(store, "ours")
    trainer = fit(logger)
    trainer.test(trainer.lightning_module, loader(), verbose=False)

    charges = charges_of(store.tags(logger.run_id or ""))
    assert BEFORE not in charges
    assert [*charges.values()] == [len(store.points(logger.run_id or ""))]


@pytest.mark.parametrize("interval", [None, "60"])
def test_system_metrics_that_are_there_and_will_come_are_left_their_share(
    store: Store, monkeypatch: pytest.MonkeyPatch, interval: str | None
) -> None:
    """A fluent run with log_system_metrics=True, adopted: 8 values every 10 s for 7 days beside what is there."""
    if interval is not None:
        monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", interval)
    run_id = run_with(store, ("system/cpu_utilization_percentage", 999_999))
    logger = make_logger(store, run_id=run_id)
    logger.log_metrics({"a": 1.0}, step=0)
    budget = logger.session.tracker._thinner.snapshot()["thinner"]["budget"]
    with warned() as found:
        logger.finalize()

    to_come = 8 * 7 * 86_400 // (10 if interval is None else 60)
    assert budget["system"] == 1_000_000 + to_come, json.dumps(budget)
    assert "taken from its budget" not in found.text


def test_the_end_says_what_the_budget_has_dropped(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    logger = make_logger(store, "small", max_metric_steps=3, reserve=0)
    with warned(), caplog.at_level("INFO"):
        for step in range(50):
            logger.log_metrics({f"m{index}": 1.0 for index in range(10)}, step=step)
        logger.finalize()

    assert "dropped by the budget of metric steps, which is used up" in caplog.text
    assert "All of it is on the server" not in caplog.text
    assert 0 < len(store.points(logger.run_id or "")) <= 3
