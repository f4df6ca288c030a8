"""Spread a module over the ranks with FSDP2, starting from the same weights on each.

Collective: every rank calls `shard_module` with the same module tree.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

# Marks on the module itself: it outlives the Trainer and the strategy that sharded it.
_SHARDED_BY_US = "_air_sharded"
_INSIDE_STEP = "_air_is_inside_step"


def shard_module(
    blocks: Sequence[nn.Module],
    roots: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    device: torch.device,
    reshard_after_forward: bool | int = True,
    cpu_offload: bool = False,
    keep_roots: bool = True,
) -> None:
    """Shard each block in place, inner ones first, then each root with all that no block took.

    FSDP2 shards whatever values a rank holds; DDP starts every rank from rank 0's. So does this, block by block, so
    that no rank ever holds more than its shards and one whole block on the device.

    Args:
        blocks: What is gathered as a whole, inner ones before outer ones.
        roots: What is called first in a forward.
        mesh: One-dimensional to shard over all ranks; two-dimensional (replicate, shard) for HSDP.
        device: The device of this rank.
        reshard_after_forward: For the blocks; see `torch.distributed.fsdp.fully_shard`.
        cpu_offload: Keep the shards in host memory (pinned where there is CUDA).
        keep_roots: Leave the roots gathered between forward and backward, since they are needed again at once.
    """
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    placed: set[int] = set()  # buffers stay whole, and lie in the block and in every root around it
    for module, reshard in (
        *((block, reshard_after_forward) for block in blocks),
        *((root, not keep_roots) for root in roots),
    ):
        for tensor in _whole_tensors(module):
            if id(tensor) not in placed:
                placed.add(id(tensor))
                _place_from_rank_zero(tensor, device)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, offload_policy=offload)


def materialize(module: nn.Module, device: torch.device) -> list[str]:
    """Give memory and first values to what was built on the meta device, and to nothing else.

    Values come from each module's own `reset_parameters`, after sharding, so that no rank ever holds the whole model.

    Returns:
        The names of the classes that have meta tensors and no `reset_parameters`: their values are what the memory
        held, until a checkpoint is loaded.
    """
    holders = [part for part in module.modules() if any(tensor.is_meta for tensor in _own_tensors(part))]
    for holder in holders:
        holder.to_empty(device=device, recurse=False)
    without_values = set()
    for holder in holders:
        reset_parameters = getattr(holder, "reset_parameters", None)
        if callable(reset_parameters):
            reset_parameters()
        else:
            without_values.add(type(holder).__name__)
    return sorted(without_values)


def is_sharded(module: nn.Module) -> bool:
    """Return whether any part of `module` is sharded already, by us or by the user's `configure_model`."""
    return any(isinstance(part, FSDPModule) for part in module.modules()) or any(
        isinstance(param, DTensor) for param in module.parameters()
    )


def mark_sharded(module: nn.Module) -> None:
    """Note on the module that AirStrategy has sharded it, and release its root whenever that is due.

    FSDP2 keeps a root gathered until its backward. After a forward without one it would compute the next forward with
    the gathered values, whatever has become of the shards since: an optimizer step, averaged weights swapped in, a
    checkpoint. Inside of a step it must stay: what follows `self(x)` there may use the root's parameters too.
    """
    setattr(module, _SHARDED_BY_US, True)
    if isinstance(module, FSDPModule):
        module.register_forward_hook(_release_after_forward)


def is_marked_sharded(module: nn.Module) -> bool:
    """Return whether AirStrategy, not the user, has sharded this module, under this or an earlier Trainer."""
    return hasattr(module, _SHARDED_BY_US)


@contextmanager
def inside_step(module: FSDPModule) -> Iterator[None]:
    """Keep the root gathered inside, and release it at the end unless a backward follows."""
    setattr(module, _INSIDE_STEP, True)
    try:
        yield
    finally:
        setattr(module, _INSIDE_STEP, False)
    if not torch.is_grad_enabled():
        module.reshard()


def _release_after_forward(module: nn.Module, _args: object, _output: object) -> None:
    if not getattr(module, _INSIDE_STEP, False) and not torch.is_grad_enabled():
        assert isinstance(module, FSDPModule)
        module.reshard()


class WholeParameters:
    """The parameters of a module before sharding put others in their place.

    An optimizer that was built before (in the module's `__init__`, or by LightningCLI's section `optimizer:`) holds
    them, and would go on to update tensors that nobody computes with. Held weakly: they are as large as the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(param): (weakref.ref(param), name) for name, param in module.named_parameters()}

    def hand_over(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Replace them in the optimizers by what the module has under the same name now."""
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # In place: some optimizers (LBFGS) hold the list itself.
                group["params"][:] = [sharded.get(self._name_of(param), param) for param in group["params"]]

    def _name_of(self, param: Tensor) -> str:
        reference, name = self._names.get(id(param), (None, ""))
        return name if reference is not None and reference() is param else ""


def set_gradient_sync(module: nn.Module, *, enabled: bool) -> None:
    """Switch the reduction of gradients on or off in every sharded part of `module`."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(enabled, recurse=False)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _whole_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield every parameter and buffer that is neither sharded nor on the meta device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            yield tensor


def _place_from_rank_zero(tensor: Tensor, device: torch.device) -> None:
    # A parameter keeps its identity (it may be tied, or known to a callback): its data is replaced, as in Module.to.
    tensor.data = tensor.data.to(device)
    if dist.get_world_size() > 1 and tensor.numel():
        whole = tensor.data.contiguous()
        # As bytes: gloo has no broadcast for some dtypes (int16, float8, complex).
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        if whole.data_ptr() != tensor.data.data_ptr():  # another memory format, which it keeps
            tensor.data.copy_(whole)
