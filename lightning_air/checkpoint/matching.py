"""Which of a checkpoint's entries belong to which tensors of a state that is to be filled.

Both are named alike: optimizers by parameters' names, and parameters without what `torch.compile` adds to them.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor

from lightning_air.checkpoint.lightning_form import META_KEY, KeyPath, flatten, set_at

State = dict[str, Any]

# What `torch.compile` of a submodule puts into its parameters' names. A state to be filled never has it.
COMPILED = "_orig_mod."


class Like(Protocol):
    """Chooses what a tensor that is stored beside the model's is loaded into."""

    def __call__(self, last_key: str, shape: tuple[int, ...], /) -> Tensor | None:
        """Return a tensor (a shard, perhaps) to fill, or None for a whole one in host memory."""


@dataclass(frozen=True)
class Into:
    """What a load fills in place.

    Attributes:
        state: Nested tensors: `state_dict` and `optimizer_<i>`, the latter keyed by parameters' names.
        like: Where further stored tensors go.
        strict: Whether the checkpoint must hold exactly the weights of `state["state_dict"]`, by name.
    """

    state: State
    like: Like | None = None
    strict: bool = True


def wanted(into: Into, saved: Mapping[str, KeyPath], *, source: str) -> State:
    """Return, by flat key, what of the state a checkpoint has to hold.

    Not the optimizer's state of a parameter that had never been stepped when it was saved (one without gradients, or of
    an optimizer that had not begun): its tensors become zero, as an optimizer begins. Nor options of a group that the
    optimizer, of a newer torch, has got since. Nor, unless the load is strict, weights that it does not have.

    Raises:
        ValueError: If the load is strict and the checkpoint has weights that the state lacks.
    """
    leaves, paths = flatten(into.state)
    if not into.strict:
        leaves = {key: value for key, value in leaves.items() if key in saved or paths[key][0] != "state_dict"}
    elif unknown := _unknown_weights(paths, saved):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""  # noqa: PLR2004 - as many as are shown
        raise ValueError(
            f"{source} has weights that the model lacks: {', '.join(map(repr, unknown[:3]))}{more}. Load it into the "
            "model that it was saved from, or set `strict_loading = False` on the LightningModule to leave them out."
        )
    _leave_out_what_optimizers_may_lack(leaves, paths, saved)
    return leaves


def _unknown_weights(paths: Mapping[str, KeyPath], saved: Mapping[str, KeyPath]) -> list[str]:
    """Return the names of weights that the state lacks; none if the checkpoint lacks some too, which is told first."""
    if any(path[0] == "state_dict" and key not in saved for key, path in paths.items()):
        return []
    return [str(path[1]) for key, path in saved.items() if path[0] == "state_dict" and key not in paths]


def _leave_out_what_optimizers_may_lack(
    leaves: State, paths: Mapping[str, KeyPath], saved: Mapping[str, KeyPath]
) -> None:
    parts: dict[KeyPath, list[str]] = defaultdict(list)
    for key, path in paths.items():
        if str(path[0]).startswith("optimizer_"):
            parts[path[:3]].append(key)
    saved_parts = {path[:3] for path in saved.values()}
    for part, keys in parts.items():
        if part[1:2] == ("state",) and part not in saved_parts and (part[0], "param_groups", 0) in saved_parts:
            for key in keys:
                value = leaves.pop(key)
                if isinstance(value, Tensor):
                    (value.to_local() if isinstance(value, DTensor) else value).zero_()
        elif part[1:2] == ("param_groups",) and part in saved_parts:
            for key in keys:
                if key not in saved:
                    del leaves[key]


def names_by_group(state: State) -> list[list[str]]:
    """Return the parameters' names in each group of an optimizer's state that is keyed by them."""
    return [list(group["params"]) for group in state["param_groups"]]


def by_name(metadata: Metadata, meta: State, state: State) -> Metadata:
    """Rename what a checkpoint holds as the state does: without what `torch.compile` adds, and never by number.

    Raises:
        ValueError: If an optimizer's groups had other numbers of parameters.
    """
    paths = metadata.planner_data or {}
    renamed: dict[str, KeyPath] = {
        flat_key: tuple(part.replace(COMPILED, "") if isinstance(part, str) else part for part in path)
        for flat_key, path in paths.items()
        if COMPILED in flat_key
    }
    notes = meta.get(META_KEY, {})
    for index, keyed_by in enumerate(notes.get("optimizers_keyed_by", [])):
        key = f"optimizer_{index}"
        if keyed_by == "number" and key in state:
            by_group = names_by_group(state[key])
            counts = notes.get("parameters_by_group", [])[index : index + 1]
            if counts and counts != [[len(group) for group in by_group]]:
                raise ValueError(
                    f"Optimizer {index} had {counts[0]} parameters in its groups when it was saved, and has "
                    f"{[len(group) for group in by_group]} now. Give it the same groups."
                )
            names = [each for group in by_group for each in group]
            for flat_key, path in paths.items():
                if path[:2] == (key, "state") and str(path[2]).isdecimal() and int(path[2]) < len(names):
                    renamed[flat_key] = (key, "state", names[int(path[2])], *path[3:])
    if not renamed:
        return metadata

    def new(key: str) -> str:
        return ".".join(map(str, renamed[key])) if key in renamed else key

    return replace(
        metadata,
        planner_data={new(key): renamed.get(key, path) for key, path in paths.items()},
        state_dict_metadata={new(key): entry for key, entry in metadata.state_dict_metadata.items()},
        storage_data={
            MetadataIndex(new(index.fqn), index.offset, index.index): info
            for index, info in metadata.storage_data.items()
        },
    )


def put_objects(state: State, flat: State) -> None:
    """Set what is no tensor in the nested state; but the parameters' names, which are the state's own."""
    before, paths = flatten(state)
    for key, value in flat.items():
        is_own = key not in paths or (key.endswith(".params") and key.startswith("optimizer_"))
        if not is_own and not isinstance(before[key], Tensor):
            set_at(state, paths[key], value)
