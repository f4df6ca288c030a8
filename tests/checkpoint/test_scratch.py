"""Scratch folders go with who made them, and those of the killed are swept when they are old."""

import os
import time
from pathlib import Path

import pytest

from lightning_air import AsyncUCCheckpointIO
from lightning_air.checkpoint.scratch import ABANDONED_AFTER_SECONDS, scratch_folder, shared_scratch, sweep_scratch


def test_a_folder_is_removed_with_its_content_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught, scratch_folder(tmp_path / "area") as folder:
        raise KeyError(sorted(each.name for each in (tmp_path / "area").iterdir()), folder.name)
    there, name = caught.value.args
    assert there == [name]
    assert list((tmp_path / "area").iterdir()) == []


def leave(area: Path, name: str, age_seconds: float) -> Path:
    folder = area / name
    folder.mkdir()
    (folder / "shard").write_bytes(b"x")
    then = time.time() - age_seconds
    os.utime(folder, (then, then))
    return folder


def test_only_old_ones_of_ours_are_swept(tmp_path: Path) -> None:
    old = ABANDONED_AFTER_SECONDS + 60
    swept = [leave(tmp_path, "lightning-air-4f2a", old), shared_scratch(tmp_path, "77")]
    leave(tmp_path, swept[1].name, old)
    kept = [leave(tmp_path, "lightning-air-new", 60), leave(tmp_path, "somebody-elses", old)]
    (tmp_path / "lightning-air-file").write_bytes(b"x")
    (tmp_path / "lightning-air-link").symlink_to(kept[1])
    assert sweep_scratch(tmp_path) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [*(each.name for each in kept), "lightning-air-file", "lightning-air-link"]
    )
    assert (kept[1] / "shard").exists()


def test_a_run_sweeps_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    leave(staging, "lightning-air-killed", ABANDONED_AFTER_SECONDS + 60)
    io = AsyncUCCheckpointIO(staging_dir=str(staging))
    io.save_checkpoint({"state_dict": {}, "global_step": 1}, tmp_path / "run" / "a.ckpt")
    io.teardown()
    assert list(staging.iterdir()) == []
