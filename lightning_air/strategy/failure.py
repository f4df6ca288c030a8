"""One rank's failure ends all ranks, soon, and with its error in their message.

A rank that raises leaves the others in a collective. Over gloo they notice when its process exits; over NCCL they
wait for the collective's timeout, half an hour by default. So the rank that raises posts its error in the store,
and every rank has one thread that looks there:

1. The failing rank posts (the first one wins) and waits up to `ACK_SECONDS` for all to have read it. So does rank 0
   when it comes to end, since the store dies with its process.
2. A rank that reads a failure aborts its NCCL communicators, which ends the collective that its main thread hangs in.
   At the latest the next batch raises. Either exception reaches `on_exception`, which adds the first rank's error.
3. A main thread that has not got there `GRACE_SECONDS` later is stuck (gloo has no abort): its stacks and the first
   error are printed and the process exits with status 1.

So the others end within POLL_SECONDS + GRACE_SECONDS, 31 s, whatever they were doing; usually within about a second.
A rank that is killed posts nothing: over gloo its closed sockets tell, over NCCL the launcher or the timeout.

Failures are numbered, and every rank goes through them in order, in whichever run it meets them. One that raises when
its fit is over meets the others in what they do next, before they wait for it there.
"""

import faulthandler
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_air.strategy.process_group import wait_until
from lightning_air.strategy.world import World

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
ACK_SECONDS = 5.0
GRACE_SECONDS = 30.0
# How long a rank whose collective broke waits for the reason to appear in the store.
LATE_POST_SECONDS = 3.0
_STORE_TIMEOUT = timedelta(seconds=5)
_MAX_MESSAGE_CHARACTERS = 4000


@dataclass(frozen=True)
class Failure:
    """The first error of a group: the rank it happened on, and what it was."""

    global_rank: int
    where: str
    error: str

    def __str__(self) -> str:
        return f"{self.where} failed first: {self.error}"


class FailureWatch:
    """Post this rank's failure, learn of another's. One thread, `air-failure-watch`, from `start` to `close`.

    Args:
        world: Who this rank is, where all ranks read and write, and how many failures there have been before.
        abort: Ends the collectives that this process hangs in.
        exit_process: Ends this process at once; called with 1 when the main thread is stuck.
        poll_seconds: How often to look.
        grace_seconds: How long the main thread has to notice by itself.
    """

    def __init__(
        self,
        world: World,
        *,
        abort: Callable[[], None],
        exit_process: Callable[[int], object] = os._exit,
        poll_seconds: float = POLL_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._world = world
        self._membership = world.membership
        self._number = world.num_failures
        world.store.set_timeout(_STORE_TIMEOUT)
        self._store = dist.PrefixStore(f"failure/{self._number}", world.store)
        self._abort = abort
        self._exit_process = exit_process
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._failure: Failure | None = None
        self._handled = threading.Event()  # the main thread has reached on_exception, or the run is over
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="air-failure-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch. What another rank posted before, in a run that went well here, is known at once."""
        with suppress(dist.DistError, RuntimeError):  # no store: the thread will find out
            self._look()
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent; waits for the thread, but not longer than for one answer of the store."""
        self._handled.set()
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=_STORE_TIMEOUT.total_seconds() + 1)

    def raise_if_another_failed(self) -> None:
        """Raise `RuntimeError` with the first rank's error, if another rank has failed. Costs one attribute read."""
        if self._failure is not None:
            raise RuntimeError(str(self._failure))

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others of this rank's exception or, if another rank failed before, tell this exception of it.

        Called by the main thread of the rank that raised, on every such rank; also when it was not started.
        """
        self._handled.set()
        # On a thread: a store whose machine went away without a word never answers, and its calls have no timeout.
        telling = threading.Thread(target=self._tell, args=(exception,), name="air-failure-tell", daemon=True)
        telling.start()
        telling.join(timeout=LATE_POST_SECONDS + ACK_SECONDS + 1)
        self._world.num_failures = max(self._world.num_failures, self._number + 1)
        if self._failure is not None:
            _explain(exception, self._failure)

    def _tell(self, exception: BaseException) -> None:
        """Post this rank's failure, or find out whose was the first."""
        mine = Failure(
            global_rank=self._membership.global_rank,
            where=self._membership.describe(self._membership.global_rank),
            error=f"{type(exception).__name__}: {_text(exception)}"[:_MAX_MESSAGE_CHARACTERS],
        )
        is_consequence = isinstance(exception, RuntimeError)  # what torch raises when a peer is gone; often one's own
        with suppress(dist.DistError, RuntimeError):
            if is_consequence and self._failure is None and _looks_like_lost_peer(exception):
                wait_until(lambda: self._read() is not None, seconds=LATE_POST_SECONDS)
            first = self._post(mine)
            if first.global_rank != mine.global_rank:
                self._failure = first
            self._store.set(f"read/{mine.global_rank}", "1")
            if mine.global_rank in (first.global_rank, 0):  # rank 0's process holds the store
                self._wait_until_all_have_read()

    def _post(self, failure: Failure) -> Failure:
        # compare_set with an empty expectation sets the key if nobody has, and returns what stands there.
        return _decode(self._store.compare_set("first", "", json.dumps(asdict(failure))))

    def _read(self) -> Failure | None:
        if self._failure is None and self._store.check(["first"]):
            failure = _decode(self._store.get("first"))
            if failure.global_rank != self._membership.global_rank:
                self._failure = failure
        return self._failure

    def _look(self) -> Failure | None:
        """Read, and let the rank that failed know."""
        failure = self._read()
        if failure is not None:
            self._store.set(f"read/{self._membership.global_rank}", "1")
        return failure

    def _wait_until_all_have_read(self) -> None:
        keys = [f"read/{rank}" for rank in range(self._membership.world_size)]
        wait_until(lambda: self._store.check(keys), seconds=ACK_SECONDS)

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            try:
                failure = self._look()
            except (dist.DistError, RuntimeError) as error:
                # The process that held the store is gone: finished, or dead. Neither can be told from here.
                log.debug("the failure watch lost its store: %s", error)
                return
            if failure is not None:
                self._end_main_thread(failure)
                return

    def _end_main_thread(self, failure: Failure) -> None:
        if self._handled.is_set():
            return
        log.error("%s; ending this rank.", failure)
        # On a thread of its own: aborting a communicator may itself block, and the deadline must not wait for it.
        threading.Thread(target=self._try_to_abort, name="air-failure-abort", daemon=True).start()
        if self._handled.wait(self._grace_seconds):
            return
        try:
            where = self._membership.describe(self._membership.global_rank)
            # The original stream: sys.stderr may be a notebook's or a logger's, which has no file descriptor.
            stream = sys.__stderr__ or sys.stderr
            stream.write(
                f"{where} is still stuck {self._grace_seconds:g} s after {failure}\nEnding the process. Its stacks:\n"
            )
            stream.flush()
            faulthandler.dump_traceback(file=stream)
            sys.stdout.flush()
        finally:
            self._exit_process(1)

    def _try_to_abort(self) -> None:
        try:
            self._abort()
        except Exception:  # whatever it is, the deadline still holds
            log.exception("aborting the collectives failed")


def _decode(value: bytes) -> Failure:
    return Failure(**json.loads(value.decode()))


def _text(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:  # noqa: BLE001 - a user's `__str__` may raise anything, and the others are to learn of the rest
        return "(its text cannot be shown: its __str__ raises)"


def _looks_like_lost_peer(exception: BaseException) -> bool:
    text = _text(exception).lower()
    return isinstance(exception, dist.DistError) or any(
        word in text for word in ("connection", "peer", "gloo", "nccl", "timed out", "abort")
    )


def _explain(exception: BaseException, failure: Failure) -> None:
    """Put the first rank's error into the message of the exception that it caused here."""
    text = _text(exception)
    if str(failure) in text or (text and failure.error.endswith(text)):
        return  # said already, or every rank raised the same
    if isinstance(exception, RuntimeError) and len(exception.args) == 1 and isinstance(exception.args[0], str):
        exception.args = (f"{failure}\nOn this rank it showed as: {exception.args[0]}",)
    else:
        exception.add_note(str(failure))
