"""Training begins on a full disk too: what there is no space for is lost and said, and kept again once there is."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_air.tracking.door_errors import Unreachable
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.spool_folder import read_run_info
from lightning_air.tracking.tails import Tail
from lightning_air.tracking.thinning import Thinner
from lightning_air.tracking.tracker import Tracker
from tests.kit.ranks import run_ranks
from tests.tracking.small_disk import fill, mount_small_disk
from tests.tracking.spooling import SECONDS
from tests.tracking.stand_ins import ListDoor, Warnings, failing

NO_MOUNTS = "no mounts here"


def new_thinner(spent: int) -> RunThinner:
    return RunThinner(Thinner(spent=spent, step=1, exempt=(), max_metric_steps=10**6))


def tracker_on(folder: Path, door: ListDoor, warnings: Warnings, **options: Any) -> Tracker:
    return Tracker(
        "run",
        "list://",
        folder,
        new_thinner=new_thinner,
        charged={},
        flush_seconds=0.05,
        warn=warnings,
        door=lambda _: door,
        **options,
    )


def steps_of(door: ListDoor) -> list[int]:
    return sorted({point.step for point in door.stored})


def begin_on_a_full_disk(folder: str) -> Any:
    """Log the steps from 0 on while it is full, and those from 1000 on when there is space."""
    if not mount_small_disk(Path(folder), "size=4m,nr_inodes=40"):
        return NO_MOUNTS
    taken = fill(Path(folder))
    door, warnings = ListDoor(), Warnings()
    tracker = tracker_on(Path(folder, "spools", "run"), door, warnings)
    for step in range(3):
        tracker.append(step, {"loss": 1.0})
    warned = warnings.text
    shutil.rmtree(taken)
    until_seconds = time.monotonic() + SECONDS
    step = 1000
    while not (Path(folder) / "spools" / "run" / "run.json").exists() or tracker._spool.num_appended == 0:
        tracker.append(step, {"loss": 1.0})
        step += 1
        assert time.monotonic() < until_seconds, warnings
        time.sleep(0.02)
    num_kept = tracker._spool.num_appended
    is_noted = read_run_info(Path(folder, "spools", "run")).run_id == "run"
    is_flushed = tracker.flush(SECONDS)
    is_closed = tracker.close(SECONDS)
    is_gone = not Path(folder, "spools", "run").exists()
    return [warned, num_kept, is_noted, is_flushed, is_closed, is_gone, steps_of(door)]


def test_training_begins_on_a_full_disk_and_logs_once_there_is_space(tmp_path: Path) -> None:
    (result,) = run_ranks(begin_on_a_full_disk, 1, args=(str(tmp_path),), timeout_seconds=120)
    assert result.error is None, result
    if result.value == NO_MOUNTS:
        pytest.skip("cannot mount a file system")
    warned, num_kept, is_noted, is_flushed, is_closed, is_gone, steps = result.value
    assert "No space for metrics" in warned
    assert "There is no space in" in warned
    assert "Free space" in warned
    assert is_noted
    assert is_flushed
    assert is_closed
    assert is_gone
    assert num_kept == len(steps) > 0
    assert min(steps) >= 1000


def go_on_on_a_full_disk(folder: str) -> Any:
    """Leave 300 steps, and take them over when the disk is full."""
    if not mount_small_disk(Path(folder), "size=8m,nr_inodes=40"):
        return NO_MOUNTS
    spool = Path(folder, "run")
    door, warnings = ListDoor(trouble=failing(Unreachable("away"), times=10**9)), Warnings()
    first = tracker_on(spool, door, warnings)
    for step in range(300):
        first.append(step, {"loss": 1.0})
    assert not first.close(0.1)
    taken = fill(Path(folder))
    door.trouble = lambda _: None
    second = tracker_on(spool, door, warnings)
    second.set_horizon(1000)
    second.append(300, {"loss": 1.0})
    is_flushed = second.flush(SECONDS)
    is_closed = second.close(SECONDS)
    steps = steps_of(door)
    num_left_files = len(list(spool.iterdir())) if spool.exists() else 0
    shutil.rmtree(taken)
    return [is_flushed, is_closed, steps, num_left_files, warnings.text]


def test_what_an_attempt_has_left_is_sent_though_the_disk_is_full(tmp_path: Path) -> None:
    (result,) = run_ranks(go_on_on_a_full_disk, 1, args=(str(tmp_path),), timeout_seconds=120)
    assert result.error is None, result
    if result.value == NO_MOUNTS:
        pytest.skip("cannot mount a file system")
    is_flushed, is_closed, steps, num_left_files, text = result.value
    assert is_flushed
    assert is_closed
    assert steps[:300] == list(range(300))
    assert num_left_files == 0
    assert "no space" in text.lower()


def resume_on_a_full_disk(folder: str) -> Any:
    if not mount_small_disk(Path(folder), "size=8m,nr_inodes=40"):
        return NO_MOUNTS
    door, warnings = ListDoor(trouble=failing(Unreachable("away"), times=10**9)), Warnings()
    first = tracker_on(Path(folder, "first"), door, warnings)
    for step in range(30):
        first.append(step, {"loss": 1.0})
    tail = Tail.of({"tail": first.tail().to_dict()})
    first.close(0.1)
    fill(Path(folder))
    second = tracker_on(Path(folder, "second"), door, warnings, tail=tail)
    second.append(30, {"loss": 1.0})
    second.close(0.1)
    return warnings.text


def test_a_checkpoint_is_resumed_from_though_its_metrics_find_no_space(tmp_path: Path) -> None:
    (result,) = run_ranks(resume_on_a_full_disk, 1, args=(str(tmp_path),), timeout_seconds=120)
    assert result.error is None, result
    if result.value == NO_MOUNTS:
        pytest.skip("cannot mount a file system")
    assert "They stay in it" in result.value


def test_a_folder_that_cannot_be_made_for_another_reason_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        tracker_on(tmp_path / "file" / "run", ListDoor(), Warnings())
