"""`lightning-air checkpoints`: what each action shows, what it exits with, and that pruning deletes what it may only.

The checkpoints are written by `AsyncUCCheckpointIO` as a run would; the actions are called through `main`, and two as a
user does, in a process of their own.
"""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

from lightning_air import AsyncUCCheckpointIO
from lightning_air.checkpoint.latest import latest_checkpoint, list_checkpoints
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.pointer import write_pointer
from lightning_air.checkpoint.report import bytes_text
from lightning_air.cli import checkpoint_reading, main
from lightning_air.cli.checkpoint_listing import age_text
from tests.checkpoint.samples import Calls, flip, save_ours, save_stock, shards, write_manifest
from tests.kit.environment import current_environment
from tests.kit.files_api_server import TOKEN, files_api


def lightning_checkpoint(step: int, **more: Any) -> dict[str, Any]:
    """What Lightning would save of a linear layer after so many steps."""
    torch.manual_seed(step)
    layer = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    return {
        "state_dict": layer.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": step,
        "epoch": step // 10,
        "pytorch-lightning_version": "2.6.6",
        **more,
    }


def save_run(folder: Path | str, *steps: int, names: tuple[str, ...] = (), **more: Any) -> None:
    """Save one checkpoint per step, the last one newest, as `step=<N>.ckpt` or as the names say."""
    writer = AsyncUCCheckpointIO()
    for step, name in zip(steps, names or [f"step={step}.ckpt" for step in steps], strict=True):
        writer.save_and_wait(lightning_checkpoint(step, **more), f"{folder}/{name}")
    writer.teardown()


def leave_unfinished(folder: Path, *, hours: float) -> Path:
    """Leave what a save leaves that was killed so many hours ago."""
    shutil.copytree(folder / "step=10.ckpt", folder / "killed.ckpt")
    for name in (".metadata", "manifest.json"):
        (folder / "killed.ckpt" / name).unlink()
    for path in (folder / "killed.ckpt").iterdir():
        os.utime(path, (time.time() - hours * 3600,) * 2)
    return folder / "killed.ckpt"


def call(*arguments: object) -> int | str | None:
    """Return the exit code of `lightning-air checkpoints …`."""
    try:
        return main(["checkpoints", *map(str, arguments)])
    except SystemExit as error:
        return error.code


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Return what an action writes with `--json`."""
    assert call(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- list ------------------------------------------------------------------------------------------------------------


def test_list_shows_what_lies_there_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20, 30)
    leave_unfinished(tmp_path, hours=5)
    write_pointer(LocalStore(tmp_path), "last.ckpt", "step=30.ckpt")
    (shards(tmp_path / "step=20.ckpt")[0]).unlink()
    assert call("list", tmp_path) == 0
    header, *rows, problem = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["step", "epoch", "age", "size", "ranks", "sharding", "valid", "name"]
    assert [row[0] for row in rows] == ["30", "20", "10", "?"]
    assert rows[0][-3:] == ["step=30.ckpt", "<-", "last.ckpt"]
    assert [row[-4 if index == 0 else -2] for index, row in enumerate(rows)] == ["yes", "NO", "yes", "unfinished"]
    assert rows[3][2:4] == ["5", "h"]
    assert problem == ["NOT", "valid:", "step=20.ckpt:", "__0_0.distcp:", "missing"]


def test_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20)
    torch.save({"state_dict": {}}, tmp_path / "epoch=0-step=5.ckpt")
    os.utime(tmp_path / "epoch=0-step=5.ckpt", (1000.0, 1000.0))
    leave_unfinished(tmp_path, hours=5)
    before = time.time()
    newest, _, unfinished, stock = json_of(capsys, "list", tmp_path)
    assert before - 60 < newest.pop("created_seconds") < before
    files = tmp_path / "step=20.ckpt"
    assert newest == {
        "name": "step=20.ckpt",
        "path": str(files),
        "published": True,
        "single_file": False,
        "valid": True,
        "problems": [],
        "step": 20,
        "epoch": 2,
        "num_bytes": sum(path.stat().st_size for path in files.iterdir() if path.name != "manifest.json"),
        "world_size": 1,
        "sharding": "none",
        "pointers": [],
    }
    assert (unfinished["published"], unfinished["valid"], unfinished["step"]) == (False, False, None)
    assert (stock["single_file"], stock["valid"], stock["step"]) == (True, True, 5)
    assert (stock["created_seconds"], stock["num_bytes"]) == (1000.0, (tmp_path / stock["name"]).stat().st_size)


def test_list_of_one_checkpoint_is_that_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20)
    write_pointer(LocalStore(tmp_path), "last.ckpt", "step=10.ckpt")
    leave_unfinished(tmp_path, hours=1)
    (one,) = json_of(capsys, "list", tmp_path / "step=10.ckpt")
    assert (one["step"], one["pointers"]) == (10, ["last.ckpt"])
    assert json_of(capsys, "list", tmp_path / "last.ckpt") == [one]
    (unfinished,) = json_of(capsys, "list", tmp_path / "killed.ckpt")
    assert unfinished["published"] is False


def test_list_reads_no_single_file_of_a_remote_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "local", 10)
    memory = fsspec.filesystem("memory")
    try:
        memory.put(str(tmp_path / "local" / "step=10.ckpt"), f"/{tmp_path.name}/step=10.ckpt", recursive=True)
        memory.pipe(f"/{tmp_path.name}/step=5.ckpt", b"not even a checkpoint")
        rows = json_of(capsys, "list", f"memory://{tmp_path.name}")
    finally:
        memory.rm(f"/{tmp_path.name}", recursive=True)
    assert [(row["step"], row["valid"], row["num_bytes"]) for row in rows if row["single_file"]] == [(5, None, 21)]
    assert [(row["step"], row["valid"]) for row in rows if not row["single_file"]] == [(10, True)]


def test_a_pointer_that_leads_nowhere_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10)
    write_pointer(LocalStore(tmp_path), "last.ckpt", "gone.ckpt")
    assert call("list", tmp_path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("leads nowhere: ")
    assert "last.ckpt points to 'gone.ckpt'" in last


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "step=10\x1b]0;owned\x07.ckpt"
    save_stock(evil, {"state_dict": {"w\x1b[2J": torch.ones(2)}})
    for arguments in (("list", tmp_path), ("show", evil), ("verify", tmp_path), ("verify", f"{evil}.gone")):
        call(*arguments)
    captured = capsys.readouterr()
    assert "owned" in captured.out
    assert "\x1b" not in captured.out + captured.err


# ---- show ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "file"])
def test_show_tells_every_tensor(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = lightning_checkpoint(10)
    if form == "folder":
        save_run(tmp_path, 10)
    else:
        torch.save(checkpoint, tmp_path / "step=10.ckpt")
    shown = json_of(capsys, "show", tmp_path)
    expected = {f"state_dict.{name}": value for name, value in checkpoint["state_dict"].items()} | {
        f"optimizer_0.state.{number}.{field}": value
        for number, fields in checkpoint["optimizer_states"][0]["state"].items()
        for field, value in fields.items()
    }
    tensors = {each["name"]: each for each in shown["tensors"]}
    assert {name: (each["shape"], each["num_bytes"]) for name, each in tensors.items()} == {
        name: (list(value.shape), value.nbytes) for name, value in expected.items()
    }
    assert {each["dtype"] for each in tensors.values()} == {"float32"}
    assert {name for name, each in tensors.items() if each["part"] == "model"} == {
        "state_dict.weight",
        "state_dict.bias",
    }
    assert shown["files"] == {
        path.name: path.stat().st_size
        for path in ([tmp_path / "step=10.ckpt"] if form == "file" else (tmp_path / "step=10.ckpt").iterdir())
        if path.name != "manifest.json"
    }


def test_show_names_the_largest_first_and_how_many_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10)
    assert call("show", tmp_path, "--top", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / "step=10.ckpt")
    assert lines[1].strip().startswith("step 10, saved ")
    assert "model: 2 tensor(s), 1,230 element(s), 4.92 kB" in lines
    names = [line.split()[-1] for line in lines if " float32 " in line]
    assert sorted(names[:3]) == [
        "optimizer_0.state.0.exp_avg",
        "optimizer_0.state.0.exp_avg_sq",
        "state_dict.weight",
    ]
    assert lines[-1] == "  … and 4 smaller; --top 8 shows all"


def test_show_of_a_folder_is_its_newest_valid_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20)
    (shards(tmp_path / "step=20.ckpt")[0]).unlink()
    assert json_of(capsys, "show", tmp_path)["step"] == 10
    assert call("show", tmp_path / "step=20.ckpt") == 0
    assert "__0_0.distcp: missing" in capsys.readouterr().out
    (tmp_path / "step=10.ckpt" / ".metadata").unlink()
    assert call("show", tmp_path / "step=10.ckpt") == 0
    assert "unfinished" in capsys.readouterr().out


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_finds_a_flipped_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20)
    assert call("verify", tmp_path) == 0
    assert "2 of 2 published checkpoint(s) valid" in capsys.readouterr().out
    flip(shards(tmp_path / "step=20.ckpt")[0], 700)
    assert call("verify", tmp_path / "step=10.ckpt") == 0
    for path in (tmp_path, tmp_path / "step=20.ckpt"):
        capsys.readouterr()
        assert call("verify", path) == 1
        out = capsys.readouterr().out
        assert "step=20.ckpt: NOT valid, 1 problem(s)" in out
        assert "__0_0.distcp: wrong digest, expected" in out


def test_verify_takes_an_unfinished_one_for_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10)
    leave_unfinished(tmp_path, hours=1)
    assert call("verify", tmp_path) == 0
    assert "killed.ckpt: unfinished" in capsys.readouterr().out
    assert call("verify", tmp_path / "killed.ckpt") == 1
    (tmp_path / "step=10.ckpt" / ".metadata").unlink()
    assert call("verify", tmp_path) == 1
    assert "0 of 0 published checkpoint(s) valid" in capsys.readouterr().out


def test_verify_shows_a_bar_on_a_terminal_and_else_lines_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path, 10)
    assert call("verify", tmp_path) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(checkpoint_reading, "BAR_SECONDS", 0)
    assert call("verify", tmp_path) == 0
    assert re.search(r"step=10\.ckpt: +[1-9]\d+%\|", capsys.readouterr().err)

    now = 0.0
    stream = io.StringIO()
    progress = checkpoint_reading.Progress("step=10.ckpt", stream, clock=lambda: now)
    for second in range(26):
        now = float(second)
        progress(second * 10**9, 50 * 10**9)
    assert stream.getvalue().splitlines() == [
        "step=10.ckpt: 20 % of 50 GB verified",
        "step=10.ckpt: 40 % of 50 GB verified",
    ]


# ---- consolidate -----------------------------------------------------------------------------------------------------


def test_consolidate_says_which_it_took_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", 10, 20)
    flip(shards(tmp_path / "run" / "step=20.ckpt")[0], 700)
    target = tmp_path / "exported" / "model.ckpt"
    assert call("consolidate", tmp_path / "run", target) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"wrote {target} (")
    assert captured.out.endswith(f") from {tmp_path / 'run' / 'step=10.ckpt'}\n")
    assert captured.err.startswith(f"Passing over {tmp_path / 'run' / 'step=20.ckpt'}: ")
    content, expected = torch.load(target, weights_only=True), lightning_checkpoint(10)
    assert content.keys() == expected.keys()
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(content[key], expected[key], rtol=0, atol=0)

    assert call("consolidate", tmp_path / "run", target) == 2
    assert "--force" in capsys.readouterr().err
    save_run(tmp_path / "run", 30)
    assert call("consolidate", tmp_path / "run", target, "--force") == 0
    assert torch.load(target, weights_only=True)["global_step"] == 30


def test_consolidate_refuses_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_ours(tmp_path / "step=7.ckpt", objects=Calls(os.mkdir, str(tmp_path / "ran")))
    write_manifest(folder)
    assert call("consolidate", folder, "out.pt") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "posix.mkdir" in error
    assert not (tmp_path / "ran").exists()
    assert not Path("out.pt").exists()


# ---- prune -----------------------------------------------------------------------------------------------------------


def test_prune_says_what_it_would_do_and_does_it_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20, 30, 40)
    before = names_in(tmp_path)
    assert call("prune", tmp_path, "--keep-last", "2") == 0
    dry = capsys.readouterr().out.splitlines()
    assert names_in(tmp_path) == before
    assert [line.split()[:2] for line in dry[:-1]] == [
        ["keep", "step=40.ckpt"],
        ["keep", "step=30.ckpt"],
        ["delete", "step=20.ckpt"],
        ["delete", "step=10.ckpt"],
    ]
    assert dry[0].endswith("the newest valid one")
    assert dry[1].endswith("among the newest 2")
    assert dry[2].endswith("older than the newest 2")
    assert "nothing was" in dry[-1]
    assert "--yes" in dry[-1]
    assert call("prune", tmp_path, "--keep-last", "2", "--yes") == 0
    assert names_in(tmp_path) == ["step=30.ckpt", "step=40.ckpt"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 checkpoint(s), ")


def test_prune_counts_only_what_can_be_loaded_and_leaves_the_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path, 10, 20, 30, 40, 50)
    for step in (20, 50):
        (shards(tmp_path / f"step={step}.ckpt")[0]).unlink()
    leave_unfinished(tmp_path, hours=0)
    assert call("prune", tmp_path, "--keep-last", "2", "--yes") == 0
    left = ["killed.ckpt", "step=20.ckpt", "step=30.ckpt", "step=40.ckpt", "step=50.ckpt"]
    assert names_in(tmp_path) == left
    assert "damaged: __0_0.distcp: missing" in capsys.readouterr().out
    assert call("prune", tmp_path, "--keep-last", "1", "--yes") == 0
    assert names_in(tmp_path) == [name for name in left if name != "step=30.ckpt"]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step=40.ckpt")


def test_prune_never_takes_what_a_pointer_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20, 30, 40)
    write_pointer(LocalStore(tmp_path), "last.ckpt", "step=10.ckpt")
    (tmp_path / "link.ckpt").symlink_to("step=20.ckpt")
    assert call("prune", tmp_path, "--keep-last", "1", "--yes") == 0
    assert names_in(tmp_path) == ["last.ckpt", "link.ckpt", "step=10.ckpt", "step=20.ckpt", "step=40.ckpt"]
    out = capsys.readouterr().out
    assert "last.ckpt leads to it" in out
    assert "link.ckpt leads to it" in out


def test_a_link_to_the_newest_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    save_run(tmp_path, 10, 20, 30)
    (tmp_path / "zlast.ckpt").symlink_to("step=30.ckpt")
    assert [each.name for each in list_checkpoints(tmp_path)] == ["step=30.ckpt", "step=20.ckpt", "step=10.ckpt"]
    assert call("prune", tmp_path, "--keep-last", "2", "--yes") == 0
    assert names_in(tmp_path) == ["step=20.ckpt", "step=30.ckpt", "zlast.ckpt"]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step=30.ckpt")


def test_prune_tells_generations_of_one_name_apart(tmp_path: Path) -> None:
    save_run(tmp_path, 10, 20, names=("last.ckpt", "other.ckpt"))
    shutil.copytree(tmp_path / "last.ckpt", tmp_path / "kept")
    save_run(tmp_path, 30, names=("last.ckpt",))
    (tmp_path / "kept").rename(tmp_path / "last.ckpt")  # as if the run had been killed before it deleted the old one
    assert names_in(tmp_path) == ["last.ckpt", "last@2.ckpt", "other.ckpt"]
    assert call("prune", tmp_path, "--keep-last", "1", "--yes") == 0
    assert names_in(tmp_path) == ["last@2.ckpt"]


def test_prune_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, 10, 20, 30)
    best = {"best_model_path": str(tmp_path / "step=20.ckpt"), "best_k_models": {"/elsewhere/step=10.ckpt": 0.5}}
    save_run(tmp_path, 40, 50, callbacks={"AirCheckpoint{'monitor': 'val_loss'}": best, "Other": {"seen": 3}})
    assert call("prune", tmp_path, "--keep-last", "1", "--yes") == 0
    assert names_in(tmp_path) == ["step=10.ckpt", "step=20.ckpt", "step=50.ckpt"]
    assert "among the best, as step=50.ckpt notes" in capsys.readouterr().out


def test_prune_takes_the_newest_of_a_callback_that_monitors_nothing_for_no_best(tmp_path: Path) -> None:
    newest_then = {"monitor": None, "best_model_path": str(tmp_path / "step=20.ckpt"), "best_k_models": {}}
    save_run(tmp_path, 10, 20)
    save_run(tmp_path, 30, callbacks={"AirCheckpoint": newest_then})
    assert call("prune", tmp_path, "--keep-last", "1", "--yes") == 0
    assert names_in(tmp_path) == ["step=30.ckpt"]


def test_prune_takes_orphans_by_age_and_nothing_else_unless_told(tmp_path: Path) -> None:
    save_run(tmp_path, 10, 20)
    leave_unfinished(tmp_path, hours=5)
    for age in ("6h", "1d"):
        assert call("prune", tmp_path, "--orphans", age, "--yes") == 0
        assert names_in(tmp_path) == ["killed.ckpt", "step=10.ckpt", "step=20.ckpt"]
    assert call("prune", tmp_path, "--orphans", "4h") == 0
    assert call("prune", tmp_path, "--keep-last", "2", "--yes") == 0
    assert names_in(tmp_path) == ["killed.ckpt", "step=10.ckpt", "step=20.ckpt"]
    assert call("prune", tmp_path, "--orphans", "4h", "--yes") == 0
    assert names_in(tmp_path) == ["step=10.ckpt", "step=20.ckpt"]


def test_prune_goes_on_after_one_that_cannot_be_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path, 10, 20, 30)
    delete = LocalStore.delete_folder

    def fail_on_first(store: LocalStore, folder: str) -> None:
        if folder == "step=10.ckpt":
            raise PermissionError(13, "Permission denied", folder)
        delete(store, folder)

    monkeypatch.setattr(LocalStore, "delete_folder", fail_on_first)
    assert call("prune", tmp_path, "--keep-last", "1", "--yes") == 1
    assert names_in(tmp_path) == ["step=10.ckpt", "step=30.ckpt"]
    captured = capsys.readouterr()
    assert "step=10.ckpt could not be deleted" in captured.err
    assert captured.out.splitlines()[-1].startswith("1 of 2 checkpoint(s)")


def test_prune_in_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"memory://{tmp_path.name}"
    try:
        save_run(place, 10, 20, 30)
        assert call("prune", place, "--keep-last", "1", "--yes") == 0
        capsys.readouterr()
        assert [row["step"] for row in json_of(capsys, "list", place)] == [30]
    finally:
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_all_of_it_on_a_volume_without_a_mount(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "/Volumes/main/default/ckpt/run"
    with files_api() as volume:
        monkeypatch.setenv("DATABRICKS_HOST", volume.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        monkeypatch.setenv("DATABRICKS_AUTH_TYPE", "pat")
        monkeypatch.setenv("HOME", str(tmp_path))
        save_run(run, 10, 20)
        rows = json_of(capsys, "list", f"dbfs:{run}/")
        assert [(row["path"], row["valid"]) for row in rows] == [(f"{run}/step={step}.ckpt", True) for step in (20, 10)]
        assert len(json_of(capsys, "show", f"{run}/step=10.ckpt")["tensors"]) == 8
        target = "/Volumes/main/default/ckpt/exported/model.ckpt"
        assert call("consolidate", f"dbfs:{run}", f"dbfs:{target}") == 0
        assert torch.load(io.BytesIO(volume.files[target][0]), weights_only=True)["global_step"] == 20
        (shard,) = [path for path in volume.files if path.startswith(f"{run}/step=20.ckpt/__0_")]
        content, put_at = volume.files[shard]
        volume.files[shard] = (content[:700] + bytes([content[700] ^ 1]) + content[701:], put_at)
        assert call("verify", run) == 1
        assert "1 of 2 published checkpoint(s) valid" in capsys.readouterr().out
        volume.files[shard] = (content[:-1], put_at)
        save_run(run, 15)
        assert call("prune", run, "--keep-last", "1", "--yes") == 0
        left = {path.removeprefix(run).split("/")[1] for path in volume.files if path.startswith(run)}
        assert left == {"step=15.ckpt", "step=20.ckpt"}
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["list", "show", "verify", "consolidate", "prune"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nowhere", "nowhere does not exist. Name a checkpoint, or the folder"),
        ("empty", "There is no checkpoint at "),
        ("dbfs:/run", "Write '/Volumes/<catalog>/<schema>/<volume>/<folder>'"),
        ("/Volumes/main", "A volume is written '/Volumes/<catalog>/<schema>/<volume>/<folder>'"),
        ("dangling.ckpt", "dangling.ckpt points to 'gone.ckpt', where no published checkpoint is"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_2(
    action: str, path: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    write_pointer(LocalStore(tmp_path), "dangling.ckpt", "gone.ckpt")
    more = {"consolidate": ["out.pt"], "prune": ["--keep-last", "1"]}.get(action, [])
    assert call(action, path, *more) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"lightning-air checkpoints {action}: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "ACTION"),
        (["lits"], "'lits'"),
        (["list"], "PATH"),
        (["consolidate", "run"], "TARGET"),
        (["prune", "run", "--keep-last", "0"], "must be a whole number of at least 1, got '0'"),
        (["prune", "run", "--keep-last", "many"], "must be a whole number of at least 1, got 'many'"),
        (["prune", "run", "--orphans", "6"], "must be an age such as '6h'"),
        (["prune", "run", "--orphans", "3epochs"], "must be an age such as '6h'"),
        (["prune", "run"], "--keep-last N"),
        (["prune", "run/step=10.ckpt", "--keep-last", "1"], "Name the folder that it lies in"),
        (["show", "run", "--top", "-1"], "must be a whole number of at least 0"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", 10)
    assert call(*arguments) == 2
    assert expected in capsys.readouterr().err
    assert names_in(tmp_path / "run") == ["step=10.ckpt"]


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    shown = capsys.readouterr().out
    for action, options in {
        "list": ["--json"],
        "show": ["--json", "--top"],
        "verify": [],
        "consolidate": ["--force"],
        "prune": ["--keep-last", "--orphans", "--yes"],
    }.items():
        assert f"  {action}" in shown
        assert call(action, "--help") == 0
        text = capsys.readouterr().out
        assert all(option in text for option in options)
        assert text.startswith(f"usage: lightning-air checkpoints {action} ")


# ---- as a user starts it ---------------------------------------------------------------------------------------------


def test_the_commands_themselves(tmp_path: Path) -> None:
    save_run(tmp_path / "run", 10, 20)
    flip(shards(tmp_path / "run" / "step=20.ckpt")[0], 700)
    script = shutil.which("lightning-air", path=str(Path(sys.executable).parent))
    assert script is not None, "install the package: make venv"
    listed = run([script, "checkpoints", "list", "run", "--json"], cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert [row["step"] for row in json.loads(listed.stdout)] == [20, 10]
    verified = run([sys.executable, "-m", "lightning_air", "checkpoints", "verify", "run"], cwd=tmp_path)
    assert verified.returncode == 1, verified.stderr
    assert "wrong digest" in verified.stdout
    assert verified.stderr == ""


def run(command: list[str], *, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = current_environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (None, "?"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_234_567, "1.23 MB"),
        (123_456_789, "123 MB"),
        (999_700_000, "1000 MB"),
        (5_040_000_000, "5.04 GB"),
        (7_000_000_000_000_000, "7000 TB"),
    ],
)
def test_sizes_are_short(num_bytes: int | None, expected: str) -> None:
    assert bytes_text(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172_799, "48 h"),
        (200_000, "2 d"),
        (math.nan, "?"),
    ],
)
def test_ages_are_short(seconds: float, expected: str) -> None:
    assert age_text(None if math.isnan(seconds) else 1000.0 - seconds, 1000.0) == expected
