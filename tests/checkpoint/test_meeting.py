"""The ranks always meet: a load waits for the save under way, and no rank's error leaves another alone."""

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_air import AirStrategy, AsyncUCCheckpointIO, CheckpointFailedError
from lightning_air.checkpoint import background, crew
from lightning_air.checkpoint.lightning_form import numbers_to_names
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.places import open_store
from lightning_air.checkpoint.staging import Stager
from lightning_air.strategy.names import noted
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader


@contextlib.contextmanager
def slow_writing(seconds: float) -> Iterator[None]:
    write_share = background.write_share

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return write_share(*args, **kwargs)

    background.write_share = slow  # type: ignore[attr-defined]
    try:
        yield
    finally:
        background.write_share = write_share  # type: ignore[attr-defined]


def state(value: float) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((100_000,), value)}, "global_step": int(value)}


def load_while_saving(folder: str) -> float:
    dist.init_process_group("gloo")
    io = AsyncUCCheckpointIO()
    io.connect("ddp")
    io.save_checkpoint(state(1.0), f"{folder}/a")
    io.settle()
    with slow_writing(0.3 * (1 + dist.get_rank())):
        io.save_checkpoint(state(2.0), f"{folder}/b")
        loaded = io.load_checkpoint(f"{folder}/b")
    io.teardown()
    dist.destroy_process_group()
    return float(loaded["state_dict"]["w"][0])


def test_a_load_waits_for_the_save_of_what_it_asks_for(tmp_path: Path) -> None:
    assert values(run_ranks(load_while_saving, 2, args=(str(tmp_path),), timeout_seconds=60)) == [2.0, 2.0]


def save_where_rank_1_has_no_store(folder: str) -> tuple[str, float]:
    dist.init_process_group("gloo")
    io = AsyncUCCheckpointIO()
    io.connect("ddp")

    def lacking(path: str) -> Any:
        raise ModuleNotFoundError("no package for this place")

    if dist.get_rank() == 1:
        io._shelf.open_store = lacking
    started = time.monotonic()
    io.save_checkpoint(state(1.0), f"{folder}/a")
    with pytest.raises(CheckpointFailedError) as raised:
        io.settle()
    io.teardown()
    dist.destroy_process_group()
    return str(raised.value), time.monotonic() - started


def test_a_rank_that_cannot_open_the_place_fails_the_save_on_all_at_once(tmp_path: Path) -> None:
    for message, seconds in values(run_ranks(save_where_rank_1_has_no_store, 2, args=(str(tmp_path),))):
        assert "Rank 1: ModuleNotFoundError: no package for this place" in message
        assert seconds < 10


def load_with_a_full_disk(folder: str) -> str:
    dist.init_process_group("gloo")
    io = AsyncUCCheckpointIO()
    io.connect("ddp")
    for step in (1, 2):
        io.save_checkpoint(state(step), f"{folder}/step={step}")
        io.settle()

    class Full(LocalStore):
        is_local = False

        def get(self, name: str, target: Path) -> None:
            if dist.get_rank() == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().get(name, target)

    io._shelf.open_store = lambda path: Full(Path(path))
    with pytest.raises((RuntimeError, OSError)) as raised:
        io.load_checkpoint(f"{folder}/step=2")
    io.teardown()
    dist.destroy_process_group()
    return str(raised.value)


def test_a_full_disk_is_an_error_and_not_a_damaged_checkpoint(tmp_path: Path) -> None:
    for message in values(run_ranks(load_with_a_full_disk, 2, args=(str(tmp_path),))):
        assert "No space left on device" in message


class Moments(Callback):
    """When the copy of a save ended, as seen by a fit."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.after_forward: bool | None = None
        self.after_step: bool | None = None
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1 and not self.weights:
            self.weights = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
            trainer.save_checkpoint(self.path)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == 1:
            self.after_forward = trainer.strategy.checkpoint_io._saver._copy is not None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.after_forward is not None and self.after_step is None:
            self.after_step = trainer.strategy.checkpoint_io._saver._copy is not None


def fit_overlapping(folder: str) -> tuple[bool | None, bool | None, bool, bool]:
    copy_all, held = Stager._copy, threading.Event()

    def slow(self: Stager, pairs: Any, *, on_cuda: bool, in_background: bool) -> Any:
        finish = copy_all(self, pairs, on_cuda=on_cuda, in_background=in_background)
        if not in_background:
            return finish

        def later() -> None:
            time.sleep(0.3)
            finish()
            held.set()

        return later

    Stager._copy = slow  # type: ignore[method-assign]
    io = AsyncUCCheckpointIO(overlap_copy=True)
    moments = Moments(f"{folder}/step")
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(), strategy=AirStrategy(), plugins=[io], callbacks=[moments], max_epochs=1, limit_val_batches=0
        )
    )
    trainer.fit(Regression(), loader())
    (report,) = io.take_reports()
    loaded = AsyncUCCheckpointIO().load_checkpoint(f"{folder}/step")["state_dict"]
    is_exact = all(torch.equal(loaded[name], value) for name, value in moments.weights.items())
    return moments.after_forward, moments.after_step, is_exact, report.blocking_seconds > 0.29


def test_an_overlapped_copy_goes_on_through_the_forward_and_ends_before_the_step(tmp_path: Path) -> None:
    # Lightning hands forward and backward to the optimizer as a closure. The wait counts as blocking.
    assert values(run_ranks(fit_overlapping, 1, args=(str(tmp_path),), warnings_as_errors=False)) == [
        (True, False, True, True)
    ]


def test_optimizer_state_of_parameters_without_a_name_is_kept_apart() -> None:
    loose = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [loose[0]]}, {"params": [loose[1]]}], lr=0.1, momentum=0.9)
    for value, parameter in enumerate(loose, start=1):
        parameter.grad = torch.full((3,), float(value))
    optimizer.step()
    names = noted({}, torch.nn.Module(), [optimizer])["lightning_air"]["parameter_names"][0]
    kept = numbers_to_names(optimizer.state_dict(), names)["state"]
    assert sorted(float(each["momentum_buffer"][0]) for each in kept.values()) == [1.0, 2.0]


def test_work_is_done_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in an atexit function from Python 3.12 on.
    io = AsyncUCCheckpointIO()
    io.save_checkpoint(state(1.0), tmp_path / "first")
    io.settle()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(crew.threading.Thread, "start", refuse)
    io.save_checkpoint(state(2.0), tmp_path / "second")
    io.settle()
    monkeypatch.undo()
    io.teardown()
    assert open_store(str(tmp_path / "second")).num_bytes(".metadata") is not None
