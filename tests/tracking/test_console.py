"""The output is in the files, whatever wraps it, and the user sees what he saw without them."""
# ruff: noqa: T201 - what is printed is the subject

import errno
import io
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_air.tracking.console import ConsoleCapture, LineCopy, Tee, shortened

law = settings(derandomize=True, deadline=None, database=None)


class Said:
    """A `Warn` that keeps what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __call__(self, kind: str, message: str) -> None:
        self.messages.append(message)


@pytest.fixture(autouse=True)
def _streams_are_put_back() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    yield
    assert (sys.stdout, sys.stderr) == before


@contextmanager
def capturing(folder: Path, **options: Any) -> Iterator[ConsoleCapture]:
    capture = ConsoleCapture(folder, **options)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()


def test_copies_both_streams_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capturing(tmp_path / "logs"):
        print("loss", 0.5)
        print("é", end="")
        sys.stderr.write("warned\n")
        sys.stdout.writelines(["a\n", "b\n"])
        assert (tmp_path / "logs" / "stderr.log").read_text() == "warned\n"
        assert isinstance(sys.stdout, io.TextIOBase)
    print("after")
    seen = capsys.readouterr()
    assert seen.out == "loss 0.5\néa\nb\nafter\n"
    assert seen.err == "warned\n"
    assert (tmp_path / "logs" / "stdout.log").read_text() == "loss 0.5\néa\nb\n"


def test_lines_are_there_when_they_are_finished(tmp_path: Path) -> None:
    """So that a SIGKILL loses none."""
    with capturing(tmp_path):
        print("whole")
        print("half", end="")
        assert (tmp_path / "stdout.log").read_text() == "whole\n"
    assert (tmp_path / "stdout.log").read_text() == "whole\nhalf\n"


@law
@given(st.text(st.sampled_from("ab\r\n"), max_size=40), st.randoms(use_true_random=False))
@example("bar 1%\rbar 2%\r\nnext\n", random.Random(0))
def test_pieces_make_no_difference(text: str, chance: random.Random) -> None:
    """However the output comes in, a line holds what was drawn last."""

    def shown(line: str) -> str:
        return next((part for part in reversed(line.split("\r")) if part), "")

    *lines, rest = text.split("\n")
    expected = "".join(f"{shown(line)}\n" for line in (*lines, *([rest] if rest else [])))
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as seen:
        patch.setattr(sys, "stdout", seen)
        folder = Path(f"{time.monotonic_ns()}")
        with capturing(folder):
            left = text
            while left:
                length = chance.randint(1, 4)
                sys.stdout.write(left[:length])
                left = left[length:]
        assert seen.getvalue() == text
    assert (folder / "stdout.log").read_text() == expected


@law
@given(st.lists(st.tuples(st.text("abc", max_size=30), st.integers(1, 60)), max_size=40), st.integers(1_000, 3_000))
def test_bound(blocks: list[tuple[str, int]], max_bytes: int) -> None:
    """The file keeps its beginning and its end, and says exactly how much is gone."""
    everything = kept = b""
    for line, times in blocks:
        data = f"{line}\n".encode() * times
        everything += data
        kept += data
        if len(kept) > max_bytes:
            kept = shortened(kept, max_bytes)
        assert len(kept) <= max_bytes
    before, mark, after = kept.partition(b"[lightning_air has cut ")
    if not mark:
        assert kept == everything
        return
    number, _, tail = after.partition(b" bytes here]\n")
    assert everything.startswith(before)
    assert everything.endswith(tail)
    assert len(before) + int(number) + len(tail) == len(everything)
    assert before.endswith(b"\n")
    assert len(tail) > max_bytes // 4 or everything[-len(tail) - 1 :].startswith(b"\n")


def test_bounded_file_is_continued(tmp_path: Path) -> None:
    for attempt in range(2):
        with capturing(tmp_path, max_bytes=2_000):
            for index in range(200):
                print(f"attempt {attempt} line {index}")
    lines = (tmp_path / "stdout.log").read_text().splitlines()
    assert (tmp_path / "stdout.log").stat().st_size <= 2_000
    assert lines[0] == "attempt 0 line 0"
    assert lines[-1] == "attempt 1 line 199"
    marks = [line for line in lines if "has cut" in line]
    assert len(marks) == 1
    kept = sum(len(line) + 1 for line in lines if "has cut" not in line)
    written = sum(len(f"attempt {attempt} line {index}\n") for attempt in range(2) for index in range(200))
    assert kept + int(marks[0].split()[3]) == written


def test_a_text_that_is_larger_than_the_file_may_be(tmp_path: Path) -> None:
    with capturing(tmp_path, max_bytes=1_000):
        print("begin")
        print("x" * 100_000)
        print("end")
        print("y" * 70_000, end="")  # no line at all
    content = (tmp_path / "stdout.log").read_text()
    assert len(content) <= 1_000
    assert content.startswith("begin\n")
    assert content.endswith("yyy")


def test_progress_bars_leave_their_last_state(tmp_path: Path) -> None:
    """Also a bar below another, as Lightning's for validation."""
    with capturing(tmp_path):
        for epoch in range(2):
            with tqdm(range(50), desc=f"Epoch {epoch}", file=sys.stdout, mininterval=0, miniters=1) as bar:
                for index in bar:
                    if index == 25:
                        for _ in tqdm(
                            range(50), desc="Validation", file=sys.stdout, mininterval=0, leave=False, position=1
                        ):
                            pass
        print("done")
    lines = (tmp_path / "stdout.log").read_text().splitlines()
    assert len(lines) < 12
    assert [line[:13] for line in lines if "100%" in line and "Epoch" in line] == ["Epoch 0: 100%", "Epoch 1: 100%"]
    assert lines[-1] == "done"


def test_start_and_stop_twice(tmp_path: Path) -> None:
    stream = sys.stdout
    capture = ConsoleCapture(tmp_path)
    capture.stop()
    capture.start()
    tee = sys.stdout
    capture.start()
    assert sys.stdout is tee
    print("one")
    capture.stop()
    capture.stop()
    assert sys.stdout is stream
    capture.start()
    print("two")
    capture.stop()
    assert (tmp_path / "stdout.log").read_text() == "one\ntwo\n"


def test_nested_in_any_order(tmp_path: Path) -> None:
    stream = sys.stdout
    outer, inner = ConsoleCapture(tmp_path / "outer"), ConsoleCapture(tmp_path / "inner")
    outer.start()
    inner.start()
    print("both")
    outer.stop()
    print("inner only")
    inner.stop()
    assert sys.stdout is stream
    print("none")
    assert (tmp_path / "outer" / "stdout.log").read_text() == "both\n"
    assert (tmp_path / "inner" / "stdout.log").read_text() == "both\ninner only\n"


def test_what_has_replaced_the_stream_stays(tmp_path: Path) -> None:
    """Given somebody who wraps sys.stdout meanwhile; then his stream stays, and works, and nothing is copied."""
    before = sys.stdout
    capture = ConsoleCapture(tmp_path)
    capture.start()
    theirs = io.StringIO()
    with redirect_stdout(theirs):
        capture.stop()
        assert sys.stdout is theirs
        print("theirs")
    held = sys.stdout
    assert isinstance(held, Tee)  # what they had found
    print("passed on")
    capture.start()
    print("copied")
    capture.stop()
    assert sys.stdout is before
    assert theirs.getvalue() == "theirs\n"
    assert (tmp_path / "stdout.log").read_text() == "copied\n"


def test_a_full_disk_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    said = Said()
    with capturing(tmp_path, warn=said):
        print("one")
        print("two")
        sys.stderr.write("still\n")
    assert capsys.readouterr().out == "one\ntwo\n"
    assert len(said.messages) == 1
    assert "No space left on device" in said.messages[0]
    assert (tmp_path / "stderr.log").read_text() == "still\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    said = Said()
    with capturing(tmp_path / "file" / "logs", warn=said):
        print("one")
    assert capsys.readouterr().out == "one\n"
    assert len(said.messages) == 2


def test_a_warning_may_itself_be_printed(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    with capturing(tmp_path, warn=lambda _, message: print(message)):
        print("one")


class OutStream(io.TextIOBase):
    """As ipykernel's: no file of the system behind it, and more than a stream has."""

    encoding = "UTF-8"

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.parent_header: dict[str, str] = {}

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text)}")
        self.sent.append(text)
        return len(text)

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def set_parent(self, parent: dict[str, str]) -> None:
        self.parent_header = parent


def test_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = OutStream()
    monkeypatch.setattr(sys, "stdout", stream)
    with capturing(tmp_path):
        seen: Any = sys.stdout
        print("cell \udcff", flush=True)
        seen.set_parent({"id": "7"})
        assert (seen.isatty(), seen.encoding, seen.writable()) == (False, "UTF-8", stream.writable())
        with pytest.raises(io.UnsupportedOperation):
            seen.fileno()
        with pytest.raises(TypeError):
            seen.write(b"bytes")
        with pytest.raises(AttributeError):
            _ = seen.nothing
    assert sys.stdout is stream
    assert stream.parent_header == {"id": "7"}
    assert "".join(stream.sent) == "cell \udcff\n"
    assert (tmp_path / "stdout.log").read_text() == "cell \\udcff\n"


def test_a_terminal_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(leader, "rb", buffering=0) as screen, os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with capturing(tmp_path):
            assert sys.stdout.isatty()
            assert sys.stdout.fileno() == follower
            print("\rbar 50%", end="", flush=True)
            print("\rbar 100%", flush=True)
        shown = b""
        while not shown.endswith(b"\n"):
            shown += screen.read(100)
        assert shown == b"\rbar 50%\rbar 100%\r\n"
    assert (tmp_path / "stdout.log").read_text() == "bar 100%\n"


def test_no_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with capturing(tmp_path):
        print("nowhere")
        sys.stderr.write("seen\n")
    assert sys.stdout is None
    assert [path.name for path in tmp_path.iterdir()] == ["stderr.log"]


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    def say(number: int) -> None:
        for index in range(200):
            sys.stdout.write(f"thread {number} line {index}\n")

    with capturing(tmp_path, max_bytes=5_000):
        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "stdout.log").read_text().splitlines()
    assert all(line.startswith(("thread ", "[lightning_air has cut ")) for line in lines)
    assert sum(line.endswith("line 199") for line in lines) >= 1


def test_a_signal_handler_may_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a handler that interrupts a copy at any point; then nothing hangs, and each line is whole."""
    monkeypatch.setattr(sys, "stdout", OutStream())  # a real one may refuse to be interrupted by itself
    before = signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
    try:
        with capturing(tmp_path):
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for index in range(3_000):
                sys.stdout.write(f"line {index}\n")
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lines = (tmp_path / "stdout.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("line")] == [f"line {index}" for index in range(3_000)]
    assert "alarm" in lines


def test_a_forked_process_writes_to_the_console_only(tmp_path: Path) -> None:
    with capturing(tmp_path) as capture:
        print("parent")
        lock = capture._copies["stdout"]._lock
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                release.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                print("child")
            finally:
                os._exit(0)
        release.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        print("parent again")
    assert (tmp_path / "stdout.log").read_text() == "parent\nparent again\n"


def test_copies_for_uploading(tmp_path: Path) -> None:
    """What is uploaded holds the line that a progress bar is on."""
    target = tmp_path / "upload"
    target.mkdir()
    with capturing(tmp_path / "logs") as capture:
        print("line")
        print("\rbar 1%", end="")
        print("\rbar 2%", end="")
        assert [path.name for path in capture.copy_into(target)] == ["stdout.log", "stderr.log"]
        assert (target / "stdout.log").read_text() == "line\nbar 2%\n"
        assert (tmp_path / "logs" / "stdout.log").read_text() == "line\n"
    assert (target / "stderr.log").read_text() == ""
    capture.copy_into(target)
    assert (target / "stdout.log").read_text() == "line\nbar 2%\n"


def test_a_bound_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 1000, got 10"):
        ConsoleCapture(tmp_path, max_bytes=10)
    assert list(tmp_path.iterdir()) == []


def test_costs_little(tmp_path: Path) -> None:
    """About 2.5 microseconds per line on an idle machine."""

    class Nowhere(io.StringIO):
        def write(self, text: str) -> int:
            return len(text)

    copy = LineCopy(tmp_path / "x.log", 10_000_000)
    copy.open()
    tee = Tee(Nowhere(), copy, Said())
    best = 1.0
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(500):
            tee.write("epoch 3, step 1200: loss 0.1234\n")
        best = min(best, (time.perf_counter() - begun) / 500)
    copy.close()
    assert best < 20e-6


def test_a_full_disk_leaves_no_half_of_a_shorter_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = LineCopy(tmp_path / "stdout.log", max_bytes=1000)
    written = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        written(path, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    copy.open()
    copy.add("x" * 900 + "\n")
    with pytest.raises(OSError, match="No space left"):
        copy.add("x" * 900 + "\n")
    copy.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["stdout.log"]
