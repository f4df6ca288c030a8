"""How a run with `AirCheckpoint` ends: a save that fails, SIGTERM, an exception, Ctrl-C, and the deadline for all that.

A failure is raised once, on every rank, at the next save or at the end; what ended the training is what the user sees;
and no rank waits for one that does not come.
"""

import errno
import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_air import AirCheckpoint
from tests.checkpoint.runs import VOLUME, CuriousLogger, Saves, Scored, fit, hostile_volume, make_trainer, steps
from tests.kit.hostile import Behaviour, Fault
from tests.kit.points import reach
from tests.kit.ranks import run_ranks, values

STEP_SECONDS = 0.02
EVERYWHERE = [("single", 1), ("air ddp", 2), ("air fsdp", 2), ("stock ddp", 2)]


class SlowSteps(Callback):
    """Steps that take a moment, with a point in each."""

    def __init__(self, seconds: float = STEP_SECONDS) -> None:
        self.seconds = seconds
        self.at_signal = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(self.seconds)
        self.at_signal = self.at_signal or (time.monotonic() if trainer.global_step == 6 else 0.0)
        reach(f"step:{trainer.global_step}")


class RaiseAt(Callback):
    def __init__(self, step: int, exception: BaseException, rank: int = 0) -> None:
        self.step, self.exception, self.rank = step, exception, rank

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            raise self.exception


def end(
    strategy: str = "air ddp",
    io: str = "ours",
    *callbacks: Callback,
    num_ranks: int = 1,
    volume: Path | None = None,
    behaviour: Behaviour | None = None,
    only: str = "",
    module: LightningModule | None = None,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train until it ends, one way or the other, and say how."""
    folder = "run" if volume is None else f"{VOLUME}/run"
    checkpoint = AirCheckpoint(folder, **{"every": "4steps", **options})
    logger, saves = CuriousLogger(), Saves()
    everything = {"max_steps": 12, **(trainer_options or {})}
    raised: BaseException | None = None
    with hostile_volume(volume or Path("nowhere"), behaviour, only), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            strategy, io, checkpoint, saves, *callbacks, num_ranks=num_ranks, logger=logger, **everything
        )
        try:
            fit(trainer, module)
        except BaseException as exception:  # noqa: BLE001 - that is what is asked for
            raised = exception
        left = steps(folder)
    return {
        "step": trainer.global_step,
        "saved": saves.steps,
        "left": left,
        "raised": type(raised).__name__,
        "message": str(raised),
        "cause": repr(getattr(raised, "__cause__", None)),
        "code": getattr(raised, "code", None),
        "best": Path(checkpoint.best_model_path).name,
        "metrics": logger.metrics,
        "warnings": [str(warning.message) for warning in caught if "saved" in str(warning.message)],
        "ended": time.monotonic(),
    }


# ---- a save fails ----------------------------------------------------------------------------------------------------


def fail(strategy: str, num_ranks: int, directory: str, only: str, on_failure: str, **options: Any) -> dict[str, Any]:
    full = Behaviour(faults=[Fault(errno.ENOSPC, names="*.distcp", times=1000)])
    io_options = {"on_failure": on_failure, **options.pop("io_options", {})}
    return end(
        strategy,
        num_ranks=num_ranks,
        volume=Path(directory),
        behaviour=full,
        only=only,
        trainer_options={"io_options": io_options, **options.pop("trainer_options", {})},
        **options,
    )


@pytest.mark.parametrize(("strategy", "num_ranks"), EVERYWHERE)
def test_a_failed_save_is_raised_on_every_rank_at_the_next_one(strategy: str, num_ranks: int, tmp_path: Path) -> None:
    results = run_ranks(fail, num_ranks, args=(strategy, num_ranks, str(tmp_path), "step=4", "raise"))
    for result, each in zip(results, values(results), strict=True):
        assert each["raised"] == "CheckpointFailedError"
        assert each["step"] == 8
        assert "epoch=0-step=4.ckpt (step 4) was not saved. Rank 0: OSError" in each["message"]
        assert re.search(r"__0_\w*0\.distcp", each["message"])
        assert result.seconds < 20
    first = values(results)[0]
    assert "OSError(28" in first["cause"]
    # One rank alone can save what was to be saved at this step.
    assert first["left"] == ([8] if num_ranks == 1 else [])
    assert [metrics["checkpoint/failures"] for _, metrics in first["metrics"]] == ([1, 1] if num_ranks == 1 else [1])


@pytest.mark.parametrize(("strategy", "num_ranks"), EVERYWHERE)
def test_the_last_save_that_fails_is_raised_at_the_end_of_training(
    strategy: str, num_ranks: int, tmp_path: Path
) -> None:
    for each in values(run_ranks(fail, num_ranks, args=(strategy, num_ranks, str(tmp_path), "step=12", "raise"))):
        assert each["raised"] == "CheckpointFailedError"
        assert "epoch=1-step=12.ckpt (step 12) was not saved" in each["message"]
        assert (each["step"], each["left"]) == (12, [4, 8])


@pytest.mark.parametrize(("strategy", "num_ranks"), EVERYWHERE)
def test_with_warn_training_goes_on_and_the_failures_are_counted(strategy: str, num_ranks: int, tmp_path: Path) -> None:
    seen = values(run_ranks(fail, num_ranks, args=(strategy, num_ranks, str(tmp_path), "step=4", "warn")))
    for each in seen:
        assert each["raised"] == "NoneType"
        assert (each["step"], each["saved"], each["left"]) == (12, [4, 8, 12], [8, 12])
    numbers = [(step, metrics["checkpoint/failures"]) for step, metrics in seen[0]["metrics"]]
    assert numbers == [(4, 1), (8, 1), (12, 1)]
    committed = [metrics.get("checkpoint/last_committed_step") for _, metrics in seen[0]["metrics"]]
    assert committed == [None, 8, 12]
    assert len(seen[0]["warnings"]) == 1
    assert "Training goes on" in seen[0]["warnings"][0]
    assert all(each["metrics"] == [] for each in seen[1:])


def fail_the_best(strategy: str, num_ranks: int, directory: str) -> dict[str, Any]:
    return fail(
        strategy,
        num_ranks,
        directory,
        "step=16",
        "warn",
        module=Scored([3, 1, 2, 4, 5]),
        trainer_options={"limit_val_batches": 1, "max_steps": 40},
        every="8steps",
        monitor="score",
        keep_last=1,
    )


@pytest.mark.parametrize(("strategy", "num_ranks"), EVERYWHERE)
def test_a_best_that_was_not_saved_is_none(strategy: str, num_ranks: int, tmp_path: Path) -> None:
    # Step 8 was the best before step 16 ousted it, and 24 is better than that.
    for each in values(run_ranks(fail_the_best, num_ranks, args=(strategy, num_ranks, str(tmp_path)))):
        assert each["raised"] == "NoneType"
        assert each["saved"] == [8, 16, 24, 32, 40]
        assert each["best"] == "epoch=2-step=24.ckpt"
        assert each["left"] == [24, 40]


# ---- SIGTERM ---------------------------------------------------------------------------------------------------------


def end_by_sigterm(strategy: str, num_ranks: int, io: str) -> dict[str, Any]:
    pace = SlowSteps()
    ended = end(
        strategy, io, pace, num_ranks=num_ranks, every="1h", exception_timeout=15.0, trainer_options={"max_steps": 2000}
    )
    return {**ended, "seconds": ended["ended"] - pace.at_signal}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "io"),
    [("air ddp", "ours"), ("air fsdp", "ours"), ("air ddp", "lightning's"), ("air fsdp", "lightning's")],
)
def test_sigterm_to_one_rank_of_two_saves_once_together_and_ends(strategy: str, io: str, rank: int) -> None:
    signals = {(rank, "step:6"): signal.SIGTERM}
    first, second = values(run_ranks(end_by_sigterm, 2, args=(strategy, 2, io), signals=signals))
    assert 6 <= first["step"] < 6 + 10 / STEP_SECONDS
    for each in (first, second):
        assert (each["raised"], each["code"]) == ("SIGTERMException", 143)
        assert each["saved"] == each["left"] == [first["step"]]
        assert each["seconds"] < 15.0


@pytest.mark.parametrize("strategy", ["single", "air fsdp"])
def test_sigterm_to_a_single_rank_saves_once(strategy: str) -> None:
    (each,) = values(run_ranks(end_by_sigterm, 1, args=(strategy, 1, "ours"), signals={(0, "step:6"): signal.SIGTERM}))
    assert each["raised"] == "SIGTERMException"
    assert each["saved"] == each["left"] == [7]  # that step is finished


def end_in_a_hurry(strategy: str, directory: str, timeout: float, num_bytes_per_second: float) -> dict[str, Any]:
    return end(
        strategy,
        "ours",
        SlowSteps(0.03),
        volume=Path(directory),
        behaviour=Behaviour(bytes_per_second=num_bytes_per_second),
        every="50steps",  # more than are taken until two ranks have agreed to stop
        exception_timeout=timeout,
        trainer_options={"max_steps": 2000},
    )


@pytest.mark.parametrize(("strategy", "num_ranks", "timeout"), [("air ddp", 1, 1.6), ("air fsdp", 2, 2.0)])
def test_a_short_deadline_is_for_the_save_that_is_under_way(
    strategy: str, num_ranks: int, timeout: float, tmp_path: Path
) -> None:
    # About 60 kB, from step 50 on; two ranks stop about a second after the signal.
    speed = 60_000 if num_ranks == 1 else 40_000
    results = run_ranks(
        end_in_a_hurry,
        num_ranks,
        args=(strategy, str(tmp_path), timeout, speed),
        signals={(num_ranks - 1, "step:51"): signal.SIGTERM},
    )
    seen = values(results)
    for each in seen:
        assert each["raised"] == "SIGTERMException"
        assert each["saved"] == each["left"] == [50]
    (warning,) = seen[0]["warnings"]
    assert f"Step {seen[0]['step']} is not saved after SIGTERMException: a save takes " in warning
    assert f" of {timeout:g} s are left" in warning


def end_stock_by_sigterm() -> dict[str, Any]:
    # What torchrun and SLURM do: every process of the job gets the signal.
    return end("stock ddp", "ours", SlowSteps(), num_ranks=2, every="1h", trainer_options={"max_steps": 2000})


def test_stock_ddp_which_cannot_stop_all_ranks_at_one_step_says_that_it_does_not_save() -> None:
    signals = {(0, "step:6"): signal.SIGTERM, (1, "step:6"): signal.SIGTERM}
    seen = values(run_ranks(end_stock_by_sigterm, 2, signals=signals))
    for each in seen:
        assert each["raised"] == "SIGTERMException"
        assert each["saved"] == each["left"] == []
    assert "only AirStrategy stops all ranks at one step" in seen[0]["warnings"][0]


# ---- exceptions ------------------------------------------------------------------------------------------------------


def raise_in_training(strategy: str, io: str, num_ranks: int, rank: int, interrupt: bool) -> dict[str, Any]:
    exception = KeyboardInterrupt() if interrupt else ZeroDivisionError("the user's own")
    return end(strategy, io, RaiseAt(6, exception, rank), num_ranks=num_ranks)


@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize(("strategy", "io"), [("single", "ours"), ("air fsdp", "ours"), ("single", "lightning's")])
def test_an_exception_in_a_single_process_saves_once(strategy: str, io: str, interrupt: bool) -> None:
    (each,) = values(run_ranks(raise_in_training, 1, args=(strategy, io, 1, 0, interrupt)))
    assert each["raised"] == ("SystemExit" if interrupt else "ZeroDivisionError")  # Lightning's answer to Ctrl-C
    assert each["saved"] == each["left"] == [4, 6]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["air ddp", "air fsdp"])
def test_an_exception_on_one_rank_of_two_saves_nothing_and_nobody_hangs(strategy: str, rank: int) -> None:
    results = run_ranks(raise_in_training, 2, args=(strategy, "ours", 2, rank, False))
    seen = values(results)
    for result, each in zip(results, seen, strict=True):
        assert each["saved"] == each["left"] == [4]
        assert result.seconds < 25
    assert seen[rank]["message"] == "the user's own"
    assert "the user's own" in seen[1 - rank]["message"]


def raise_while_storage_is_broken(directory: str) -> dict[str, Any]:
    full = Behaviour(faults=[Fault(errno.ENOSPC, names="*.distcp", times=1000)])
    failing = RaiseAt(6, ZeroDivisionError("the user's own"))
    return end("air ddp", "ours", failing, volume=Path(directory), behaviour=full, only="step=6")


def test_a_save_that_fails_after_an_exception_does_not_hide_it(tmp_path: Path) -> None:
    (each,) = values(run_ranks(raise_while_storage_is_broken, 1, args=(str(tmp_path),)))
    assert (each["raised"], each["message"]) == ("ZeroDivisionError", "the user's own")
    assert each["left"] == [4]
    assert "epoch=0-step=6.ckpt (step 6) was not saved" in each["warnings"][0]


def raise_when_a_save_of_that_step_has_failed(directory: str) -> dict[str, Any]:
    full_once = Behaviour(faults=[Fault(errno.ENOSPC, names="*.distcp")])
    failing = RaiseAt(4, ZeroDivisionError("the user's own"))
    return end("air ddp", "ours", failing, volume=Path(directory), behaviour=full_once, only="step=4.ckpt")


def test_a_save_of_the_same_step_that_failed_is_made_again(tmp_path: Path) -> None:
    (each,) = values(run_ranks(raise_when_a_save_of_that_step_has_failed, 1, args=(str(tmp_path),)))
    assert each["raised"] == "ZeroDivisionError"
    assert (each["saved"], each["left"]) == ([4, 4], [4])
    assert [metrics["checkpoint/failures"] for _, metrics in each["metrics"]] == [1, 1]


class CannotBeSaved(Callback):
    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            raise TypeError("a lock cannot be saved")


def raise_where_nothing_can_be_saved(io: str) -> dict[str, Any]:
    return end("single", io, RaiseAt(6, ZeroDivisionError("the user's own")), CannotBeSaved())


@pytest.mark.parametrize("io", ["ours", "lightning's"])
def test_what_cannot_be_saved_after_an_exception_does_not_hide_it(io: str) -> None:
    (each,) = values(run_ranks(raise_where_nothing_can_be_saved, 1, args=(io,)))
    assert (each["raised"], each["message"]) == ("ZeroDivisionError", "the user's own")
    assert each["left"] == [4]
    assert each["warnings"] == ["Step 6 is not saved: TypeError: a lock cannot be saved"]


class RaisesBeforeTraining(Callback):
    def on_fit_start(self, *_: Any) -> None:
        raise ZeroDivisionError("before training")


def fail_before_the_second_training() -> list[Any]:
    checkpoint = AirCheckpoint("run", every="4steps")
    fit(make_trainer("single", "ours", checkpoint, max_steps=4))
    with pytest.raises(ZeroDivisionError):
        fit(make_trainer("single", "ours", checkpoint, RaisesBeforeTraining(), max_steps=4))
    return [steps("run"), sorted(os.listdir("run"))]  # noqa: PTH208 - names are asked for


def test_what_fails_before_training_saves_nothing() -> None:
    assert values(run_ranks(fail_before_the_second_training, 1)) == [[[4], ["epoch=0-step=4.ckpt"]]]
