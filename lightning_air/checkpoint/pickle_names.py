"""What a pickle names, told without running it: for messages, never for deciding what may be loaded.

A pickle that was made to deceive can hide its names from a reader, but not from a machine that refuses them.
"""

import io
import itertools
import pickletools
import sys
from collections.abc import Iterator

_MAX_INSTRUCTIONS = 100_000
# Modules of the standard library whose classes hold data, and the built-in classes that do.
_DATA_MODULES = frozenset(
    ("argparse", "array", "collections", "datetime", "decimal", "enum", "fractions", "ipaddress", "pathlib", "uuid")
)
_PLAIN_TYPES = (
    bool,
    bytearray,
    bytes,
    complex,
    dict,
    float,
    frozenset,
    int,
    list,
    object,
    range,
    set,
    slice,
    str,
    tuple,
)
# The last two put bytes and plain objects together again.
_DATA_NAMES = {*(f"builtins.{each.__name__}" for each in _PLAIN_TYPES), "_codecs.encode", "copyreg._reconstructor"}
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def named_globals(data: bytes) -> list[str]:
    """Return the names that a pickle, or several on end, ask for, in order, as far as they can be told."""
    found: dict[str, None] = {}
    try:
        for name in _scan(data):
            found[name] = None
    except Exception:  # noqa: BLE001 - whatever its arguments hold; what was found until then is of use
        return list(found)
    return list(found)


def _scan(data: bytes) -> Iterator[str]:
    stream = io.BytesIO(data)
    instructions = itertools.chain.from_iterable(pickletools.genops(stream) for _ in iter(stream.tell, len(data)))
    texts = ["?", "?"]  # as they came to lie on the stack
    memo: dict[int, str] = {}
    for opcode, argument, _ in itertools.islice(instructions, _MAX_INSTRUCTIONS):
        if opcode.name in {"GLOBAL", "INST"}:
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(texts[-2:])
        elif "GET" in opcode.name:
            texts.append(memo.get(int(str(argument)), "?"))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = texts[-1]
        elif "PUT" in opcode.name:
            memo[int(str(argument))] = texts[-1]
        elif isinstance(argument, str):
            texts.append(argument)


def runs_code(name: str) -> bool:
    """Return whether a name stands for code rather than for data, so that nobody should be told how to allow it."""
    module, _, last = name.rpartition(".")
    module = _OLD_MODULES.get(module, module)
    top = module.split(".")[0]
    if top == "torch":
        return not last.lstrip("_")[:1].isupper() and not last.startswith("_rebuild")
    return top in sys.stdlib_module_names and top not in _DATA_MODULES and f"{module}.{last}" not in _DATA_NAMES
