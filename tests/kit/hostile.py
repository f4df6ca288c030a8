"""A store that does what volumes do on a bad day, and rules that refuse what a volume refuses.

`HostileStore` keeps its files in a directory, so that ranks in several processes see the same ones; what a kernel
or a client remembers (failed look-ups), and what was counted, each process has for itself. Nothing is random: a test
says which put fails, lags or is cut short, and names the point where its process is killed.
"""

import errno
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from lightning_air.checkpoint.store import Entry, checked_name, delete_tree
from tests.kit.points import reach

_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Fault:
    """What goes wrong when a file is put.

    Attributes:
        what: An `errno` to raise in the middle of the file; "short" to keep half of the file and report success; "lost"
            to keep nothing and report success.
        names: The files, as a shell pattern; `*` also matches "/".
        nth: The first put of such a file that it happens to, counted from 1 in each process.
        times: How many puts it happens to.
    """

    what: int | Literal["short", "lost"]
    _: KW_ONLY
    names: str = "*"
    nth: int = 1
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How bad the day is.

    Attributes:
        faults: What goes wrong with which put.
        listing_lag_seconds: How long a listing does not show a file that was put.
        negative_seconds: How long a process that asked for a name that was not there believes that it is not there.
        bytes_per_second: How fast files are written; None for as fast as the disk.
        is_visible_early: Whether others see a file while it is being written, and what is there of it after a kill.
    """

    faults: Sequence[Fault] = ()
    listing_lag_seconds: float = 0.0
    negative_seconds: float = 0.0
    bytes_per_second: float | None = None
    is_visible_early: bool = True


class HostileStore:
    """A `Store` in a directory that knows no append, seek, rename or link, and does not keep its word.

    It reaches these points, which a test may arm to kill the process there (`tests/kit/points.py`), NAME being a file's
    whole name in the store and N counting the puts, or deletions, of this process from 1:

    - `put NAME` and `put #N` before anything is there; `putting NAME` and `putting #N` with half of the file written;
      `put done NAME` and `put done #N` once it is closed;
    - `delete NAME` and `delete #N` before a file is deleted; `deleted NAME` and `deleted #N` after.

    Args:
        directory: Where the files are kept.
        behaviour: What to do to them.
        root: The place that the store says it is.
        on_point: Called with each point.
        clock: The time, like that of the files.
        sleep: How to be slow.
    """

    is_local = False

    def __init__(
        self,
        directory: Path,
        behaviour: Behaviour | None = None,
        *,
        root: str = "/Volumes/main/default/hostile",
        on_point: Callable[[str], object] = reach,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.root = root
        self._directory = directory
        self._behaviour = behaviour or Behaviour()
        self._on_point = on_point
        self._clock = clock
        self._sleep = sleep
        self._missed: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        raise TypeError(f"{name!r} lies on {self.root!r}, which has no local path. Use put and get.")

    def put(self, name: str, source: Path) -> None:
        self._put(name, source.read_bytes())

    def put_bytes(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def _put(self, name: str, data: bytes) -> None:
        path = self._at(name)
        number = self._reach_all("put", name)
        fault = self._fault_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._missed.pop(name, None)
        if fault == "lost":
            return
        hidden = path if self._behaviour.is_visible_early else path.with_name(f"{path.name}.hidden-{os.getpid()}")
        with hidden.open("wb", buffering=0) as file:
            self._write(file, data[: len(data) // 2])
            for point in (f"putting {name}", f"putting #{number}"):
                self._on_point(point)
            if isinstance(fault, int):
                raise OSError(fault, os.strerror(fault), str(path))
            if fault != "short":
                self._write(file, data[len(data) // 2 :])
        if hidden != path:
            hidden.rename(path)
        for point in (f"put done {name}", f"put done #{number}"):
            self._on_point(point)

    def _write(self, file: Any, data: bytes) -> None:
        speed = self._behaviour.bytes_per_second
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            file.write(block)
            if speed is not None:
                self._sleep(len(block) / speed)

    def get(self, name: str, target: Path) -> None:
        target.write_bytes(self.read(name))

    def read(self, name: str) -> bytes:
        if not self._is_seen(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.root}/{name}")
        return self._at(name).read_bytes()

    def num_bytes(self, name: str) -> int | None:
        return self._at(name).stat().st_size if self._is_seen(name) else None

    def md5(self, name: str) -> str | None:
        checked_name(name)
        return None

    def list(self, folder: str = "") -> list[Entry]:
        directory = self._at(folder) if folder else self._directory
        found = []
        for path in sorted(directory.iterdir()) if directory.is_dir() else []:
            status, name = path.stat(), f"{folder}/{path.name}" if folder else path.name
            is_young = self._clock() - status.st_mtime < self._behaviour.listing_lag_seconds
            if path.is_dir():
                found.append(Entry(name, True, 0, status.st_mtime))
            elif not is_young and ".hidden-" not in name:
                found.append(Entry(name, False, status.st_size, status.st_mtime))
        return found

    def delete(self, name: str) -> None:
        path = self._at(name)
        if not self._is_seen(name):
            return
        number = self._reach_all("delete", name)
        path.unlink(missing_ok=True)
        for point in (f"deleted {name}", f"deleted #{number}"):
            self._on_point(point)

    def delete_folder(self, folder: str) -> None:
        checked_name(folder)
        delete_tree(self, folder, self._remove_empty_folder)

    def _remove_empty_folder(self, folder: str) -> None:
        if self._at(folder).is_dir():
            self._at(folder).rmdir()

    def _at(self, name: str) -> Path:
        return self._directory / checked_name(name)

    def _is_seen(self, name: str) -> bool:
        missed = self._missed.get(name)
        if missed is not None and self._clock() - missed < self._behaviour.negative_seconds:
            return False
        is_there = self._at(name).is_file()
        if not is_there:
            self._missed[name] = self._clock()
        return is_there

    def _reach_all(self, verb: str, name: str) -> int:
        with self._lock:
            self._counts[verb] += 1
            number = self._counts[verb]
        for point in (f"{verb} {name}", f"{verb} #{number}"):
            self._on_point(point)
        return number

    def _fault_of(self, name: str) -> int | str | None:
        found: int | str | None = None
        with self._lock:
            for index, fault in enumerate(self._behaviour.faults):
                if fnmatchcase(name, fault.names):
                    self._counts[f"fault {index}"] += 1
                    if fault.nth <= self._counts[f"fault {index}"] < fault.nth + fault.times:
                        found = found or fault.what
        return found


# ---- what a volume refuses -------------------------------------------------------------------------------------------

_ruled: list[str] = []
_is_hooked = False


@contextmanager
def volume_rules(directory: Path) -> Iterator[None]:
    """Refuse, in this process and whoever asks, to append, read-and-write, rename, link or truncate below a directory.

    Seeks and writes at an offset pass unseen: a pipe in the place of the file refuses those.
    """
    global _is_hooked  # noqa: PLW0603 - a hook of the interpreter cannot be taken out again
    if not _is_hooked:
        sys.addaudithook(_refuse)
        _is_hooked = True
    _ruled.append(f"{os.path.realpath(directory)}/")
    try:
        yield
    finally:
        _ruled.pop()


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _ruled:
        return
    if event in {"os.rename", "os.link", "os.symlink"}:
        if any(_is_ruled(path) for path in args[:2]):
            raise OSError(errno.EXDEV, f"a volume knows no {event}", os.fspath(args[1]))
    elif event == "os.truncate":
        if _is_ruled(args[0]):
            raise OSError(errno.ENOTSUP, f"a volume knows no {event}")
    elif event == "open" and _is_ruled(args[0]):
        flags = args[2]
        if flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDWR:
            raise OSError(errno.ENOTSUP, "a volume is not appended to, nor read while it is written", args[0])


def _is_ruled(path: object) -> bool:
    if isinstance(path, int):
        path = Path(f"/proc/self/fd/{path}").readlink()
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    return os.path.abspath(os.fsdecode(path)).startswith(tuple(_ruled))  # noqa: PTH100 - resolving would open
