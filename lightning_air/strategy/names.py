"""What parameters are called in a checkpoint: as in the model's code, whoever has wrapped or compiled parts of it.

`torch.compile` of a submodule puts `_orig_mod.` into its parameters' names. A checkpoint without it loads into the
model compiled or not, under every sharding. So do other sets of the model's weights that callbacks put beside it, such
as those of weight averaging.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

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
    renamed = {
        key: {checkpoint_name(name): each for name, each in value.items()} if _has_compiled(value) else value
        for key, value in checkpoint.items()
    }
    return {**renamed, NOTES_KEY: {**checkpoint.get(NOTES_KEY, {}), "parameter_names": by_group}}


def with_own_names(checkpoint: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a loaded checkpoint with the module's own names for its weights: the way back. Copies no tensor."""
    own = {checkpoint_name(name): name for name in module.state_dict()}

    def renamed(weights: Mapping[str, Any]) -> dict[str, Any]:
        return {own.get(checkpoint_name(name), name): each for name, each in weights.items()}

    def is_weights(value: object) -> bool:
        return isinstance(value, dict) and all(isinstance(name, str) and checkpoint_name(name) in own for name in value)

    return {
        key: renamed(value) if key == "state_dict" or is_weights(value) else value for key, value in checkpoint.items()
    }


def _has_compiled(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and any(isinstance(name, str) and _COMPILED in name for name in value)
