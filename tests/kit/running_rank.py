"""The test session's side of a rank: start it, listen to it, and see to its end.

A rank tells three things over its pipe: that it is ready, what its function returned, or how it failed. Its process
may also end without a word, or not at all; `end_ranks` turns all of that into results and leaves no process behind.
"""

import contextlib
import os
import pickle
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.kit.fork_server import start_fork_server
from tests.kit.rank_process import ERROR, READY, Message, RankTask, main, take_message

_START_SECONDS = 180.0  # a rank imports the test's module before it is ready
_DUMP_SECONDS = 5.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RankResult:
    """What became of one rank."""

    rank: int
    value: Any
    """What the function returned; None if it did not."""
    error: str | None
    """A traceback, or how the process ended; None exactly if the function returned and the process exited with 0."""
    exitcode: int
    """As for `subprocess`: minus the signal for a killed process."""
    output: str
    """Standard output and error, of the rank and of the processes it started."""
    seconds: float
    """How long the function ran."""


@dataclass
class RunningRank:
    """One started rank."""

    global_rank: int
    process: ForkServerProcess
    go: Connection
    results: Connection
    output_path: Path
    group_pid: int
    go_seconds: float = field(default_factory=time.monotonic)
    end_seconds: float | None = None
    is_ready: bool = False
    message: Message | None = None
    fate: str | None = None
    """Why the parent ended it, if the parent did."""
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def is_running(self) -> bool:
        return self.end_seconds is None

    def let_go(self) -> None:
        """Have the rank call its function."""
        self.go_seconds = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self.go.send(None)

    def read(self) -> bool:
        """Take what has arrived, without waiting; return whether more may come."""
        try:
            while chunk := os.read(self.results.fileno(), _CHUNK_BYTES):
                self.buffer += chunk
                self._take_messages()
        except BlockingIOError:
            return True
        return False

    def _take_messages(self) -> None:
        while (payload := take_message(self.buffer)) is not None:
            try:
                message: Message = pickle.loads(payload)
            except Exception as error:  # noqa: BLE001 - a value that cannot be rebuilt here is the rank's failure.
                message = Message(ERROR, f"the value of rank {self.global_rank} cannot be unpickled here: {error!r}")
            if message.kind == READY:
                self.is_ready = True
            else:
                self.message = message

    def give_up(self, reason: str) -> None:
        """Have the process print the stacks of its threads and end, even if it is stopped."""
        self.fate = reason
        for number in (signal.SIGABRT, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, number)

    def result(self) -> RankResult:
        """Return what became of the rank, which must have ended."""
        assert self.end_seconds is not None
        message, exitcode = self.message, self.process.exitcode
        assert exitcode is not None
        has_value = message is not None and message.kind != ERROR
        reasons = [str(message.content)] if message is not None and not has_value else []
        if self.fate is not None:
            reasons.append(self.fate)
        elif message is None:
            reasons.append(f"rank {self.global_rank} ended with exit code {exitcode} before its function returned")
        elif has_value and exitcode != 0:
            reasons.append(f"rank {self.global_rank} returned a value, and then ended with exit code {exitcode}")
        return RankResult(
            rank=self.global_rank,
            value=message.content if message is not None and has_value else None,
            error="\n".join(reasons) or None,
            exitcode=exitcode,
            output=self.output_path.read_text(errors="replace") if self.output_path.exists() else "",
            seconds=message.seconds if message is not None else self.end_seconds - self.go_seconds,
        )


def start_ranks(
    task_of: Callable[[int, int], RankTask], world_size: int, *, ranks_per_group: int, ranks: list[RunningRank]
) -> None:
    """Start the ranks and let them go together, appending each to `ranks` as soon as it exists.

    Args:
        task_of: From the rank, and the process that leads its group (0 for a leader), to what the rank is told.
        world_size: How many.
        ranks_per_group: How many consecutive ranks share an operating-system process group.
        ranks: Filled here, so that the caller can end what has started if this fails half-way.
    """
    context = start_fork_server()
    for global_rank in range(world_size):
        leader = None if global_rank % ranks_per_group == 0 else ranks[-(global_rank % ranks_per_group)]
        if leader is not None:
            _listen([leader], _START_SECONDS, until_ready=True)  # it must lead its group before others can join
        task = task_of(global_rank, leader.group_pid if leader else 0)
        go_reader, go = context.Pipe(duplex=False)
        results, results_writer = context.Pipe(duplex=False)
        os.set_blocking(results.fileno(), False)
        process = context.Process(target=main, args=(task, go_reader, results_writer))
        try:
            process.start()
        except (EOFError, OSError) as error:
            go.close()
            results.close()
            raise RuntimeError(
                "the fork server does not answer; its error is in the output of this test run"
            ) from error
        finally:
            go_reader.close()
            results_writer.close()
        assert process.pid is not None
        group_pid = leader.group_pid if leader else process.pid
        ranks.append(RunningRank(global_rank, process, go, results, Path(task.output_path), group_pid))
    _listen(ranks, _START_SECONDS, until_ready=True)
    for rank in ranks:
        if rank.is_running and not rank.is_ready:
            rank.give_up(f"rank {rank.global_rank} did not start within {_START_SECONDS:g} s")
        rank.let_go()


def wait_for_ranks(ranks: Sequence[RunningRank], timeout_seconds: float) -> None:
    """Wait until all ranks have ended; after the timeout, have the others print their stacks and end."""
    _listen(ranks, timeout_seconds)
    late = [rank for rank in ranks if rank.is_running]
    for rank in late:
        did = "returned a value but did not exit" if rank.message is not None else "timed out"
        rank.give_up(f"rank {rank.global_rank} {did} after {timeout_seconds:g} s; its stacks are in its output")
    _listen(late, _DUMP_SECONDS)


def end_ranks(ranks: Sequence[RunningRank]) -> list[RankResult]:
    """Kill what is left of the ranks and of the processes they started, and return what became of each."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.group_pid, signal.SIGKILL)
        if rank.is_running:
            rank.process.kill()
    results = []
    for rank in ranks:
        rank.process.join()
        rank.read()
        rank.end_seconds = rank.end_seconds or time.monotonic()
        results.append(rank.result())
        rank.go.close()
        rank.results.close()
        rank.process.close()
    return results


def _listen(ranks: Sequence[RunningRank], timeout_seconds: float, *, until_ready: bool = False) -> None:
    """Read from the ranks until all have ended (or are ready), or the time is over."""
    deadline_seconds = time.monotonic() + timeout_seconds
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            if rank.is_running:
                selector.register(rank.process.sentinel, selectors.EVENT_READ, rank)
                selector.register(rank.results, selectors.EVENT_READ, rank)
        while any(rank.is_running and not (until_ready and rank.is_ready) for rank in ranks):
            events = selector.select(deadline_seconds - time.monotonic())
            if not events and time.monotonic() >= deadline_seconds:
                return
            for key, _ in events:
                rank = key.data
                if key.fileobj is rank.results and not rank.read():
                    selector.unregister(rank.results)
                elif key.fileobj == rank.process.sentinel:
                    selector.unregister(rank.process.sentinel)
                    rank.process.join()
                    rank.read()
                    rank.end_seconds = time.monotonic()
