"""What rules have done: all ranks stop after one step, saved; or all processes end, and the next attempt says why."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_air import AirMLflowLogger, AirStrategy, GPUHealth
from lightning_air.health import Rule
from lightning_air.health.aborting import Aborting
from lightning_air.health.excluding import FILE_NAME, TAG
from lightning_air.health.health_run import ABORTED_TAG
from lightning_air.health.leaving import (
    ABORT_EXIT_CODE,
    Marker,
    choose_folder,
    describe_markers,
    leave_marker,
    take_markers,
)
from lightning_air.health.sending import Sender
from lightning_air.health.stop_agreement import BATCHES_AHEAD, StopAgreement
from tests.kit.nvml_stub import NvmlStub, compiler_missing, stub_in_use, use_stub
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader
from tests.tracking.local_store import MLFLOW_WARNING, local_client

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
CLOSED = threading.Event()
POLL_SECONDS = 0.1


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


# ---- agreeing on where to stop ---------------------------------------------------------------------------------------


class Loop:
    """The loop of one rank and the thread that watches it, both moved by a test."""

    def __init__(self, store: dist.Store, clock: Clock, global_rank: int, world_size: int) -> None:
        self.store = store
        self.num_batches = 0
        self.stopped_at: int | None = None
        self.stop = StopAgreement(global_rank, world_size, lambda: self.num_batches, clock=clock, answer_seconds=60.0)

    @property
    def would_wait(self) -> bool:
        promise = self.stop._promise
        return promise is not None and self.num_batches >= promise and not self.stop._is_decided.is_set()

    def advance(self) -> None:
        """One more batch, unless the loop waits or has ended."""
        if self.stopped_at is None and not self.would_wait:
            self.num_batches += 1
        self.ask()

    def ask(self) -> None:
        if self.stopped_at is None and not self.would_wait and self.stop.is_due(self.num_batches):
            self.stopped_at = self.num_batches

    def look(self) -> None:
        self.stop.look(self.store, CLOSED)
        self.ask()  # who has waited is let go


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["batch", "look"]), st.integers(0, 3)), max_size=80),
    st.integers(0, 40),
)
def test_all_ranks_stop_after_the_same_batch_however_they_take_turns(
    world_size: int, turns: list[tuple[str, int]], asked_at: int
) -> None:
    store, clock = dist.HashStore(), Clock()
    loops = [Loop(store, clock, rank, world_size) for rank in range(world_size)]
    for number, (what, rank) in enumerate(turns):
        if number == asked_at:
            loops[0].stop.request("too hot")
        loop = loops[rank % world_size]
        loop.advance() if what == "batch" else loop.look()
    loops[0].stop.request("too hot")
    furthest = max(loop.num_batches for loop in loops)
    for _ in range(furthest + 3 * BATCHES_AHEAD):
        for loop in loops:
            loop.look()
        for loop in loops:
            loop.advance()
    (at,) = {loop.stopped_at for loop in loops}
    assert at is not None
    assert at <= furthest + BATCHES_AHEAD
    assert {loop.stop.reason for loop in loops} == {"too hot"}


def test_nobody_stops_if_a_rank_does_not_answer() -> None:
    store, clock = dist.HashStore(), Clock()
    first, second = (Loop(store, clock, rank, 2) for rank in range(2))
    first.stop.request("too hot")
    first.look()
    for _ in range(10):
        first.advance()
    assert first.num_batches == BATCHES_AHEAD, "it waits"
    clock.seconds = 61.0
    first.look()
    for _ in range(10):
        first.advance()
        second.look()
        second.advance()
    assert (first.stopped_at, second.stopped_at) == (None, None)
    assert (first.num_batches, second.num_batches) == (BATCHES_AHEAD + 10, 10)


def test_a_loop_really_waits_for_the_answer_and_is_let_go() -> None:
    store = dist.HashStore()
    loops = [Loop(store, Clock(), rank, 2) for rank in range(2)]
    loops[0].stop.request("too hot")
    loops[0].stop.look(store, CLOSED)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(loops[0].stop.is_due(BATCHES_AHEAD)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    loops[1].num_batches = 7
    loops[1].stop.look(store, CLOSED)
    loops[0].stop.look(store, CLOSED)
    thread.join(60)
    assert answers == [False], "the other has promised to go to its batch 11"
    assert loops[0].stop.is_due(7 + BATCHES_AHEAD)


def train_until_stopped(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """One node of two ranks; a GPU gets too hot at batch 5 of rank 1's loop."""
    stub = NvmlStub(Path(folder, "nvml"), 2)
    use_stub(stub.path)

    class Heats(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == trainer.world_size - 1 and trainer.fit_loop.total_batch_idx >= 5:
                stub.gpu(1).temperature = 95
            time.sleep(0.01)

    rule = Rule("temperature_c", above=90, name="hot", action="checkpoint_stop", excludes_node=True)
    health = GPUHealth(poll_seconds=POLL_SECONDS, rules=[rule])
    strategy: Any = AirStrategy() if options.pop("strategy", "") == "air" else "ddp"
    callbacks: list[Callback] = [health, Heats()]
    if has_checkpoint := options.pop("has_checkpoint", False):
        callbacks.append(ModelCheckpoint(Path(folder, "checkpoints"), save_top_k=0))
    trainer = Trainer(
        **fast_trainer_kwargs(
            folder,
            strategy=strategy,
            devices=2,
            use_distributed_sampler=False,
            max_epochs=1_000,
            limit_val_batches=0,
            callbacks=callbacks,
            enable_checkpointing=has_checkpoint,
            **options,
        )
    )
    batches = loader(2, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)
    events = health.events.all if health.events is not None else []
    return {
        "step": trainer.global_step,
        "batch": trainer.fit_loop.total_batch_idx,
        "reason": health.stop_reason,
        "events": [event.message for event in events if event.kind == "stopped"],
    }


CASES: dict[str, dict[str, Any]] = {
    "stock ddp": {"strategy": "ddp"},
    "air": {"strategy": "air"},
    "accumulating": {"strategy": "ddp", "accumulate_grad_batches": 3},
    "at least 1,000 epochs": {"strategy": "ddp", "min_epochs": 1_000},
    "beside checkpoints": {"strategy": "ddp", "has_checkpoint": True},
}


@needs_compiler
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
def test_all_ranks_stop_after_one_step_with_a_checkpoint_that_resumes(tmp_path: Path, case: str) -> None:
    NvmlStub(tmp_path / "nvml", 2)
    told = values(run_ranks(train_until_stopped, 2, args=(str(tmp_path), dict(CASES[case])), timeout_seconds=240))
    assert told[0]["step"] == told[1]["step"]
    assert told[0]["batch"] == told[1]["batch"]
    assert told[0]["reason"] == told[1]["reason"]
    assert "hot: temperature_c is 95 °C, above 90 °C" in told[0]["reason"]
    (message,) = told[0]["events"]
    folder = tmp_path / ("checkpoints" if case == "beside checkpoints" else "gpu_health")
    path = folder / f"gpu_health-step={told[0]['step']}.ckpt"
    assert f"on all ranks, saved as {path}: GPU 1 (" in message
    content = torch.load(path, weights_only=True)
    assert content["global_step"] == told[0]["step"]
    if case == "accumulating":
        assert (told[0]["batch"] + 1) % 8 in (0, 3, 6), "an optimizer's step; the last of 8 batches is one, too"
    trainer = Trainer(
        **fast_trainer_kwargs(tmp_path, max_epochs=-1, max_steps=told[0]["step"] + 1), limit_val_batches=0
    )
    trainer.fit(Regression(), loader(), loader(), ckpt_path=path, weights_only=True)
    assert trainer.global_step == told[0]["step"] + 1
    excluded = json.loads((tmp_path / "gpu_health" / FILE_NAME).read_text())
    assert [(each["node_rank"], each["rule"]) for each in excluded] == [(0, "hot")]


@needs_compiler
@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_one_rank_alone_stops_and_the_run_has_a_tag(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    client = local_client(tmp_path_factory)
    client.create_experiment("hot", artifact_location=str(tmp_path / "artifacts"))
    uri = client._tracking_client.tracking_uri
    marker = Marker(reason="GPU 7 fell off the bus.", time_seconds=0.0, global_rank=0, node_rank=0)
    leave_marker(tmp_path / "files", marker)
    with stub_in_use(tmp_path / "nvml", 1):
        (told,) = values(run_ranks(train_alone, 1, args=(str(tmp_path), uri), warnings_as_errors=False))
    run = client.get_run(told["run_id"])
    assert told["reason"] == told["later_reason"] is not None
    assert run.data.tags[ABORTED_TAG] == describe_markers([marker])
    assert run.data.tags[TAG] == "0: GPU-00000000-0000-0000-0000-000000000000"
    kept = {file.path for file in client.list_artifacts(run.info.run_id, "gpu_health")}
    assert kept == {f"gpu_health/{FILE_NAME}", "gpu_health/report.html"}


def train_alone(folder: str, uri: str) -> dict[str, Any]:
    stub = NvmlStub(Path(folder, "nvml"), 1)
    use_stub(stub.path)
    stub.gpu(0).temperature = 95
    rule = Rule("temperature_c", above=90, name="hot", action="checkpoint_stop", excludes_node=True)
    health = GPUHealth(poll_seconds=POLL_SECONDS, rules=[rule], hang=None, folder=f"{folder}/files")
    logger = AirMLflowLogger(tracking_uri=uri, experiment_name="hot")

    class Dawdles(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.02)

    options = fast_trainer_kwargs(folder, logger=logger, callbacks=[health, Dawdles()], max_epochs=1_000)
    trainer = Trainer(**options, limit_val_batches=0)
    trainer.fit(Regression(), loader(), loader())
    reason = health.stop_reason
    assert Path(folder, "files", f"gpu_health-step={trainer.global_step}.ckpt").exists()
    deadline = time.monotonic() + 60
    while (
        not {TAG, ABORTED_TAG} <= logger.experiment.get_run(logger.run_id).data.tags.keys()
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    while not logger.experiment.list_artifacts(logger.run_id, "gpu_health") and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"reason": reason, "later_reason": health.stop_reason, "run_id": str(logger.run_id)}


# ---- aborting --------------------------------------------------------------------------------------------------------


def test_an_abort_reaches_all_ranks_and_the_first_leaves_last() -> None:
    store = dist.HashStore()
    left: list[tuple[int, str]] = []

    def leave_as(rank: int) -> Any:
        return lambda reason: left.append((rank, reason))

    ranks = [Aborting(rank, 3, leave_as(rank), check_seconds=0.05) for rank in range(3)]
    for rank in ranks:
        rank.look(store, CLOSED)
    assert left == []
    ranks[0].request("XID 79")
    ranks[0].request("another reason")
    threads = [threading.Thread(target=ranks[0].look, args=(store, CLOSED))]
    threads[0].start()
    deadline = time.monotonic() + 20
    while not store.check(["abort/reason"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks[1].look(store, CLOSED)
    ranks[2].say_goodbye(store)
    threads[0].join(60)
    assert left == [(1, "XID 79"), (0, "XID 79")]


def test_an_abort_waits_for_a_dead_rank_no_longer_than_it_says() -> None:
    clock, left = Clock(), list[str]()

    class Passes(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.seconds += timeout or 0.0
            return False

    aborting = Aborting(0, 2, left.append, check_seconds=1.0, clock=clock)
    aborting.request("XID 79")
    aborting.look(dist.HashStore(), Passes())
    assert left == ["XID 79"]
    assert clock.seconds <= 7.2


def test_without_a_store_an_abort_ends_its_own_process() -> None:
    left: list[str] = []
    aborting = Aborting(0, 2, left.append, check_seconds=1.0)
    aborting.request("XID 79")
    aborting.look(None, CLOSED)
    assert left == ["XID 79"]


def train_until_aborted(folder: str, strategy: str) -> list[str]:
    """A GPU of which the driver tells XID 79 at batch 3 of the first attempt."""
    is_first = not list(Path(folder, "gpu_health").glob("aborted-*"))
    stub = NvmlStub(Path(folder, "nvml"), 2)
    use_stub(stub.path)

    class Breaks(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if is_first and trainer.global_rank == 1 and batch_idx == 3:
                stub.tell(1, data=79)
            if is_first and batch_idx > 3:
                time.sleep(0.2)

    health = GPUHealth(poll_seconds=POLL_SECONDS, rules=[Rule("xid", any_of=(79,), action="abort", advice="Go.")])
    trainer = Trainer(
        **fast_trainer_kwargs(
            folder,
            strategy=AirStrategy() if strategy == "air" else strategy,
            devices=2,
            use_distributed_sampler=False,
            max_epochs=1_000 if is_first else 1,
            limit_val_batches=0,
            callbacks=[health, Breaks()],
        )
    )
    batches = loader(2, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)
    return [event.message for event in health.events.all if event.kind == "aborted_before"] if health.events else []


@needs_compiler
@pytest.mark.parametrize("strategy", ["ddp", "air"])
def test_an_abort_ends_all_processes_and_the_next_attempt_says_why(tmp_path: Path, strategy: str) -> None:
    NvmlStub(tmp_path / "nvml", 2)
    results = run_ranks(train_until_aborted, 2, args=(str(tmp_path), strategy), timeout_seconds=240)
    assert [result.exitcode for result in results] == [ABORT_EXIT_CODE] * 2, results[0].output + results[1].output
    told = values(run_ranks(train_until_aborted, 2, args=(str(tmp_path), strategy), timeout_seconds=240))
    assert told[1] == []
    (message,) = told[0]
    assert message.startswith("The attempt before was aborted at 20")
    assert "(ranks 0, 1): GPU 1 (GPU-00000001-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3) of node 0" in message
    assert "XID 79" in message
    assert list((tmp_path / "gpu_health").glob("aborted-*")) == [], "it is said once"


# ---- sending ---------------------------------------------------------------------------------------------------------


class Client:
    def __init__(self, *, fails: bool = False) -> None:
        self.tags: list[tuple[str, str, str]] = []
        self.fails = fails

    def log_artifact(self, *_: Any) -> None:
        raise ConnectionError("the server is gone")

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        if self.fails:
            raise ConnectionError("the server is gone")
        self.tags.append((run_id, name, value))


class Opens:
    """A logger that opens its run when it is asked for it."""

    def __init__(self, client: object) -> None:
        self.experiment = client
        self.asked_by: list[str] = []

    @property
    def run_id(self) -> str:
        self.asked_by.append(threading.current_thread().name)
        return "run"


def test_a_logger_is_asked_for_its_run_by_the_thread_that_trains_and_once() -> None:
    sender, logger = Sender(), Opens(Client())
    sender.send_tag("early", "1")
    assert logger.asked_by == []
    sender.meet([logger, object(), Opens(object())])
    sender.meet([logger])
    sender.send_tag("late", "2" * 10_000)
    sender.wait(20)
    assert sorted(logger.experiment.tags) == [("run", "early", "1"), ("run", "late", "2" * 5_000)]
    assert logger.asked_by == [threading.current_thread().name]


def test_a_server_that_does_not_take_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender()
    sender.meet([Opens(Client(fails=True))])
    sender.send_tag("name", "1")
    sender.wait(20)
    assert "GPU health could not send to the run run: ConnectionError('the server is gone')" in caplog.text


def test_who_keeps_nothing_is_sent_nothing() -> None:
    sender = Sender()
    sender.send_tag("name", "1")
    sender.meet([])
    sender.send_tag("name", "1")
    assert (sender._threads, sender._early) == ([], [])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_each_node_takes_its_own_markers_and_the_first_those_of_nodes_that_are_gone(tmp_path: Path) -> None:
    for node_rank in range(4):
        leave_marker(
            tmp_path, Marker(reason=f"of {node_rank}", time_seconds=0.0, global_rank=node_rank, node_rank=node_rank)
        )
    (tmp_path / "aborted-node-0-rank-9.json").write_text("{")
    assert [marker.reason for marker in take_markers(tmp_path, 1, 2)] == ["of 1"]
    first = take_markers(tmp_path, 0, 2)
    assert [marker.reason for marker in first] == ["of 0", "of 2", "of 3"]
    assert take_markers(tmp_path, 0, 2) == []
    assert list(tmp_path.iterdir()) == []
    text = describe_markers(first)
    assert text == "The attempt before was aborted at 1970-01-01 00:00:00 UTC (ranks 0, 2, 3): of 0"


def test_a_marker_that_cannot_be_written_delays_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    leave_marker(tmp_path / "file", Marker(reason="!", time_seconds=0.0, global_rank=0, node_rank=0))
    assert "Why this process ends could not be written to" in caplog.text
    assert take_markers(tmp_path / "nowhere", 0, 1) == []


@pytest.mark.parametrize(
    ("folder", "root", "expected"),
    [
        (None, "/work", "/work/gpu_health"),
        ("/Volumes/a/b/c/run", "/work", "/Volumes/a/b/c/run"),
        (None, "dbfs:/Volumes/a/b/c", "/Volumes/a/b/c/gpu_health"),
    ],
)
def test_files_go_where_one_says_or_beside_the_trainers(folder: str | None, root: str, expected: str) -> None:
    assert choose_folder(folder, root) == Path(expected)


def test_a_trainer_that_writes_to_a_url_has_its_files_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert choose_folder(None, "s3://bucket/runs") == tmp_path / "gpu_health"
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_bad_options_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="folder must be a path, got 's3://bucket'"):
        GPUHealth(folder="s3://bucket")
    with pytest.raises(TypeError, match="hang must be a HangRule or None, got 300"):
        GPUHealth(hang=300)  # type: ignore[arg-type]


def threads_of(callback: GPUHealth, folder: Path) -> set[str]:
    seen: set[str] = set()

    class Sees(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.update(thread.name for thread in threading.enumerate() if thread.name.startswith("air-health"))

    options = fast_trainer_kwargs(folder, callbacks=[callback, Sees()], limit_val_batches=0)
    Trainer(**options).fit(Regression(), loader(), loader())
    return seen


def test_a_rank_has_a_thread_only_if_something_may_be_asked_of_it(tmp_path: Path) -> None:
    use_stub(None)
    assert threads_of(GPUHealth(hang=None), tmp_path) == set()
    assert threads_of(GPUHealth(), tmp_path) == {"air-health-rank"}
    stops = GPUHealth(hang=None, rules=[Rule("power_w", above=1, action="checkpoint_stop")])
    assert threads_of(stops, tmp_path) == {"air-health-rank"}
    assert list(tmp_path.iterdir()) == [], "a healthy run leaves no file"
