"""One rank's error reaches all, wherever they are; a rank that is stuck ends; a normal end disturbs nobody."""

import functools
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from lightning_air.strategy import failure
from lightning_air.strategy.failure import Failure, FailureWatch
from lightning_air.strategy.membership import Membership
from lightning_air.strategy.topology import current_launch
from lightning_air.strategy.world import World, enter_world
from tests.kit.points import reach
from tests.kit.ranks import run_ranks, values

POLL_SECONDS = 0.05
THREAD = "air-failure-watch"


class BoomError(Exception):
    """What goes wrong in these tests."""


def membership() -> Membership:
    launch = current_launch()
    assert launch.local_world_size is not None
    return Membership(
        global_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        ranks_per_node=launch.local_world_size,
        address="",
        port=0,
    )


@functools.cache
def world() -> World:
    """What `AirStrategy` makes of the kit's process group."""
    return World(membership(), dist.distributed_c10d._get_default_store().clone())


def watch(*, grace_seconds: float = 20.0, poll_seconds: float = POLL_SECONDS) -> FailureWatch:
    """What `AirStrategy` makes of the kit's process group, but faster."""
    return FailureWatch(world(), abort=lambda: None, poll_seconds=poll_seconds, grace_seconds=grace_seconds)


@dataclass
class Outcome:
    """How a rank's run ended."""

    error: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """From the exception to the end of `on_exception`."""

    @property
    def text(self) -> str:
        return "\n".join([self.error or "", *self.notes])


def run(work: Callable[[FailureWatch], None], watching: FailureWatch | None = None) -> Outcome:
    """Do the work of one rank as `Trainer.fit` would, and say how it ended."""
    watching = watching or watch()
    watching.start()
    outcome = Outcome()
    try:
        work(watching)
    except Exception as exception:  # noqa: BLE001 - as the Trainer does
        started = time.monotonic()
        watching.on_exception(exception)
        outcome.seconds = time.monotonic() - started
        outcome.error = f"{type(exception).__name__}: {exception}"
        outcome.notes = list(getattr(exception, "__notes__", []))
    finally:
        watching.close()
    return outcome


# ---- where the others may be -----------------------------------------------------------------------------------------


def sit_in_all_reduce(_: FailureWatch) -> None:
    dist.all_reduce(torch.ones(1))


def sit_in_barrier(_: FailureWatch) -> None:
    dist.barrier()


def compute(watching: FailureWatch) -> None:
    """Batches without a collective: gradient accumulation, or a slow data loader."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        watching.raise_if_another_failed()
        time.sleep(0.005)
    raise AssertionError("nobody told this rank")


def finish(watching: FailureWatch) -> None:
    """Batches until the end, and nobody fails."""
    for _ in range(10):
        dist.all_reduce(torch.ones(1))
        watching.raise_if_another_failed()
        time.sleep(POLL_SECONDS / 2)


def boom(_: FailureWatch) -> NoReturn:
    time.sleep(0.3)  # the others are where they are going by now
    raise BoomError("out of luck")


Work = Callable[[FailureWatch], None]


def _one_fails(failing_rank: int, others: Work) -> Outcome:
    return run(boom if dist.get_rank() == failing_rank else others)


# Rank 0 holds the store, and with it goes the place where errors are posted.
@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("others", [sit_in_all_reduce, sit_in_barrier, compute])
def test_the_others_end_soon_with_the_first_error_in_their_message(failing_rank: int, others: Work) -> None:
    results = run_ranks(_one_fails, 3, args=(failing_rank, others), init_process_group="gloo")
    said = f"rank {failing_rank} (node 0, local rank {failing_rank}) failed first: BoomError: out of luck"
    for rank, (result, outcome) in enumerate(zip(results, values(results), strict=True)):
        assert result.seconds < 8
        if rank == failing_rank:
            assert outcome.text == "BoomError: out of luck"
            assert outcome.seconds < 3  # it is told when all have read, and need not wait any longer
        else:
            assert outcome.error is not None
            assert outcome.error.startswith(f"RuntimeError: {said}")
            assert outcome.notes == []
            if others is not compute:  # what torch made of it is not lost
                assert "\nOn this rank it showed as: " in outcome.error


def _one_looks_seldom() -> Outcome:
    return run(boom if dist.get_rank() == 1 else compute, watch(poll_seconds=2.0 if dist.get_rank() == 2 else 0.05))


def test_rank_0_keeps_the_store_until_all_know_of_another_ranks_failure() -> None:
    # Given rank 0, which is told at once and could end, and the store with it, before rank 2 has looked there.
    outcomes = values(run_ranks(_one_looks_seldom, 3, init_process_group="gloo"))
    assert "rank 1 (node 0, local rank 1) failed first: " in outcomes[0].text
    assert "rank 1 (node 0, local rank 1) failed first: " in outcomes[2].text


def test_nodes_are_told_apart() -> None:
    results = run_ranks(_one_fails, 4, nodes=2, args=(3, compute), init_process_group="gloo")
    assert "rank 3 (node 1, local rank 1) failed first: " in values(results)[0].text


def _all_fail(message: str | None) -> Outcome:
    def work(_: FailureWatch) -> None:
        dist.barrier()
        raise BoomError(message or f"on rank {dist.get_rank()}")

    return run(work)


def test_of_several_errors_at_once_one_is_the_first_for_all() -> None:
    outcomes = values(run_ranks(_all_fail, 3, args=(None,), init_process_group="gloo"))
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == f"BoomError: on rank {rank}"
    (first,) = [rank for rank, outcome in enumerate(outcomes) if not outcome.notes]
    said = f"rank {first} (node 0, local rank {first}) failed first: BoomError: on rank {first}"
    assert [outcome.notes for rank, outcome in enumerate(outcomes) if rank != first] == [[said], [said]]


def test_an_error_that_all_have_is_said_once() -> None:
    outcomes = values(run_ranks(_all_fail, 3, args=("the same everywhere",), init_process_group="gloo"))
    assert [outcome.text for outcome in outcomes] == ["BoomError: the same everywhere"] * 3


def _fails_while_another_waits(error: Exception) -> Outcome:
    def work(_: FailureWatch) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise error
        dist.barrier()

    return run(work)


@pytest.mark.parametrize(
    "error",
    [BoomError(), BoomError("two\nlines"), BoomError("x" * 10_000), KeyError("layer.0"), BoomError("ü\u2028\x00")],
    ids=["empty", "lines", "long", "KeyError", "unusual characters"],
)
def test_any_error_can_be_told(error: Exception) -> None:
    waiting, failing = values(run_ranks(_fails_while_another_waits, 2, args=(error,), init_process_group="gloo"))
    said = f"{type(error).__name__}: {error}"
    assert failing.error == said
    assert f"failed first: {said[:4000]}" in waiting.text
    assert len(waiting.text) < 6_000


# ---- the first error comes late, or not at all -----------------------------------------------------------------------


def _loses_a_peer_before_it_is_told_why() -> Outcome:
    def work(_: FailureWatch) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]")
        time.sleep(0.5)  # whatever stands between the broken connection and `on_exception`
        raise BoomError("the cause")

    return run(work)


def test_a_rank_that_lost_its_peer_waits_for_the_reason() -> None:
    consequence, cause = values(run_ranks(_loses_a_peer_before_it_is_told_why, 2, init_process_group="gloo"))
    assert consequence.error == (
        "RuntimeError: rank 1 (node 0, local rank 1) failed first: BoomError: the cause\n"
        "On this rank it showed as: Connection closed by peer [127.0.0.1]"
    )
    assert cause.text == "BoomError: the cause"


def _fails_with(message: str) -> Outcome:
    def work(_: FailureWatch) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError(message)
        compute(_)

    return run(work)


def test_an_error_of_its_own_does_not_wait() -> None:
    own, _ = values(run_ranks(_fails_with, 2, args=("shapes do not match",), init_process_group="gloo"))
    assert own.text == "RuntimeError: shapes do not match"
    assert own.seconds < 1.5


def _nobody_reads() -> tuple[float, bool]:
    failure.ACK_SECONDS = 0.5
    watching = watch()
    if dist.get_rank() == 1:
        dist.barrier()
        return 0.0, True
    started = time.monotonic()
    watching.on_exception(BoomError("unheard"))
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds, True


def test_a_rank_that_nobody_hears_goes_on_after_a_while() -> None:
    (seconds, _), _ = values(run_ranks(_nobody_reads, 2, init_process_group="gloo"))
    assert 0.4 < seconds < 2


def _the_store_is_frozen() -> tuple[float, str]:
    failure.ACK_SECONDS = failure.LATE_POST_SECONDS = 0.2
    store = dist.distributed_c10d._get_default_store()
    watching = watch()
    if dist.get_rank() == 0:
        store.set("holder", str(os.getpid()))
        dist.barrier()
        reach("holding the store")
        return 0.0, ""
    holder = int(store.get("holder"))
    dist.barrier()
    time.sleep(0.5)
    started = time.monotonic()
    exception = BoomError("alone")
    watching.on_exception(exception)
    seconds = time.monotonic() - started
    os.kill(holder, signal.SIGCONT)
    return seconds, str(exception)


def test_a_store_that_never_answers_keeps_nobody() -> None:
    # A machine that is frozen or cut off closes no connection, and asking its store has no timeout.
    results = run_ranks(
        _the_store_is_frozen, 2, init_process_group="gloo", signals={(0, "holding the store"): signal.SIGSTOP}
    )
    _, (seconds, message) = values(results)
    assert message == "alone"
    assert 1 < seconds < 4


# ---- stuck -----------------------------------------------------------------------------------------------------------


def _posts_and_stays(grace_seconds: float) -> Outcome:
    def work(_: FailureWatch) -> None:
        if dist.get_rank() == 1:
            boom(_)
        sit_in_all_reduce(_)

    outcome = run(work, watch(grace_seconds=grace_seconds))
    time.sleep(3)  # its connections stay open, so that gloo notices nothing
    return outcome


def test_a_stuck_rank_ends_with_the_first_error_and_its_stacks() -> None:
    stuck, failing = run_ranks(_posts_and_stays, 2, args=(0.5,), init_process_group="gloo")
    assert failing.error is None
    assert stuck.exitcode == 1
    assert stuck.seconds < 3
    assert re.search(
        r"^rank 0 \(node 0, local rank 0\) is still stuck 0\.5 s after rank 1 \(node 0, local rank 1\) failed first: "
        r"BoomError: out of luck\nEnding the process\. Its stacks:$",
        stuck.output,
        re.MULTILINE,
    )
    assert "in sit_in_all_reduce" in stuck.output


def _ends_slowly() -> str:
    watching = watch(grace_seconds=0.3)
    watching.start()
    try:
        if dist.get_rank() == 1:
            boom(watching)
        compute(watching)
    except Exception as exception:  # noqa: BLE001 - as the Trainer does
        watching.on_exception(exception)
        time.sleep(1)  # a checkpoint that is still being uploaded
        return str(exception)
    finally:
        watching.close()
    return ""


def test_a_rank_that_is_on_its_way_out_may_take_its_time() -> None:
    told, _ = values(run_ranks(_ends_slowly, 2, init_process_group="gloo"))
    assert "failed first: BoomError: out of luck" in told


def _aborts() -> tuple[list[str], list[int], str]:
    """What happens on rank 0 while its main thread is in a collective that only an abort can end."""
    happened: list[str] = []
    ended: list[int] = []
    aborted = threading.Event()

    def abort() -> None:
        happened.append(threading.current_thread().name)
        aborted.set()

    watching = FailureWatch(
        world(),
        abort=abort,
        exit_process=ended.append,
        poll_seconds=POLL_SECONDS,
        grace_seconds=0.5,
    )

    def work(_: FailureWatch) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            boom(_)
        assert aborted.wait(10)
        raise RuntimeError("NCCL communicator was aborted")

    outcome = run(work, watching)
    time.sleep(1)
    return happened, ended, outcome.text


def test_collectives_are_aborted_and_a_rank_that_then_ends_by_itself_is_left_alone() -> None:
    (happened, ended, text), (on_failing, _, _) = values(run_ranks(_aborts, 2, init_process_group="gloo"))
    assert happened == ["air-failure-abort"]
    assert ended == []
    assert "failed first: BoomError: out of luck\nOn this rank it showed as: NCCL communicator was aborted" in text
    assert on_failing == []  # nobody aborts the rank that knows


def _abort_fails(how: str) -> list[int]:
    release = threading.Event()

    def abort() -> None:
        if how == "blocks":
            release.wait(20)
        else:
            # RuntimeError from a communicator, AssertionError from torch when the group has gone meanwhile.
            raise {"RuntimeError": RuntimeError, "AssertionError": AssertionError}[how]("no communicator")

    if how == "blocks":
        sys.stderr = io.StringIO()  # a notebook's or a logger's: it has no file descriptor

    ended: list[int] = []
    done = threading.Event()

    def exit_process(code: int) -> None:
        ended.append(code)
        done.set()

    watching = FailureWatch(
        world(),
        abort=abort,
        exit_process=exit_process,
        poll_seconds=POLL_SECONDS,
        grace_seconds=0.2,
    )

    def work(_: FailureWatch) -> None:
        if dist.get_rank() == 1:
            boom(_)
        assert done.wait(10)

    run(work, watching)
    release.set()
    sys.stderr = sys.__stderr__
    return ended


@pytest.mark.parametrize("how", ["RuntimeError", "AssertionError", "blocks"])
def test_an_abort_that_fails_does_not_save_a_stuck_rank(how: str) -> None:
    results = run_ranks(_abort_fails, 2, args=(how,), init_process_group="gloo")
    ended, _ = values(results)
    assert ended == [1]
    assert ("no communicator" in results[0].output) == (how != "blocks")
    assert "is still stuck" in results[0].output


# ---- a normal end ----------------------------------------------------------------------------------------------------


def _ends_normally() -> tuple[str | None, list[str], list[str]]:
    watching = watch()
    running: list[str] = []

    def work(_: FailureWatch) -> None:
        finish(_)
        running.extend(thread.name for thread in threading.enumerate())

    outcome = run(work, watching)
    watching.close()  # a second time
    return outcome.error, running, [thread.name for thread in threading.enumerate()]


def test_a_normal_end_raises_nothing_and_leaves_no_thread() -> None:
    for error, running, left in values(run_ranks(_ends_normally, 2, init_process_group="gloo")):
        assert error is None
        assert running.count(THREAD) == 1
        assert THREAD not in left


def _says_what_is_left(work: Work) -> list[str]:
    run(boom if dist.get_rank() == 1 else work)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("air-")]


def test_a_failure_leaves_no_thread() -> None:
    assert values(run_ranks(_says_what_is_left, 2, args=(compute,), init_process_group="gloo")) == [[], []]


def _is_never_started() -> bool:
    watching = watch()
    watching.close()
    watching.raise_if_another_failed()
    return True


def test_closing_what_was_never_started() -> None:
    assert values(run_ranks(_is_never_started, 1, init_process_group="gloo")) == [True]


def _leaves_early(leaving_rank: int, then: Work) -> Outcome:
    def leave(_: FailureWatch) -> None:
        pass

    def stay(watching: FailureWatch) -> None:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            watching.raise_if_another_failed()
            time.sleep(0.01)
        then(watching)

    return run(leave if dist.get_rank() == leaving_rank else stay, watch(grace_seconds=0.2))


def nothing(_: FailureWatch) -> None:
    pass


@pytest.mark.parametrize("leaving_rank", [0, 1])
def test_a_rank_that_has_finished_disturbs_nobody(leaving_rank: int) -> None:
    results = run_ranks(_leaves_early, 2, args=(leaving_rank, nothing), init_process_group="gloo")
    assert [outcome.error for outcome in values(results)] == [None, None]


def test_without_a_store_an_error_is_still_its_own() -> None:
    # Given rank 0 gone, and the store with it, when rank 1 fails, then it is not delayed and not changed.
    results = run_ranks(_leaves_early, 2, args=(0, boom), init_process_group="gloo")
    _, outcome = values(results)
    assert outcome.text == "BoomError: out of luck"
    assert outcome.seconds < 1


def _runs_twice() -> list[str]:
    """A fit that fails on rank 1 and is caught, then one in which nobody fails."""
    first = run(boom if dist.get_rank() == 1 else compute)
    second = run(finish)
    return [first.text, second.text]


def test_a_failure_does_not_reach_the_next_fit() -> None:
    for first, second in values(run_ranks(_runs_twice, 2, init_process_group="gloo")):
        assert "BoomError: out of luck" in first
        assert second == ""


def test_a_failure_does_not_outlive_its_group() -> None:
    # Given a store that stays, as torchrun's agent keeps it, and a user who makes the groups in it.
    store = dist.HashStore()
    heard = []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        alone = Membership(global_rank=0, world_size=1, ranks_per_node=1, address="", port=0)
        watching = FailureWatch(enter_world(alone, timedelta(seconds=5)), abort=lambda: None)
        watching.start()
        heard.append(watching._failure)
        watching._post(Failure(1, "rank 1", "BoomError: x"))
        watching.close()
        dist.destroy_process_group()
    assert heard == [None, None]


# ---- pure parts ------------------------------------------------------------------------------------------------------


def test_a_failure_reads_as_a_sentence() -> None:
    assert str(Failure(9, "rank 9 (node 1, local rank 1)", "ValueError: boom")) == (
        "rank 9 (node 1, local rank 1) failed first: ValueError: boom"
    )


@pytest.mark.parametrize(
    ("exception", "says"),
    [
        (RuntimeError("gloo"), "F\nOn this rank it showed as: gloo"),
        (RuntimeError("a", "b"), None),
        (RuntimeError(), None),
        (BoomError("mine"), None),
        (OSError(5, "mine"), None),
        (KeyboardInterrupt(), None),
    ],
    ids=repr,
)
def test_the_first_error_is_put_into_the_message_or_beside_it(
    exception: BaseException, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failure, "__str__", lambda _: "F")
    before = str(exception)
    for _ in range(2):  # `on_exception` may be called again
        failure._explain(exception, Failure(1, "rank 1", "BoomError: x"))
    if says is not None:
        assert str(exception) == says
        assert not hasattr(exception, "__notes__")
    else:
        assert str(exception) == before
        assert exception.__notes__[0] == "F"


def test_what_is_posted_is_plain_json() -> None:
    # Another rank reads it, maybe with another version of the package.
    store = dist.HashStore()
    alone = Membership(global_rank=0, world_size=1, ranks_per_node=1, address="", port=0)
    watching = FailureWatch(World(alone, store), abort=lambda: None)
    posted = watching._post(Failure(0, "rank 0", "BoomError: é"))
    assert posted == Failure(0, "rank 0", "BoomError: é")
    assert watching._post(Failure(1, "rank 1", "later")) == posted
    assert json.loads(watching._store.get("first")) == {
        "global_rank": 0,
        "where": "rank 0",
        "error": "BoomError: é",
    }


def test_the_module_names_its_defaults_in_its_docstring() -> None:
    assert failure.__doc__ is not None
    assert f"{failure.POLL_SECONDS + failure.GRACE_SECONDS:g} s" in failure.__doc__
