"""Which replica writes what: ranks that hold the same state share the writing of it, about evenly.

Every rank works out its own share from the keys, shapes and item sizes of the state, before anything is copied and
without asking anybody. Over all replicas each element is in exactly one piece. A share differs from an even one by at
most 5 % of it or 16 KiB, whichever is more.

The leaves lie end to end, the smallest first, and are cut into equal parts. So the many small things come from replica
0, as far as its share reaches, and with them what need not be equal on all ranks: step counters, and the BatchNorm
statistics that every rank of DDP updates from its own batch until rank 0's replace them.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise

# How far a cut may move to a place where it makes few pieces. A share has two ends, so it is off by twice as much.
TOLERANCES_PER_SHARE = 40
# A leaf smaller than this is never cut, however small the shares are: pieces cost more than they even out.
WHOLE_BYTES = 16 * 1024
MIN_TOLERANCE_BYTES = WHOLE_BYTES // 2


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the state, as every replica holds it.

    Attributes:
        key: Its name, which no other leaf has.
        shape: May be `()`, and may hold zeros.
        itemsize: Bytes of one element, at most 16 KiB.
    """

    key: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """The size of the whole leaf."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one leaf, in the leaf's own coordinates. In a contiguous leaf it is one run of bytes.

    Attributes:
        key: The leaf's.
        offsets: Where it starts, in elements of each dimension.
        sizes: How far it reaches.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place between two elements; the end of a leaf is always the start of the next."""

    leaf: int
    element: int


def share(leaves: Sequence[Leaf], num_replicas: int, index: int) -> list[Piece]:
    """Return the pieces that one of `num_replicas` replicas writes, the smallest leaves first.

    All replicas have to pass the same leaves (compare their `fingerprint`), in any order. With fewer bytes than shares
    the last ones may be empty. Empty leaves are replica 0's.

    Args:
        leaves: The state that all replicas hold.
        num_replicas: How many share it.
        index: Which of them, from 0.

    Raises:
        ValueError: If two leaves have the same key, or a number is out of range.
    """
    _check(leaves, num_replicas, index)
    ordered = sorted(leaves, key=lambda leaf: (leaf.num_bytes, leaf.key))
    starts = list(accumulate((leaf.num_bytes for leaf in ordered), initial=0))
    first, last = (_cut(ordered, starts, num_replicas, cut) for cut in (index, index + 1))
    pieces: list[Piece] = []
    for position in range(first.leaf, min(last.leaf + 1, len(ordered))):
        leaf = ordered[position]
        start = first.element if position == first.leaf else 0
        stop = last.element if position == last.leaf else None
        if start == 0 and stop is None:
            pieces.append(Piece(leaf.key, (0,) * len(leaf.shape), tuple(leaf.shape)))
        else:
            stop = math.prod(leaf.shape) if stop is None else stop
            pieces += (Piece(leaf.key, *box) for box in boxes(leaf.shape, start, stop))
    return pieces


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the offsets and sizes of the fewest boxes that a range of elements falls into, each one run of elements.

    At most `2 * len(shape) - 1` of them.

    Args:
        shape: Of a row-major tensor without empty dimensions.
        start: The first element.
        stop: The element after the last.
    """
    strides = _strides(shape)
    while start < stop:
        # Whole slices of the outermost dimension of which one starts here and ends in the range; the innermost, single
        # elements, always does. They end with the range or with the slice around them.
        dim = next(dim for dim, size in enumerate(strides) if start % size == 0 and start + size <= stop)
        around = strides[dim] * shape[dim]
        end = min(stop // strides[dim] * strides[dim], (start // around + 1) * around)
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        yield offsets, (*(1 for _ in shape[:dim]), (end - start) // strides[dim], *shape[dim + 1 :])
        start = end


def fingerprint(leaves: Sequence[Leaf]) -> str:
    """Return a digest that is equal for the same leaves in any order, on any machine and in any process."""
    digest = blake2b(digest_size=16)
    for leaf in sorted(leaves, key=lambda leaf: leaf.key):
        # repr quotes the key, so that no two lists of leaves read the same. A torch.Size would show its type.
        digest.update(repr((leaf.key, tuple(leaf.shape), leaf.itemsize)).encode())
    return digest.hexdigest()


def _check(leaves: Sequence[Leaf], num_replicas: int, index: int) -> None:
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas!r}.")
    if not 0 <= index < num_replicas:
        raise ValueError(f"index must be from 0 to {num_replicas - 1} for {num_replicas} replica(s), got {index!r}.")
    for leaf in leaves:
        if leaf.shape and min(leaf.shape) < 0:
            raise ValueError(f"the shape of leaf {leaf.key!r} must not be negative, got {tuple(leaf.shape)}.")
        if not 1 <= leaf.itemsize <= WHOLE_BYTES:
            raise ValueError(f"the itemsize of leaf {leaf.key!r} must be from 1 to {WHOLE_BYTES}, got {leaf.itemsize}.")
    if len({leaf.key for leaf in leaves}) < len(leaves):
        keys = sorted(leaf.key for leaf in leaves)
        twice = next(key for key, following in pairwise(keys) if key == following)
        raise ValueError(f"leaf {twice!r} is there more than once. Give every tensor a name of its own.")


def _cut(ordered: Sequence[Leaf], starts: Sequence[int], num_replicas: int, number: int) -> _Cut:
    """Return where the share of replica `number` starts, and that of the one before ends."""
    total_bytes = starts[-1]
    if number == 0:
        return _Cut(0, 0)
    if number == num_replicas or total_bytes == 0:
        return _Cut(len(ordered), 0)
    # In units of 1/num_replicas byte the even place of every cut is a whole number, and no rank rounds differently.
    position = bisect_right(starts, total_bytes * number // num_replicas) - 1
    leaf = ordered[position]
    place = total_bytes * number - starts[position] * num_replicas
    unit = leaf.itemsize * num_replicas
    tolerance = max(total_bytes // TOLERANCES_PER_SHARE, MIN_TOLERANCE_BYTES * num_replicas)
    element = _nearest_round_element(leaf.shape, place, unit, tolerance)
    return _Cut(position, element) if element < math.prod(leaf.shape) else _Cut(position + 1, 0)


def _nearest_round_element(shape: Sequence[int], place: int, unit: int, tolerance: int) -> int:
    """Return the element to cut before: an end of the leaf, else between slices of the outermost dimension possible.

    Args:
        shape: The leaf's.
        place: The even place of the cut, from the start of the leaf.
        unit: The size of one element, in what `place` and `tolerance` are measured in.
        tolerance: How far from its even place the cut may be.
    """
    # Cuts never cross: the coarser one of two neighbours would have been as near to the other.
    for stride in (math.prod(shape), *_strides(shape)):
        slice_size = stride * unit
        slices = (2 * place + slice_size) // (2 * slice_size)
        if abs(slices * slice_size - place) <= tolerance:
            return slices * stride
    raise AssertionError("an element is smaller than the tolerance")  # _check made sure of it


def _strides(shape: Sequence[int]) -> list[int]:
    """Return how many elements one step in each dimension skips, in row-major order."""
    return list(accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1))[::-1] if shape else []
