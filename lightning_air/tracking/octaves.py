"""How wide windows may be, so that a run of any length has points left and even curves: the law and its cost.

**The law.** Wherever a run stops, at least 320 points of each metric that is logged in every step stand in either half
of it, and no gap in a half is wider than 1/320 of that half, wherever so many steps were logged. A half is `L/2` steps
long, so a gap may be `L/640`: a window that ends at step `t` may be `t/640` wide and no wider, since the run may stop
right after it. Hence the octaves: octave 0 is the steps from 0 to 640, in windows of one step; octave `k` the steps
from `640 * 2**(k-1)` to `640 * 2**k`, in windows of at most `2**(k-1)` steps. Each holds 640 windows, which is why a
run of any length `L` costs only about `640 * (1 + log2(L/640))` points per metric.

Positions are steps from the run's first. Pure functions.
"""

from collections.abc import Iterator
from typing import NamedTuple

POINTS_PER_HALF = 320
"""What the law promises: as many as MLflow's charts draw."""

OCTAVE_POINTS = 2 * POINTS_PER_HALF
CUT_OCTAVE_POINTS = OCTAVE_POINTS + 1
"""What an octave takes at most per metric: its beginning may cut a window."""

PLANNED_OCTAVES = 23
"""22 reach step 1.3e9; one is spare."""

_MAX_COARSENING = 1 << 64


class Stretch(NamedTuple):
    """Steps to come that lie in one octave.

    Attributes:
        num_steps: How many.
        max_stride: How wide a window may be there, in steps.
    """

    num_steps: int
    max_stride: int


def octave_of(position: int) -> int:
    """Return the octave that a position lies in."""
    return (position // OCTAVE_POINTS).bit_length()


def octave_start(octave: int) -> int:
    """Return the position at which an octave starts."""
    return (OCTAVE_POINTS << octave) >> 1 if octave else 0


def octave_stop(octave: int) -> int:
    """Return the position at which the next octave starts."""
    return OCTAVE_POINTS << octave


def octaves_passed(position: int) -> float:
    """Return how many octaves lie before a position; a part of one counts in proportion."""
    octave = octave_of(position)
    start = octave_start(octave)
    return octave + (position - start) / (octave_stop(octave) - start)


def guaranteed_metrics(limit: int, points_per_window: int = 1) -> int:
    """Return for how many metrics the law holds, up to step 1.3e9, if they share so many points."""
    return max(0, limit) // (CUT_OCTAVE_POINTS * PLANNED_OCTAVES * points_per_window)


def doubled_stride(num_steps: int, *, weight: int, budget: int, base: int) -> int:
    """Return the smallest `base * 2**i` that fits so many steps into the budget.

    Args:
        num_steps: The steps to come.
        weight: What all metrics take together for one window each, in points.
        budget: In points.
        base: In steps.

    Returns:
        The stride in steps; one that covers all of the steps if none fits.
    """
    wanted = -(-weight * num_steps // max(1, budget * base))
    widest = -(-num_steps // base)
    return base << (max(1, min(wanted, widest)) - 1).bit_length()


def even_stride(position: int, stop: int, *, weight: int, budget: int, base: int) -> tuple[int, int] | None:
    """Return the smallest stride with which the steps up to a known end fit into the budget.

    The run may stop early, so windows are finer at its beginning, as the law asks. If the budget does not allow that,
    they are so by a constant factor less, for at most half of the budget.

    Args:
        position: Where the steps to come start.
        stop: Where they end; the last one is `stop - 1`.
        weight: What all metrics take together for one window each, in points.
        budget: In points.
        base: Strides are multiples of it, in steps.

    Returns:
        The stride, and the widest that the law (or a constant times it) allows in the octave of `position`, both in
        steps; None if not even one window per octave fits.
    """
    coarsening = 1
    while True:
        stretches = list(_stretches(position, stop, coarsening, base))
        if min(coarsening, 2) * _cost(stretches, _MAX_COARSENING, weight) <= budget:
            break
        if coarsening == _MAX_COARSENING:
            return None
        coarsening *= 2
    low, high = 1, max(stretch.max_stride for stretch in stretches) // base
    while low < high:
        middle = (low + high) // 2
        if _cost(stretches, middle * base, weight) <= budget:
            high = middle
        else:
            low = middle + 1
    return low * base, stretches[0].max_stride


def _stretches(position: int, stop: int, coarsening: int, base: int) -> Iterator[Stretch]:
    while position < stop:
        octave = octave_of(position)
        end = min(octave_stop(octave), stop)
        widest = coarsening * max(1, (1 << octave) >> 1) // base
        yield Stretch(end - position, base << max(0, widest.bit_length() - 1))
        position = end


def _cost(stretches: list[Stretch], stride: int, weight: int) -> int:
    return weight * sum(-(-num_steps // min(stride, max_stride)) for num_steps, max_stride in stretches)
