"""A volume that the kernel mounts: what it refuses, what it remembers, and that we live with both."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.places import check_writable
from lightning_air.checkpoint.retry import Patience, retry
from lightning_air.checkpoint.transfer import TransferStats, download, upload
from lightning_air.checkpoint.volume_store import MountedVolumeStore
from tests.kit.fuse_volume import FuseBehaviour, FuseVolume, fuse_volume

NEGATIVE_SECONDS = 1.0
DATA = bytes(range(256)) * 2000

Mount = Callable[..., tuple[MountedVolumeStore, FuseVolume]]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a volume, and returns a store in its folder `run`."""
    with ExitStack() as stack:

        def mount(**behaviour: float) -> tuple[MountedVolumeStore, FuseVolume]:
            volume = stack.enter_context(fuse_volume(tmp_path, FuseBehaviour(**behaviour)))
            if volume is None:
                pytest.skip("needs the right to mount")
            return MountedVolumeStore("/Volumes/main/default/ckpt/run", volume=volume.mount, folder="run"), volume

        yield mount


def send(store: MountedVolumeStore, name: str = "step=1/a", data: bytes = DATA) -> TransferStats:
    Path("source").write_bytes(data)
    options = {"max_workers": 2, "deadline_seconds": 20.0, "settle_seconds": 0.1}
    return upload(store, [(name, Path("source"))], **options, chance=lambda: 1.0)


def test_the_mount_refuses_what_a_volume_refuses(mount: Mount) -> None:
    _, volume = mount()
    (volume.mount / "a").write_bytes(b"data")
    with (volume.mount / "b").open("wb", buffering=0) as file:
        file.write(b"data")
        assert not (volume.kept / "b").exists()  # before it is closed
        file.seek(1)
        with pytest.raises(OSError, match="not supported"):
            file.write(b"data")
    for refused in (
        lambda: (volume.mount / "a").open("ab"),
        lambda: (volume.mount / "a").open("r+b"),
        lambda: (volume.mount / "a").rename(volume.mount / "c"),
        lambda: (volume.mount / "c").symlink_to("a"),
        lambda: (volume.mount / "c").hardlink_to(volume.mount / "a"),
        lambda: os.truncate(volume.mount / "a", 2),
    ):
        with pytest.raises(OSError, match=r"not supported|cross-device"):
            refused()


def test_a_local_store_would_not_do_there(mount: Mount) -> None:
    _, volume = mount()
    with pytest.raises(OSError, match="cross-device"):
        LocalStore(volume.mount).put_bytes("a", b"data")


def test_files_go_there_and_back(mount: Mount) -> None:
    store, volume = mount()
    check_writable(store)
    assert send(store).num_retries == 0
    assert (volume.kept / "run/step=1/a").read_bytes() == DATA
    download(store, [("step=1/a", Path("target"))], max_workers=1, deadline_seconds=20)
    assert Path("target").read_bytes() == DATA


def test_a_file_that_keeps_half_of_what_was_written_is_put_again(mount: Mount) -> None:
    store, volume = mount(num_short=1)
    assert send(store).num_retries == 1
    assert (volume.kept / "run/step=1/a").read_bytes() == DATA


def test_a_file_that_fails_as_late_as_in_close_is_put_again(mount: Mount) -> None:
    store, volume = mount(num_failing=2)
    with pytest.raises(OSError, match=r"Input/output error.*run/step=1/a"):
        store.put_bytes("step=1/a", b"data")
    assert send(store).num_retries == 1
    assert (volume.kept / "run/step=1/a").read_bytes() == DATA


def test_a_file_that_the_kernel_remembers_as_missing_is_waited_for(mount: Mount) -> None:
    store, volume = mount(negative_seconds=NEGATIVE_SECONDS)
    store.put_bytes("step=1/a", b"data")
    assert store.num_bytes("step=1/b") is None
    (volume.kept / "run/step=1/b").write_bytes(DATA)  # by another node
    assert store.num_bytes("step=1/b") is None
    assert [(entry.name, entry.num_bytes) for entry in store.list("step=1")] == [("step=1/a", 4), ("step=1/b", 0)]
    begun = time.monotonic()
    download(store, [("step=1/b", Path("target"))], max_workers=1, deadline_seconds=20, chance=lambda: 1.0)
    assert time.monotonic() - begun < NEGATIVE_SECONDS + 10
    assert Path("target").read_bytes() == DATA


def test_a_folder_that_the_kernel_remembers_as_missing_does_not_hinder(mount: Mount) -> None:
    store, volume = mount(negative_seconds=60.0)
    store.put_bytes("a", b"data")
    assert store.list("step=1") == []
    (volume.kept / "run/step=1").mkdir()  # by another node
    assert not (volume.mount / "run/step=1").exists()
    assert send(store).num_retries == 0  # to make what is there makes the kernel look again
    assert (volume.kept / "run/step=1/a").read_bytes() == DATA


def test_metadata_that_the_kernel_remembers_as_missing_is_deleted_before_the_rest(mount: Mount) -> None:
    store, volume = mount(negative_seconds=NEGATIVE_SECONDS)
    store.put_bytes("step=1/a", b"data")
    assert store.num_bytes("step=1/.metadata") is None
    (volume.kept / "run/step=1/.metadata").write_bytes(b"data")  # published by another node
    with pytest.raises(OSError, match="still listed after it was deleted") as raised:
        store.delete_folder("step=1")
    assert raised.value.errno == errno.ESTALE
    assert (volume.kept / "run/step=1/a").exists()
    retry(lambda: store.delete_folder("step=1"), Patience(20, chance=lambda: 1.0))
    assert list((volume.kept / "run").iterdir()) == []
