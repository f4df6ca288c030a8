"""What the process says, as files: a copy of all that is written to `sys.stdout` and `sys.stderr`.

The user sees what he saw without it. The files hold lines as they are finished; of a progress bar, which is drawn over
itself, what it showed last. They have a bound: beyond it the middle goes, and a line in its place says how much.

Not seen is what bypasses the two names: handlers of `logging` and others that have kept the stream that was there
before `start` (Lightning's own are made at its import), `sys.stdout.buffer`, and the output of C code and of other
processes, also forked ones.
"""

import io
import logging
import os
import re
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lightning_air.tracking.warn_once import Warn, WarnOnce

logger = logging.getLogger(__name__)

MAX_BYTES = 10_000_000
LEAST_BYTES = 1_000
STREAM_NAMES = ("stdout", "stderr")

_MOST_UNFINISHED = 1 << 16
_CURSOR_UP = "\x1b[A"
_MARK = re.compile(rb"\[lightning_air has cut (\d+) bytes here\]\n")


class ConsoleCapture:
    """Copies the process' output into `stdout.log` and `stderr.log`, from `start` to `stop`.

    Both may be called again, and captures may be nested. Whoever wraps or replaces `sys.stdout` in between keeps it.
    What is written never raises because of the copy: on a full disk the copying ends, and it is said once.

    Args:
        folder: Made if it is not there. Files of an earlier capture are continued.
        max_bytes: Of each file.
        warn: Told if the copying ends early.

    Raises:
        ValueError: If max_bytes is too small.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, warn: Warn | None = None) -> None:
        if max_bytes < LEAST_BYTES:
            raise ValueError(f"max_bytes must be at least {LEAST_BYTES}, got {max_bytes!r}.")
        self.folder = Path(folder).absolute()
        self._warn = warn or WarnOnce()
        self._copies = {name: LineCopy(self.folder / f"{name}.log", max_bytes) for name in STREAM_NAMES}
        self._tees: dict[str, Tee] = {}

    def start(self) -> None:
        """Begin to copy; nothing happens if it has begun."""
        if self._tees:
            return
        for name, copy in self._copies.items():
            stream = _live(getattr(sys, name))
            if stream is None:  # a process without a console
                continue
            try:
                copy.open()
            except OSError as error:
                self._warn("console", f"The output is not copied into {copy.path}: {error}.")
                continue
            self._tees[name] = Tee(stream, copy, self._warn)
            setattr(sys, name, self._tees[name])

    def stop(self) -> None:
        """End it, with the line that is not finished; nothing happens if it has ended."""
        tees, self._tees = self._tees, {}
        for name, tee in tees.items():
            tee.is_over = True
            if getattr(sys, name) is tee:
                setattr(sys, name, _live(tee.stream))
            try:
                tee.copy.close()
            except OSError as error:
                self._warn("console", f"The end of the output is not in {tee.copy.path}: {error}.")

    def copy_into(self, folder: Path) -> list[Path]:
        """Write what the files hold now, and lines that are not finished, into another folder: to be uploaded.

        Any thread's.

        Returns:
            The files; none for a stream that was never copied.

        Raises:
            OSError: If they cannot be written.
        """
        paths = []
        for copy in self._copies.values():
            if copy.path.exists():
                paths.append(folder / copy.path.name)
                copy.copy_to(paths[-1])
        return paths


class Tee:
    """Stands for a stream: all that is written is copied, all else is the stream's own.

    Attributes:
        stream: Where it goes on to.
        copy: Of what was written.
        is_over: Nothing is copied any more. Whoever holds it still can write all the same.
    """

    def __init__(self, stream: TextIO, copy: "LineCopy", warn: Warn) -> None:
        self.stream = stream
        self.copy = copy
        self.is_over = False
        self._warn = warn

    def write(self, text: str) -> int:
        """Write to the stream, and copy; raises what the stream raises."""
        count = self.stream.write(text)
        if not self.is_over:
            try:
                self.copy.add(text)
            except Exception as error:  # noqa: BLE001 - printing must not fail
                self._give_up(error)
        return count

    def writelines(self, lines: Any) -> None:
        """Write several; raises what the stream raises."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # while it is being made, or copied
            raise AttributeError(name)
        return getattr(self.stream, name)

    def _give_up(self, error: Exception) -> None:
        self.is_over = True
        with suppress(OSError):
            self.copy.abandon()
        self._warn("console", f"The output is not copied into {self.copy.path} any more: {error}.")


# Some ask whether sys.stdout is one. To inherit from it would close the stream when the tee is gone.
io.TextIOBase.register(Tee)


def _live(stream: Any) -> Any:
    """Return the stream below tees that are over."""
    while isinstance(stream, Tee) and stream.is_over:
        stream = stream.stream
    return stream


class LineCopy:
    """A file that lines are added to, with a bound. Any thread's, also a signal handler's.

    Args:
        path: Of the file.
        max_bytes: Its bound.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._is_adding = False
        self._texts: deque[str] = deque()
        self._unfinished = ""
        self._file = -1
        self._num_bytes = 0
        _copies.add(self)

    def open(self) -> None:
        """Begin, or continue a file.

        Raises:
            OSError: If it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._reopen()

    def add(self, text: str) -> None:
        """Copy a piece of output.

        Raises:
            OSError: If it cannot be written.
        """
        with self._lock:
            self._texts.append(text)
            if self._is_adding:  # a signal handler prints, while its own thread is in here
                return
            self._is_adding = True
            try:
                while self._texts:
                    self._add(self._texts.popleft())
            finally:
                self._is_adding = False

    def close(self) -> None:
        """Write the line that is not finished, and end.

        Raises:
            OSError: If it cannot be written.
        """
        with self._lock:
            rest, self._unfinished = self._unfinished, ""
            try:
                if rest and self._file >= 0:
                    self._write(finished(rest + "\n"))
            finally:
                self.abandon()

    def abandon(self) -> None:
        """End at once."""
        with self._lock:
            file, self._file = self._file, -1
            self._texts.clear()
            if file >= 0:
                os.close(file)

    def copy_to(self, path: Path) -> None:
        """Write what it holds now, and the line that is not finished, into another file.

        Raises:
            OSError: If that cannot be read or written.
        """
        with self._lock:
            source = self.path.open("rb")
            num_bytes, rest = os.fstat(source.fileno()).st_size, self._unfinished
        with source, path.open("wb") as target:
            while num_bytes > 0 and (piece := source.read(min(num_bytes, io.DEFAULT_BUFFER_SIZE))):
                target.write(piece)
                num_bytes -= len(piece)
            target.write(_encoded(finished(rest + "\n")) if rest else b"")

    def leave_to_parent(self) -> None:
        """In a forked process: the file is the parent's, whatever its threads were doing."""
        self._lock = threading.RLock()
        self._is_adding = False
        self.abandon()

    def _add(self, text: str) -> None:
        if self._file < 0:
            return
        text = self._unfinished + text
        end = text.rfind("\n") + 1
        rest = text[end:]
        self._unfinished = unfinished(rest) if "\r" in rest else rest
        if end:
            self._write(finished(text[:end]))
        if len(self._unfinished) > _MOST_UNFINISHED:
            rest, self._unfinished = self._unfinished, ""
            self._write(rest)

    def _write(self, text: str) -> None:
        data = _encoded(text)
        if self._num_bytes + len(data) > self._max_bytes:
            self._shorten(data)
            return
        num_written = os.write(self._file, data)
        self._num_bytes += num_written
        if num_written < len(data):
            raise OSError(f"{num_written} of {len(data)} bytes were written")

    def _shorten(self, data: bytes) -> None:
        """Replace the file by one without its middle."""
        scratch = self.path.with_name(self.path.name + ".new")
        try:
            scratch.write_bytes(shortened(self.path.read_bytes() + data, self._max_bytes))
            scratch.replace(self.path)
        except OSError:
            scratch.unlink(missing_ok=True)  # on a full disk
            raise
        self._reopen()

    def _reopen(self) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        before, self._file = self._file, file
        self._num_bytes = os.fstat(file).st_size
        if before >= 0:
            os.close(before)


def finished(text: str) -> str:
    """Return whole lines as a terminal shows them in the end.

    Args:
        text: Each line with its newline.
    """
    if "\r" not in text and _CURSOR_UP not in text:
        return text
    lines = [unfinished(line).rstrip("\r") for line in text.split("\n")]
    # Bars below others are drawn by going down a line, and up again: such a line is drawn over the next time.
    return "\n".join(line for line in lines if not line.endswith(_CURSOR_UP))


def unfinished(line: str) -> str:
    """Return what matters of a line that may go on: what follows the last carriage return, or will be drawn over."""
    shown = line.rstrip("\r")
    return shown[shown.rfind("\r") + 1 :] + "\r" * (len(shown) < len(line))


def shortened(data: bytes, max_bytes: int) -> bytes:
    """Return lines without their middle, and a line that says how many bytes of it are gone, over all times.

    Args:
        data: Lines; they may have been shortened before.
        max_bytes: If there are more, a quarter of it is for the beginning and three eighths are for the end, so that
            there is room for what comes.
    """
    if len(data) <= max_bytes:
        return data
    head_bytes, tail_bytes = max_bytes // 4, max_bytes * 3 // 8
    mark = _MARK.search(data, 0, head_bytes + 100)
    if mark is not None:
        head, num_cut, begin = data[: mark.start()], int(mark[1]), mark.end()
    else:
        begin = data.rfind(b"\n", 0, head_bytes) + 1 or head_bytes
        head, num_cut = data[:begin], 0
    keep_from = max(begin, len(data) - tail_bytes)
    keep_from = data.find(b"\n", keep_from, -1) + 1 or keep_from
    num_cut += keep_from - begin
    return head + b"[lightning_air has cut %d bytes here]\n" % num_cut + data[keep_from:]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


_copies: "weakref.WeakSet[LineCopy]" = weakref.WeakSet()


def _after_fork() -> None:
    for copy in list(_copies):
        copy.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
