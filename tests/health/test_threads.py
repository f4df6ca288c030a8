"""A background thread ends when told, is left behind when it cannot, and takes nothing with it when it fails."""

import threading
import time

import pytest

from lightning_air.health.threads import Background, close_all


def test_all_are_told_before_the_first_is_waited_for() -> None:
    threads = [
        Background(f"air-test-{number}", lambda closed: time.sleep(0.5 * closed.wait(10))) for number in range(5)
    ]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    assert close_all(threads, 10.0) == []
    assert time.monotonic() - begun < 2.0, "side by side, and not 0.5 s each"


def test_one_that_hangs_is_named_after_the_time_for_all_of_them() -> None:
    free = threading.Event()
    threads = [Background(f"air-test-{number}", lambda _: free.wait(10)) for number in range(3)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    assert close_all(threads, 1.0) == ["air-test-0", "air-test-1", "air-test-2"]
    assert time.monotonic() - begun < 2.5, "and not a second each"
    free.set()
    assert close_all(threads, 10.0) == []


def test_one_that_never_began_is_closed_at_once() -> None:
    assert close_all([Background("air-test", lambda _: None)], 1.0) == []


def test_what_it_raises_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail(closed: threading.Event) -> None:
        raise ValueError("a defect")

    thread = Background("air-test", fail)
    thread.start()
    assert close_all([thread], 2.0) == []
    assert "The thread air-test has failed" in caplog.text
    assert "a defect" in caplog.text
