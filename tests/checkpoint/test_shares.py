"""Over all replicas every element is in exactly one piece, the shares are even, and the pieces are few."""

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint.shares import WHOLE_BYTES, Leaf, Piece, boxes, fingerprint, share

KIB, MIB = 1024, 1024**2

dims = st.one_of(st.integers(0, 3), st.integers(1, 70), st.sampled_from([97, 128, 251, 1009]))
shapes = st.lists(dims, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 300_000)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
replicas = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 64]))

# Far too large to allocate, and down to nothing.
huge_shapes = st.lists(
    st.one_of(st.integers(0, 3), st.integers(1, 10**7), st.sampled_from([2, 99_991, 2**20])), max_size=5
).map(tuple)


@st.composite
def states(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = shapes, max_size: int = 6) -> list[Leaf]:
    drawn = draw(st.lists(st.tuples(shapes, itemsizes), max_size=max_size))
    # Equal sizes are told apart by key, so let the order of the keys be any.
    keys = draw(st.permutations([f"layer.{number}.weight" for number in range(len(drawn))]))
    return [Leaf(key, shape, itemsize) for key, (shape, itemsize) in zip(keys, drawn, strict=True)]


def all_shares(leaves: Sequence[Leaf], num_replicas: int) -> list[list[Piece]]:
    return [share(leaves, num_replicas, index) for index in range(num_replicas)]


def num_bytes(pieces: Sequence[Piece], leaves: Sequence[Leaf]) -> int:
    itemsize = {leaf.key: leaf.itemsize for leaf in leaves}
    return sum(math.prod(piece.sizes) * itemsize[piece.key] for piece in pieces)


def total_bytes(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.num_bytes for leaf in leaves)


def run_of(piece: Piece, shape: Sequence[int]) -> tuple[int, int]:
    """The first element of a piece and the one after its last, in row-major order; they must be its only ones."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    corner = [offset + size - 1 for offset, size in zip(piece.offsets, piece.sizes, strict=True)]
    start = sum(stride * offset for stride, offset in zip(strides, piece.offsets, strict=True))
    stop = sum(stride * last for stride, last in zip(strides, corner, strict=True)) + 1
    assert stop - start == math.prod(piece.sizes)
    return start, stop


def runs_by_leaf(shares: Sequence[Sequence[Piece]], leaves: Sequence[Leaf]) -> dict[str, list[tuple[int, int]]]:
    shape = {leaf.key: leaf.shape for leaf in leaves}
    runs = defaultdict(list)
    for pieces in shares:
        for piece in pieces:
            for offset, size, length in zip(piece.offsets, piece.sizes, shape[piece.key], strict=True):
                assert 0 <= offset <= offset + size <= length
            runs[piece.key].append(run_of(piece, shape[piece.key]) if math.prod(shape[piece.key]) else (0, 0))
    return runs


def assert_even(leaves: Sequence[Leaf], num_replicas: int) -> None:
    """The bound of the module's docstring, in whole numbers: every share within 5 % of even, or within 16 KiB."""
    total = total_bytes(leaves)
    for pieces in all_shares(leaves, num_replicas):
        off = abs(num_bytes(pieces, leaves) * num_replicas - total)
        assert off * 20 <= max(total, 20 * WHOLE_BYTES * num_replicas)


# ---- every element once ----------------------------------------------------------------------------------------------


@given(leaves=states(), num_replicas=replicas)
def test_every_element_is_in_exactly_one_piece(leaves: list[Leaf], num_replicas: int) -> None:
    written = {leaf.key: np.zeros(leaf.shape, dtype=np.uint8) for leaf in leaves}
    count = Counter[str]()
    for pieces in all_shares(leaves, num_replicas):
        for piece in pieces:
            box = tuple(slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.sizes, strict=True))
            assert written[piece.key][box].shape == piece.sizes  # nothing of it is outside
            written[piece.key][box] += 1
            count[piece.key] += 1
            assert math.prod(piece.sizes) > 0 or written[piece.key].size == 0
    for key, times in written.items():
        assert (times == 1).all()
        assert times.size > 0 or count[key] == 1  # a reader looks for empty tensors too


@given(leaves=states(huge_shapes), num_replicas=replicas)
def test_every_element_of_a_huge_state_is_in_exactly_one_piece(leaves: list[Leaf], num_replicas: int) -> None:
    runs = runs_by_leaf(all_shares(leaves, num_replicas), leaves)
    assert set(runs) == {leaf.key for leaf in leaves}
    for leaf in leaves:
        end = 0
        for start, stop in sorted(runs[leaf.key]):
            assert start == end
            assert start < stop or [(start, stop)] == runs[leaf.key]
            end = stop
        assert end == math.prod(leaf.shape)


def test_nothing_at_all_has_shares() -> None:
    assert all_shares([], 3) == [[], [], []]


def test_one_replica_writes_every_leaf_whole() -> None:
    leaves = [Leaf("b", (3, 4), 4), Leaf("a", (), 8), Leaf("c", (0, 7), 2)]
    assert share(leaves, 1, 0) == [Piece("c", (0, 0), (0, 7)), Piece("a", (), ()), Piece("b", (0, 0), (3, 4))]


@given(leaves=states(), num_replicas=replicas, seed=st.randoms(use_true_random=False))
def test_the_order_of_the_leaves_does_not_matter(leaves: list[Leaf], num_replicas: int, seed: random.Random) -> None:
    shuffled = seed.sample(leaves, len(leaves))
    assert all_shares(shuffled, num_replicas) == all_shares(leaves, num_replicas)
    assert fingerprint(shuffled) == fingerprint(leaves)


# ---- even ------------------------------------------------------------------------------------------------------------


@given(leaves=states(), num_replicas=replicas)
def test_every_share_is_even_within_the_bound(leaves: list[Leaf], num_replicas: int) -> None:
    assert_even(leaves, num_replicas)


@given(leaves=states(huge_shapes, max_size=12), num_replicas=st.integers(1, 64))
def test_every_share_of_a_huge_state_is_even_within_the_bound(leaves: list[Leaf], num_replicas: int) -> None:
    assert_even(leaves, num_replicas)


@given(
    leaves=st.one_of(states(huge_shapes), states()).filter(lambda leaves: total_bytes(leaves) > 0),
    num_replicas=replicas,
)
def test_shares_of_160_kib_and_more_are_within_ten_percent(leaves: list[Leaf], num_replicas: int) -> None:
    even = total_bytes(leaves) / num_replicas
    if even >= 160 * KIB:
        for pieces in all_shares(leaves, num_replicas):
            assert 0.9 * even <= num_bytes(pieces, leaves) <= 1.1 * even


@pytest.mark.parametrize("num_replicas", [2, 3, 7, 8, 64])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 10**7),
        (2, 10**7),
        (10**7, 1, 3),
        (1, 1, 10**7, 1),
        (2, 3, 1_000_003),
        (9_999_991,),
        (3_163, 3_163),
        (3, 5, 7, 11, 13, 17, 19, 23),
        (10**12, 4096),
    ],
    ids=str,
)
def test_one_giant_tensor_is_split_too(shape: tuple[int, ...], num_replicas: int) -> None:
    leaves = [Leaf("giant", shape, 4)]
    shares = all_shares(leaves, num_replicas)
    even = total_bytes(leaves) / num_replicas
    for pieces in shares:
        assert num_bytes(pieces, leaves) == pytest.approx(even, rel=0.05)
        assert 1 <= len(pieces) <= 2 * sum(size > 1 for size in shape) - 1
    assert_even(leaves, num_replicas)


def test_a_giant_between_small_ones_is_split() -> None:
    leaves = [Leaf(f"small.{number}", (64,), 4) for number in range(50)] + [Leaf("giant", (1, 64 * MIB), 4)]
    shares = all_shares(leaves, 4)
    assert len(shares[0]) == 51
    assert [len(pieces) for pieces in shares[1:]] == [1, 1, 1]
    assert_even(leaves, 4)


def test_what_is_tiny_is_left_whole_even_if_a_replica_gets_nothing() -> None:
    leaves = [Leaf("a", (WHOLE_BYTES,), 1), Leaf("b", (64, 64), 4)]
    shares = all_shares(leaves, 8)
    assert sorted(piece.key for pieces in shares for piece in pieces) == ["a", "b"]


# ---- the smallest first ----------------------------------------------------------------------------------------------


def resnet_like() -> list[Leaf]:
    leaves = []
    for number in range(50):
        leaves += [
            Leaf(f"layers.{number}.conv.weight", (256, 256, 3, 3), 4),
            Leaf(f"layers.{number}.norm.weight", (256,), 4),
            Leaf(f"layers.{number}.norm.running_mean", (256,), 4),
            Leaf(f"layers.{number}.norm.running_var", (256,), 4),
            Leaf(f"layers.{number}.norm.num_batches_tracked", (), 8),
            Leaf(f"optimizer.{number}.step", (), 4),
            Leaf(f"optimizer.{number}.exp_avg", (256, 256, 3, 3), 4),
        ]
    return [*leaves, Leaf("empty", (0, 3), 4)]


@pytest.mark.parametrize("num_replicas", [2, 8, 64])
def test_counters_and_batch_statistics_come_from_replica_zero(num_replicas: int) -> None:
    leaves = resnet_like()
    first = {piece.key for piece in share(leaves, num_replicas, 0)}
    assert first >= {leaf.key for leaf in leaves if leaf.num_bytes <= 1024}


@given(leaves=states(), num_replicas=replicas)
def test_what_is_smaller_never_comes_from_a_later_replica(leaves: list[Leaf], num_replicas: int) -> None:
    size = {leaf.key: leaf.num_bytes for leaf in leaves}
    order = [size[piece.key] for pieces in all_shares(leaves, num_replicas) for piece in pieces]
    assert order == sorted(order)


@given(leaves=states(), num_replicas=replicas)
def test_empty_leaves_are_replica_zeros(leaves: list[Leaf], num_replicas: int) -> None:
    empty = {leaf.key for leaf in leaves if leaf.num_bytes == 0}
    assert {piece.key for piece in share(leaves, num_replicas, 0)} >= empty


# ---- few pieces ------------------------------------------------------------------------------------------------------


@given(leaves=st.one_of(states(), states(huge_shapes)), num_replicas=replicas)
def test_few_leaves_are_cut_and_into_few_pieces(leaves: list[Leaf], num_replicas: int) -> None:
    shares = all_shares(leaves, num_replicas)
    pieces = Counter(piece.key for pieces in shares for piece in pieces)
    owners = Counter(key for pieces in shares for key in {piece.key for piece in pieces})
    num_cuts = sum(owners.values()) - len(leaves)
    assert num_cuts <= num_replicas - 1
    for leaf in leaves:
        # Each cut adds a piece for every dimension that it goes into, on both sides, but one: with none there is one.
        per_cut = 2 * max(1, sum(size > 1 for size in leaf.shape)) - 1
        assert pieces[leaf.key] <= 1 + (owners[leaf.key] - 1) * per_cut


@given(leaves=st.one_of(states(), states(huge_shapes)), num_replicas=replicas)
def test_small_leaves_are_never_cut(leaves: list[Leaf], num_replicas: int) -> None:
    pieces = Counter(piece.key for pieces in all_shares(leaves, num_replicas) for piece in pieces)
    twentieth = total_bytes(leaves) // (20 * num_replicas)
    for leaf in leaves:
        if leaf.num_bytes <= max(WHOLE_BYTES, twentieth):
            assert pieces[leaf.key] == 1


@pytest.mark.parametrize(("num_leaves", "num_pieces"), [(39, [20, 20]), (41, [21, 20])])
def test_a_leaf_is_cut_only_if_it_is_more_than_a_twentieth_of_a_share(num_leaves: int, num_pieces: list[int]) -> None:
    # The even cut goes through the middle of a leaf: one of 19.5 in a share, then one of 20.5.
    leaves = [Leaf(f"layers.{number:02}", (64 * KIB,), 1) for number in range(num_leaves)]
    assert [len(pieces) for pieces in all_shares(leaves, 2)] == num_pieces


def test_equal_layers_are_dealt_out_whole() -> None:
    leaves = [Leaf(f"layers.{number:02}", (512, 512), 4) for number in range(12)]
    for pieces in all_shares(leaves, 4):
        assert [piece.sizes for piece in pieces] == [(512, 512)] * 3


def test_a_cut_between_rows_makes_one_piece_on_each_side() -> None:
    # 50,257 rows do not halve; half a row is far within the tolerance.
    assert all_shares([Leaf("embedding", (50_257, 768), 4)], 2) == [
        [Piece("embedding", (0, 0), (25_129, 768))],
        [Piece("embedding", (25_129, 0), (25_128, 768))],
    ]


def test_rows_that_are_too_large_are_cut_themselves() -> None:
    assert all_shares([Leaf("wide", (3, 10**6), 4)], 2) == [
        [Piece("wide", (0, 0), (1, 10**6)), Piece("wide", (1, 0), (1, 500_000))],
        [Piece("wide", (1, 500_000), (1, 500_000)), Piece("wide", (2, 0), (1, 10**6))],
    ]


# ---- a range as boxes ------------------------------------------------------------------------------------------------


def runs_that_are_boxes(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Every box that is one run of elements: one index each, then a range of one dimension, then all of the others."""
    for dim, length in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        for outer in range(math.prod(shape[:dim])):
            for first in range(length):
                for last in range(first + 1, length + 1):
                    yield (outer * length + first) * inner, (outer * length + last) * inner


@given(data=st.data())
def test_a_range_falls_into_the_fewest_boxes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = list(boxes(shape, start, stop))

    runs = [run_of(Piece("x", *box), shape) for box in found]
    assert [start, *(end for _, end in runs)] == [*(begin for begin, _ in runs), stop]

    starts_of = defaultdict(list)
    for begin, end in runs_that_are_boxes(shape):
        starts_of[end].append(begin)
    fewest = {start: 0}
    for end in range(start + 1, stop + 1):
        fewest[end] = min(fewest[begin] + 1 for begin in starts_of[end] if begin >= start)
    assert len(found) == fewest[stop]
    assert len(found) <= 2 * len(shape) - 1


# ---- the fingerprint -------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    leaves = [Leaf("weight", (3, 4), 4), Leaf("step", (), 8)]
    assert fingerprint(leaves) == "6a47454ef399e43978693c9dcb725f3c"


@pytest.mark.parametrize(
    "other",
    [
        [Leaf("weight", (3, 4), 4)],
        [Leaf("weight", (3, 4), 4), Leaf("steps", (), 8)],
        [Leaf("weight", (4, 3), 4), Leaf("step", (), 8)],
        [Leaf("weight", (3, 4), 2), Leaf("step", (), 8)],
        [Leaf("weight", (3, 4), 4), Leaf("step", (1,), 8)],
    ],
    ids=["missing", "key", "shape", "itemsize", "0-d"],
)
def test_the_fingerprint_tells_apart(other: list[Leaf]) -> None:
    assert fingerprint(other) != fingerprint([Leaf("weight", (3, 4), 4), Leaf("step", (), 8)])


@given(first=states(max_size=3), second=states(max_size=3))
def test_equal_fingerprints_are_equal_leaves(first: list[Leaf], second: list[Leaf]) -> None:
    same = sorted(first, key=lambda leaf: leaf.key) == sorted(second, key=lambda leaf: leaf.key)
    assert (fingerprint(first) == fingerprint(second)) is same


def test_any_key_has_a_fingerprint() -> None:
    keys = ["", "naïve", "a'b", 'a"b', "\ud800", "\n"]
    assert len({fingerprint([Leaf(key, (1,), 4)]) for key in keys}) == len(keys)


def test_a_shape_that_is_a_subclass_of_tuple_is_a_shape() -> None:
    class Size(tuple):
        __slots__ = ()

        def __repr__(self) -> str:
            return f"torch.Size({list(self)})"

    plain, sized = Leaf("w", (300, 400), 4), Leaf("w", Size((300, 400)), 4)
    assert fingerprint([sized]) == fingerprint([plain])
    assert all_shares([sized], 3) == all_shares([plain], 3)
    assert all(type(piece.sizes) is tuple for pieces in all_shares([sized], 1) for piece in pieces)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaves", "num_replicas", "index", "message"),
    [
        ([], 0, 0, "num_replicas must be at least 1, got 0"),
        ([], 2, 2, r"index must be from 0 to 1 for 2 replica\(s\), got 2"),
        ([], 2, -1, "got -1"),
        ([Leaf("a", (2, -1), 4)], 1, 0, r"'a' must not be negative, got \(2, -1\)"),
        ([Leaf("a", (2,), 0)], 1, 0, "itemsize of leaf 'a' must be from 1 to 16384, got 0"),
        ([Leaf("a", (2,), 16385)], 1, 0, "got 16385"),
        ([Leaf("b", (), 4), Leaf("a", (2,), 4), Leaf("b", (), 4)], 1, 0, "leaf 'b' is there more than once"),
    ],
)
def test_what_cannot_be_shared_is_refused(leaves: list[Leaf], num_replicas: int, index: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share(leaves, num_replicas, index)


@pytest.mark.parametrize("value", [Leaf("a", (), 4), Piece("a", (), ())])
def test_leaves_and_pieces_do_not_change(value: Leaf | Piece) -> None:
    with pytest.raises(FrozenInstanceError):
        value.key = "b"  # type: ignore[misc]


# ---- fast ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 100, 255])
def test_a_large_state_on_many_replicas_is_planned_at_once(index: int) -> None:
    rng = random.Random(7)
    leaves = [
        Leaf(f"layers.{number}.weight", (rng.randrange(1, 5000), rng.randrange(1, 5000)), 4) for number in range(10_000)
    ]
    seconds = []
    for _ in range(5):
        start = time.thread_time()  # a busy machine does not count
        share(leaves, 256, index)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.1
