"""No record that was appended is lost, not by a SIGKILL either; none is read that was not; training never waits."""

import contextlib
import dis
import errno
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.tracking import segments, spool_files
from lightning_air.tracking import spool as spool_module
from lightning_air.tracking.folder_lock import FolderLock, SpoolInUseError
from lightning_air.tracking.points import Record
from lightning_air.tracking.progress import Progress, load_progress, save_progress
from lightning_air.tracking.record_codec import HEADER, WORD_BYTES
from lightning_air.tracking.segments import BEGINNING, Position, segment_numbers, segment_path
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import RunInfo, remove_folder, write_run_info
from lightning_air.tracking.spool_reader import SpoolReader
from lightning_air.tracking.writer import Writer
from tests.kit.ranks import run_ranks
from tests.tracking.small_disk import mount_small_disk
from tests.tracking.stand_ins import FakeTime, ListDoor, PassThrough, Warnings

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
TWENTY = [f"train/metric_{index}" for index in range(20)]


def values_at(step: int, names: list[str] = TWENTY) -> dict[str, float]:
    return {name: step + index / 100 for index, name in enumerate(names)}


def record_at(step: int, names: list[str] = TWENTY) -> Record:
    return Record(1_700_000_000_000 + step, step, values_at(step, names))


def append(spool: Spool, step: int, names: list[str] = TWENTY) -> bool:
    record = record_at(step, names)
    return spool.append(record.timestamp_ms, record.step, record.values)


def steps_in(folder: Path, position: Position = BEGINNING) -> list[int]:
    """Return the steps that a later process finds, each of them with the very values it was logged with."""
    reader = SpoolReader(folder)
    found = [record for _, record in reader.read(position, 10**9)]
    reader.close()
    for record in found:
        assert record == record_at(record.step, list(record.values))
    return [record.step for record in found]


@contextmanager
def open_spool(folder: Path, **options: Any) -> Iterator[Spool]:
    spool = Spool(folder, **options)
    try:
        yield spool
    finally:
        spool.close()


# ---- in order ------------------------------------------------------------------------------------------------------


def test_records_come_back_in_order_while_appending_and_in_a_later_process(tmp_path: Path) -> None:
    with open_spool(tmp_path / "run") as spool:
        position, found = BEGINNING, []
        for step in range(300):
            assert append(spool, step, TWENTY[: 1 + step % 3])
            if step % 7 == 0:
                batch = spool.read(position, 4)
                found += [record.step for _, record in batch]
                position = batch[-1][0]
        while batch := spool.read(position, 11):
            found += [record.step for _, record in batch]
            position = batch[-1][0]
        assert found == list(range(300))
        assert position == spool.end
        assert spool.num_appended == 300
    assert steps_in(tmp_path / "run") == found


def test_the_next_spool_goes_on_behind_what_the_last_one_left(tmp_path: Path) -> None:
    for attempt in range(3):
        with open_spool(tmp_path) as spool:
            assert spool.count_left(BEGINNING) == 10 * attempt
            for step in range(10 * attempt, 10 * attempt + 10):
                append(spool, step)
            assert [record.step for _, record in spool.read(BEGINNING, 1000)] == list(range(10 * attempt + 10))
            assert spool.count_left(BEGINNING) == 10 * attempt
    assert steps_in(tmp_path) == list(range(30))


def test_a_position_is_json_and_leads_back(tmp_path: Path) -> None:
    with open_spool(tmp_path, segment_bytes=1024) as spool:
        for step in range(50):
            append(spool, step, TWENTY[:3])
        found = spool.read(BEGINNING, 1000)
    positions = [Position(*json.loads(json.dumps(position))) for position, _ in found]
    assert positions == sorted(positions)
    assert len({position.segment for position in positions}) > 3
    for position, (_, record) in zip(positions, found, strict=True):
        assert steps_in(tmp_path, position) == list(range(record.step + 1, 50))


def test_release_deletes_whole_segments_before_the_position_only(tmp_path: Path) -> None:
    with open_spool(tmp_path, segment_bytes=1024) as spool:
        for step in range(50):
            append(spool, step)
        position, record = spool.read(BEGINNING, 20)[-1]
        spool.release(position)
        assert min(segment_numbers(tmp_path)) == position.segment
        assert [found.step for _, found in spool.read(position, 1000)] == list(range(record.step + 1, 50))
        spool.release(spool.end)
        assert append(spool, 50)
        assert [found.step for _, found in spool.read(position, 1000)][-1] == 50


class Model:
    """What a spool should hold, beside a spool; every operation checks one against the other."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder
        self.options = {"segment_bytes": segment_bytes, "max_bytes": 1 << 30}
        self.spool = Spool(folder, **self.options)
        self.position = BEGINNING
        self.num_appended = self.num_read = 0

    def append(self, size: int) -> None:
        assert append(self.spool, self.num_appended, TWENTY[:size])
        self.num_appended += 1

    def read(self, size: int) -> None:
        found = self.spool.read(self.position, size)
        assert [record.step for _, record in found] == list(
            range(self.num_read, min(self.num_read + size, self.num_appended))
        )
        for self.position, record in found:
            assert record == record_at(record.step, list(record.values))
        self.num_read += len(found)

    def prepare(self, _: int) -> None:
        self.spool.prepare()

    def release(self, _: int) -> None:
        self.spool.release(self.position)

    def reopen(self, _: int) -> None:
        self.spool.close()
        self.spool = Spool(self.folder, **self.options)

    def crash(self, size: int) -> None:
        """Die in the middle of an append: some of the body is there, its word is not."""
        segment = self.spool._segment
        if segment is not None:
            start = segment.offset + WORD_BYTES
            garbage = os.urandom(min(8 * size, segment.num_bytes - start))
            segment.view[start : start + len(garbage)] = garbage
        self.reopen(0)

    def interrupt(self, size: int) -> None:
        """The same, but the process goes on."""
        segment = self.spool._segment
        if segment is not None:
            start = segment.offset + WORD_BYTES
            garbage = os.urandom(min(8 * size, segment.num_bytes - start))
            segment.view[start : start + len(garbage)] = garbage


@law
@given(
    st.sampled_from([64, 256, 1024]),
    st.lists(
        st.tuples(
            st.sampled_from(["append"] * 4 + ["read"] * 2 + ["prepare", "release", "reopen", "crash", "interrupt"]),
            st.integers(1, 20),
        ),
        max_size=60,
    ),
)
def test_nothing_is_lost_or_doubled_in_any_order_of_events(segment_bytes: int, events: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = Model(Path(scratch, "run"), segment_bytes)
        try:
            for name, size in events:
                getattr(model, name)(size)
            model.read(10**6)
        finally:
            model.spool.close()


# ---- damage --------------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class Twelve:
    """The bytes of a segment with the steps 0 to 11, and where each of them ends."""

    content: bytes
    ends: list[int]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Twelve:
    folder = tmp_path_factory.mktemp("spool")
    with open_spool(folder, segment_bytes=4096) as spool:
        for step in range(12):
            append(spool, step, TWENTY[: 1 + step % 3])
        ends = [position.offset for position, _ in spool.read(BEGINNING, 100)]
    return Twelve(segment_path(folder, 1).read_bytes(), ends)


def steps_of(content: bytes) -> list[int]:
    with tempfile.TemporaryDirectory() as scratch:
        segment_path(Path(scratch), 1).write_bytes(content)
        return steps_in(Path(scratch))


@law
@given(st.data())
def test_what_was_written_before_a_crash_is_read_and_nothing_else(twelve: Twelve, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, twelve.ends[-1] + 8))
    is_shorter = data.draw(st.booleans())
    found = steps_of(twelve.content[:cut] + (b"" if is_shorter else bytes(len(twelve.content) - cut)))
    num_whole = sum(end <= cut for end in twelve.ends)
    assert found == list(range(len(found)))
    # A file that was cut short has no zero word behind its last frame, so that frame may not count. A record that ends
    # in zeros, on the other hand, does not miss them.
    assert num_whole - is_shorter <= len(found) <= num_whole + 1


@law
@given(st.data())
def test_of_a_damaged_file_no_wrong_record_is_read(twelve: Twelve, data: st.DataObject) -> None:
    damaged = bytearray(twelve.content)
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=5)):
        damaged[at] = byte
    found = steps_of(bytes(damaged))
    assert found == sorted(set(found))
    assert set(found) <= set(range(12))


def test_one_damaged_record_costs_one_record_and_is_logged(twelve: Twelve, caplog: pytest.LogCaptureFixture) -> None:
    damaged = bytearray(twelve.content)
    damaged[twelve.ends[6] - 1] ^= 1
    assert steps_of(bytes(damaged)) == [step for step in range(12) if step != 6]
    assert "is damaged at byte" in caplog.text


@law
@given(st.data())
def test_a_bad_length_costs_no_record_behind_it(twelve: Twelve, data: st.DataObject) -> None:
    step, bit = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 31))
    damaged = bytearray(twelve.content)
    damaged[twelve.ends[step] + bit // 8] ^= 1 << bit % 8
    # Behind the steps 0 and 1 it is that of the next record's names; then two or four steps have none.
    assert {*range(step + 1), *range(step + 2, 12)} - set(steps_of(bytes(damaged))) <= {1, 2, 4, 5, 7, 8, 10, 11}
    if step >= 2:
        assert steps_of(bytes(damaged)) == [each for each in range(12) if each != step + 1]


def test_a_page_of_zeros_costs_what_it_held_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A machine that went down leaves that in a file whose blocks were allocated before.
    with open_spool(tmp_path, segment_bytes=1 << 16) as spool:
        for step in range(300):
            append(spool, step)
        ends = {record.step: position.offset for position, record in spool.read(BEGINNING, 1000)}
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    for begin, end in ((8192, 12288), (ends[100], ends[150])):  # also from frame to frame
        path.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
        caplog.clear()
        with open_spool(tmp_path) as spool:
            read = [record.step for _, record in spool.read(BEGINNING, 1000)]
            assert spool.count_left(BEGINNING) == len(read)
            assert spool.num_damaged == 1
        lost = [step for step in range(300) if begin < ends[step] and (ends[step - 1] if step else 0) < end]
        assert read == [step for step in range(300) if step not in lost]
        assert "bytes of records are left out" in caplog.text
        for name in segment_numbers(tmp_path)[1:]:
            segment_path(tmp_path, name).unlink()


def test_records_that_are_appended_while_one_looks_behind_the_end_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_air.tracking import spool_reader

    with open_spool(tmp_path) as spool:
        append(spool, 0)
        reader, looked = SpoolReader(tmp_path), spool_reader._OpenSegment._next_whole

        def look(segment: Any) -> int:
            if spool.num_appended < 5:
                append(spool, spool.num_appended)
                append(spool, spool.num_appended)
            return looked(segment)

        monkeypatch.setattr(spool_reader._OpenSegment, "_next_whole", look)
        assert [record.step for _, record in reader.read(BEGINNING, 100)] == [0, 1, 2, 3, 4]
        assert reader.num_damaged == 0
        reader.close()


@pytest.mark.parametrize("content", [b"", b"x", bytes(4096), HEADER[:5], HEADER, HEADER[::-1] + bytes(100), b"x" * 99])
def test_a_file_that_was_never_ready_holds_nothing(content: bytes, tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(content)
    (tmp_path / "notes.records").write_text("not a number")
    with open_spool(tmp_path) as spool:
        assert append(spool, 0)
        assert [record.step for _, record in spool.read(BEGINNING, 10)] == [0]


# ---- killed and interrupted ----------------------------------------------------------------------------------------


def append_until_killed(folder: str, seconds: float) -> None:
    """Append as fast as it goes; a file tells how many times `append` has returned."""
    with Path(folder, "count").open("w+b") as file:
        file.write(bytes(8))
        file.flush()
        count = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    spool = Spool(Path(folder, "run"), segment_bytes=1 << 14)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    for step in range(10**9):
        append(spool, step, TWENTY[: 1 + step % 20])
        count[0] = step + 1
        if step % 40 == 0:
            spool.prepare()


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3])
def test_a_sigkill_loses_no_record_whose_append_had_returned(seconds: float, tmp_path: Path) -> None:
    (result,) = run_ranks(append_until_killed, 1, args=(str(tmp_path), seconds))
    assert result.exitcode == -signal.SIGKILL, result
    num_returned = int.from_bytes((tmp_path / "count").read_bytes(), sys.byteorder)
    assert num_returned > 50
    found = steps_in(tmp_path / "run")
    assert found == list(range(len(found)))
    assert len(found) - num_returned in (0, 1)


def at_point(number: int, action: Callable[[], object], call: Callable[[], object]) -> bool:
    """Run the call, and the action where Python would run a signal handler inside the spool for the `number`-th time.

    It does so after calls, at the beginning of functions and when it jumps back. Returns whether there were so many.
    """
    left, last = number, ""
    files = {spool_module.__file__, segments.__file__, spool_files.__file__}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, last
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= last.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "RETURN"))
            last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if left == 0:
                sys.settrace(None)
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        next(apart(call))
    finally:
        sys.settrace(before)
    return left <= 0


def apart(call: Callable[[], object]) -> Iterator[None]:
    """Make a call in a generator, which has a state of exceptions of its own.

    What is raised between two instructions, where no signal could, may leave the exception that was being handled there
    in `sys.exception()` for ever, and tests after this one would see it.
    """
    call()
    yield


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_first", [True, False], ids=["first of its names", "ordinary"])
def test_ctrl_c_in_the_middle_of_an_append_costs_at_most_that_record(is_first: bool, tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        kept: list[int] = []
        doubtful: list[int] = []
        step, number, is_inside = 0, 0, True
        while is_inside and number < 600:
            number += 1
            names = [f"{index}-of-{number if is_first else 0}" for index in range(3)]
            try:
                is_inside = at_point(number, interrupt, lambda: append(spool, step, names))  # noqa: B023
                kept.append(step)
            except KeyboardInterrupt:
                doubtful.append(step)
            assert append(spool, step + 1, names)
            kept.append(step + 1)
            step += 2
        assert len(doubtful) >= 6
        found = [record.step for _, record in spool.read(BEGINNING, 10**6)]
    assert found == sorted(set(found))
    assert set(kept) <= set(found) <= {*kept, *doubtful}


@pytest.mark.parametrize("has_spare", [True, False], ids=["made ahead", "made now"])
def test_ctrl_c_where_a_new_segment_begins_costs_at_most_that_record(has_spare: bool, tmp_path: Path) -> None:
    number, is_inside = 0, True
    while is_inside and number < 600:
        number += 1
        folder = tmp_path / str(number)
        with open_spool(folder, segment_bytes=4096) as spool:
            step = 0
            while spool._segment is None or spool._segment.has_room(192):
                assert append(spool, step)
                step += 1
            if not has_spare:
                spool.drop_spare()
            kept = list(range(step))
            try:
                is_inside = at_point(number, interrupt, lambda: append(spool, step))  # noqa: B023
                kept.append(step)
            except KeyboardInterrupt:
                pass
            for each in range(step + 1, step + 50):
                assert append(spool, each)
                kept.append(each)
            preparing = threading.Thread(target=spool.prepare, daemon=True)
            preparing.start()
            preparing.join(10)
            assert not preparing.is_alive()  # nothing is locked for ever
            found = [record.step for _, record in spool.read(BEGINNING, 10**6)]
        assert found == sorted(set(found))
        assert set(kept) <= set(found) <= {*kept, step}
        Spool(folder).close()
    assert 10 < number < 600


@pytest.mark.parametrize("closes", [False, True], ids=["raises", "closes and raises"])
def test_what_a_signal_handler_logged_is_kept_however_it_ends(closes: bool, tmp_path: Path) -> None:
    number, is_inside = 0, True
    while is_inside and number < 600:
        number += 1
        spool = Spool(tmp_path / str(number))
        append(spool, 0)
        results: list[bool] = []

        def handler() -> None:
            results.append(append(spool, 2))  # noqa: B023
            if closes:
                spool.close()  # noqa: B023
            raise KeyboardInterrupt

        try:
            is_inside = at_point(number, handler, lambda: append(spool, 1))  # noqa: B023
        except KeyboardInterrupt:
            assert results == [True]
            assert not spool._deferred  # a SIGKILL now would not lose it
            spool.close()
            assert {0, 2} <= set(steps_in(spool.folder)) <= {0, 1, 2}
        spool.close()
    assert 6 < number < 600


def test_a_signal_handler_may_log_in_the_middle_of_an_append(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        step, number = 0, 0
        while number < 600:
            number += 1
            results: list[bool] = []
            handler = lambda: results.append(append(spool, step + 1))  # noqa: B023, E731
            if not at_point(number, handler, lambda: append(spool, step)):  # noqa: B023
                break
            assert results == [True]
            step += 2
        assert number >= 6
        found = [record.step for _, record in spool.read(BEGINNING, 10**6)]
        assert not spool._deferred
    assert sorted(found) == list(range(step + 1))


def test_threads_may_append_at_once(tmp_path: Path) -> None:
    with open_spool(tmp_path, segment_bytes=1 << 14) as spool:
        threads = [
            threading.Thread(target=lambda first=first: [append(spool, step) for step in range(first, 4000, 4)])
            for first in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(steps_in(tmp_path)) == list(range(4000))


# ---- space ---------------------------------------------------------------------------------------------------------


def test_beyond_its_limit_records_are_dropped_said_once_and_taken_again_when_there_is_space(tmp_path: Path) -> None:
    warnings, time_ = Warnings(), FakeTime()
    with open_spool(tmp_path, segment_bytes=4096, max_bytes=12_000, warn=warnings, clock=time_.clock) as spool:
        kept = []
        for step in range(200):
            if append(spool, step):
                kept.append(step)
            spool.prepare()
        assert 0 < len(kept) < 100
        assert spool.num_dropped == 200 - len(kept)
        assert {kind for kind, _ in warnings} == {"spool-full 1"}
        assert str(tmp_path) in warnings.text
        assert "12,000 bytes" in warnings.text
        found = spool.read(BEGINNING, 1000)
        assert [record.step for _, record in found] == kept
        spool.release(found[-1][0])
        spool.prepare()
        assert append(spool, 200)
        while append(spool, 201):
            spool.prepare()
        assert {kind for kind, _ in warnings} == {"spool-full 1"}, "it is full all the time"
        time_.now += 10_000
        assert not append(spool, 201)
        assert {kind for kind, _ in warnings} == {"spool-full 1", "spool-full 2"}, "but this may be another day"
        assert sum(path.stat().st_size for path in tmp_path.glob("*.records")) <= 12_000


def test_without_a_writer_an_append_looks_for_space_itself_but_not_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_, tries = FakeTime(), []

    def allocate(descriptor: int, offset: int, num_bytes: int) -> None:
        tries.append(num_bytes)
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_spool(tmp_path, segment_bytes=4096, warn=Warnings(), clock=time_.clock) as spool:
        while append(spool, 0) and spool.num_appended < 30:
            pass
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        assert [append(spool, 0) for _ in range(1000)].count(False) > 900
        assert len(tries) == 1
        time_.now += 1
        append(spool, 0)
        assert len(tries) == 2
        monkeypatch.undo()
        time_.now += 1
        assert append(spool, 1)
        assert sorted(segment_numbers(tmp_path)) == [1, 2, 5]  # what failed has left nothing


@pytest.mark.parametrize("is_large", [False, True], ids=["ordinary", "large"])
def test_a_disk_that_stalls_is_waited_for_once(is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"metric_{index}" for index in range(600 if is_large else 20)]
    stalls, goes_on = threading.Event(), threading.Event()

    def allocate(descriptor: int, offset: int, num_bytes: int) -> None:
        if threading.current_thread() is writer:
            stalls.set()
            goes_on.wait(30)
        os.ftruncate(descriptor, num_bytes)

    with open_spool(tmp_path, segment_bytes=4096, warn=Warnings()) as spool:
        writer = threading.Thread(target=spool.prepare)
        append(spool, 0)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        writer.start()
        assert stalls.wait(10)
        seconds = []
        for step in range(200):
            begun = time.perf_counter()
            append(spool, step, names)
            seconds.append(time.perf_counter() - begun)
        assert sum(each > 0.2 for each in seconds) <= 1
        assert sum(seconds) < 3
        assert spool.num_dropped > 100
        goes_on.set()
        writer.join()
        assert append(spool, 200)


def test_segments_are_used_in_the_order_of_their_numbers_whoever_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, late = os.posix_fallocate, threading.Event()

    def allocate(descriptor: int, offset: int, num_bytes: int) -> None:
        real(descriptor, offset, num_bytes)
        if threading.current_thread() is writer:
            late.wait(30)

    with open_spool(tmp_path, segment_bytes=4096) as spool:
        append(spool, 0)
        writer = threading.Thread(target=spool.prepare)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", allocate)
            writer.start()
            while spool._files._making is None:
                time.sleep(0.001)
            spool._files._making = None  # the appending thread had looked just before
            step = 1
            while append(spool, step) and spool.end.segment < 3:
                step += 1
            late.set()
            writer.join()
        for each in range(step + 1, step + 60):
            assert append(spool, each)
        found = [record.step for _, record in spool.read(BEGINNING, 1000)]
        assert found == list(range(step + 60))
        assert spool.end.segment > 3


def test_a_spare_that_goes_while_it_is_taken_is_no_error(tmp_path: Path) -> None:
    # The writer's thread gives it back when the disk is full, just as the other one has seen it.
    warnings = Warnings()
    with open_spool(tmp_path, segment_bytes=4096, warn=warnings) as spool:
        number, is_inside = 0, True
        while is_inside and number < 600:
            number += 1
            append(spool, 0)
            spool.prepare()
            while spool._segment is None or spool._segment.has_room(192):
                assert append(spool, 0)
            is_inside = at_point(number, spool.drop_spare, lambda: append(spool, 1))
    assert 10 < number < 600
    assert warnings == []


def fill_a_disk(folder: str) -> list[Any]:
    """Log onto a disk that is really full: a store into a mapped page must not be a SIGBUS."""
    if not mount_small_disk(Path(folder), "size=3m"):
        return ["no mounts here"]
    warnings = Warnings()
    spool = Spool(Path(folder, "run"), warn=warnings)
    results = []
    for step in range(20_000):
        results.append(append(spool, step))
        if step % 100 == 0:
            spool.prepare()
    found = spool.read(BEGINNING, 10**6)
    spool.drop_spare()
    Path(folder, "something else").write_bytes(bytes(4096))
    spool.release(found[-1][0])
    spool.prepare()
    results.append(append(spool, 20_000))
    spool.close()
    return [results.count(True), len(found), [kind for kind, _ in warnings][:1], results[-1]]


def test_a_disk_that_is_full_costs_records_and_no_more(tmp_path: Path) -> None:
    (result,) = run_ranks(fill_a_disk, 1, args=(str(tmp_path),))
    assert result.error is None, result
    if result.value == ["no mounts here"]:
        pytest.skip("cannot mount a file system")
    num_kept, num_found, kinds, is_kept_again = result.value
    assert 5_000 < num_found < 20_000
    assert num_kept == num_found + 1
    assert kinds == ["spool-full 1"]
    assert is_kept_again


def test_a_record_larger_than_a_segment_gets_its_own(tmp_path: Path) -> None:
    many = [f"metric_{index}" for index in range(500)]
    with open_spool(tmp_path, segment_bytes=4096) as spool:
        for step in range(6):
            assert append(spool, step, many if step % 2 else TWENTY)
    assert steps_in(tmp_path) == list(range(6))


def test_many_different_sets_of_names_take_no_more_and_more_memory(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        for step in range(2500):
            append(spool, step, [f"metric_{step}"])
        assert len(spool._layouts) <= 1000
    assert steps_in(tmp_path) == list(range(2500))


def test_a_file_system_without_fallocate_gets_real_blocks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not on this file system")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with open_spool(tmp_path, segment_bytes=10_000) as spool:
        append(spool, 0)
        status = segment_path(tmp_path, 1).stat()
        assert status.st_size == 10_000
        assert status.st_blocks * 512 >= 10_000
    assert steps_in(tmp_path) == [0]


# ---- what is logged ------------------------------------------------------------------------------------------------


class Awkward:
    def __float__(self) -> float:
        raise RuntimeError("only one element tensors can be converted to Python scalars")


@pytest.mark.parametrize("bad", ["text", None, Awkward(), 10**400, [1.0], b"1"], ids=lambda bad: type(bad).__name__)
def test_of_twenty_values_one_that_is_no_number_is_left_out_and_named(bad: Any, tmp_path: Path) -> None:
    warnings = Warnings()
    with open_spool(tmp_path, warn=warnings) as spool:
        for step in range(3):
            assert spool.append(step, step, values_at(step) | {TWENTY[7]: bad})
        found = [record for _, record in spool.read(BEGINNING, 10)]
        assert spool.num_bad_values == 3
    assert [len(record.values) for record in found] == [19] * 3
    assert TWENTY[7] not in found[0].values
    assert all(f"{TWENTY[7]!r} is not logged" in message for _, message in warnings)


def test_what_has_nothing_in_it_is_no_record(tmp_path: Path) -> None:
    warnings = Warnings()
    text: Any = {"a": "text"}
    odd: Any = {"a": True, 5: 2}
    with open_spool(tmp_path, warn=warnings) as spool:
        assert not spool.append(1, 2, {})
        assert not spool.append(1, 2, text)
        assert not spool.append(1, 2**70, {"a": 1.0})
        assert not spool.append(1, "now", {"a": 1.0})
        assert spool.append(1, 3.0, odd)
        assert spool.num_dropped == 2
        assert "step 'now'" in warnings.text
        ((_, record),) = spool.read(BEGINNING, 10)
    assert record == Record(1, 3, {"a": 1.0, "5": 2.0})


def test_a_closed_spool_takes_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    append(spool, 0)
    spool.close()
    spool.close()
    assert not append(spool, 1)
    spool.prepare()
    assert steps_in(tmp_path) == [0]


def test_a_writer_that_could_not_be_waited_for_may_go_on_reading(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=1 << 14)
    names = [f"layer_{index}" for index in range(300)]
    for step in range(400):
        append(spool, step, names)
    errors: list[BaseException] = []
    steps: list[int] = []
    reads = threading.Event()

    def read() -> None:
        position = BEGINNING
        try:
            while found := spool.read(position, 3):
                position = found[-1][0]
                steps.extend(record.step for _, record in found)
                reads.set()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer = threading.Thread(target=read)
        writer.start()
        assert reads.wait(10)
        spool.close()
        Spool(tmp_path).close()  # the folder is free
        writer.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert steps == list(range(400))


def test_a_reader_is_closed_while_it_reads_and_its_file_is_unmapped_then(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        append(spool, 0)
        append(spool, 1)
    reader = SpoolReader(tmp_path)
    reader.read(BEGINNING, 1)
    with reader._open._view[:8]:  # as it reads
        reader.close()
    assert str(segment_path(tmp_path, 1)) not in Path("/proc/self/maps").read_text()


def test_a_folder_that_cannot_be_tidied_is_free_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = Warnings()
    spool = Spool(tmp_path, warn=warnings)
    append(spool, 0)
    spool.prepare()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        spool.close()
    assert "Input/output error" in warnings.text
    with open_spool(tmp_path) as spool:
        assert spool.count_left(BEGINNING) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_bytes": 63}, "segment_bytes must be a multiple of 8, from 64 on, got 63"),
        ({"segment_bytes": 100}, "segment_bytes .* got 100"),
        ({"segment_bytes": 1024, "max_bytes": 2047}, "max_bytes must be at least two segments of 1024 bytes, got 2047"),
    ],
)
def test_sizes_are_checked_and_the_folder_is_free_again(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Spool(tmp_path, **options)
    Spool(tmp_path).close()


# ---- whose folder --------------------------------------------------------------------------------------------------


def open_and_say(folder: str) -> str:
    try:
        Spool(folder).close()
    except SpoolInUseError as error:
        return str(error)
    return "opened"


def test_a_second_spool_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        append(spool, 0)
        with pytest.raises(SpoolInUseError, match="in use by this process already"):
            Spool(tmp_path)
        (other,) = run_ranks(open_and_say, 1, args=(str(tmp_path),))
        assert f"{tmp_path} is in use by process {os.getpid()} on " in str(other.value)
        assert append(spool, 1)
    (other,) = run_ranks(open_and_say, 1, args=(str(tmp_path),))
    assert other.value == "opened", other
    assert steps_in(tmp_path) == [0, 1]


def test_of_two_threads_one_gets_the_folder(tmp_path: Path) -> None:
    for attempt in range(100):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        barrier, locks = threading.Barrier(2), []

        def take(folder: Path = folder, barrier: threading.Barrier = barrier, locks: list[Any] = locks) -> None:
            barrier.wait()
            with contextlib.suppress(SpoolInUseError):
                locks.append(FolderLock(folder))

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (lock,) = locks
        lock.release()


def test_a_lock_that_was_released_is_nobody_elses(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    first.release()
    second = FolderLock(tmp_path)
    first.release()
    with pytest.raises(SpoolInUseError):
        FolderLock(tmp_path)
    second.release()


def test_a_full_disk_does_not_keep_a_folder_from_being_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    warnings = Warnings()
    with monkeypatch.context() as patch:
        for name in ("pwrite", "posix_fallocate"):
            patch.setattr(os, name, refuse)
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        with open_spool(tmp_path / "run", warn=warnings) as spool:
            assert not append(spool, 0)
        assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    assert "No space for metrics" in warnings.text
    (other,) = run_ranks(open_and_say, 1, args=(str(tmp_path / "run"),))
    assert other.value == "opened", other


def test_what_a_spool_makes_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with open_spool(tmp_path / "spools" / "run") as spool:
            append(spool, 0)
            write_run_info(spool.folder, RunInfo(run_id="run", tracking_uri="https://me:secret@host", thinner={}))
            made = [tmp_path / "spools", *(tmp_path / "spools").rglob("*")]
            assert len(made) >= 5
            assert [path.name for path in made if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)


# ---- after a folder was half removed -------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def remove_until_killed(folder: Path, num_deletions: int) -> bool:
    """Remove a folder, as a process does that is killed before its next deletion; return whether it was."""
    left = num_deletions

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def counting(path: Path, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            call(path, **options)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            remove_folder(folder)
        except Killed:
            return True
    return False


def test_an_attempt_after_a_kill_while_the_folder_was_removed_loses_nothing(tmp_path: Path) -> None:
    num_deletions, is_killed = 0, True
    while is_killed:
        folder = tmp_path / str(num_deletions)
        door, warnings = ListDoor(), Warnings()
        for attempt in range(2):
            with open_spool(folder, segment_bytes=4096, warn=warnings) as spool:
                write_run_info(folder, RunInfo(run_id="run", tracking_uri="list://", thinner={}))
                writer = Writer(
                    spool, PassThrough(), door, "run", progress=load_progress(folder), warn=warnings, flush_seconds=0.05
                )
                writer.start()
                for step in range(100):
                    assert append(spool, 1000 * attempt + step, TWENTY[:10])
                assert writer.flush(10)
                assert writer.close(10)
                if attempt == 0:
                    assert load_progress(folder).position.segment > 2
                    is_killed = remove_until_killed(folder, num_deletions)
        assert {point.step for point in door.stored} == {*range(100), *range(1000, 1100)}
        assert warnings == []
        num_deletions += 1
    assert num_deletions > 7


def test_segments_that_were_swept_away_do_not_have_later_ones_skipped(tmp_path: Path) -> None:
    with open_spool(tmp_path, segment_bytes=4096) as spool:
        for step in range(50):
            append(spool, step)
        save_progress(tmp_path, Progress(position=spool.end))
        left = spool.end
    for number in segment_numbers(tmp_path):
        segment_path(tmp_path, number).unlink()
    with open_spool(tmp_path, segment_bytes=4096) as spool:
        for step in range(50, 60):
            append(spool, step)
        assert [record.step for _, record in spool.read(left, 100)] == list(range(50, 60))


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"position": []}', '{"position": ["x"]}', "\xff"])
def test_progress_that_says_nothing_is_no_hindrance(text: str, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(text)
    with open_spool(tmp_path) as spool:
        assert append(spool, 0)
    assert segment_numbers(tmp_path) == [1]


def die_and_leave_a_worker(folder: str) -> None:
    spool = Spool(Path(folder, "run"))
    append(spool, 0)
    worker = os.fork()
    if worker == 0:
        Path(folder, "said").write_text(str([append(spool, 1), spool.end]))
        Path(folder, "worker").write_text(str(os.getpid()))
        time.sleep(30)
        os._exit(0)
    while not Path(folder, "worker").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_worker_appends_nothing_and_does_not_keep_the_folder(tmp_path: Path) -> None:
    # Workers of data loaders outlive a training process that is killed, for a while.
    (result,) = run_ranks(die_and_leave_a_worker, 1, args=(str(tmp_path),))
    assert result.exitcode == -signal.SIGKILL, result
    assert (tmp_path / "said").read_text().startswith("[False, ")
    with open_spool(tmp_path / "run") as spool:
        assert spool.count_left(BEGINNING) == 1
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


# ---- time ----------------------------------------------------------------------------------------------------------


def test_an_append_of_twenty_metrics_takes_microseconds(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        seconds = []
        for step in range(3000):
            values = values_at(step)
            begun = time.perf_counter()
            spool.append(step, step, values)
            seconds.append(time.perf_counter() - begun)
    assert sorted(seconds)[len(seconds) // 2] < 50e-6  # about 2e-6; 15e-6 on a busy machine


def test_an_append_lets_nobody_else_have_the_gil(tmp_path: Path) -> None:
    ran: list[int] = []
    interval = sys.getswitchinterval()
    stop = threading.Event()

    def compete() -> None:
        while not stop.is_set():
            ran.append(1)
            time.sleep(0)  # lets go of it

    with open_spool(tmp_path, segment_bytes=1 << 20) as spool:
        append(spool, 0)
        values = values_at(1)
        thread = threading.Thread(target=compete)
        sys.setswitchinterval(100.0)  # nobody is made to let go of it
        try:
            thread.start()  # waits until it runs, and so lets it run
            while not ran:
                time.sleep(0)
            before = len(ran)
            results = [spool.append(1, 1, values) for _ in range(1000)]
            assert len(ran) == before
        finally:
            stop.set()
            sys.setswitchinterval(interval)
            thread.join()
    assert all(results)
