"""Bring the ranks together, and the collectives whose meaning depends on the backend's name.

`torch.distributed.get_backend()` answers "cpu:gloo,cuda:nccl" for a group that has a backend per device. Lightning
compares it with "nccl" and "gloo", so that for such a group `barrier` names no device, a mean of integers raises,
and nobody destroys the group at exit. Here each question is asked per device.
"""

import atexit
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_air.strategy.meeting import meet
from lightning_air.strategy.membership import Membership


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
            `join_timeout` (they are named), they disagree, or the port is taken.
    """
    if dist.is_initialized():
        check_existing_group(membership, device)
        return False
    store = dist.HashStore() if membership.world_size == 1 else meet(membership, join_timeout)
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


def abort(device: torch.device) -> None:
    """End what this process hangs in, where NCCL carries the device's collectives; gloo has no such call.

    Experimental in torch, and the only way to end a NCCL collective whose peer is gone. Torch says that it "should be
    used with `TORCH_NCCL_ASYNC_ERROR_HANDLING` turned off", since NCCL's watchdog may abort the group by itself. That
    stays on here, as it is by default: it ends a rank that no other can tell of its failure. Untested, for want of two
    GPUs: the call with NCCL itself, and what becomes of it when the watchdog aborts at the same time. If it fails or
    blocks, `FailureWatch` still ends the process when its grace is over.
    """
    if backend_for(device) == "nccl":
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001


def wait_until(condition: Callable[[], bool], *, seconds: float, poll_seconds: float = 0.05) -> bool:
    """Return whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


def _destroy() -> None:
    # NCCL warns about a group that was never destroyed, and Lightning registers this for the plain name "nccl" only.
    if dist.is_initialized():
        dist.destroy_process_group()
