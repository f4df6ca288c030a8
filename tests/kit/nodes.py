"""Several nodes on one machine: network namespaces that see each other, and nothing else."""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NAMESPACES_DIR = Path("/var/run/netns")
_PREFIX = "airtest"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Namespace:
    """The network of one node."""

    name: str
    address: str
    interface: str


def enter_namespace(name: str) -> None:
    """Move the calling thread, and every thread and process it starts from now on, into the namespace."""
    descriptor = os.open(_NAMESPACES_DIR / name, os.O_RDONLY)
    try:
        # os.setns needs Python 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter network namespace {name!r}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


@functools.cache
def namespaces_unavailable() -> str | None:
    """Return why this machine gives no network namespaces, for `pytest.skip`; None where it does."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command of iproute2"
    try:
        with network_namespaces(1):
            return None
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def network_namespaces(num_nodes: int) -> Iterator[list[Namespace]]:
    """Make one network namespace per node, joined by a bridge in one more, and remove them at the end.

    The machine's own network is not touched: the bridge is in a namespace too. So the addresses are free, whatever
    else runs here.

    Args:
        num_nodes: How many, up to 250.

    Yields:
        The namespaces, in order of node; node 0 holds the master address.

    Raises:
        RuntimeError: If the machine does not allow it; see `namespaces_unavailable`.
    """
    _remove_namespaces_of_dead_sessions()
    hub = f"{_PREFIX}-{os.getpid()}-hub"
    nodes = [
        Namespace(name=f"{_PREFIX}-{os.getpid()}-{node_rank}", address=f"10.213.0.{node_rank + 1}", interface="eth0")
        for node_rank in range(num_nodes)
    ]
    try:
        _ip(f"netns add {hub}")
        _ip("link add bridge0 type bridge", "link set bridge0 up", namespace=hub)
        for node_rank, node in enumerate(nodes):
            _ip(f"netns add {node.name}")
            _ip(
                f"link add port{node_rank} type veth peer name {node.interface} netns {node.name}",
                f"link set port{node_rank} master bridge0 up",
                namespace=hub,
            )
            _ip(
                "link set lo up",
                f"address add {node.address}/24 dev {node.interface}",
                f"link set {node.interface} up",
                namespace=node.name,
            )
        yield nodes
    finally:
        for name in [hub, *(node.name for node in nodes)]:
            if (_NAMESPACES_DIR / name).exists():
                _ip(f"netns delete {name}")


def _remove_namespaces_of_dead_sessions() -> None:
    """Remove what a killed test session has left."""
    for path in _NAMESPACES_DIR.glob(f"{_PREFIX}-*-*"):
        session_pid = path.name.split("-")[1]
        if not Path("/proc", session_pid).exists():
            _ip(f"netns delete {path.name}")


def _ip(*commands: str, namespace: str | None = None) -> None:
    arguments = ["ip", *(["-netns", namespace] if namespace else []), "-batch", "-"]
    outcome = subprocess.run(
        arguments, input="\n".join(commands) + "\n", capture_output=True, text=True, check=False, timeout=30
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"cannot set up network namespaces: {outcome.stderr.strip()} (ip {'; '.join(commands)})")
