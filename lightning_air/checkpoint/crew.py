"""A few threads do many pieces of work inside one deadline.

They are daemons: one that hangs in a file system or in the network at the deadline is left behind, and the call
raises `TimeoutError` a second later, naming its work. Should it ever come back it finds the work cancelled and begins
nothing more. But for Ctrl-C, in no other case does a thread outlive the call: after an error nothing new is begun,
every pause ends at once, and requests in flight are waited for as far as the deadline allows.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable, Mapping

from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.store import os_error, reason_of

GRACE_SECONDS = 1.0
"""How much longer than its deadline a call can take, for threads that are about to end."""


def do_all(
    verb: str, work: Mapping[str, Callable[[], None]], *, where: str, max_workers: int, patience: Patience
) -> None:
    """Do each piece of work once, begun in their order, on threads named `lightning-air-<verb>-<N>`.

    Args:
        verb: What is done, for names and messages: "upload".
        work: By its name what to call; each shares the patience.
        where: For messages: the other end.
        max_workers: How many threads at most.
        patience: The deadline; it is cancelled when the call returns.

    Raises:
        OSError: The first error, whatever it was, with its work's name and its `errno`; the error is its cause.
    """
    if max_workers < 1:
        raise ValueError(f"max_workers must be at least 1, got {max_workers!r}.")
    crew = _Crew(work, patience)
    threads: list[threading.Thread] = []
    try:
        for index in range(min(max_workers, len(work))):
            name = f"lightning-air-{verb}-{index}"
            thread = threading.Thread(target=crew.serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, and from Python 3.12 on starts no thread any more
                crew.serve()
                break
            threads.append(thread)
        for thread in threads:
            thread.join(max(0.0, patience.remaining_seconds + GRACE_SECONDS))
        hanging = [crew.in_flight.get(thread.name) for thread in threads if thread.is_alive()]
    finally:
        patience.cancelled.set()
    if crew.errors:
        name, error = crew.errors[0]
        raise os_error(error, f"{verb} of {name!r} ({where}) failed: {reason_of(error)}") from error
    if hanging:
        names = ", ".join(map(repr, hanging))
        seconds = patience.deadline_seconds
        raise TimeoutError(errno.ETIMEDOUT, f"{verb} of {names} ({where}) did not end within {seconds:g} s")


class _Crew:
    """What the threads share."""

    def __init__(self, work: Mapping[str, Callable[[], None]], patience: Patience) -> None:
        self._queue = deque(work.items())
        self._patience = patience
        self.in_flight: dict[str, str] = {}
        self.errors: list[tuple[str, BaseException]] = []

    def serve(self) -> None:
        """Do what is left in the queue; the body of each thread."""
        while self._queue and not self._patience.cancelled.is_set():
            try:
                name, call = self._queue.popleft()
            except IndexError:  # another thread took the last one
                return
            self.in_flight[threading.current_thread().name] = name
            try:
                self._do(call)
            except BaseException as error:  # noqa: BLE001 - raised where `do_all` was called
                self.errors.append((name, error))
                self._patience.cancelled.set()

    def _do(self, call: Callable[[], None]) -> None:
        if self._patience.remaining_seconds <= 0:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._patience.deadline_seconds:g} s were over before it was begun")
        call()
