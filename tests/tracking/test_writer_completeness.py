"""Complete means: as many records were taken out of the spool as were put in. And a flush waits for its own only."""

import contextlib
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_air.tracking.door_errors import Unreachable
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.progress import load_progress
from lightning_air.tracking.segments import BEGINNING, segment_path
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RunInfo, read_run_info, write_run_info
from lightning_air.tracking.writer import Writer
from tests.tracking.spooling import SECONDS, TWENTY, append, points_until, wait_until, writing
from tests.tracking.stand_ins import ListDoor, PassThrough, Warnings, Windows, failing

INFO = RunInfo(run_id="run", tracking_uri="list://", thinner={})


# ---- a folder that something else removes ---------------------------------------------------------------------------


def sweep(folder: Path) -> None:
    """Delete a folder at once, whoever makes something in it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("swept")))


def test_a_folder_that_is_removed_during_the_run_is_made_again_and_loses_nothing(tmp_path: Path) -> None:
    door, warnings, folder = ListDoor(), Warnings(), tmp_path / "spools" / "run"
    with writing(door, folder=folder, segment_bytes=4096, warn=warnings, info=INFO) as (spool, writer):
        for step in range(50):
            append(spool, step)
        assert writer.flush(SECONDS)
        sweep(folder.parent)
        for step in range(50, 100):  # more than the segment in use, and the one that was ready, have room for
            spool.append(1_700_000_000_000 + step, step, {name: float(step) for name in TWENTY})
        num_kept = spool.num_appended
        assert num_kept > 50
        assert writer.flush(SECONDS)
        wait_until(lambda: append_works(spool, 100))
        assert writer.flush(SECONDS)
        assert {point.step for point in door.stored} == {*range(num_kept), 100}
        assert read_run_info(folder) == INFO
        assert load_progress(folder).num_sent == len(door.stored)
        with pytest.raises(RuntimeError, match="in use by this process"):
            Spool(folder)
        assert writer.stats().num_lost == 0
        assert writer.close(SECONDS)
    assert f"{folder} was removed" in warnings.text
    assert "spool_dir" in warnings.text


def append_works(spool: Spool, step: int) -> bool:
    return spool.append(1_700_000_000_000 + step, step, {name: float(step) for name in TWENTY})


def test_after_the_folder_was_removed_the_next_attempt_finds_what_was_logged_since(tmp_path: Path) -> None:
    door, folder = ListDoor(), tmp_path / "run"
    with writing(door, folder=folder, info=INFO) as (spool, writer):
        append(spool, 0)
        assert writer.flush(SECONDS)
        sweep(folder)
        wait_until(lambda: (folder / "run.json").exists() or not writer.flush(SECONDS))
        door.trouble = failing(Unreachable("away"), times=10**9)
        num_before = spool.end.segment
        step = 1
        while spool.end.segment == num_before:  # a file of after the removal
            append(spool, step)
            step += 1
        assert not writer.close(0.2)
        first_there = step - 1
    door.trouble = lambda _: None
    with writing(door, folder=folder, info=INFO) as (spool, writer):
        assert writer.close(SECONDS)
    assert {0, first_there} <= {point.step for point in door.stored}


def test_what_was_removed_before_it_was_read_is_counted_and_said_and_nothing_is_called_complete(tmp_path: Path) -> None:
    door, warnings, folder = ListDoor(trouble=failing(Unreachable("away"), times=10**9)), Warnings(), tmp_path / "run"
    with writing(door, folder=folder, segment_bytes=4096, warn=warnings) as (spool, writer):
        for step in range(400):
            append(spool, step)
            spool.prepare()  # as the writer does now and then
        wait_until(lambda: bool(door.batches))
        for number in range(10, 13):
            segment_path(folder, number).unlink()
        door.trouble = lambda _: None
        writer.flush(SECONDS)
        num_lost = writer.stats().num_lost
        assert num_lost > 10
        assert len({point.step for point in door.stored}) == 400 - num_lost
        assert writer.stats().num_pending_records == 0
        assert not writer.close(SECONDS)
        assert writer.stats().num_lost == num_lost
    assert f"{num_lost} records" in warnings.text
    assert str(folder) in warnings.text


# ---- records that come while it ends ---------------------------------------------------------------------------------


def test_a_record_that_comes_during_the_last_request_is_sent_or_refused() -> None:
    accepted: list[int] = []

    def log_another(_: int) -> None:
        step = 100 + len(accepted)
        if spool.append(1, step, {"late": 1.0}):
            accepted.append(step)

    door, warnings = ListDoor(), Warnings()
    with writing(door, warn=warnings, flush_seconds=1000) as (spool, writer):
        append(spool, 0)
        door.trouble = log_another
        assert writer.close(SECONDS)
        assert {point.step for point in door.stored} == {0, *accepted}
        assert not spool.append(1, 200, {"late": 1.0})
    assert "is being closed" in warnings.text


def test_what_a_signal_handler_has_logged_is_sent_before_it_ends() -> None:
    door = ListDoor()
    with writing(door) as (spool, writer):
        inner = spool._append

        def interrupted(*args: Any) -> bool:
            spool._append = inner  # type: ignore[method-assign]
            assert spool.append(1, 77, {"handler": 1.0})
            return inner(*args)

        spool._append = interrupted  # type: ignore[method-assign,assignment]
        append(spool, 0)
        assert writer.close(SECONDS)
    assert {point.step for point in door.stored} == {0, 77}


# ---- a flush ---------------------------------------------------------------------------------------------------------


def test_a_flush_waits_for_what_was_appended_before_it_only() -> None:
    """Given a server that is slower than training; when it goes on logging; then a flush returns all the same."""
    door = ListDoor(trouble=lambda _: time.sleep(0.05))
    is_over = threading.Event()
    with writing(door) as (spool, writer):

        def train() -> None:
            step = 10_000
            while not is_over.is_set():
                for _ in range(500):
                    append(spool, step)
                    step += 1
                time.sleep(0.05)

        training = threading.Thread(target=train)
        for step in range(200):
            append(spool, step)
        training.start()
        try:
            assert writer.flush(SECONDS)
            assert {*range(200)} <= {point.step for point in door.stored}
            assert spool.num_appended * 20 > len(door.stored), "the server has caught up: the test proves nothing"
        finally:
            is_over.set()
            training.join()


def test_a_flush_of_what_an_earlier_process_has_left_waits_for_it(tmp_path: Path) -> None:
    with contextlib.closing(Spool(tmp_path / "run")) as spool:
        for step in range(300):
            append(spool, step)
    door = ListDoor(trouble=lambda _: time.sleep(0.02))
    with writing(door, folder=tmp_path / "run") as (_, writer):
        assert writer.flush(SECONDS)
        assert sorted(door.stored) == points_until(300)


# ---- what does not go well -------------------------------------------------------------------------------------------


def test_points_are_counted_once_though_their_space_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    door, warnings = ListDoor(), Warnings()
    unlink, num_failures = Path.unlink, 0

    def refuse(path: Path, missing_ok: bool = False) -> None:
        nonlocal num_failures
        if path.suffix == ".records" and num_failures < 5:
            num_failures += 1
            raise OSError("stale file handle")
        unlink(path, missing_ok=missing_ok)

    with writing(door, warn=warnings, segment_bytes=4096) as (spool, writer):
        monkeypatch.setattr(Path, "unlink", refuse)
        for step in range(400):
            append(spool, step)
        assert writer.flush(SECONDS)
        assert writer.stats().num_sent == len(door.stored) == 8_000
        assert num_failures == 5
        assert writer.close(SECONDS)
    assert "stale file handle" in warnings.text


def test_a_thinner_that_cannot_be_flushed_is_no_end_without_end() -> None:
    class Unflushable(PassThrough):
        def flush(self) -> list[Point]:
            raise ArithmeticError("no window")

    door, warnings = ListDoor(), Warnings()
    with writing(door, thinner=Unflushable(), warn=warnings) as (spool, writer):
        append(spool, 0)
        assert writer.close(SECONDS)
    assert len(door.stored) == 20
    assert "no window" in warnings.text


def test_what_fails_for_good_ends_a_writer_that_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lightning-air replay` has none."""

    class Unsnappable(PassThrough):
        def snapshot(self) -> dict[str, Any]:
            raise ArithmeticError("no snapshot")

    monkeypatch.setattr("lightning_air.tracking.patience.FIRST_PAUSE_SECONDS", 0.001)
    with writing(ListDoor(), thinner=Unsnappable()) as (spool, writer):
        append(spool, 0)
        assert not writer.close(float("inf"))
        assert "no snapshot" in (writer.stats().last_error or "")


def test_a_spool_that_cannot_be_counted_at_first_is_begun_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Spool(tmp_path / "run")) as spool:
        append(spool, 0)
    errors = [OSError("stale"), OSError("stale")]
    count = Spool.count_left

    def bad_count(self: Spool, *args: Any) -> int:
        if errors:
            raise errors.pop()
        return count(self, *args)

    monkeypatch.setattr(Spool, "count_left", bad_count)
    door = ListDoor()
    with writing(door, folder=tmp_path / "run") as (_, writer):
        assert writer.flush(SECONDS)
        assert writer._delivery.num_left == 1
        assert writer.close(SECONDS)
    assert len(door.stored) == 20


class Quit(BaseException):
    """Ends a thread, whatever it guards itself against."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_says_so_keeps_nobody_waiting_and_leaves_all_to_the_next_attempt(tmp_path: Path) -> None:
    class Deadly(Windows):
        def add(self, record: Record) -> list[Point]:
            if record.step == 7:
                raise Quit
            return super().add(record)

    door, warnings = ListDoor(), Warnings()
    with writing(door, thinner=Deadly(), folder=tmp_path / "run", warn=warnings, flush_seconds=0.01) as (spool, writer):
        for step in range(5):
            append(spool, step)
        assert writer.flush(SECONDS)
        begun = time.monotonic()
        append(spool, 7)
        assert not writer.flush(10 * SECONDS)
        append(spool, 8)
        assert not writer.flush(10 * SECONDS)
        assert not writer.close(10 * SECONDS)
        assert time.monotonic() - begun < SECONDS
        assert "Quit" in (writer.stats().last_error or "")
    assert "the next attempt" in warnings.text
    progress = load_progress(tmp_path / "run")
    with writing(door, thinner=Windows(progress.thinner), folder=tmp_path / "run") as (_, writer):
        assert writer.close(SECONDS)
    undisturbed = Windows()
    expected = [point for step in (0, 1, 2, 3, 4, 7, 8) for point in undisturbed.add(record_of(step))]
    assert sorted(door.stored) == sorted(expected + undisturbed.flush())


def record_of(step: int) -> Record:
    return Record(1_700_000_000_000 + step, step, {name: step + index / 64 for index, name in enumerate(TWENTY)})


# ---- without a thread ------------------------------------------------------------------------------------------------


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_where_no_thread_starts_any_more_closing_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process on Python 3.12."""
    spool, door = Spool(tmp_path / "run"), ListDoor()
    writer = Writer(spool, PassThrough(), door, "run", warn=Warnings())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        writer.start()
        for step in range(100):
            append(spool, step)
        begun = time.monotonic()
        assert not writer.flush(SECONDS)
        assert time.monotonic() - begun < SECONDS / 2
        assert writer.close(SECONDS)
    assert sorted(door.stored) == points_until(100)
    assert writer.close(0)
    spool.close()


def test_without_a_thread_too_a_server_that_is_away_costs_no_more_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, door = Spool(tmp_path / "run"), ListDoor(trouble=failing(Unreachable("away"), times=10**9))
    writer = Writer(spool, PassThrough(), door, "run", warn=Warnings())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        writer.start()
        append(spool, 0)
        begun = time.monotonic()
        assert not writer.close(0.5)
        assert time.monotonic() - begun < 5
    assert writer.stats().last_error == "away"
    spool.close()


def test_a_thread_that_cannot_be_started_at_first_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process has as many as it may."""
    spool, door = Spool(tmp_path / "run"), ListDoor()
    writer = Writer(spool, PassThrough(), door, "run", warn=Warnings())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        writer.start()
    append(spool, 0)
    assert writer.flush(SECONDS)
    assert len(door.stored) == 20
    assert writer.close(SECONDS)
    spool.close()


# ---- deadlines -------------------------------------------------------------------------------------------------------


def test_a_disk_that_stalls_does_not_keep_a_close_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it writes at last does not take the place of what came after."""
    fsync, is_stalled, go_on = os.fsync, threading.Event(), threading.Event()

    def stall(descriptor: int) -> None:
        if threading.current_thread() is writer._thread:
            is_stalled.set()
            go_on.wait(SECONDS)
        fsync(descriptor)

    door, folder = ListDoor(), tmp_path / "run"
    with writing(door, folder=folder, flush_seconds=0.01) as (spool, writer):
        append(spool, 0)
        assert writer.flush(SECONDS)
        monkeypatch.setattr(os, "fsync", stall)
        append(spool, 1)
        assert is_stalled.wait(SECONDS)
        begun = time.monotonic()
        assert not writer.close(0.2)
        assert time.monotonic() - begun < 2
        stalled = writer._thread
        spool.close()
        with writing(door, folder=folder, flush_seconds=0.01) as (later, second):
            append(later, 2)
            assert second.flush(SECONDS)
            text = (folder / "progress.json").read_bytes()
            go_on.set()
            assert stalled is not None
            stalled.join(SECONDS)
            assert (folder / "progress.json").read_bytes() == text
            assert second.close(SECONDS)
    assert sorted(door.stored) == points_until(3)


def test_reading_ends_with_the_deadline_too(tmp_path: Path) -> None:
    """A backlog of which no points come is read for long, and nothing of it is sent."""

    class Slow(PassThrough):
        def add(self, record: Record) -> list[Point]:
            time.sleep(0.02)
            return []

    with contextlib.closing(Spool(tmp_path / "run")) as spool:
        for step in range(3000):  # for a minute
            append(spool, step)
    with writing(ListDoor(), thinner=Slow(), folder=tmp_path / "run") as (_, writer):
        assert not writer.close(0.2)
        thread = writer._thread
        assert thread is not None
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_signal_that_comes_while_a_thread_is_stuck_in_an_append_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_air.tracking import spool_files

    is_stuck, go_on, segment = threading.Event(), threading.Event(), spool_files.Segment

    def stuck(*args: Any) -> Any:
        if threading.current_thread().name == "stuck":
            is_stuck.set()
            go_on.wait(SECONDS)
        return segment(*args)

    door = ListDoor()
    with writing(door, folder=tmp_path / "run") as (spool, writer):
        monkeypatch.setattr(spool_files, "Segment", stuck)
        thread = threading.Thread(
            target=lambda: spool.append(1, 1, {f"m{index}": 1.0 for index in range(200_000)}), name="stuck"
        )
        thread.start()
        assert is_stuck.wait(SECONDS)
        begun = time.monotonic()
        assert not writer.close(0.3), "nobody knows whether the record is kept"
        spool.close()
        assert time.monotonic() - begun < 5
        go_on.set()
        thread.join(SECONDS)


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_places_that_are_damaged_are_counted_said_and_kept_in_mind(tmp_path: Path) -> None:
    folder, door, warnings = tmp_path / "run", ListDoor(), Warnings()
    with contextlib.closing(Spool(folder)) as spool:
        for step in range(100):
            append(spool, step)
        position = spool.read(BEGINNING, 50)[-1][0]
    with segment_path(folder, 1).open("r+b") as file:
        file.seek(position.offset + 50)
        file.write(b"\xff")
    with writing(door, folder=folder, warn=warnings) as (_, writer):
        assert writer.flush(SECONDS)
        assert writer.stats().num_damaged == 1
        assert len({point.step for point in door.stored}) == 99
    assert "damaged" in warnings.text
    with writing(door, folder=folder, warn=warnings) as (_, writer):
        assert writer.close(SECONDS)
        assert writer.stats().num_damaged == 1


def test_whose_records_they_are_is_noted_as_soon_as_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with writing(ListDoor(), folder=folder, info=INFO) as (spool, writer):
        append(spool, 0)
        assert writer.flush(SECONDS)
        assert read_run_info(folder) == INFO
        info = json.loads((folder / "run.json").read_text())
        assert info["run_id"] == "run"
        write_run_info(folder, RunInfo(run_id="another", tracking_uri="", thinner={}))
        append(spool, 1)
        assert writer.flush(SECONDS)
        assert read_run_info(folder).run_id == "another", "it is noted where there is none, and not again"
