"""The order of an epoch's samples: a permutation that is a function, not a table.

The sample at any position is computed from (n, seed, epoch) alone, so to begin in the middle costs what to begin at the
start costs, in time and in memory, whatever n is. The algorithm never changes under its version number.
"""

import hashlib
import math
import operator
from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
"""Goes into every checkpoint. What sorts or mixes otherwise needs another number, and this one has to stay."""

MAX_SAMPLES = 2**63 - 1
_MAX_SEED = 2**64 - 1
# A Feistel network is a poor shuffle of few samples: below this, they are sorted by keyed random numbers (32 KiB).
_MAX_SORTED = 4096
_NUM_ROUNDS = 8
_CHUNK = 8192  # positions; what is worked on stays in the cache

_Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def sample_order(n: int, *, seed: int, epoch: int) -> "SampleOrder":
    """Return the shuffled order of an epoch.

    Args:
        n: How many samples there are, from 0 to 2**63 - 1.
        seed: From 0 to 2**64 - 1.
        epoch: From 0 on; each has an order of its own.

    Raises:
        TypeError: If one is no whole number.
        ValueError: If one is out of its range.
    """
    return SampleOrder(n, seed=seed, epoch=epoch)


class SampleOrder:
    """A permutation of range(n): `order(positions)` are the samples there, `order[a:b]` those of a slice.

    Nothing is kept per sample, so it may be as long as one likes. `len(order)` is n; iterating gives all samples, in
    order, as `int`. Made by `sample_order`.

    Args:
        n: How many samples there are.
        seed: From 0 to 2**64 - 1.
        epoch: From 0 on.

    Raises:
        TypeError, ValueError: As `sample_order`.
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        self.n = whole_number("n", n, 0, MAX_SAMPLES)
        self.seed = whole_number("seed", seed, 0, _MAX_SEED)
        self.epoch = whole_number("epoch", epoch, 0, MAX_SAMPLES)
        text = f"lightning_air sample_order {ORDER_VERSION} n={self.n} seed={self.seed} epoch={self.epoch}"
        digest = hashlib.blake2b(text.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        # The smallest rectangle that is nearly a square and holds n: of it less than one row is outside of range(n).
        self._rows = math.isqrt(max(self.n - 1, 0)) + 1
        self._columns = -(-self.n // self._rows)
        self._table: _Indices | None = None

    def __repr__(self) -> str:
        return f"sample_order({self.n}, seed={self.seed}, epoch={self.epoch})"

    def __len__(self) -> int:
        return self.n

    def __call__(self, positions: npt.ArrayLike) -> _Indices:
        """Return the samples at these positions.

        Args:
            positions: Whole numbers from 0 to n - 1, of any shape, in any order.

        Returns:
            Of the same shape.

        Raises:
            TypeError: If they are no whole numbers.
            IndexError: If one is out of range.
        """
        asked = np.asarray(positions)
        if asked.dtype.kind not in "iu":
            if asked.size:
                raise TypeError(f"positions must be whole numbers, got an array of {asked.dtype}.")
            asked = asked.astype(np.int64)
        if asked.size and not 0 <= (low := int(asked.min())) <= (high := int(asked.max())) < self.n:
            raise IndexError(f"positions must be from 0 to {self.n - 1}, got {low if low < 0 else high}.")
        if self.n <= _MAX_SORTED:
            return np.asarray(self._sorted()[asked.astype(np.int64)])
        flat = asked.astype(np.uint64).ravel()
        for start in range(0, flat.size, _CHUNK):
            flat[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK])
        return flat.astype(np.int64).reshape(asked.shape)

    @overload
    def __getitem__(self, key: slice) -> _Indices: ...
    @overload
    def __getitem__(self, key: SupportsIndex) -> int: ...
    def __getitem__(self, key: slice | SupportsIndex) -> _Indices | int:
        """Return the samples of a slice, or the one at a position; negative positions count from the end."""
        if isinstance(key, slice):
            return self(np.arange(*key.indices(self.n), dtype=np.int64))
        position = operator.index(key)
        if not -self.n <= position < self.n:
            raise IndexError(f"position {position} is out of range for {self.n} samples.")
        return int(self(position % self.n))

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.n, _CHUNK):
            yield from self[start : start + _CHUNK].tolist()

    def _sorted(self) -> _Indices:
        if self._table is None:
            numbers = np.arange(self.n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._keys[0]
            numbers = _mixed(_mixed(numbers) ^ self._keys[1])  # all different, as every step can be undone
            self._table = np.argsort(numbers, kind="stable").astype(np.int64)
        return self._table

    def _walk(self, positions: _Words) -> _Words:
        """Permute the rectangle until each position is in range(n) again."""
        found = self._permute(positions)
        outside = np.flatnonzero(found >= np.uint64(self.n))
        while outside.size:
            found[outside] = again = self._permute(found[outside])
            outside = outside[again >= np.uint64(self.n)]
        return found

    def _permute(self, positions: _Words) -> _Words:
        """Permute the rectangle: row and column are in turn rotated by what depends on the other one."""
        columns = np.uint64(self._columns)
        moved = positions // columns
        fixed = positions - moved * columns
        size, other = self._rows, self._columns
        for key in self._keys:
            mixed = fixed + key
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(0xD6E8FEB86659FD93)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(0xD6E8FEB86659FD93)
            mixed >>= np.uint64(32)
            mixed *= np.uint64(size)  # at most 2**32 each: the upper half is a number below `size`
            mixed >>= np.uint64(32)
            moved += mixed
            np.minimum(moved, moved - np.uint64(size), out=moved)  # modulo: the difference wraps round if too small
            moved, fixed = fixed, moved
            size, other = other, size
        return moved * columns + fixed


def _mixed(words: _Words) -> _Words:
    """Mix 64 bits (the finalizer of SplitMix64, a bijection)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a random generator for one sample in one epoch, for augmentation.

    It depends on nothing else: a sample is augmented alike whichever worker of whichever rank reads it, and after a
    resume. It is made in about 20 microseconds. For torch: `torch.Generator().manual_seed(int(rng.integers(2**63)))`.

    Args:
        seed: From 0 to 2**64 - 1.
        epoch: From 0 on.
        index: The sample's index in the dataset, from 0 on.

    Raises:
        TypeError: If one is no whole number.
        ValueError: If one is out of its range.
    """
    seed = whole_number("seed", seed, 0, _MAX_SEED)
    epoch = whole_number("epoch", epoch, 0, MAX_SAMPLES)
    index = whole_number("index", index, 0, MAX_SAMPLES)
    text = f"lightning_air sample_rng 1 seed={seed} epoch={epoch} index={index}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """Return an option as an int.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is out of range.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}.") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {number}.")
    return number
