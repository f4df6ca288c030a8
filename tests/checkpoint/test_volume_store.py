"""A mounted volume gets whole files, from front to back, and nothing that it does not know."""

import errno
import os
import threading
from pathlib import Path

import pytest

from lightning_air.checkpoint import volume_store
from lightning_air.checkpoint.volume_store import MountedVolumeStore
from tests.checkpoint.test_stores import mounted
from tests.kit.hostile import volume_rules

DATA = bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_store, "_BLOCK_BYTES", 100_000)


@pytest.fixture
def store(tmp_path: Path) -> MountedVolumeStore:
    return mounted(tmp_path)


def test_the_rules_would_notice(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with volume_rules(tmp_path):
        for break_one in (
            lambda: (tmp_path / "a").open("ab"),
            lambda: (tmp_path / "a").open("r+b"),
            lambda: (tmp_path / "a").rename("b"),
            lambda: (tmp_path / "b").symlink_to("a"),
            lambda: (tmp_path / "b").hardlink_to("a"),
            lambda: os.truncate("a", 1),
            lambda: os.open("a", os.O_RDWR),
        ):
            with pytest.raises(OSError, match="a volume"):
                break_one()


def test_everything_works_by_the_rules_of_a_volume(store: MountedVolumeStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    with volume_rules(tmp_path / "volume"):
        for _ in range(2):
            store.put("step=1/rank=0/a", source)
            store.put_bytes("step=1/.metadata", b"metadata")
        assert store.read("step=1/rank=0/a") == DATA
        store.get("step=1/rank=0/a", tmp_path / "target")
        assert [entry.name for entry in store.list("step=1")] == ["step=1/.metadata", "step=1/rank=0"]
        assert store.num_bytes("step=1/rank=0/a") == len(DATA)
        store.delete("step=1/rank=0/a")
        store.delete_folder("step=1")
    assert (tmp_path / "target").read_bytes() == DATA


@pytest.mark.parametrize("is_small", [False, True])
def test_a_file_is_written_from_front_to_back(store: MountedVolumeStore, tmp_path: Path, is_small: bool) -> None:
    # Given a pipe in the file's place: it refuses seeks, offsets, truncation and allocation.
    pipe = tmp_path / "volume" / "run" / "a"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    if is_small:
        store.put_bytes("a", DATA)
    else:
        Path("source").write_bytes(DATA)
        store.put("a", Path("source"))
    reader.join()
    assert read == [DATA]


def test_nothing_is_looked_for_before_it_is_made(store: MountedVolumeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # A look-up that found nothing would be remembered, and hide what this or another node makes then.
    looked: list[str] = []
    for function in ("stat", "lstat", "access", "scandir", "listdir"):
        monkeypatch.setattr(os, function, lambda path, *_, _name=function, **__: looked.append(f"{_name} {path}"))
    store.put_bytes("step=1/a", b"")
    monkeypatch.undo()
    assert looked == []


def test_a_folder_that_is_there_but_cannot_be_seen_yet_is_worth_another_try(
    store: MountedVolumeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a node that remembers that there was no such folder: making it fails, and so does opening a file in it.
    def exists(*_: object, **__: object) -> None:
        raise FileExistsError

    monkeypatch.setattr(Path, "mkdir", exists)
    with pytest.raises(OSError, match=r"not to be seen yet.*run/step=1/a") as raised:
        store.put_bytes("step=1/a", b"")
    assert raised.value.errno == errno.ESTALE


def test_a_volume_that_is_gone_is_no_passing_error(store: MountedVolumeStore, tmp_path: Path) -> None:
    (tmp_path / "volume").rmdir()
    with pytest.raises(FileNotFoundError, match="volume/run"):
        store.put_bytes("step=1/a", b"")
    assert not (tmp_path / "volume").exists()


@pytest.mark.parametrize("failing", ["write", "close"])
def test_an_error_names_the_file_and_removes_what_is_there_of_it(
    store: MountedVolumeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    Path("source").write_bytes(DATA)
    real = getattr(os, failing)

    def fail(descriptor: int, *args: object) -> object:
        is_target = "/volume/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
        result = real(descriptor, *args)
        if is_target:
            raise OSError(errno.ENOSPC, "No space left on device")
        return result

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match=r"No space left on device: .*volume/run/a'") as raised:
        store.put("a", Path("source"))
    monkeypatch.undo()
    assert raised.value.errno == errno.ENOSPC
    assert store.list() == []


def test_the_first_error_is_the_one_that_is_raised(store: MountedVolumeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close

    def fail_to_close(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, "the second")

    def fail_to_write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "the first")

    monkeypatch.setattr(os, "write", fail_to_write)
    monkeypatch.setattr(os, "close", fail_to_close)
    with pytest.raises(OSError, match="the first"):
        store.put_bytes("a", b"x")


def test_short_writes_go_on(store: MountedVolumeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, block: write(descriptor, block[:1000]))
    store.put_bytes("a", DATA)
    assert store.read("a") == DATA


def test_metadata_is_deleted_first(store: MountedVolumeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step=1/a", "step=1/.metadata", "step=1/-b"):
        store.put_bytes(name, b"")
    removed: list[str] = []
    unlink = Path.unlink

    def noted(self: Path) -> None:
        removed.append(self.name)
        unlink(self)

    monkeypatch.setattr(Path, "unlink", noted)
    store.delete_folder("step=1")
    assert removed[0] == ".metadata"
    assert sorted(removed) == ["-b", ".metadata", "a"]


def test_metadata_that_cannot_be_deleted_yet_keeps_the_rest(
    store: MountedVolumeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a node that looked for `.metadata` before another one published it, and remembers that it was not there.
    for name in ("step=1/a", "step=1/.metadata"):
        store.put_bytes(name, b"")

    def unlink(self: Path, **_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "remembered", str(self))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match=r"step=1/.metadata is still listed") as raised:
        store.delete_folder("step=1")
    monkeypatch.undo()
    assert raised.value.errno == errno.ESTALE
    assert [entry.name for entry in store.list("step=1")] == ["step=1/.metadata", "step=1/a"]
    store.delete_folder("step=1")
    assert store.list() == []
