"""Records as bytes: what a spool's segment files consist of.

A segment is a header and then frames, each a multiple of 8 bytes: one word, and a body of as many bytes as the word's
lower half says. The upper half is a CRC-32 of the body and of the zeros after it. A word of 0 means "nothing here yet",
a word of all ones "no more in this segment". Who writes a frame stores the body and a zero word after it first, and
then the frame's own word, in one store of 8 aligned bytes: at no moment is there half a frame that looks whole.

The names of a record's metrics come once per segment, in a frame of their own; a record has their number and doubles.
Everything is in the byte order of the machine; a header of the other order is none.
"""

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

from lightning_air.tracking.points import Record

WORD_BYTES = 8
NO_FRAME = 0
LAST_FRAME = 0xFFFF_FFFF_FFFF_FFFF
HEADER = struct.pack("=8sQ", b"airspool", int.from_bytes(b"version1", "big"))

_RECORD, _NAMES = 0, 1
_ZEROS = bytes(WORD_BYTES)
_KIND = struct.Struct("=II")  # kind, number of the names
_LOW_HALF = 0xFFFF_FFFF


class DamagedError(ValueError):
    """What is there is no frame."""


class Layout:
    """How the records of one tuple of names are written.

    Attributes:
        definition: Body of the frame that tells the names, followed by a zero word.
        pack: Of the time, the step and one number for each name, the body of a record, followed by a zero word.
        body_bytes: Length of that body, without the zero word.
        segment: The segment that holds the definition; whoever writes it there sets this.
    """

    __slots__ = ("body_bytes", "definition", "pack", "segment")

    def __init__(self, names: Sequence[str], names_id: int) -> None:
        record = struct.Struct(f"=IIqq{len(names)}d{WORD_BYTES}x")
        text = json.dumps(list(names)).encode()
        self.definition = _KIND.pack(_NAMES, names_id) + text + b" " * (-len(text) % WORD_BYTES) + _ZEROS
        self.pack: Callable[..., bytes] = partial(record.pack, _RECORD, names_id)
        self.body_bytes = record.size - WORD_BYTES
        self.segment: object = None


def frame_word(body: bytes) -> int:
    """Return the word of a frame, of its body followed by a zero word."""
    return crc32(body) << 32 | len(body) - WORD_BYTES


def body_bytes_of(word: int, available_bytes: int) -> int:
    """Return how long the body of a frame is.

    Args:
        word: The frame's, neither `NO_FRAME` nor `LAST_FRAME`.
        available_bytes: From the end of the word to the end of the segment.

    Raises:
        DamagedError: If no body of that length can stand there.
    """
    num_bytes = word & _LOW_HALF
    if num_bytes % WORD_BYTES or not 0 < num_bytes <= available_bytes - WORD_BYTES:
        raise DamagedError(f"a frame of {num_bytes} bytes")
    return num_bytes


def is_whole(word: int, body: memoryview) -> bool:
    """Return whether a body is what was once written with this word."""
    return crc32(_ZEROS, crc32(body)) == word >> 32


class Decoder:
    """Reads the bodies of one segment; it has to be shown every definition before the records that need it."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[list[str], struct.Struct]] = {}

    def decode(self, word: int, body: memoryview) -> Record | None:
        """Return the record that a body holds, or None if it holds names.

        Raises:
            DamagedError: If the body is not what was once written.
        """
        if not is_whole(word, body):
            raise DamagedError("checksum")
        kind, names_id = _KIND.unpack_from(body)
        if kind == _NAMES:
            names = json.loads(bytes(body[_KIND.size :]))
            self._names[names_id] = names, struct.Struct(f"=qq{len(names)}d")
            return None
        if names_id not in self._names:
            raise DamagedError("names unknown")  # their own frame is damaged
        names, values = self._names[names_id]
        timestamp_ms, step, *numbers = values.unpack_from(body, _KIND.size)
        return Record(timestamp_ms, step, dict(zip(names, numbers, strict=True)))
