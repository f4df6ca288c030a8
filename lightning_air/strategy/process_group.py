"""Bring the ranks together, and the collectives whose meaning depends on the backend's name.

`torch.distributed.get_backend()` answers "cpu:gloo,cuda:nccl" for a group that has a backend per device. Lightning
compares it with "nccl" and "gloo", so that for such a group `barrier` names no device, a mean of integers raises,
and nobody destroys the group at exit. Here each question is asked per device.

The ranks meet at a store before the group exists, so that a missing rank is named after a bounded wait and a port
in use is told apart from a rank that is late.
"""

import atexit
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

_VERDICT_GRACE_SECONDS = 15.0  # how much longer the others wait for rank 0's roll-call than rank 0 for them
_MAX_NAMED_RANKS = 16

# Every rank joins equally often, so the same number means the same group on all of them.
_joins = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who this process is in the group, and where the group meets.

    Attributes:
        global_rank: This rank.
        world_size: How many ranks there are.
        ranks_per_node: How many of them share a node; rank r is on node r // ranks_per_node.
        address: Where rank 0 listens, or the launcher's agent.
        port: Its port.
        agent_hosts_store: torchrun's agent listens there already.
        attempt: Which restart of the group this is, counted by the launcher.
        plan: What all ranks have to agree on besides their number, such as "sharding='fsdp'".
    """

    global_rank: int
    world_size: int
    ranks_per_node: int
    address: str
    port: int
    agent_hosts_store: bool = False
    attempt: int = 0
    plan: str = ""

    def describe(self, rank: int) -> str:
        """Return "rank 9 (node 1, local rank 1)"."""
        node, local_rank = divmod(rank, self.ranks_per_node)
        return f"rank {rank} (node {node}, local rank {local_rank})"


def choose_backend(requested: str, device: torch.device) -> str:
    """Return the backend string for `init_process_group`.

    "auto" is gloo for host memory, which asynchronous checkpoints and everything that must not touch the device
    need, and NCCL beside it where the device is CUDA. Where there is no CUDA it is plain "gloo", which serves host
    memory just as "cpu:gloo" does, while torch warns about the latter ("No backend of type 0").

    Raises:
        ValueError: If the request names no backend for host memory or for the device, or one that torch lacks.
    """
    if requested == "auto":
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if ":" not in requested and requested != "gloo":
        raise ValueError(
            f"process_group_backend={requested!r} serves one device only; asynchronous checkpoints need a backend for "
            f"host memory too. Use 'auto', or 'cpu:gloo,{device.type if device.type != 'cpu' else 'cuda'}:{requested}'."
        )
    devices = parse_backends(requested)
    for needed in ("cpu", device.type):
        if requested != "gloo" and needed not in devices:
            raise ValueError(
                f"process_group_backend={requested!r} has no backend for {needed!r} tensors. "
                f"Add one, for example '{requested},{needed}:{'nccl' if needed == 'cuda' else 'gloo'}', or use 'auto'."
            )
    for backend in devices.values():
        if not dist.is_backend_available(backend):
            raise ValueError(
                f"process_group_backend={requested!r} asks for {backend!r}, which this build of torch does not have. "
                "Use 'auto'."
            )
    # Written anew: torch takes neither a space nor a comma at the end.
    return ",".join(f"{device_type}:{backend}" for device_type, backend in devices.items()) or requested


def parse_backends(config: str) -> dict[str, str]:
    """Return device type → backend from "cpu:gloo,cuda:nccl"; a plain name serves no device by itself."""
    pairs = (part.split(":", 1) for part in config.split(",") if ":" in part)
    return {device.strip(): backend.strip().lower() for device, backend in pairs}


def join(
    membership: Membership,
    *,
    backend: str,
    timeout: timedelta,
    join_timeout: timedelta,
    device: torch.device,
) -> bool:
    """Make this process part of the default process group, or check the one that exists.

    Collective: every rank calls this.

    Returns:
        Whether the group was made here; then it is destroyed when the process exits.

    Raises:
        RuntimeError: If a group without a backend for host memory exists already, ranks are missing after
            `join_timeout` (they are named), or the port is taken.
    """
    if dist.is_initialized():
        check_existing_group(membership, device)
        return False
    store = _meet_in_time(membership, join_timeout)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=membership.global_rank,
        world_size=membership.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(_destroy)
    return True


def check_existing_group(membership: Membership, device: torch.device) -> None:
    """Raise `RuntimeError` when the process group that somebody else made cannot serve us."""
    config = dist.distributed_c10d.get_backend_config()
    backends = parse_backends(config)
    lacking = [needed for needed in ("cpu", device.type) if needed not in backends]
    if lacking:
        raise RuntimeError(
            f"A process group with the backend {config!r} exists already and has none for {lacking[0]!r} tensors. "
            "Let AirStrategy make the group, or make it with "
            f"init_process_group('{choose_backend('auto', device)}')."
        )
    if (dist.get_rank(), dist.get_world_size()) != (membership.global_rank, membership.world_size):
        raise RuntimeError(
            f"A process group exists already in which this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but the launch makes it rank {membership.global_rank} of "
            f"{membership.world_size}. Destroy that group first, or set devices and num_nodes to match it."
        )


def backend_for(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the name of the backend that carries tensors of this device type, such as "gloo"."""
    return parse_backends(dist.distributed_c10d.get_backend_config(group)).get(device.type, "")


def barrier(device: torch.device) -> None:
    """Wait for all ranks. Collective: every rank calls this."""
    if dist.is_initialized():
        # NCCL needs to be told the device or guesses it from the rank, which opens a context on the wrong GPU.
        on_nccl = device.type == "cuda" and backend_for(device) == "nccl"
        dist.barrier(device_ids=[device.index] if on_nccl else None)


def reduce(tensor: Tensor, group: dist.ProcessGroup | None, op: str | dist.ReduceOp.RedOpType | None) -> Tensor:
    """Reduce a tensor over the ranks, in place, and return it. Collective: every rank calls this.

    Only NCCL can average, and only floating point; elsewhere the sum is divided, and a mean of integers is rounded
    towards zero, as Lightning does it under plain gloo.
    """
    if not dist.is_initialized():
        return tensor
    name = op.lower() if isinstance(op, str) else op
    if name in ("mean", "avg", dist.ReduceOp.AVG):
        if tensor.is_floating_point() and backend_for(tensor.device, group) == "nccl":
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
            return tensor
        # The sum of small integers overflows, and dividing integers goes through float32, exact up to 2**24 only.
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        total = tensor.long() if is_whole else tensor
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return tensor.copy_(total.div_(dist.get_world_size(group), rounding_mode="trunc" if is_whole else None))
    native = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) else name or dist.ReduceOp.SUM
    dist.all_reduce(tensor, op=native, group=group)
    return tensor


def _meet_in_time(membership: Membership, join_timeout: timedelta) -> dist.Store:
    """Return what `_meet` returns. It can hang: torch waits without end for the greeting of a program that is no store.

    On a thread of its own, so that the wait is bounded and Ctrl-C is heard.
    """
    if membership.world_size == 1:
        return dist.HashStore()
    stores: list[dist.Store] = []
    errors: list[BaseException] = []

    def meet() -> None:
        try:
            stores.append(_meet(membership, join_timeout))
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that has to know
            errors.append(error)

    thread = threading.Thread(target=meet, name="air-join", daemon=True)
    thread.start()
    # `_meet` may open the store twice, and waits for rank 0's verdict a little longer than rank 0 for the ranks.
    deadline = time.monotonic() + join_timeout.total_seconds() + 2 * _VERDICT_GRACE_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.1)
    if errors:
        raise errors[0]
    if not stores:
        raise RuntimeError(
            f"Whatever listens at {membership.address}:{membership.port} is not the store of {membership.describe(0)}: "
            f"it took the connection and was silent for {join_timeout.total_seconds():g} s. Another program may hold "
            "the port: set MASTER_PORT to a free one on every rank."
        )
    return stores[0]


def _meet(membership: Membership, join_timeout: timedelta) -> dist.Store:
    """Return a store that every rank is known to have reached, and that holds nothing of another group."""
    # torchrun's agent keeps its store through restarts, with the addresses of the ranks that are gone.
    name = f"lightning_air/group/{membership.attempt}/{next(_joins)}"
    try:
        store = dist.PrefixStore(name, _open_store(membership, join_timeout))
        verdict = _roll_call(store, membership, join_timeout)
    except dist.DistNetworkError:
        # Rank 0 had not yet destroyed an earlier group, and closed that group's store while we waited in it.
        store = dist.PrefixStore(name, _open_store(membership, timedelta(seconds=_VERDICT_GRACE_SECONDS)))
        verdict = _roll_call(store, membership, join_timeout)
    missing: list[int] = verdict["missing"]
    if missing:
        names = ", ".join(membership.describe(rank) for rank in missing[:_MAX_NAMED_RANKS])
        more = f" and {len(missing) - _MAX_NAMED_RANKS} more" if len(missing) > _MAX_NAMED_RANKS else ""
        raise RuntimeError(
            f"{len(missing)} of {membership.world_size} ranks did not join within {join_timeout.total_seconds():g} s: "
            f"{names}{more}. See their logs, or raise join_timeout if their start is slow."
        )
    if verdict["differs"]:
        raise RuntimeError(f"{verdict['differs']} Start every rank with the same environment and the same options.")
    return store


def _open_store(membership: Membership, join_timeout: timedelta) -> dist.TCPStore:
    hosts = membership.global_rank == 0 and not membership.agent_hosts_store
    where = f"{membership.address}:{membership.port}"
    try:
        return dist.TCPStore(
            membership.address,
            membership.port,
            membership.world_size,
            is_master=hosts,
            timeout=join_timeout,
            wait_for_workers=False,
        )
    except dist.DistError as error:
        if hosts:
            raise RuntimeError(
                f"Rank 0 cannot listen on {where}: {_first_line(error)}. If the port is in use, stop the process that "
                "holds it or set MASTER_PORT to a free one on every rank; if MASTER_ADDR is not a name or address of "
                "this machine, correct it."
            ) from error
        host = "The launcher's agent" if membership.agent_hosts_store else membership.describe(0)
        raise RuntimeError(
            f"{host} did not answer at {where} within {join_timeout.total_seconds():g} s: {_first_line(error)}. "
            "See its log; check that MASTER_ADDR and MASTER_PORT are the same on every rank and reachable."
        ) from error


def _roll_call(store: dist.Store, membership: Membership, join_timeout: timedelta) -> dict[str, Any]:
    """Return who is missing and who differs; rank 0 looks and tells the others, so that all say the same."""
    ranks = range(membership.world_size)
    mine = ", ".join(part for part in (f"world size {membership.world_size}", membership.plan) if part)
    store.set(f"present/{membership.global_rank}", mine)
    if membership.global_rank == 0:
        missing: list[int] = []
        try:
            store.wait([f"present/{rank}" for rank in ranks], join_timeout)
        except dist.DistStoreError:
            missing = [rank for rank in ranks if not store.check([f"present/{rank}"])]
        theirs = {rank: store.get(f"present/{rank}").decode() for rank in ranks if rank not in missing}
        differs = next(
            (f"Rank {rank} has {told} and rank 0 has {mine}." for rank, told in theirs.items() if told != mine),
            "",
        )
        verdict = {"missing": missing, "differs": differs}
        store.set("verdict", json.dumps(verdict))
        if missing or differs:  # this process holds the store: it stays until those who came have read the answer
            told = [f"told/{rank}" for rank in ranks if rank not in missing and rank != 0]
            wait_until(lambda: not told or store.check(told), seconds=5.0)
        return verdict
    try:
        store.wait(["verdict"], join_timeout + timedelta(seconds=_VERDICT_GRACE_SECONDS))
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"{membership.describe(0)} opened {membership.address}:{membership.port} but then was silent: "
            f"{_first_line(error)}. See its log."
        ) from error
    heard: dict[str, Any] = json.loads(store.get("verdict"))
    store.set(f"told/{membership.global_rank}", "1")
    return heard


def wait_until(condition: Callable[[], bool], *, seconds: float, poll_seconds: float = 0.05) -> bool:
    """Return whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _destroy() -> None:
    # NCCL warns about a group that was never destroyed, and Lightning registers this for the plain name "nccl" only.
    if dist.is_initialized():
        dist.destroy_process_group()
