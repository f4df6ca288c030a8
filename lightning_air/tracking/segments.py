"""The segment files of a spool: making, mapping, naming and listing them."""

import errno
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_air.tracking.record_codec import HEADER, LAST_FRAME, WORD_BYTES, body_bytes_of, frame_word

_SUFFIX = ".records"
_ASIDE_SUFFIX = ".aside"
_PAGE_BYTES = 4096
_PAGES_AT_ONCE = 32
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Position(NamedTuple):
    """A place between two records of a spool; JSON keeps it as a list of two numbers.

    Attributes:
        segment: Number of the segment file.
        offset: Bytes from its beginning.
    """

    segment: int
    offset: int


BEGINNING = Position(0, 0)
"""Before the first record of any spool."""


class Segment:
    """A new segment file, mapped into memory and ready to be written.

    All its blocks are allocated here: a store into a mapped page that the disk has no room for would be a SIGBUS.

    Args:
        folder: Of the spool.
        number: Segments are read in the order of their numbers.
        num_bytes: Of the file.

    Raises:
        OSError: If the disk is full or broken; then there is no file.
    """

    def __init__(self, folder: Path, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.offset = len(HEADER)
        self.path = path = segment_path(folder, number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _allocate(descriptor, num_bytes)
            self._status = os.fstat(descriptor)
            self._map = mmap.mmap(descriptor, num_bytes)
            self.view = memoryview(self._map)
            self.words = self.view.cast("Q")
            self._touch()
            self.view[: len(HEADER)] = HEADER
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _touch(self) -> None:
        """Have the kernel map every page now, on the writer's thread, and not at the first store of training."""
        for page, offset in enumerate(range(0, self.num_bytes, _PAGE_BYTES), 1):
            self.view[offset] = 0
            if page % _PAGES_AT_ONCE == 0:
                time.sleep(0)  # lets go of the GIL

    def has_room(self, num_bytes: int) -> bool:
        """Return whether bodies of so many bytes fit in, each counted with the zero word after it."""
        return self.offset + num_bytes + WORD_BYTES <= self.num_bytes

    def append(self, body: bytes) -> None:
        """Add a frame, for which there is room.

        Args:
            body: Followed by a zero word: what an append that was interrupted has left there is no frame.
        """
        start = self.offset + WORD_BYTES
        self.view[start : start + len(body)] = body
        self.words[self.offset // WORD_BYTES] = frame_word(body)
        self.offset += len(body)

    def skip_interrupted(self) -> None:
        """Go past frames that were written by an `append` that did not live to say so."""
        while word := self.words[self.offset // WORD_BYTES]:
            self.offset += WORD_BYTES + body_bytes_of(word, self.num_bytes - self.offset - WORD_BYTES)

    def finish(self) -> None:
        """Say that no more frames follow."""
        self.words[self.offset // WORD_BYTES] = LAST_FRAME

    @property
    def is_there(self) -> bool:
        """Whether the file is still where it was made; whatever sweeps old files may have deleted it."""
        try:
            return os.path.samestat(self._status, self.path.stat())
        except OSError:
            return False

    def content(self) -> memoryview:
        """Return what is in memory, also of a file that was deleted. It stays there as long as anybody has this."""
        return memoryview(self._map)

    def close(self) -> None:
        """Take the file out of memory; nothing may be written any more."""
        self.words.release()
        self.view.release()
        with suppress(BufferError):  # somebody reads it; then it goes with that
            self._map.close()


def segment_path(folder: Path, number: int) -> Path:
    """Return where a segment lies."""
    return folder / f"{number:08d}{_SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments that are there, in order."""
    stems = (path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def put_segments_aside(folder: Path, last: int) -> None:
    """Rename the segments of a folder up to a number, so that nobody reads or deletes them.

    Raises:
        OSError: One cannot be renamed.
    """
    for path in (segment_path(folder, number) for number in segment_numbers(folder) if number <= last):
        path.rename(path.with_suffix(f".{time.time_ns()}{_ASIDE_SUFFIX}"))


def _allocate(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    for offset in range(0, num_bytes, _PAGE_BYTES):  # a network mount, or macOS
        os.pwrite(descriptor, bytes(min(_PAGE_BYTES, num_bytes - offset)), offset)
