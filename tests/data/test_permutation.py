"""The order is a permutation, as random as torch's, and never changes under its version."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.data.permutation import MAX_SAMPLES, ORDER_VERSION, SampleOrder, sample_order, sample_rng

SEEDS = st.integers(0, 2**64 - 1)
GOLDEN_10 = [4, 3, 2, 0, 6, 9, 5, 7, 8, 1]
GOLDEN_5000 = [4170, 4109, 2278, 165, 1115]
GOLDEN_1E12 = [688679179249, 692327249586, 304930293620]
GOLDEN_RNG = [12605845476208992160, 11045075279784071172]


# ---- a permutation ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(n=st.one_of(st.integers(0, 300), st.integers(4000, 4200), st.integers(4097, 70_000)), seed=SEEDS)
def test_every_sample_has_one_position(n: int, seed: int) -> None:
    order = sample_order(n, seed=seed, epoch=3)
    assert len(order) == n
    assert np.array_equal(np.sort(order[:]), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(4097, MAX_SAMPLES),
    seed=SEEDS,
    epoch=st.integers(0, 10**6),
    start=st.floats(0, 1, exclude_max=True),
)
def test_a_window_of_any_length_has_no_sample_twice(n: int, seed: int, epoch: int, start: float) -> None:
    first = min(int(start * n), n - 3000)
    found = sample_order(n, seed=seed, epoch=epoch)(np.arange(first, first + 3000))
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == 3000


def test_a_sample_does_not_depend_on_what_is_asked_with_it() -> None:
    order = sample_order(50_000, seed=5, epoch=1)
    whole = order[:]
    positions = np.random.default_rng(0).integers(0, 50_000, (7, 11, 13))
    assert np.array_equal(order(positions), whole[positions])
    assert order(positions).dtype == np.int64
    assert [order[3], order[-1], order(7)] == [whole[3], whole[-1], whole[7]]
    assert np.array_equal(order[10_000:40_000:7], whole[10_000:40_000:7])
    assert np.array_equal(order[::-1], whole[::-1])
    assert list(itertools.islice(order, 9000)) == whole[:9000].tolist()
    assert order(np.array([], dtype=np.int64)).size == order([]).size == 0


def test_an_epoch_of_1e18_samples_needs_no_memory() -> None:
    order = sample_order(10**18, seed=0, epoch=0)
    order[: 1 << 13]  # numpy's own caches
    tracemalloc.start()
    order[5 * 10**17 : 5 * 10**17 + 10_000]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20


# ---- never another one -----------------------------------------------------------------------------------------------


def test_version_1_is_what_it_was() -> None:
    # A checkpoint of a run in progress counts on it: if this fails, raise ORDER_VERSION and keep the old algorithm.
    assert ORDER_VERSION == 1
    assert sample_order(10, seed=0, epoch=0)[:].tolist() == GOLDEN_10
    assert sample_order(5000, seed=7, epoch=2)[:5].tolist() == GOLDEN_5000
    assert sample_order(10**12, seed=2**64 - 1, epoch=9)[5 * 10**11 : 5 * 10**11 + 3].tolist() == GOLDEN_1E12
    assert sample_rng(1, 2, 3).bit_generator.random_raw(2).tolist() == GOLDEN_RNG


# ---- as random as torch's --------------------------------------------------------------------------------------------


def orders(n: int, number: int) -> np.ndarray:
    """Orders of n samples, one per row, by seed."""
    return np.stack([sample_order(n, seed=seed, epoch=0)[:] for seed in range(number)])


def randperms(n: int, number: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(1)
    return np.stack([torch.randperm(n, generator=generator).numpy() for _ in range(number)])


def z_of_chi_square(counts: np.ndarray, expected: float) -> float:
    """How many standard deviations the chi-square of equally likely cells is from its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_all_permutations_of_a_few_are_equally_likely(n: int) -> None:
    number = 200 * math.factorial(n)
    found = Counter(map(tuple, orders(n, number).tolist()))
    counts = np.array([found[each] for each in itertools.permutations(range(n))], dtype=float)
    assert counts.sum() == number
    if n > 1:
        assert abs(z_of_chi_square(counts, 200)) < 4


@pytest.mark.parametrize("n", [6, 7, 8, 11, 13, 16])
def test_every_sample_is_equally_likely_at_every_position_and_after_every_other(n: int) -> None:
    number = 8000
    drawn = orders(n, number)
    at = np.zeros((n, n))
    np.add.at(at, (np.broadcast_to(np.arange(n), drawn.shape), drawn), 1)
    assert abs(z_of_chi_square(at, number / n)) < 4
    after = np.zeros((n, n))
    np.add.at(after, (drawn[:, :-1], drawn[:, 1:]), 1)
    pairs = after[~np.eye(n, dtype=bool)]
    assert abs(z_of_chi_square(pairs, number / n)) < 4


@pytest.mark.parametrize("n", [1000, 4096, 4097, 5003, 65_536, 100_003])
def test_positions_and_neighbours_look_like_those_of_randperm(n: int) -> None:
    """Statistics of 24 orders, each beside the same of torch's: none may be further from what chance gives."""
    number = 24
    for drawn in (orders(n, number), randperms(n, number)):
        cells = 16
        where = np.arange(n) * cells // n
        grid = np.zeros((cells, cells))  # the part of the epoch x the part of the dataset
        for each in drawn:
            np.add.at(grid, (where, where[each]), 1)
        assert abs(z_of_chi_square(grid, number * n / cells**2)) < 5
        differences = np.diff(drawn, axis=1) % n
        steps = np.bincount((differences * 64 // n).ravel(), minlength=64).astype(float)
        assert abs(z_of_chi_square(steps, number * (n - 1) / 64)) < 5
        in_a_row = (differences == 1).mean() * n  # 1 by chance, with a deviation of 1 / sqrt(number)
        assert abs(in_a_row - 1) < 5 / math.sqrt(number)
        fixed_points = (drawn == np.arange(n)).sum(axis=1).mean()
        assert abs(fixed_points - 1) < 5 / math.sqrt(number)
        is_up = (np.diff(drawn, axis=1) > 0).mean()
        assert abs(is_up - 0.5) < 5 * math.sqrt(1 / 12 / (n * number))


@pytest.mark.parametrize("n", [1000, 5003, 65_536])
def test_epochs_and_seeds_and_lengths_are_unrelated(n: int) -> None:
    pairs = [
        (sample_order(n, seed=3, epoch=epoch)[:], sample_order(n, seed=3, epoch=epoch + 1)[:]) for epoch in range(10)
    ]
    pairs += [
        (sample_order(n, seed=seed, epoch=0)[:], sample_order(n, seed=seed + 1, epoch=0)[:]) for seed in range(10)
    ]
    pairs += [(sample_order(n, seed=i, epoch=0)[:], sample_order(n, seed=0, epoch=i)[:]) for i in range(1, 10)]
    pairs += [(sample_order(n, seed=i, epoch=0)[:], sample_order(n + 1, seed=i, epoch=0)[:n]) for i in range(10)]
    correlations = [np.corrcoef(first, second)[0, 1] for first, second in pairs]
    assert np.abs(correlations).max() < 5 / math.sqrt(n)
    assert abs(np.mean(correlations)) < 5 / math.sqrt(n * len(pairs))
    assert np.mean([(first == second).sum() for first, second in pairs]) < 1 + 5 / math.sqrt(len(pairs))


def test_neighbours_stay_unrelated_in_very_long_epochs() -> None:
    for n in (10**9, 10**12, MAX_SAMPLES):
        found = sample_order(n, seed=1, epoch=0)[n // 3 : n // 3 + 100_000].astype(float) / n
        counts = np.histogram(found, bins=64, range=(0, 1))[0].astype(float)
        assert abs(z_of_chi_square(counts, len(found) / 64)) < 5
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / math.sqrt(len(found))


def test_a_sample_has_a_generator_of_its_own() -> None:
    first = sample_rng(1, 2, 3).random(4)
    assert np.array_equal(sample_rng(1, 2, 3).random(4), first)
    drawn = np.array(
        [sample_rng(seed, epoch, index).random() for seed in (0, 1) for epoch in (0, 1) for index in range(500)]
    )
    assert len(np.unique(drawn)) == 2000
    assert abs(drawn.mean() - 0.5) < 5 / math.sqrt(12 * 2000)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / math.sqrt(2000)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n": -1}, ValueError, "n must be from 0 to 9223372036854775807, got -1"),
        ({"n": 2**63}, ValueError, "n must be from 0 to"),
        ({"n": 1.5}, TypeError, r"n must be a whole number, got 1\.5"),
        ({"seed": -3}, ValueError, "seed must be from 0 to 18446744073709551615, got -3"),
        ({"seed": None}, TypeError, "seed must be a whole number, got None"),
        ({"epoch": True}, TypeError, "epoch must be a whole number, got True"),
    ],
)
def test_a_bad_option_is_named(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SampleOrder(**{"n": 10, "seed": 0, "epoch": 0, **options})
    with pytest.raises(ValueError, match="index must be from 0 to"):
        sample_rng(0, 0, -1)


def test_a_bad_position_is_named() -> None:
    order = sample_order(10, seed=0, epoch=0)
    for positions in ([0, 10], np.array([10], dtype=np.uint64)):
        with pytest.raises(IndexError, match="positions must be from 0 to 9, got 10"):
            order(positions)
    with pytest.raises(IndexError, match="got -2"):
        order([3, -2])
    with pytest.raises(TypeError, match="whole numbers, got an array of float64"):
        order([0.0])
    with pytest.raises(IndexError, match="position 10 is out of range for 10 samples"):
        order[10]
