"""With `full_record` every value is kept as it was logged, each once: through crashes, full disks and dead servers."""

import gzip
import json
import math
import random
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from mlflow import MlflowClient

from lightning_air.tracking import full_record
from lightning_air.tracking.full_record import RECORD_FOLDER, FullRecord, Kept, send_record
from lightning_air.tracking.leftovers import send_left
from lightning_air.tracking.points import Record
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.tracking.killing import append_forever, killed, open_tracker
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Logs, Store, fit, make_logger, warned
from tests.tracking.stand_ins import Warnings

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the complete parts in a folder hold, the first part first."""
    parts = sorted(folder.glob("*.jsonl.gz"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for path in parts for line in gzip.decompress(path.read_bytes()).splitlines()]


def steps_in(folder: Path) -> list[int]:
    return [line["step"] for line in lines_in(folder)]


def record_of(step: int) -> Record:
    return Record(1_700_000_000_000 + step, step, {"loss": step / 7, "odd": math.nan})


# ---- the file --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    chunks=st.lists(st.integers(0, 5), max_size=12),
    crashes=st.sets(st.integers(0, 11)),
    loses=st.sets(st.integers(0, 11)),
    part_bytes=st.sampled_from([1, 200, 10**6]),
)
def test_each_record_is_kept_once_whenever_the_process_dies(
    chunks: list[int], crashes: set[int], loses: set[int], part_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    saved: Kept | None = None
    step = 0
    record = FullRecord(folder, saved, warn=Warnings(), part_bytes=part_bytes)
    for number, size in enumerate(chunks):
        for each in range(step, step + size):
            record.add(record_of(each))
        kept = record.commit()
        if number in loses:  # killed after the write, before the progress was saved: the records come again
            record = FullRecord(folder, saved, warn=Warnings(), part_bytes=part_bytes)
            for each in range(step, step + size):
                record.add(record_of(each))
            kept = record.commit()
        step, saved = step + size, kept
        if number in crashes:
            record = FullRecord(folder, saved, warn=Warnings(), part_bytes=part_bytes)
    record.finish()
    found = [
        json.loads(line)
        for path in (folder / RECORD_FOLDER).glob("*")
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    assert sorted(line["step"] for line in found) == list(range(step))
    assert {path.suffix for path in (folder / RECORD_FOLDER).glob("*")} <= {".gz"}


def test_a_line_holds_the_values_as_they_were_logged(tmp_path: Path) -> None:
    record = FullRecord(tmp_path, None, warn=Warnings())
    record.add(record_of(7))
    record.commit()
    record.finish()
    [line] = lines_in(tmp_path / RECORD_FOLDER)
    assert math.isnan(line["values"].pop("odd"))
    assert line == {"timestamp_ms": 1_700_000_000_007, "step": 7, "values": {"loss": 1.0}}


class Uploads:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str) -> None:
        shutil.copy(local_path, self.folder)


def test_a_part_that_is_uploaded_before_the_next_one_begins_takes_no_record_with_it(tmp_path: Path) -> None:
    folder, warnings = tmp_path / "spool", Warnings()
    folder.mkdir()
    (folder / "lock").touch()
    before = FullRecord(folder, None, warn=warnings)
    before.add(record_of(0))
    record = FullRecord(folder, before.commit(), warn=warnings)  # killed in between
    client: Any = Uploads(tmp_path / "uploads")
    for step in range(1, 5):
        send_record(client, "run", folder)
        assert step > 1 or not (folder / RECORD_FOLDER).exists()
        record.add(record_of(step))
        record.commit()
    record.finish()
    send_record(client, "run", folder)
    assert sorted(steps_in(client.folder)) == list(range(5))
    assert warnings == []


def test_the_folder_of_parts_may_go_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, warnings = FullRecord(tmp_path, None, warn=Warnings()), Warnings()
    opened, tries = Path.open, []

    def open_late(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "ab" and not tries:
            tries.append(path)
            path.parent.rmdir()
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_late)
    record.add(record_of(0))
    record.commit()
    record.finish()
    assert tries
    assert warnings == []
    assert steps_in(tmp_path / RECORD_FOLDER) == [0]


def test_a_full_disk_makes_a_gap_and_says_so(tmp_path: Path) -> None:
    told = Warnings()
    record = FullRecord(tmp_path, None, warn=told)
    for step in range(3):
        record.add(record_of(step))
        with no_file_beyond(120) if step == 1 else nullcontext():  # in the middle of the second member
            record.commit()
    record.finish()
    assert steps_in(tmp_path / RECORD_FOLDER) == [0, 2]
    [(_, text)] = told
    assert "The full record of metrics has a gap from now on" in text


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_the_run_gets_what_its_curves_leave_out(store: Store) -> None:
    logger = make_logger(store, step=4, full_record=True)
    fit(logger, module=Logs(losses=lambda step: step / 8))
    root = Path(store.run(logger.run_id).info.artifact_uri)
    logged = [(line["step"], line["values"]["loss"]) for line in lines_in(root / "metrics") if "loss" in line["values"]]
    assert logged == [(step, step / 8) for step in range(8)]
    assert len(store.curve(logger.run_id, "loss")) == 2
    assert not Path("spool").exists() or not list(Path("spool").iterdir())


def test_without_it_nothing_is_kept(store: Store) -> None:
    logger = make_logger(store)
    fit(logger)
    assert not any(path.startswith("metrics/") for path in store.artifacts(logger.run_id))


class Slow(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.04)


def test_parts_go_up_while_training_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_record.FullRecord.__init__, "__kwdefaults__", {"on_part": lambda: None, "part_bytes": 1})
    logger = make_logger(store, full_record=True, flush_seconds=0.01)
    fit(logger, Slow(), max_epochs=3)
    names = [path for path in store.artifacts(logger.run_id) if path.startswith("metrics/")]
    assert len(names) > 1
    root = Path(store.run(logger.run_id).info.artifact_uri, "metrics")
    assert sorted(line["step"] for line in lines_in(root) if "loss" in line["values"]) == list(range(24))


def test_what_cannot_be_uploaded_stays_and_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log_artifact = MlflowClient.log_artifact

    def refuses(self: MlflowClient, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        if artifact_path == "metrics":
            raise ValueError("no such store")
        log_artifact(self, run_id, local_path, artifact_path)

    logger = make_logger(store, full_record=True)
    with monkeypatch.context() as patch, warned() as found:
        patch.setattr(MlflowClient, "log_artifact", refuses)
        fit(logger)
    folder = Path("spool", logger.run_id)
    assert f"MLflow has not got the full record of metrics ({folder}): ValueError: no such store." in found.messages
    assert len(set(steps_in(folder / RECORD_FOLDER))) == 8
    send_record(store.client, logger.run_id, folder)
    assert not folder.exists()


@pytest.mark.parametrize("seed", range(2))
def test_each_record_once_through_kill_and_replay(seed: int, server: MlflowServer, tmp_path: Path) -> None:
    run_id, folder = server.create_run(), tmp_path / "spool"
    attempts = []
    for attempt in range(2):
        options = {"full_record": True, "flush_seconds": random.Random(seed).choice([0.05, 0.3])}
        spool = server.url, run_id, folder
        attempts.append(killed(tmp_path / f"safe {attempt}", append_forever, spool, 10_000 * attempt, options))
    result = send_left(folder, deadline_seconds=30, warn=Warnings())
    assert result.is_complete
    steps = steps_of_artifacts(server, run_id, tmp_path)
    assert len(steps) == len(set(steps))
    assert {step for attempt in attempts for step in attempt} <= set(steps)
    assert not folder.exists()


def steps_of_artifacts(server: MlflowServer, run_id: str, scratch: Path) -> list[int]:
    client = MlflowClient(server.url)
    found = scratch / "found"
    found.mkdir()
    for item in client.list_artifacts(run_id, "metrics"):
        path = Path(client.download_artifacts(run_id, item.path, str(scratch)))
        path.rename(found / path.name)
    return steps_in(found)


def test_a_later_attempt_without_the_option_goes_on_with_what_was_begun(server: MlflowServer, tmp_path: Path) -> None:
    run_id, folder = server.create_run(), tmp_path / "spool"
    options = {"full_record": True, "flush_seconds": 0.05}
    safe = killed(tmp_path / "safe", append_forever, (server.url, run_id, folder), 0, options, least=300)
    tracker = open_tracker(server.url, run_id, folder)
    tracker.append(10_000, {"a": 1.0})
    assert tracker.close(30)
    steps = steps_in(folder / RECORD_FOLDER)
    assert set(safe) | {10_000} <= set(steps)
    assert len(steps) == len(set(steps))
