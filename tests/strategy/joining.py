"""How the tests' ranks join: as the launch says, but for what a test is about."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_air.strategy.membership import Membership
from lightning_air.strategy.process_group import join
from lightning_air.strategy.topology import current_launch


def membership(**changes: Any) -> Membership:
    """Who the calling rank is, as the launch says."""
    launch = current_launch()
    fields: dict[str, Any] = {
        "global_rank": launch.global_rank,
        "world_size": launch.world_size,
        "ranks_per_node": launch.local_world_size,
        "address": launch.master_address,
        "port": launch.master_port,
        **changes,
    }
    return Membership(**fields)


def join_here(*, backend: str = "gloo", join_seconds: float = 20.0, **changes: Any) -> bool:
    return join(
        membership(**changes),
        backend=backend,
        timeout=timedelta(seconds=20),
        join_timeout=timedelta(seconds=join_seconds),
        device=torch.device("cpu"),
    )


def summed(value: int) -> int:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return int(tensor)
