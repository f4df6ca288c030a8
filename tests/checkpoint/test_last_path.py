"""What Lightning asks fsspec about a checkpoint that we offer is answered, wherever the checkpoint lies."""

from datetime import UTC, datetime
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from lightning_air.checkpoint.last_path import unwrapped, wrapped
from lightning_air.checkpoint.manifest import MANIFEST_NAME
from tests.checkpoint.samples import save_ours

REMOTE = ["memory://bucket/run/step=7.ckpt", "s3://bucket/run/step=7.ckpt", "/Volumes/main/default/nowhere/step=7.ckpt"]


@pytest.mark.parametrize("path", REMOTE)
def test_a_path_that_this_machine_does_not_see_is_wrapped_and_comes_back_whole(path: str) -> None:
    assert wrapped(path) == f"lightning-air://{path}"
    assert unwrapped(wrapped(path)) == path


def test_a_local_path_is_offered_as_it_is(tmp_path: Path) -> None:
    path = str(save_ours(tmp_path / "step=7.ckpt"))
    assert wrapped(path) == path
    assert unwrapped(path) == path


def test_lightnings_questions_are_answered_from_the_manifest(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "step=7.ckpt", created_seconds=1_700_000_000.0)
    files = fsspec.filesystem("memory")
    path = "memory://bucket/test_last_path/step=7.ckpt"
    files.pipe(f"/bucket/test_last_path/step=7.ckpt/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes())
    try:
        asked, _ = fsspec.url_to_fs(wrapped(path))
        assert asked.exists(wrapped(path))
        assert asked.modified(wrapped(path)) == datetime.fromtimestamp(1_700_000_000.0, UTC)
        # Lightning compares the answers of all file systems with each other.
        assert asked.modified(wrapped(path)) < fsspec.filesystem("file").modified(str(folder))
    finally:
        files.rm("/bucket/test_last_path", recursive=True)


def test_one_without_a_manifest_is_older_than_all_others(tmp_path: Path) -> None:
    asked, _ = fsspec.url_to_fs(wrapped("memory://bucket/nothing/step=1.ckpt"))
    assert asked.modified(wrapped("memory://bucket/nothing/step=1.ckpt")) == datetime.fromtimestamp(0, UTC)
