"""All ranks hear of a stop at the same step, whoever asked and when, and exchange about once a second."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.strategy.stop import INTERVAL_SECONDS, MAX_BATCHES_BETWEEN, Stop, StopExchange
from tests.kit.points import reach
from tests.kit.ranks import run_ranks, values


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Requests = Sequence[tuple[int, int]]
"""Who asks (rank), and after how many steps."""


def stop_with_requests(requests: Requests, step_seconds: Iterable[float], max_steps: int = 400) -> tuple[int, Stop]:
    """Step until all have agreed; return at which call, and on what."""
    clock = FakeClock()
    exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=clock)
    for call, seconds in zip(range(max_steps), step_seconds, strict=False):
        for rank, after in requests:
            if after == call and rank == dist.get_rank():
                exchange.request(f"rank {rank} after {after}")
        stop = exchange.step()
        if stop is not None:
            return call, stop
        clock.now += seconds
    raise AssertionError(f"nobody stopped within {max_steps} steps for {requests}")


# ---- agreement -------------------------------------------------------------------------------------------------------

STEP_SECONDS = 0.1
LAST_MOMENT = 24  # two intervals and more of steps


def _stops(scenarios: list[Requests], step_seconds: float = STEP_SECONDS) -> list[tuple[int, Stop]]:
    return [stop_with_requests(requests, itertools.repeat(step_seconds)) for requests in scenarios]


def test_all_ranks_stop_at_the_same_call_whoever_asks_and_when() -> None:
    scenarios: list[Requests] = [[(rank, after)] for rank in range(3) for after in range(LAST_MOMENT)]
    first, *others = values(run_ranks(_stops, 3, args=(scenarios,), init_process_group="gloo"))
    assert others == [first, first]
    for [(rank, after)], (call, stop) in zip(scenarios, first, strict=True):
        assert stop == Stop(rank, f"rank {rank} after {after}")
        # The docstring's promise: an interval and two batches.
        assert after < call <= after + INTERVAL_SECONDS / STEP_SECONDS + 2


def test_slow_steps_stop_after_the_next_one() -> None:
    scenarios: list[Requests] = [[(rank, after)] for rank in range(2) for after in range(6)]
    for found in values(run_ranks(_stops, 2, args=(scenarios, 10.0), init_process_group="gloo")):
        assert [call for call, _ in found] == [after + 1 for [(_, after)] in scenarios]


def _stop_after_fast_batches() -> int:
    """Prefetched batches of 2 ms, then batches of a second; the request comes with the first of those."""
    seconds = itertools.chain(itertools.repeat(0.002, 40), itertools.repeat(1.0))
    return stop_with_requests([(0, 41)], seconds)[0]


def test_batches_that_slow_down_delay_a_stop_by_a_bounded_number_of_them() -> None:
    for call in values(run_ranks(_stop_after_fast_batches, 2, init_process_group="gloo")):
        assert 41 < call <= 41 + 18  # the docstring's promise


def _stops_after_slowing_down(scenarios: list[Requests], num_fast: int) -> list[tuple[int, Stop]]:
    fast, slow = itertools.repeat(0.001, num_fast), itertools.repeat(30.0)
    return [stop_with_requests(requests, itertools.chain(fast, slow)) for requests in scenarios]


def test_batches_that_become_slow_are_not_waited_for_by_the_thousand() -> None:
    # What was measured is the past: a thousand milliseconds would be a thousand half-minutes now.
    scenarios: list[Requests] = [[(1, after)] for after in range(90, 130)]
    for found in values(run_ranks(_stops_after_slowing_down, 2, args=(scenarios, 100), init_process_group="gloo")):
        for [(_, after)], (call, _) in zip(scenarios, found, strict=True):
            assert call - after <= MAX_BATCHES_BETWEEN + 2


def test_when_several_ask_the_highest_is_named_with_its_own_reason() -> None:
    scenarios: list[Requests] = [
        [(0, after), (1, after + gap), (2, after)] for after in range(0, LAST_MOMENT, 3) for gap in (0, 1, 5)
    ]
    first, *others = values(run_ranks(_stops, 3, args=(scenarios,), init_process_group="gloo"))
    assert others == [first, first]
    for [_, _, (rank, after)], (_, stop) in zip(scenarios, first, strict=True):
        assert stop == Stop(rank, f"rank {rank} after {after}")


def _asks_twice() -> Stop:
    exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=FakeClock())
    if dist.get_rank() == 1:
        exchange.request("the first")
        exchange.request("the second")
    return next(stop for stop in iter(exchange.step, 0) if isinstance(stop, Stop))


def test_the_first_reason_is_kept() -> None:
    assert values(run_ranks(_asks_twice, 2, init_process_group="gloo")) == [Stop(1, "the first")] * 2


def _asks_from_a_thread() -> tuple[int, Stop]:
    exchange = StopExchange(dist.group.WORLD, dist.get_rank(), interval_seconds=0.01)
    asker = threading.Timer(0.1, exchange.request, ["from a thread"])
    if dist.get_rank() == 0:
        asker.start()
    for call in itertools.count():
        stop = exchange.step()
        if stop is not None:
            asker.cancel()
            return call, stop
        time.sleep(0.002)
    raise AssertionError


def test_any_thread_may_ask() -> None:
    first, second = values(run_ranks(_asks_from_a_thread, 2, init_process_group="gloo"))
    assert first == second
    assert first[1] == Stop(0, "from a thread")


def _hears_sigterm() -> tuple[int, Stop]:
    exchange = StopExchange(dist.group.WORLD, dist.get_rank(), interval_seconds=0.02)
    signal.signal(signal.SIGTERM, lambda *_: exchange.request("SIGTERM"))
    for call in range(1000):
        reach(f"step:{call}")
        stop = exchange.step()
        if stop is not None:
            return call, stop
        time.sleep(0.001)
    raise AssertionError


@pytest.mark.parametrize("ranks", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_a_signal_on_any_rank_stops_all(ranks: list[int]) -> None:
    results = run_ranks(
        _hears_sigterm, 3, init_process_group="gloo", signals={(rank, "step:7"): signal.SIGTERM for rank in ranks}
    )
    first, *others = values(results)
    assert others == [first, first]
    call, stop = first
    assert stop == Stop(max(ranks), "SIGTERM")
    assert 7 < call < 200


# ---- how often -------------------------------------------------------------------------------------------------------


def _num_exchanges(schedules: list[tuple[float, int]]) -> list[int]:
    found = []
    for step_seconds, num_steps in schedules:
        clock = FakeClock()
        exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=clock)
        for _ in range(num_steps):
            assert exchange.step() is None
            clock.now += step_seconds
        exchange.drain()
        found.append(exchange.num_exchanges)
    return found


def test_exchanges_are_about_one_interval_apart_and_never_more_than_one_a_step() -> None:
    # (seconds of a step, steps), and how many exchanges may be made.
    schedules = [(0.001, 10_000), (0.01, 1_000), (0.3, 100), (0.9, 50), (1.0, 50), (10.0, 50), (0.0, 1_000)]
    first, second = values(run_ranks(_num_exchanges, 2, args=(schedules,), init_process_group="gloo"))
    assert first == second
    fast, medium, slow, slower, equal, slowest, timeless = first
    most_batches_between = 17  # 16 without an exchange, and the one that reads it
    assert 0 <= fast - 10_000 // most_batches_between <= 4
    assert 0 <= medium - 1_000 // most_batches_between <= 4
    assert 30 <= slow <= 35
    assert slower == equal == slowest == 50  # every step
    assert 0 <= timeless - 1_000 // most_batches_between <= 4


def _slowest_counts() -> list[int]:
    """One rank measures slower steps than the other: the slower one's time counts."""
    clock = FakeClock()
    exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=clock)
    found = []
    for _ in range(60):
        assert exchange.step() is None
        clock.now += 0.1 if dist.get_rank() == 1 else 0.001
        found.append(exchange.num_exchanges)
    exchange.drain()
    return found


def test_the_slowest_rank_sets_the_pace() -> None:
    first, second = values(run_ranks(_slowest_counts, 2, init_process_group="gloo"))
    assert first == second
    assert 6 <= first[-1] <= 8


MEASURED = st.lists(st.floats(0, 30), min_size=2, max_size=2)


def _schedules_of_many() -> list[list[int]]:
    """Let each rank measure times of its own, and note at which calls an exchange is begun."""
    found: list[list[int]] = []

    # The ranks draw the same examples: nothing here depends on the rank but what it takes from them.
    @settings(derandomize=True, max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(times=st.lists(MEASURED, min_size=1, max_size=40))
    def note(times: list[list[float]]) -> None:
        clock = FakeClock()
        exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=clock)
        begun: list[int] = []
        for call, of_ranks in enumerate(times):
            before = exchange.num_exchanges
            assert exchange.step() is None
            if exchange.num_exchanges > before:
                begun.append(call)
            clock.now += of_ranks[dist.get_rank()]
        exchange.drain()
        found.append(begun)

    note()
    return found


def test_whatever_they_measure_all_ranks_derive_the_same_schedule() -> None:
    first, second = values(run_ranks(_schedules_of_many, 2, init_process_group="gloo"))
    assert len(first) >= 60
    assert first == second
    assert any(len(begun) not in {0, len(begun[:1])} for begun in first)


# ---- alone, and the end ----------------------------------------------------------------------------------------------


def test_one_rank_alone_stops_at_its_next_step() -> None:
    exchange = StopExchange(None, 0)
    assert exchange.step() is None
    exchange.request("why")
    assert exchange.step() == Stop(0, "why")
    assert exchange.num_exchanges == 0
    exchange.drain()


def _drains(wait: bool) -> float:
    """Rank 1 comes half a second late to a reduction in which rank 0 waits, if it waits."""
    exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=FakeClock())
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    before = time.monotonic()
    exchange.step()
    seconds = time.monotonic() - before  # beginning an exchange waits for nobody
    if wait:
        exchange.drain()
        seconds = time.monotonic() - before
        exchange.drain()  # nothing is left
    dist.barrier()
    return seconds


@pytest.mark.parametrize(("wait", "is_late"), [(True, lambda s: s > 0.4), (False, lambda s: s < 0.3)])
def test_drain_waits_for_what_is_under_way_and_a_step_does_not(wait: bool, is_late: Callable[[float], bool]) -> None:
    rank_zero, _ = values(run_ranks(_drains, 2, args=(wait,), init_process_group="gloo"))
    assert is_late(rank_zero)


def _fits_one_after_another() -> tuple[int, Stop]:
    for num_steps in (1, 2, 3, 7):
        exchange = StopExchange(dist.group.WORLD, dist.get_rank(), clock=FakeClock())
        for _ in range(num_steps):
            exchange.step()
        if dist.get_rank() == 0:
            exchange.request("too late for this fit")
        exchange.drain()
    return stop_with_requests([(1, 5)], itertools.repeat(STEP_SECONDS))


def test_a_drained_exchange_leaves_nothing_for_the_next() -> None:
    first, second = values(run_ranks(_fits_one_after_another, 2, init_process_group="gloo"))
    assert first == second
    assert first[1] == Stop(1, "rank 1 after 5")
