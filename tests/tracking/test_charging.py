"""The run says how many points it may have before it has them, whatever the server does in between."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.budget import DEFAULT_CAP
from lightning_air.tracking.charging import MARK_TAG, Charge, mark_of
from lightning_air.tracking.door import open_door
from lightning_air.tracking.door_errors import Busy, DoorError
from tests.tracking.local_store import MLFLOW_WARNING, local_client


class Tags:
    """A door that keeps tags, and refuses when told."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.is_away = False

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = 30.0) -> None:
        if self.is_away:
            raise Busy("later")
        assert (run_id, key) == ("run", MARK_TAG)
        self.values.append(mark_of(value))

    def log_batch(self, *_: object, **__: object) -> None:
        raise AssertionError("nobody should")


@settings(max_examples=100, deadline=None)
@given(
    cap=st.integers(1, 10_000) | st.just(DEFAULT_CAP),
    spent=st.integers(0, 5_000),
    known=st.integers(0, 5_000),
    batches=st.lists(st.tuples(st.integers(0, 1_000), st.booleans()), max_size=20),
)
def test_the_mark_is_stored_before_it_is_passed(
    cap: int, spent: int, known: int, batches: list[tuple[int, bool]]
) -> None:
    """And it is raised by a thousandth of the cap at once, so seldom, and never above the cap for that."""
    door, total = Tags(), 0
    charge = Charge(door, "run", spent=spent, mark=known, cap=cap)
    for num_points, is_away in batches:
        door.is_away = is_away
        try:
            charge(total + num_points)
        except Busy:
            assert charge.mark < spent + total + num_points, "it need not have asked"
            continue
        total += num_points
        assert charge.mark == max([known, *door.values])
        assert charge.mark >= spent + total or not total
    assert door.values == sorted(set(door.values))
    assert all(value <= max(cap, spent + total) for value in door.values)
    assert len(door.values) <= 1 + max(0, spent + total - known) // max(1, cap // 1000)


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_the_tag_is_in_a_real_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    client = local_client(tmp_path_factory)
    run_id = client.create_run("0").info.run_id
    uri = client._tracking_client.tracking_uri
    assert mark_of(client.get_run(run_id).data.tags.get(MARK_TAG)) == 0

    Charge(open_door(uri), run_id, spent=0, mark=0, cap=10_000)(25)
    assert mark_of(client.get_run(run_id).data.tags.get(MARK_TAG)) == 35

    charge = Charge(open_door(uri), "unknown", spent=35, mark=35, cap=10_000)
    with pytest.raises(DoorError, match="unknown"):
        charge(1)
    assert charge.mark == 35


@pytest.mark.parametrize("tag", [None, "", "many", "-5", "1.5", json.dumps([1])])
def test_a_tag_that_is_no_count_counts_nothing(tag: str | None) -> None:
    assert mark_of(tag) == 0


def test_a_tag_is_read_as_it_was_written() -> None:
    assert mark_of("10000000") == 10_000_000
