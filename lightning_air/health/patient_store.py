"""A store whose calls come back: with an answer, or after a while with `TimeoutError`.

A call to a store whose machine went away without a word may never come back, and it is just then that a rank has to see
for itself that its loop hangs. So each call is made on a thread of its own, which is left behind when it is stuck.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from lightning_air.health.nodes import OpenStore

ANSWER_SECONDS = 10.0


class RankStore(Protocol):
    """What the ranks need of `torch.distributed.Store`. A call raises `RuntimeError` or `OSError` when it fails."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""

    def get(self, key: str, /) -> bytes:
        """Return a value that is there."""

    def set(self, key: str, value: str, /) -> None:
        """Put a value."""

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Put a value if the expected one is there ("" is none), and return what is there then."""


class PatientStore:
    """A connection of one thread's own to the store in which the ranks meet.

    Args:
        open_store: Opens it; called at once, by the thread that makes the calls.
        answer_seconds: How long a call may take.

    Raises:
        RuntimeError: It cannot be opened; so is `OSError`.
    """

    def __init__(self, open_store: OpenStore, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._answer_seconds = answer_seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._store: Any = None
        threading.Thread(target=self._answer, name="air-health-store", daemon=True).start()
        try:
            self._store = self._call(open_store)
        except BaseException:
            self.close()
            raise

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""
        return bool(self._call(lambda: self._store.check(keys)))

    def get(self, key: str, /) -> bytes:
        """Return a value that is there."""
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def set(self, key: str, value: str, /) -> None:
        """Put a value."""
        self._call(lambda: self._store.set(key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Put a value if the expected one is there ("" is none), and return what is there then."""
        value: bytes = self._call(lambda: self._store.compare_set(key, expected_value, desired_value))
        return value

    def close(self) -> None:
        """Let the thread end, once it has its answer. Waits for nothing."""
        self._calls.put(None)

    def _call(self, function: Callable[[], Any]) -> Any:
        call = _Call(function)
        self._calls.put(call)
        if not call.is_done.wait(self._answer_seconds):
            raise TimeoutError(f"The store of the ranks has not answered within {self._answer_seconds:g} s.")
        if call.error is not None:
            raise call.error
        return call.value

    def _answer(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
        self._store = None  # the connection ends with the thread that has used it


class _Call:
    """A call, and what has come of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.is_done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self._function = function

    def make(self) -> None:
        try:
            self.value = self._function()
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            self.error = error
        self.is_done.set()
