"""`manifest.json`: which files a checkpoint has, how long each is and what its digest is.

The manifest is written after all files that it lists and before `.metadata`, whose bytes are known by then, so that it
lists `.metadata` too; itself it does not list. It carries a digest of its own content and is read only in the exact
form in which it is written, so that no altered bit goes unnoticed, in a name, a number, or between them.

A digest tells an accident, not an attack: who can write to the folder can write a new manifest. What must hold then is
checked apart from it: names (`untrusted.py`) and types (`safe_pickle.py`).
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import xxhash

from lightning_air.checkpoint.untrusted import (
    DamagedCheckpointError,
    NewerCheckpointError,
    check_name,
    shown,
)

MANIFEST_NAME = "manifest.json"
OBJECTS_NAME = "meta.pt"
FORMAT_VERSION = 1
# Stands in `StorageMeta.modules` of our `.metadata`: it tells a checkpoint of ours that has lost its manifest from one
# that never had any.
WRITTEN_BY = "lightning_air"

_BLOCK_BYTES = 4 * 1024 * 1024
_MIN_BLOCK_BYTES = 64 * 1024
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file's content.

    Attributes:
        num_bytes: Its size.
        xxh3_128: The XXH3-128 digest of its bytes, as 32 lower-case hexadecimal digits.
    """

    num_bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        _check_count("num_bytes", self.num_bytes)
        if not isinstance(self.xxh3_128, str) or not _DIGEST.fullmatch(self.xxh3_128):
            raise DamagedCheckpointError(f"xxh3_128 must be 32 hexadecimal digits, got {shown(self.xxh3_128)}")


class Digest:
    """The digest of bytes that pass by in pieces. One thread at a time; large pieces release the GIL.

    Attributes:
        num_bytes: How many have passed.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._hash = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes in; nothing is copied."""
        self._hash.update(data)
        self.num_bytes += memoryview(data).nbytes

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        return self._hash.hexdigest()

    def record(self) -> FileRecord:
        """Return the size and the digest of all bytes so far."""
        return FileRecord(self.num_bytes, self.hexdigest())


def digest_bytes(data: bytes | bytearray | memoryview) -> FileRecord:
    """Return the size and the digest of these bytes."""
    digest = Digest()
    digest.update(data)
    return digest.record()


def digest_file(path: Path | str, *, on_block: Callable[[int], object] | None = None) -> FileRecord:
    """Return the size and the digest of a file, as it is read.

    Args:
        path: A file on this machine.
        on_block: Called with the number of bytes of every block. What it raises ends the reading.

    Raises:
        OSError: If the file cannot be read to its end.
    """
    # Not mmap, which takes half the CPU time (0.035 against 0.07 s per GB): there an unreadable block or a file that
    # shrinks kills the process with SIGBUS instead of raising.
    digest = Digest()
    with Path(path).open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        buffer = memoryview(bytearray(max(_MIN_BLOCK_BYTES, min(size, _BLOCK_BYTES))))
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            if on_block is not None:
                on_block(num_bytes)
    return digest.record()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of, and where in training it was taken.

    Attributes:
        step: Optimizer steps done.
        epoch: The epoch it was taken in, from 0.
        world_size: The number of ranks that wrote it.
        sharding: "ddp", "fsdp", "hsdp", or another word for how the state was shared out.
        created_seconds: When it was saved, in seconds since 1970.
        files: What is known of each file, by its path below the checkpoint; all files but the manifest itself.
        format_version: Of the manifest and of the layout of the checkpoint.

    Raises:
        UnsafeCheckpointError: If a file's name is no plain path below the checkpoint.
        DamagedCheckpointError: If another value cannot be.
    """

    step: int
    epoch: int
    world_size: int
    sharding: str
    created_seconds: float
    files: Mapping[str, FileRecord]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "world_size", "format_version"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.sharding, str):
            raise DamagedCheckpointError(f"sharding must be text, got {shown(self.sharding)}")
        seconds = self.created_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise DamagedCheckpointError(f"created_seconds must be a time since 1970, got {shown(seconds)}")
        for name, record in self.files.items():
            check_name(name, source=MANIFEST_NAME)
            if name == MANIFEST_NAME:
                raise DamagedCheckpointError(f"{MANIFEST_NAME} cannot list itself")
            assert isinstance(record, FileRecord)
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @property
    def num_bytes(self) -> int:
        """The size of all files together."""
        return sum(record.num_bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        document["files"] = {name: asdict(record) for name, record in self.files.items()}
        document["digest"] = digest_bytes(_canonical(document)).xxh3_128
        return _canonical(document)

    @classmethod
    def from_json(cls, data: bytes, *, source: str = MANIFEST_NAME) -> Self:
        """Return the manifest that these bytes hold.

        Keys that this version does not know are covered by the digest and then ignored: a version that adds something
        which must not be ignored raises the format version.

        Args:
            data: The content of `manifest.json`.
            source: What a message calls it.

        Raises:
            NewerCheckpointError: If its format version is newer than this package.
            DamagedCheckpointError: If a bit is not as it was written.
            UnsafeCheckpointError: If a file's name is no plain path below the checkpoint.
        """
        document = _parse(data, source)
        content = {key: value for key, value in document.items() if key != "digest"}
        found = digest_bytes(_canonical(content)).xxh3_128
        if document.get("digest") != found:
            raise DamagedCheckpointError(
                f"{source} is not as it was written: its own digest says {shown(document.get('digest'))}, its content "
                f"has {found!r}. Load another checkpoint."
            )
        # Only now: spelling and digest are those of every version, so that an altered digit is damage, and passed over.
        version = content.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise NewerCheckpointError(
                f"{source} has format version {version}, and this version of lightning_air reads up to "
                f"{FORMAT_VERSION}. Update lightning_air to load this checkpoint."
            )
        return cls._from_content(content, source)

    @classmethod
    def _from_content(cls, content: dict[str, Any], source: str) -> Self:
        try:
            known = {name: content[name] for name in cls.__dataclass_fields__}
            known["files"] = {
                check_name(name, source=source): FileRecord(record["num_bytes"], record["xxh3_128"])
                for name, record in known["files"].items()
            }
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{source} lacks a value or has one of the wrong kind: {error!r}") from error


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise DamagedCheckpointError(f"{name} must be a whole number from 0, got {shown(value)}")


def _canonical(document: object) -> bytes:
    """Return the one way in which this content is spelt."""
    return json.dumps(document, sort_keys=True, indent=1, allow_nan=False).encode()


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
        respelt = _canonical(document)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source} is not as it was written: it is no JSON ({error})") from error
    if not isinstance(document, dict) or respelt != data:
        raise DamagedCheckpointError(f"{source} is not as it was written: it is spelt in another way.")
    return document
