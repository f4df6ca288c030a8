"""Calls that wait for their turn: in their order, each once, and of those that replace each other only the last."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_air.tracking.outbox import Outbox


@dataclass
class Call:
    """A call that waits, or is under way.

    Attributes:
        name: For the user.
        make: What to do.
        replaces: Of two that wait with the same, the later one counts; None for one that counts in any case.
        note: Says what another process needs to do the same; None if it cannot.
        num_turns: How often it has given way to others that succeeded.
        num_done_before: How many had succeeded when it gave way last.
    """

    name: str
    make: Callable[[], object]
    replaces: str | None
    note: Callable[[], Outbox] | None = None
    num_turns: int = 0
    num_done_before: int = 0


class CallQueue:
    """The calls that wait, and the one that is under way. Whoever uses it holds a lock.

    Args:
        max_waiting: Calls that may wait.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}  # in the order of the calls; with the one under way
        self._waiting: dict[str | None, int] = {}  # by `replaces`; without the one under way
        self._running: int | None = None

    def __len__(self) -> int:
        """Return how many wait or are under way."""
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        """Yield all that wait or are under way, in their order."""
        return iter(self._calls.values())

    def put(self, call: Call) -> Call | None:
        """Have a call wait: last, or in the place of the one that it replaces.

        Returns:
            One that has to go, if there is one too many: the first of those that others can replace, which may be the
            new one itself; else the one that has waited longest.
        """
        number = self._waiting.get(call.replaces)
        if number is None:
            number = next(self._numbers)
            if call.replaces is not None:
                self._waiting[call.replaces] = number
        self._calls[number] = call
        if len(self._calls) - (self._running is not None) <= self._max_waiting:
            return None
        victim = min(self._waiting.values(), default=0) or next(each for each in self._calls if each != self._running)
        self._waiting.pop(self._calls[victim].replaces, None)
        return self._calls.pop(victim)

    def mark(self) -> int:
        """Return a number that tells the calls so far from later ones."""
        return next(self._numbers)

    def is_through(self, mark: int) -> bool:
        """Return whether no call from before a mark is left. Needs no lock."""
        return min(tuple(self._calls), default=mark) >= mark

    def begin(self) -> bool:
        """Let the first one get under way; return whether there is one."""
        if not self._calls:
            return False
        self._running = next(iter(self._calls))
        self._waiting.pop(self._calls[self._running].replaces, None)
        return True

    def newest(self) -> Call:
        """Return the call under way, or the one that was to replace it if it had still waited."""
        number = self._under_way()
        newer = self._waiting.pop(self._calls[number].replaces, None)
        if newer is not None:
            self._calls[number] = self._calls.pop(newer)
        return self._calls[number]

    def end(self, *, is_over: bool) -> None:
        """Have the one under way go; if it is not over it waits again, last, unless another one replaces it."""
        number = self._under_way()
        call = self._calls.pop(number)
        if not is_over and call.replaces not in self._waiting:
            self._calls[number] = call
            if call.replaces is not None:
                self._waiting[call.replaces] = number
        self._running = None

    def _under_way(self) -> int:
        assert self._running is not None, "begin comes first"
        return self._running
