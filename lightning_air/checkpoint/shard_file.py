"""Write tensors and objects into one `.distcp` file, and hash the bytes on their way.

The format is that of `torch.distributed.checkpoint`: one `torch.save` archive after another, each found by offset and
length. Three things differ from how torch writes it, and none in what a reader sees: the bytes go from the tensor's
memory to the file without a copy, the archive's own CRC-32 is left out (it costs three times what writing costs, and
`torch.load` never checks it), and a digest of the whole file is at hand when it is closed.
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # private, and what `.metadata` holds
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_air.checkpoint.manifest import Digest, FileRecord


@dataclass(frozen=True)
class Item:
    """One entry of a shard file.

    Attributes:
        indices: Under which names `.metadata` lists it: several for tied weights.
        data: A tensor in any memory, which is written without what its storage holds beside it, or the bytes of a
            `torch.save`d object.
    """

    indices: tuple[MetadataIndex, ...]
    data: Tensor | bytes

    @property
    def num_bytes(self) -> int:
        """The size of the content, without the archive around it."""
        return self.data.nbytes if isinstance(self.data, Tensor) else len(self.data)


@dataclass(frozen=True)
class WrittenFile:
    """A shard file that is complete on disk."""

    name: str
    record: FileRecord
    entries: tuple[tuple[MetadataIndex, StorageInfo], ...]


class _HashedFile(io.RawIOBase):
    """Writes all of what it is given to a descriptor, and hashes it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.digest = Digest()
        self.position = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += os.write(self._descriptor, view[written:])
        except OSError as error:
            self.error = error
            raise
        self.digest.update(view)
        self.position += len(view)
        return len(view)


def write_shard_file(path: Path, name: str, items: Sequence[Item]) -> WrittenFile:
    """Write a new file and sync it to disk. Any thread may call this.

    Args:
        path: The file to make; it must not exist.
        name: What `.metadata` calls it.
        items: In the order in which they are to lie in the file.

    Raises:
        OSError: Naming the file, if it exists or cannot be written whole.
    """
    entries: list[tuple[MetadataIndex, StorageInfo]] = []
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            stream = _HashedFile(descriptor)
            for item in items:
                start = stream.position
                try:
                    if isinstance(item.data, bytes):
                        stream.write(item.data)
                    else:
                        _save_tensor(item.data, stream)
                except RuntimeError:  # torch closes its archive, and hides the disk's error behind its own
                    if stream.error is None:
                        raise
                    raise stream.error from None
                info = StorageInfo(name, start, stream.position - start)
                entries.extend((index, info) for index in item.indices)
            os.fsync(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)  # this call has made it
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error}, while writing {name}", str(path)) from error
    return WrittenFile(name, FileRecord(stream.position, stream.digest.hexdigest()), tuple(entries))


def _save_tensor(tensor: Tensor, stream: _HashedFile) -> None:
    tensor = tensor.detach().cpu()
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch.save writes the whole storage
    computes = get_crc32_options()
    set_crc32_options(False)  # of this thread alone, from torch 2.12 on
    try:
        torch.save(tensor, stream)  # type: ignore[arg-type] # it only writes and flushes
    finally:
        set_crc32_options(computes)
