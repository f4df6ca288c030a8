"""Read the files of one checkpoint, wherever it lies: each is downloaded once, hashed, and removed again.

What may pass is tried again and what may still appear is waited for, inside one deadline. A file on this machine is
read where it lies, and once.
"""

import errno
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

from lightning_air.checkpoint.retry import Patience, retry
from lightning_air.checkpoint.scratch import scratch_folder
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.transfer import download
from lightning_air.runtime import staging_area

T = TypeVar("T")


def ask(store: Store, call: Callable[[], T], patience: Patience) -> T:
    """Call a store, again if that may help. A store of this machine is called once: its disk does not get better."""
    return call() if store.is_local else retry(call, patience)


class Reader:
    """The files of one checkpoint. A context manager, which removes what it has downloaded; any thread may call.

    Args:
        store: Where the checkpoint lies.
        folder: Its name there; "" if the store's root is the checkpoint.
        staging_dir: Where to download to; None is the system's temporary directory.
        max_workers: How many files are read at once.
        patience: How long all reading may take.
        settle_seconds: How long a file in a remote store may remain unseen before it counts as missing.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        staging_dir: str | None,
        max_workers: int,
        patience: Patience,
        settle_seconds: float,
    ) -> None:
        self.is_local = store.is_local
        self._store = store
        self._folder = folder
        self._staging_dir = staging_dir
        self._max_workers = max_workers
        self._patience = patience
        self._settle_seconds = settle_seconds
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._downloads: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def num_bytes(self, file: str, *, is_due: bool = True) -> int | None:
        """Return a file's size; None if it is missing. One that is due is waited for in a remote store."""
        name = self._name(file)
        waiting = None if self.is_local or not is_due else self._settling()
        for attempt in itertools.count():
            found = ask(self._store, lambda: self._store.num_bytes(name), self._patience)
            if found is not None or waiting is None or not waiting.pause(attempt):
                return found
        raise AssertionError("unreachable")

    def read(self, file: str) -> bytes:
        """Return a small file's content."""
        name = self._name(file)
        return ask(self._store, lambda: self._store.read(name), self._patience)

    def is_empty(self) -> bool:
        """Return whether nothing can be seen below the checkpoint's name."""
        return not ask(self._store, lambda: self._store.list(self._folder), self._patience)

    @contextmanager
    def local(self, file: str) -> Iterator[Path]:
        """Give a local path with a file's content, for as long as the context is open."""
        name = self._name(file)
        if self.is_local:
            yield self._store.path(name)
            return
        target = self._folder_for_downloads() / uuid.uuid4().hex
        try:
            seconds = max(self._patience.remaining_seconds, 1e-3)
            download(self._store, [(name, target)], max_workers=1, deadline_seconds=seconds)
            yield target
        finally:
            target.unlink(missing_ok=True)

    def for_each(self, call: Callable[[T], object], items: Iterable[T], *, sizes: Sequence[int] = ()) -> None:
        """Call with each item, several at once, and raise the first error.

        Args:
            call: Any thread may call it, if it calls `check_stop` now and then.
            items: What to call it with.
            sizes: Of the files that the calls download, each one at a time.

        Raises:
            OSError: Also if a file does not fit into the staging directory.
        """
        items = list(items)
        num_workers = min(len(items), self._max_workers, self._num_that_fit(sizes))
        if num_workers <= 1:
            for item in items:
                call(item)
            return
        with ThreadPoolExecutor(num_workers, thread_name_prefix="lightning-air-verify") as pool:
            futures = [pool.submit(call, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def check_stop(self, _: int = 0) -> None:
        """End a call of `for_each` by raising, once another one has failed."""
        if self._stop.is_set():
            raise InterruptedError(errno.ECANCELED, "another file's reading has failed")

    def _settling(self) -> Patience | None:
        seconds = min(self._settle_seconds, self._patience.remaining_seconds)
        return Patience(seconds) if seconds > 0 else None

    def _name(self, file: str) -> str:
        return f"{self._folder}/{file}" if self._folder and file else self._folder or file

    def _num_that_fit(self, sizes: Sequence[int]) -> int:
        largest = max(sizes, default=0)
        if self.is_local or not largest:
            return self._max_workers
        area = staging_area(self._staging_dir)
        if area.free_bytes < largest:
            raise OSError(
                errno.ENOSPC,
                f"{area.path} has {area.free_bytes} bytes left, and a file of {largest} bytes is to be downloaded "
                "there. Make room, or name another staging_dir.",
            )
        return area.free_bytes // largest

    def _folder_for_downloads(self) -> Path:
        with self._lock:
            if self._downloads is None:
                self._downloads = self._stack.enter_context(scratch_folder(self._staging_dir))
            return self._downloads
