"""What a run with `AirCheckpoint` goes on from: the newest valid one, on any place, the same on every rank.

And what it then keeps: never does an attempt delete the checkpoint that it resumed from, or forget the best of those
before it.
"""

import errno
import os
import re
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_air import AirCheckpoint, latest_checkpoint
from lightning_air.checkpoint import BadCheckpointError
from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.store import METADATA_NAME
from tests.checkpoint.runs import CuriousLogger, Saves, Scored, fit, make_trainer, published, steps
from tests.kit.files_api_server import TOKEN, files_api
from tests.kit.ranks import run_ranks, values


class Start(Callback):
    """Notes at which step training starts."""

    step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        self.threads = [thread.name for thread in threading.enumerate()]


def train(
    strategy: str = "air ddp",
    io: str = "ours",
    *,
    num_ranks: int = 1,
    folder: str = "run",
    max_steps: int,
    resume: str | None = "last",
    scores: list[float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train up to a step; what it warned of does not fail it."""
    checkpoint = AirCheckpoint(folder, **{"every": "4steps", **options})
    start, saves, logger = Start(), Saves(), CuriousLogger()
    trainer = make_trainer(
        strategy,
        io,
        checkpoint,
        start,
        saves,
        logger=logger,
        num_ranks=num_ranks,
        max_steps=max_steps,
        limit_val_batches=int(bool(scores)),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trainer, Scored(scores) if scores else None, ckpt_path=resume)
    return {
        "start": start.step,
        "threads": start.threads,
        "saved": saves.steps,
        "left": steps(folder),
        "told too early": logger.unpublished,
        "best": Path(checkpoint.best_model_path).name,
        "scores": sorted(float(score) for score in checkpoint.best_k_models.values()),
        "warnings": [str(warning.message) for warning in caught if "ckpt" in str(warning.message)],
    }


def train_twice(*, between: Any = None, second: dict[str, Any] | None = None, **options: Any) -> list[dict[str, Any]]:
    first = train(max_steps=8, **options)
    if between is not None:
        between()
    return [first, train(max_steps=12, **{**options, **(second or {})})]


# ---- on any place ----------------------------------------------------------------------------------------------------


def resume_in_memory(io: str) -> list[dict[str, Any]]:
    def flip_a_bit_of_the_newest() -> None:
        files = fsspec.filesystem("memory")
        if io == "ours":
            (shard,) = files.glob("/bucket/run/*step=8.ckpt/*.distcp")
            files.pipe(shard, flipped(files.cat(shard)))

    return train_twice(between=flip_a_bit_of_the_newest, strategy="single", io=io, folder="memory://bucket/run")


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(("io", "start"), [("ours", 4), ("lightning's", 8)])
def test_last_in_an_object_store_is_the_newest_valid_one(io: str, start: int) -> None:
    ((first, second),) = values(run_ranks(resume_in_memory, 1, args=(io,)))
    assert first["start"] == 0
    assert "no last checkpoint available" in first["warnings"][0]
    assert second["start"] == start
    assert second["saved"] == list(range(start + 4, 16, 4))
    assert len(second["warnings"]) == int(io == "ours")
    for warning in second["warnings"]:
        assert re.search(r"epoch=0-step=8\.ckpt/__0_\w*0\.distcp is not as it was written", warning)
        assert "Loading memory://bucket/run/epoch=0-step=4.ckpt instead" in warning


def resume_after_a_cut(strategy: str, num_ranks: int) -> list[dict[str, Any]]:
    def cut_off_the_newest() -> None:
        if int(os.environ["RANK"]) == 0:
            next(Path("run/epoch=0-step=8.ckpt").glob("*.distcp")).write_bytes(b"cut off")

    return train_twice(between=cut_off_the_newest, strategy=strategy, num_ranks=num_ranks)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("air fsdp", 2), ("stock ddp", 2)])
def test_what_is_passed_over_is_told_with_the_file_and_what_is_wrong(strategy: str, num_ranks: int) -> None:
    first, *others = values(run_ranks(resume_after_a_cut, num_ranks, args=(strategy, num_ranks)))
    (warning,) = first[1]["warnings"]
    assert warning.startswith("Passing over a checkpoint.")
    assert "epoch=0-step=8.ckpt: NOT valid" in warning
    assert ".distcp: wrong size, expected" in warning
    for _, second in [first, *others]:
        assert second["start"] == 4
        assert second["saved"] == [8, 12]


def resume_where_all_are_damaged() -> tuple[str, list[str], int]:
    fit(make_trainer("single", "ours", AirCheckpoint("run", every="4steps"), max_steps=8))
    for each in Path("run").iterdir():
        (each / ".metadata").write_bytes(b"cut off")
    again = make_trainer("single", "ours", AirCheckpoint("run", every="4steps"), max_steps=12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(again, ckpt_path="last")
        except BadCheckpointError as error:
            return str(error), [str(each.message) for each in caught], again.global_step
    raise AssertionError("it trained from the beginning")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_silence() -> None:
    ((error, warned, step),) = values(run_ranks(resume_where_all_are_damaged, 1))
    assert step == 0
    assert re.search(
        r"No checkpoint in .*/run is valid, so `last` cannot resume: .*step=4\.ckpt, .*step=8\.ckpt", error
    )
    assert sum("Passing over a checkpoint" in each for each in warned) == 2


def name_the_folder() -> str:
    fit(make_trainer("single", "ours", AirCheckpoint("run", every="4steps"), max_steps=8))
    with pytest.raises(ValueError, match="is no checkpoint, but a folder of 2") as caught:
        fit(make_trainer("single", "ours", max_steps=12), ckpt_path="run")
    return str(caught.value)


def test_who_names_the_folder_of_checkpoints_is_told_what_to_name() -> None:
    (told,) = values(run_ranks(name_the_folder, 1))
    assert "step=8.ckpt, or resume from the newest" in told


def resume_on_a_volume(strategy: str) -> list[dict[str, Any]]:
    return train_twice(strategy=strategy, folder="dbfs:/Volumes/main/default/ckpt/run", keep_last=1)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("air ddp", 2)])
def test_last_on_a_volume_that_is_not_mounted_is_found_through_the_files_api(strategy: str, num_ranks: int) -> None:
    with files_api() as volume:
        env = {"DATABRICKS_HOST": volume.url, "DATABRICKS_TOKEN": TOKEN, "DATABRICKS_AUTH_TYPE": "pat"}
        seen = values(run_ranks(resume_on_a_volume, num_ranks, args=(strategy,), env=env))
        left = sorted({path.split("/")[6] for path in volume.files})
    for first, second in seen:
        assert (first["start"], first["left"]) == (0, [8])
        assert (second["start"], second["left"]) == (8, [8, 12])  # the one resumed from stays
    assert left == ["epoch=0-step=8.ckpt", "epoch=1-step=12.ckpt"]


def resume_beside_an_unfinished_one(strategy: str, num_ranks: int) -> list[dict[str, Any]]:
    def copy_without_metadata() -> None:
        if int(os.environ["RANK"]) == 0:
            shutil.copytree("run/epoch=0-step=8.ckpt", "run/epoch=1-step=11.ckpt")
            Path("run/epoch=1-step=11.ckpt", METADATA_NAME).unlink()

    return train_twice(between=copy_without_metadata, strategy=strategy, num_ranks=num_ranks)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("air ddp", 2), ("air fsdp", 2), ("stock ddp", 2), ("single", 1)])
def test_shards_without_metadata_are_skipped_by_every_rank(strategy: str, num_ranks: int) -> None:
    for _, second in values(run_ranks(resume_beside_an_unfinished_one, num_ranks, args=(strategy, num_ranks))):
        assert second["start"] == 8
        assert second["saved"] == [12]
        assert not any("Passing over" in warning for warning in second["warnings"])


@pytest.mark.parametrize("strategy", ["air ddp", "stock ddp"])
def test_ranks_that_see_different_checkpoints_all_say_so(strategy: str, tmp_path: Path) -> None:
    values(run_ranks(make_one_to_resume_from, 1, cwd=tmp_path))
    results = run_ranks(resume_from_a_folder_that_only_rank_0_sees, 2, args=(strategy,), cwd=tmp_path)
    for result in results:
        assert result.seconds < 20
        assert "RuntimeError: The ranks found different checkpoints to resume from" in (result.error or "")
        assert "use a volume, an object store or a shared folder" in (result.error or "")
    assert "rank 1 none" in (results[1].error or "")
    assert "run-0/epoch=0-step=4.ckpt" in (results[1].error or "")


def make_one_to_resume_from() -> None:
    train(folder="run-0", max_steps=4, resume=None)


def resume_from_a_folder_that_only_rank_0_sees(strategy: str) -> None:
    train(strategy, num_ranks=2, folder=f"run-{os.environ['RANK']}", max_steps=8)


# ---- last.ckpt -------------------------------------------------------------------------------------------------------


def resume_through_last(strategy: str, num_ranks: int, io: str, save_last: Any, folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy, "num_ranks": num_ranks, "io": io, "folder": folder}
    first, second = train_twice(**options, save_last=save_last, keep_last=1, second={"resume": f"{folder}/last.ckpt"})
    return {
        "start": second["start"],
        "left": second["left"],
        "listed": [Path(each.path).name for each in list_checkpoints(folder)],
        "warnings": first["warnings"],
        "third": train(max_steps=16, resume="last", keep_last=1, save_last=save_last, **options),
    }


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "io", "save_last"),
    [
        ("single", 1, "ours", True),
        ("air ddp", 2, "ours", "link"),
        ("air fsdp", 2, "ours", True),
        ("air fsdp", 2, "lightning's", True),
        ("single", 1, "lightning's", "link"),
        ("stock ddp", 2, "lightning's", True),
    ],
)
def test_last_ckpt_leads_to_the_newest_and_is_none_itself(
    strategy: str, num_ranks: int, io: str, save_last: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    args = (strategy, num_ranks, io, save_last, str(folder))
    for each in values(run_ranks(resume_through_last, num_ranks, args=args)):
        assert each["start"] == 8
        assert each["left"] == [8, 12]  # the target was resumed from
        assert sorted(each["listed"]) == ["epoch=0-step=8.ckpt", "epoch=1-step=12.ckpt"]
        assert each["third"]["start"] == 12
        assert each["third"]["left"] == [12, 16]
    last = folder / "last.ckpt"
    assert last.is_symlink() == (save_last == "link" or io != "ours")
    if last.is_symlink():
        assert last.resolve().name == "epoch=1-step=16.ckpt"
    assert latest_checkpoint(str(folder)) == str(folder / "epoch=1-step=16.ckpt")


def link_where_there_are_none() -> list[Any]:
    def symlink(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with mock.patch.object(Path, "symlink_to", symlink):
        seen = [train("single", io, folder=io, max_steps=8, save_last="link") for io in ("lightning's", "ours")]
    return [[each["left"], [warning for warning in each["warnings"] if "last.ckpt" in warning]] for each in seen]


def test_a_link_that_cannot_be_made_costs_no_checkpoint() -> None:
    (seen,) = values(run_ranks(link_where_there_are_none, 1))
    for left, told in seen:
        assert left == [4, 8]
        assert len(told) == 2
        assert "Operation not permitted" in told[0]


# ---- what stays ------------------------------------------------------------------------------------------------------


def resume_into_another_folder(strategy: str, io: str, num_ranks: int) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"strategy": strategy, "io": io, "num_ranks": num_ranks, "keep_last": 1}
    first = train(max_steps=8, folder="first", **options)
    path = "first/epoch=0-step=8.ckpt"
    second = train(max_steps=16, folder="second", resume=path, **options)
    return [first, second, {"left": steps("first")}]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "io"),
    [("air ddp", 2, "ours"), ("air fsdp", 2, "ours"), ("stock ddp", 2, "ours"), ("single", 1, "lightning's")],
)
def test_run_2_does_not_touch_the_folder_of_run_1(strategy: str, num_ranks: int, io: str) -> None:
    for _, second, first in values(run_ranks(resume_into_another_folder, num_ranks, args=(strategy, io, num_ranks))):
        assert second["start"] == 8
        assert second["left"] == [16]
        assert first["left"] == [8]


def resume_by_path(strategy: str, io: str, num_ranks: int, path: str) -> list[list[int]]:
    options: dict[str, Any] = {"strategy": strategy, "io": io, "num_ranks": num_ranks, "keep_last": 1}
    train(max_steps=8, **options)
    second = train(max_steps=24, resume=path, **options)
    return [second["left"], train(max_steps=32, **options)["left"]]


@pytest.mark.parametrize("path", ["run/epoch=0-step=8.ckpt", "./run/../run/epoch=0-step=8.ckpt"])
@pytest.mark.parametrize(("strategy", "num_ranks", "io"), [("air ddp", 2, "ours"), ("single", 1, "lightning's")])
def test_the_one_resumed_from_stays_until_the_next_attempt(strategy: str, num_ranks: int, io: str, path: str) -> None:
    for second, third in values(run_ranks(resume_by_path, num_ranks, args=(strategy, io, num_ranks, path))):
        assert second == [8, 24]
        assert third == [24, 32]  # retention counts what earlier attempts have left


def best_across_attempts(strategy: str, num_ranks: int, io: str) -> list[dict[str, Any]]:
    options: dict[str, Any] = {
        "strategy": strategy,
        "num_ranks": num_ranks,
        "io": io,
        "monitor": "score",
        "save_top_k": 2,
        "keep_last": 1,
    }
    first = train(max_steps=24, scores=[1, 5, 4], every="8steps", **options)
    second = train(max_steps=40, scores=[3, 2], every="1epoch", **options)
    return [first, second]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "io"),
    [("air ddp", 2, "ours"), ("air fsdp", 2, "ours"), ("stock ddp", 2, "ours"), ("single", 1, "lightning's")],
)
def test_the_best_of_an_earlier_attempt_is_kept_also_with_another_cadence(
    strategy: str, num_ranks: int, io: str
) -> None:
    for first, second in values(run_ranks(best_across_attempts, num_ranks, args=(strategy, num_ranks, io))):
        assert (first["left"], first["best"], first["scores"]) == ([8, 24], "epoch=0-step=8.ckpt", [1.0, 4.0])
        assert second["start"] == 24
        assert (second["left"], second["best"]) == ([8, 24, 40], "epoch=0-step=8.ckpt")
        assert second["scores"] == [1.0, 2.0]
        assert second["warnings"] == []


def go_back(strategy: str, num_ranks: int) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy, "num_ranks": num_ranks, "monitor": "score", "every": "8steps"}
    first = train(max_steps=24, scores=[3, 2, 1], **options)
    third = train(max_steps=24, scores=[0.5], resume="run/epoch=1-step=16.ckpt", **options)
    return {"first": first, "third": third, "names": published("run")}


@pytest.mark.parametrize(("strategy", "num_ranks"), [("air fsdp", 2), ("stock ddp", 2), ("single", 1)])
def test_a_run_that_goes_back_replaces_what_it_had_saved(strategy: str, num_ranks: int) -> None:
    for seen in values(run_ranks(go_back, num_ranks, args=(strategy, num_ranks))):
        assert (seen["first"]["left"], seen["first"]["best"]) == ([16, 24], "epoch=2-step=24.ckpt")
        assert seen["third"]["start"] == 16
        assert seen["third"]["saved"] == [24]
        assert (seen["third"]["best"], seen["third"]["scores"]) == ("epoch=2-step=24@2.ckpt", [0.5])
        assert seen["names"] == ["epoch=1-step=16.ckpt", "epoch=2-step=24@2.ckpt"]
        assert not any(each["told too early"] for each in (seen["first"], seen["third"]))


class RunsCode:
    def __reduce__(self) -> Any:
        return os.mkdir, ("code was run",)


def resume_beside_code(strategy: str) -> list[bool]:
    train(strategy, num_ranks=2, max_steps=8)
    if int(os.environ["RANK"]) == 0:
        torch.save({"epoch": 1, "global_step": 9, "state_dict": {}, "planted": RunsCode()}, "run/epoch=1-step=9.ckpt")
    torch.distributed.barrier()
    with pytest.raises(BadCheckpointError, match=r"posix\.mkdir"):
        train(strategy, num_ranks=2, max_steps=12)
    return [Path("code was run").exists(), steps("run") == [4, 8, 9] or steps("run") == [4, 9, 8]]


@pytest.mark.parametrize("strategy", ["air ddp", "stock ddp"])
def test_a_file_that_names_code_is_an_error_and_no_reason_to_begin_anew(strategy: str) -> None:
    assert values(run_ranks(resume_beside_code, 2, args=(strategy,))) == [[False, True]] * 2


def resume_without_the_best() -> list[dict[str, Any]]:
    options: dict[str, Any] = {"monitor": "score", "save_top_k": 1, "keep_last": 2, "every": "8steps"}
    first = train(max_steps=24, scores=[1, 5, 4], **options)
    shutil.rmtree("run/epoch=0-step=8.ckpt")
    return [first, train(max_steps=48, scores=[9, 8, 7, 6], **options)]


def test_a_best_that_is_gone_is_no_longer_the_best() -> None:
    ((first, second),) = values(run_ranks(resume_without_the_best, 1))
    assert first["best"] == "epoch=0-step=8.ckpt"
    assert (second["best"], second["scores"]) == ("epoch=5-step=48.ckpt", [7.0])


def resume_from_a_damaged_one(how: str) -> dict[str, Any]:
    train(max_steps=24, every="8steps", keep_last=3)
    shard = next(Path("run/epoch=2-step=24.ckpt").glob("*.distcp"))
    shard.write_bytes(b"cut off" if how == "cut off" else flipped(shard.read_bytes()))
    return train(max_steps=20, every="1h", keep_last=3)


@pytest.mark.parametrize("how", ["cut off", "flipped"])
def test_a_damaged_one_does_not_count_and_is_not_deleted(how: str) -> None:
    (seen,) = values(run_ranks(resume_from_a_damaged_one, 1, args=(how,)))
    assert seen["start"] == 16
    assert len(seen["warnings"]) == 1
    assert "epoch=2-step=24.ckpt" in seen["warnings"][0]
    assert sorted(seen["left"]) == [8, 16, 20, 24]  # three valid ones, and that one


# ---- what killed saves have left -------------------------------------------------------------------------------------


def sweep(strategy: str, num_ranks: int) -> dict[str, Any]:
    if int(os.environ["RANK"]) == 0:
        for name, hours in (("epoch=0-step=2.ckpt", 7), ("epoch=0-step=3.ckpt", 6.1), ("epoch=0-step=5.ckpt", 5)):
            shard = Path("run", name, "__0_0.distcp")
            shard.parent.mkdir(parents=True)
            shard.write_bytes(b"half of it")
            os.utime(shard, (shard.stat().st_mtime - hours * 3600,) * 2)
        Path("run/notes").mkdir()
    seen = train(strategy, num_ranks=num_ranks, max_steps=8, resume=None)
    return {"threads": seen["threads"], "left": sorted(os.listdir("run"))}  # noqa: PTH208 - names are asked for


@pytest.mark.parametrize(("strategy", "num_ranks"), [("air fsdp", 2), ("stock ddp", 2), ("single", 1)])
def test_what_killed_saves_left_is_swept_when_it_is_old(strategy: str, num_ranks: int, tmp_path: Path) -> None:
    results = run_ranks(sweep, num_ranks, args=(strategy, num_ranks), cwd=tmp_path)
    sweepers = [seen["threads"].count("lightning-air-checkpoint") for seen in values(results)]
    assert sweepers == [1] + [0] * (num_ranks - 1)
    left = ["epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt", "epoch=0-step=8.ckpt", "notes"]
    assert sorted(os.listdir(tmp_path / "run")) == left  # noqa: PTH208 - names are asked for
    messages = [result.output.count("2 unfinished checkpoint(s) of killed saves") for result in results]
    assert messages == [1] + [0] * (num_ranks - 1)


# ---- what was rated after it had been saved --------------------------------------------------------------------------


class Breaks(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise OSError("the node is gone")


def train_with_scores(io: str, strategy: str, num_ranks: int, scores: list[float], breaks: int = -1) -> dict[str, Any]:
    """Save each fourth step, validate right after it, keep the newest and the best."""
    checkpoint = AirCheckpoint(
        "run", "4steps", monitor="score", keep_last=1, exception_timeout=0, save_on_train_epoch_end=False
    )
    options = {"limit_val_batches": 1, "val_check_interval": 4, "max_steps": 16}
    trainer = make_trainer(strategy, io, checkpoint, Breaks(breaks), num_ranks=num_ranks, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(no last checkpoint available|is not saved)")
        try:
            fit(trainer, Scored(scores), ckpt_path="last")
        except OSError:
            assert trainer.global_step == breaks
            if dist.is_initialized():
                dist.barrier()  # rank 0 has then published what was under way
    scored = {Path(path).name: float(score) for path, score in checkpoint.best_k_models.items()}
    return {"best": Path(checkpoint.best_model_path).name, "scores": scored, "left": steps("run")}


def crash_and_resume(io: str, strategy: str, num_ranks: int) -> list[dict[str, Any]]:
    """Crash behind a validation whose score is in no checkpoint, go on with worse ones."""
    first = train_with_scores(io, strategy, num_ranks, [1.0, 0.0], breaks=5)
    return [first, train_with_scores(io, strategy, num_ranks, [5.0, 6.0, 7.0])]


@pytest.mark.parametrize(
    ("io", "strategy", "num_ranks"),
    [("ours", "single", 1), ("lightning's", "single", 1), ("ours", "air ddp", 2), ("ours", "stock ddp", 2)],
)
def test_the_score_of_what_is_resumed_from_is_not_forgotten(io: str, strategy: str, num_ranks: int) -> None:
    for first, second in values(run_ranks(crash_and_resume, num_ranks, args=(io, strategy, num_ranks))):
        assert first["best"] == second["best"] == "epoch=0-step=4.ckpt"
        assert second["scores"] == {"epoch=0-step=4.ckpt": 1.0}
        assert second["left"] == [4, 16]
