"""Small real checkpoints, and a store that is remote and troublesome, for the tests of this folder."""

import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_air.checkpoint.manifest import MANIFEST_NAME, OBJECTS_NAME, WRITTEN_BY, FileRecord, Manifest, digest_file
from lightning_air.checkpoint.store import METADATA_NAME, Entry

METADATA_MODULE = "torch.distributed.checkpoint.metadata"


class OurWriter(FileSystemWriter):
    """Writes one file per item, and the mark by which a checkpoint of ours is known."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=False, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id="1", modules=[WRITTEN_BY])


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((2, 3), value), "b": torch.full((2, 3), value + 1)}, "n": 3}


def save(state: dict[str, Any], writer: FileSystemWriter) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to save in a single process", UserWarning)
        dcp.save(state, storage_writer=writer, no_dist=True)


def save_stock(folder: Path, state: dict[str, Any] | None = None) -> Path:
    """Save as stock DCP does."""
    save(small_state() if state is None else state, FileSystemWriter(folder, sync_files=False))
    return folder


def save_ours(folder: Path, *, step: int = 7, created_seconds: float = 1000.0, objects: Any = None) -> Path:
    """Save as this package does: with `meta.pt` and a manifest."""
    save(small_state(step), OurWriter(folder))
    torch.save({"epoch": 1, "loops": {"fit": [1, 2.5, "x"]}} if objects is None else objects, folder / OBJECTS_NAME)
    write_manifest(folder, step=step, created_seconds=created_seconds)
    return folder


def write_manifest(
    folder: Path,
    *,
    step: int = 7,
    created_seconds: float = 1000.0,
    change: Mapping[str, FileRecord | None] | None = None,
) -> None:
    """Write the manifest of what lies there now; `change` overrides or drops (None) a file's record."""
    names = [path.name for path in sorted(folder.iterdir()) if path.name != MANIFEST_NAME]
    files: dict[str, Any] = {name: digest_file(folder / name) for name in names} | dict(change or {})
    files = {name: record for name, record in files.items() if record is not None}
    manifest = Manifest(step=step, epoch=1, world_size=1, sharding="ddp", created_seconds=created_seconds, files=files)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)


class RemoteStore:
    """A folder as a store that is reached over a network: every call is counted and can be made to fail.

    `before` is called with what is asked and of which name, and may raise.
    """

    is_local = False

    def __init__(self, folder: Path, before: Callable[[str, str], None] = lambda *_: None) -> None:
        self.root = f"far://{folder.name}"
        self.calls: list[tuple[str, str]] = []
        self.unlisted: set[str] = set()
        self.spoil_get: Callable[[str, Path], None] = lambda *_: None
        self._folder = folder
        self._before = before
        self._lock = threading.Lock()

    def _ask(self, what: str, name: str) -> Path:
        with self._lock:
            self.calls.append((what, name))
            self._before(what, name)
        return self._folder / name

    def path(self, name: str) -> Path:
        raise TypeError(name)

    def put(self, name: str, source: Path) -> None:
        shutil.copyfile(source, self._ask("put", name))

    def put_bytes(self, name: str, data: bytes) -> None:
        self._ask("put", name).write_bytes(data)

    def get(self, name: str, target: Path) -> None:
        shutil.copyfile(self._ask("get", name), target)
        self.spoil_get(name, target)

    def read(self, name: str) -> bytes:
        return self._ask("read", name).read_bytes()

    def num_bytes(self, name: str) -> int | None:
        path = self._ask("num_bytes", name)
        return path.stat().st_size if path.is_file() else None

    def md5(self, name: str) -> str | None:
        return None

    def list(self, folder: str = "") -> Sequence[Entry]:
        found = sorted(self._ask("list", folder).glob("*"))
        names = [(f"{folder}/{path.name}" if folder else path.name, path) for path in found]
        return [
            Entry(name, path.is_dir(), 0 if path.is_dir() else path.stat().st_size, None)
            for name, path in names
            if name not in self.unlisted
        ]

    def delete(self, name: str) -> None:
        self._ask("delete", name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self._ask("delete_folder", folder), ignore_errors=True)


# ---- pickles by hand -------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def dictionary(**items: bytes) -> bytes:
    return (
        pickle.EMPTY_DICT + pickle.MARK + b"".join(text(key) + value for key, value in items.items()) + pickle.SETITEMS
    )


def record(name: str, state: bytes, module: str = METADATA_MODULE) -> bytes:
    return named(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD


def pickled(body: bytes) -> bytes:
    return b"\x80\x04" + body + pickle.STOP


class Calls:
    """Pickles as a call of a function that need not be importable by its own name."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def published_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if (path / METADATA_NAME).exists()]
