"""How many ranks there are and which one this is: the launch decides what the user left open.

Lightning reads the launch for torchrun and SLURM only. On Databricks AIR it would start ranks beside those that are
there already, or number them twice (a forgotten `num_nodes` makes node 1's first rank number 8 in a world of 8).
"""

import sys
from collections.abc import Sequence

import torch
from typing_extensions import override

from lightning_air._lightning import ClusterEnvironment
from lightning_air.runtime import Launch, LaunchKind, detect_launch

# Kinds that Lightning has no environment for. Torchrun's and SLURM's it has; locally its default one is right.
AIR_KINDS = ("air-node", "air-process")

_LEFT_BEHIND = "Unset WORLD_SIZE and LOCAL_RANK if another launch has left them behind, or pass devices and num_nodes."
# What helps where the launch does not read LOCAL_WORLD_SIZE.
_ADVICE: dict[LaunchKind, str] = {
    "local": _LEFT_BEHIND,
    "notebook": _LEFT_BEHIND,
    "slurm": "Correct SLURM_TASKS_PER_NODE: it has to list the tasks of every node, such as '2(x3),1'.",
}


def current_launch() -> Launch:
    """Return what the environment says now; a process with a prompt is a notebook unless a launcher started it."""
    return detect_launch(interactive=hasattr(sys, "ps1"))


class AirEnvironment(ClusterEnvironment):
    """The ranks of a Databricks AIR launch: one command per node, or one process per GPU (`@distributed`).

    Every answer is read from the environment when it is asked for, since Lightning's launcher writes `LOCAL_RANK`
    there when it starts the ranks of a node.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return not current_launch().starts_processes

    @property
    @override
    def main_address(self) -> str:
        address = current_launch().master_address
        return "127.0.0.1" if address is None else address

    @property
    @override
    def main_port(self) -> int:
        port = current_launch().master_port
        if port is None:
            raise RuntimeError(
                "MASTER_PORT is not set, so the ranks of this launch cannot find each other. Set it to a free port of "
                "MASTER_ADDR, the same on every rank."
            )
        return port

    @staticmethod
    @override
    def detect() -> bool:
        return current_launch().kind in AIR_KINDS

    @override
    def world_size(self) -> int:
        return current_launch().world_size or 1

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the launch has fixed it."""

    @override
    def global_rank(self) -> int:
        return current_launch().global_rank or 0

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launch has fixed it."""

    @override
    def local_rank(self) -> int:
        return current_launch().local_rank

    @override
    def node_rank(self) -> int:
        return current_launch().node_rank


def resolve_num_nodes(num_nodes: int, launch: Launch) -> int:
    """Return the number of nodes: the launch's, unless the user said otherwise.

    Args:
        num_nodes: `Trainer(num_nodes=…)`; 1 is also what it is when left alone.
        launch: What the environment says.

    Raises:
        ValueError: If both say something and differ.
    """
    if launch.num_nodes is None or num_nodes == launch.num_nodes:
        return num_nodes
    if num_nodes != 1:
        raise ValueError(
            f"Trainer(num_nodes={num_nodes}) contradicts the launch ({launch.kind}), which has {launch.num_nodes} "
            "node(s). Leave num_nodes out: AirStrategy takes it from the launch."
        )
    return launch.num_nodes


def check_world(num_devices: int, num_nodes: int, launch: Launch) -> None:
    """Check that devices and nodes make up the world where the launch does not say how many ranks a node has.

    Args:
        num_devices: The devices of this node, one for each rank.
        num_nodes: The number of nodes.
        launch: What the environment says.

    Raises:
        ValueError: If they do not.
    """
    if launch.starts_processes or launch.local_world_size is not None or launch.world_size is None:
        return
    if num_devices * num_nodes != launch.world_size or launch.local_rank >= num_devices:
        advice = _ADVICE.get(
            launch.kind,
            "Set LOCAL_WORLD_SIZE to the number of ranks of a node and leave devices out, or pass devices, num_nodes.",
        )
        raise ValueError(
            f"Trainer(devices={num_devices}, num_nodes={num_nodes}) contradicts the launch ({launch.kind}), in which "
            f"this is local rank {launch.local_rank} and the world has {launch.world_size} rank(s). {advice}"
        )


def resolve_devices(devices: Sequence[torch.device], launch: Launch, *, num_visible: int) -> list[torch.device]:
    """Return one device for each rank of this node: as many as the launch has ranks, unless the user said otherwise.

    What the Trainer resolved is all that can be seen of `Trainer(devices=…)`: one CPU, or all visible GPUs, is also
    what it is when left alone.

    Args:
        devices: The devices that the Trainer resolved for this node.
        launch: What the environment says.
        num_visible: How many devices of that type this process can see.

    Raises:
        ValueError: If both say something and differ.
    """
    ranks = launch.local_world_size
    if ranks is None or ranks == len(devices):
        return list(devices)
    device_type = devices[0].type
    if device_type == "cpu" and len(devices) == 1:
        return list(devices) * ranks
    if len(devices) == num_visible and ranks < num_visible:
        return list(devices[:ranks])
    if len(devices) == num_visible == 1 and not launch.starts_processes:
        # Launchers such as `srun --gpus-per-task=1` show each process its own GPU only, always under index 0. Ranks
        # that Lightning has yet to start here would all get this one.
        return list(devices) * ranks
    visible = "" if device_type == "cpu" else f" ({num_visible} {device_type} device(s) visible)"
    raise ValueError(
        f"Trainer(devices={len(devices)}) contradicts the launch ({launch.kind}), which has {ranks} rank(s) on this "
        f"node{visible}. Leave devices out: AirStrategy takes it from the launch."
    )
