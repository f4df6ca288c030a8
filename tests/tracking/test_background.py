"""Calls are made in their order, again if that may help, and never at training's expense."""

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    REQUEST_LIMIT_EXCEEDED,
    TEMPORARILY_UNAVAILABLE,
)
from mlflow.store.artifact import http_artifact_repo

from lightning_air.tracking.background import TRIES_IN_A_ROW, Background
from lightning_air.tracking.door_errors import Busy, Refused, Unreachable
from lightning_air.tracking.upload_errors import trouble_of
from tests.kit.faulty_proxy import Fault, faulty_proxy

law = settings(derandomize=True, deadline=None, database=None, max_examples=60)
SECONDS = 10.0


class FakeTime:
    """A clock that goes on only while somebody waits; what was waited for is kept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


class Said:
    """A `Warn` that keeps what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __call__(self, kind: str, message: str) -> None:
        self.messages.append(message)


@contextmanager
def running(**options: Any) -> Iterator[Background]:
    background = Background("test-uploads", **({"warn": Said()} | options))
    try:
        yield background
    finally:
        background.close(SECONDS)


@contextmanager
def held(background: Background) -> Iterator[None]:
    """Keep the thread busy with a call until the block is over, so that others wait."""
    begun, release = threading.Event(), threading.Event()

    def gate() -> None:
        begun.set()
        release.wait(SECONDS)

    background.submit("gate", gate)
    assert begun.wait(SECONDS)
    try:
        yield
    finally:
        release.set()


def failing(times: int, error: Exception, then: Callable[[], object] = lambda: None) -> Callable[[], object]:
    left = [times]

    def call() -> None:
        if left[0]:
            left[0] -= 1
            raise error
        then()

    return call


keys = st.sampled_from([None, None, "a", "b", "c"])


@law
@given(st.lists(st.tuples(keys, st.integers(0, 3)), max_size=20))
def test_order_and_replacement(submitted: list[tuple[str | None, int]]) -> None:
    """Each call succeeds once, in its order; of those that wait with one key the last, in the first's place."""
    expected: dict[object, int] = {}
    for index, (key, _) in enumerate(submitted):
        expected[index if key is None else key] = index
    made: list[int] = []
    clock = FakeTime()
    with running(clock=clock, wait=clock.wait) as background:
        with held(background):
            for index, (key, failures) in enumerate(submitted):
                then = partial(made.append, index)
                background.submit(str(index), failing(failures, ConnectionError(), then), replaces=key)
        assert background.flush(SECONDS)
        assert made == list(expected.values())
        assert background.num_dropped == 0


@law
@given(st.lists(keys, max_size=15), st.integers(1, 6))
def test_bound(submitted: list[str | None], bound: int) -> None:
    """No more wait than may; those that can be replaced go first, and else the oldest."""
    waiting: dict[object, int] = {}
    for index, key in enumerate(submitted):
        waiting[index if key is None else key] = index
        if len(waiting) > bound:
            del waiting[next((each for each in waiting if isinstance(each, str)), next(iter(waiting)))]
    made: list[int] = []
    with running(max_waiting=bound) as background:
        with held(background):
            for index, key in enumerate(submitted):
                background.submit(str(index), partial(made.append, index), replaces=key)
        assert background.flush(SECONDS)
    assert made == list(waiting.values())


def test_a_later_one_replaces_one_that_has_just_failed() -> None:
    """Given an upload that fails; when a newer one of the file comes; then the old content is not sent any more."""
    made = []
    clock = FakeTime()
    with running(clock=clock, wait=clock.wait) as background:

        def old() -> None:
            background.submit("new", lambda: made.append("new"), replaces="file")
            made.append("old")
            raise ConnectionError

        background.submit("old", old, replaces="file")
        background.submit("other", lambda: made.append("other"))
        assert background.flush(SECONDS)
    assert made == ["old", "new", "other"]


def test_refused_is_dropped_and_said_once() -> None:
    said: list[str] = []
    made = []
    from lightning_air.tracking.warn_once import WarnOnce

    with running(warn=WarnOnce(said.append)) as background:
        for index in range(3):
            background.submit(f"file {index}", failing(1, MlflowException("no", PERMISSION_DENIED)))
        background.submit("last", lambda: made.append("last"))
        assert background.flush(SECONDS)
        assert background.num_dropped == 3
    assert made == ["last"]
    assert said == ["MLflow has not got file 0: MlflowException: no."]


def test_pauses_grow_and_retry_after_is_kept() -> None:
    clock = FakeTime()
    with running(clock=clock, wait=clock.wait) as background:
        background.submit("busy", failing(1, Busy("429", retry_after_seconds=7.0)))
        assert background.flush(SECONDS)
        assert sum(clock.waited) == pytest.approx(7.0)
        clock.waited.clear()
        background.submit("away", failing(8, Unreachable("away")))
        background.close(1000.0)
        assert background.num_done == 2
        assert 30 < sum(clock.waited) < 95


@pytest.mark.parametrize("asked_seconds", [0.0, None])
def test_a_server_that_asks_for_no_pause_gets_one_all_the_same(asked_seconds: float | None) -> None:
    """As one does whose clock is behind, and that names a date."""
    clock = FakeTime()
    with running(clock=clock, wait=clock.wait) as background:
        background.submit("busy", failing(5, Busy("429", retry_after_seconds=asked_seconds)))
        assert background.flush(SECONDS)
    assert sum(clock.waited) > 0.25 * (2**5 - 1)


def test_outage_is_said_when_it_lasts() -> None:
    said = Said()
    clock = FakeTime()
    with running(clock=clock, wait=clock.wait, warn=said) as background:
        background.submit("config.yaml", failing(9, Unreachable("no route")))
        assert background.flush(SECONDS)
    assert said.messages
    assert "MLflow has not taken config.yaml for " in said.messages[0]
    assert "no route" in said.messages[0]


def test_a_call_that_always_fails_does_not_stop_the_others() -> None:
    said = Said()
    made: list[object] = []
    tries = []
    clock = FakeTime()

    def poison() -> None:
        tries.append(1)
        raise MlflowException("inside", TEMPORARILY_UNAVAILABLE)

    with running(clock=clock, wait=clock.wait, warn=said) as background:
        with held(background):
            background.submit("poison", poison)
            for index in range(3):
                background.submit(str(index), partial(made.append, index))
        while background.num_dropped == 0:  # alone it would be tried for ever
            background.submit("more", lambda: made.append("more"))
            background.submit("more", lambda: made.append("more"))
            time.sleep(0.001)
    assert made[:3] == [0, 1, 2]
    assert len(tries) >= TRIES_IN_A_ROW
    assert any("again and again, while others succeed" in message for message in said.messages)


def test_close_keeps_its_deadline_and_names_what_is_left() -> None:
    said = Said()
    background = Background("test-uploads", warn=said)
    made = []
    with held(background):
        background.submit("a.yaml", lambda: made.append("a"))
        background.submit("b.yaml", lambda: made.append("b"))
        begun = time.monotonic()
        assert not background.close(0.2)
        assert 0.15 < time.monotonic() - begun < 2
        background.submit("c.yaml", lambda: made.append("c"))
    assert said.messages[0] == "Not known to have reached MLflow within 0.2 s: gate, a.yaml, b.yaml."
    assert "MLflow has not got c.yaml" in said.messages[1]
    thread = background._thread
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert made == []
    assert not background.close(SECONDS)
    assert len(said.messages) == 2


def test_close_tries_until_the_deadline_and_not_longer() -> None:
    clock = FakeTime()
    said = Said()
    background = Background("test-uploads", warn=said, clock=clock, wait=clock.wait)
    with held(background):
        background.submit("x", failing(1000, Unreachable("away")))
    assert background._patience.seconds_left > 0
    assert not background.close(60.0)
    assert "60 s: x." in said.messages[-1]


def test_nothing_submitted_starts_no_thread() -> None:
    background = Background("test-uploads")
    assert background.flush(0.1)
    assert background.close(0.1)
    assert background.close(0.1)
    assert background._thread is None


def test_flush_does_not_wait_for_ever() -> None:
    with running() as background, held(background):
        assert not background.flush(0.05)


def test_submit_from_many_threads() -> None:
    made = []
    with running() as background:

        def submit(thread: int) -> None:
            for index in range(50):
                background.submit(f"{thread} {index}", partial(made.append, (thread, index)))

        threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert background.flush(SECONDS)
    assert sorted(set(made)) == sorted(made)
    assert len(made) == 200
    for number in range(4):
        assert [index for thread, index in made if thread == number] == list(range(50))


def test_works_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a process that ends, where no thread starts (Python 3.12); then `close` makes the calls itself."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    clock = FakeTime()
    background = Background("test-uploads", clock=clock, wait=clock.wait, warn=Said())
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        background.submit("a", failing(2, ConnectionError(), lambda: made.append(threading.current_thread().name)))
        background.submit("b", lambda: made.append("b"))
        assert background.flush(SECONDS)
        background.submit("c", failing(10**6, ConnectionError()))
        assert not background.close(20.0)
    assert made == [threading.current_thread().name, "b"]
    assert clock.now < 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_a_call_has_ended_is_started_again() -> None:
    made = []
    with running() as background:
        background.submit("exits", failing(1, SystemExit()))
        thread = background._thread
        assert thread is not None
        thread.join(SECONDS)
        background.submit("next", lambda: made.append("next"))
        assert background.flush(SECONDS)
    assert made == ["next"]


def test_at_exit(tmp_path: Path) -> None:
    """Given a script that submits and ends; when it closes in `atexit`; then all has been done."""
    script = textwrap.dedent(
        """
        import atexit, sys, time, types
        from pathlib import Path
        # To import MLflow, and what the packages import, takes long.
        sys.modules["mlflow"] = types.ModuleType("mlflow")
        sys.modules["mlflow.exceptions"] = types.SimpleNamespace(MlflowException=KeyError)
        for name in ("lightning_air", "lightning_air.tracking"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [name.replace(".", "/")]
        from lightning_air.tracking.background import Background
        background = Background("uploads")
        out = Path(sys.argv[1])
        def late():
            background.submit("late", (out / "late").touch)
            assert background.close(10.0)
        atexit.register(late)
        background.submit("early", lambda: (time.sleep(0.2), (out / "early").touch()))
        """
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["early", "late"]


def test_fork_leaves_what_waits_to_the_parent(tmp_path: Path) -> None:
    made = []
    unused = Background("test-unused")
    with running() as background:
        with held(background):
            background.submit("x", lambda: made.append("x"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    background.submit("y", (tmp_path / "y").touch)
                    is_quiet = background.flush(1.0) and background.close(1.0) and background._warn.messages == []
                    unused.submit("z", (tmp_path / "z").touch)
                    status = 0 if is_quiet and unused.close(5.0) else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert background.flush(SECONDS)
    assert made == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["z"]


def test_submit_is_cheap() -> None:
    with running() as background, held(background):
        background.submit("x", lambda: None, replaces="x")
        begun = time.perf_counter()
        for _ in range(1000):
            background.submit("x", lambda: None, replaces="x")
        assert (time.perf_counter() - begun) / 1000 < 200e-6


def answer(status: int, headers: dict[str, str] | None = None) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers or {})
    return requests.HTTPError(f"{status} Error", response=response)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause  # what `raise` sets while another exception is handled
    return error


class TooManyRequests(OSError):  # noqa: N818 - as the Databricks SDK calls it
    pass


class ClientError(Exception):
    response = {"ResponseMetadata": {"HTTPStatusCode": 503}}  # noqa: RUF012 - as botocore has it


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Busy("later"), Busy),
        (answer(429), Busy),
        (answer(503), Busy),
        (answer(403), Refused),
        (answer(413), Refused),
        (requests.ConnectTimeout(), Unreachable),
        (requests.exceptions.MissingSchema(), Refused),
        (requests.exceptions.RetryError(), Busy),
        (urllib3.exceptions.ProtocolError(), Unreachable),
        (urllib3.exceptions.LocationParseError("x"), Refused),
        (MlflowException("x", TEMPORARILY_UNAVAILABLE), Busy),
        (MlflowException("x", REQUEST_LIMIT_EXCEEDED), Busy),
        (MlflowException("x", INVALID_PARAMETER_VALUE), Refused),
        (caused(MlflowException("API request failed"), requests.ConnectionError()), Unreachable),
        (caused(RuntimeError("upload failed"), ClientError()), Busy),
        (TooManyRequests(), Busy),
        (TimeoutError(), Unreachable),
        (ConnectionResetError(), Unreachable),
        (OSError(5, "Input/output error"), Unreachable),
        (FileNotFoundError(2, "gone"), Refused),
        (PermissionError(13, "no"), Refused),
        (ValueError("x"), Refused),
    ],
)
def test_what_errors_mean(error: Exception, kind: type) -> None:
    assert type(trouble_of(error)) is kind


def test_retry_after_is_found() -> None:
    trouble = trouble_of(answer(429, {"Retry-After": "12"}))
    assert isinstance(trouble, Busy)
    assert trouble.retry_after_seconds == 12


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(status=503), Busy),
        (Fault(status=429), Busy),
        (Fault(status=403), Refused),
        (Fault(cuts=True), Unreachable),
    ],
)
def test_what_mlflows_own_errors_mean(
    fault: Fault, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "x.txt").write_text("x")
    with faulty_proxy("http://127.0.0.1:1", fault) as proxy:
        mlflow: Any = http_artifact_repo  # it has no types
        repository = mlflow.HttpArtifactRepository(f"{proxy.url}/api/2.0/mlflow-artifacts/artifacts/x")
        with pytest.raises(Exception) as caught:  # noqa: PT011 - what it is, is the question
            repository.log_artifact(str(tmp_path / "x.txt"))
    assert type(trouble_of(caught.value)) is kind
