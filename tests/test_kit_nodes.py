"""Nodes have networks of their own, processes of their own, and the environment of an AI Runtime command."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kit.node_commands import run_node_commands
from tests.kit.nodes import Namespace, namespaces_unavailable, network_namespaces
from tests.kit.points import reach
from tests.kit.processes import assert_ends
from tests.kit.ranks import run_ranks, values


def _sum_over_nodes() -> tuple[float, list[str]]:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return float(tensor), sorted(name for _, name in socket.if_nameindex())


def test_two_nodes_reduce_over_gloo_between_their_networks(two_networks: list[Namespace]) -> None:
    results = run_ranks(_sum_over_nodes, 2, nodes=2, namespaces=two_networks, init_process_group="gloo")
    assert values(results) == [(3.0, ["eth0", "lo"])] * 2


def _reach_other_node(addresses: list[str]) -> str:
    node_rank = int(os.environ["NODE_RANK"])
    other = addresses[1 - node_rank]
    with socket.create_server((addresses[node_rank], 4000)) as server:
        dist.barrier()
        with socket.create_connection((other, 4000), timeout=10.0), server.accept()[0] as connection:
            peer: str = connection.getpeername()[0]
            return peer


def test_nodes_have_addresses_of_their_own(two_networks: list[Namespace]) -> None:
    addresses = [namespace.address for namespace in two_networks]
    results = run_ranks(
        _reach_other_node, 2, args=(addresses,), nodes=2, namespaces=two_networks, init_process_group="gloo"
    )
    assert values(results) == addresses[::-1]


def _connect(port: int) -> str:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def test_a_node_does_not_see_the_machines_own_network(two_networks: list[Namespace]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert _connect(port) == "connected"
        outside = run_ranks(_connect, 2, args=(port,), nodes=2, namespaces=two_networks)
    assert values(outside) == ["ConnectionRefusedError"] * 2


def test_networks_are_removed_whatever_happens() -> None:
    if (reason := namespaces_unavailable()) is not None:
        pytest.skip(reason)
    with pytest.raises(KeyboardInterrupt), network_namespaces(3) as namespaces:
        _interrupt_among(namespaces)
    assert not any(str(os.getpid()) in path.name for path in Path("/var/run/netns").iterdir())


def _interrupt_among(namespaces: list[Namespace]) -> None:
    for namespace in namespaces:
        assert str(os.getpid()) in namespace.name
        assert Path("/var/run/netns", namespace.name).exists()
    raise KeyboardInterrupt


def test_networks_of_a_killed_session_are_removed() -> None:
    if (reason := namespaces_unavailable()) is not None:
        pytest.skip(reason)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = f"airtest-{ended.pid}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with network_namespaces(1):
        assert not Path("/var/run/netns", left).exists()


def test_why_there_are_no_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    namespaces_unavailable.cache_clear()
    try:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        assert namespaces_unavailable() == "network namespaces need root"
    finally:
        namespaces_unavailable.cache_clear()


def _group() -> int:
    return os.getpgrp()


def test_the_ranks_of_a_node_form_a_process_group() -> None:
    groups = values(run_ranks(_group, 4, nodes=2))
    assert groups[0] == groups[1] != groups[2] == groups[3]
    alone = values(run_ranks(_group, 2))
    assert alone[0] != alone[1]


def _lose_node_1() -> str:
    if (os.environ["NODE_RANK"], os.environ["LOCAL_RANK"]) == ("1", "0"):
        os.killpg(0, signal.SIGKILL)
    time.sleep(0.5 if os.environ["NODE_RANK"] == "0" else 60.0)
    reach("never armed")
    return "survived"


def test_a_whole_node_can_be_lost() -> None:
    results = run_ranks(_lose_node_1, 4, nodes=2, timeout_seconds=30.0)
    assert [result.exitcode for result in results] == [0, 0, -9, -9]
    assert [result.value for result in results] == ["survived", "survived", None, None]


_PRINT_VARIABLES = """
import os
names = ["NUM_NODES", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "CODE_SOURCE_PATH"]
print([os.environ.get(name) for name in names], os.environ["MASTER_ADDR"])
"""


def test_a_node_command_finds_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    results = run_node_commands(
        [sys.executable, "-c", _PRINT_VARIABLES], nodes=2, ranks_per_node=8, env={"CODE_SOURCE_PATH": "/code"}
    )
    assert [result.output for result in results] == [
        f"['2', '{node_rank}', '16', '8', None, None, '/code'] 127.0.0.1\n" for node_rank in (0, 1)
    ]
    assert [(result.returncode, result.is_timed_out) for result in results] == [(0, False)] * 2


def test_a_node_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = f'if [ "$NODE_RANK" = 1 ]; then sleep 60 & echo $! > {tmp_path}/pid; wait; else exit 3; fi'
    done, late = run_node_commands(["sh", "-c", script], nodes=2, ranks_per_node=1, timeout_seconds=1.0)
    assert (done.returncode, done.is_timed_out) == (3, False)
    assert (late.returncode, late.is_timed_out) == (-9, True)
    assert_ends(int((tmp_path / "pid").read_text()))


def test_node_commands_run_in_their_networks(two_networks: list[Namespace]) -> None:
    results = run_node_commands(
        ["ip", "-brief", "address", "show", "dev", "eth0"], nodes=2, ranks_per_node=1, namespaces=two_networks
    )
    for namespace, result in zip(two_networks, results, strict=True):
        assert namespace.address in result.output
