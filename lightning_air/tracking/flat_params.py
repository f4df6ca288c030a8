"""Take nested hyperparameters apart, into one text per name."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, MutableSequence
from dataclasses import fields, is_dataclass
from typing import Any

_MAX_DEPTH = 50


def flatten_params(params: object) -> dict[str, str]:
    """Return nested parameters by their path, joined by "/", with their values as text, whole.

    Mappings, namespaces, dataclasses and lists of these are taken apart, as Lightning's loggers do. Unlike there an
    empty one is kept ("{}", "[]"), and nothing raises: a value whose text cannot be had is described.

    Args:
        params: A mapping (an OmegaConf one, too), a namespace, a dataclass, or None.

    Raises:
        TypeError: It is none of these.
    """
    if params is not None and _as_mapping(params) is None:
        raise TypeError(
            f"Hyperparameters must be a mapping, a namespace or a dataclass, got {type(params).__qualname__}. "
            "Pass a dict of names to values."
        )
    flat: dict[str, str] = {}
    for path, value in _leaves(params, (), ()) if params is not None else ():
        name = "/".join(path)
        while name in flat:  # {"a": {"b": 1}, "a/b": 2}
            name += "'"
        flat[name] = value
    return flat


def _as_mapping(value: object) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        # `dataclasses.asdict` would copy every tensor in it.
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return None


def _leaves(value: object, path: tuple[str, ...], parents: tuple[int, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each value that is not taken apart, as text, with its path."""
    # One that contains itself, or that no person wrote, is a value.
    parts = None if id(value) in parents or len(parents) == _MAX_DEPTH else _parts(value)
    if not parts:
        if path:
            yield path, _text(value)
        return
    for key, part in parts.items():
        yield from _leaves(part, (*path, _text(key)), (*parents, id(value)))


def _parts(value: object) -> dict[Any, Any] | None:
    mapping = _as_mapping(value)
    if mapping is not None:
        return {key: _get(mapping, key) for key in mapping}
    if isinstance(value, list | tuple | MutableSequence) and value:
        parts = {}
        for index in range(len(value)):
            part = _get(value, index)
            if _as_mapping(part) is None:
                return None
            parts[index] = part
        return parts
    return None


def _get(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except Exception as error:  # noqa: BLE001 - OmegaConf raises on access for a value that is missing
        return f"<{type(error).__name__}>"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a user's own __str__ must not stop the training
        return f"<{type(value).__qualname__}: {type(error).__name__} in its __str__>"
