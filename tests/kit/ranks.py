"""Run a function in real processes, one per rank, and get back what each returned, raised and printed.

`run_ranks` never raises for a rank's failure and never leaves a process behind: a test states which ranks it expects
to fail. `values` is for the tests in which none may.
"""

import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit.environment import (
    EnvironmentOverrides,
    Placement,
    current_environment,
    distributed_variables,
    node_command_variables,
    overridden,
    reserved_port,
)
from tests.kit.nodes import Namespace
from tests.kit.rank_process import RankTask
from tests.kit.running_rank import RankResult, RunningRank, end_ranks, start_ranks, wait_for_ranks

__all__ = ["RankResult", "run_ranks", "values"]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    nodes: int = 1,
    namespaces: Sequence[Namespace] | None = None,
    env: EnvironmentOverrides | Callable[[int], EnvironmentOverrides] | None = None,
    signals: Mapping[tuple[int, str], signal.Signals] | None = None,
    init_process_group: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 60.0,
    warnings_as_errors: bool = True,
) -> list[RankResult]:
    """Run `fn(*args)` once per rank, each in a process of its own, and return their results in order of rank.

    Args:
        fn: A function at the top of a module; it may return whatever can be pickled.
        world_size: How many ranks, over all nodes.
        args: Passed to every rank, pickled.
        nodes: With 1, a rank finds the variables that Databricks' `@distributed` sets. With more, it finds those of an
            AI Runtime command (no `RANK`) plus the `LOCAL_RANK` of that node's launcher, and the ranks of one node
            form an operating-system process group, so that `os.killpg(0, ...)` hits the node.
        namespaces: The network namespace of each node, from `tests.kit.nodes.network_namespaces`.
        env: Variables to add, or to remove (None), for all ranks or by rank. Those that torch reads when it is
            imported have no effect: the fork server has imported it.
        signals: By (rank, point): what the rank sends itself when it gets to `tests.kit.points.reach(point)`.
        init_process_group: The backend of a process group around `fn`, such as "gloo"; None for no group.
        cwd: Where the ranks start; by default in an empty directory, removed afterwards.
        timeout_seconds: After this long, ranks that still run print the stacks of their threads and are killed.
        warnings_as_errors: Whether warnings, and exceptions in threads and finalizers, fail the rank, as in pytest.

    Returns:
        One result per rank.

    Raises:
        ValueError: If the ranks cannot be spread evenly over the nodes.
    """
    if world_size < 1 or nodes < 1 or world_size % nodes:
        raise ValueError(f"world_size must be a positive multiple of nodes, got {world_size} ranks on {nodes} nodes")
    if namespaces is not None and len(namespaces) != nodes:
        raise ValueError(f"namespaces must be one per node, got {len(namespaces)} for {nodes} nodes")
    call = pickle.dumps((fn, tuple(args)))
    base = current_environment() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch, reserved_port() as port:
        start_dir = Path(scratch, "cwd")
        start_dir.mkdir()

        def task_of(global_rank: int, group_pid: int) -> RankTask:
            placement = Placement(global_rank=global_rank, world_size=world_size, num_nodes=nodes)
            namespace = namespaces[placement.node_rank] if namespaces else None
            launched = _launch_variables(placement, namespaces, port)
            return RankTask(
                placement=placement,
                call=call,
                environment=overridden(base | launched, env, global_rank),
                cwd=str(cwd or start_dir),
                output_path=str(Path(scratch, f"output-{global_rank}")),
                group_pid=group_pid,
                namespace=namespace.name if namespace else None,
                signals={name: number for (rank, name), number in (signals or {}).items() if rank == global_rank},
                backend=init_process_group,
                timeout_seconds=timeout_seconds,
                warnings_as_errors=warnings_as_errors,
            )

        ranks: list[RunningRank] = []
        try:
            start_ranks(task_of, world_size, ranks_per_group=world_size // nodes if nodes > 1 else 1, ranks=ranks)
            wait_for_ranks(ranks, timeout_seconds)
        finally:
            results = end_ranks(ranks)
        return results


def values(results: Sequence[RankResult]) -> list[Any]:
    """Return each rank's value.

    Raises:
        AssertionError: If a rank failed; it shows every failed rank's error and output.
    """
    failed = [result for result in results if result.error is not None]
    if failed:
        raise AssertionError(
            f"{len(failed)} of {len(results)} ranks failed"
            + "".join(
                f"\n\n== rank {result.rank}: exit code {result.exitcode} after {result.seconds:.2f} s ==\n"
                f"{result.error}\n-- output of rank {result.rank} --\n{result.output}"
                for result in failed
            )
        )
    return [result.value for result in results]


def _launch_variables(placement: Placement, namespaces: Sequence[Namespace] | None, port: int) -> dict[str, str]:
    address = namespaces[0].address if namespaces else "127.0.0.1"
    if placement.num_nodes == 1:
        variables = distributed_variables(placement, address, port)
    else:
        variables = node_command_variables(placement, address, port)
        variables["LOCAL_RANK"] = str(placement.local_rank)
    if namespaces:
        # Gloo would look up the address of the host's name, which is outside of every namespace.
        variables["GLOO_SOCKET_IFNAME"] = namespaces[placement.node_rank].interface
    return variables
