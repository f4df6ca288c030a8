"""What goes with the default process group: made once for it, for all strategies of this process, and gone with it.

A second Trainer brings a second strategy. If each made a group of its own, its threads and sockets would stay until the
process ends.
"""

import itertools
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_air.strategy.membership import Membership


@dataclass
class World:
    """The default process group, as we have met in it.

    Attributes:
        membership: Who this rank is in it.
        store: Its store, on a connection of its own: the main thread may be waiting in the group's.
        control_group: Gloo, for the exchange of stops alone, whose order is its own.
        num_failures: How many failures this rank has been through. The next one has this number on every rank,
            however many runs each of them has made.
    """

    membership: Membership
    store: dist.Store
    control_group: dist.ProcessGroup | None = None
    num_failures: int = 0


# Every rank enters equally many, so the same number means the same world on all of them.
_numbers = itertools.count()
_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def enter_world(membership: Membership, timeout: timedelta) -> World:
    """Return what goes with the default process group. Collective: every rank calls this.

    Args:
        membership: Who this rank is.
        timeout: How long an exchange may take; of several strategies, the first one's counts.
    """
    group = dist.group.WORLD
    assert group is not None
    world = _worlds.get(group)
    if world is None:
        # Private: a store has no public getter.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined] # noqa: SLF001
        # torchrun's agent keeps its store, with the failures of a group that was destroyed.
        store = dist.PrefixStore(f"lightning_air/world/{next(_numbers)}", store)
        control_group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control_group, dist.ProcessGroup)
        world = _worlds[group] = World(membership, store, control_group)
    return world


def current_world() -> World | None:
    """Return what goes with the default process group, if there is one and a strategy has entered it."""
    return _worlds.get(dist.group.WORLD) if dist.group.WORLD is not None else None
