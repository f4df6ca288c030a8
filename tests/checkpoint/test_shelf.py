"""Names of checkpoints: never used twice, never cleared while somebody may be writing, and deleted exactly as told."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_air.checkpoint import latest_checkpoint, verify_checkpoint
from lightning_air.checkpoint.io import AsyncUCCheckpointIO
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.publishing import Details, build_metadata, publish
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.store import Entry


def save(io: AsyncUCCheckpointIO, path: Path, value: float) -> None:
    io.save_checkpoint({"state_dict": {"w": torch.full((3,), value)}, "global_step": 1}, path)
    assert io.settle()


def unpublish(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def test_a_sweep_takes_the_orphan_and_not_a_later_generation_of_its_name(tmp_path: Path) -> None:
    io = AsyncUCCheckpointIO()
    save(io, tmp_path / "step=100.ckpt", 1.0)
    io._shelf.protect(str(tmp_path / "step=100.ckpt"))  # so that both stay
    save(io, tmp_path / "step=100.ckpt", 2.0)
    unpublish(tmp_path / "step=100.ckpt")  # as a deletion that was killed leaves it
    fresh = AsyncUCCheckpointIO()
    fresh.sweep([str(tmp_path / "step=100.ckpt")])
    fresh.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["step=100@2.ckpt"]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step=100@2.ckpt")
    io.teardown()


def test_discarding_one_generation_leaves_the_other(tmp_path: Path) -> None:
    io = AsyncUCCheckpointIO()
    save(io, tmp_path / "a.ckpt", 1.0)
    io._shelf.protect(str(tmp_path / "a.ckpt"))
    save(io, tmp_path / "a.ckpt", 2.0)
    io._shelf._protected.clear()
    io.discard([str(tmp_path / "a.ckpt")])
    io.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["a@2.ckpt"]


def test_what_another_attempt_may_be_writing_is_not_touched(tmp_path: Path) -> None:
    alive = tmp_path / "step=7.ckpt"
    alive.mkdir()
    (alive / "__0_0.distcp").write_bytes(b"half")
    io = AsyncUCCheckpointIO()
    save(io, alive, 1.0)
    io.teardown()
    assert (alive / "__0_0.distcp").read_bytes() == b"half"
    assert verify_checkpoint(tmp_path / "step=7@2.ckpt").valid


def test_a_folder_in_which_another_attempt_has_published_is_refused(tmp_path: Path) -> None:
    io = AsyncUCCheckpointIO()
    save(io, tmp_path / "a.ckpt", 1.0)
    io.teardown()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a.ckpt").iterdir()}
    store = LocalStore(tmp_path / "a.ckpt")
    with pytest.raises(FileExistsError, match="another save has published"):
        publish(store, build_metadata([], [], {}), [], Details(), meta=b"", deadline_seconds=10)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a.ckpt").iterdir()} == before


class Lagging(LocalStore):
    """A listing that does not show what was published last."""

    def list(self, folder: str = "") -> list[Entry]:
        return [entry for entry in super().list(folder) if "@" not in entry.name]


def test_a_generation_that_is_not_listed_yet_is_found_by_its_name(tmp_path: Path) -> None:
    io = AsyncUCCheckpointIO()
    save(io, tmp_path / "last.ckpt", 1.0)
    io._shelf.protect(str(tmp_path / "last.ckpt"))
    save(io, tmp_path / "last.ckpt", 2.0)
    shelf = Shelf(lambda path: Lagging(Path(path)))
    assert shelf.fresh_folder(str(tmp_path / "last.ckpt")) == str(tmp_path / "last@3.ckpt")
    assert verify_checkpoint(tmp_path / "last@2.ckpt").valid
    io.teardown()


def test_what_was_resumed_from_is_kept_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    io = AsyncUCCheckpointIO()
    save(io, tmp_path / "link" / "a.ckpt", 1.0)
    io.load_checkpoint(tmp_path / "link" / "a.ckpt")
    io.remove_checkpoint(tmp_path / "link" / "a.ckpt")
    io.teardown()
    assert verify_checkpoint(tmp_path / "real" / "a.ckpt").valid


def test_the_worker_outlives_a_deletion_that_fails_and_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = AsyncUCCheckpointIO()
    save(io, tmp_path / "a", 1.0)

    def fails(*_: Any) -> None:
        raise ModuleNotFoundError("no package for it")

    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "remove", fails)
        with pytest.warns(UserWarning, match="a could not be deleted: no package for it"):  # noqa: PT031 - in one of them
            io.remove_checkpoint(tmp_path / "a")
            save(io, tmp_path / "b", 0.0)
            io.teardown()
    assert verify_checkpoint(tmp_path / "b").valid


def test_metadata_that_arrives_after_the_deadline_finds_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_bytes = LocalStore.put_bytes

    def late(self: LocalStore, name: str, data: bytes) -> None:
        put_bytes(self, name, data)
        if name == ".metadata":  # it has arrived, and nobody is told
            raise OSError(errno.EACCES, "the answer was lost")

    monkeypatch.setattr(LocalStore, "put_bytes", late)
    io = AsyncUCCheckpointIO(on_failure="warn")
    io.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, tmp_path / "a")
    with pytest.warns(UserWarning, match="the answer was lost"):
        io.settle()
    io.teardown()
    assert verify_checkpoint(tmp_path / "a").valid
