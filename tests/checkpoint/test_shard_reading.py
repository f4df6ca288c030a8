"""A shard file is read once: every part of every tensor arrives, every altered byte is noticed, objects come last."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from lightning_air.checkpoint.holdings import saved_bytes
from lightning_air.checkpoint.loading import readers_of
from lightning_air.checkpoint.manifest import FileRecord, digest_file
from lightning_air.checkpoint.shard_file import Item, write_shard_file
from lightning_air.checkpoint.shard_reading import read_plan
from lightning_air.checkpoint.untrusted import DamagedCheckpointError
from tests.checkpoint.samples import Calls, flip

MANY = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
LARGE = 1 << 20


class Into(LoadPlanner):
    """Hands out given targets."""

    def __init__(self, targets: dict[str, Any]) -> None:
        self.targets = targets
        self.committed: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.targets[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.targets[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def set_up_planner(self, *_: Any, **__: Any) -> None: ...
    def create_local_plan(self) -> Any: ...
    def create_global_plan(self, global_plan: Any) -> Any: ...
    def finish_plan(self, central_plan: Any) -> Any: ...


def part(name: str, box: tuple[slice, ...] | None = None, of: str | None = None) -> ReadItem:
    """Read this part of a tensor, or an object."""
    at = torch.Size([] if box is None else [each.start for each in box])
    lengths = torch.Size([] if box is None else [each.stop - each.start for each in box])
    kind = LoadItemType.TENSOR if box is not None else LoadItemType.BYTE_IO
    return ReadItem(kind, MetadataIndex(name), at, MetadataIndex(of or name), at, lengths)


def write(folder: Path, **content: Any) -> dict[MetadataIndex, StorageInfo]:
    path = folder / "shard"
    path.unlink(missing_ok=True)
    data = {name: value if isinstance(value, Tensor) else saved_bytes(value) for name, value in content.items()}
    written = write_shard_file(path, "shard", [Item((MetadataIndex(name),), each) for name, each in data.items()])
    return {MetadataIndex(index.fqn): info for index, info in written.entries}


def expecting(record: FileRecord) -> Callable[[str, FileRecord], None]:
    def check(file: str, found: FileRecord) -> None:
        assert file == "shard"
        if found != record:
            raise DamagedCheckpointError(f"{file} is another")

    return check


def whole(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = draw(st.sampled_from([(), (5,), (3, 4), (LARGE // 2 + 3,), (700, 801), (7, 300, 301), (LARGE, 1)]))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(slice(start, draw(st.integers(start, size))))
    return shape, draw(st.sampled_from([tuple(box), tuple(slice(0, size) for size in shape)]))


FORMS: dict[str, Callable[[tuple[int, ...], torch.dtype], Tensor]] = {
    "contiguous": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "parameter": lambda shape, dtype: torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False),
    "transposed": lambda shape, dtype: torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1]),
    "every other": lambda shape, dtype: torch.zeros((*shape, 2), dtype=dtype)[..., 0],
    "of another type": lambda shape, dtype: torch.zeros(shape, dtype=torch.complex128),
    "conjugated": lambda shape, _: torch.zeros(shape, dtype=torch.complex64).conj(),
}


@MANY
@given(
    shape_and_box=shapes(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    form=st.sampled_from(sorted(FORMS)),
    is_hashed=st.booleans(),
)
def test_any_part_arrives_in_any_target(
    shape_and_box: tuple[Any, Any], dtype: torch.dtype, form: str, is_hashed: bool, tmp_path: Path
) -> None:
    shape, box = shape_and_box
    saved = torch.randint(0, 100, shape).to(dtype)
    storage = write(tmp_path, before=torch.ones(3), saved=saved, after={"n": 1})
    target = FORMS[form](tuple(each.stop - each.start for each in box), dtype)
    planner = Into({"saved": target, "before": torch.zeros(3)})
    found: list[FileRecord] = []
    plan = LoadPlan([part("saved", box), part("before", (slice(0, 3),))])
    check = (lambda _, record: found.append(record)) if is_hashed else None
    read_plan(plan, planner, storage, tmp_path.joinpath, check=check)
    assert torch.equal(target.resolve_conj(), saved[box].to(target.dtype))
    assert planner.targets["before"].tolist() == [1, 1, 1]
    assert sorted(planner.committed) == ["before", "saved"]
    if form == "every other":
        assert not target._base[..., 1].any()  # beside the target nothing is written
    assert found == ([digest_file(tmp_path / "shard")] if is_hashed else [])


def test_tied_names_and_overlapping_parts_of_one_entry(tmp_path: Path) -> None:
    saved = torch.randn(600, 700)
    storage = write(tmp_path, saved=saved)
    boxes = {"a": (slice(0, 400), slice(0, 700)), "b": (slice(300, 600), slice(5, 9)), "c": whole(saved)}
    targets = {name: torch.zeros([each.stop - each.start for each in box]) for name, box in boxes.items()}
    items = [part(name, box, of="saved") for name, box in boxes.items()]
    read_plan(
        LoadPlan(items), Into(targets), storage, tmp_path.joinpath, check=expecting(digest_file(tmp_path / "shard"))
    )
    for name, box in boxes.items():
        assert torch.equal(targets[name], saved[box])


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts in /proc")
def test_a_file_is_read_once_and_without_a_check_no_more_than_is_needed(tmp_path: Path) -> None:
    tensors = {f"{index}": torch.randn(1000, 1000) for index in range(8)}
    storage = write(tmp_path, **tensors)
    record = digest_file(tmp_path / "shard")
    items = [part(name, whole(tensor)) for name, tensor in tensors.items()]
    targets = {name: torch.zeros(1000, 1000) for name in tensors}

    before = bytes_read()
    read_plan(LoadPlan(items), Into(targets), storage, tmp_path.joinpath, check=expecting(record))
    assert record.num_bytes <= bytes_read() - before < 1.02 * record.num_bytes
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)

    rows = torch.zeros(10, 1000)
    before = bytes_read()
    read_plan(
        LoadPlan([part("5", (slice(40, 50), slice(0, 1000)))]),
        Into({"5": rows}),
        storage,
        tmp_path.joinpath,
        check=expecting(record),
        checked=set(),
    )
    assert torch.equal(rows, tensors["5"][40:50])
    assert bytes_read() - before < 0.02 * record.num_bytes


@MANY
@given(data=st.data())
def test_an_altered_byte_is_damage_whoever_reads(data: st.DataObject, tmp_path: Path) -> None:
    large, small = torch.randn(600, 700), torch.arange(4.0)
    storage = write(tmp_path, large=large, small=small, thing={"n": [1, 2]})
    path = tmp_path / "shard"
    record = digest_file(path)
    entry = data.draw(st.sampled_from(sorted(storage.values(), key=lambda info: info.offset)))
    near_an_end = st.integers(0, 1000) | st.integers(max(0, entry.length - 1500), entry.length - 1)
    flip(path, entry.offset + data.draw(near_an_end) % entry.length, bit=data.draw(st.integers(0, 7)))
    items = [part("large", whole(large)), part("small", whole(small)), part("thing")]
    targets = {"large": torch.zeros(600, 700), "small": torch.zeros(4)}
    with pytest.raises(DamagedCheckpointError):
        read_plan(LoadPlan(items), Into(targets), storage, tmp_path.joinpath, check=expecting(record))
    # A rank that leaves the check to another either cannot tell, or calls it damage too; never an attack.
    with contextlib.suppress(DamagedCheckpointError):
        read_plan(
            LoadPlan(items[:2]), Into(targets), storage, tmp_path.joinpath, check=expecting(record), checked=set()
        )


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    large = torch.randn(600, 700)
    storage = write(tmp_path, large=large)
    path = tmp_path / "shard"
    for num_bytes in (path.stat().st_size - 1, 1_500_000, 100, 0):
        os.truncate(path, num_bytes)
        with pytest.raises(DamagedCheckpointError, match=r"ends at|is empty"):
            read_plan(LoadPlan([part("large", whole(large))]), Into({"large": large}), storage, tmp_path.joinpath)


def test_no_object_is_unpickled_before_the_verdict(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    storage = write(tmp_path, thing=Calls(os.mkdir, str(marker)), other=torch.ones(3))
    record = digest_file(tmp_path / "shard")
    flip(tmp_path / "shard", storage[MetadataIndex("other")].offset + 700)
    for checked in (None, set[str]()):
        with pytest.raises(DamagedCheckpointError):
            read_plan(
                LoadPlan([part("thing")]),
                Into({}),
                storage,
                tmp_path.joinpath,
                check=expecting(record),
                checked=checked,
                weights_only=False,
            )
        assert not marker.exists()
    flip(tmp_path / "shard", storage[MetadataIndex("other")].offset + 700)
    read_plan(LoadPlan([part("thing")]), Into({}), storage, tmp_path.joinpath, weights_only=False)
    assert marker.exists()


@given(
    st.dictionaries(
        st.integers(0, 7), st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3), max_size=6), min_size=1
    )
)
def test_each_file_is_hashed_by_one_rank_that_reads_most_of_it(needs: dict[int, dict[str, int]]) -> None:
    chosen = readers_of(needs)
    assert set(chosen) == set(needs)
    for file in {file for files in needs.values() for file in files}:
        readers = [rank for rank, files in chosen.items() if file in files]
        assert len(readers) == 1
        assert needs[readers[0]][file] == max(files.get(file, -1) for files in needs.values())


def test_ranks_that_read_the_same_share_the_hashing() -> None:
    chosen = readers_of({rank: dict.fromkeys("abcdefgh", 1) for rank in range(4)})
    assert [len(files) for files in chosen.values()] == [2, 2, 2, 2]
