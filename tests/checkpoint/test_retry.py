"""What is tried again, when, and for how long: never beyond the deadline."""

import errno
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.checkpoint.retry import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Patience,
    backoff_seconds,
    is_transient,
    retry,
)

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class FakeTime:
    """A clock that only sleeping moves, unless told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def sleep(self, cancelled: threading.Event, seconds: float) -> None:
        with self.lock:
            self.pauses.append(seconds)
            self.now += seconds

    def pass_by(self, seconds: float) -> None:
        with self.lock:
            self.now += seconds


def patience(time: FakeTime, seconds: float, chance: Callable[[], float] = lambda: 0.0) -> Patience:
    return Patience(seconds, clock=time.clock, sleep=time.sleep, chance=chance)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((OSError(number, "x"), True) for number in (errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN)),
        *((OSError(number, "x"), True) for number in (errno.ECONNRESET, errno.ETIMEDOUT, errno.ENOTCONN)),
        (TimeoutError("x"), True),
        (ConnectionError("x"), True),
        *((OSError(number, "x"), False) for number in (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS)),
        *((OSError(number, "x"), False) for number in (errno.ENOENT, errno.EDQUOT, errno.ENAMETOOLONG, errno.EINVAL)),
        (OSError("x"), False),
        (ValueError("x"), False),
    ],
    ids=repr,
)
def test_what_may_pass(error: BaseException, expected: bool) -> None:
    assert is_transient(error) is expected


@law
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0.001, 10), st.floats(0.001, 100))
def test_a_pause_is_bounded_and_does_not_shrink(attempt: int, chance: float, first: float, longest: float) -> None:
    seconds = backoff_seconds(attempt, chance, first_seconds=first, longest_seconds=longest)
    assert min(first, longest) / 2 <= seconds <= longest
    assert seconds <= backoff_seconds(attempt + 1, chance, first_seconds=first, longest_seconds=longest)


def test_pauses_double() -> None:
    assert [backoff_seconds(attempt, 0.0) for attempt in range(7)] == [0.5, 1, 2, 4, 8, 16, 30]
    assert (FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS) == (0.5, 30.0)


@law
@given(
    deadline_seconds=st.floats(0.01, 1000),
    takes_seconds=st.lists(st.floats(0, 50), min_size=1, max_size=30),
    chances=st.lists(st.floats(0, 1), min_size=1),
)
def test_no_try_begins_after_the_deadline(
    deadline_seconds: float, takes_seconds: list[float], chances: list[float]
) -> None:
    time, begun = FakeTime(), []
    waiting = patience(time, deadline_seconds, lambda: chances[len(begun) % len(chances)])

    def fail() -> None:
        begun.append(time.now - 100.0)
        time.pass_by(takes_seconds[len(begun) % len(takes_seconds)])
        raise ConnectionError("again")

    with pytest.raises(ConnectionError):
        retry(fail, waiting)
    assert begun[0] == 0
    assert all(seconds < deadline_seconds for seconds in begun)
    assert deadline_seconds - (time.now - 100.0) <= FIRST_PAUSE_SECONDS + 1e-6  # nor is any time given away
    assert sum(time.pauses) < deadline_seconds
    assert waiting.num_retries == len(begun) - 1


def test_what_will_not_pass_is_raised_at_once() -> None:
    time = FakeTime()

    def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        retry(fail, patience(time, 100))
    assert time.pauses == []


def test_what_passes_is_not_seen() -> None:
    time = FakeTime()
    errors = [OSError(errno.EIO, "x"), TimeoutError("x"), ConnectionResetError("x")]

    def work() -> str:
        if errors:
            raise errors.pop()
        return "done"

    waiting = patience(time, 100)
    assert retry(work, waiting) == "done"
    assert time.pauses == [0.5, 1, 2]
    assert waiting.num_retries == 3


def test_cancelling_ends_a_pause_and_all_tries() -> None:
    waiting, tries = Patience(600.0, sleep=lambda event, _: event.wait(30)), []

    def fail() -> None:
        tries.append(1)
        threading.Timer(0.01, waiting.cancelled.set).start()
        raise ConnectionError("again")

    with pytest.raises(ConnectionError):
        retry(fail, waiting)
    assert len(tries) == 1
    assert waiting.elapsed_seconds < 10
    with pytest.raises(ConnectionError):
        retry(fail, waiting)
    assert len(tries) == 2


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_deadline_is_a_positive_number(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"deadline_seconds .*got {seconds}"):
        Patience(seconds)
