"""Spread a module over the ranks with FSDP2, starting from the same weights on each.

Collective: every rank calls `shard_module` with the same module tree.
"""

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


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
    tensor.data = tensor.data.to(device).contiguous()
    if dist.get_world_size() > 1 and tensor.numel():
        # As bytes: gloo has no broadcast for some dtypes (int16, float8, complex).
        dist.broadcast(tensor.data.view(-1).view(torch.uint8), src=0)
