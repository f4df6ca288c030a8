"""Keep a run's points within its cap, whoever sends them: each writer says in the run how many it may have sent.

Each spool has a writer's id, and the writer a tag of its own in the run. The run's count is the sum of these tags.
Before points are sent, the writer raises its tag by them and a lease, and then reads all tags again. Only what fits
into the cap then is granted; if it is less, the tag is lowered to it. Of two writers that raise theirs at once, the one
that reads last sees both; so what all are granted together never exceeds the cap, without a lock that a killed one
would keep. That takes a server that shows a tag to whoever asks after it has acknowledged it, as databases do.

What a killed writer has charged ahead stays charged until somebody goes on with its spool. At a clean end the tag
becomes the exact count.
"""

from collections.abc import Callable, Mapping
from typing import Protocol
from uuid import uuid4

from lightning_air.tracking.budget import lease
from lightning_air.tracking.door import Door
from lightning_air.tracking.door_errors import Unreachable
from lightning_air.tracking.rest_door import REQUEST_SECONDS
from lightning_air.tracking.run_tags import TAG_PREFIX

STEPS_TAG = f"{TAG_PREFIX}metric_steps"
"""The sum when it was last raised, or at the last clean end. For people; nobody counts on it."""

BEFORE = "before"
"""Stands for a writer: what the run had when the first of ours came to it, as an estimate."""


class Charging(Protocol):
    """Says what one spool's writer may send."""

    def __call__(self, num_points: int) -> int:
        """Return how many points of the spool may have been sent in all, before they are: at most so many."""

    def settle(self, num_points: int, timeout_seconds: float) -> object:
        """Take note of how many points of the spool the run may have; nothing more will be sent."""


class Uncharged:
    """Lets all be sent."""

    def __call__(self, num_points: int) -> int:
        """Allow all."""
        return num_points

    def settle(self, num_points: int, timeout_seconds: float) -> None:
        """Do nothing."""


def new_writer() -> str:
    """Return an id that no other spool has."""
    return uuid4().hex[:12]


def writer_tag(writer: str) -> str:
    """Return the tag in which a writer says how many points it may have sent."""
    return f"{STEPS_TAG}.{writer}"


def charges_of(tags: Mapping[str, str]) -> dict[str, int]:
    """Return what a run's tags say: the points that each writer may have sent."""
    prefix = writer_tag("")
    charges = {key.removeprefix(prefix): value for key, value in tags.items() if key.startswith(prefix)}
    return {writer: int(value) for writer, value in charges.items() if value.isdecimal()}


class Charge:
    """What one spool's writer may send. One thread's.

    Args:
        door: To the server.
        run_id: Of the run.
        writer: The spool's.
        cap: Points that all writers may send together.
        earlier: Points that this writer had sent before the spool's first.
        found: Points that the run had when no writer had come to it.
        on_others: Told how many points the others may have sent, each time that it is known to be more.
    """

    def __init__(
        self,
        door: Door,
        run_id: str,
        *,
        writer: str,
        cap: int,
        earlier: int = 0,
        found: int = 0,
        on_others: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.writer = writer
        self._door = door
        self._run_id = run_id
        self._cap = cap
        self._earlier = earlier
        self._found = found
        self._on_others = on_others
        self._others: int | None = None  # nobody has asked yet
        self._most_others = 0
        self._is_found = self._has_begun = False
        self._stored = 0  # our tag, as far as is known
        self._own = 0  # and at most, since a request may have been carried out that was not acknowledged
        self._floor = 0  # what an earlier process may have sent
        self._granted = 0

    @property
    def own(self) -> int:
        """Points that this writer is charged with; 0 before the first were to be sent."""
        return max(self._own, self._earlier)

    def __call__(self, num_points: int) -> int:
        """Return how many points of the spool may have been sent in all, before they are: at most so many.

        Points that were not allowed count on: a killed process may have sent them when they were. What was granted
        once is granted again.

        Raises:
            DoorError: The server cannot be asked, or does not take it.
        """
        wanted = self._earlier + num_points
        if not self._has_begun:
            self._begin()
        if wanted > self._granted:
            self._obtain(wanted)
        return min(num_points, max(0, self._granted - self._earlier))

    def settle(self, num_points: int, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Give back what was charged ahead: nothing more will be sent.

        Args:
            num_points: Of the spool, that the run may have.
            timeout_seconds: Of each request.

        Raises:
            DoorError: It is not known to be given back.
        """
        exact = self._earlier + num_points
        if self._others is None and not exact:
            return
        self._read(timeout_seconds)
        if exact < self._own:
            self._granted = min(self._granted, exact)  # also if the answer does not arrive
            self._set(self.writer, exact, timeout_seconds)
            self._own = exact
        self._tell_people(timeout_seconds)

    def _begin(self) -> None:
        """Find out what is charged; what is charged to this writer is granted if the cap has room for all of it."""
        others, own = self._read()
        if self._found and not self._is_found:
            self._set(BEFORE, self._found)
            others, own = self._read()
        # An earlier process may have sent more, and so it stays charged. But nobody has said that it may.
        self._floor = own
        self._granted = max(0, min(own, self._cap - others))
        self._has_begun = True

    def _obtain(self, wanted: int) -> None:
        room = self._cap - (self._others or 0)
        target = min(room, wanted + lease(self._cap, room - wanted))
        if target <= self._granted:  # others may have given some back
            others, _ = self._read()
            room = self._cap - others
            target = min(room, wanted + lease(self._cap, room - wanted))
        if target <= self._granted:
            return
        if target > self._stored:
            self._set(self.writer, target)
        others, own = self._read()
        if own < target:  # it has been lowered, by a request of ours whose answer did not arrive
            self._set(self.writer, target)
            others, own = self._read()
        if own < target:
            raise Unreachable(f"The tag {writer_tag(self.writer)} is {own} though the server has taken {target}.")
        granted = max(self._granted, min(target, self._cap - others))
        lowered = max(granted, self._floor)
        if lowered < own:
            self._set(self.writer, lowered)
            self._own = lowered
        self._granted = granted
        self._tell_people()

    def _read(self, timeout_seconds: float = REQUEST_SECONDS) -> tuple[int, int]:
        """Ask for all tags, and return what they say of the others and of this writer."""
        charges = charges_of(self._door.get_tags(self._run_id, timeout_seconds=timeout_seconds))
        self._is_found = BEFORE in charges
        own = charges.pop(self.writer, 0)
        self._others = sum(charges.values())
        self._stored = own
        self._own = max(self._own, own)
        if self._others > self._most_others:
            self._most_others = self._others
            self._on_others(self._others)
        return self._others, own

    def _set(self, writer: str, value: int, timeout_seconds: float = REQUEST_SECONDS) -> None:
        if writer == self.writer:
            self._own = max(self._own, value)
        self._door.set_tag(self._run_id, writer_tag(writer), str(value), timeout_seconds=timeout_seconds)
        if writer == self.writer:
            self._stored = value

    def _tell_people(self, timeout_seconds: float = REQUEST_SECONDS) -> None:
        total = (self._others or 0) + self._own
        self._door.set_tag(self._run_id, STEPS_TAG, str(total), timeout_seconds=timeout_seconds)
