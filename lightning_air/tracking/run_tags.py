"""Tags that tell what a run was: the user's own, what MLflow finds out (source, commit), versions, the machines.

Ours start with `lightning_air.`.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from mlflow.tracking.context.registry import resolve_tags

from lightning_air.runtime import LaunchKind
from lightning_air.tracking.metric_names import is_valid_key, valid_key
from lightning_air.tracking.texts import MAX_TAG_LENGTH, storable

TAG_PREFIX = "lightning_air."

_PACKAGES = {"version": "lightning-air", "lightning": "lightning", "torch": "torch", "mlflow": "mlflow"}


@dataclass(frozen=True, kw_only=True)
class World:
    """The machines of a training.

    Attributes:
        launch: What started the processes.
        num_nodes: Machines.
        world_size: Processes on all of them.
        sharding: How the strategy spreads the model; None where it does not tell.
    """

    launch: LaunchKind
    num_nodes: int
    world_size: int
    sharding: str | None = None


def checked_user_tags(tags: Mapping[str, object] | None) -> dict[str, str]:
    """Return the user's tags as text, cut with a mark where they are too long; for a constructor.

    Raises:
        ValueError: MLflow takes no tag of that name, or the name is one of ours.
    """
    checked = {}
    for name, value in (tags or {}).items():
        if not is_valid_key(str(name)):
            raise ValueError(
                f"tags has a name that MLflow does not take: {name!r}. Use letters, digits and '_-. /' only, "
                f"at most 250 of them, for example {valid_key(str(name))!r}."
            )
        if str(name).startswith(TAG_PREFIX):
            raise ValueError(f"tags must not start with {TAG_PREFIX!r}, got {name!r}. Choose another name.")
        checked[str(name)] = storable(str(value), MAX_TAG_LENGTH)
    return checked


def run_tags(user_tags: Mapping[str, str], world: World) -> dict[str, str]:
    """Return all tags of a run, the user's over MLflow's over ours.

    Asks git for the commit, which takes some tens of milliseconds.

    Args:
        user_tags: From `checked_user_tags`.
        world: The machines.
    """
    ours = {f"{TAG_PREFIX}{name}": storable(text, MAX_TAG_LENGTH) for name, text in _facts(world).items()}
    return {**ours, **{name: str(text) for name, text in resolve_tags(dict(user_tags)).items() if text is not None}}


def _facts(world: World) -> dict[str, str]:
    facts = {name: _version(package) for name, package in _PACKAGES.items()}
    facts |= {
        "python": platform.python_version(),
        "launch": world.launch,
        "num_nodes": str(world.num_nodes),
        "world_size": str(world.world_size),
    }
    if world.sharding is not None:
        facts["sharding"] = world.sharding
    names = visible_gpus()
    if names:
        facts |= {"gpus_per_node": str(len(names)), "gpu_name": ", ".join(dict.fromkeys(names))}
    return facts


def visible_gpus() -> tuple[str, ...]:
    """Return the name of each GPU that this process sees; none before something else has initialised CUDA.

    To initialise it here would take memory on a GPU and make a later fork impossible.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a folder, without being installed
        return "unknown"
