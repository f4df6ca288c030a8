"""However a rank ends, and if it does not, the test learns of it and no process is left."""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.kit.environment import Placement
from tests.kit.points import reach
from tests.kit.processes import assert_ends
from tests.kit.rank_process import RankTask
from tests.kit.ranks import run_ranks, values
from tests.kit.running_rank import RunningRank, end_ranks, start_ranks


def _three_steps() -> list[str]:
    done = []
    for step in range(3):
        reach(f"step:{step}")
        done.append(f"step:{step}")
        print(done[-1])  # noqa: T201
    return done


def test_a_rank_is_killed_at_a_named_point() -> None:
    survivor, killed = run_ranks(_three_steps, 2, signals={(1, "step:2"): signal.SIGKILL})
    assert survivor.value == ["step:0", "step:1", "step:2"]
    assert killed.exitcode == -signal.SIGKILL
    assert killed.output == "step:0\nstep:1\n"
    assert killed.error == "rank 1 ended with exit code -9 before its function returned"


def _count_signals(number: int) -> int:
    received = []
    signal.signal(number, lambda number, frame: received.append(number))
    for _ in range(3):
        reach("loop")
    return len(received)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_delivered_to_a_handler_the_first_time_only(number: signal.Signals) -> None:
    assert values(run_ranks(_count_signals, 2, args=(number,), signals={(0, "loop"): number})) == [1, 0]


def test_a_signal_without_a_handler_ends_the_rank() -> None:
    [result] = run_ranks(_three_steps, 1, signals={(0, "step:0"): signal.SIGTERM})
    assert result.exitcode == -signal.SIGTERM


def test_a_point_outside_of_a_rank_does_nothing() -> None:
    reach("step:0")


def _wait_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        threading.Thread(target=_wait_in_a_thread, daemon=True).start()
        threading.Event().wait()
    return os.getpid()


def _wait_in_a_thread() -> None:
    time.sleep(60.0)


def test_a_hanging_rank_shows_its_stacks_and_is_killed() -> None:
    start_seconds = time.monotonic()
    done, late = run_ranks(_wait_on_rank_1, 2, timeout_seconds=0.5)
    assert time.monotonic() - start_seconds < 20.0
    assert done.error is None
    assert late.exitcode < 0
    assert late.error == "rank 1 timed out after 0.5 s; its stacks are in its output"
    assert "in _wait_on_rank_1" in late.output
    assert "in _wait_in_a_thread" in late.output


def test_a_stopped_rank_shows_its_stacks_and_is_killed() -> None:
    [result] = run_ranks(_three_steps, 1, signals={(0, "step:1"): signal.SIGSTOP}, timeout_seconds=0.5)
    assert result.exitcode < 0
    assert "timed out" in str(result.error)
    assert "in _three_steps" in result.output


def _ignore_sigabrt() -> None:
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    threading.Event().wait()


def test_a_rank_that_refuses_to_end_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.running_rank._DUMP_SECONDS", 0.2)
    [result] = run_ranks(_ignore_sigabrt, 1, timeout_seconds=0.2)
    assert result.exitcode == -signal.SIGKILL
    assert "timed out" in str(result.error)


def _leave_a_thread() -> str:
    threading.Thread(target=_wait_in_a_thread).start()
    return "returned"


def test_a_rank_that_returns_but_does_not_exit_fails() -> None:
    [result] = run_ranks(_leave_a_thread, 1, timeout_seconds=0.5)
    assert result.value == "returned"
    assert result.error == "rank 0 returned a value but did not exit after 0.5 s; its stacks are in its output"
    assert "in _wait_in_a_thread" in result.output


def _leave_by(way: str) -> None:
    code = int(os.environ["RANK"]) * 3
    if way == "_exit":
        os._exit(code)
    sys.exit(code)


def test_a_rank_that_leaves_without_a_word_fails() -> None:
    quiet, loud = run_ranks(_leave_by, 2, args=("_exit",))
    assert (quiet.exitcode, loud.exitcode) == (0, 3)
    assert quiet.error == "rank 0 ended with exit code 0 before its function returned"
    assert loud.error == "rank 1 ended with exit code 3 before its function returned"


def test_sys_exit_counts_as_in_a_script() -> None:
    good, bad = run_ranks(_leave_by, 2, args=("exit",))
    assert (good.exitcode, good.error) == (0, None)
    assert bad.exitcode == 3
    assert "SystemExit: 3" in str(bad.error)


def _register_exit() -> None:
    atexit.register(lambda: print("at exit"))  # noqa: T201


def test_a_rank_exits_like_an_interpreter() -> None:
    assert run_ranks(_register_exit, 1)[0].output == "at exit\n"


def _start_a_child() -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def test_what_a_rank_started_is_killed() -> None:
    [pid] = values(run_ranks(_start_a_child, 1, warnings_as_errors=False))
    assert_ends(pid)


def test_a_rank_dies_with_the_test_session(tmp_path: Path) -> None:
    def task_of(global_rank: int, group_pid: int) -> RankTask:
        return RankTask(
            placement=Placement(global_rank=global_rank, world_size=1),
            call=pickle.dumps((_wait_in_a_thread, ())),
            environment=dict(os.environ),
            cwd=str(tmp_path),
            output_path=str(tmp_path / "output"),
            group_pid=group_pid,
            namespace=None,
            signals={},
            backend=None,
            timeout_seconds=60.0,
            warnings_as_errors=True,
        )

    ranks: list[RunningRank] = []
    try:
        start_ranks(task_of, 1, ranks_per_group=1, ranks=ranks)
        assert ranks[0].is_running
        # The kernel closes the session's end of this pipe when the session is gone.
        session_end, _ = getattr(ranks[0].process, "_popen").finalizer._args  # noqa: B009
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), session_end, inheritable=False)
        assert_ends(ranks[0].process.pid or 0)
    finally:
        end_ranks(ranks)
