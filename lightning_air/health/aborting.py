"""Ends the processes of all ranks at once: for when no rank can go on, and no collective would come back.

Each leaves a marker first. Rank 0, in whose process the store may be, leaves last.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_air.health.hang_watch import LEAVE_SECONDS
from lightning_air.health.patient_store import RankStore


class Aborting:
    """The abort of a run. `request` is for any thread, `look` for the one that watches.

    Args:
        global_rank: This rank.
        world_size: How many ranks there are.
        leave: Ends this process, with a reason.
        check_seconds: The time between two looks of the other ranks.
        clock: Seconds that do not jump.
    """

    def __init__(
        self,
        global_rank: int,
        world_size: int,
        leave: Callable[[str], object],
        *,
        check_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._global_rank = global_rank
        self._world_size = world_size
        self._leave = leave
        self._wait_seconds = LEAVE_SECONDS + 2 * check_seconds
        self._clock = clock
        self._wanted: str | None = None

    def request(self, reason: str) -> None:
        """Have all ranks end. On rank 0; the first reason is kept."""
        self._wanted = self._wanted or reason

    def look(self, store: RankStore | None, closed: threading.Event) -> None:
        """End this process if it was asked for.

        Raises:
            RuntimeError: The store has failed.
        """
        if self._wanted is not None:
            if store is not None:
                with suppress(RuntimeError, OSError):
                    self._tell_others(store, self._wanted, closed)
            self._leave(self._wanted)
        elif store is not None and store.check(["abort/reason"]):
            reason = store.get("abort/reason").decode()
            with suppress(RuntimeError, OSError):
                store.set(f"abort/leaves/{self._global_rank}", "1")
            self._leave(reason)

    def say_goodbye(self, store: RankStore) -> None:
        """Tell rank 0 not to wait for this one."""
        store.set(f"abort/leaves/{self._global_rank}", "1")

    def _tell_others(self, store: RankStore, reason: str, closed: threading.Event) -> None:
        store.set("abort/reason", reason)
        others = [f"abort/leaves/{rank}" for rank in range(self._world_size) if rank != self._global_rank]
        deadline = self._clock() + self._wait_seconds
        while others and not store.check(others) and self._clock() < deadline and not closed.is_set():
            closed.wait(0.05)
