"""What is wrong with a checkpoint that somebody else may have written, as one family of errors; and safe file names.

- `BadCheckpointError`, a `ValueError`: the content of a file cannot be used.
  - `DamagedCheckpointError`: it is not what was written: truncated, altered, or never of this kind.
  - `UnsafeCheckpointError`: it asks for what a checkpoint does not need: code to run, a file outside of the checkpoint.
  - `NewerCheckpointError`: a newer version of this package wrote it.

That a file cannot be had at all is an `OSError`, as everywhere.
"""

from collections.abc import Callable
from pathlib import PureWindowsPath

_MAX_SHOWN_CHARACTERS = 200
_MAX_SHOWN_BITS = 256


class BadCheckpointError(ValueError):
    """The content of a checkpoint's file cannot be used.

    The message names the file and what to do: load another checkpoint, allow a type, or update this package.
    """


class DamagedCheckpointError(BadCheckpointError):
    """The bytes are not those that were written."""


class UnsafeCheckpointError(BadCheckpointError):
    """The file names code, or a file outside of its checkpoint, that a checkpoint has no need for."""


class NewerCheckpointError(BadCheckpointError):
    """The file has a format that only a newer version of this package reads."""


def check_name(name: object, *, source: str) -> str:
    """Return a file's name if it is a plain path below its checkpoint: `a`, or `a/b`, as a normalised path is spelt.

    Args:
        name: What a file calls another file; anything.
        source: The file that says it, for the message.

    Raises:
        UnsafeCheckpointError: If it could lead elsewhere, on this or on another operating system or store.
    """
    why = "is no text" if not isinstance(name, str) else next((why for why, is_so in _UNSAFE if is_so(name)), None)
    if why is not None:
        raise UnsafeCheckpointError(
            f"{source} names the file {shown(name)}, which {why}. A checkpoint's files lie below its own folder: do "
            "not use this checkpoint, and find out who wrote it."
        )
    assert isinstance(name, str)
    return name


def shown(value: object) -> str:
    """Return a short and harmless text for a value that a file holds: scalars as they are, else the type's name."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _MAX_SHOWN_CHARACTERS else f"{value[:_MAX_SHOWN_CHARACTERS]!r}…"
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return "a huge number"  # Python refuses to write some of them out
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


_UNSAFE: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("is empty", lambda name: not name),
    ("holds characters that cannot be printed", lambda name: not name.isprintable()),
    ("holds a backslash", lambda name: "\\" in name),
    ("starts with a drive", lambda name: bool(PureWindowsPath(name).drive)),
    ("is absolute", lambda name: name.startswith("/")),
    ("leads out of its folder", lambda name: ".." in name.split("/")),
    ("is not normalised", lambda name: not {"", "."}.isdisjoint(name.split("/"))),
)
