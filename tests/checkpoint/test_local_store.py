"""A local store keeps what it has promised to keep, and a deletion stays inside its folder."""

import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_air.checkpoint import local_store
from lightning_air.checkpoint.local_store import LocalStore, make_folder, sync_file, sync_folder

_events: list[tuple[str, str]] = []
_watched: list[str] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _watched and event in {"os.remove", "os.rmdir", "os.rename"}:
        path = os.fspath(args[0])
        if path.startswith(_watched[-1]):
            _events.append((event.partition(".")[2], path[len(_watched[-1]) + 1 :]))


@contextmanager
def removals(directory: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield a list of what is removed or renamed below a directory, in order; `fsync`s are noted there too."""
    if _note not in (hooks := removals.__dict__.setdefault("hooks", [])):
        sys.addaudithook(_note)
        hooks.append(_note)
    _events.clear()
    _watched.append(str(directory))
    try:
        yield _events
    finally:
        _watched.pop()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def test_metadata_is_deleted_first_and_for_good(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step=1/a", "step=1/.metadata", "step=1/rank=0/a", "step=1/rank=0/.metadata"):
        store.put_bytes(name, b"")
    synced = lambda folder: _events.append(("sync", folder.name))  # noqa: E731
    monkeypatch.setattr(local_store, "sync_folder", synced)
    with removals(Path(store.root)) as events:
        store.delete_folder("step=1")
    assert events[:2] == [("remove", "step=1/.metadata"), ("sync", "step=1")]
    assert events.index(("remove", "step=1/rank=0/.metadata")) < events.index(("remove", "step=1/rank=0/a"))
    assert events[-1] == ("rmdir", "step=1")


def test_a_file_is_on_disk_before_it_has_its_name(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        order.append("folder" if path.is_dir() else "file")
        fsync(descriptor)

    def noted_replace(self: Path, target: Path) -> Path:
        order.append("name")
        return replace(self, target)

    make_folder(Path(store.root))
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    store.put_bytes(".metadata", b"data")
    assert order == ["file", "folder", "name", "folder"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store.put_bytes("a", b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        store.put_bytes("a", b"new")
    monkeypatch.undo()
    assert store.read("a") == b"old"
    assert [path.name for path in Path(store.root).iterdir()] == ["a"]


def test_an_error_that_comes_without_a_name_gets_one(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    make_folder(Path(store.root))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: .*run/model.distcp'"):
        store.put_bytes("model.distcp", b"")


def _is_killed_while_it_writes(root: str) -> None:
    def die(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die  # type: ignore[assignment]
    LocalStore(Path(root)).put_bytes("a", b"new")


def test_a_writer_that_is_killed_leaves_the_old_file_and_nothing_to_see(store: LocalStore) -> None:
    store.put_bytes("a", b"old")
    process = multiprocessing.get_context("fork").Process(target=_is_killed_while_it_writes, args=(store.root,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(Path(store.root).iterdir())) == 2  # the unfinished file is there
    assert [entry.name for entry in store.list()] == ["a"]
    assert store.read("a") == b"old"
    LocalStore(Path(store.root).parent).delete_folder("run")  # and it does not hinder
    assert not Path(store.root).exists()


def test_a_link_is_deleted_and_not_what_it_leads_to(store: LocalStore, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / ".metadata").touch()
    make_folder(tmp_path / "run" / "step=1")
    for link in ("last", "step=1/link", "step=1/dangling"):
        Path(store.root, link).symlink_to(kept if "dangling" not in link else "nowhere")
    store.delete_folder("last")
    store.delete_folder("step=1")
    assert list(Path(store.root).iterdir()) == []
    assert [path.name for path in kept.iterdir()] == [".metadata"]


def test_a_folder_that_another_rank_deletes_too(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_bytes("step=1/a", b"")
    store.put_bytes("step=1/b", b"")
    remove_file = local_store.remove_file

    def together(path: Path) -> None:
        for name in ("a", "b"):
            remove_file(path.with_name(name))
        if path.parent.exists():
            path.parent.rmdir()
        remove_file(path)

    monkeypatch.setattr(local_store, "remove_file", together)
    store.delete_folder("step=1")
    assert store.list() == []


def test_a_file_system_that_cannot_sync_a_folder_is_taken_as_it_is(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(Path(store.root))
    for number, is_raised in ((errno.EINVAL, False), (errno.EIO, True)):

        def fail(_: int, number: int = number) -> None:
            raise OSError(number, "no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            if is_raised:
                with pytest.raises(OSError, match="no"):
                    sync_folder(Path(store.root))
            else:
                sync_folder(Path(store.root))


def test_what_a_writer_wrote_itself_can_be_synced(store: LocalStore) -> None:
    make_folder(Path(store.root, "step=1"))
    store.path("step=1/a").write_bytes(b"data")
    sync_file(store.path("step=1/a"))
    assert store.num_bytes("step=1/a") == 4
    with pytest.raises(FileNotFoundError, match="step=1/b"):
        sync_file(store.path("step=1/b"))
