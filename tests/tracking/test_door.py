"""One request, one answer: what a real server and a bad one mean, and how long anything may take."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from lightning_air.tracking.door import Door, open_door
from lightning_air.tracking.door_errors import (
    Busy,
    DoorError,
    Refused,
    TooLate,
    Unreachable,
    judge,
    one_line,
    retry_after_seconds,
)
from lightning_air.tracking.points import Point
from lightning_air.tracking.rest_door import batch_json, point_bytes
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.tracking.local_store import MLFLOW_WARNING, local_client

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
POINTS = [Point(f"train/loss {index}", index / 7, 1_700_000_000_000 + index, index) for index in range(20)]


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


def raised(call: Callable[[], object]) -> Any:
    with pytest.raises(DoorError) as info:
        call()
    return info.value


# ---- a real server --------------------------------------------------------------------------------------------------


def test_points_are_stored_once_with_their_own_times(server: MlflowServer) -> None:
    run_id, door = server.create_run(), open_door(server.url)
    for _ in range(2):
        door.log_batch(run_id, POINTS)
    assert server.points_of(run_id) == sorted(POINTS)
    history = MlflowClient(server.url).get_metric_history(run_id, "train/loss 3")
    assert [(m.key, m.value, m.timestamp, m.step) for m in history] == [POINTS[3]]
    door.set_tag(run_id, "lightning_air.used", "20")
    assert server.tags_of(run_id)["lightning_air.used"] == "20"


def test_awkward_numbers_arrive(server: MlflowServer) -> None:
    run_id = server.create_run()
    values = [0.0, -0.0, 1e-320, 1.7976931348623157e308, 0.1 + 0.2, float("inf"), float("-inf"), float("nan")]
    points = [Point("value", value, 10**12, -(2**40) + index) for index, value in enumerate(values)]
    open_door(server.url).log_batch(run_id, points)
    stored = [point.value for point in sorted(server.points_of(run_id), key=lambda point: point.step)]
    assert stored == [*values[:5], 1.7976931348623157e308, -1.7976931348623157e308, 0.0]  # as MLflow keeps them


def test_a_bad_name_is_refused_for_its_own_sake_and_nothing_is_stored(server: MlflowServer) -> None:
    run_id, door = server.create_run(), open_door(server.url)
    for key in ("bad\nname", "../up", "", "x" * 251):
        error = raised(partial(door.log_batch, run_id, [*POINTS, Point(key, 1.0, 1, 1)]))
        assert isinstance(error, Refused), key
        assert error.blames_content
        assert "HTTP 400 INVALID_PARAMETER_VALUE" in str(error)
    assert server.points_of(run_id) == []


def test_a_missing_run_is_not_the_points_fault(server: MlflowServer) -> None:
    error = raised(lambda: open_door(server.url).log_batch("0" * 32, POINTS))
    assert isinstance(error, Refused)
    assert not error.blames_content
    assert "RESOURCE_DOES_NOT_EXIST" in str(error)


def test_a_deleted_run_refuses_an_empty_batch_too_and_an_open_one_takes_it(server: MlflowServer) -> None:
    # MLflow answers as to a bad point (INVALID_PARAMETER_VALUE); this tells them apart.
    run_id, door = server.create_run(), open_door(server.url)
    door.log_batch(run_id, [])
    server.delete_run(run_id)
    error = raised(lambda: door.log_batch(run_id, []))
    assert isinstance(error, Refused)
    assert "active" in str(error)


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_a_database_is_written_directly(tmp_path_factory: pytest.TempPathFactory) -> None:
    client = local_client(tmp_path_factory)
    run_id = client.create_run("0").info.run_id
    door = open_door(client.tracking_uri)
    for _ in range(2):
        door.log_batch(run_id, POINTS)
    history = client.get_metric_history(run_id, "train/loss 3")
    assert [(m.key, m.value, m.timestamp, m.step) for m in history] == [POINTS[3]]
    door.set_tag(run_id, "a", "b")
    assert client.get_run(run_id).data.tags["a"] == "b"
    error = raised(lambda: door.log_batch(run_id, [Point("bad\nname", 1.0, 1, 1)]))
    assert isinstance(error, Refused)
    assert error.blames_content
    error = raised(lambda: door.log_batch("0" * 32, POINTS))
    assert isinstance(error, Refused)
    assert not error.blames_content


# ---- a bad one -----------------------------------------------------------------------------------------------------


def test_a_busy_server_says_for_how_long_and_is_asked_once(server: MlflowServer, proxy: FaultyProxy) -> None:
    run_id, door = server.create_run(), open_door(proxy.url)
    proxy.set(Fault(status=429, headers={"Retry-After": "7"}), Fault())
    begun = time.monotonic()
    error = raised(lambda: door.log_batch(run_id, POINTS))
    assert time.monotonic() - begun < 5
    assert isinstance(error, Busy)
    assert error.retry_after_seconds == 7
    assert proxy.count() == 1


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 425])
def test_a_failing_server_is_asked_once(status: int, server: MlflowServer, proxy: FaultyProxy) -> None:
    door = open_door(proxy.url)
    proxy.set(Fault(status=status, body=b"<html>bad gateway</html>"))
    error = raised(lambda: door.log_batch("run", POINTS))
    assert isinstance(error, Busy)
    assert error.retry_after_seconds is None
    assert f"HTTP {status}" in str(error)
    assert proxy.count() == 1


@pytest.mark.parametrize("status", [401, 403, 404, 409, 418])
def test_a_refusal_that_does_not_look_at_the_points(status: int, proxy: FaultyProxy) -> None:
    proxy.set(Fault(status=status, body=b'{"error_code": "PERMISSION_DENIED", "message": "no"}'))
    error = raised(lambda: open_door(proxy.url).log_batch("run", POINTS))
    assert isinstance(error, Refused)
    assert not error.blames_content


def test_nobody_there(proxy: FaultyProxy) -> None:
    door = open_door(proxy.url)
    proxy.refuse()
    begun = time.monotonic()
    assert type(raised(lambda: door.log_batch("run", POINTS))) is Unreachable
    assert time.monotonic() - begun < 5


def test_an_answer_that_does_not_come_in_time(server: MlflowServer, proxy: FaultyProxy) -> None:
    door = open_door(proxy.url)
    for fault in (Fault(seconds=20.0), Fault(drip_seconds=0.25)):
        proxy.set(fault)
        begun = time.monotonic()
        error = raised(lambda: door.log_batch("0" * 32, POINTS, timeout_seconds=0.5))
        assert isinstance(error, TooLate)
        assert time.monotonic() - begun < 5


def test_headers_that_drip_and_are_cut_off_are_no_acknowledgement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                for byte in b"HTTP/1.1 200 OK\r\nX-Filler: aaa":
                    connection.sendall(bytes([byte]))
                    time.sleep(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        door = open_door(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert isinstance(raised(lambda: door.log_batch("run", POINTS, timeout_seconds=2.0)), Unreachable)
        thread.join()


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_a_folder_of_files_is_said_to_keep_points_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    run_id, door = MlflowClient(uri).create_run("0").info.run_id, open_door(uri)
    for _ in range(2):
        door.log_batch(run_id, POINTS)
    assert len(MlflowClient(uri).get_metric_history(run_id, POINTS[0].key)) == 2  # MLflow's doing
    assert caplog.text.count("keeps points twice") == 1
    assert "sqlite:///mlflow.db" in caplog.text


def test_a_connection_that_is_cut_after_storing_leaves_it_open(server: MlflowServer, proxy: FaultyProxy) -> None:
    run_id, door = server.create_run(), open_door(proxy.url)
    proxy.set(Fault(cuts=True, times=1))
    assert isinstance(raised(lambda: door.log_batch(run_id, POINTS)), Unreachable)
    assert server.points_of(run_id) == sorted(POINTS)
    door.log_batch(run_id, POINTS)
    assert server.points_of(run_id) == sorted(POINTS)


def test_a_log_in_page_is_no_acknowledgement(proxy: FaultyProxy) -> None:
    proxy.set(Fault(status=200, headers={"Content-Type": "text/html"}, body=b"<html>Please log in"))
    error = raised(lambda: open_door(proxy.url).log_batch("run", POINTS))
    assert isinstance(error, Unreachable)
    assert "Please log in" in str(error)


def test_the_users_settings_for_mlflow_are_left_alone(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "9")
    before = dict(os.environ)
    proxy.set(Fault(status=503))
    raised(lambda: open_door(proxy.url).log_batch("run", POINTS))
    assert dict(os.environ) == before
    assert proxy.count() == 1


def test_a_server_gets_the_credentials_that_mlflow_would_send(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.set(Fault(status=401, times=1), Fault(status=200, body=b"{}"))
    door = open_door(proxy.url)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "old")
    assert isinstance(raised(lambda: door.log_batch("run", POINTS)), Refused)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "new")
    door.log_batch("run", POINTS)
    assert [seen.headers["Authorization"] for seen in proxy.seen] == ["Bearer old", "Bearer new"]


def test_databricks_too_and_its_wish_to_be_left_alone_is_not_slept_through(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("DATABRICKS_HOST", proxy.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-of-the-tests")
    proxy.set(
        Fault("log-batch", status=429, headers={"Retry-After": "30"}, times=1),
        Fault("log-batch", status=200, body=b"{}"),
        Fault(status=404),
    )
    door = open_door("databricks")
    begun = time.monotonic()
    error = raised(lambda: door.log_batch("run", POINTS))
    assert time.monotonic() - begun < 20  # the SDK alone takes some seconds to be imported
    assert isinstance(error, Busy)
    assert error.retry_after_seconds == 30
    door.log_batch("run", POINTS)
    batches = [seen for seen in proxy.seen if "log-batch" in seen.request]
    assert [seen.headers["Authorization"] for seen in batches] == ["Bearer dapi-of-the-tests"] * 2


@pytest.mark.parametrize("uri", ["nosuch://x", "databricks-uc", "http://"])
def test_a_uri_that_leads_nowhere_is_like_an_outage(uri: str) -> None:
    assert isinstance(raised(lambda: open_door(uri).log_batch("run", POINTS)), Unreachable)


# ---- what answers mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected"),
    [(None, None), ("", None), ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("soon", None), ("inf", None), ("nan", None)],
)
def test_retry_after_in_seconds(header: str | None, expected: float | None) -> None:
    assert retry_after_seconds(header) == expected


def test_retry_after_as_a_date() -> None:
    now = datetime.now(UTC)
    assert retry_after_seconds(format_datetime(now + timedelta(seconds=60), usegmt=True)) == pytest.approx(60, abs=5)
    assert retry_after_seconds(format_datetime(now - timedelta(days=1), usegmt=True)) == 0


@pytest.mark.parametrize("text", ["{}", '{"anything": 1}', " {}\n"])
def test_acknowledgements(text: str) -> None:
    judge(200, text, {})


@pytest.mark.parametrize("text", ["", "200 OK", "OK", " \n", "null", "[]", '"ok"', "1", '{"cut off'])
def test_an_answer_of_something_in_between_acknowledges_nothing(text: str) -> None:
    assert type(raised(lambda: judge(200, text, {}))) is Unreachable


@pytest.mark.parametrize("status", [100, 204, 302, 400, 404, 413, 422, 429, 500, 599])
@pytest.mark.parametrize("text", ["", "{}", "[]", "<html>", '{"error_code": 7, "message": ["x"]}'])
def test_all_else_is_one_of_three(status: int, text: str) -> None:
    error = raised(lambda: judge(status, text, {}))
    expected = Busy if status == 429 or status >= 500 else Refused if status >= 400 else Unreachable
    assert type(error) is expected


@pytest.mark.parametrize(
    ("status", "code", "blames_content"),
    [
        (400, "INVALID_PARAMETER_VALUE", True),
        (400, "BAD_REQUEST", True),
        (413, "", True),
        (400, "RESOURCE_LIMIT_EXCEEDED", False),
        (400, "QUOTA_EXCEEDED", False),
        (404, "RESOURCE_DOES_NOT_EXIST", False),
        (403, "PERMISSION_DENIED", False),
    ],
)
def test_which_refusals_may_be_the_points_fault(status: int, code: str, blames_content: bool) -> None:
    error = raised(lambda: judge(status, json.dumps({"error_code": code, "message": "m"}), {}))
    assert error.blames_content is blames_content
    assert error.is_doubtful is (code == "BAD_REQUEST")


@pytest.mark.parametrize(("text", "is_mlflows"), [("<html>", False), ("", False), ('{"error_code": "X"}', True)])
def test_who_refuses(text: str, is_mlflows: bool, proxy: FaultyProxy) -> None:
    proxy.set(Fault(status=404, body=text.encode()))
    assert raised(lambda: open_door(proxy.url).log_batch("run", POINTS)).is_mlflows is is_mlflows
    assert raised(lambda: judge(404, text, {})).is_mlflows  # what MLflow's client says of it is never the body


def test_a_reason_is_one_short_line_without_passwords() -> None:
    assert one_line("no\n  way: https://me:secret@host/x") == "no way: https://host/x"
    assert len(one_line("x" * 10_000)) < 600


# ---- what is sent --------------------------------------------------------------------------------------------------


@law
@given(
    st.lists(
        st.builds(
            Point,
            st.text(st.characters(codec=None)),
            st.floats(allow_nan=False, allow_infinity=False),
            st.integers(0, 2**63 - 1),
            st.integers(-(2**63), 2**63 - 1),
        ),
        max_size=250,
    )
)
def test_a_batch_is_json_and_no_larger_than_was_said(points: list[Point]) -> None:
    text = batch_json("run\n1", points)
    body = json.loads(text)
    assert body["run_id"] == "run\n1"
    assert [Point(m["key"], m["value"], m["timestamp"], m["step"]) for m in body["metrics"]] == points
    assert len(text) <= 100 + sum(point_bytes(point) for point in points)


def test_a_door_is_opened_when_it_is_used() -> None:
    door: Door = open_door("http://nobody.invalid:1")
    assert door is not None
