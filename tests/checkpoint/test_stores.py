"""What every store promises; the same tests for each."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from lightning_air.checkpoint.files_api_store import FilesApiStore
from lightning_air.checkpoint.fsspec_store import FsspecStore
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.volume_store import MountedVolumeStore
from tests.kit.files_api_server import files_api, files_of
from tests.kit.fuse_volume import fuse_volume
from tests.kit.hostile import HostileStore

VOLUME = "/Volumes/main/default/ckpt"
NAMES = [".metadata", "a b%20ü.distcp", "model.distcp", "step=1/rank=0/__0_0.distcp", "x" * 200]


def mounted(tmp_path: Path, folder: str = "run") -> MountedVolumeStore:
    volume = tmp_path / "volume"
    volume.mkdir(exist_ok=True)
    return MountedVolumeStore(f"{VOLUME}/{folder}", volume=volume, folder=folder)


@pytest.fixture(params=["local", "mounted", "fuse", "memory", "fsspec-file", "files-api", "hostile"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store with nothing in it, whose root folder has yet to be made."""
    if request.param == "local":
        yield LocalStore(tmp_path / "store" / "run")
    elif request.param == "mounted":
        yield mounted(tmp_path)
    elif request.param == "fuse":
        with fuse_volume(tmp_path) as volume:
            if volume is None:
                pytest.skip("needs the right to mount")
            yield MountedVolumeStore(f"{VOLUME}/run", volume=volume.mount, folder="run")
    elif request.param == "memory":
        yield FsspecStore(f"memory://{tmp_path.name}/run")
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    elif request.param == "fsspec-file":
        yield FsspecStore(f"file://{tmp_path}/store/run")
    elif request.param == "files-api":
        with files_api() as served:
            yield FilesApiStore(f"{VOLUME}/run", connect=lambda: files_of(served))
    else:
        yield HostileStore(tmp_path / "store")


def put(store: Store, name: str, data: bytes = b"data") -> None:
    """Put what lies in a file, as an upload does."""
    source = Path("source")
    source.write_bytes(data)
    store.put(name, source)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000], ids=["empty", "small", "larger"])
def test_what_was_put_is_there(store: Store, name: str, data: bytes) -> None:
    put(store, name, data)
    store.put_bytes(f"{name}.bytes", data)
    target = Path("target")
    for there in (name, f"{name}.bytes"):
        assert store.num_bytes(there) == len(data)
        assert store.read(there) == data
        store.get(there, target)
        assert target.read_bytes() == data
        assert store.md5(there) is None


def test_what_is_put_again_replaces_what_was_there(store: Store) -> None:
    for data in (b"long, long ago", b"now"):
        put(store, "a", data)
        store.put_bytes("b", data)
    assert (store.read("a"), store.read("b")) == (b"now", b"now")


def test_what_is_not_there(store: Store) -> None:
    for folder_is_there in (False, True):
        if folder_is_there:
            put(store, "folder/a")
        for name in ("folder/b", "no/folder/at/all"):
            assert store.num_bytes(name) is None
            assert store.md5(name) is None
            store.delete(name)
            with pytest.raises(FileNotFoundError, match=name):
                store.read(name)
            with pytest.raises(FileNotFoundError, match=name):
                store.get(name, Path("target"))
        assert store.list("no/folder") == []
        store.delete_folder("no/folder")
    assert store.num_bytes("folder") is None
    assert store.list("folder/a") == []


def test_a_source_that_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(FileNotFoundError, match="missing-source"):
        store.put("a", Path("missing-source"))


def test_a_listing_is_sorted_and_goes_one_folder_deep(store: Store) -> None:
    assert store.list() == []
    for name in NAMES[1:]:
        put(store, name, name.encode())
    store.put_bytes("step=1/.metadata", b"12345")
    found = {entry.name: entry for entry in store.list()}
    assert list(found) == sorted({name.split("/")[0] for name in NAMES[1:]})
    assert [name for name, entry in found.items() if entry.is_folder] == ["step=1"]
    assert found["step=1"].num_bytes == 0
    assert found["model.distcp"].num_bytes == len("model.distcp")
    assert [(entry.name, entry.is_folder) for entry in store.list("step=1")] == [
        ("step=1/.metadata", False),
        ("step=1/rank=0", True),
    ]
    assert [entry.name for entry in store.list("step=1/rank=0")] == ["step=1/rank=0/__0_0.distcp"]
    modified = found["model.distcp"].modified_seconds
    assert modified is not None
    assert abs(modified - Path("source").stat().st_mtime) < 60


def test_a_listing_shows_what_came_and_went_since_the_last_one(store: Store) -> None:
    put(store, "folder/a")
    assert [entry.name for entry in store.list("folder")] == ["folder/a"]
    put(store, "folder/b")
    store.delete("folder/a")
    assert [entry.name for entry in store.list("folder")] == ["folder/b"]
    assert store.num_bytes("folder/a") is None


def test_a_folder_is_deleted_whole_and_alone(store: Store) -> None:
    for name in ("step=1/.metadata", "step=1/a", "step=1/rank=0/b", "step=1/rank=0/.metadata", "step=10/a"):
        put(store, name)
    store.delete_folder("step=1")
    assert [entry.name for entry in store.list()] == ["step=10"]
    assert store.read("step=10/a") == b"data"
    put(store, "step=1/a", b"again")
    assert store.read("step=1/a") == b"again"


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/etc/passwd", "a//b", "a/", "./a", "a\0b"])
def test_a_name_cannot_leave_the_root(store: Store, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.put(name, Path("source")),
        lambda: store.put_bytes(name, b""),
        lambda: store.get(name, Path("target")),
        lambda: store.read(name),
        lambda: store.num_bytes(name),
        lambda: store.md5(name),
        lambda: store.delete(name),
        lambda: store.delete_folder(name),
        *([lambda: store.list(name)] if name else []),
        *([lambda: store.path(name)] if store.is_local else []),
    ]
    Path("source").touch()
    for call in calls:
        with pytest.raises(ValueError, match="relative path"):
            call()


def test_only_a_local_store_has_paths(store: Store) -> None:
    if store.is_local:
        put(store, "folder/a")
        assert store.path("folder/a").read_bytes() == b"data"
    else:
        with pytest.raises(TypeError, match="has no local path"):
            store.path("folder/a")


def test_many_threads_at_once(store: Store) -> None:
    sources = [Path(f"source-{index}") for index in range(8)]
    for index, source in enumerate(sources):
        source.write_bytes(bytes([index]) * 1000)
    errors: list[Exception] = []

    def work(index: int) -> None:
        try:
            name = f"new/folder-{index % 2}/{index}"
            store.put(name, sources[index])
            assert store.read(name) == bytes([index]) * 1000
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [entry.name for entry in store.list("new")] == ["new/folder-0", "new/folder-1"]
    assert sum(len(store.list(f"new/folder-{index}")) for index in range(2)) == 8
    store.delete_folder("new")
    assert store.list() == []
