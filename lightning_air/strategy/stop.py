"""All ranks stop at the same step when one of them is told to, without touching the device.

A scheduler that takes a machine away sends SIGTERM, to some ranks or all, at any moment. To save a checkpoint
together the ranks must leave the loop at the same step. Lightning broadcasts a flag from rank 0 through the device
and reads it back on every batch, which stalls the GPU's queue, and hears rank 0 only; its signal handler itself
starts a collective. Here the handler sets a flag, and the ranks exchange flags about once a second: an asynchronous
reduction of two integers in host memory, started before one batch and read before the next.

The exchange also carries the time per batch, so that every rank derives the same number of batches until the next
one, 16 at most. A stop is acted on within about `interval_seconds` plus two batches, or 18 batches if they slow down.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

INTERVAL_SECONDS = 1.0
# However fast the batches are: what was measured is the past. Prefetched batches, or launches that only queue work on a
# GPU, take milliseconds until the first one that does not.
MAX_BATCHES_BETWEEN = 16


@dataclass(frozen=True)
class Stop:
    """A stop that all ranks have agreed on: the rank that asked for it (the highest, if several), and why."""

    global_rank: int
    reason: str


class StopExchange:
    """Agree on a stop with all other ranks. Every rank calls `step` equally often; `request` is for anyone.

    Args:
        group: A gloo group of all ranks that nothing else uses, or None for a single rank.
        rank: This rank.
        interval_seconds: About how often to exchange.
        clock: The time in seconds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._rank = rank
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._reason: str | None = None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._steps_left = 0
        self._steps = 0
        self._last_exchange_seconds: float | None = None
        self.num_exchanges = 0
        self.num_steps = 0

    def request(self, reason: str) -> None:
        """Ask all ranks to stop; safe in a signal handler and on any thread. The first reason is kept."""
        self._reason = self._reason or reason

    @property
    def is_requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self._reason is not None

    def step(self) -> Stop | None:
        """Return the stop that all ranks agreed on, or None to go on. Collective: every rank calls this.

        Every rank gets the same answer at the same call. Blocks at most until every rank has made the call before.
        """
        if self._group is None:
            return None if self._reason is None else Stop(self._rank, self._reason)
        self._steps += 1
        self.num_steps += 1
        if self._pending is not None:
            stop = self._finish_exchange()
            if stop is not None:
                return stop
        if self._steps_left > 0:
            self._steps_left -= 1
        else:
            self._start_exchange()
        return None

    def drain(self) -> None:
        """Wait for a reduction that is under way. Called by every rank after its last `step` of a loop."""
        if self._pending is not None:
            work, _ = self._pending
            self._pending = None
            work.wait()

    def _start_exchange(self) -> None:
        now, before = self._clock(), self._last_exchange_seconds
        # The first has no batch before it to measure, so the next one follows at once.
        batch_seconds = self._interval_seconds if before is None else (now - before) / self._steps
        microseconds = int(batch_seconds * 1e6)
        self._last_exchange_seconds, self._steps = now, 0
        asking = 0 if self._reason is None else self._rank + 1
        values = torch.tensor([asking, microseconds], dtype=torch.int64)
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, values)
        self.num_exchanges += 1

    def _finish_exchange(self) -> Stop | None:
        assert self._pending is not None
        work, values = self._pending
        self._pending = None
        work.wait()
        asking, microseconds = values.tolist()
        if asking:
            return Stop(asking - 1, self._reason_of(asking - 1))
        batches = int(self._interval_seconds * 1e6 / max(microseconds, 1)) - 1
        self._steps_left = max(0, min(batches, MAX_BATCHES_BETWEEN))
        return None

    def _reason_of(self, rank: int) -> str:
        # Once per run, so its cost does not matter; every rank is here at the same step.
        reasons = [self._reason]
        dist.broadcast_object_list(reasons, src=rank, group=self._group)
        return reasons[0] or ""
