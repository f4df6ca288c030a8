"""A save is of the moment at which it was asked for, one at a time, and fails on every rank alike or not at all.

What goes on in the background is held, slowed or broken here; what is checked is what a user sees: which values a
checkpoint has, when the training thread goes on, what is raised where, and that the process ends.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_air import AirStrategy, AsyncUCCheckpointIO, verify_checkpoint
from lightning_air.checkpoint import CheckpointFailedError, background, saver, staging, writing
from lightning_air.checkpoint.shard_file import write_shard_file
from lightning_air.checkpoint.writing import write_share
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """For code that runs in a rank, where there is no monkeypatch fixture."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def held_writing() -> Iterator[threading.Event]:
    """Nothing is written before the event is set, or the block ends."""
    go_on = threading.Event()

    def wait_and_write(*args: Any) -> Any:
        assert go_on.wait(30)
        return write_share(*args)

    with replaced(background, "write_share", wait_and_write):
        try:
            yield go_on
        finally:
            go_on.set()


@contextlib.contextmanager
def new_io(**options: Any) -> Iterator[AsyncUCCheckpointIO]:
    io = AsyncUCCheckpointIO(**options)
    if dist.is_initialized():
        io.connect("ddp")
    try:
        yield io
    finally:
        io.teardown()


def load(path: str | Path, **options: Any) -> dict[str, Any]:
    return AsyncUCCheckpointIO().load_checkpoint(str(path), **options)


def is_published(path: str | Path) -> bool:
    return Path(path, ".metadata").exists()


def checkpoint_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-air")]


# ---- every leaf is a copy --------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, counts: list[int]) -> None:
        self.counts = counts


def everything() -> dict[str, Any]:
    return {
        "global_step": 3,
        "state_dict": {"w": torch.arange(6.0), "_extra_state": np.arange(3), "sub._extra_state": Counter([1])},
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0) / 2}},
                "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99], "params": [0]}],
            }
        ],
        "callbacks": {
            "mine": {
                "array": np.ones(4),
                "list": [1, [2]],
                "small": torch.ones(2),
                "large": torch.ones(1 << 19),
                "counter": Counter([7]),
            }
        },
    }


def spoil(value: Any) -> None:
    """Change all that can be changed in place."""
    if isinstance(value, Tensor):
        value.fill_(-1)
    elif isinstance(value, np.ndarray):
        value[...] = -1
    elif isinstance(value, Counter):
        value.counts.append(-1)
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            spoil(child)
        value.clear()


def save_and_spoil(path: str) -> None:
    checkpoint = everything()
    with held_writing() as go_on, new_io() as io:
        io.save_checkpoint(checkpoint, path)
        assert not is_published(path)
        spoil(checkpoint)
        go_on.set()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_changes_right_after_the_call_is_saved_as_it_was(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "step"
    values(run_ranks(save_and_spoil, num_ranks, args=(str(path),), init_process_group="gloo"))
    found, expected = load(path, weights_only=False), everything()
    assert found["global_step"] == 3
    assert torch.equal(found["state_dict"]["w"], torch.arange(6.0))
    assert np.array_equal(found["state_dict"]["_extra_state"], np.arange(3))
    assert found["state_dict"]["sub._extra_state"].counts == [1]
    (state,) = found["optimizer_states"]
    assert state["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    assert state["state"][0]["step"] == 3.0
    assert torch.equal(state["state"][0]["exp_avg"], torch.arange(6.0) / 2)
    mine = found["callbacks"]["mine"]
    assert np.array_equal(mine["array"], np.ones(4))
    assert mine["list"] == [1, [2]]
    assert torch.equal(mine["small"], torch.ones(2))
    assert torch.equal(mine["large"], torch.ones(1 << 19))
    assert mine["counter"].counts == [7]


# ---- two saves with steps between (CASES 10) -------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def flat(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    found = dict(checkpoint["state_dict"])
    for index, fields in checkpoint["optimizer_states"][0]["state"].items():
        found |= {f"{index}.{name}": value for name, value in fields.items()}
    return {name: value.clone() for name, value in found.items()}


def save_often(folder: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())
    saved = []
    with new_io() as io:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            if step % 2:
                saved.append(flat(state_of(model, optimizer)))
                io.save_checkpoint(state_of(model, optimizer), f"{folder}/{step}")
    return saved


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_of_several_saves_is_exact_for_its_own_step(num_ranks: int, tmp_path: Path) -> None:
    saved = values(run_ranks(save_often, num_ranks, args=(str(tmp_path),), init_process_group="gloo"))[0]
    for step, expected in zip((1, 3, 5), saved, strict=True):
        found = flat(load(tmp_path / str(step)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(saved[0]["0.weight"], saved[1]["0.weight"])


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with held_writing() as go_on, new_io() as io:
        io.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, first)
        assert io.is_saving
        release = threading.Timer(0.3, go_on.set)
        release.start()
        io.save_checkpoint({"state_dict": {"w": torch.zeros(3)}}, second)
        assert is_published(first)
        io.settle()
        release.join()
        reports = io.take_reports()
    assert [report.path for report in reports] == [str(first), str(second)]
    assert reports[0].wait_previous_seconds < 0.2 < reports[1].wait_previous_seconds
    assert reports[1].blocking_seconds >= reports[1].wait_previous_seconds
    assert torch.equal(load(first)["state_dict"]["w"], torch.ones(3))
    assert torch.equal(load(second)["state_dict"]["w"], torch.zeros(3))


# ---- a copy that overlaps with the training --------------------------------------------------------------------------


class Normalized(Regression):
    """With buffers that every forward changes, long before the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class SaveEachStep(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.saved: list[dict[str, Tensor]] = []
        self.num_overlapping = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
        self.saved.append(flat({"state_dict": pl_module.state_dict(), "optimizer_states": [optimizer]}))
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")
        self.num_overlapping += "lightning-air-stage" in checkpoint_threads()


def overlap(folder: str, overlap_copy: bool) -> tuple[list[dict[str, Tensor]], int, int]:
    copy_all = staging._copy_all

    def copy_late(pairs: list[tuple[Tensor, Tensor]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)  # a step takes a few milliseconds
        copy_all(pairs)

    saves = SaveEachStep(folder)
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(),
            plugins=[AsyncUCCheckpointIO(overlap_copy=overlap_copy)],
            callbacks=[saves],
            limit_train_batches=4,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
    )
    torch.manual_seed(1)
    batches = loader(trainer.world_size, trainer.global_rank)
    with replaced(staging, "_copy_all", copy_late):
        trainer.fit(Normalized(), batches, batches)
    return saves.saved, saves.num_overlapping, len(_global_optimizer_pre_hooks)


def test_a_copy_that_overlaps_with_the_next_step_is_of_its_own_step(tmp_path: Path) -> None:
    ranks = values(run_ranks(overlap, 2, args=(str(tmp_path), True)))
    for saved, num_overlapping, num_hooks in ranks:
        assert len(saved) == num_overlapping == 4  # else this would prove nothing
        assert num_hooks == 0
    for step, expected in enumerate(ranks[0][0], start=1):
        checkpoint = load(tmp_path / str(step))
        for name, value in flat(checkpoint).items():
            assert torch.equal(value, expected[name]), (step, name)
    assert not torch.equal(ranks[0][0][0]["norm.running_mean"], ranks[0][0][1]["norm.running_mean"])


def test_by_default_nothing_overlaps(tmp_path: Path) -> None:
    for _, num_overlapping, _ in values(run_ranks(overlap, 2, args=(str(tmp_path), False))):
        assert num_overlapping == 0


# ---- short of memory -------------------------------------------------------------------------------------------------


def save_short_of_memory(folder: str) -> tuple[list[bool], list[bool], list[str]]:
    is_short = dist.get_rank() == 1
    published = []
    with warnings.catch_warnings(record=True) as caught, new_io() as io:
        warnings.simplefilter("always")
        for index, free in enumerate((0, 1 << 40)):
            with replaced(saver, "free_memory_bytes", lambda free=free: free if is_short else 1 << 40):
                io.save_checkpoint({"state_dict": {"w": torch.full((20_000,), float(index))}}, f"{folder}/{index}")
            published.append(is_published(f"{folder}/{index}"))
        io.settle()
        asynchronous = [report.asynchronous for report in io.take_reports()]
    return published[:1], asynchronous, [str(each.message) for each in caught]


def test_memory_short_on_one_rank_makes_all_write_synchronously(tmp_path: Path) -> None:
    ranks = values(run_ranks(save_short_of_memory, 2, args=(str(tmp_path),), init_process_group="gloo"))
    for published, asynchronous, _ in ranks:
        assert published == [True]  # on return, on every rank
        assert asynchronous == [False, True]
    (message,) = set(ranks[0][2])
    assert ranks[0][2] == [message]  # once
    assert "short on rank 1" in message
    assert "written synchronously" in message
    for index in range(2):
        assert torch.equal(load(tmp_path / str(index))["state_dict"]["w"], torch.full((20_000,), float(index)))


# ---- failures --------------------------------------------------------------------------------------------------------


def full_disk(path: Path, name: str, items: Any) -> Any:
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, while writing {name}", str(path))


def disk(*, is_full: bool) -> contextlib.AbstractContextManager[None]:
    return replaced(writing, "write_shard_file", full_disk if is_full else write_shard_file)


def fail_on_rank_1(folder: str) -> list[tuple[str, str]]:
    """Return what the second call says, and then what the third and the end say."""
    state = {"state_dict": {"w": torch.ones(20_000)}}
    errors = []
    with new_io() as io:
        io.save_checkpoint(state, f"{folder}/good")
        io.settle()
        with disk(is_full=dist.get_rank() == 1):
            io.save_checkpoint(state, f"{folder}/bad")
            with pytest.raises(CheckpointFailedError) as caught:
                io.save_checkpoint(state, f"{folder}/never-begun")
        errors.append((str(caught.value), str(caught.value.__cause__)))
        io.save_checkpoint(state, f"{folder}/after")  # once raised it is over
        assert io.settle()
        outcomes = [report.error for report in io.take_reports()]
        assert [error is None for error in outcomes] == [True, False, True]
    return errors


def test_a_failed_save_is_raised_once_on_every_rank_with_rank_file_and_cause(tmp_path: Path) -> None:
    for ((message, cause),) in values(run_ranks(fail_on_rank_1, 2, args=(str(tmp_path),), init_process_group="gloo")):
        for told in (message, cause):
            assert "No space left on device, while writing __1_0.distcp" in told
        assert "Rank 1: OSError" in message
        assert f"{tmp_path}/bad" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "good"]
    assert all(verify_checkpoint(tmp_path / name).valid for name in ("after", "good"))


def fail_to_copy_on_rank_1(folder: str) -> tuple[str, bool]:
    def no_memory(pairs: list[tuple[Tensor, Tensor]]) -> None:
        raise MemoryError("no page left")

    state = {"state_dict": {"w": torch.ones(20_000)}}
    with new_io() as io:
        with replaced(staging, "_copy_all", no_memory if dist.get_rank() == 1 else staging._copy_all):
            io.save_checkpoint(state, f"{folder}/bad")
        with pytest.raises(CheckpointFailedError) as caught:
            io.settle(20)
        io.save_checkpoint(state, f"{folder}/after")
        return str(caught.value), io.settle(20)


def test_a_copy_that_fails_on_one_rank_leaves_no_other_waiting(tmp_path: Path) -> None:
    for message, has_ended in values(
        run_ranks(fail_to_copy_on_rank_1, 2, args=(str(tmp_path),), init_process_group="gloo", timeout_seconds=30)
    ):
        assert "Rank 1: MemoryError: no page left" in message
        assert has_ended
    assert [path.name for path in tmp_path.iterdir()] == ["after"]


def warn_and_go_on(folder: str) -> tuple[list[str], str, bool]:
    state = {"state_dict": {"w": torch.ones(20_000)}}
    told: list[str] = []
    raised = ""
    with new_io(on_failure="warn", max_consecutive_failures=3) as io:
        for index, is_full in enumerate([True, True, False, True, True, True, False]):
            with warnings.catch_warnings(record=True) as caught, disk(is_full=is_full and dist.get_rank() == 1):
                warnings.simplefilter("always")
                io.save_checkpoint(state, f"{folder}/{index}")
                try:
                    io.settle()
                except CheckpointFailedError as error:
                    raised += f"{index}: {error}"
            told += [f"{index}: {each.message}" for each in caught]
        reports = io.take_reports()
    return told, raised, [report.error is None for report in reports] == [False, False, True, False, False, False, True]


def test_warnings_up_to_the_limit_of_failures_in_a_row(tmp_path: Path) -> None:
    ranks = values(run_ranks(warn_and_go_on, 2, args=(str(tmp_path),), init_process_group="gloo"))
    for told, raised, has_expected_reports in ranks:
        assert [message[:2] for message in told] == ["0:", "1:", "3:", "4:"]
        assert "2 more in a row" in told[0]
        assert "1 more in a row" in told[1]
        assert "2 more in a row" in told[2]  # a save that succeeds begins the count anew
        assert all("while writing __1_0.distcp" in message for message in told)
        assert raised.startswith(f"5: Checkpoint {tmp_path}/5")
        assert has_expected_reports
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "6"]


class FailsLater(Callback):
    """A save that fails, and then an exception of the user's own."""

    def __init__(self, path: str, error: BaseException | None) -> None:
        self.path = path
        self.error = error

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if i == 1:
            trainer.save_checkpoint(self.path)
        if i == 3 and self.error is not None:
            raise self.error


def fit_with_a_full_disk(path: str, sharding: str, raises: bool) -> tuple[str, list[str], list[str]]:
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(sharding),
            plugins=[AsyncUCCheckpointIO()],
            callbacks=[FailsLater(path, ZeroDivisionError("the user's own") if raises else None)],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
    )
    batches = loader(trainer.world_size, trainer.global_rank)
    expected: type[Exception] = ZeroDivisionError if raises else CheckpointFailedError
    with warnings.catch_warnings(record=True) as caught, disk(is_full=trainer.global_rank == 1):
        warnings.simplefilter("always")
        with pytest.raises(expected) as error:
            trainer.fit(Regression(), batches, batches)
    told = [str(each.message) for each in caught if "was not saved" in str(each.message)]
    return str(error.value), told, checkpoint_threads()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_users_own_exception_is_not_masked(sharding: str, tmp_path: Path) -> None:
    results = values(run_ranks(fit_with_a_full_disk, 2, args=(str(tmp_path / "step"), sharding, True)))
    for message, _, threads in results:
        assert message == "the user's own"
        assert threads == []
    (told,) = results[0][1]
    assert "while writing __1_0.distcp" in told
    assert not is_published(tmp_path / "step")


def test_the_end_of_a_fit_raises_what_went_wrong_in_the_background(tmp_path: Path) -> None:
    for message, told, threads in values(
        run_ranks(fit_with_a_full_disk, 2, args=(str(tmp_path / "step"), "ddp", False))
    ):
        assert "Rank 1: OSError: [Errno 28] No space left on device, while writing __1_0.distcp" in message
        assert told == []
        assert threads == []


def test_an_upload_workers_error_never_publishes(tmp_path: Path) -> None:
    # pytorch#191391: the shard was lost, and `.metadata` named it.
    import fsspec  # type: ignore[import-untyped]

    from lightning_air.checkpoint import fsspec_store

    class Breaks(fsspec_store.FsspecStore):
        def put(self, name: str, source: Path) -> None:
            if name.endswith("_2.distcp"):
                raise OSError(errno.EACCES, "not allowed to write here")
            super().put(name, source)

    state = {"state_dict": {f"w{index}": torch.full((1000,), float(index)) for index in range(5)}}
    with new_io(staging_dir=tmp_path / "staging") as io:
        io._shelf.open_store = Breaks
        io._saver_now()._options = writing.WriteOptions(tmp_path / "staging", file_bytes=4000)
        io.save_checkpoint(state, "memory://ckpt/broken")
        with pytest.raises(CheckpointFailedError, match=r"_2\.distcp'.*not allowed to write here"):
            io.settle()
    assert fsspec.filesystem("memory").find("/ckpt") == []
    assert not list((tmp_path / "staging").glob("*"))


# ---- the main thread does something else -----------------------------------------------------------------------------


def wait_in_a_barrier(path: str) -> bool:
    """The group that the main thread waits in is not the background's (CASES 30)."""
    with held_writing() as go_on, new_io() as io:
        io.save_checkpoint({"state_dict": {"w": torch.ones(20_000)}}, path)
        if dist.get_rank() == 0:
            go_on.set()
            dist.barrier()  # rank 1 comes only once the checkpoint is published, which rank 0's thread has to do
        else:
            threading.Timer(0.1, go_on.set).start()
            assert io.settle(20)
            assert is_published(path)
            dist.barrier()
        for _ in range(20):
            dist.barrier()
        assert io.settle(20)
    return is_published(path)


def test_a_background_save_while_the_main_thread_waits_in_a_barrier(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    results = run_ranks(wait_in_a_barrier, 2, args=(path,), init_process_group="gloo", timeout_seconds=40)
    assert values(results) == [True, True]


# ---- ending ----------------------------------------------------------------------------------------------------------


def test_teardown_waits_ends_the_thread_and_may_be_called_again(tmp_path: Path) -> None:
    io = AsyncUCCheckpointIO()
    io.teardown()
    for name in ("one", "two"):  # a second fit uses the same IO
        io.begin()
        with held_writing() as go_on:
            io.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, tmp_path / name)
            assert checkpoint_threads() == ["lightning-air-checkpoint"]
            threading.Timer(0.1, go_on.set).start()
            io.teardown()
        assert is_published(tmp_path / name)
        assert checkpoint_threads() == []
        io.teardown()
    assert [report.published_path for report in io.take_reports()] == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_a_save_that_does_not_end_in_time_is_given_up(tmp_path: Path) -> None:
    io = AsyncUCCheckpointIO(drain_timeout=0.2)
    with held_writing():
        io.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, tmp_path / "slow")
        with pytest.raises(CheckpointFailedError, match=r"slow was not published within 0\.2 s"):
            io.teardown()


class InFlight(Callback):
    """Begins a save that takes a second, and then the run ends in some way."""

    def __init__(self, path: str, how: str) -> None:
        self.path = path
        self.how = how

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if i != 1 or trainer.current_epoch:
            return
        trainer.save_checkpoint(self.path)
        if trainer.global_rank == trainer.world_size - 1:
            if self.how == "exception":
                raise ZeroDivisionError("the user's own")
            if self.how in ("SIGINT", "SIGTERM"):
                os.kill(os.getpid(), getattr(signal, self.how))


def slowly(*args: Any) -> Any:
    time.sleep(0.5)
    return write_share(*args)


def end_somehow(path: str, how: str) -> None:
    setattr(background, "write_share", slowly)  # noqa: B010 - until the process ends, which is the point
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(),
            plugins=[AsyncUCCheckpointIO()],
            callbacks=[InFlight(path, how)],
            max_epochs=1 if how in ("end", "exception") else 1000,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
    )
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)


@pytest.mark.parametrize("how", ["end", "exception", "SIGINT", "SIGTERM"])
def test_the_process_ends_and_the_save_in_flight_is_published(how: str, tmp_path: Path) -> None:
    path = tmp_path / "step"
    (result,) = run_ranks(end_somehow, 1, args=(str(path), how), warnings_as_errors=False)
    assert (result.exitcode == 0) == (how == "end"), result.error
    if how == "exception":
        assert "ZeroDivisionError: the user's own" in (result.error or "")
    assert result.seconds < 20
    assert verify_checkpoint(path).valid


@pytest.mark.parametrize("how", ["end", "exception", "SIGTERM"])
def test_both_ranks_end_and_the_save_in_flight_is_published(how: str, tmp_path: Path) -> None:
    path = tmp_path / "step"
    for result in run_ranks(end_somehow, 2, args=(str(path), how), warnings_as_errors=False):
        assert (result.exitcode == 0) == (how == "end"), result.error
        assert result.seconds < 20
    assert verify_checkpoint(path).valid


SCRIPT = """
import sys, time
import torch
from lightning_air import AsyncUCCheckpointIO
from lightning_air.checkpoint import background

write_share = background.write_share
background.write_share = lambda *args: (time.sleep(0.5), write_share(*args))[1]
io = AsyncUCCheckpointIO()
io.save_checkpoint({"state_dict": {"w": torch.ones(1000)}}, sys.argv[1])
print("in flight", flush=True)
if sys.argv[2] == "exception":
    raise ZeroDivisionError("the user's own")
"""


@pytest.mark.parametrize(("how", "exitcode"), [("end", 0), ("exception", 1)])
def test_a_script_that_calls_no_teardown_ends_cleanly(how: str, exitcode: int, tmp_path: Path) -> None:
    Path("script.py").write_text(SCRIPT)
    path = tmp_path / "step"
    ended = subprocess.run(
        [sys.executable, "script.py", str(path), how], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == exitcode, ended.stderr
    assert "in flight" in ended.stdout
    assert ("ZeroDivisionError: the user's own" in ended.stderr) == (how == "exception")
    assert "lightning-air" not in ended.stderr
    assert verify_checkpoint(path).valid


# ---- the same name twice ---------------------------------------------------------------------------------------------


def save_same_name(path: str, values_: list[float], resume: bool) -> list[str | None]:
    with new_io() as io:
        if resume:
            io.load_checkpoint(path)
        for value in values_:
            io.save_checkpoint({"state_dict": {"w": torch.full((3,), value)}}, path)
        io.settle()
        return [report.published_path for report in io.take_reports()]


def in_ranks(call: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    results = values(run_ranks(call, num_ranks, args=args, init_process_group="gloo"))
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_name_that_is_taken_is_never_written_over(num_ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    published = in_ranks(save_same_name, num_ranks, path, [1.0, 2.0, 3.0], False)
    assert published == [path, f"{tmp_path}/last@2.ckpt", f"{tmp_path}/last@3.ckpt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last@3.ckpt"]
    assert load(path)["state_dict"]["w"].tolist() == [3.0] * 3  # by the name that was asked for


def test_the_one_resumed_from_is_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    in_ranks(save_same_name, 2, path, [1.0], False)
    assert in_ranks(save_same_name, 2, path, [2.0, 3.0], True) == [
        f"{tmp_path}/last@2.ckpt",
        f"{tmp_path}/last@3.ckpt",
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "last@3.ckpt"]
    assert load(path)["state_dict"]["w"].tolist() == [3.0] * 3


def test_the_older_one_stays_until_the_new_one_is_published(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    state = {"state_dict": {"w": torch.ones(3)}}
    with new_io() as io:
        io.save_and_wait(state, path)
        with held_writing() as go_on:
            io.save_checkpoint(state, path)
            time.sleep(0.1)
            assert verify_checkpoint(path).valid
            go_on.set()
            io.settle()
        with disk(is_full=True):
            io.save_checkpoint(state, path)
            with pytest.raises(CheckpointFailedError):
                io.settle()
    assert [entry.name for entry in tmp_path.iterdir()] == ["last@2.ckpt"]


def test_a_stock_checkpoint_file_of_that_name_is_replaced_too(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.ones(3)}}, path)
    with new_io() as io:
        io.save_and_wait({"state_dict": {"w": torch.zeros(3)}}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last@2.ckpt"]
    assert load(path)["state_dict"]["w"].tolist() == [0.0] * 3
