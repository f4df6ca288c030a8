"""The only door through which pickles come in: nothing that a checkpoint holds can run code.

`load_metadata` reads `.metadata` with a machine of our own (`metadata_file.py`). `load_object` reads what `torch.save`
wrote, which is `meta.pt`, a single-file `.ckpt` or an item of a shard: it is `torch.load` with `weights_only=True`, for
archives that `torch.save` writes and no others (`archive.py`). `weights_only=False` is the caller's explicit choice.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from lightning_air.checkpoint.archive import check_archive
from lightning_air.checkpoint.metadata_file import load_metadata
from lightning_air.checkpoint.pickle_names import runs_code
from lightning_air.checkpoint.untrusted import BadCheckpointError, DamagedCheckpointError, UnsafeCheckpointError

__all__ = ["load_metadata", "load_object", "refused_names"]

_MAX_REASON_CHARACTERS = 300


def load_object(
    data: bytes | BinaryIO, *, source: str, weights_only: bool | None = None, map_location: str = "cpu"
) -> Any:
    """Return what `torch.save` wrote, in host memory.

    Args:
        data: The whole file, or a stream that can seek.
        source: What a message calls it.
        weights_only: False runs what the file asks for, as the user has explicitly allowed. None and True admit
            tensors, numbers, texts, plain containers and the types given to `torch.serialization.add_safe_globals`.
        map_location: "meta" reads what tensors look like, and not what they hold.

    Raises:
        UnsafeCheckpointError: If it names another type or function. The message says which, and how to allow it.
        DamagedCheckpointError: If it is not what `torch.save` has written since 2020.
        OSError: If the stream cannot be read.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    is_safe = weights_only is not False
    try:
        if is_safe:
            check_archive(stream)
    except BadCheckpointError as error:
        raise type(error)(f"{source} {error}.") from error.__cause__
    try:
        return torch.load(stream, map_location=map_location, weights_only=is_safe)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # an altered file can make torch raise anything
        if is_safe and isinstance(error, pickle.UnpicklingError):
            raise _refusal(source, refused_names(stream), error) from error
        raise DamagedCheckpointError(f"{source} cannot be loaded: {_reason(error)}") from error


def refused_names(stream: BinaryIO) -> list[str]:
    """Return what an archive of `torch.save` names and `load_object` would not admit now, without loading it.

    As far as that can be told by reading it: an archive that was made to deceive can hide names from this, but not from
    `load_object`.
    """
    stream.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - as above; `load_object` says what is wrong with it
        return []


def _refusal(source: str, names: Sequence[str], error: Exception) -> UnsafeCheckpointError:
    code = [name for name in names if runs_code(name)]
    if code:
        return UnsafeCheckpointError(
            f"{source} names {', '.join(code)}, which is code and no data: to load it may run it. Do not use this "
            "file, and find out who wrote it."
        )
    if names:
        return UnsafeCheckpointError(
            f"{source} holds {', '.join(names)}, which a safe load does not admit. If you trust whoever wrote it, "
            f"call torch.serialization.add_safe_globals([{', '.join(names)}]) before, or load with weights_only=False."
        )
    return UnsafeCheckpointError(
        f"{source} does what a safe load does not admit: {_reason(error)}. It was altered, or made to run code. Only "
        "if you trust whoever wrote it, load it with weights_only=False."
    )


def _reason(error: Exception) -> str:
    """Return what torch found wrong, without its advice."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
    return text.split("\n", maxsplit=1)[0][:_MAX_REASON_CHARACTERS].rstrip(".")
