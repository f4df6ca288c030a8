"""Octaves hold 640 of the law's windows each, and even strides are the smallest that fit."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking import octaves
from lightning_air.tracking.octaves import OCTAVE_POINTS, PLANNED_OCTAVES, doubled_stride, even_stride

positions = st.integers(0, 10**19)


@settings(deadline=None)
@given(positions)
def test_a_position_lies_in_its_octave(position: int) -> None:
    octave = octaves.octave_of(position)

    assert octaves.octave_start(octave) <= position < octaves.octave_stop(octave)
    assert octave <= octaves.octaves_passed(position) <= octave + 1


def test_octaves_follow_each_other_and_hold_640_windows_each() -> None:
    for octave in range(60):
        assert octaves.octave_start(octave + 1) == octaves.octave_stop(octave)
        num_steps = octaves.octave_stop(octave) - octaves.octave_start(octave)
        assert num_steps // max(1, 2 ** (octave - 1)) == OCTAVE_POINTS


def test_the_plan_reaches_a_billion_steps_with_an_octave_to_spare() -> None:
    assert octaves.octave_of(10**9) < PLANNED_OCTAVES - 1
    assert octaves.octave_start(PLANNED_OCTAVES - 1) == 1_342_177_280


def test_how_many_metrics_are_guaranteed() -> None:
    assert octaves.guaranteed_metrics(9_000_000) == 610
    assert octaves.guaranteed_metrics(4_500_000) == 305
    assert octaves.guaranteed_metrics(9_000_000, points_per_window=4) == 152
    assert octaves.guaranteed_metrics(-1) == 0


@settings(deadline=None)
@given(
    num_steps=st.integers(1, 10**12),
    weight=st.integers(1, 5_000),
    budget=st.integers(0, 10**7),
    base=st.integers(1, 1_000),
)
def test_a_doubled_stride_is_the_smallest_that_fits(num_steps: int, weight: int, budget: int, base: int) -> None:
    stride = doubled_stride(num_steps, weight=weight, budget=budget, base=base)

    doublings, rest = divmod(stride, base)
    assert rest == 0
    assert doublings.bit_count() == 1
    assert weight * num_steps <= budget * stride or stride >= num_steps
    if stride > base:
        assert weight * num_steps > budget * (stride // 2)
        assert stride // 2 < num_steps


@settings(deadline=None)
@given(
    position=st.integers(0, 10**6),
    num_steps=st.integers(1, 10**9),
    weight=st.integers(1, 2_000),
    budget=st.integers(1, 10**7),
    base=st.integers(1, 100),
)
def test_an_even_stride_is_the_smallest_that_fits(
    position: int, num_steps: int, weight: int, budget: int, base: int
) -> None:
    stop = position + num_steps

    strides = even_stride(position, stop, weight=weight, budget=budget, base=base)

    def points(stride: int, coarsening: int) -> int:
        """What the rest of the run takes, octave by octave."""
        total, start = 0, position
        while start < stop:
            octave = octaves.octave_of(start)
            end = min(stop, octaves.octave_stop(octave))
            law = coarsening * max(1, 2**octave // 2)
            law_multiple = base * 2 ** max(0, (law // base).bit_length() - 1)
            total += weight * -(-(end - start) // min(stride, law_multiple))
            start = end
        return total

    coarsening = 1
    while min(coarsening, 2) * points(stop * base, coarsening) > budget and coarsening < 2**64:
        coarsening *= 2
    if strides is None:
        assert coarsening == 2**64
        return
    even, widest = strides
    assert even % base == widest % base == 0
    assert points(even, coarsening) <= budget
    assert even == base or points(even - base, coarsening) > budget


def test_few_metrics_and_a_known_end_give_an_even_stride_but_for_the_beginning() -> None:
    strides = even_stride(0, 10**6, weight=20, budget=9_000_000, base=1)

    assert strides == (3, 1)  # 20 million values, 9 million points; every step while the run is short
