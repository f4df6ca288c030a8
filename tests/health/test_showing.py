"""What GPUHealth shows of a Trainer's run: where the report goes, and that it never breaks or delays anything."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

from lightning_air import AirMLflowLogger
from lightning_air.health import reporter
from lightning_air.health.callback import GPUHealth
from lightning_air.health.reporter import Reporter
from tests.health.records import KeepRecords
from tests.health.report_decoding import decode_report
from tests.health.test_callback import Pace, our_threads, run
from tests.health.test_reporter import PATH, wait_until
from tests.kit.nvml_stub import NvmlStub, compiler_missing, use_stub
from tests.kit.ranks import run_ranks
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Store

Machine = Callable[[int], NvmlStub]
needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


def report_in(folder: Path) -> str:
    wait_until((folder / PATH).exists)
    return (folder / PATH).read_text()


@pytest.mark.parametrize("what", ["fit", "validate", "test", "predict"])
def test_a_report_lies_in_the_root_folder_when_the_run_has_ended(machine: Machine, tmp_path: Path, what: str) -> None:
    machine(8).gpu(3).temperature = 77
    run(what, GPUHealth(poll_seconds=0.1), Pace(0.05))
    text = report_in(tmp_path)
    assert "<h1>Nothing was wrong: 8 GPUs, watched for" in text
    head = decode_report(text).head
    assert len(head["gpus"]) == 8
    assert sum(head["steps"]["counts"] if head["steps"] else []) == (8 if what == "fit" else 0)
    assert our_threads() == []


def test_steps_are_those_of_the_optimizer(machine: Machine, tmp_path: Path) -> None:
    machine(1)
    trainer = Trainer(
        **fast_trainer_kwargs(
            tmp_path,
            callbacks=[GPUHealth(poll_seconds=0.1)],
            limit_train_batches=8,
            limit_val_batches=0,
            accumulate_grad_batches=4,
        )
    )
    trainer.fit(Regression(), loader(), loader())
    assert trainer.global_step == 2
    assert sum(decode_report(report_in(tmp_path)).head["steps"]["counts"]) == 2


def test_without_the_option_nothing_is_written(machine: Machine, tmp_path: Path) -> None:
    machine(1)
    run("fit", GPUHealth(poll_seconds=0.1, report=False), Pace(0.02))
    assert not (tmp_path / "gpu_health").exists()


def test_a_run_without_gpus_leaves_nothing(tmp_path: Path) -> None:
    use_stub(None)
    run("fit", GPUHealth(poll_seconds=0.1))
    assert not (tmp_path / "gpu_health").exists()


def test_a_run_that_fails_leaves_its_report(machine: Machine, tmp_path: Path) -> None:
    machine(1)

    class Fails(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            if arguments[4] == 4:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run("fit", GPUHealth(poll_seconds=0.1), Pace(), Fails())
    assert sum(decode_report(report_in(tmp_path)).head["steps"]["counts"]) >= 4
    assert our_threads() == []


def test_it_lies_with_the_files_of_a_logger_that_has_a_folder(machine: Machine, tmp_path: Path) -> None:
    machine(1)
    logger = CSVLogger(tmp_path / "logs")
    run("fit", GPUHealth(poll_seconds=0.1), Pace(0.05), logger=logger)
    report_in(Path(logger.log_dir))
    assert not (tmp_path / "gpu_health").exists()


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
@pytest.mark.parametrize("of_lightning", [True, False])
def test_it_is_an_artifact_of_the_mlflow_run(
    machine: Machine, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_lightning: bool
) -> None:
    machine(2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)  # Lightning's logger leaves it there
    kind = MLFlowLogger if of_lightning else AirMLflowLogger
    logger = kind(experiment_name="health", tracking_uri=store.uri)
    run("fit", GPUHealth(poll_seconds=0.1), Pace(0.05), logger=logger)
    wait_until(lambda: "air-gpu-upload" not in our_threads())
    assert logger.run_id is not None
    artifacts = Path(str(store.run(logger.run_id).info.artifact_uri).removeprefix("file://"))
    assert len(decode_report((artifacts / PATH).read_text()).head["gpus"]) == 2
    assert (tmp_path / PATH).exists()


def test_what_cannot_be_shown_is_said_and_the_gpus_are_watched_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(1)

    def refuse(_: Reporter) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Reporter, "start", refuse)
    logger = KeepRecords()
    trainer = run("fit", GPUHealth(poll_seconds=0.1), Pace(0.05), logger=logger)
    assert trainer.global_step == 8
    assert len(logger.health()) == 1
    assert "The GPUs are watched, but not shown." in caplog.text


def _train(folder: str) -> None:
    use_stub(Path(folder, "nvml"))
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path(folder),
            callbacks=[GPUHealth(poll_seconds=0.1)],
            limit_train_batches=4,
            limit_val_batches=0,
            devices=2,
            strategy="ddp",
        )
    )
    trainer.fit(Regression(), loader(), loader())


@needs_compiler
def test_of_several_ranks_one_writes(tmp_path: Path) -> None:
    NvmlStub(tmp_path / "nvml", 2)
    results = run_ranks(_train, 2, args=(str(tmp_path),))
    assert [result.error for result in results] == [None, None]
    text = report_in(tmp_path)
    assert len(decode_report(text).head["gpus"]) == 2
    assert len(list(tmp_path.rglob("report.html"))) == 1


def test_the_page_is_there_while_the_run_is_and_its_address_is_said_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    import urllib.request

    machine(2)
    found: list[str] = []

    class Looks(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            (address,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", caplog.text)
            if arguments[4] == 7:
                found.append(urllib.request.urlopen(address, timeout=30).read().decode())
                found.append(address)

    with caplog.at_level("INFO"):
        run("fit", GPUHealth(poll_seconds=0.1, live="page", report=False), Pace(0.05), Looks())
    text, address = found
    assert len(decode_report(text).head["gpus"]) == 2
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=30)
    assert our_threads() == []


def test_when_all_hangs_at_once_the_run_ends_all_the_same(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = machine(1)
    released = threading.Event()

    def hang(*_: object) -> None:
        released.wait()

    monkeypatch.setattr(reporter, "put", hang)
    seconds: list[float] = []

    class Timed(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            if arguments[3] == 4:
                stub.hang("nvmlDeviceGetTemperatureV")
                stub.hang("nvmlEventSetWait")

        def on_train_end(self, *_: Any) -> None:
            seconds.append(time.monotonic())

    try:
        run("fit", GPUHealth(poll_seconds=0.1, live="page"), Pace(0.1), Timed())
        assert time.monotonic() - seconds[0] < 10  # two seconds, and what Lightning and a busy machine take
        assert {"air-gpu-sampler", "air-gpu-report"} <= set(our_threads())
        assert "air-gpu-page" not in our_threads()
    finally:
        stub.release()
        released.set()
    wait_until(lambda: our_threads() == [])


def test_a_table_where_there_is_no_terminal_is_said_and_training_goes_on(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine(1)
    trainer = run("fit", GPUHealth(poll_seconds=0.1, live="table"))
    assert trainer.global_step == 8
    (message,) = [each.getMessage() for each in caplog.records if "no live table" in each.getMessage()]
    assert "the output is no terminal. Use live='page'" in message
