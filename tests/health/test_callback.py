"""GPUHealth in a Trainer: it logs a dozen names, in whatever the Trainer does, and never breaks it."""

import copy
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

import lightning_air
from lightning_air import AirMLflowLogger
from lightning_air.health import callback
from lightning_air.health.aggregates import NAMES
from lightning_air.health.callback import GPUHealth
from lightning_air.health.history import METRICS
from lightning_air.health.judge import Judge
from lightning_air.health.node_watch import NodeWatch
from lightning_air.health.rules import Rule
from tests.health.records import KeepRecords
from tests.kit.nvml_stub import GPU_IS_LOST, UNKNOWN, NvmlStub, compiler_missing, use_stub
from tests.kit.ranks import run_ranks
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Store

Machine = Callable[[int], NvmlStub]

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))

WHAT_TRAINERS_DO = ("fit", "validate", "test", "predict")


def our_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("air-gpu-"))


class Pace(Callback):
    """Takes its time, and sees which of our threads run meanwhile."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds
        self.threads: set[tuple[str, ...]] = set()

    def _take_time(self, *_: Any, **__: Any) -> None:
        self.threads.add(tuple(our_threads()))
        time.sleep(self.seconds)

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _take_time


def run(what: str, health: GPUHealth, *callbacks: Callback, logger: Any = False, num_batches: int = 8) -> Trainer:
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            logger=logger,
            callbacks=[health, *callbacks],
            limit_train_batches=num_batches,
            limit_val_batches=num_batches if what == "validate" else 0,
            limit_test_batches=num_batches,
            limit_predict_batches=num_batches,
        )
    )
    if what == "fit":
        trainer.fit(Regression(), loader(), loader())
    else:
        getattr(trainer, what)(Regression(), loader(), **({} if what == "predict" else {"verbose": False}))
    return trainer


@pytest.mark.parametrize("what", WHAT_TRAINERS_DO)
def test_a_dozen_names_are_logged_in_whatever_the_trainer_does(machine: Machine, what: str) -> None:
    """CASES 25."""
    stub = machine(8)
    stub.gpu(3).temperature = 77
    logger, pace = KeepRecords(), Pace()

    run(what, GPUHealth(poll_seconds=0.1, log_every_seconds=0.3), pace, logger=logger)

    records = logger.health()
    assert len(records) >= 2
    assert all(set(record) == set(NAMES) for record in records)
    assert records[-1]["gpu_health/temperature_c/max"] == 77.0
    assert records[-1]["gpu_health/gpus_seen/count"] == 8.0
    assert pace.threads == {("air-gpu-events", "air-gpu-nodes", "air-gpu-report", "air-gpu-sampler")}
    assert our_threads() == []
    assert stub.state.num_initialised == 0


def test_records_are_as_far_apart_as_was_asked_and_one_comes_at_the_end(machine: Machine) -> None:
    machine(1)
    logger = KeepRecords()
    run("fit", GPUHealth(poll_seconds=0.1, log_every_seconds=3_600), Pace(), logger=logger)
    assert len(logger.health()) == 1
    (step,) = {step for step, record in logger.records if NAMES[0] in record}
    assert step == 8


def test_readings_of_several_runs_are_one_history(machine: Machine) -> None:
    machine(1)
    health = GPUHealth(poll_seconds=0.1)
    run("fit", health, Pace())
    assert health.history is not None
    num_before = len(health.history.window().times)
    run("test", health, Pace())
    window = health.history.window()
    assert len(window.times) > num_before
    ((gpu, values),) = window.values.items()
    assert gpu.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert values.shape == (len(METRICS), len(window.times))


def test_without_nvml_training_goes_on_with_one_message(caplog: pytest.LogCaptureFixture) -> None:
    use_stub(None)
    logger = KeepRecords()
    trainer = run("fit", GPUHealth(poll_seconds=0.1, log_every_seconds=0.2), Pace(), logger=logger)
    assert trainer.global_step == 8
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_air.health")]
    assert len(messages) == 1
    assert messages[0].startswith("No GPU is watched: ")
    assert not any(name.startswith("gpu_health/") for _, record in logger.records for name in record)


def test_rules_are_looked_at_while_the_trainer_runs(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    stub = machine(8)
    stub.gpu(3).temperature = 91
    rule = Rule("temperature_c", above=85, for_seconds=0.2, name="hot")
    health = GPUHealth(poll_seconds=0.1, rules=[rule])
    run("fit", health, Pace())
    told = [record.getMessage() for record in caplog.records if "hot: temperature_c is 91" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("GPU 3 (GPU-00000003-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3) of node 0: hot:")
    assert health.events is not None
    assert [event.kind for event in health.events.all] == ["hot"]


def test_rules_that_fail_are_said_once_and_training_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Judge, "take", fail)
    logger = KeepRecords()
    assert run("fit", GPUHealth(poll_seconds=0.1), Pace(), logger=logger).global_step == 8
    assert caplog.text.count("The rules have failed") == 1
    assert logger.health()


# ---- it never breaks what it observes --------------------------------------------------------------------------------


def lose_the_gpu(stub: NvmlStub) -> None:
    stub.gpu(0).is_lost = 1


def lose_nvml(stub: NvmlStub) -> None:
    for function in ("nvmlInit", "nvmlDeviceGetUtilizationRates", "nvmlEventSetWait"):
        stub.refuse(function, UNKNOWN if function == "nvmlInit" else GPU_IS_LOST)


def hang(stub: NvmlStub) -> None:
    stub.hang("nvmlDeviceGetTemperatureV")
    stub.hang("nvmlEventSetWait")


def hang_at_once(stub: NvmlStub) -> None:
    stub.hang("nvmlInit")


def name_it_badly(stub: NvmlStub) -> None:
    stub.gpu(0).name = b"\xff\xfe"


@pytest.mark.parametrize(
    ("what", "trouble"),
    [
        *((what, trouble) for what in WHAT_TRAINERS_DO for trouble in (lose_the_gpu, lose_nvml, hang)),
        ("fit", hang_at_once),
        ("fit", name_it_badly),
    ],
)
def test_whatever_nvml_does_the_run_ends_well_and_soon(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, what: str, trouble: Callable[[NvmlStub], None]
) -> None:
    stub = machine(1)
    seconds: list[float] = []
    close = NodeWatch.close

    def timed_close(watch: NodeWatch) -> None:
        begun = time.monotonic()
        close(watch)
        seconds.append(time.monotonic() - begun)

    monkeypatch.setattr(NodeWatch, "close", timed_close)

    class Trouble(Callback):
        def _make(self, *arguments: Any, **_: Any) -> None:
            if arguments[3] == 2:
                trouble(stub)

        on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _make

    if trouble in (hang_at_once, name_it_badly):
        trouble(stub)
    health = GPUHealth(poll_seconds=0.1, log_every_seconds=0.2)
    try:
        run(what, health, Trouble(), Pace(0.05), logger=KeepRecords())
    finally:
        stub.release()
    assert len(seconds) == 1
    assert seconds[0] < 2
    deadline = time.monotonic() + 5
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert our_threads() == [], "what was left behind ends when the driver answers"


class Broken(KeepRecords):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if any(name.startswith("gpu_health/") for name in metrics):
            raise ConnectionError("the server is gone")


def test_a_logger_that_fails_is_left_alone_after_one_message(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine(1)
    logger = Broken()
    trainer = run("fit", GPUHealth(poll_seconds=0.1, log_every_seconds=0.1), Pace(), logger=logger)
    assert trainer.global_step == 8
    assert len(logger.health()) == 1
    assert [record.getMessage() for record in caplog.records if "could not be logged" in record.getMessage()] == [
        "GPU health could not be logged, and is not from now on; the GPUs are still watched."
    ]


def test_a_watch_that_cannot_start_is_said_and_training_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(1)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(callback, "HealthRun", refuse)
    assert run("fit", GPUHealth(), logger=KeepRecords()).global_step == 8
    assert "GPU health is off." in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_exception_ends_the_threads_and_is_the_users_own(machine: Machine, error: BaseException) -> None:
    machine(1)

    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert our_threads()
            raise error

    with pytest.raises((RuntimeError, SystemExit)):
        run("fit", GPUHealth(), Fails())
    assert our_threads() == []


def _train_while_nvml_hangs(path: str) -> int:
    use_stub(Path(path))
    return run("fit", GPUHealth(poll_seconds=0.1)).global_step


@needs_compiler
def test_a_process_whose_driver_hangs_for_good_ends_with_code_0(tmp_path: Path) -> None:
    NvmlStub(tmp_path / "nvml").hang("nvmlInit")
    (result,) = run_ranks(_train_while_nvml_hangs, 1, args=(str(tmp_path / "nvml"),))
    assert (result.error, result.exitcode, result.value) == (None, 0, 8)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"poll_seconds": 0}, ValueError, r"poll_seconds must be at least 0\.1 and finite, got 0"),
        ({"poll_seconds": float("nan")}, ValueError, "poll_seconds must be at least .*, got nan"),
        ({"poll_seconds": "10"}, TypeError, "poll_seconds must be a number of seconds, got '10'"),
        ({"poll_seconds": True}, TypeError, "poll_seconds must be a number of seconds, got True"),
        ({"history_seconds": 5}, ValueError, "history_seconds must be at least 10 and finite, got 5"),
        ({"history_seconds": float("inf")}, ValueError, "history_seconds must be at least 10 and finite, got inf"),
        ({"history_seconds": 1e9}, ValueError, "history_seconds must be at most 1,000,000 times poll_seconds"),
        ({"live": "Table"}, ValueError, "live must be False, 'table' or 'page', got 'Table'"),
        ({"live": True}, ValueError, "live must be False, 'table' or 'page', got True"),
        ({"live": 0}, ValueError, "live must be False, 'table' or 'page', got 0"),
        ({"log_every_seconds": -1}, ValueError, "log_every_seconds must be at least .* got -1"),
    ],
)
def test_a_bad_option_is_refused_with_its_value(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GPUHealth(**options)


def test_constructing_starts_nothing_and_copies_and_repeats() -> None:
    health = GPUHealth(poll_seconds=5)
    assert our_threads() == []
    assert (health.history, health.events) == (None, None)
    assert copy.deepcopy(health).poll_seconds == 5.0


def test_a_copy_of_one_that_has_run_has_its_options_only(machine: Machine) -> None:
    machine(1)
    health = GPUHealth(poll_seconds=0.1)
    run("fit", health)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(health)))
    assert (copied.poll_seconds, copied.history) == (0.1, None)
    run("fit", copied)


def test_yaml_can_say_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    path = "lightning_air.GPUHealth"
    options = {"poll_seconds": 5, "history_seconds": 3600.0, "log_every_seconds": 30, "live": "page", "report": False}
    parsed = parser.parse_object({"callback": {"class_path": path, "init_args": options}})
    health = parser.instantiate_classes(parsed).callback
    assert isinstance(health, GPUHealth)
    assert (health.poll_seconds, health.history_seconds, health.log_every_seconds) == (5.0, 3600.0, 30.0)
    assert (health.live, health.report) == ("page", False)


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_our_logger_takes_it_and_counts_it_in_its_budget(machine: Machine, store: Store) -> None:
    machine(2)
    logger = AirMLflowLogger(tracking_uri=store.uri, experiment_name="health")
    run("fit", GPUHealth(poll_seconds=0.1, log_every_seconds=0.2), Pace(), logger=logger)
    assert logger.run_id is not None
    points = store.points(logger.run_id)
    assert {point.key for point in points if point.key.startswith("gpu_health/")} == set(NAMES)
    assert not any(point.key.startswith("system/") for point in points)
    assert int(store.tags(logger.run_id)["lightning_air.metric_steps"]) >= len(points) >= 2 * len(NAMES)


def test_a_trainer_of_the_other_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type("Trainer", (), {"__module__": "pytorch_lightning.trainer", "callbacks": [], "loggers": []})()
    with pytest.raises(TypeError, match="comes from the package `pytorch_lightning`"):
        GPUHealth().setup(other, Regression(), "fit")


def test_the_hook_costs_microseconds(machine: Machine) -> None:
    machine(8)
    health = GPUHealth()
    trainer = run("fit", health, logger=KeepRecords())
    begun = time.perf_counter()
    for _ in range(10_000):
        health.on_train_batch_end(trainer, None, None, None, 0)
    assert (time.perf_counter() - begun) / 10_000 < 20e-6


def test_it_is_offered_at_the_top() -> None:
    assert lightning_air.GPUHealth is GPUHealth
    assert {"GPUHealth", "GPUSample", "read_gpus"} <= set(lightning_air.__all__)
