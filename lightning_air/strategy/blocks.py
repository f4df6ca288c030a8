"""Which modules become FSDP blocks, and what is done to them before they are sharded.

A block is gathered, computed and released as one, so peak memory is the sharded state plus one block. Everything
here is a function of a module tree; nothing talks to another rank.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule  # torch.compile returns it; no public name
from torch.utils.checkpoint import checkpoint

Wrap = Sequence[str | type[nn.Module]] | int | None

# They hold modules and have no forward of their own, so nothing would ever gather their parameters.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def choose_blocks(root: nn.Module, wrap: Wrap = None) -> list[nn.Module]:
    """Return the modules below `root` to shard as one block each, inner ones before outer ones.

    A module that shares a parameter, or a submodule that has one, with the rest of the model (tied embeddings) is left
    to its parent: a parameter can be gathered by one block only.

    Args:
        root: The module that is sharded last, with all that no block took.
        wrap: Classes by type or name; or the number of parameters from which a module becomes a block; or None:
            the classes that the model itself names in `_no_split_modules` (as Hugging Face models do), else the
            repeated layers of every outermost `ModuleList` or `Sequential`.

    Raises:
        ValueError: If a class named in `wrap` occurs nowhere below `root` or as containers only, or nothing has that
            many parameters.
    """
    sharing = _modules_sharing_parameters(root)
    if isinstance(wrap, int):
        blocks = _blocks_by_size(root, wrap, sharing)
    elif wrap is not None:
        blocks = find_modules(root, wrap, option="wrap")
    else:
        blocks = _default_blocks(root)
    chosen = {id(block) for block in blocks if block is not root and _can_be_block(block)}
    if not chosen and wrap is not None and not isinstance(wrap, int):
        found = ", ".join(sorted({type(original(block)).__name__ for block in blocks}))
        raise ValueError(
            f"wrap names {found}, but nothing that can be a block: only the root, plain containers or modules without "
            "parameters. Name the classes of the model's layers."
        )
    return [module for module in _inner_first(root) if id(module) in chosen - sharing]


def outermost_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules below `module` that have parameters and a forward of their own."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, CONTAINERS):
            found += outermost_modules(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def find_modules(root: nn.Module, names: Sequence[str | type[nn.Module]], *, option: str) -> list[nn.Module]:
    """Return the modules of `root` whose class is one of `names`, by type, class name or full dotted name.

    A compiled module answers to the class that was compiled, and stands for it.

    Raises:
        ValueError: If one of `names` matches nothing.
    """
    found: list[nn.Module] = []
    for name in names:
        matches = [module for module in _compiled_or_plain(root) if _is_class(module, name)]
        if not matches:
            present = sorted({type(original(module)).__name__ for module in root.modules()})
            shown = name if isinstance(name, str) else name.__qualname__
            raise ValueError(
                f"{option} names {shown!r}, but the model has no module of that class. It has: {', '.join(present)}."
            )
        found += matches
    return found


def checkpoint_activations(root: nn.Module, names: Sequence[str | type[nn.Module]]) -> None:
    """Make the modules of the named classes recompute their activations in the backward pass.

    The forward is wrapped in place, so parameter names, and with them checkpoints, stay as they are. Doing it twice
    does nothing more.

    Raises:
        ValueError: If one of `names` matches nothing.
    """
    for module in find_modules(root, names, option="activation_checkpointing"):
        inner = original(module)
        if not getattr(inner, "_air_checkpointed", False):  # a mark: the forward may have been compiled since
            inner.forward = functools.partial(checkpoint, inner.forward, use_reentrant=False)
            inner._air_checkpointed = True  # type: ignore[assignment] # noqa: SLF001 - our own mark


def compile_forwards(
    modules: Sequence[nn.Module], compiler: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the forward of each module by its compiled form, once."""
    for module in modules:
        if not getattr(module, "_air_compiled", False):
            module.forward = compiler(module.forward)
            module._air_compiled = True  # type: ignore[assignment] # noqa: SLF001 - our own mark


def original(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was called on, or the module itself."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module  # noqa: SLF001 - no public name


def _compiled_or_plain(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module, but of a compiled one only the outer shell: its hooks must stay outside the graph."""
    inside = {id(module._orig_mod) for module in root.modules() if isinstance(module, OptimizedModule)}  # noqa: SLF001
    return (module for module in root.modules() if id(module) not in inside)


def _is_class(module: nn.Module, name: str | type[nn.Module]) -> bool:
    cls = type(original(module))
    if isinstance(name, str):
        return name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return issubclass(cls, name)


def _default_blocks(root: nn.Module) -> list[nn.Module]:
    named = {
        name
        for module in root.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
        if isinstance(name, str)
    }
    blocks = [module for module in _compiled_or_plain(root) if any(_is_class(module, name) for name in named)]
    return blocks or list(_repeated_layers(root))


def _repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        layers = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if isinstance(child, nn.Sequential):
            # Plain layers (Linear, ReLU, …) in it are one block's inside, or a stack's first and last; composites are
            # its layers.
            layers = [layer for layer in layers if any(True for _ in layer.children())]
        if len({type(original(layer)) for layer in layers}) < len(layers):
            for layer in layers:
                yield from outermost_modules(layer) if isinstance(layer, CONTAINERS) else (layer,)
        else:
            yield from _repeated_layers(child)


def _blocks_by_size(root: nn.Module, min_num_params: int, sharing: set[int]) -> list[nn.Module]:
    blocks: list[nn.Module] = []

    def collect(module: nn.Module) -> dict[int, int]:
        """Return the sizes of the parameters below `module` that no block has taken."""
        inner = original(module)
        sizes = {id(param): param.numel() for param in inner.parameters(recurse=False)}
        for child in inner.children():
            sizes |= collect(child)
        if sum(sizes.values()) >= min_num_params and _can_be_block(module) and id(module) not in sharing:
            blocks.append(module)
            return {}
        return sizes

    if collect(root) and not blocks:
        total = sum(param.numel() for param in root.parameters())
        raise ValueError(
            f"wrap={min_num_params} asks for blocks of at least that many parameters, but the whole model has {total}. "
            "Give a smaller number, or module classes."
        )
    return blocks


def _can_be_block(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and any(True for _ in module.parameters())


def _modules_sharing_parameters(root: nn.Module) -> set[int]:
    """Return the ids of the modules that hold some, but not all, of the places where a parameter is used."""
    places: dict[int, list[frozenset[int]]] = {}  # parameter → for each place, the modules around it

    def visit(module: nn.Module, around: frozenset[int]) -> None:
        around |= {id(module)}
        for param in module.parameters(recurse=False):
            places.setdefault(id(param), []).append(around)
        for child in module.children():
            visit(child, around)

    visit(root, frozenset())
    tied = [around for around in places.values() if len(around) > 1]
    return {module for around in tied for module in frozenset.union(*around) - frozenset.intersection(*around)}


def _inner_first(module: nn.Module) -> list[nn.Module]:
    """Return all modules, every one after the modules below it, each once."""
    ordered: dict[int, nn.Module] = {}

    def visit(part: nn.Module) -> None:
        for child in part.children():
            visit(child)
        ordered.setdefault(id(part), part)

    visit(module)
    return list(ordered.values())
