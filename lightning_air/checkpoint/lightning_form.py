"""Between Lightning's checkpoint, one nested dict, and what is stored of it: tensors by flat key, and `meta.pt`.

The keys are those of Lightning's own sharded checkpoints and of `torch.distributed.checkpoint`: `state_dict.<name>`,
`optimizer_<i>.state.<name>.<field>`, `optimizer_<i>.param_groups.<j>.<option>`; so both open ours, and we theirs.
Optimizer state is keyed by parameter name. Where only the numbers are known that `Optimizer.state_dict` gives to the
parameters, it is keyed by them, and `meta.pt` says so.

Large or sharded tensors in other places of the checkpoint (a callback's weight average) are stored beside the model's,
under `lightning_air.<n>`; a marker in `meta.pt` holds their place.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # no public name; what torch itself walks containers with

# A plain tensor elsewhere in the checkpoint is stored like a weight from this size on; below it stays in `meta.pt`.
MIN_EXTRA_BYTES = 1 << 20
META_KEY = "lightning_air"
_MARKER = "lightning_air_tensor"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class StoredForm:
    """A checkpoint, taken apart. Nothing is copied.

    Attributes:
        leaves: Flat key to tensor or object.
        paths: Flat key to the place in the nested form, as `.metadata` keeps it in `planner_data`.
        meta: Everything else.
    """

    leaves: dict[str, Any]
    paths: dict[str, KeyPath]
    meta: dict[str, Any]


def take_apart(checkpoint: Mapping[str, Any]) -> StoredForm:
    """Return the stored form of a checkpoint of Lightning's.

    Raises:
        ValueError: If two entries have the same flat key.
    """
    meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    notes = dict(meta.pop(META_KEY, {}))
    parameter_names = notes.pop("parameter_names", None)
    state: dict[str, Any] = {}
    if "state_dict" in checkpoint:
        state["state_dict"] = checkpoint["state_dict"]
    keyed_by = []
    for index, optimizer_state in enumerate(checkpoint.get("optimizer_states", [])):
        named = optimizer_state
        if parameter_names is not None and _keyed_by(optimizer_state) == "number":
            named = numbers_to_names(optimizer_state, parameter_names[index])
        keyed_by.append(_keyed_by(named))
        state[f"optimizer_{index}"] = named
    extras: dict[str, Any] = {}

    def set_aside(tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor) and tensor.nbytes < MIN_EXTRA_BYTES:
            return tensor
        key = str(len(extras))
        extras[key] = tensor
        return {_MARKER: key}

    meta = pytree.tree_map_only(Tensor, set_aside, meta)
    if extras:
        state[META_KEY] = extras
    notes |= {"format": 1, "empty": _empty_mappings(state)}
    if "optimizer_states" in checkpoint:
        notes["optimizers_keyed_by"] = keyed_by
        notes["parameters_by_group"] = [
            [len(group.get("params", [])) for group in each.get("param_groups", [])]
            for each in checkpoint["optimizer_states"]
        ]
    meta[META_KEY] = notes
    leaves, paths = flatten(state)
    return StoredForm(leaves, paths, meta)


def put_together(
    leaves: Mapping[str, Any], paths: Mapping[str, KeyPath], meta: Mapping[str, Any], *, is_whole: bool = True
) -> dict[str, Any]:
    """Return the checkpoint as Lightning's single-process and DDP strategies expect it.

    Args:
        leaves: Flat key to value; of the optimizers and the extra tensors all, or none where they have been filled in
            place.
        paths: As in `StoredForm`; keys without one stand for themselves.
        meta: The content of `meta.pt`.
        is_whole: False if the model and the optimizers have been filled in place and are not among the leaves.
    """
    notes = dict(meta.get(META_KEY, {}))
    state: dict[str, Any] = {}
    for path in notes.get("empty", ()) if is_whole else ():
        set_at(state, path, {})
    for key, value in leaves.items():
        set_at(state, paths.get(key, (key,)), value)
    extras = state.pop(META_KEY, {})

    def put_back(node: Any) -> Any:
        return extras[node[_MARKER]] if is_marker(node) and node[_MARKER] in extras else node

    rest = {key: value for key, value in meta.items() if key != META_KEY}
    checkpoint: dict[str, Any] = pytree.tree_map(put_back, rest, is_leaf=is_marker)
    if "state_dict" in state:
        checkpoint["state_dict"] = state.pop("state_dict")
    states = [state.pop(f"optimizer_{index}") for index in range(len(state)) if f"optimizer_{index}" in state]
    keyed_by = notes.get("optimizers_keyed_by", ["name"] * len(states))
    if states or (is_whole and notes.get("optimizers_keyed_by") == []):
        checkpoint["optimizer_states"] = [
            names_to_numbers(each) if by == "name" else _restore_numbers(each)
            for each, by in zip(states, keyed_by, strict=False)
        ]
    checkpoint.update(state)  # keys of a checkpoint that is not of Lightning's making
    return checkpoint


def is_marker(node: object) -> bool:
    """Return whether this stands in `meta.pt` for a tensor that is stored beside the model's."""
    return isinstance(node, dict) and node.keys() == {_MARKER}


def marked_key(node: dict[str, str]) -> str:
    """Return the flat key of the tensor that a marker stands for."""
    return f"{META_KEY}.{node[_MARKER]}"


# ---- the optimizer's parameters, by name and by number ------------------------------------------------------------


def numbers_to_names(state: Mapping[str, Any], names_by_group: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an `Optimizer.state_dict()` keyed by parameter name.

    Args:
        state: Keyed by number.
        names_by_group: The name of each parameter of each group, in the optimizer's order.

    Raises:
        ValueError: If the groups have another number of parameters.
    """
    groups = state["param_groups"]
    counts, expected = [len(group["params"]) for group in groups], [len(names) for names in names_by_group]
    if counts != expected:
        raise ValueError(
            f"The optimizer state has {counts} parameters in its groups and the optimizer {expected}. It is of "
            "another optimizer, or the model has changed since."
        )
    by_number = {
        number: name
        for group, names in zip(groups, names_by_group, strict=True)
        for number, name in zip(group["params"], names, strict=True)
    }
    return {
        **state,
        "state": {by_number.get(number, number): value for number, value in state["state"].items()},
        "param_groups": [{**group, "params": list(names)} for group, names in zip(groups, names_by_group, strict=True)],
    }


def names_to_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state keyed by name as `Optimizer.load_state_dict` expects it, in the order of its groups."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state.get("param_groups", []):
        params = group.get("params", [])
        groups.append({**group, "params": [numbers.setdefault(name, len(numbers)) for name in params]})
    values = {numbers.get(name, name): value for name, value in state.get("state", {}).items()}
    return {**state, "state": values, "param_groups": groups}


def _restore_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    state_of = state.get("state", {})  # an optimizer without any, as plain SGD is, has nothing stored
    values = {int(key) if isinstance(key, str) and key.isdecimal() else key: v for key, v in state_of.items()}
    return {**state, "state": values}


def _keyed_by(state: Mapping[str, Any]) -> str:
    params = [param for group in state.get("param_groups", []) for param in group.get("params", [])]
    return "name" if params and all(isinstance(param, str) for param in params) else "number"


# ---- nested and flat ----------------------------------------------------------------------------------------------


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Return the leaves of a nested state by flat key, and where each was.

    Walks as `torch.distributed.checkpoint` does: into every mapping, and into lists that hold tensors or mappings.

    Raises:
        ValueError: If two leaves have the same flat key.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    _flatten(state, (), leaves, paths)
    return leaves, paths


def _flatten(value: Any, path: KeyPath, leaves: dict[str, Any], paths: dict[str, KeyPath]) -> None:
    if isinstance(value, Mapping):
        for key, child in value.items():
            _flatten(child, (*path, str(key)), leaves, paths)
    elif isinstance(value, list) and not _is_plain(value):
        for index, child in enumerate(value):
            _flatten(child, (*path, index), leaves, paths)
    else:
        key = ".".join(map(str, path))
        if key in leaves:
            raise ValueError(f"Two entries of the checkpoint have the key {key!r}. Rename one of them.")
        leaves[key] = value
        paths[key] = path


def _empty_mappings(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """Return where mappings without entries are: a module may have such extra state, and flat keys do not show it."""
    if isinstance(value, Mapping):
        found = [each for key, child in value.items() for each in _empty_mappings(child, (*path, str(key)))]
        return found if value or not path else [path]
    if isinstance(value, list) and not _is_plain(value):
        return [each for index, child in enumerate(value) for each in _empty_mappings(child, (*path, index))]
    return []


def _is_plain(values: list[Any]) -> bool:
    return not any(
        isinstance(value, Tensor | Mapping) or (isinstance(value, list) and not _is_plain(value)) for value in values
    )


def set_at(root: MutableMapping[Any, Any], path: KeyPath, value: Any) -> None:
    """Set a leaf at its place in a nested state, making what leads there."""
    container: Any = root
    for here, following in pairwise(path):
        empty: Any = {} if isinstance(following, str) else []
        container = _step(container, here, empty)
    _step(container, path[-1], value, replace=True)


def _step(container: Any, key: str | int, default: Any, *, replace: bool = False) -> Any:
    if isinstance(container, list):
        assert isinstance(key, int)
        container.extend([None] * (key + 1 - len(container)))
        if replace or container[key] is None:
            container[key] = default
        return container[key]
    if replace:
        container[key] = default
    return container.setdefault(key, default)
