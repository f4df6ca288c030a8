"""Pointer files: a small file that stands for the checkpoint beside it, where a store knows no links.

`last.ckpt` then holds `{"lightning_air_pointer": "epoch=2-step=300.ckpt"}`: a plain name in the same folder. A pointer
may lead to another one, but not in a circle, and never to nothing.
"""

import json

from lightning_air.checkpoint.store import METADATA_NAME, Store
from lightning_air.checkpoint.untrusted import (
    BadCheckpointError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
    check_name,
    shown,
)

POINTER_KEY = "lightning_air_pointer"
# A pointer holds one name; anything longer is a checkpoint, and is not read to find out.
MAX_POINTER_BYTES = 4096


class PointerError(BadCheckpointError):
    """A pointer file leads nowhere, or in a circle."""


def write_pointer(store: Store, name: str, target: str) -> None:
    """Write, or replace, the pointer file `name`.

    Args:
        store: The folder of both.
        name: The file to write.
        target: The name of a checkpoint in the same folder, which should be published by now.

    Raises:
        ValueError: If the target is no plain name, the same name, or too long.
        OSError: If the file cannot be written.
    """
    _check_target(target, source=name)
    if target == name:
        raise ValueError(f"{name} cannot point to itself. Point to a checkpoint beside it.")
    data = json.dumps({POINTER_KEY: target}).encode()
    if len(data) > MAX_POINTER_BYTES:
        raise ValueError(f"{name} cannot point to a name of {len(target)} characters. Use a shorter one.")
    store.put_bytes(name, data)


def read_pointer(store: Store, name: str) -> str | None:
    """Return where a pointer file leads; None if there is none of this name: no file, a folder, or a checkpoint.

    Raises:
        UnsafeCheckpointError: If it leads out of its folder.
        DamagedCheckpointError: If it was cut off or altered.
        OSError: If it cannot be read.
    """
    num_bytes = store.num_bytes(name)
    if num_bytes is None or num_bytes > MAX_POINTER_BYTES:
        return None
    data = store.read(name)
    if not data.lstrip().startswith(b"{"):
        return None
    try:
        target = json.loads(data)[POINTER_KEY]
    except (ValueError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{store.root}/{name} is neither a checkpoint nor a whole pointer to one. Delete it, and name a checkpoint."
        ) from error
    return _check_target(target, source=f"{store.root}/{name}")


def resolve_pointer(store: Store, name: str) -> str:
    """Return the name of the checkpoint that a name stands for: where the pointers end, or the name if it is none.

    Raises:
        PointerError: If they lead in a circle, or to what is no published checkpoint.
        UnsafeCheckpointError: If one leads out of the folder.
        DamagedCheckpointError: If one was cut off or altered.
        OSError: If one cannot be read.
    """
    way = [name]
    while (target := read_pointer(store, way[-1])) is not None:
        if target in way:
            raise PointerError(
                f"{store.root}/{name} leads in a circle: {' → '.join([*way, target])}. Name a checkpoint."
            )
        way.append(target)
    is_there = store.num_bytes(way[-1]) is not None or store.num_bytes(f"{way[-1]}/{METADATA_NAME}") is not None
    if len(way) > 1 and not is_there:
        raise PointerError(
            f"{store.root}/{name} points to {way[-1]!r}, where no published checkpoint is. Name another checkpoint."
        )
    return way[-1]


def _check_target(target: object, *, source: str) -> str:
    checked = check_name(target, source=source)
    if "/" in checked:
        raise UnsafeCheckpointError(f"{source} points to {shown(target)}; it may only point into its own folder.")
    return checked
