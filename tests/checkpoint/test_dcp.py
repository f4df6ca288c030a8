"""`VolumeWriter` and `VolumeReader` are a storage writer and reader of `torch.distributed.checkpoint`, on any place.

What one of them wrote, plain DCP reads, and the other way round; nothing is published before it is whole, nothing is
written over, and nothing that could run code is unpickled.
"""

import contextlib
import errno
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_air import VolumeReader, VolumeWriter, latest_checkpoint, verify_checkpoint
from lightning_air.checkpoint import volume_reader, volume_writer, writing
from lightning_air.checkpoint.manifest import Manifest
from lightning_air.checkpoint.shelf import Shelf
from tests.checkpoint.samples import Calls, flip, save_stock, small_state
from tests.checkpoint.test_killing import VOLUME, hostile_places
from tests.kit.ranks import run_ranks, values

WIDTH = 300


def state(value: float = 1.0) -> dict[str, Any]:
    """Shards, where there is more than one rank; whole tensors; and objects."""
    weight: Tensor = torch.arange(7.0 * WIDTH).view(7, WIDTH) * value
    if dist.is_initialized():
        weight = distribute_tensor(weight, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {
        "model": {"weight": weight, "bias": torch.full((WIDTH,), value)},
        "optimizer": {"state": {"weight": {"step": torch.tensor(value)}}, "betas": (0.9, 0.99)},
        "epoch": int(value),
    }


def zeros() -> dict[str, Any]:
    return state(0.0)


def whole(nested: dict[str, Any]) -> dict[str, Any]:
    return {
        key: whole(value)
        if isinstance(value, dict)
        else value.full_tensor()
        if isinstance(value, DTensor)
        else value.clone()
        if isinstance(value, Tensor)
        else value
        for key, value in nested.items()
    }


def assert_is(found: dict[str, Any], value: float) -> None:
    assert torch.equal(found["model"]["weight"], torch.arange(7.0 * WIDTH).view(7, WIDTH) * value)
    assert torch.equal(found["model"]["bias"], torch.full((WIDTH,), value))
    assert found["optimizer"]["state"]["weight"]["step"] == value
    assert found["optimizer"]["betas"] == (0.9, 0.99)
    assert found["epoch"] == int(value)


@contextlib.contextmanager
def quiet_alone() -> Iterator[None]:
    """DCP warns when it is used without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to (save|load) in a single process", UserWarning)
        yield


@contextlib.contextmanager
def place(kind: str, folder: str) -> Iterator[str]:
    """Give a place that every rank sees: a local folder, or a volume without rename, append and link, kept in one."""
    if kind == "local":
        yield f"{folder}/step"
        return
    places = hostile_places(Path(folder))
    before = volume_writer.Shelf, volume_writer.open_store, volume_reader.open_store
    volume_writer.Shelf = partial(Shelf, places)  # type: ignore[misc, assignment]
    volume_writer.open_store = volume_reader.open_store = places  # type: ignore[assignment]
    try:
        yield f"{VOLUME}/step"
    finally:
        volume_writer.Shelf, volume_writer.open_store, volume_reader.open_store = before  # type: ignore[misc]


# ---- saving and loading ----------------------------------------------------------------------------------------------


def save(kind: str, folder: str, way: str) -> None:
    with place(kind, folder) as path, quiet_alone():
        if way == "save":
            dcp.save(state(2.0), storage_writer=VolumeWriter(path, step=5))
        elif way == "checkpoint_id":
            dcp.save(state(2.0), checkpoint_id=path, storage_writer=VolumeWriter(step=5))
        else:
            live = state(2.0)
            pending = dcp.async_save(live, storage_writer=VolumeWriter(path, step=5))
            for value in (live["model"]["weight"], live["model"]["bias"], live["optimizer"]["state"]["weight"]["step"]):
                (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)
            pending.result()


def load(kind: str, folder: str, way: str) -> dict[str, Any]:
    with place(kind, folder) as path, quiet_alone():
        found = zeros()
        if way == "checkpoint_id":
            dcp.load(found, checkpoint_id=path, storage_reader=VolumeReader())
        else:
            dcp.load(found, storage_reader=VolumeReader(path))
        return whole(found)


@pytest.mark.parametrize("way", ["save", "checkpoint_id", "async_save"])
@pytest.mark.parametrize("kind", ["local", "volume"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saving_and_loading(num_ranks: int, kind: str, way: str, tmp_path: Path) -> None:
    args = (kind, str(tmp_path), way)
    values(run_ranks(save, num_ranks, args=args, init_process_group="gloo"))
    for found in values(run_ranks(load, 3 - num_ranks, args=args, init_process_group="gloo")):  # on the other number
        assert_is(found, 2.0)
    if kind == "local":
        assert verify_checkpoint(tmp_path / "step").valid
        assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "step")
        manifest = Manifest.from_json((tmp_path / "step" / "manifest.json").read_bytes())
        assert (manifest.step, manifest.world_size) == (5, num_ranks)


def test_in_one_process_without_a_group_onto_a_url(tmp_path: Path) -> None:
    url = "memory://dcp/step"
    with quiet_alone():
        dcp.save(state(3.0), storage_writer=VolumeWriter(url, staging_dir=tmp_path / "staging"))
        found = zeros()
        dcp.load(found, storage_reader=VolumeReader(url, staging_dir=tmp_path / "staging"))
    assert_is(found, 3.0)
    assert not list((tmp_path / "staging").glob("*"))
    names = {name.rpartition("/")[2] for name in fsspec.filesystem("memory").find("/dcp/step")}
    assert {".metadata", "manifest.json", "__0_0.distcp"} == names


def test_one_writer_and_one_reader_for_several_checkpoints(tmp_path: Path) -> None:
    writer, reader = VolumeWriter(), VolumeReader()
    with quiet_alone():
        for step in (1, 2):
            dcp.save(state(float(step)), checkpoint_id=str(tmp_path / str(step)), storage_writer=writer)
        for step in (2, 1):
            found = zeros()
            dcp.load(found, checkpoint_id=str(tmp_path / str(step)), storage_reader=reader)
            assert_is(found, float(step))


def test_a_path_has_to_be_said_somewhere() -> None:
    with quiet_alone(), pytest.raises((ValueError, CheckpointException), match="VolumeWriter was given no path"):
        dcp.save(state(), storage_writer=VolumeWriter())
    with quiet_alone(), pytest.raises((ValueError, CheckpointException), match="VolumeReader was given no path"):
        dcp.load(zeros(), storage_reader=VolumeReader())


# ---- with plain DCP --------------------------------------------------------------------------------------------------


def load_plain(path: str) -> dict[str, Any]:
    found = zeros()
    dcp.load(found, storage_reader=FileSystemReader(path))
    return whole(found)


def save_plain(path: str) -> None:
    dcp.save(state(4.0), storage_writer=FileSystemWriter(path))


def test_plain_dcp_reads_ours(tmp_path: Path) -> None:
    values(run_ranks(save, 2, args=("local", str(tmp_path), "save"), init_process_group="gloo"))
    for found in values(run_ranks(load_plain, 2, args=(str(tmp_path / "step"),), init_process_group="gloo")):
        assert_is(found, 2.0)


def test_we_read_plain_dcps(tmp_path: Path) -> None:
    values(run_ranks(save_plain, 2, args=(str(tmp_path / "step"),), init_process_group="gloo"))
    for found in values(run_ranks(load, 1, args=("local", str(tmp_path), "save"), init_process_group="gloo")):
        assert_is(found, 4.0)


# ---- what is refused -------------------------------------------------------------------------------------------------


def save_twice(kind: str, folder: str) -> str:
    with place(kind, folder) as path:
        dcp.save(state(1.0), storage_writer=VolumeWriter(path))
        with pytest.raises((FileExistsError, CheckpointException)) as caught:
            dcp.save(state(2.0), storage_writer=VolumeWriter(path))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["local", "volume"])
def test_an_existing_checkpoint_is_never_written_over(kind: str, tmp_path: Path) -> None:
    for message in values(run_ranks(save_twice, 2, args=(kind, str(tmp_path)), init_process_group="gloo")):
        assert "none is ever overwritten. Save under another name" in message
    (found,) = values(run_ranks(load, 1, args=(kind, str(tmp_path), "save"), init_process_group="gloo"))
    assert_is(found, 1.0)


def test_what_a_killed_save_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "step"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    (left / "__7_0.distcp").write_bytes(b"of another world size")
    with quiet_alone():
        dcp.save(state(2.0), storage_writer=VolumeWriter(left))
    assert sorted(path.name for path in left.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert verify_checkpoint(left).valid


def save_without_collectives(path: str) -> str:
    with pytest.raises((ValueError, CheckpointException)) as caught:
        dcp.save(state(), storage_writer=VolumeWriter(path), use_collectives=False)
    return str(caught.value)


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    # Each rank would write a metadata file of its own, and none would say that the checkpoint is whole.
    path = tmp_path / "step"
    for message in values(run_ranks(save_without_collectives, 2, args=(str(path),), init_process_group="gloo")):
        assert "save with use_collectives=True" in message
    assert not path.exists()


def fail_on_rank_1(kind: str, folder: str) -> str:
    def full(path: Path, name: str, items: Any) -> Any:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, while writing {name}")

    if dist.get_rank() == 1:
        writing.write_shard_file = full
    with place(kind, folder) as path, pytest.raises(CheckpointException) as caught:
        dcp.save(state(), storage_writer=VolumeWriter(path))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["local", "volume"])
def test_nothing_is_published_when_one_rank_cannot_write(kind: str, tmp_path: Path) -> None:
    for message in values(run_ranks(fail_on_rank_1, 2, args=(kind, str(tmp_path)), init_process_group="gloo")):
        assert "while writing __1_0.distcp" in message
    assert not list(tmp_path.rglob(".metadata"))


def test_a_planted_pickle_is_refused_by_name_and_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "it-ran"
    save_stock(tmp_path / "bad", {**small_state(), "tokenizer": Calls(os.mkdir, str(ran))})
    wanted = {"tokenizer": None}
    with quiet_alone(), pytest.raises((ValueError, CheckpointException), match=r"posix\.mkdir"):
        dcp.load(wanted, storage_reader=VolumeReader(tmp_path / "bad"))
    assert not ran.exists()
    assert wanted == {"tokenizer": None}
    weights = {"state_dict": small_state(0.0)["state_dict"]}
    with quiet_alone():
        dcp.load(weights, storage_reader=VolumeReader(tmp_path / "bad"))  # who does not ask for it can have the rest
    assert torch.equal(weights["state_dict"]["w"], small_state()["state_dict"]["w"])


def test_a_flipped_bit_fails_the_load(tmp_path: Path) -> None:
    with quiet_alone():
        dcp.save(state(2.0), storage_writer=VolumeWriter(tmp_path / "step"))
        flip(tmp_path / "step" / "__0_0.distcp", 5000)
        found = zeros()
        with pytest.raises((ValueError, CheckpointException), match=r"__0_0\.distcp is not as it was written"):
            dcp.load(found, storage_reader=VolumeReader(tmp_path / "step"))


def test_there_is_nothing(tmp_path: Path) -> None:
    with quiet_alone(), pytest.raises((FileNotFoundError, CheckpointException), match="There is no checkpoint at"):
        dcp.load(zeros(), storage_reader=VolumeReader(tmp_path / "nothing"))
