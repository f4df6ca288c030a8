"""All ranks stop after the same batch, chosen ahead of all of them; nothing of it touches the device or a collective.

1. Rank 0 is told to stop, by whichever thread, and says so in the store.
2. Each rank's watching thread promises there a number of batches beyond which its loop will not go unasked.
3. The largest promise is where all stop: no rank can have gone further. Rank 0 writes it once all have promised.

A loop that comes to its own promise before the answer waits for it; as batches take longer than looks, that is rare. If
a rank does not promise within `ANSWER_SECONDS`, whoever waits calls it off, for all: the first word in the store holds.
"""

import logging
import threading
import time
from collections.abc import Callable

from lightning_air.health.patient_store import RankStore

log = logging.getLogger(__name__)

BATCHES_AHEAD = 4
ANSWER_SECONDS = 60.0
_CALLED_OFF = "none"
# The watching thread decides; this is for a thread that has died.
_MAX_WAIT_SECONDS = 2 * ANSWER_SECONDS


class StopAgreement:
    """A stop of one run. `request` is for any thread, `look` for the one that watches, `is_due` for the loop's.

    Args:
        global_rank: This rank.
        world_size: How many ranks there are.
        num_batches: Returns how many batches of training have ended here.
        clock: Seconds that do not jump.
        answer_seconds: How long to wait for the other ranks.
    """

    def __init__(
        self,
        global_rank: int,
        world_size: int,
        num_batches: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.reason = ""
        self._global_rank = global_rank
        self._world_size = world_size
        self._num_batches = num_batches
        self._clock = clock
        self._answer_seconds = answer_seconds
        self._wanted: str | None = None
        self._promise: int | None = None
        self._promised_seconds = 0.0
        self._at: int | None = None
        self._is_decided = threading.Event()

    def request(self, reason: str) -> None:
        """Have all ranks stop. On rank 0; the first reason is kept."""
        self._wanted = self._wanted or reason

    def is_due(self, num_batches: int) -> bool:
        """Whether all ranks stop after this batch or an earlier one. Every rank gets the same answer for it.

        Waits for the other ranks' watching threads if this rank has come as far as it has promised.

        Args:
            num_batches: How many batches of training have ended here.
        """
        promise = self._promise
        if promise is None or num_batches < promise:
            return self._at is not None and num_batches >= self._at
        if not self._is_decided.wait(_MAX_WAIT_SECONDS):
            log.error("The ranks have not agreed on where to stop, and go on: the store in which they meet is gone.")
            self._is_decided.set()
        return self._at is not None and num_batches >= self._at

    def look(self, store: RankStore | None, closed: threading.Event) -> None:  # noqa: ARG002 - as `Watched` has it
        """Do what is next on this rank.

        Raises:
            RuntimeError: The store has failed.
        """
        if store is None or self._is_decided.is_set():
            return
        if self._wanted is not None and self._promise is None:
            store.set("stop/reason", self._wanted)
        if self._promise is None and store.check(["stop/reason"]):
            self.reason = store.get("stop/reason").decode()
            self._make_promise(store)
        if self._promise is None:
            return
        keys = [f"stop/promise/{rank}" for rank in range(self._world_size)]
        if self._global_rank == 0 and store.check(keys):
            furthest = max(int(store.get(key)) for key in keys)
            self._decide(store.compare_set("stop/at", "", str(furthest)).decode())
        elif store.check(["stop/at"]):
            self._decide(store.get("stop/at").decode())
        elif self._clock() - self._promised_seconds > self._answer_seconds:
            self._decide(store.compare_set("stop/at", "", _CALLED_OFF).decode())

    def say_goodbye(self, store: RankStore) -> None:
        """Nothing: a run that has ended needs no stop."""

    def _make_promise(self, store: RankStore) -> None:
        promise = self._num_batches() + BATCHES_AHEAD
        self._promise = promise
        # Until now the loop may have gone on, and past it.
        while self._num_batches() >= promise:
            self._promise = promise = self._num_batches() + BATCHES_AHEAD
        self._promised_seconds = self._clock()
        store.set(f"stop/promise/{self._global_rank}", str(promise))

    def _decide(self, answer: str) -> None:
        if answer == _CALLED_OFF:
            log.warning(
                "The ranks do not stop (%s): not all of them have answered within %g s.",
                self.reason,
                self._answer_seconds,
            )
        else:
            self._at = int(answer)
        self._is_decided.set()
