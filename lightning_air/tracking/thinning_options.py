"""Check the thinner's options as they come, from code or YAML; each says what it got and what to write instead."""

from collections.abc import Sequence
from typing import Any, get_args

from lightning_air.tracking.budget import whole_number
from lightning_air.tracking.window import Aggregate

_AGGREGATES = get_args(Aggregate)


def check_step(step: object) -> int:
    """Return how many steps a point stands for at least; 1 for "auto"."""
    return 1 if step == "auto" else whole_number("step", step, least=1, remedy='Or write "auto".')


def check_aggregates(aggregate: object) -> tuple[Aggregate, ...]:
    """Return what a window becomes."""
    items = _items(aggregate)
    if not items or any(item not in _AGGREGATES or items.count(item) > 1 for item in items):
        raise ValueError(
            f"aggregate must be a list of some of {', '.join(_AGGREGATES)}, each once, got {aggregate!r}. "
            'Write ("mean",) for one point per window.'
        )
    return items


def check_patterns(exempt: object) -> tuple[str, ...]:
    """Return the patterns of metrics that are not thinned."""
    items = _items(exempt)
    if items is None or not all(isinstance(item, str) for item in items):
        raise ValueError(
            f'exempt must be a list of patterns, got {exempt!r}. Write ("val*",), or () to thin all metrics alike.'
        )
    return items


def _items(value: object) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None


def check_horizon(horizon: object) -> None:
    """Accept a run's last step, or None."""
    if horizon is not None:
        whole_number("horizon", horizon, remedy="Leave it out (None) if nobody knows the last step.")
