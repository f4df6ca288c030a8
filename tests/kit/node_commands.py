"""Run a real command once per node, as AI Runtime does, for the few tests that go from end to end."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.environment import (
    EnvironmentOverrides,
    Placement,
    current_environment,
    node_command_variables,
    overridden,
    reserved_port,
)
from tests.kit.nodes import Namespace


@dataclass(frozen=True)
class NodeResult:
    """What became of the command on one node."""

    node_rank: int
    returncode: int
    """As for `subprocess`: minus the signal for a killed process."""
    output: str
    """Standard output and error."""
    seconds: float
    is_timed_out: bool


def run_node_commands(
    argv: Sequence[str],
    *,
    nodes: int,
    ranks_per_node: int,
    namespaces: Sequence[Namespace] | None = None,
    env: EnvironmentOverrides | Callable[[int], EnvironmentOverrides] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 60.0,
) -> list[NodeResult]:
    """Run the command on every node at once, and return what became of it, in order of node.

    It finds the variables that AI Runtime sets for a command: no `RANK`, no `LOCAL_RANK`. Whatever processes it leaves
    are killed.

    Args:
        argv: The command and its arguments.
        nodes: How many.
        ranks_per_node: How many ranks the command will start on each.
        namespaces: The network namespace of each node, from `tests.kit.nodes.network_namespaces`.
        env: Variables to add, or to remove (None), for all nodes or by node rank.
        cwd: Where the commands start; by default in an empty directory, removed afterwards.
        timeout_seconds: After this long, a command that still runs is killed with all that it started.

    Raises:
        OSError: If the command cannot be started.
        ValueError: If the namespaces are not one per node.
    """
    if namespaces is not None and len(namespaces) != nodes:
        raise ValueError(f"namespaces must be one per node, got {len(namespaces)} for {nodes} nodes")
    address = namespaces[0].address if namespaces else "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch, reserved_port() as port:
        start_dir = Path(scratch, "cwd")
        start_dir.mkdir()
        started_seconds = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [Path(scratch, f"output-{node_rank}") for node_rank in range(nodes)]
        try:
            for node_rank in range(nodes):
                placement = Placement(
                    global_rank=node_rank * ranks_per_node, world_size=nodes * ranks_per_node, num_nodes=nodes
                )
                variables = current_environment() | node_command_variables(placement, address, port)
                namespace = namespaces[node_rank] if namespaces else None
                if namespace is not None:
                    variables["GLOO_SOCKET_IFNAME"] = namespace.interface
                variables = overridden(variables, env, node_rank)
                processes.append(_start(argv, variables, cwd or start_dir, outputs[node_rank], namespace))
            ends = [_wait(process, started_seconds + timeout_seconds) for process in processes]
        finally:
            for process in processes:
                _kill_group(process)
        return [
            NodeResult(
                node_rank, process.returncode, output.read_text(errors="replace"), end - started_seconds, is_late
            )
            for node_rank, (process, output, (end, is_late)) in enumerate(zip(processes, outputs, ends, strict=True))
        ]


def _start(
    argv: Sequence[str],
    variables: dict[str, str],
    cwd: str | os.PathLike[str],
    output_path: Path,
    namespace: Namespace | None,
) -> subprocess.Popen[bytes]:
    prefix = ["ip", "netns", "exec", namespace.name] if namespace is not None else []
    with output_path.open("wb") as output:
        return subprocess.Popen(
            [*prefix, *argv],
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(process: subprocess.Popen[bytes], deadline_seconds: float) -> tuple[float, bool]:
    """Return when the process ended (or the time was over), and whether the time was over."""
    try:
        process.wait(timeout=max(0.0, deadline_seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        return time.monotonic(), True
    return time.monotonic(), False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
