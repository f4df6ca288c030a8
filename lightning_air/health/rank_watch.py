"""What every rank runs for itself: a thread that looks, every few seconds, after its loop and for orders of rank 0.

It meets the other ranks in the store, on a connection of its own; without one it still looks after this rank.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from lightning_air.health.nodes import OpenStore
from lightning_air.health.patient_store import ANSWER_SECONDS, PatientStore, RankStore

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
# Rank 0, in whose process the store may be, ends a little before the others.
_LOST_SECONDS = 30.0


class Watched(Protocol):
    """Something that has to be looked after."""

    def look(self, store: RankStore | None, closed: threading.Event) -> None:
        """Do so once. May raise `RuntimeError` or `OSError` when the store fails."""

    def say_goodbye(self, store: RankStore) -> None:
        """Tell the other ranks that this one's run has ended."""


class RankWatch:
    """Looks after some things until told to end.

    Args:
        parts: What is looked after, in this order.
        open_store: Opens the store; None where there is none to open.
        check_seconds: The time between two looks.
        answer_seconds: How long the store may take for an answer.
        clock: Seconds that do not jump.
    """

    def __init__(
        self,
        parts: Sequence[Watched],
        *,
        open_store: OpenStore | None,
        check_seconds: float,
        answer_seconds: float = ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._open_store = open_store
        self._check_seconds = check_seconds
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._store: PatientStore | None = None
        self._next_opening = self._met_seconds = clock()
        self._has_told = False

    def run(self, closed: threading.Event) -> None:
        """Look until told to end."""
        while not closed.wait(self._check_seconds):
            self.look(closed)
        if self._store is not None:
            with suppress(RuntimeError, OSError):  # rank 0 was faster
                for part in self._parts:
                    part.say_goodbye(self._store)
            self._store.close()
            self._store = None

    def look(self, closed: threading.Event) -> None:
        """Look once. Raises nothing that a store may raise."""
        self._connect()
        self._tell_of_loss()
        for part in self._parts:
            try:
                part.look(self._store, closed)
            except (RuntimeError, OSError) as error:
                log.debug("the ranks do not meet: %s", error)
                self._lose_store()

    def _connect(self) -> None:
        if self._open_store is None or self._store is not None or self._clock() < self._next_opening:
            return
        try:
            self._store = PatientStore(self._open_store, answer_seconds=self._answer_seconds)
        except (RuntimeError, OSError) as error:
            log.debug("the ranks do not meet: %s", error)
            self._lose_store()

    def _tell_of_loss(self) -> None:
        now = self._clock()
        if self._store is not None or self._open_store is None:
            self._met_seconds = now
        elif now - self._met_seconds > _LOST_SECONDS and not self._has_told:
            self._has_told = True
            log.warning(
                "This rank does not meet the others for GPU health: it finds a hang by itself only, and no rule can "
                "stop all ranks. The process group has to be made through MASTER_ADDR and MASTER_PORT for that."
            )

    def _lose_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        self._next_opening = self._clock() + _RETRY_SECONDS
