"""The ranks that save and load together, or one process alone.

All of it goes through a gloo group that nothing else uses: background work that shared a group with the training
thread would meet the wrong collective and hang.
"""

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks(Protocol):
    """Who takes part. Of one object, one thread at a time calls a collective."""

    global_rank: int
    world_size: int

    def gather(self, value: T) -> list[T] | None:
        """Return all ranks' values on rank 0, in their order. Collective: every rank calls this."""

    def all_gather(self, value: T) -> list[T]:
        """Return all ranks' values, in their order. Collective: every rank calls this."""

    def broadcast(self, value: T) -> T:
        """Return rank 0's value. Collective: every rank calls this."""


@dataclass
class Alone:
    """One process: it saves and loads by itself, whatever others do."""

    global_rank: int = 0
    world_size: int = 1

    def gather(self, value: T) -> list[T] | None:
        """Return the value."""
        return [value]

    def all_gather(self, value: T) -> list[T]:
        """Return the value."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value


class Together:
    """All ranks of the process group, over a group of their own.

    Collective: every rank makes one at the same point.

    Args:
        timeout_seconds: How long one rank may wait for another: longer than a save may take.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._world = dist.group.WORLD
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    @property
    def is_current(self) -> bool:
        """Whether the process group that this one was made in still stands."""
        return dist.is_initialized() and self._world is dist.group.WORLD

    def gather(self, value: T) -> list[T] | None:
        """Return all ranks' values on rank 0, in their order. Collective: every rank calls this."""
        values: list[T] | None = [value] * self.world_size if self.global_rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Return all ranks' values, in their order. Collective: every rank calls this."""
        values = [value] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value. Collective: every rank calls this."""
        holder = [value]
        dist.broadcast_object_list(holder, group=self._group, group_src=0)
        return holder[0]


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank, over the process group itself. Collective: every rank calls this."""
    count = torch.tensor(int(flag))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return bool(count)


def ranks_sharing(folder: Path, ranks: Ranks) -> list[int]:
    """Return which ranks see the same local folder, this one among them. Collective: every rank calls this.

    By trying: host names are the same on all nodes of some platforms, and a scratch disk can be shared by all.
    """
    if ranks.world_size == 1:
        return [ranks.global_rank]
    mine = folder / f"rank-{ranks.global_rank}-{uuid.uuid4().hex}"
    error: OSError | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()
    except OSError as raised:  # raised once nobody waits for this rank
        error = raised
    try:
        names = ranks.all_gather(mine.name)
        seen = [rank for rank, name in enumerate(names) if (folder / name).exists()]
        ranks.all_gather(None)  # nobody deletes before all have looked
    finally:
        mine.unlink(missing_ok=True)
    if error is not None:
        raise error
    return seen
