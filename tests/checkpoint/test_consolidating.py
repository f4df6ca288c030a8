"""One file or one stream of any checkpoint: what stock Lightning makes of it, which one is taken, what is refused.

The checkpoints are real ones: two ranks save under each sharding, and stock Lightning in this process goes on.
"""

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_air import AirStrategy, AsyncUCCheckpointIO
from lightning_air.checkpoint.consolidating import consolidate_checkpoint, open_checkpoint
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.pointer import write_pointer
from lightning_air.checkpoint.untrusted import BadCheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.samples import Calls, flip, save_ours, save_stock, shards, small_state, write_manifest
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Outcome, RecordLosses, Regression, full_weights, loader


class Remembering(Regression):
    """Its hyper-parameters are part of its checkpoints."""

    def __init__(self, learning_rate: float = 1e-2, note: str = "") -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()


class SaveFirstEpoch(Callback):
    """Saves at the end of the first epoch, and keeps a copy of what was saved."""

    def __init__(self, path: str | None, outcome: Outcome) -> None:
        self._path = path
        self._outcome = outcome

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is None or trainer.current_epoch > 0:
            return
        trainer.save_checkpoint(self._path)
        self._outcome.weights = full_weights(pl_module)
        names = [name for name, _ in pl_module.named_parameters()]
        states = trainer.optimizers[0].state_dict()["state"]
        self._outcome.extra["optimizer"] = {
            names[number]: {field: whole(value) for field, value in state.items()} for number, state in states.items()
        }


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def fit(
    sharding: str | None, plugin: CheckpointIO | None, max_epochs: int, save: str | None, resume: str | None
) -> Outcome:
    outcome = Outcome()
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy="auto" if sharding is None else AirStrategy(sharding),
            plugins=[] if plugin is None else [plugin],
            callbacks=[RecordLosses(outcome), SaveFirstEpoch(save, outcome)],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            max_epochs=max_epochs,
        )
    )
    torch.manual_seed(1)
    batches = loader(trainer.world_size, trainer.global_rank)
    trainer.fit(Remembering(note="kept"), batches, batches, ckpt_path=resume)
    return outcome


def save_with_ours(sharding: str, path: str) -> Outcome:
    return fit(sharding, AsyncUCCheckpointIO(), 1, path, None)


def save_with_stock(sharding: str, path: str) -> Outcome:
    return fit(sharding, None, 1, path, None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Three epochs in stock Lightning, in one go."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("whole"))
    try:
        return fit(None, None, 3, None, None)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("save", "sharding"),
    [(save_with_ours, "ddp"), (save_with_ours, "fsdp"), (save_with_stock, "fsdp"), (save_with_stock, "ddp")],
    ids=["ours-ddp", "ours-fsdp", "stock-fsdp", "stock-ddp"],
)
def test_stock_lightning_goes_on_from_it(save: Any, sharding: str, tmp_path: Path, uninterrupted: Outcome) -> None:
    path, target = str(tmp_path / "run" / "epoch=0-step=8.ckpt"), tmp_path / "exported" / "model.ckpt"
    saved = values(run_ranks(save, 2, args=(sharding, path)))[0]

    assert consolidate_checkpoint(path, target) == path

    content = torch.load(target, weights_only=True)
    assert list(content["state_dict"]) == list(Remembering().state_dict())
    assert all(torch.equal(content["state_dict"][name], value) for name, value in saved.weights.items())
    assert content["hyper_parameters"] == {"learning_rate": 1e-2, "note": "kept"}
    (optimizer,) = content["optimizer_states"]
    names = [name for name, _ in Remembering().named_parameters()]
    assert list(optimizer["state"]) == optimizer["param_groups"][0]["params"] == list(range(len(names)))
    for number, name in enumerate(names):
        for field, value in saved.extra["optimizer"][name].items():
            assert torch.equal(optimizer["state"][number][field], value), (name, field)

    for loaded in (
        Remembering.load_from_checkpoint(target),
        Remembering.load_from_checkpoint(open_checkpoint(path)),
        Remembering.load_from_checkpoint(open_checkpoint(tmp_path / "run")),
    ):
        assert loaded.hparams.note == "kept"
        assert all(torch.equal(value, saved.weights[name]) for name, value in loaded.state_dict().items())

    resumed = fit(None, None, 3, None, str(target))
    assert resumed.losses == pytest.approx(uninterrupted.losses[8:], rel=1e-4)


def test_a_stream_holds_all_but_the_optimizers(tmp_path: Path) -> None:
    checkpoint = lightning_checkpoint(30)
    save_as_ours(tmp_path / "step=30.ckpt", checkpoint)
    stream = open_checkpoint(tmp_path / "step=30.ckpt")
    content = torch.load(stream, weights_only=True)
    assert content.pop("state_dict")["weight"].equal(checkpoint["state_dict"]["weight"])
    assert content == {key: checkpoint[key] for key in checkpoint.keys() - {"state_dict", "optimizer_states"}}
    file = consolidate_checkpoint(tmp_path / "step=30.ckpt", "whole.pt") and torch.load("whole.pt", weights_only=True)
    assert file.keys() == checkpoint.keys()
    torch.testing.assert_close(file["optimizer_states"], checkpoint["optimizer_states"], rtol=0, atol=0)


def lightning_checkpoint(step: int) -> dict[str, Any]:
    """What Lightning would save of a linear layer after so many steps."""
    torch.manual_seed(step)
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "state_dict": layer.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": step,
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"width": 4},
    }


def save_as_ours(path: Path | str, checkpoint: dict[str, Any]) -> None:
    writer = AsyncUCCheckpointIO()
    writer.save_and_wait(checkpoint, path)
    writer.teardown()


# ---- which one is taken ----------------------------------------------------------------------------------------------


def test_of_a_folder_the_newest_valid_one_is_taken_and_the_others_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        save_as_ours(tmp_path / f"step={step}.ckpt", lightning_checkpoint(step))
    unfinished = save_ours(tmp_path / "step=40.ckpt", step=40, created_seconds=9e9)
    (unfinished / ".metadata").unlink()
    flip(shards(tmp_path / "step=30.ckpt")[0], 700)
    told: list[tuple[str, str]] = []
    source = consolidate_checkpoint(tmp_path, "out.pt", on_skip=lambda path, why: told.append((path, why)))
    assert source == str(tmp_path / "step=20.ckpt")
    assert torch.load("out.pt", weights_only=True)["global_step"] == 20
    ((path, why),) = told
    assert path == str(tmp_path / "step=30.ckpt")
    assert "__0_0.distcp is not as it was written" in why

    assert torch.load(open_checkpoint(tmp_path), weights_only=True)["global_step"] == 20
    assert "step=30.ckpt" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "unpublish"])
def test_one_that_was_named_is_never_replaced_by_another(damage: str, tmp_path: Path) -> None:
    for step in (10, 20):
        save_as_ours(tmp_path / f"step={step}.ckpt", lightning_checkpoint(step))
    named = tmp_path / "step=20.ckpt"
    shard = shards(named)[0]
    if damage == "flip":
        flip(shard, 700)
    elif damage == "truncate":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        (shard if damage == "delete" else named / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"step=20\.ckpt"):
        open_checkpoint(named)
    with pytest.raises(DamagedCheckpointError, match=r"step=20\.ckpt"):
        consolidate_checkpoint(named, "out.pt")
    assert not Path("out.pt").exists()


def test_pointers_links_and_generations_lead_to_what_is_loaded(tmp_path: Path) -> None:
    save_as_ours(tmp_path / "again.ckpt", lightning_checkpoint(10))
    shutil.copytree(tmp_path / "again.ckpt", tmp_path / "kept")
    save_as_ours(tmp_path / "again.ckpt", lightning_checkpoint(20))
    (tmp_path / "kept").rename(tmp_path / "again.ckpt")  # as if the run had been killed before it deleted the old one
    save_as_ours(tmp_path / "other.ckpt", lightning_checkpoint(30))
    write_pointer(LocalStore(tmp_path), "last.ckpt", "other.ckpt")
    (tmp_path / "link.ckpt").symlink_to("other.ckpt")
    taken = {name: step_of(tmp_path / f"{name}.ckpt") for name in ("again", "last", "link", "other")}
    assert taken == {"again": 20, "last": 30, "link": 30, "other": 30}


def step_of(path: Path | str) -> int:
    return torch.load(open_checkpoint(path), weights_only=True)["global_step"]


@pytest.mark.parametrize("path", ["nowhere", "empty", "s3:/bucket", "/Volumes/main/default"])
def test_what_is_not_there_is_an_error_that_names_it(path: str) -> None:
    Path("empty").mkdir()
    expected = FileNotFoundError if path in {"nowhere", "empty"} else ValueError
    with pytest.raises(expected, match=path):
        open_checkpoint(path)


def test_plain_dcp_comes_out_as_it_was_nested(tmp_path: Path) -> None:
    consolidate_checkpoint(save_stock(tmp_path / "dcp"), "out.pt")
    torch.testing.assert_close(torch.load("out.pt", weights_only=True), small_state(), rtol=0, atol=0)


# ---- safety ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "file"])
def test_what_would_run_code_is_refused_by_name_and_nothing_older_is_taken(form: str, tmp_path: Path) -> None:
    save_as_ours(tmp_path / "step=10.ckpt", lightning_checkpoint(10))
    planted = {**lightning_checkpoint(20), "hyper_parameters": Calls(os.mkdir, str(tmp_path / "ran"))}
    if form == "folder":
        folder = save_ours(tmp_path / "step=20.ckpt", objects=planted)
        write_manifest(folder, step=20, created_seconds=9e9)
    else:
        torch.save(planted, tmp_path / "step=20.ckpt")
        os.utime(tmp_path / "step=20.ckpt", (9e9, 9e9))
    for source in (tmp_path, tmp_path / "step=20.ckpt"):
        with pytest.raises(UnsafeCheckpointError, match=r"posix\.mkdir"):
            consolidate_checkpoint(source, tmp_path / "out.pt")
        with pytest.raises(UnsafeCheckpointError, match=r"step=20\.ckpt"):
            open_checkpoint(source)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out.pt").exists()


class Options:
    """A type that only whoever trusts the writer unpickles."""

    def __init__(self) -> None:
        self.depth = 3


def test_other_types_are_the_callers_explicit_choice(tmp_path: Path) -> None:
    checkpoint = {**lightning_checkpoint(10), "hyper_parameters": {"options": Options()}}
    save_as_ours(tmp_path / "step=10.ckpt", checkpoint)
    with pytest.raises(UnsafeCheckpointError, match=r"Options.*weights_only=False"):
        open_checkpoint(tmp_path)
    content = torch.load(open_checkpoint(tmp_path, weights_only=False), weights_only=False)
    assert content["hyper_parameters"]["options"].depth == 3


# ---- the file that is written ----------------------------------------------------------------------------------------


def test_what_is_at_the_target_stays_unless_forced(tmp_path: Path) -> None:
    save_as_ours(tmp_path / "step=10.ckpt", lightning_checkpoint(10))
    Path("out.pt").write_bytes(b"precious")
    Path("folder").mkdir()
    with pytest.raises(FileExistsError, match=r"out\.pt exists.*force"):
        consolidate_checkpoint(tmp_path, "out.pt")
    assert Path("out.pt").read_bytes() == b"precious"
    for force in (False, True):
        with pytest.raises(FileExistsError, match="folder is a folder"):
            consolidate_checkpoint(tmp_path, "folder", force=force)
        with pytest.raises(FileExistsError, match="is a folder"):
            consolidate_checkpoint(tmp_path, tmp_path / "step=10.ckpt", force=force)
    consolidate_checkpoint(tmp_path, "out.pt", force=True)
    assert torch.load("out.pt", weights_only=True)["global_step"] == 10


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_ours(tmp_path / "run" / "step=10.ckpt", lightning_checkpoint(10))
    Path("exported").mkdir()
    Path("exported/out.ckpt").write_bytes(b"precious")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*out\.ckpt"):
        consolidate_checkpoint(tmp_path / "run", "exported/out.ckpt", force=True)
    assert [path.name for path in Path("exported").iterdir()] == ["out.ckpt"]
    assert Path("exported/out.ckpt").read_bytes() == b"precious"


def test_an_export_cannot_become_what_the_run_resumes_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20):
        save_as_ours(run / f"step={step}.ckpt", lightning_checkpoint(step))
    (tmp_path / "alias").symlink_to("run")
    for source, target in ((run / "step=10.ckpt", run / "out.ckpt"), (run, tmp_path / "alias" / "out.ckpt")):
        with pytest.raises(ValueError, match=r"Write it to another folder, or with another ending than \.ckpt"):
            consolidate_checkpoint(source, target)
    consolidate_checkpoint(run / "step=10.ckpt", run / "out.pt")
    assert step_of(run) == 20


def test_from_and_to_an_object_store(tmp_path: Path) -> None:
    writer = AsyncUCCheckpointIO(staging_dir=tmp_path / "staging")
    place = f"memory://{tmp_path.name}"
    try:
        for step in (10, 20):
            writer.save_and_wait(lightning_checkpoint(step), f"{place}/run/step={step}.ckpt")
        writer.teardown()
        staging = str(tmp_path / "staging")
        source = consolidate_checkpoint(f"{place}/run", f"{place}/exported/out.ckpt", staging_dir=staging)
        assert source == f"{place}/run/step=20.ckpt"
        with pytest.raises(FileExistsError):
            consolidate_checkpoint(f"{place}/run", f"{place}/exported/out.ckpt", staging_dir=staging)
        content = fsspec.filesystem("memory").cat(f"/{tmp_path.name}/exported/out.ckpt")
        assert torch.load(io.BytesIO(content), weights_only=True)["global_step"] == 20
        again = torch.load(open_checkpoint(f"{place}/exported/out.ckpt", staging_dir=staging), weights_only=True)
        assert again["global_step"] == 20
        assert list(Path(staging).iterdir()) == []
    finally:
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_a_damaged_single_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stock.ckpt"
    torch.save(lightning_checkpoint(10), path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(BadCheckpointError, match=r"stock\.ckpt"):
        open_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(BadCheckpointError, match="holds a list"):
        open_checkpoint(path)
