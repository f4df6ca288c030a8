"""Reports from people who do this job (CASES.md, rows 15 to 24), each as a small test with a real Trainer.

Row 15 is `test_no_synchronisation_beyond_lightnings` in test_logger.py; rows 18 and 19 are in test_logger_ending.py and
test_logger_resuming.py; row 24 is in test_logger_ranks.py.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.strategy.training import loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import At, Exit, Logs, Store, fit, make_logger, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # MLflow's own tries would outlive the test
    with faulty_proxy(server.url) as made:
        yield made


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


class Stopwatch(Callback):
    """How long training took, without what is before and after it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.begun


# ---- 16: a server that refuses connections in the middle of the run (Lightning 12833, 6641) --------------------------


def test_a_server_that_refuses_all_connections_during_training(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = make_logger(Store(proxy.url), "refused", flush_seconds=0.05)
    watch = Stopwatch()

    class Away(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 5:
                proxy.refuse()
            time.sleep(0.01)  # so that the writer tries, again and again

        def on_train_end(self, *_: Any) -> None:
            assert {point.step for point in server.points_of(logger.run_id) if point.key == "loss"} < set(range(20))
            proxy.accept()

    fit(logger, watch, Away(), module=Logs(float), max_epochs=-1, max_steps=40, limit_val_batches=1)
    assert watch.seconds < 10
    points = [point for point in server.points_of(logger.run_id) if point.key == "loss"]
    assert [(point.step, point.value) for point in points] == [(step, float(step)) for step in range(40)]
    assert Store(proxy.url).status(logger.run_id) == "FINISHED"
    assert logger._earlier.tracker.seconds_blocked < 1.0


def test_many_steps_are_few_requests(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = make_logger(Store(proxy.url), "few", flush_seconds=30)

    class Takes(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.01)

    fit(logger, Takes(), max_epochs=-1, max_steps=60)
    assert len([point for point in server.points_of(logger.run_id) if point.key == "loss"]) == 60
    assert proxy.count("log-batch") <= 3


# ---- 17: a server with 3 s latency (18967) ---------------------------------------------------------------------------


def test_a_slow_server_does_not_slow_the_calls(proxy: FaultyProxy, server: MlflowServer) -> None:
    logger = make_logger(Store(proxy.url), "slow", flush_seconds=0.05)
    calls: list[float] = []

    class Slow(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            proxy.set(Fault("log-batch|set-tag", seconds=3.0))
            log_metrics = logger.log_metrics

            def timed(*args: Any, **kwargs: Any) -> None:
                begun = time.perf_counter()
                log_metrics(*args, **kwargs)
                calls.append(time.perf_counter() - begun)

            logger.log_metrics = timed  # type: ignore[method-assign]

        def on_train_end(self, *_: Any) -> None:
            proxy.set()

    fit(logger, Slow(), max_epochs=-1, max_steps=200)
    assert len(calls) == 200
    assert statistics.quantiles(calls, n=100)[98] < 0.05  # the benchmark is stricter; this machine may be busy
    assert statistics.median(calls) < 0.0005
    assert len([point for point in server.points_of(logger.run_id) if point.key == "loss"]) == 200


# ---- 20, 21: parameters (17830, 19889, 19972) ------------------------------------------------------------------------


def test_a_hyperparameter_that_has_changed_between_attempts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = store.client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    for lr in (0.1, 0.2, 0.2, 0.1):
        logger = make_logger(store, None)
        logger.log_hyperparams({"lr": lr, "same": 1})
        fit(logger, max_steps=1)
    run = store.run(run_id)
    assert run.data.params == {"lr": "0.1", "same": "1"}
    assert run.data.tags["param_changed/lr"] == "0.1 -> 0.2 -> 0.1"


def test_one_parameter_that_the_server_refuses_costs_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log_batch = MlflowClient.log_batch

    def refuses(self: MlflowClient, run_id: str, *args: Any, params: Any = (), **kwargs: Any) -> None:
        if any(param.key == "p57" for param in params):
            raise MlflowException("not this one", INVALID_PARAMETER_VALUE)
        log_batch(self, run_id, *args, params=params, **kwargs)  # type: ignore[misc]

    monkeypatch.setattr(MlflowClient, "log_batch", refuses)
    logger = make_logger(store)
    with warned() as found:
        logger.log_hyperparams({f"p{number}": number for number in range(250)})
        logger.log_metrics({"a": 1.0}, step=0)
        logger.finalize()
    assert len(store.run(logger.run_id).data.params) == 249
    assert [text for text in found.messages if "'p57' = '57'" in text]


def test_a_parameter_that_somebody_else_has_logged_meanwhile_is_shown_as_changed(store: Store) -> None:
    logger = make_logger(store)
    logger.log_metrics({"a": 1.0}, step=0)
    store.client.log_param(logger.run_id, "lr", "0.5")
    logger.log_hyperparams({"lr": 0.1, "momentum": 0.9})
    logger.finalize()
    run = store.run(logger.run_id).data
    assert run.params == {"lr": "0.5", "momentum": "0.9"}
    assert run.tags["param_changed/lr"] == "0.5 -> 0.1"


@pytest.mark.parametrize(("length", "kept"), [(5_000, 5_000), (6_000, 6_000), (6_001, 6_000)])
def test_a_long_parameter(store: Store, length: int, kept: int) -> None:
    logger = make_logger(store)
    logger.log_hyperparams({"prompt": "p" * length})
    fit(logger, max_steps=1)
    assert len(store.run(logger.run_id).data.params["prompt"]) == kept
    assert "p" * length in store.artifact(logger.run_id, "hyperparameters.yaml")


# ---- 22: names and values that the server does not take (ignite 630, verl 119) ---------------------------------------


def test_forbidden_characters_and_one_bad_value_among_twenty(store: Store) -> None:
    names = ["acc@1", "a=b", "(x)", "loss[0]", "../up", "ä", "x" * 300, *(f"m{index}" for index in range(12))]

    class LogsAll(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            values: dict[str, Any] = {name: float(index) for index, name in enumerate(names)}
            values["vector"] = torch.ones(3)
            self.logger.log_metrics(values, step=batch_idx)
            return super().training_step(batch, batch_idx)

    logger = make_logger(store)
    with warned() as found:
        fit(logger, module=LogsAll(), max_steps=2)
    stored = {point.value for point in store.points(logger.run_id) if point.key not in {"loss", "epoch"}}
    assert stored == set(map(float, range(19)))
    assert "The metric 'vector' is left out, since it is no number, but a tensor of (3,)" in found.text
    assert "'acc@1' as 'acc_1-" in found.text
    assert store.status(logger.run_id) == "FINISHED"


@pytest.mark.parametrize("value", ["text", None, [1.0], {"a": 1}, torch.ones(2), 1j, object()])
def test_what_is_no_number(store: Store, value: Any) -> None:
    logger = make_logger(store)
    with warned() as found:
        logger.log_metrics({"good": 1.0, "bad": value}, step=0)
        logger.log_metrics({"good": 2.0, "bad": 2.0}, step=1)
        logger.finalize()
    assert store.curve(logger.run_id, "good") == [(0, 1.0), (1, 2.0)]
    assert store.curve(logger.run_id, "bad") == [(1, 2.0)]
    assert found.text.count("'bad'") == 1


# ---- 23: losses that are not finite (mlflow 16555) -------------------------------------------------------------------


def test_losses_that_are_not_finite(store: Store) -> None:
    values = {2: math.nan, 3: math.inf, 4: -math.inf}
    logger = make_logger(store)
    module = Logs(lambda step: values.get(step, float(step)), lambda _: {"other": 1.0})
    trainer = fit(logger, module=module)
    assert trainer.global_step == 8
    assert store.curve(logger.run_id, "loss") == [(step, float(step)) for step in (0, 1, 5, 6, 7)]
    assert store.steps(logger.run_id, "other") == list(range(8))
    events = [json.loads(line) for line in store.artifact(logger.run_id, r"events\.jsonl$").splitlines()]
    assert [(event["key"], event["step"], event["value"]) for event in events] == [
        ("loss", 2, "nan"),
        ("loss", 3, "inf"),
        ("loss", 4, "-inf"),
    ]
    assert store.run(logger.run_id).data.metrics["loss"] == 7.0
    assert store.curve(logger.run_id, "nonfinite/loss") == [(2, 1.0), (3, 1.0), (4, 1.0)]


def test_events_of_two_stages(store: Store) -> None:
    class Breaks(Logs):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", float("nan"))

    logger = make_logger(store)
    trainer = fit(logger, module=Breaks(lambda step: math.nan if step == 1 else 1.0), max_steps=3)
    trainer.test(trainer.lightning_module, loader(), verbose=False)
    events = [json.loads(line) for line in store.artifact(logger.run_id, r"events\.jsonl$").splitlines()]
    assert [event["key"] for event in events] == ["loss", "test_loss"]


def test_a_run_of_nothing_but_nan(store: Store) -> None:
    logger = make_logger(store)
    fit(logger, At(3, lambda _: None), module=Logs(lambda _: math.nan))
    assert store.curve(logger.run_id, "loss") == []
    assert store.status(logger.run_id) == "FINISHED"
