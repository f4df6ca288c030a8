"""The hostile store is as bad as its test says, and no worse."""

import errno
from pathlib import Path

import pytest

from tests.kit.hostile import Behaviour, Fault, HostileStore


class Clock:
    """A time that only we move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def store_with(clock: Clock | None = None, **behaviour: object) -> HostileStore:
    times = {} if clock is None else {"clock": clock, "sleep": clock.sleep}
    return HostileStore(Path("store"), Behaviour(**behaviour), **times)


def test_a_fault_happens_to_the_nth_put_of_a_name_and_no_other() -> None:
    store = store_with(faults=[Fault(errno.EIO, names="*/b", nth=2, times=2), Fault("short", names="*/a")])
    store.put_bytes("x/a", b"data")
    assert store.read("x/a") == b"da"
    store.put_bytes("x/a", b"data")
    assert store.read("x/a") == b"data"
    store.put_bytes("x/b", b"data")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            store.put_bytes("x/b", b"data")
    store.put_bytes("x/b", b"data")
    assert store.read("x/b") == b"data"


def test_a_listing_lags_and_a_name_does_not() -> None:
    clock = Clock()
    store = store_with(clock, listing_lag_seconds=5)
    store.put_bytes("x/a", b"data")
    clock.now = Path("store/x/a").stat().st_mtime + 4
    assert store.list("x") == []
    assert store.num_bytes("x/a") == 4
    clock.now += 1
    assert [entry.name for entry in store.list("x")] == ["x/a"]


def test_a_failed_look_up_is_remembered_by_the_process_that_made_it() -> None:
    clock = Clock()
    store, another = (store_with(clock, negative_seconds=5) for _ in range(2))
    assert store.num_bytes("x/a") is None
    another.put_bytes("x/a", b"data")
    clock.now = 4.9
    assert store.num_bytes("x/a") is None
    assert another.num_bytes("x/a") == 4
    with pytest.raises(FileNotFoundError):
        store.read("x/a")
    store.delete("x/a")
    assert another.num_bytes("x/a") == 4
    clock.now = 5.0
    assert store.read("x/a") == b"data"


def test_a_slow_store_takes_its_time() -> None:
    clock = Clock()
    store_with(clock, bytes_per_second=1e6).put_bytes("a", bytes(1_500_000))
    assert clock.now == pytest.approx(1.5)


@pytest.mark.parametrize("is_visible_early", [True, False])
def test_points_are_reached_before_during_and_after(is_visible_early: bool) -> None:
    seen: list[tuple[str, int | None]] = []
    store = store_with(is_visible_early=is_visible_early)
    store._on_point = lambda point: seen.append((point, store.num_bytes("x/.metadata")))
    store.put_bytes("x/.metadata", b"data")
    store.delete_folder("x")
    half = 2 if is_visible_early else None
    assert seen == [
        ("put x/.metadata", None),
        ("put #1", None),
        ("putting x/.metadata", half),
        ("putting #1", half),
        ("put done x/.metadata", 4),
        ("put done #1", 4),
        ("delete x/.metadata", 4),
        ("delete #1", 4),
        ("deleted x/.metadata", None),
        ("deleted #1", None),
    ]
