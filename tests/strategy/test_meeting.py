"""The ranks meet, or say who is missing and who differs, in time; and Ctrl-C ends the wait."""

import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_air.strategy import meeting
from lightning_air.strategy.membership import Membership
from tests.kit.points import reach
from tests.kit.ranks import run_ranks, values
from tests.strategy.joining import join_here, membership, summed


def test_a_rank_is_described_by_its_node() -> None:
    described = Membership(global_rank=0, world_size=16, ranks_per_node=8, address="a", port=1).describe
    assert described(9) == "rank 9 (node 1, local rank 1)"
    assert described(0) == "rank 0 (node 0, local rank 0)"


# ---- who does not come -----------------------------------------------------------------------------------------------


def outcome(join_seconds: float, **changes: Any) -> str:
    """How this rank's attempt to join ends."""
    try:
        join_here(join_seconds=join_seconds, **changes)
    except RuntimeError as error:
        return str(error)
    return "joined"


def _joins_unless(absent: list[int]) -> str | None:
    return None if membership().global_rank in absent else outcome(1)


@pytest.mark.parametrize(
    ("world_size", "nodes", "absent", "named"),
    [
        (2, 1, [1], "1 of 2 ranks did not join within 1 s: rank 1 (node 0, local rank 1). "),
        (
            4,
            2,
            [1, 3],
            "2 of 4 ranks did not join within 1 s: rank 1 (node 0, local rank 1), rank 3 (node 1, local rank 1). ",
        ),
    ],
)
def test_missing_ranks_are_named_on_every_rank_that_came(
    world_size: int, nodes: int, absent: list[int], named: str
) -> None:
    results = run_ranks(_joins_unless, world_size, nodes=nodes, args=(absent,))
    for rank, message in enumerate(values(results)):
        if rank not in absent:
            assert message == named + "See their logs, or raise join_timeout if their start is slow."
            assert results[rank].seconds < 5


def _rank_zero_is_gone_at_once() -> str | None:
    message = _joins_unless([3])
    if membership().global_rank == 0:
        os._exit(7)  # and the store with it
    return message


def test_rank_0_stays_until_the_others_know_who_is_missing() -> None:
    rank_zero, *came, _ = run_ranks(_rank_zero_is_gone_at_once, 4)
    assert rank_zero.exitcode == 7
    for message in values(came):
        assert message.startswith("1 of 4 ranks did not join within 1 s: rank 3 (node 0, local rank 3). ")


def test_a_missing_rank_0_is_named_with_its_address() -> None:
    results = run_ranks(_joins_unless, 3, args=([0],))
    for result, message in list(zip(results, values(results), strict=True))[1:]:
        assert re.match(
            r"No answer from rank 0 \(node 0, local rank 0\) at 127\.0\.0\.1:\d+ within 1 s: .+\. See its log; check "
            r"that MASTER_ADDR and MASTER_PORT are the same on every rank and reachable\.$",
            message,
        )
        assert result.seconds < 8


def _joins_late(seconds: list[float], join_seconds: float, at_an_agent: bool) -> int:
    meeting._GRACE_SECONDS = 0.5
    rank = membership().global_rank
    agent = (
        at_an_agent
        and rank == 0
        and dist.TCPStore("127.0.0.1", membership().port, is_master=True, wait_for_workers=False)
    )
    time.sleep(seconds[rank])
    join_here(join_seconds=join_seconds, agent_hosts_store=at_an_agent)
    total = summed(1)
    del agent
    return total


def test_a_late_rank_is_waited_for() -> None:
    assert values(run_ranks(_joins_late, 2, args=([0.0, 1.0], 10, False))) == [2, 2]


@pytest.mark.parametrize("at_an_agent", [False, True])
def test_a_rank_that_waits_for_rank_0_waits_for_its_roll_call_too(at_an_agent: bool) -> None:
    # Given rank 0, who comes late but in time, and rank 2, who is in time for rank 0 only.
    assert values(run_ranks(_joins_late, 3, args=([2.0, 0.0, 4.5], 3, at_an_agent))) == [3, 3, 3]


def _joins_where_the_port_is_taken() -> str:
    here = membership()
    with socket.socket() as holder:
        if here.global_rank == 0:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", here.port))
            holder.listen()
        return outcome(1)


def test_a_port_in_use_is_told_with_its_number() -> None:
    rank_zero, rank_one = values(run_ranks(_joins_where_the_port_is_taken, 2))
    assert re.match(r"Rank 0 cannot listen on 127\.0\.0\.1:\d+: .*port: \d+.*\. If the port is in use, ", rank_zero)
    assert "EADDRINUSE" in rank_zero
    assert "set MASTER_PORT to a free one on every rank" in rank_zero
    assert "No answer from rank 0 (node 0, local rank 0) at 127.0.0.1:" in rank_one


def _joins_what_is_no_store_as_rank_1(at_an_agent: bool) -> tuple[str, float]:
    meeting._GRACE_SECONDS = 0.5
    started = time.monotonic()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        message = outcome(1, global_rank=1, world_size=2, port=port, agent_hosts_store=at_an_agent)
    return message, time.monotonic() - started


@pytest.mark.parametrize(
    ("at_an_agent", "host"), [(False, r"rank 0 \(node 0, local rank 0\)"), (True, "the launcher's agent")]
)
def test_a_port_that_another_program_holds_is_told_in_time(at_an_agent: bool, host: str) -> None:
    ((message, seconds),) = values(run_ranks(_joins_what_is_no_store_as_rank_1, 1, args=(at_an_agent,)))
    assert re.match(rf"No answer from {host} at 127\.0\.0\.1:\d+ within 1 s: what listens there took", message)
    assert seconds < 5


def _joins_at_a_store_that_freezes() -> tuple[str, float]:
    meeting._GRACE_SECONDS = 0.5
    here = membership()
    if here.global_rank == 0:
        agent = dist.TCPStore("127.0.0.1", here.port, is_master=True, wait_for_workers=False)
        agent.set("holder", str(os.getpid()))
        agent.wait(["joining"])
        time.sleep(0.5)
        reach("the others wait")
        return "", 0.0
    store = dist.TCPStore("127.0.0.1", here.port, is_master=False)
    holder = int(store.get("holder"))
    store.set("joining", "1")
    started = time.monotonic()
    message = outcome(1, agent_hosts_store=True)
    seconds = time.monotonic() - started
    os.kill(holder, signal.SIGCONT)
    return message, seconds


def test_a_store_that_stops_answering_is_told_in_time() -> None:
    results = run_ranks(_joins_at_a_store_that_freezes, 2, signals={(0, "the others wait"): signal.SIGSTOP})
    message, seconds = values(results)[1]
    assert re.match(r"The store of the launcher's agent at 127\.0\.0\.1:\d+ has stopped answering\.", message)
    assert seconds < 5


def test_a_silent_agent_is_told_as_such() -> None:
    with pytest.raises(RuntimeError, match=r"^No answer from the launcher's agent at 127\.0\.0\.1:1 within 1 s: "):
        meeting.meet(
            Membership(
                global_rank=1, world_size=2, ranks_per_node=2, address="127.0.0.1", port=1, agent_hosts_store=True
            ),
            timedelta(seconds=1),
        )


# ---- who differs -----------------------------------------------------------------------------------------------------


def _joins_with_another_plan() -> str:
    return outcome(5, plan="sharding='fsdp'" if membership().global_rank == 1 else "sharding='ddp'")


def test_ranks_with_other_options_are_told_apart_on_every_rank() -> None:
    (message,) = set(values(run_ranks(_joins_with_another_plan, 3)))
    assert message.startswith("Rank 1 has world size 3, sharding='fsdp' and rank 0 has world size 3, sharding='ddp'. ")
    assert message.endswith("Start every rank with the same environment and the same options.")


def _joins_a_world_of(sizes: list[int]) -> str:
    size = sizes[membership().global_rank]
    return outcome(2, world_size=size, ranks_per_node=size)


@pytest.mark.parametrize(
    ("sizes", "differ"),
    [
        ([2, 3, 3], "Rank 1 has world size 3 and rank 0 has world size 2."),
        # The ranks that rank 0 misses do not exist.
        ([4, 2], "Rank 1 has world size 2 and rank 0 has world size 4."),
    ],
    ids=str,
)
def test_ranks_that_disagree_on_the_world_size_are_told_apart(sizes: list[int], differ: str) -> None:
    (message,) = set(values(run_ranks(_joins_a_world_of, len(sizes), args=(sizes,)))[:2])
    assert message.startswith(f"{differ} Start every rank with the same environment and the same options.")
    assert ("2 of 4 ranks did not join within 2 s: rank 2 (node 0" in message) == (sizes[0] == 4)


def _joins_and_stays_until_told(sizes: list[int], told: Path) -> str:
    message = _joins_a_world_of(sizes)
    if membership().global_rank == 2:
        told.touch()
    deadline = time.monotonic() + 10
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return message


def test_a_rank_beyond_the_world_of_rank_0_is_told_so(tmp_path: Path) -> None:
    args = ([2, 2, 3], tmp_path / "told")
    *joined, beyond = values(run_ranks(_joins_and_stays_until_told, 3, args=args))
    assert joined == ["joined", "joined"]
    assert beyond.startswith("Rank 2 has world size 3 and rank 0 has world size 2. ")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def _is_interrupted(rank: int, at_an_agent: bool) -> tuple[float, list[str]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here = membership(global_rank=rank, world_size=2, agent_hosts_store=at_an_agent)
    agent = at_an_agent and dist.TCPStore("127.0.0.1", here.port, is_master=True, wait_for_workers=False)
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    started = time.monotonic()
    timer.start()
    try:
        join_here(join_seconds=30, global_rank=rank, world_size=2, agent_hosts_store=at_an_agent)
    except KeyboardInterrupt:  # as in a notebook, where the traceback stays, and all that it holds
        del agent
        seconds = time.monotonic() - started
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", here.port))
        return seconds, [thread.name for thread in threading.enumerate() if thread.name.startswith("air-")]
    raise AssertionError("nobody has heard of it")


@pytest.mark.parametrize(
    ("rank", "at_an_agent"),
    [
        pytest.param(0, False, id="waiting for rank 1"),
        pytest.param(1, False, id="waiting for the store"),
        pytest.param(1, True, id="waiting for rank 0 in the store"),
    ],
)
def test_ctrl_c_ends_the_wait_its_thread_and_the_store(rank: int, at_an_agent: bool) -> None:
    # A thread that stayed would come back from C++ when the interpreter is gone, and abort the process.
    ((seconds, threads),) = values(run_ranks(_is_interrupted, 1, args=(rank, at_an_agent)))
    assert seconds < 2
    assert threads == []


# ---- joining again ---------------------------------------------------------------------------------------------------


def _joins_three_times(slow_rank: int) -> list[tuple[bool, int]]:
    found = []
    for number in range(3):
        found.append((join_here(join_seconds=5), summed(number)))
        if dist.get_rank() == slow_rank:
            time.sleep(0.5)  # the others join again while this one is still in the old group
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_ranks_join_again_after_the_group_was_destroyed(slow_rank: int) -> None:
    # Rank 0 holds the store: a rank that comes back too soon finds the old one, in which everybody is present.
    expected = [(True, 0), (True, 2), (True, 4)]
    assert values(run_ranks(_joins_three_times, 2, args=(slow_rank,))) == [expected, expected]


def _joins_again_beside_an_old_store() -> list[int]:
    found = []
    kept = []  # by a strategy that lives on, or a debugger
    for number in range(3):
        join_here(join_seconds=5)
        found.append(summed(number))
        kept.append(dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
    return found


def test_ranks_join_again_while_the_old_store_lives() -> None:
    assert values(run_ranks(_joins_again_beside_an_old_store, 2)) == [[0, 2, 4]] * 2


def _joins_at_an_agent(port: int, attempt: int) -> int:
    join_here(join_seconds=5, address="127.0.0.1", port=port, agent_hosts_store=True, attempt=attempt)
    total = summed(attempt)
    sys.stdout.flush()
    os._exit(total)  # no goodbye: the group's addresses stay in the agent's store


def test_restarted_ranks_find_each_other_and_not_their_predecessors() -> None:
    # torchrun's agent keeps its store for all attempts.
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(4):
        results = run_ranks(_joins_at_an_agent, 2, args=(agent.port, attempt))
        assert [result.exitcode for result in results] == [2 * attempt, 2 * attempt], results
