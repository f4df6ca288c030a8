"""Every leaf of a state is written by exactly one rank, whatever it is and however it is spread, and comes back.

All through `AsyncUCCheckpointIO` in real ranks: what a rank writes is what its report says, and what comes back is what
a single process loads.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_air import AsyncUCCheckpointIO
from lightning_air.checkpoint.manifest import Manifest
from lightning_air.checkpoint.saver import SaveReport
from tests.kit.ranks import run_ranks, values

SHARD = 1 << 20


def save(state: dict[str, Any], path: str, sharding: str | None = "ddp", **rest: Any) -> SaveReport:
    """Save on all ranks (or alone, with None), and return this rank's report."""
    io = AsyncUCCheckpointIO()
    if sharding is not None:
        io.connect(sharding)
    io.save_checkpoint({"state_dict": state, **rest}, path)
    io.settle()
    (report,) = io.take_reports()
    io.teardown()
    return report


def load(path: str | Path, **options: Any) -> dict[str, Any]:
    io = AsyncUCCheckpointIO()
    try:
        return io.load_checkpoint(str(path), **options)
    finally:
        io.teardown()


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """No two elements are alike, as far as the dtype can tell them apart."""
    numbers = torch.arange(int(np.prod(shape, dtype=int)) * dtype.itemsize, dtype=torch.int64) * 2654435761 % 251
    return numbers.to(torch.uint8).view(dtype).view(shape)


def bits(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


# ---- every kind of leaf ----------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def every_tensor() -> dict[str, Tensor]:
    base = counted(6, 8)
    leaves = {f"dtype.{dtype}": counted(5, 3, dtype=dtype) for dtype in DTYPES if dtype != torch.bool}
    leaves |= {f"zero_dim.{dtype}": counted(dtype=dtype) for dtype in DTYPES if dtype != torch.bool}
    return leaves | {
        "dtype.bool": counted(40) > counted(40).flip(0),
        "empty": torch.empty(0),
        "empty.matrix": torch.empty(3, 0, dtype=torch.bfloat16),
        "expanded": counted(1, 4).expand(5, 4),
        "expanded.scalar": counted().expand(7),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "view.of.a.large.storage": counted(1000)[3:5],
        "channels_last": counted(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": counted(4, 4, dtype=torch.complex64).conj(),
        "negative": counted(4, 4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(counted(3, 3)),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "large": counted(700, 300),
    }


def save_every_tensor(path: str, sharding: str | None) -> int:
    return save(every_tensor(), path, sharding).num_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_kind_of_tensor_comes_back_bit_by_bit(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "leaves"
    values(run_ranks(save_every_tensor, num_ranks, args=(str(path), "ddp"), init_process_group="gloo"))
    found = load(path)["state_dict"]
    expected = every_tensor()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert same_bits(found[key], value.detach().resolve_conj().resolve_neg()), key


class Tokens:
    """A user's own class."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


def test_what_is_no_tensor_comes_back_too(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "_extra_state": np.arange(6).reshape(2, 3),
        "sub._extra_state": Tokens(["a", "b"]),
        "sparse": torch.eye(3).to_sparse(),
    }
    save(state, str(tmp_path / "objects"), None, mine={"array": np.ones(3), "tokens": Tokens(["c"])})
    found = load(tmp_path / "objects", weights_only=False)
    assert np.array_equal(found["state_dict"]["_extra_state"], state["_extra_state"])
    assert found["state_dict"]["sub._extra_state"].words == ["a", "b"]
    assert torch.equal(found["state_dict"]["sparse"].to_dense(), torch.eye(3))
    assert np.array_equal(found["mine"]["array"], np.ones(3))
    assert found["mine"]["tokens"].words == ["c"]


def test_an_unsafe_class_is_refused_by_name_unless_the_user_allows_it(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "_extra_state": Tokens(["a"])}, str(tmp_path / "objects"), None)
    with pytest.raises(ValueError, match="Tokens"):
        load(tmp_path / "objects")


# ---- tied weights ----------------------------------------------------------------------------------------------------


def save_tied(path: str, kind: str) -> int:
    weight: Tensor = counted(512, 512)
    small: Tensor = counted(1, 4)
    if kind == "fsdp":  # one row only: rank 1 has an empty shard, whose address says nothing
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(weight, mesh, [Shard(0)])
        small = distribute_tensor(small, mesh, [Shard(0)])
    state = {"embedding": weight, "head": weight, "a": small, "b": small, "alone": counted(8)}
    return save(state, path, kind).num_bytes


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_tied_weights_are_stored_once_and_found_under_both_names(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tied"
    written = values(run_ranks(save_tied, 2, args=(str(path), kind), init_process_group="gloo"))
    assert SHARD <= sum(written) < 1.1 * SHARD
    found = load(path)["state_dict"]
    assert all(torch.equal(found[key], counted(512, 512)) for key in ("embedding", "head"))
    assert all(torch.equal(found[key], counted(1, 4)) for key in ("a", "b"))


def test_views_of_one_storage_are_not_taken_for_tied(tmp_path: Path) -> None:
    base = counted(4, 4)
    state = {
        "base": base,
        "transposed": base.t(),
        "flat": base.view(16),
        "row": base[0],
        "bits": base.view(torch.int32),
    }
    save(state, str(tmp_path / "views"), None)
    found = load(tmp_path / "views")["state_dict"]
    assert all(torch.equal(found[key], value) for key, value in state.items())


# ---- sharded and replicated shards -----------------------------------------------------------------------------------

UNEVEN = {"one": (1, 5), "three": (3, 7), "four": (4, 4), "five": (5, 3), "vector": (2,), "none": (0, 3)}


def save_sharded(path: str, columns: bool) -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = [Shard(1)] if columns else [Shard(0)]
    shapes = {name: shape for name, shape in UNEVEN.items() if not columns or len(shape) == 2}
    state = {name: distribute_tensor(counted(*shape), mesh, placement) for name, shape in shapes.items()}
    held = [shard.to_local().numel() for shard in state.values()]
    save({**state, "plain": counted(9)}, path, "fsdp")
    return held


@pytest.mark.parametrize("columns", [False, True])
def test_uneven_and_empty_shards(columns: bool, tmp_path: Path) -> None:
    path = tmp_path / "uneven"
    held = values(run_ranks(save_sharded, 3, args=(str(path), columns), init_process_group="gloo"))
    assert 0 in held[2]  # what this test is about
    found = load(path)["state_dict"]
    for name, shape in UNEVEN.items():
        if not columns or len(shape) == 2:
            assert torch.equal(found[name], counted(*shape)), name
    assert torch.equal(found["plain"], counted(9))


def load_sharded(path: str, columns: bool) -> dict[str, Tensor]:
    """Into another world size, and sharded along another dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = [Shard(1)] if columns else [Shard(0)]
    shapes = {name: shape for name, shape in UNEVEN.items() if len(shape) == 2 and shape[0]}
    state = {name: distribute_tensor(torch.zeros(*shape), mesh, placement) for name, shape in shapes.items()}
    io = AsyncUCCheckpointIO()
    io.connect("fsdp")
    assert "state_dict" not in io.load_checkpoint(path, state={"state_dict": state}, strict=False)
    io.teardown()
    return {name: shard.full_tensor() for name, shard in state.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shards_load_into_other_shards(num_ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "uneven")
    values(run_ranks(save_sharded, 3, args=(path, False), init_process_group="gloo"))
    for found in values(run_ranks(load_sharded, num_ranks, args=(path, True), init_process_group="gloo")):
        assert found
        assert all(torch.equal(value, counted(*UNEVEN[name])) for name, value in found.items())


def save_hsdp(path: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shapes = {"large": (1023, 512), "one": (1, 5), "five": (5, 3)}
    state = {name: distribute_tensor(counted(*shape), mesh, [Replicate(), Shard(0)]) for name, shape in shapes.items()}
    num_bytes = sum(shard.to_local().nbytes for shard in state.values())
    return save(state, path, "hsdp").num_bytes, num_bytes


def test_replicas_share_the_writing_of_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "hsdp"
    written = values(run_ranks(save_hsdp, 4, args=(str(path),), init_process_group="gloo"))
    for num_bytes, held_bytes in written:
        assert num_bytes == pytest.approx(held_bytes / 2, rel=0.1)
    found = load(path)["state_dict"]
    for name, shape in {"large": (1023, 512), "one": (1, 5), "five": (5, 3)}.items():
        assert torch.equal(found[name], counted(*shape)), name
    assert Manifest.from_json((path / "manifest.json").read_bytes()).sharding == "hsdp"


def save_buffers_that_differ(path: str) -> None:
    """What BatchNorm does: each rank has its own statistics, and the weights are sharded."""
    rank = dist.get_rank()
    weight = distribute_tensor(counted(40, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    buffers = {f"{name}.{layer}": torch.full((8000,), float(rank)) for layer in range(4) for name in ("mean", "var")}
    save({"weight": weight, **buffers}, path, "fsdp")


def test_buffers_beside_shards_are_all_of_one_rank(tmp_path: Path) -> None:
    values(run_ranks(save_buffers_that_differ, 2, args=(str(tmp_path / "buffers"),), init_process_group="gloo"))
    found = load(tmp_path / "buffers")["state_dict"]
    assert torch.equal(found.pop("weight"), counted(40, 8))
    assert len(found) == 8
    assert all(torch.equal(value, torch.zeros(8000)) for value in found.values())


def save_one_giant(path: str) -> int:
    state = {"giant": counted(4099, 1021), **{f"small.{index}": counted(3) for index in range(50)}}
    return save(state, path, "ddp").num_bytes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ddp_ranks_write_even_parts_of_one_giant_tensor(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "giant"
    written = values(run_ranks(save_one_giant, num_ranks, args=(str(path),), init_process_group="gloo"))
    even = 4099 * 1021 * 4 / num_ranks
    assert all(num_bytes == pytest.approx(even, rel=0.1) for num_bytes in written)
    assert {file.name.split("_")[2] for file in path.glob("*.distcp")} == set(map(str, range(num_ranks)))
    assert torch.equal(load(path)["state_dict"]["giant"], counted(4099, 1021))


def test_both_ranks_of_a_plain_replica_inside_of_a_mesh_share_it(tmp_path: Path) -> None:
    path = tmp_path / "replicated"
    written = values(run_ranks(save_replicated, 2, args=(str(path),), init_process_group="gloo"))
    assert written[0] == pytest.approx(written[1], rel=0.2)
    assert torch.equal(load(path)["state_dict"]["w"], counted(512, 512))


def save_replicated(path: str) -> int:
    weight = distribute_tensor(counted(512, 512), init_device_mesh("cpu", (2,)), [Replicate()])
    assert isinstance(weight, DTensor)
    return save({"w": weight}, path, "fsdp").num_bytes


# ---- ranks that do not agree -----------------------------------------------------------------------------------------


def save_different(kind: str, path: str) -> str:
    rank = dist.get_rank()
    state: dict[str, Any] = {"a": counted(64, 64), "b": counted(64, 64)}
    if kind == "tied":  # on rank 2 both names are the same memory
        state["b"] = state["a"] if rank == 2 else counted(64, 64)
    elif rank == 2:
        others: dict[str, dict[str, Any]] = {
            "shape": {"a": counted(64, 65)},
            "dtype": {"a": counted(64, 64).half()},
            "name": {"c": counted(1)},
            "object": {"a": {"now": "a dict"}},
        }
        state |= others[kind]
    io = AsyncUCCheckpointIO()
    io.connect("ddp")
    try:
        with pytest.raises(RuntimeError) as caught:
            io.save_checkpoint({"state_dict": state}, path)
        state = {"a": counted(4)}
        io.save_checkpoint({"state_dict": state}, f"{path}-after")  # the next one goes as if nothing had been
    finally:
        io.teardown()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["shape", "dtype", "name", "object", "tied"])
def test_ranks_that_hold_another_state_are_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "different"
    for message in values(run_ranks(save_different, 3, args=(kind, str(path)), init_process_group="gloo")):
        assert message.startswith("Rank(s) 2 hold a state of other names, shapes or dtypes than rank 0")
    assert not path.exists()
    assert torch.equal(load(f"{path}-after")["state_dict"]["a"], counted(4))


def save_what_cannot_be_pickled(where: str, path: str) -> tuple[str, bool]:
    bad = (lambda: 0) if dist.get_rank() == 0 else None
    checkpoint: dict[str, Any] = {"state_dict": {"a": counted(4), "_extra_state": None}, "callbacks": {}}
    if where == "state_dict":
        checkpoint["state_dict"]["_extra_state"] = bad
    else:
        checkpoint["callbacks"]["mine"] = bad
    io = AsyncUCCheckpointIO()
    io.connect("ddp")
    try:
        with pytest.raises(Exception, match="lambda") as caught:
            io.save_checkpoint(checkpoint, path)
        io.save_checkpoint({"state_dict": {"a": counted(4)}}, f"{path}-after")
        has_ended = io.settle(20.0)
    finally:
        io.teardown()
    return str(caught.value), has_ended


@pytest.mark.parametrize("where", ["state_dict", "callbacks"])
def test_what_only_rank_0_cannot_pickle_is_an_error_on_every_rank(where: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    for message, has_ended in values(
        run_ranks(
            save_what_cannot_be_pickled, 2, args=(where, str(path)), init_process_group="gloo", timeout_seconds=30
        )
    ):
        assert "lambda" in message
        assert has_ended
    assert not path.exists()
    assert torch.equal(load(f"{path}-after")["state_dict"]["a"], counted(4))
