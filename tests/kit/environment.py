"""The environment variables of a rank: what Databricks' launchers set, and nothing that is left from ours."""

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

EnvironmentOverrides = Mapping[str, str | None]
"""Variables to set; None removes one."""

_LAUNCH_NAMES = {
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "NUM_NODES",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
}
_LAUNCH_PREFIXES = (
    "CODE_SOURCE_",
    "JSM_",
    "KUBEFLOW_",
    "LSB_",
    "MASTER_",
    "MLFLOW_",
    "OMPI_",
    "PMI_",
    "SLURM_",
    "TORCHELASTIC_",
    "_MLFLOW_",
)

# Below the range that the kernel hands out for outgoing connections, so that none takes the port meanwhile.
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one rank runs."""

    global_rank: int
    world_size: int
    num_nodes: int = 1

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.num_nodes

    @property
    def node_rank(self) -> int:
        return self.global_rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        return self.global_rank % self.local_world_size


def without_launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a launcher, a scheduler or an MLflow setup around the tests has set."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCH_NAMES and not name.startswith(_LAUNCH_PREFIXES)
    }


def distributed_variables(placement: Placement, master_address: str, master_port: int) -> dict[str, str]:
    """Return what Databricks' `@distributed` sets in each of its processes."""
    return {
        "RANK": str(placement.global_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "NODE_RANK": str(placement.node_rank),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
    }


def node_command_variables(placement: Placement, master_address: str, master_port: int) -> dict[str, str]:
    """Return what AI Runtime sets for the one command that it runs on each node: no `RANK`, no `LOCAL_RANK`."""
    return {
        "NUM_NODES": str(placement.num_nodes),
        "NODE_RANK": str(placement.node_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
    }


def overridden(
    environment: Mapping[str, str],
    overrides: EnvironmentOverrides | Callable[[int], EnvironmentOverrides] | None,
    index: int,
) -> dict[str, str]:
    """Return the environment with the overrides for this rank or node applied."""
    changes = overrides(index) if callable(overrides) else overrides or {}
    merged = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port that is free, and that no other test session picks while the block runs."""
    for port in random.Random().sample(_PORTS, k=len(_PORTS)):  # seeded by the system, whatever a test has seeded
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        with socket.socket() as holder:
            # A port held this way can still be listened on by a rank, but the probe of another session fails.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("", port))
            except OSError:
                continue
            yield port
            return
    raise RuntimeError(f"no free TCP port in {_PORTS}")


def current_environment() -> dict[str, str]:
    """Return this process' environment as a rank may inherit it."""
    return {
        name: value for name, value in without_launch_variables(os.environ).items() if not name.startswith("PYTEST_")
    }
