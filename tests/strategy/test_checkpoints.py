"""Who calls the CheckpointIO, and that a run resumes: with a stock IO, with a collective one, on another world size."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch.distributed.tensor import DTensor

from lightning_air import AirStrategy, AsyncUCCheckpointIO
from lightning_air.checkpoint.lightning_form import numbers_to_names
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Outcome, RecordLosses, Regression, full_weights, loader

SHARDINGS = ["ddp", "fsdp", "hsdp"]


class CollectiveIO(CheckpointIO):
    """What the collective contract asks for, on plain DCP; it records who called what."""

    collective = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def connect(self, sharding: str) -> None:
        self.calls.append(("connect", sharding))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.calls.append(("save", str(path)))
        rest = dict(checkpoint)
        names = rest.pop("lightning_air")["parameter_names"]
        sharded = {"state_dict": rest.pop("state_dict")}
        states = zip(rest.pop("optimizer_states", []), names, strict=True)
        sharded |= {f"optimizer_{index}": numbers_to_names(*pair) for index, pair in enumerate(states)}
        dcp.save(sharded, checkpoint_id=path)
        if dist.get_rank() == 0:
            torch.save(rest, Path(path, "rest.pt"))
        dist.barrier()

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: Any = None,
        *,
        state: dict[str, Any] | None = None,
        like: Any = None,
        strict: bool = True,
    ) -> dict[str, Any]:
        self.calls.append(("load", str(path)))
        rest = torch.load(Path(path, "rest.pt"), weights_only=False)
        assert state is not None
        dcp.load(state, checkpoint_id=path)
        return rest

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", str(path)))

    def teardown(self) -> None:
        self.calls.append(("teardown", ""))


class RecordingIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", str(path)))
        super().save_checkpoint(checkpoint, path, storage_options)

    def teardown(self) -> None:
        self.calls.append(("teardown", ""))


def make_trainer(
    sharding: str | None, plugins: list[Any] | None, callbacks: list[Callback], max_epochs: int
) -> Trainer:
    return Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(sharding) if sharding else "auto",
            plugins=plugins,
            callbacks=callbacks,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            max_epochs=max_epochs,
        )
    )


def fit(
    sharding: str | None,
    max_epochs: int,
    *,
    resume: str | None = None,
    save: str | None = None,
    plugins: list[Any] | None = None,
    average: bool = False,
    compile_a_layer: bool = False,
) -> Outcome:
    outcome = Outcome()
    callbacks: list[Callback] = [EMAWeightAveraging(decay=0.8)] if average else []
    trainer = make_trainer(sharding, plugins, [*callbacks, RecordLosses(outcome)], max_epochs)
    torch.manual_seed(1 if resume is None else 2 + trainer.global_rank)
    module: Any = Regression()
    if compile_a_layer:
        module.net.layers[0] = torch.compile(module.net.layers[0], backend="eager")
    batches = loader(trainer.world_size, trainer.global_rank)
    saver = SaveAt(save)
    trainer.callbacks.append(saver)
    trainer.fit(module, batches, batches, ckpt_path=resume)
    outcome.weights = full_weights(module)
    outcome.extra["calls"] = list(getattr(trainer.strategy.checkpoint_io, "calls", []))
    outcome.extra["step"] = trainer.global_step
    return outcome


class SaveAt(Callback):
    """Saves at the end of the first epoch, while everything is in use."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.path is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit_collectively(sharding: str, max_epochs: int, save: str | None, resume: str | None) -> Outcome:
    return fit(sharding, max_epochs, save=save, resume=resume, plugins=[CollectiveIO()])


def fit_recording(sharding: str, save: str) -> Outcome:
    return fit(sharding, 1, save=save, plugins=[RecordingIO()])


def fit_averaged(sharding: str | None, max_epochs: int, save: str | None, resume: str | None) -> Outcome:
    return fit(sharding, max_epochs, save=save, resume=resume, average=True)


def fit_averaged_collectively(
    sharding: str, max_epochs: int, save: str | None, resume: str | None, compile_a_layer: bool
) -> Outcome:
    plugins = [AsyncUCCheckpointIO()]
    return fit(
        sharding,
        max_epochs,
        save=save,
        resume=resume,
        plugins=plugins,
        average=True,
        compile_a_layer=compile_a_layer,
    )


def fit_plain(sharding: str | None, max_epochs: int, save: str | None, resume: str | None) -> Outcome:
    return fit(sharding, max_epochs, save=save, resume=resume)


def assert_resumed_as_if_never_stopped(resumed: Outcome, whole: Outcome) -> None:
    assert resumed.extra["step"] == whole.extra["step"] == 24
    assert resumed.losses == pytest.approx(whole.losses[8:], rel=1e-4)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("world_sizes", [(2, 2), (2, 1), (1, 2), (2, 4)], ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_resuming_with_a_stock_checkpoint_io_on_another_world_size(
    sharding: str, world_sizes: tuple[int, int], tmp_path: Path
) -> None:
    whole = fit_plain(None, 3, None, None)
    path = str(tmp_path / "step.ckpt")
    values(run_ranks(fit_plain, world_sizes[0], args=(sharding, 1, path, None)))
    assert Path(path).is_dir() == (sharding != "ddp")  # Lightning's sharded form, or its single file
    for resumed in values(run_ranks(fit_plain, world_sizes[1], args=(sharding, 3, None, path))):
        assert_resumed_as_if_never_stopped(resumed, whole)


def test_fsdp_resumes_from_a_single_file_of_ddp(tmp_path: Path) -> None:
    whole = fit_plain(None, 3, None, None)
    path = str(tmp_path / "step.ckpt")
    values(run_ranks(fit_plain, 2, args=("ddp", 1, path, None)))
    for resumed in values(run_ranks(fit_plain, 2, args=("fsdp", 3, None, path))):
        assert_resumed_as_if_never_stopped(resumed, whole)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_weight_averages_survive_a_checkpoint(sharding: str, tmp_path: Path) -> None:
    whole = fit_averaged(None, 3, None, None)
    path = str(tmp_path / "step.ckpt")
    values(run_ranks(fit_averaged, 2, args=(sharding, 1, path, None)))
    for resumed in values(run_ranks(fit_averaged, 2, args=(sharding, 3, None, path))):
        assert_resumed_as_if_never_stopped(resumed, whole)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "compiled", [(True, True), (False, True), (True, False)], ids=lambda pair: f"{pair[0]} to {pair[1]}"
)
def test_weight_averages_survive_a_collective_io_and_compilation(
    sharding: str, compiled: tuple[bool, bool], tmp_path: Path
) -> None:
    whole = fit_averaged(None, 3, None, None)
    path = str(tmp_path / "step.ckpt")
    saving, resuming = compiled
    # Tracing warns about what it cannot see through, which is not what is tested here.
    options: dict[str, Any] = {"warnings_as_errors": False, "timeout_seconds": 120}
    values(run_ranks(fit_averaged_collectively, 2, args=(sharding, 1, path, None, saving), **options))
    for resumed in values(run_ranks(fit_averaged_collectively, 2, args=(sharding, 3, None, path, resuming), **options)):
        assert_resumed_as_if_never_stopped(resumed, whole)


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp"])
def test_a_collective_io_saves_and_loads_on_every_rank(sharding: str, tmp_path: Path) -> None:
    whole = fit_plain(None, 3, None, None)
    path = str(tmp_path / "step")
    for saved in values(run_ranks(fit_collectively, 2, args=(sharding, 1, path, None))):
        assert saved.extra["calls"] == [("connect", sharding), ("save", path), ("teardown", "")]
    for resumed in values(run_ranks(fit_collectively, 4, args=(sharding, 3, None, path))):
        assert resumed.extra["calls"] == [("connect", sharding), ("load", path), ("teardown", "")]
        assert_resumed_as_if_never_stopped(resumed, whole)


class KeepsShards(Callback):
    """A callback's state that holds shards: on rank 0 alone it would be half of them."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = {"weights": pl_module.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        return getattr(self, "kept", {})


def save_with_kept_shards() -> None:
    trainer = make_trainer("fsdp", None, [KeepsShards()], 1)
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)
    trainer.save_checkpoint("last.ckpt")


def test_shards_that_would_be_lost_are_refused_by_key() -> None:
    for result in run_ranks(save_with_kept_shards, 2):
        assert "ValueError: The checkpoint holds sharded tensors under 'callbacks'" in (result.error or "")


def who_saves_removes_and_ends(io: Any, sharding: str, path: str, *, fails: bool) -> dict[str, Any]:
    trainer = make_trainer(sharding, [io], [SaveAt(path)], 1)
    if fails:
        trainer.callbacks.append(FailsAtTheEnd())
    batches = loader(trainer.world_size, trainer.global_rank)
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(Regression(), batches, batches)
    calls = [name for name, _ in io.calls]
    trainer.strategy.remove_checkpoint(path)
    return {"rank": trainer.global_rank, "calls": calls, "removes": [name for name, _ in io.calls].count("remove")}


class FailsAtTheEnd(Callback):
    def on_train_end(self, *_: Any) -> None:
        raise ZeroDivisionError


class RemovingIO(RecordingIO):
    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", str(path)))


def call_io(kind: str, sharding: str, path: str, fails: bool) -> dict[str, Any]:
    return who_saves_removes_and_ends(
        CollectiveIO() if kind == "collective" else RemovingIO(), sharding, path, fails=fails
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", ["collective", "stock"])
def test_who_is_called(kind: str, sharding: str, fails: bool, tmp_path: Path) -> None:
    seen = values(run_ranks(call_io, 2, args=(kind, sharding, str(tmp_path / "step"), fails)))
    for one in seen:
        saves = kind == "collective" or (sharding == "ddp" and one["rank"] == 0)  # a stock IO has no part in FSDP's
        assert one["calls"].count("save") == int(saves)
        assert one["calls"].count("teardown") == 1
        assert one["removes"] == int(kind == "collective" or one["rank"] == 0)


class BreaksTeardown(Regression):
    """What a broken GPU does: moving the model to the host raises."""

    def cpu(self) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def teardown_breaks() -> list[str]:
    io = RecordingIO()
    trainer = make_trainer("ddp", [io], [], 1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trainer.fit(BreaksTeardown(), loader(), loader())
    return [name for name, _ in io.calls]


def test_the_ios_teardown_runs_even_when_the_strategys_breaks() -> None:
    (calls,) = values(run_ranks(teardown_breaks, 1))
    assert "teardown" in calls


def test_what_a_collective_io_gets_under_fsdp_is_sharded(tmp_path: Path) -> None:
    assert values(run_ranks(sharded_names, 2, args=(str(tmp_path / "step"),))) == [True, True]


def sharded_names(path: str) -> bool:
    kept: dict[str, Any] = {}

    class Keep(CollectiveIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
            kept.update(checkpoint)

    trainer = make_trainer("fsdp", [Keep()], [SaveAt(path)], 1)
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Regression(), batches, batches)
    model_is_sharded = all(isinstance(kept["state_dict"][name], DTensor) for name in ("scale", "net.inp.weight"))
    names = kept["lightning_air"]["parameter_names"][0][0]
    state = kept["optimizer_states"][0]["state"]
    return model_is_sharded and isinstance(state[names.index("net.inp.weight")]["exp_avg"], DTensor)
