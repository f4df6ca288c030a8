"""`AirCheckpoint` put together: what is refused before training and what to write instead, and unusual Trainers."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_air import AirCheckpoint, AsyncUCCheckpointIO, verify_checkpoint
from tests.checkpoint.runs import CuriousLogger, Saves, Scored, fit, make_trainer, published, steps
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import loader

# ---- refused when it is made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dirpath": "/Volumes/main/default"}, "A volume is written '/Volumes/<catalog>/<schema>/<volume>/<folder>'"),
        ({"dirpath": "dbfs:/checkpoints"}, "Of DBFS only volumes can be used"),
        ({"dirpath": "s4://bucket/run"}, "fsspec knows no 's4://'"),
        ({"dirpath": ""}, "It is empty"),
        ({"every": "30"}, "every must be a duration, a number of steps or epochs, or 'auto', got '30'"),
        ({"every": 500}, "A number alone does not say of what"),
        ({"keep_last": 0}, "keep_last must be a whole number of at least 1, got 0"),
        ({"keep_last": True}, "keep_last must be a whole number of at least 1, got True"),
        ({"save_last": "symlink"}, "save_last must be True, False or 'link', got 'symlink'"),
        ({"exception_timeout": -1.0}, "exception_timeout must be a number of at least 0, got -1.0"),
        ({"exception_timeout": "2min"}, "exception_timeout must be a number of at least 0, got '2min'"),
        ({"failures_per_gpu_day": float("nan")}, "failures_per_gpu_day must be a number of at least 0, got nan"),
        ({"filename": "best"}, "filename must contain {step}.*got 'best'. Write 'best-{step}'"),
        ({"filename": "{epoch}-{val_loss:.2f}"}, "Write '{epoch}-{val_loss:.2f}-{step}'"),
        ({"filename": "{step}-{val/loss:.2f}"}, "filename must not contain a slash.*auto_insert_metric_name=False"),
        ({"filename": "a/{step}", "auto_insert_metric_name": False}, "filename must not contain a slash"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_with_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
        AirCheckpoint(**options)


@pytest.mark.parametrize("options", [{"mode": "best"}, {"save_top_k": 2}, {"save_top_k": -2}])
def test_what_model_checkpoint_refuses_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException):
        AirCheckpoint(**options)


def test_making_one_touches_nothing(tmp_path: Path) -> None:
    AirCheckpoint(
        str(tmp_path / "run"), timedelta(minutes=10), filename="{step}-{val/loss:.2f}", auto_insert_metric_name=False
    )
    assert list(tmp_path.iterdir()) == []


# ---- refused before training -----------------------------------------------------------------------------------------


def refused(strategy: Any, plugins: list[Any], *callbacks: AirCheckpoint) -> str:
    options = {"callbacks": list(callbacks), "strategy": strategy, "plugins": plugins, "enable_checkpointing": True}
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), **options))
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises((ValueError, OSError)) as raised:
        fit(trainer)
    assert trainer.global_step == 0
    assert sorted(Path.cwd().rglob("*")) == before
    return str(raised.value)


def refused_with_a_stock_sharded_strategy() -> str:
    strategy = ModelParallelStrategy(process_group_backend="gloo")
    return refused(strategy, [AsyncUCCheckpointIO()], AirCheckpoint("run"))


def test_stock_fsdp_is_refused_since_it_would_not_use_the_plugin() -> None:
    (message,) = values(run_ranks(refused_with_a_stock_sharded_strategy, 1))
    assert "ModelParallelStrategy never calls a CheckpointIO" in message
    assert "Use AirStrategy(sharding='fsdp')" in message


def test_lightnings_async_io_is_refused() -> None:
    assert "Use AsyncUCCheckpointIO" in refused("auto", [AsyncCheckpointIO()], AirCheckpoint("run"))


def test_a_pointer_that_the_io_could_not_read_is_refused() -> None:
    message = refused("auto", [], AirCheckpoint("memory://bucket/run", save_last=True))
    assert "save_last needs links, which memory://bucket/run does not have, or AsyncUCCheckpointIO" in message


@pytest.mark.parametrize("other", ["run", "./run/"])
def test_two_in_one_folder_are_refused(other: str) -> None:
    message = refused("auto", [], AirCheckpoint("run"), AirCheckpoint(other, monitor="score"))
    assert "Two AirCheckpoints save to " in message
    assert "a dirpath of its own" in message


def fit_where_nothing_can_be_written(strategy: str) -> None:
    fit(make_trainer(strategy, "ours", AirCheckpoint("a-file/run"), num_ranks=2, max_steps=1))


@pytest.mark.parametrize("strategy", ["air fsdp", "stock ddp"])
def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    for result in run_ranks(fit_where_nothing_can_be_written, 2, args=(strategy,), cwd=tmp_path):
        assert re.search(
            r"OSError: .*checkpoints cannot be written to '.*/a-file/run': .*Not a directory", result.error or ""
        )
        assert "Check that the place exists, that this user may create and delete files there" in (result.error or "")
        assert result.seconds < 20


# ---- unusual Trainers ------------------------------------------------------------------------------------------------


def fit_with_two(strategy: str, num_ranks: int) -> dict[str, Any]:
    often = AirCheckpoint("near", every="2steps", keep_last=1)
    rarely = AirCheckpoint("far", every="1h", monitor="score", save_top_k=1, keep_last=1)
    logger = CuriousLogger()
    trainer = make_trainer(
        strategy, "ours", often, rarely, num_ranks=num_ranks, logger=logger, max_steps=28, limit_val_batches=1
    )
    fit(trainer, Scored([3, 1, 2]))
    resumed = [AirCheckpoint("near", every="3steps"), AirCheckpoint("far", every="30min", monitor="score")]
    trainer = make_trainer(strategy, "ours", *resumed, num_ranks=num_ranks, max_steps=32, limit_val_batches=1)
    fit(trainer, Scored([4]), ckpt_path="last")
    return {
        "near": steps("near"),
        "far": steps("far"),
        "best": [Path(each.best_model_path).name for each in (often, rarely, resumed[1])],
        "told": sorted({Path(path).name for path in logger.told}),
        "too early": logger.unpublished,
        "metrics": len(logger.metrics),
    }


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("air fsdp", 2), ("stock ddp", 2)])
def test_two_in_one_trainer_do_not_meddle(strategy: str, num_ranks: int) -> None:
    seen = values(run_ranks(fit_with_two, num_ranks, args=(strategy, num_ranks)))
    for each in seen:
        # The first attempt leaves 28 in both; the second resumes from the one saved later, and ends at 32.
        assert each["near"] == [30, 32]
        assert each["far"] == [16, 28, 32]
        assert each["best"] == ["epoch=3-step=28.ckpt", "epoch=1-step=16.ckpt", "epoch=1-step=16.ckpt"]
        assert each["too early"] == []
    # 14 of the one, and of the other 8, 16 and the end.
    assert seen[0]["metrics"] == 14 + 3
    assert len(seen[0]["told"]) == 14


def fit_quickly(**options: Any) -> list[str]:
    checkpoint = AirCheckpoint("run", every="1steps", monitor="score")
    trainer = make_trainer("air ddp", "ours", checkpoint, logger=False, limit_val_batches=1, **options)
    fit(trainer, Scored([1, 2, 3]))
    return published("run")


def fit_fast_dev_run() -> list[str]:
    return fit_quickly(fast_dev_run=2)


def test_fast_dev_run_touches_nothing(tmp_path: Path) -> None:
    assert values(run_ranks(fit_fast_dev_run, 2, cwd=tmp_path)) == [[], []]
    assert list(tmp_path.iterdir()) == []


def fit_after_a_sanity_check() -> tuple[list[str], list[int]]:
    checkpoint, saves = AirCheckpoint("run", every="1h", monitor="score"), Saves()
    trainer = make_trainer(
        "air ddp", "ours", checkpoint, saves, num_sanity_val_steps=2, limit_val_batches=2, max_epochs=1, max_steps=8
    )
    fit(trainer, Scored([1]))
    return published("run"), saves.steps


def test_sanity_checking_saves_nothing() -> None:
    assert values(run_ranks(fit_after_a_sanity_check, 1)) == [(["epoch=0-step=8.ckpt"], [8])]


def fit_twice(strategy: str) -> list[Any]:
    checkpoint = AirCheckpoint("run", every="3steps", keep_last=2)
    saves = [Saves(), Saves(), Saves()]
    first = make_trainer(strategy, "ours", checkpoint, saves[0], max_steps=8)
    fit(first)
    left = [steps("run")]
    # Once more from the start, with a Trainer of its own; then that one goes on.
    second = make_trainer(strategy, "ours", checkpoint, saves[1], max_steps=4)
    fit(second)
    left.append(steps("run"))
    second.fit_loop.epoch_loop.max_steps = 12
    fit(second)
    left.append(steps("run"))
    valid = [verify_checkpoint(f"run/{name}").valid for name in published("run")]
    return [saves[0].steps, saves[1].steps, left, valid]


@pytest.mark.parametrize("strategy", ["single", "air fsdp"])
def test_one_callback_serves_one_fit_after_another(strategy: str) -> None:
    for first, second, left, valid in values(run_ranks(fit_twice, 1 if strategy == "single" else 2, args=(strategy,))):
        assert first == [3, 6, 8]
        assert left[0] == [6, 8]
        assert left[1] == [6, 8, 3, 4]  # the farthest and the latest, until the run is as far as it was
        assert second == [3, 4, 6, 9, 12]
        assert left[2] == [9, 12]
        assert all(valid)


def evaluate(strategy: str) -> list[Any]:
    checkpoint = AirCheckpoint("run", every="4steps", monitor="score")
    trainer = make_trainer(strategy, "ours", checkpoint, max_steps=8, limit_val_batches=1)
    model = Scored([1, 2, 3, 4])
    fit(trainer, model)
    batches = loader(trainer.world_size, trainer.global_rank)
    found = [
        trainer.validate(model, batches, ckpt_path="last", verbose=False)[0].keys(),
        trainer.test(model, batches, ckpt_path="best", verbose=False)[0].keys(),
        trainer.test(dataloaders=batches, ckpt_path=f"run/{published('run')[0]}", verbose=False)[0].keys(),
    ]
    return [[sorted(each) for each in found], steps("run")]


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("air fsdp", 2)])
def test_validate_and_test_load_what_was_asked_for_and_save_nothing(strategy: str, num_ranks: int) -> None:
    for metrics, left in values(run_ranks(evaluate, num_ranks, args=(strategy,))):
        assert metrics == [["score"], ["test_loss"], ["test_loss"]]
        assert left == [4, 8]


def fit_without_a_dirpath() -> list[str]:
    checkpoint, logger = AirCheckpoint(every="4steps", keep_last=1), CuriousLogger()
    trainer = make_trainer("single", "ours", checkpoint, max_steps=8, logger=logger, default_root_dir="out")
    fit(trainer)
    assert len(logger.metrics) == 2
    return sorted(str(path) for path in Path().rglob("*.ckpt"))


def test_without_a_dirpath_it_is_model_checkpoints_folder() -> None:
    assert values(run_ranks(fit_without_a_dirpath, 1)) == [["out/curious/0/checkpoints/epoch=0-step=8.ckpt"]]


def fit_and_save_by_hand(strategy: str) -> list[Any]:
    logger = CuriousLogger()
    trainer = make_trainer(strategy, "ours", AirCheckpoint("run", every="3steps"), ByHand(), logger=logger, max_steps=8)
    fit(trainer)
    return [steps("run"), verify_checkpoint("mine.ckpt").valid, [step for step, _ in logger.metrics]]


class ByHand(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint("mine.ckpt")


@pytest.mark.parametrize("strategy", ["single", "air ddp"])
def test_what_the_user_saves_is_the_users(strategy: str) -> None:
    (seen,) = values(run_ranks(fit_and_save_by_hand, 1, args=(strategy,)))
    assert seen == [[6, 8], True, [3, 6, 8]]
