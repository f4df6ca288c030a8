"""What every rank looks after goes on whatever the store does: refuse, fail, or never answer."""

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_air.health.patient_store import PatientStore, RankStore
from lightning_air.health.rank_watch import RankWatch
from lightning_air.health.threads import done_within


class Sees:
    """Looks into the store, and keeps whether it had one."""

    def __init__(self) -> None:
        self.had_store: list[bool] = []
        self.goodbyes = 0

    def look(self, store: RankStore | None, closed: threading.Event) -> None:
        self.had_store.append(store is not None)
        if store is not None:
            store.check(["key"])

    def say_goodbye(self, store: RankStore) -> None:
        self.goodbyes += 1
        store.set("gone", "1")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Stuck(dist.HashStore):
    """Answers when it is let go."""

    def __init__(self, until: threading.Event) -> None:
        super().__init__()
        self.until = until

    def check(self, keys: list[str]) -> bool:
        self.until.wait()
        return super().check(keys)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "air-health-store"]


def test_a_patient_store_does_what_a_store_does() -> None:
    inner = dist.HashStore()
    store = PatientStore(lambda: inner)
    assert not store.check(["a"])
    store.set("a", "1")
    assert (store.check(["a"]), store.get("a"), inner.get("a")) == (True, b"1", b"1")
    assert (store.compare_set("b", "", "2"), store.compare_set("b", "", "3")) == (b"2", b"2")
    store.close()
    wait_until(lambda: not store_threads())


def test_what_a_store_raises_is_raised() -> None:
    def refuse() -> dist.Store:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        PatientStore(refuse)
    wait_until(lambda: not store_threads())


def test_a_store_that_never_answers_is_given_up_and_each_rank_looks_after_itself() -> None:
    until, clock, part = threading.Event(), Clock(), Sees()
    stores: list[dist.Store] = [Stuck(until), dist.HashStore()]
    watch = RankWatch([part], open_store=lambda: stores.pop(0), check_seconds=0.01, answer_seconds=0.1, clock=clock)
    closed = threading.Event()
    watch.look(closed)
    watch.look(closed)
    assert part.had_store == [True, False]
    clock.seconds = 5.0
    watch.look(closed)
    assert part.had_store == [True, False, True], "it is opened again after a while"
    until.set()
    watch._lose_store()
    wait_until(lambda: not store_threads())


def test_it_looks_until_it_is_closed_and_says_goodbye() -> None:
    inner, part, closed = dist.HashStore(), Sees(), threading.Event()
    watch = RankWatch([part], open_store=lambda: inner, check_seconds=0.01)
    thread = threading.Thread(target=watch.run, args=(closed,))
    thread.start()
    wait_until(lambda: len(part.had_store) > 2)
    closed.set()
    thread.join(20)
    assert part.goodbyes == 1
    assert inner.check(["gone"])
    wait_until(lambda: not store_threads())


def test_without_a_place_to_meet_it_looks_all_the_same() -> None:
    part = Sees()
    RankWatch([part], open_store=None, check_seconds=0.01).look(threading.Event())
    assert part.had_store == [False]
    assert store_threads() == []


def test_a_rank_that_does_not_meet_the_others_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> dist.Store:
        raise ConnectionRefusedError("nobody listens")

    clock = Clock()
    watch = RankWatch([Sees()], open_store=refuse, check_seconds=0.01, clock=clock)
    for _ in range(30):
        watch.look(threading.Event())
        clock.seconds += 1.0
    assert caplog.records == []
    for _ in range(30):
        clock.seconds += 1.0
        watch.look(threading.Event())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "This rank does not meet the others for GPU health"
    ]
    wait_until(lambda: not store_threads())


def test_files_that_never_end_are_left_behind() -> None:
    until = threading.Event()
    assert not done_within(0.05, until.wait)
    until.set()
    assert done_within(20, until.wait)
