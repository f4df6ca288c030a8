"""Move many files between this machine and a store at once, inside one deadline, and prove that each has arrived.

`upload` returns when the store has told the right size (and the right MD5, where it tells one) for every file, and
`download` when every copy is as long as the store says. What may pass is tried again; the first error that will not
ends the others and is raised, once, naming the file.

Both calls end within about a second of their deadline, also if a thread of theirs hangs: `crew.py` says how. A thread
that was left behind writes nothing more once what it hangs in returns, and what it has written by then lies in a
checkpoint that was never published.
"""

import errno
import hashlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_air.checkpoint.crew import do_all
from lightning_air.checkpoint.retry import Patience, Sleep, retry
from lightning_air.checkpoint.store import Store, os_error, reason_of

WRONG_SIZE_SECONDS = 2.0
"""How long a wrong size may be an old one that is remembered somewhere; then the file is put again."""

_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.05, 2.0


@dataclass(frozen=True)
class TransferStats:
    """What a transfer took.

    Attributes:
        seconds: From the call to its return.
        num_bytes: The size of all files.
        num_retries: How often a request was repeated after an error, or a file moved again since it had not arrived.
        verify_seconds: Spent on finding out whether the files have arrived, summed over the threads.
    """

    seconds: float
    num_bytes: int
    num_retries: int
    verify_seconds: float


def upload(
    store: Store,
    files: Sequence[tuple[str, Path | bytes]],
    *,
    max_workers: int,
    deadline_seconds: float,
    settle_seconds: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Sleep = threading.Event.wait,
    chance: Callable[[], float] = random.random,
) -> TransferStats:
    """Put files in a store, the largest first, and return when all of them have arrived.

    Args:
        store: Where to.
        files: Each name in the store, with the local file or the bytes to put there.
        max_workers: How many files are sent at once.
        deadline_seconds: How long all of it may take.
        settle_seconds: How long a file that was put may remain unseen before it is put again.
        clock: The time in seconds.
        sleep: How to pause.
        chance: Numbers from 0 to 1 that spread the pauses.

    Raises:
        OSError: The first error, with the file's name, its `errno` and its cause. What was put until then is there.
    """
    patience = Patience(deadline_seconds, clock=clock, sleep=sleep, chance=chance)
    transfer = _Transfer(store, patience, settle_seconds)
    _refuse_duplicates(files)
    parcels = sorted((_parcel(name, source) for name, source in files), key=lambda parcel: -parcel.num_bytes)
    work = {parcel.name: partial(transfer.upload, parcel) for parcel in parcels}
    do_all("upload", work, where=store.root, max_workers=max_workers, patience=patience)
    return transfer.stats()


def download(
    store: Store,
    files: Sequence[tuple[str, Path]],
    *,
    max_workers: int,
    deadline_seconds: float,
    settle_seconds: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Sleep = threading.Event.wait,
    chance: Callable[[], float] = random.random,
) -> TransferStats:
    """Copy files from a store, making their folders; each is as long as the store says. Digests are the caller's.

    Args:
        store: Where from.
        files: Each name in the store, with the local path to copy it to.
        max_workers: How many files are copied at once.
        deadline_seconds: How long all of it may take.
        settle_seconds: How long a file may remain unseen before it counts as missing; on a local store it never may.
        clock: The time in seconds.
        sleep: How to pause.
        chance: Numbers from 0 to 1 that spread the pauses.

    Raises:
        OSError: The first error, with the file's name, its `errno` and its cause. Copies may be there in part.
    """
    patience = Patience(deadline_seconds, clock=clock, sleep=sleep, chance=chance)
    transfer = _Transfer(store, patience, 0.0 if store.is_local else settle_seconds)
    _refuse_duplicates(files)
    work = {name: partial(transfer.download, name, target) for name, target in files}
    do_all("download", work, where=store.root, max_workers=max_workers, patience=patience)
    return transfer.stats()


def _refuse_duplicates(files: Sequence[tuple[str, object]]) -> None:
    names = [name for name, _ in files]
    if len(set(names)) < len(names):
        raise ValueError(f"a file can be moved once per call, got {max(names, key=names.count)!r} twice.")


@dataclass(frozen=True)
class _Parcel:
    name: str
    source: Path | bytes
    num_bytes: int


def _parcel(name: str, source: Path | bytes) -> _Parcel:
    try:
        return _Parcel(name, source, len(source) if isinstance(source, bytes) else source.stat().st_size)
    except OSError as error:
        raise os_error(error, f"cannot upload {name!r}: {reason_of(error)}") from error


class _Transfer:
    """One upload or download: how a file is moved, and what it took."""

    def __init__(self, store: Store, patience: Patience, settle_seconds: float) -> None:
        self._store = store
        self._patience = patience
        self._settle_seconds = settle_seconds
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._verify_seconds = 0.0

    def stats(self) -> TransferStats:
        patience = self._patience
        return TransferStats(patience.elapsed_seconds, self._num_bytes, patience.num_retries, self._verify_seconds)

    def upload(self, parcel: _Parcel) -> None:
        retry(lambda: self._put(parcel), self._patience)
        self._count(parcel.num_bytes)

    def _put(self, parcel: _Parcel) -> None:
        if isinstance(parcel.source, bytes):
            self._store.put_bytes(parcel.name, parcel.source)
        else:
            self._store.put(parcel.name, parcel.source)
        with self._verifying():
            self._await_arrival(parcel)
            told = retry(lambda: self._store.md5(parcel.name), self._patience)
            if told is not None and told != (found := _md5(parcel.source)):
                raise OSError(errno.EIO, f"the store holds other bytes: MD5 {told} instead of {found}")

    def _await_arrival(self, parcel: _Parcel) -> None:
        """Ask for the size until it is right. One that is wrong, or missing, for too long is an error like EIO."""
        begun = self._patience.elapsed_seconds
        for attempt in itertools.count():
            found = retry(lambda: self._store.num_bytes(parcel.name), self._patience)
            if found == parcel.num_bytes:
                return
            longest = self._settle_seconds if found is None else min(self._settle_seconds, WRONG_SIZE_SECONDS)
            if self._patience.elapsed_seconds - begun >= longest or not self._poll(attempt):
                shown = "nothing" if found is None else f"{found} bytes"
                raise OSError(errno.EIO, f"{shown} arrived of {parcel.num_bytes} bytes")

    def download(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        begun = self._patience.elapsed_seconds
        self._count(retry(lambda: self._get(name, target, begun), self._patience))

    def _get(self, name: str, target: Path, begun: float) -> int:
        try:
            self._store.get(name, target)
        except FileNotFoundError as error:
            raise self._missing(error, begun) from error
        with self._verifying():
            expected = retry(lambda: self._store.num_bytes(name), self._patience)
        if expected is None:
            raise self._missing(FileNotFoundError(errno.ENOENT, "its size cannot be seen"), begun)
        found = target.stat().st_size
        if found != expected:
            raise OSError(errno.EIO, f"{found} bytes came of {expected} bytes")
        return found

    def _missing(self, error: FileNotFoundError, begun: float) -> OSError:
        if self._patience.elapsed_seconds - begun >= self._settle_seconds:
            return error
        return OSError(errno.ESTALE, f"not to be seen yet: {reason_of(error)}")  # tried again

    def _poll(self, attempt: int) -> bool:
        return self._patience.pause(attempt, first_seconds=_FIRST_POLL_SECONDS, longest_seconds=_LONGEST_POLL_SECONDS)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        begun = self._patience.elapsed_seconds
        try:
            yield
        finally:
            with self._lock:
                self._verify_seconds += self._patience.elapsed_seconds - begun


def _md5(source: Path | bytes) -> str:
    if isinstance(source, bytes):
        return hashlib.md5(source, usedforsecurity=False).hexdigest()
    with source.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
