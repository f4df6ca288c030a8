"""What parameters are called in a checkpoint: as in the model's code, whoever has wrapped or compiled parts of it.

`torch.compile` of a submodule puts `_orig_mod.` into its parameters' names. A checkpoint without it loads into the
model compiled or not, under every sharding.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_air.strategy.checkpoint_io import NOTES_KEY

_COMPILED = "_orig_mod."


def checkpoint_name(name: str) -> str:
    """Return what a checkpoint calls a parameter or buffer of the model."""
    return name.replace(_COMPILED, "")


def noted(checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the checkpoint with the names by which a collective CheckpointIO stores it. Copies no tensor."""
    names = {id(param): checkpoint_name(name) for name, param in module.named_parameters()}
    by_group = [
        [
            [names.get(id(param), f"unnamed.{number}.{at}") for at, param in enumerate(group["params"])]
            for number, group in enumerate(optimizer.param_groups)
        ]
        for optimizer in optimizers
    ]
    noted = {**checkpoint, NOTES_KEY: {**checkpoint.get(NOTES_KEY, {}), "parameter_names": by_group}}
    if "state_dict" in checkpoint:
        noted["state_dict"] = {checkpoint_name(name): value for name, value in checkpoint["state_dict"].items()}
    return noted


def with_own_names(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a loaded state dict as the module names it."""
    own = {checkpoint_name(name): name for name in module.state_dict()}
    return {own.get(name, name): value for name, value in state.items()}
