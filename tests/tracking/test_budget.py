"""Shares add up to the cap, warnings come once each, and the mark is never less than what was charged."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.budget import DEFAULT_CAP, Budget, compact, lease, round_step

points = st.integers(0, 20_000)


def test_a_tenth_is_kept_for_exempt_metrics() -> None:
    budget = Budget()

    assert (budget.cap, budget.ours, budget.reserve) == (10_000_000, 10_000_000, 1_000_000)
    assert (budget.for_steps, budget.for_exempt(0)) == (9_000_000, 1_000_000)


def test_what_the_run_has_already_is_taken_from_the_others_share_first() -> None:
    budget = Budget(1_000, reserve=100, spent=300)

    assert (budget.for_steps, budget.for_exempt(0)) == (600, 100)


def test_the_platform_leaves_us_half_of_the_cap_at_least() -> None:
    budget = Budget(1_000, system=200)
    assert (budget.ours, budget.reserve, budget.for_steps) == (800, 80, 720)

    budget = Budget(1_000, system=700)
    assert (budget.ours, budget.reserve, budget.for_steps) == (500, 50, 450)


@settings(deadline=None)
@given(cap=st.integers(1, 10_000), reserve=st.none() | points, system=points, spent=points)
def test_the_shares_never_exceed_the_cap(cap: int, reserve: int | None, system: int, spent: int) -> None:
    if reserve is not None and reserve >= cap:
        reserve = None
    budget = Budget(cap, reserve=reserve, system=system, spent=spent)

    assert budget.for_steps >= 0
    assert budget.for_exempt(0) >= 0
    assert budget.for_steps + budget.for_exempt(budget.for_steps) + min(spent, cap) <= cap


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap": 0}, "max_metric_steps must be a whole number, at least 1, got 0"),
        ({"cap": 1e7}, "max_metric_steps must be a whole number, at least 1, got 10000000.0"),
        ({"cap": 10, "reserve": 10}, "reserve must be less than max_metric_steps, 10, got 10. .*leave it out"),
        ({"cap": 10, "reserve": -1}, "reserve must be a whole number, at least 0, got -1"),
        ({"cap": 10, "spent": True}, "spent must be a whole number, at least 0, got True"),
        ({"cap": 10, "system": 0.5}, "system must be a whole number, at least 0, got 0.5"),
    ],
)
def test_a_bad_option_is_named_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**options)


def test_each_threshold_is_warned_of_once_with_the_plan() -> None:
    budget = Budget(1_000)

    assert budget.warnings_due(499, "PLAN") == []
    assert budget.warnings_due(500, "PLAN") == ["50% of the run's metric-step budget is used: PLAN."]
    assert budget.warnings_due(799, "PLAN") == []
    budget = Budget.from_snapshot(json.loads(json.dumps(budget.snapshot())))
    assert budget.warnings_due(799, "PLAN") == []
    assert budget.warnings_due(960, "PLAN") == ["95% of the run's metric-step budget is used: PLAN."]
    assert budget.warnings_due(1_000, "PLAN") == []


def test_thresholds_are_of_what_the_platform_leaves() -> None:
    assert Budget(1_000, system=500).warnings_due(250, "PLAN") == ["50% of the run's metric-step budget is used: PLAN."]


def test_what_is_used_is_said_shortly() -> None:
    assert Budget().describe(1_234_567) == "1.23M of 10M metric steps used"
    assert (
        Budget(system=14_515_200).describe(0) == "0 of 10M metric steps used, 5M left to the platform's system metrics"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1k"),
        (1_009, "1k"),
        (9_999, "9.99k"),
        (12_345, "12.3k"),
        (999_999, "999k"),
        (1_200_000, "1.2M"),
        (10_000_000, "10M"),
        (2_500_000_000, "2.5G"),
    ],
)
def test_counts_are_never_rounded_up(number: int, text: str) -> None:
    assert compact(number) == text


@pytest.mark.parametrize(
    ("step", "text"), [(0, "0"), (999_999, "999999"), (1_000_000, "1e6"), (1_999_999, "1.9e6"), (10**12, "1e12")]
)
def test_steps_are_never_rounded_up(step: int, text: str) -> None:
    assert round_step(step) == text


# ---- charging ahead --------------------------------------------------------------------------------------------------


def test_a_lease_is_a_thousandth_of_the_cap_and_shrinks_with_what_is_left() -> None:
    assert lease(DEFAULT_CAP, DEFAULT_CAP) == 10_000
    assert lease(DEFAULT_CAP, 1_000_000) == 10_000
    assert lease(DEFAULT_CAP, 5_000) == 50
    assert lease(DEFAULT_CAP, 99) == lease(DEFAULT_CAP, -1_000) == lease(100, 100) == 0


@given(cap=st.integers(1, 10**8), num_killed=st.integers(0, 2_000))
def test_leases_that_are_lost_leave_most_of_what_is_left(cap: int, num_killed: int) -> None:
    left = cap
    for _ in range(num_killed):
        left -= lease(cap, left)

    assert left >= cap * 0.99**num_killed
    assert left >= min(cap, 99)
