"""What `AirStrategy` accepts, checked once, before any process or tensor exists.

An option that has no meaning for the chosen sharding is refused by name instead of being ignored: a run that
silently drops `find_unused_parameters` under FSDP fails hours later, in another place.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from torch import nn

Sharding = Literal["ddp", "fsdp", "hsdp"]
ModuleNames = Sequence[str | type[nn.Module]]

SHARDINGS: tuple[str, ...] = get_args(Sharding)
DDP_ONLY = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
FSDP_ONLY = ("cpu_offload", "reshard_after_forward", "wrap")
SWITCHES = ("broadcast_buffers", "cpu_offload", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")

# torch counts nanoseconds in 64 bits: from 292 years on, "for ever" is over at once.
LONGEST = timedelta(days=365)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The checked options of one `AirStrategy`; `None` there means "not given" and is resolved here.

    Attributes:
        sharding: How parameters are spread over the ranks.
        process_group_backend: The backend asked for, or "auto".
        timeout: How long a collective may take.
        join_timeout: How long the ranks wait for each other at the start.
        wrap: Module classes (by type or name), a minimum number of parameters, or None for the default policy.
        activation_checkpointing: Module classes (by type or name) whose activations are recomputed.
        reshard_after_forward: FSDP2's own option, for the blocks.
        cpu_offload: Whether parameters, gradients and optimizer state rest in host memory.
        ddp: The keyword arguments for `DistributedDataParallel` that were given.
    """

    sharding: Sharding
    process_group_backend: str
    timeout: timedelta
    join_timeout: timedelta
    wrap: tuple[str | type[nn.Module], ...] | int | None
    activation_checkpointing: tuple[str | type[nn.Module], ...]
    reshard_after_forward: bool | int
    cpu_offload: bool
    ddp: Mapping[str, Any] = field(default_factory=dict)


def check_sharding(sharding: object) -> None:
    """Raise `ValueError` unless `sharding` is one of "ddp", "fsdp" and "hsdp"."""
    if sharding not in SHARDINGS:
        raise ValueError(
            f"sharding must be one of {', '.join(map(repr, SHARDINGS))}, got {sharding!r}. Use 'ddp' when the model "
            "and its optimizer state fit on one device, 'fsdp' when they do not, 'hsdp' to shard inside each node."
        )


def check_options(
    *,
    sharding: Sharding,
    process_group_backend: str,
    timeout: timedelta | float,
    join_timeout: timedelta | float,
    activation_checkpointing: str | ModuleNames | None,
    **of_one_sharding: Any,
) -> StrategyOptions:
    """Check every option of `AirStrategy` and resolve its default.

    Raises:
        ValueError: Naming the option, its value and what to do.
    """
    check_sharding(sharding)
    given = {name: value for name, value in of_one_sharding.items() if value is not None}
    _refuse_options_of_another(sharding, given)
    if not isinstance(process_group_backend, str) or not process_group_backend:
        raise ValueError(
            f"process_group_backend must be 'auto' or a torch.distributed backend such as 'cpu:gloo,cuda:nccl', "
            f"got {process_group_backend!r}."
        )
    reshard = given.get("reshard_after_forward", True)
    if not isinstance(reshard, bool) and (not isinstance(reshard, int) or reshard < 1):
        raise ValueError(
            f"reshard_after_forward must be True, False or the number of ranks to reshard to, got {reshard!r}."
        )
    _check_switches(given)
    bucket_cap_mb = given.get("bucket_cap_mb", 25.0)
    if not _is_number(bucket_cap_mb) or not math.isfinite(bucket_cap_mb) or bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb must be a positive number of MiB, got {bucket_cap_mb!r}.")
    return StrategyOptions(
        sharding=sharding,
        process_group_backend=process_group_backend,
        timeout=_positive_duration("timeout", timeout),
        join_timeout=_positive_duration("join_timeout", join_timeout),
        wrap=_wrap(given.get("wrap")),
        activation_checkpointing=_module_names("activation_checkpointing", activation_checkpointing),
        reshard_after_forward=reshard,
        cpu_offload=given.get("cpu_offload", False),
        ddp={name: given[name] for name in DDP_ONLY if name in given},
    )


def _refuse_options_of_another(sharding: Sharding, given: Mapping[str, Any]) -> None:
    foreign = FSDP_ONLY if sharding == "ddp" else DDP_ONLY
    wrong = sorted(set(given) & set(foreign))
    if wrong:
        owners = "'fsdp' and 'hsdp'" if sharding == "ddp" else "'ddp'"
        shown = ", ".join(f"{name}={given[name]!r}" for name in wrong)
        raise ValueError(
            f"{shown}: has no meaning under sharding={sharding!r}, only under {owners}. "
            f"Remove {'it' if len(wrong) == 1 else 'them'} or choose another sharding."
        )


def _check_switches(given: Mapping[str, Any]) -> None:
    # A "no" from an environment variable or a hand-written YAML is true for Python.
    for name in SWITCHES:
        if name in given and not isinstance(given[name], bool):
            raise ValueError(f"{name} must be True or False, got {given[name]!r}.")


def _positive_duration(name: str, value: timedelta | float) -> timedelta:
    if not isinstance(value, timedelta) and not _is_number(value):
        raise ValueError(f"{name} must be a number of seconds or a timedelta, got {value!r}.")
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{name} must be a finite number of seconds, got {value!r}.") from error
    if not timedelta(0) < duration <= LONGEST:
        raise ValueError(f"{name} must be longer than zero and at most {LONGEST.days} days, got {value!r}.")
    return duration


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrap(value: Any) -> tuple[str | type[nn.Module], ...] | int | None:
    if value is None:
        return None
    if isinstance(value, bool | float):
        raise ValueError(f"wrap must be module classes or a whole number of parameters, got {value!r}.")  # noqa: TRY004
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"wrap as a minimum number of parameters must be at least 1, got {value!r}.")
        return value
    names = _module_names("wrap", value)
    if not names:
        raise ValueError("wrap is an empty list. Leave it out for the default blocks, or name module classes.")
    return names


def _module_names(option: str, value: Any) -> tuple[str | type[nn.Module], ...]:
    """Return the classes named by an option; a single name stands for a list of one, and None for no class."""
    items = () if value is None else (value,) if isinstance(value, str | type) else value
    if not isinstance(items, Sequence | AbstractSet):
        raise ValueError(f"{option} must be a list of module classes or their names, got {value!r}.")  # noqa: TRY004
    for item in items:
        if not (isinstance(item, str) and item) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueError(f"{option} must hold torch.nn.Module classes or their names, got {item!r}.")
    return tuple(items)
