"""`AirCheckpoint` while it trains: when it saves, what it keeps, and what it tells loggers and the console.

Real Trainers in real ranks, under AirStrategy and Lightning's own strategies, with AsyncUCCheckpointIO and Lightning's
own CheckpointIO. Clocks are the test's.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule

from lightning_air import AirCheckpoint
from lightning_air.checkpoint import cadence, verify_checkpoint
from tests.checkpoint.runs import (
    STEPS_PER_EPOCH,
    VOLUME,
    CuriousLogger,
    PassTime,
    Saves,
    Scored,
    TwoOptimizers,
    fit,
    hostile_volume,
    make_trainer,
    published,
    steps,
)
from tests.kit.hostile import Behaviour
from tests.kit.ranks import run_ranks, values

EVERYWHERE = [
    (strategy, num_ranks, "ours")
    for strategy, num_ranks in [("single", 1), ("air ddp", 1), ("air ddp", 2), ("air fsdp", 2), ("stock ddp", 2)]
]
EVERYWHERE_ELSE = [("single", 1, "lightning's"), ("air ddp", 2, "lightning's"), ("air fsdp", 2, "lightning's")]


# ---- one is left, and never none -------------------------------------------------------------------------------------


class CountPublished(Callback):
    """How few checkpoints there were after any batch, from the first one on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fewest = 1

    def on_train_batch_end(self, *_: Any) -> None:
        # `os.walk` passes over a folder that is being deleted meanwhile, where `glob` raises.
        files = [name for _, _, names in os.walk(self.folder) for name in names]
        now = sum(name == ".metadata" or name.endswith(".ckpt") for name in files)
        self.is_begun = getattr(self, "is_begun", False) or now > 0
        if self.is_begun:
            self.fewest = min(self.fewest, now)


def save_six_times(strategy: str, io: str, num_ranks: int, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    folder = f"{VOLUME}/run" if io == "ours" else f"{directory}/run"
    checkpoint = AirCheckpoint(folder, keep_last=1, **options)
    logger, saves, counted = CuriousLogger(), Saves(), CountPublished(Path(directory))
    trainer_options: dict[str, Any] = {"max_steps": 18}
    if "monitor" in options:
        trainer_options = {"max_epochs": 6, "limit_val_batches": 1}
    slow = Behaviour(bytes_per_second=600_000)
    with hostile_volume(Path(directory), slow) as volume:
        callbacks = [checkpoint, saves, counted]
        trainer = make_trainer(strategy, io, *callbacks, num_ranks=num_ranks, logger=logger, **trainer_options)
        fit(trainer, Scored([6, 5, 4, 3, 2, 1]))
        return {
            "saved": saves.steps,
            "left": steps(folder),
            "fewest": [counted.fewest, *(number - 1 for number in volume.fewest_while_deleting)],
            "deleted": len(volume.fewest_while_deleting),
            "told": logger.told,
            "told too early": logger.unpublished,
            "best": Path(checkpoint.best_model_path).name,
        }


@pytest.mark.parametrize(("strategy", "num_ranks", "io"), [*EVERYWHERE, *EVERYWHERE_ELSE])
def test_six_saves_to_a_slow_place_leave_one_and_there_is_always_one(
    strategy: str, num_ranks: int, io: str, tmp_path: Path
) -> None:
    seen = values(
        run_ranks(save_six_times, num_ranks, args=(strategy, io, num_ranks, str(tmp_path), {"every": "3steps"}))
    )
    for each in seen:
        assert each["saved"] == [3, 6, 9, 12, 15, 18]
        assert each["left"] == [18]
        assert min(each["fewest"]) >= 1
        assert each["best"] == "epoch=2-step=18.ckpt"  # of one without a monitor, the newest
    assert seen[0]["deleted"] == (5 if io == "ours" else 0)
    assert seen[0]["told too early"] == []
    assert [name.split("step=")[1] for name in seen[0]["told"]] == [f"{n}.ckpt" for n in (3, 6, 9, 12, 15, 18)]
    assert all(each["told"] == [] for each in seen[1:])


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("air fsdp", 2), ("stock ddp", 2)])
def test_six_better_ones_leave_one_with_save_top_k_1(strategy: str, num_ranks: int, tmp_path: Path) -> None:
    options = {"every": "1epoch", "monitor": "score", "save_top_k": 1, "save_last": True}
    seen = values(run_ranks(save_six_times, num_ranks, args=(strategy, "ours", num_ranks, str(tmp_path), options)))
    for each in seen:
        assert each["saved"] == [8, 16, 24, 32, 40, 48]
        assert each["left"] == [48]
        assert min(each["fewest"]) >= 1
        assert each["best"] == "epoch=5-step=48.ckpt"
    # While the best one is on its way, a logger is shown the best that is there.
    assert seen[0]["told too early"] == []
    assert len(seen[0]["told"]) >= 6


# ---- when ------------------------------------------------------------------------------------------------------------


def saved_at(
    every: str,
    strategy: str = "air ddp",
    *,
    seconds: float = 0.0,
    module: type[LightningModule] | None = None,
    **options: Any,
) -> tuple[list[int], list[int]]:
    """Return at which optimizer steps, and at which batches, a run saves; ranks' clocks have nothing in common."""
    checkpoint, saves = AirCheckpoint("run", every=every), Saves()
    trainer = make_trainer(strategy, "ours", checkpoint, saves, **options)
    global_rank = trainer.global_rank
    trainer.callbacks.append(PassTime(checkpoint, seconds * (1 + 9 * global_rank), start=1000.0 * global_rank))  # type: ignore[attr-defined]
    fit(trainer, None if module is None else module())
    return saves.steps, saves.batches


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("3steps", [3, 6, 9, 12, 15, 18, 20]),  # the end of training saves, too
        ("20steps", [20]),  # once
        ("1epoch", [8, 16, 20]),
        ("2epochs", [16, 20]),
        ("4s", [4, 8, 12, 16, 20]),
        ("2.5s", [3, 5, 8, 10, 13, 15, 18, 20]),  # on a grid: two steps late is not two steps later for ever
        ("1h", [20]),
    ],
)
def test_a_save_is_due_at_the_same_steps_on_ranks_with_different_clocks(every: str, expected: list[int]) -> None:
    for at_steps, _ in values(run_ranks(_saved_at_by_seconds, 2, args=(every,))):
        assert at_steps == expected


def _saved_at_by_seconds(every: str) -> tuple[list[int], list[int]]:
    return saved_at(every, seconds=1.0, max_steps=20)


def _saved_at_while_accumulating(every: str, strategy: str) -> tuple[list[int], list[int]]:
    return saved_at(every, strategy, seconds=1.0, max_steps=4, accumulate_grad_batches=4)


@pytest.mark.parametrize(
    ("every", "expected"),
    [("5s", [8, 12, 16]), ("1s", [4, 8, 12, 16]), ("1steps", [4, 8, 12, 16]), ("1epoch", [8, 16])],
)
@pytest.mark.parametrize("strategy", ["air ddp", "air fsdp"])
def test_a_save_waits_for_the_gradients_that_are_being_accumulated(
    strategy: str, every: str, expected: list[int]
) -> None:
    for at_steps, at_batches in values(run_ranks(_saved_at_while_accumulating, 2, args=(every, strategy))):
        assert at_batches == expected
        assert at_steps == [batch // 4 for batch in expected]


def _saved_at_with_two_optimizers(every: str) -> tuple[list[int], list[int]]:
    return saved_at(every, module=TwoOptimizers, seconds=1.0, max_steps=20)


@pytest.mark.parametrize(
    ("every", "expected"), [("6steps", [6, 12, 18, 20]), ("5steps", [6, 10, 16, 20]), ("3s", [6, 12, 18, 20])]
)
def test_with_two_optimizers_a_batch_is_two_steps(every: str, expected: list[int]) -> None:
    for at_steps, _ in values(run_ranks(_saved_at_with_two_optimizers, 2, args=(every,))):
        assert at_steps == expected


@dataclass
class Auto:
    steps: list[int]
    metrics: list[dict[str, float]]
    interval_seconds: float | None


def save_by_auto(directory: str, failures_per_gpu_day: float, seconds: float, max_steps: int) -> Auto:
    checkpoint = AirCheckpoint(f"{VOLUME}/run", every="auto", failures_per_gpu_day=failures_per_gpu_day)
    logger, saves, times = CuriousLogger(), Saves(), PassTime(checkpoint, seconds)
    with hostile_volume(Path(directory), Behaviour(bytes_per_second=2_000_000)):
        fit(make_trainer("air ddp", "ours", checkpoint, saves, times, logger=logger, max_steps=max_steps))
    return Auto(saves.steps, [metrics for _, metrics in logger.metrics], checkpoint._schedule.interval_seconds)


def test_auto_measures_a_save_early_and_then_chooses_the_interval_and_says_why(tmp_path: Path) -> None:
    results = run_ranks(save_by_auto, 2, args=(str(tmp_path), 2.6e-4, 60.0, 60))
    first, second = values(results)
    assert first.steps == second.steps
    assert first.steps[0] == 5  # FIRST_AUTO_SECONDS
    chosen = cadence.auto_interval(
        blocking_seconds=first.metrics[-1]["checkpoint/blocking_seconds"]
        - first.metrics[-1]["checkpoint/wait_previous_seconds"],
        upload_seconds=first.metrics[-1]["checkpoint/commit_lag_seconds"],
        num_gpus=2,
        failures_per_gpu_day=2.6e-4,
    )
    assert first.interval_seconds == pytest.approx(chosen.seconds)
    assert results[0].output.count("Checkpoints: a save every") >= 1
    assert "2 GPU(s) at 0.00026 failures per GPU and day" in results[0].output
    assert "Young/Daly: sqrt(2 x " in results[0].output
    assert "Young/Daly" not in results[1].output


def test_auto_never_has_training_wait_for_an_upload(tmp_path: Path) -> None:
    # A failure every few milliseconds: as often as possible, which is as often as an upload takes.
    for seen in values(run_ranks(save_by_auto, 2, args=(str(tmp_path), 1e10, 100.0, 400))):
        assert len(seen.steps) > 3
        waits = [metrics["checkpoint/wait_previous_seconds"] for metrics in seen.metrics]
        assert all(wait < 0.05 for wait in waits[:-1])  # the end of training may wait for the one before


# ---- what is kept ----------------------------------------------------------------------------------------------------


def keep_the_best(strategy: str, io: str, num_ranks: int, every: str, options: dict[str, Any]) -> dict[str, Any]:
    scores = options.pop("scores", [5, 1, 4, 2, 3])
    checkpoint = AirCheckpoint("run", every=every, monitor="score", **{"keep_last": 1, "save_top_k": 2, **options})
    saves = Saves()
    trainer = make_trainer(
        strategy, io, checkpoint, saves, num_ranks=num_ranks, max_epochs=5, limit_val_batches=1, num_sanity_val_steps=1
    )
    fit(trainer, Scored(scores))
    return {
        "saved": saves.steps,
        "left": steps(checkpoint.dirpath or ""),
        "names": published(checkpoint.dirpath or ""),
        "best": Path(checkpoint.best_model_path).name,
        "best score": float(checkpoint.best_model_score or 0),
        "scores": sorted(float(score) for score in checkpoint.best_k_models.values()),
        "valid": all(verify_checkpoint(path).valid for path in checkpoint.best_k_models),
        "tested": trainer.test(ckpt_path="best", dataloaders=trainer.val_dataloaders, verbose=False),
    }


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "every", "io"),
    [
        ("single", 1, "8steps", "ours"),
        ("single", 1, "1epoch", "lightning's"),
        ("air ddp", 2, "8steps", "ours"),
        ("air ddp", 2, "1epoch", "lightning's"),
        ("air fsdp", 2, "1epoch", "ours"),
        ("air fsdp", 2, "8steps", "lightning's"),
        ("stock ddp", 2, "8steps", "ours"),
        ("stock ddp", 2, "8steps", "lightning's"),
    ],
)
def test_the_newest_and_the_best_are_kept_and_each_step_is_saved_once(
    strategy: str, num_ranks: int, every: str, io: str, tmp_path: Path
) -> None:
    args = (strategy, io, num_ranks, every, {})
    for each in values(run_ranks(keep_the_best, num_ranks, args=args, cwd=tmp_path)):
        assert each["saved"] == [8, 16, 24, 32, 40]  # by cadence and for the metric at the same step
        assert each["left"] == [16, 32, 40]
        assert each["best"] == "epoch=1-step=16.ckpt"
        assert each["best score"] == 1.0
        assert each["scores"] == [1.0, 2.0]
        assert each["valid"]
        assert len(each["tested"]) == 1  # ckpt_path="best" loads


@pytest.mark.parametrize("strategy", ["air fsdp", "stock ddp"])
def test_a_name_that_would_differ_between_the_ranks_is_rank_0s(strategy: str) -> None:
    args = (strategy, "ours", 2, "8steps", {"filename": "{step}-{noise:.0f}"})
    for each in values(run_ranks(keep_the_best, 2, args=args)):
        assert each["names"] == ["step=16-noise=0.ckpt", "step=32-noise=0.ckpt", "step=40-noise=0.ckpt"]
        assert each["best"] == "step=16-noise=0.ckpt"
        assert each["valid"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"mode": "max", "save_top_k": 1}, [8, 40]),
        ({"save_top_k": 0, "keep_last": 2}, [32, 40]),
        ({"save_top_k": -1}, [8, 16, 24, 32, 40]),
        ({"filename": "{step}-{score:.1f}"}, [16, 32, 40]),
        ({"scores": [5, 1, 4, 3, 2], "keep_last": 2}, [16, 32, 40]),  # 32 is ousted by 40, and still one of the newest
    ],
    ids=str,
)
def test_what_is_kept(options: dict[str, Any], left: list[int], tmp_path: Path) -> None:
    args = ("air ddp", "ours", 1, "8steps", {**options})
    if options.get("save_top_k") == 0:
        (each,) = values(run_ranks(keep_none_of_the_best, 1, cwd=tmp_path))
    else:
        (each,) = values(run_ranks(keep_the_best, 1, args=args, cwd=tmp_path))
    assert each["left"] == left


def keep_none_of_the_best() -> dict[str, Any]:
    checkpoint = AirCheckpoint("run", every="8steps", monitor="score", save_top_k=0)
    fit(make_trainer("air ddp", "ours", checkpoint, max_epochs=5, limit_val_batches=1), Scored([5, 1, 4, 2, 3]))
    return {"left": steps("run")}


# ---- what is told ----------------------------------------------------------------------------------------------------


def fit_with_loggers(strategy: str, num_ranks: int) -> list[list[tuple[int, dict[str, float]]]]:
    loggers = [CuriousLogger(), CuriousLogger()]
    checkpoint = AirCheckpoint("run", every="4steps")
    fit(make_trainer(strategy, "ours", checkpoint, num_ranks=num_ranks, logger=loggers, max_steps=10))
    return [logger.metrics for logger in loggers]


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("air fsdp", 2), ("stock ddp", 2)])
def test_every_logger_gets_the_metrics_and_the_console_one_line_for_each(strategy: str, num_ranks: int) -> None:
    results = run_ranks(fit_with_loggers, num_ranks, args=(strategy, num_ranks))
    first, *others = values(results)
    assert first[0] == first[1]
    assert [step for step, _ in first[0]] == [4, 8, 10]
    assert [metrics["checkpoint/last_committed_step"] for _, metrics in first[0]] == [4, 8, 10]
    for _, metrics in first[0]:
        assert metrics["checkpoint/total_bytes"] >= metrics["checkpoint/bytes"] > 0
        assert metrics["checkpoint/commit_lag_seconds"] > metrics["checkpoint/stage_seconds"] > 0
        assert metrics["checkpoint/failures"] == 0
    assert others == [[[], []]] * (num_ranks - 1)
    for number in (4, 8, 10):
        assert results[0].output.count(f"(step {number}, ") == 1
    assert all("published" not in result.output for result in results[1:])
    assert STEPS_PER_EPOCH == 8


def test_the_state_of_a_run_with_one_rank_in_this_process_needs_no_strategy(tmp_path: Path) -> None:
    fit(make_trainer("single", "ours", AirCheckpoint(str(tmp_path / "run"), every="5steps"), max_steps=5))
    assert published(tmp_path / "run") == ["epoch=0-step=5.ckpt"]
