"""What a killed process has left arrives, each point once; and then its folder is gone."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_air.tracking.charging import Charge, charges_of, writer_tag
from lightning_air.tracking.door import Door, open_door
from lightning_air.tracking.door_errors import Refused, Unreachable
from lightning_air.tracking.folder_lock import SpoolInUseError
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.progress import load_progress
from lightning_air.tracking.replaying import replay
from lightning_air.tracking.segments import segment_numbers
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RunInfo, read_run_info, write_run_info
from lightning_air.tracking.thinning import Thinner
from lightning_air.tracking.writer import Writer
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import run_ranks
from tests.tracking.stand_ins import ListDoor, PassThrough, Warnings, Windows, failing

TEN = [f"train/metric_{index}" for index in range(10)]
RESTORE: dict[str, Callable[[Any], Any]] = {"windows": Windows, "thinner": Thinner.from_snapshot}
SECONDS = 30.0


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


def record_at(step: int) -> Record:
    return Record(1_700_000_000_000 + 10 * step, step, {name: step + index / 64 for index, name in enumerate(TEN)})


def append(spool: Spool, step: int) -> None:
    record = record_at(step)
    assert spool.append(record.timestamp_ms, record.step, record.values)


def points_of(thinner: Any, num_steps: int) -> list[Point]:
    points = [point for step in range(num_steps) for point in thinner.add(record_at(step))]
    return sorted(points + thinner.flush())


def new_thinner(kind: str) -> Any:
    return Windows() if kind == "windows" else Thinner(max_metric_steps=4000, horizon=None)


def train(folder: str, uri: str, run_id: str, kind: str, kill_seconds: float) -> None:
    """Log until killed; a file tells how many records were appended."""
    path = Path(folder, run_id)
    spool = Spool(path, segment_bytes=1 << 14)
    thinner = new_thinner(kind)
    write_run_info(path, RunInfo(run_id=run_id, tracking_uri=uri, thinner=thinner.snapshot()))
    writer = Writer(spool, thinner, open_door(uri), run_id, flush_seconds=0.05)
    writer.start()
    timer = threading.Timer(kill_seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    with Path(folder, "appended").open("w") as file:
        for step in range(10**6):
            append(spool, step)
            file.write(f"{step}\n")
            file.flush()
            time.sleep(0.001)


KILLS = [("windows", 0.15), ("windows", 0.5), ("windows", 0.9), ("thinner", 0.4), ("thinner", 0.8)]


@pytest.mark.parametrize(("kind", "kill_seconds"), KILLS)
def test_killed_at_any_moment_every_point_arrives_exactly_once(
    kind: str, kill_seconds: float, server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    run_id = server.create_run()
    proxy.set(Fault(seconds=0.02, cuts=True, times=1), Fault(seconds=0.02))
    (result,) = run_ranks(train, 1, args=(str(tmp_path), proxy.url, run_id, kind, kill_seconds))
    assert result.exitcode == -signal.SIGKILL, result
    num_appended = len((tmp_path / "appended").read_text().splitlines())
    num_before = len(server.points_of(run_id))
    replayed = replay(tmp_path / run_id, restore_thinner=RESTORE[kind], tracking_uri=server.url)
    found = server.points_of(run_id)
    assert replayed.is_complete
    num_logged = max(point.step for point in found) + 1
    assert num_logged - num_appended in (0, 1)
    assert found == points_of(new_thinner(kind), num_logged)
    assert replayed.stats.num_sent == len(found)
    assert num_before < len(found)
    assert not (tmp_path / run_id).exists()


def left(folder: Path, uri: str = "list://", run_id: str = "run", num_steps: int = 100) -> Path:
    """Leave what a process leaves that was killed before it sent anything."""
    with contextlib.closing(Spool(folder / run_id, segment_bytes=1 << 12)) as spool:
        write_run_info(spool.folder, RunInfo(run_id=run_id, tracking_uri=uri, thinner={}))
        for step in range(num_steps):
            append(spool, step)
    return folder / run_id


def replay_to(door: ListDoor, folder: Path, **options: Any) -> Any:
    return replay(folder, restore_thinner=Windows, open_door=lambda _: door, **options)


def test_it_is_sent_where_it_belongs_unless_told_otherwise(tmp_path: Path) -> None:
    asked = []

    def opened(uri: str) -> ListDoor:
        asked.append(uri)
        return ListDoor()

    result = replay(left(tmp_path, "http://home"), restore_thinner=Windows, open_door=opened)
    assert (result.run_id, result.tracking_uri, result.is_complete) == ("run", "http://home", True)
    result = replay(
        left(tmp_path, "http://home"), restore_thinner=Windows, open_door=opened, tracking_uri="http://away"
    )
    assert result.tracking_uri == "http://away"
    assert asked == ["http://home", "http://away"]


def test_a_second_time_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    folder, door = left(tmp_path, num_steps=900), ListDoor()

    def fail_after_one(number: int) -> None:
        if number > 1:
            raise Unreachable("away")

    door.trouble = fail_after_one
    result = replay_to(door, folder, deadline_seconds=1.0)
    assert not result.is_complete
    assert result.stats.last_error == "away"
    assert 0 < result.stats.num_sent <= 1000
    assert result.stats.num_sent == len(door.stored) == load_progress(folder).num_sent
    num_first = len(door.stored)
    door.trouble = lambda _: None
    door.batches.clear()
    result = replay_to(door, folder)
    assert result.is_complete
    assert sorted(door.stored) == points_of(Windows(), 900)
    assert sum(len(batch) for batch in door.batches) == 3000 - num_first  # none of those that were acknowledged
    assert not folder.exists()


def test_if_the_progress_is_lost_before_anything_was_released_all_is_sent_again_and_kept_once(tmp_path: Path) -> None:
    folder, door = left(tmp_path), ListDoor()
    (folder / "progress.json").write_text('{"version": 1, "posi')
    for point in points_of(Windows(), 60):
        door.stored[point] = None
    assert replay_to(door, folder).is_complete
    assert sorted(door.stored) == points_of(Windows(), 100)


@pytest.mark.parametrize("content", [None, b"", b"{"], ids=["deleted", "empty", "cut"])
def test_if_the_latest_progress_is_lost_the_one_before_it_leads_to_the_same_points(
    content: bytes | None, tmp_path: Path
) -> None:
    """As when the machine goes down; much of what was sent is deleted already by then."""
    folder, door = left(tmp_path, num_steps=2000), ListDoor()

    def fail_in_the_middle(number: int) -> None:
        if number > 4:
            raise Unreachable("away")

    door.trouble = fail_in_the_middle
    assert not replay_to(door, folder, deadline_seconds=1.0).is_complete
    assert min(segment_numbers(folder)) > 1
    (folder / "progress.json").unlink()
    if content is not None:
        (folder / "progress.json").write_bytes(content)
    door.trouble = lambda _: None
    result = replay_to(door, folder)
    assert result.is_complete
    assert sorted(door.stored) == points_of(Windows(), 2000)
    assert result.stats.num_sent == len(door.stored)


def test_refused_points_are_left_behind_with_their_reasons(tmp_path: Path) -> None:
    folder, warnings = left(tmp_path, num_steps=9), Warnings()
    result = replay_to(ListDoor(bad_keys=[TEN[3]]), folder, warn=warnings)
    assert result.is_complete
    assert (result.stats.num_sent, result.stats.num_set_aside) == (27, 3)
    assert [path.name for path in folder.iterdir()] == ["set_aside.jsonl"]
    lines = [json.loads(line) for line in (folder / "set_aside.jsonl").read_text().splitlines()]
    assert {line["key"] for line in lines} == {TEN[3]}
    assert TEN[3] in warnings.text


def test_what_the_server_does_not_take_at_all_is_kept_without_waiting_for_ever(tmp_path: Path) -> None:
    folder = left(tmp_path)
    door = ListDoor(trouble=failing(Refused("no such run", blames_content=False), times=10**9))
    begun = time.monotonic()
    result = replay_to(door, folder, warn=Warnings())
    assert time.monotonic() - begun < 10
    assert not result.is_complete
    assert result.stats.last_error == "no such run"
    assert replay_to(ListDoor(), folder).is_complete


def test_points_are_charged_here_too(tmp_path: Path) -> None:
    door = ListDoor()
    folder = left(tmp_path, num_steps=900)
    asked: list[RunInfo] = []

    def charge_for(info: RunInfo, door: Door) -> Charge:
        asked.append(info)
        return Charge(door, info.run_id, writer=info.writer, cap=2_000)

    result = replay_to(door, folder, charge_for=charge_for, warn=(warnings := Warnings()))

    assert result.is_complete
    assert len(door.stored) == 2_000 == result.stats.num_sent
    assert result.stats.num_cut == 1_000
    assert "budget is used up by all that log into it: 1,000 points are dropped now" in warnings.text
    assert asked[0].run_id == "run"
    assert charges_of(door.tags) == {asked[0].writer: 2_000}


def test_a_lost_progress_leaves_its_writer_charged(tmp_path: Path) -> None:
    """Nobody knows any more what it has sent, so that what is sent now is charged to another one."""
    folder, door = left(tmp_path), ListDoor()
    before = read_run_info(folder).writer
    door.tags[writer_tag(before)] = "500"
    (folder / "progress.json").write_text("{")

    result = replay_to(
        door, folder, charge_for=lambda info, door: Charge(door, info.run_id, writer=info.writer, cap=2_000)
    )

    assert result.is_complete
    charges = charges_of(door.tags)
    assert charges.pop(before) == 500
    assert [*charges.values()] == [len(door.stored)]


def test_the_folder_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    folder = left(tmp_path)
    with contextlib.closing(Spool(folder)), pytest.raises(SpoolInUseError, match="in use by this process"):
        replay_to(ListDoor(), folder)
    assert replay_to(ListDoor(), folder).is_complete


@pytest.mark.parametrize("name", ["", "nothing there", "empty"])
def test_what_is_no_spool_is_said_to_be_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is no spool of metrics"):
        replay_to(ListDoor(), tmp_path / name)


def test_a_run_that_logged_nothing_leaves_nothing(tmp_path: Path) -> None:
    door = ListDoor()
    folder = left(tmp_path, num_steps=0)
    assert replay_to(door, folder).is_complete
    assert door.batches == []
    assert not folder.exists()


def test_the_trivial_thinner_too(tmp_path: Path) -> None:
    door = ListDoor()
    folder = left(tmp_path)
    result = replay(folder, restore_thinner=lambda _: PassThrough(), open_door=lambda _: door)
    assert result.stats.num_sent == 1000
    assert sorted(door.stored) == points_of(PassThrough(), 100)
