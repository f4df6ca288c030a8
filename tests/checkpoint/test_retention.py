"""Whatever the listing: enough valid checkpoints stay, the newest always, and one in the making changes nothing."""

import math
import random
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint.retention import Candidate, orphans, to_delete

HOUR = 3600.0

names = st.sampled_from([f"step={number}" for number in range(12)])
times = st.one_of(st.none(), st.integers(0, 9).map(float))
scores = st.one_of(st.none(), st.integers(0, 5).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))
candidate = st.builds(
    Candidate, name=names, step=st.integers(0, 9), created_seconds=times, is_valid=st.booleans(), score=scores
)
listings = st.lists(candidate, unique_by=lambda candidate: candidate.name, max_size=12)
keeps = st.integers(1, 5)
modes: st.SearchStrategy[Literal["min", "max"]] = st.sampled_from(["min", "max"])
rules = st.fixed_dictionaries(
    {"keep_last": keeps, "protected": st.sets(names, max_size=4), "keep_best": st.integers(0, 4), "mode": modes}
)


def checkpoint(step: int, **changes: Any) -> Candidate:
    given: dict[str, Any] = {
        "name": f"step={step}",
        "step": step,
        "created_seconds": float(step),
        "is_valid": True,
        **changes,
    }
    return Candidate(**given)


def deleted(candidates: Sequence[Candidate], **rules: Any) -> list[str]:
    return to_delete(candidates, **{"keep_last": 2, "protected": set(), **rules})


def time_then_step(candidate: Candidate) -> tuple[float, int]:
    return -1.0 if candidate.created_seconds is None else candidate.created_seconds, candidate.step


def step_then_time(candidate: Candidate) -> tuple[int, float]:
    return time_then_step(candidate)[::-1]


# ---- laws of deletion ------------------------------------------------------------------------------------------------


@given(listings, rules)
def test_as_many_valid_ones_stay_as_were_asked_for(candidates: list[Candidate], rules: dict[str, Any]) -> None:
    valid = {candidate.name for candidate in candidates if candidate.is_valid}
    left = valid - set(to_delete(candidates, **rules))
    assert len(left) >= min(rules["keep_last"], len(valid))


@given(listings, rules)
def test_the_newest_valid_one_stays(candidates: list[Candidate], rules: dict[str, Any]) -> None:
    valid = [candidate for candidate in candidates if candidate.is_valid]
    left = [candidate for candidate in valid if candidate.name not in to_delete(candidates, **rules)]
    if valid:
        # By either measure, and where one ties by the other.
        assert max(map(step_then_time, left)) == max(map(step_then_time, valid))
        assert max(map(time_then_step, left)) == max(map(time_then_step, valid))


@given(listings, rules)
def test_protected_and_unpublished_ones_stay(candidates: list[Candidate], rules: dict[str, Any]) -> None:
    gone = to_delete(candidates, **rules)
    assert not set(gone) & rules["protected"]
    assert set(gone) <= {candidate.name for candidate in candidates if candidate.is_valid}
    assert len(gone) == len(set(gone))


@given(listings, rules)
def test_the_best_stay(candidates: list[Candidate], rules: dict[str, Any]) -> None:
    gone = set(to_delete(candidates, **rules))
    sign = 1 if rules["mode"] == "min" else -1
    scored = {
        c.name: sign * c.score for c in candidates if c.is_valid and c.score is not None and not math.isnan(c.score)
    }
    left = [score for name, score in scored.items() if name not in gone]
    best = sorted(scored.values())[: rules["keep_best"]]
    assert sorted(left)[: len(best)] == best


@given(listings, rules, st.data())
def test_one_that_is_not_published_changes_nothing(
    candidates: list[Candidate], rules: dict[str, Any], data: st.DataObject
) -> None:
    unpublished = replace(data.draw(candidate), name="new", is_valid=False)
    assert to_delete([*candidates, unpublished], **rules) == to_delete(candidates, **rules)


@given(listings, rules)
def test_the_order_of_the_listing_does_not_matter(candidates: list[Candidate], rules: dict[str, Any]) -> None:
    shuffled = random.Random(0).sample(candidates, len(candidates))
    assert to_delete(shuffled, **rules) == to_delete(candidates, **rules)


@given(listings, rules)
def test_deleting_once_is_enough(candidates: list[Candidate], rules: dict[str, Any]) -> None:
    gone = set(to_delete(candidates, **rules))
    assert to_delete([candidate for candidate in candidates if candidate.name not in gone], **rules) == []


@given(listings, rules, names)
def test_to_keep_more_never_deletes_more(candidates: list[Candidate], rules: dict[str, Any], name: str) -> None:
    gone = set(to_delete(candidates, **rules))
    for more in (
        {"keep_last": rules["keep_last"] + 1},
        {"keep_best": rules["keep_best"] + 1},
        {"protected": rules["protected"] | {name}},
    ):
        assert set(to_delete(candidates, **{**rules, **more})) <= gone


# ---- deletion by example ---------------------------------------------------------------------------------------------


def test_the_oldest_go_first() -> None:
    assert deleted([checkpoint(step) for step in (30, 10, 50, 20, 40)]) == ["step=10", "step=20", "step=30"]


def test_nothing_goes_while_the_replacement_is_on_its_way() -> None:
    old, new = checkpoint(10), checkpoint(20, is_valid=False)
    assert deleted([old, new], keep_last=1) == []
    assert deleted([old, replace(new, is_valid=True)], keep_last=1) == ["step=10"]


def test_six_saves_leave_one_and_never_none() -> None:
    listing: list[Candidate] = []
    for step in range(1, 7):
        listing.append(checkpoint(step, is_valid=False))
        assert deleted(listing, keep_last=1, protected={f"step={step}"}) == []
        listing[-1] = checkpoint(step)
        gone = deleted(listing, keep_last=1)
        listing = [candidate for candidate in listing if candidate.name not in gone]
        assert [candidate.step for candidate in listing] == [step]


def test_the_one_resumed_from_stays_and_takes_no_others_place() -> None:
    listing = [checkpoint(step) for step in (10, 20, 30, 40)]
    assert deleted(listing, protected={"step=10"}) == ["step=20"]
    assert deleted(listing, protected={"step=40"}) == ["step=10", "step=20"]
    assert deleted(listing, protected={"elsewhere"}) == ["step=10", "step=20"]


def test_after_going_back_both_the_farthest_and_the_latest_stay() -> None:
    before = [checkpoint(step) for step in (800, 900, 1000)]
    after = [checkpoint(step, created_seconds=2000.0 + step) for step in (600, 700, 850)]
    assert deleted([*before, *after]) == ["step=600", "step=800"]
    assert deleted([*before, *after, checkpoint(1100, created_seconds=4000.0)]) == [
        "step=600",
        "step=700",
        "step=800",
        "step=900",
    ]


def test_where_one_measure_ties_the_other_decides() -> None:
    same_step = [checkpoint(20, name=name, created_seconds=when) for name, when in [("a", 9.0), ("b", 8.0)]]
    assert deleted([*same_step, checkpoint(10, created_seconds=10.0)], keep_last=1) == ["b"]
    same_time = [checkpoint(step, name=name, created_seconds=9.0) for name, step in [("a", 20), ("b", 10)]]
    assert deleted([*same_time, checkpoint(30, created_seconds=8.0)], keep_last=1) == ["b"]


def test_without_dates_the_steps_decide() -> None:
    assert deleted([checkpoint(step, created_seconds=None) for step in (30, 10, 20)]) == ["step=10"]


@pytest.mark.parametrize(("mode", "kept"), [("min", "step=20"), ("max", "step=10")])
def test_the_best_stay_besides_the_newest(mode: str, kept: str) -> None:
    listing = [checkpoint(10, score=0.9), checkpoint(20, score=0.1), checkpoint(30, score=0.5), checkpoint(40)]
    assert deleted(listing, keep_last=1, keep_best=1, mode=mode) == [
        name for name in ("step=10", "step=20", "step=30") if name != kept
    ]


def test_of_equal_scores_the_newer_is_better_and_nan_is_none() -> None:
    listing = [checkpoint(10, score=1.0), checkpoint(20, score=1.0), checkpoint(30, score=math.nan), checkpoint(40)]
    for mode in ("min", "max"):
        assert deleted(listing, keep_last=1, keep_best=1, mode=mode) == ["step=10", "step=30"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"keep_last": -1}, "keep_last must be at least 1, got -1"),
        ({"keep_best": -1}, "keep_best must not be negative, got -1"),
        ({"mode": "best"}, "mode must be 'min' or 'max', got 'best'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deleted([], **rules)


# ---- orphans ---------------------------------------------------------------------------------------------------------


@given(listings, st.integers(0, 20).map(float), st.integers(0, 20).map(float), st.sets(names, max_size=4))
def test_only_old_unpublished_folders_that_nobody_writes_are_orphans(
    candidates: list[Candidate], now: float, min_age: float, in_flight: set[str]
) -> None:
    found = orphans(candidates, now=now, min_age_seconds=min_age, in_flight=in_flight)
    expected = {
        c.name
        for c in candidates
        if not c.is_valid
        and c.name not in in_flight
        and c.created_seconds is not None
        and c.created_seconds < now - min_age
    }
    assert set(found) == expected
    assert len(found) == len(expected)


def test_what_two_killed_runs_left_is_swept_the_oldest_first() -> None:
    listing = [
        checkpoint(10, created_seconds=50 * HOUR, is_valid=False),
        checkpoint(20, created_seconds=10 * HOUR, is_valid=False),
        checkpoint(30, created_seconds=1 * HOUR),  # published
        checkpoint(40, created_seconds=99 * HOUR, is_valid=False),  # perhaps another run's, alive
        checkpoint(50, created_seconds=101 * HOUR, is_valid=False),  # dated by a clock that is ahead
        checkpoint(60, created_seconds=None, is_valid=False),
        checkpoint(70, created_seconds=2 * HOUR, is_valid=False),  # ours
    ]
    rules: dict[str, Any] = {"now": 100 * HOUR, "min_age_seconds": 24 * HOUR, "in_flight": {"step=70"}}
    assert orphans(listing, **rules) == ["step=20", "step=10"]


@pytest.mark.parametrize("age", [-1.0, math.nan])
def test_an_age_that_is_none_is_refused(age: float) -> None:
    with pytest.raises(ValueError, match=f"min_age_seconds must not be negative, got {age!r}"):
        orphans([], now=0.0, min_age_seconds=age, in_flight=set())


# ---- both ------------------------------------------------------------------------------------------------------------


@given(listings, rules, st.integers(0, 20).map(float))
def test_nothing_is_both_deleted_and_swept(candidates: list[Candidate], rules: dict[str, Any], now: float) -> None:
    swept = orphans(candidates, now=now, min_age_seconds=0.0, in_flight=set())
    assert not set(swept) & set(to_delete(candidates, **rules))


def test_a_folder_that_is_listed_twice_is_refused() -> None:
    twice = [checkpoint(10), checkpoint(20), checkpoint(10, is_valid=False)]
    for function in (deleted, lambda listing: orphans(listing, now=0.0, min_age_seconds=0.0, in_flight=set())):
        with pytest.raises(ValueError, match="'step=10' is listed more than once"):
            function(twice)


def test_a_candidate_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        checkpoint(10).is_valid = False  # type: ignore[misc]
