"""A volume without a mount: the real SDK against a workspace that has bad days."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests  # type: ignore[import-untyped]
from databricks.sdk import errors as sdk
from databricks.sdk.errors.base import DatabricksError

from lightning_air.checkpoint import crew
from lightning_air.checkpoint.files_api_store import FilesApiStore
from lightning_air.checkpoint.places import check_writable, open_store
from lightning_air.checkpoint.transfer import TransferStats, download, upload
from tests.kit.files_api_server import TOKEN, FastClock, Fault, Volume, expired_url, files_api, files_of

ROOT = "/Volumes/main/default/ckpt"
NAME = "step=1/__0_0.distcp"
DATA = bytes(range(256)) * 40
IN_PARTS = {
    "files_ext_multipart_upload_min_stream_size": 1000,
    "files_ext_multipart_upload_part_size_options": [3000],
}
SMALL, LARGE = pytest.param({}, id="whole"), pytest.param(IN_PARTS, id="in parts")
PUT, GET = r"^PUT .*/files/.*distcp|^PUT /cloud/part.*part=2", r"^GET /cloud/Volumes"


def store_at(volume: Volume, clock: FastClock | None = None, **config: Any) -> FilesApiStore:
    return FilesApiStore(f"{ROOT}/run", connect=lambda: files_of(volume, clock, **config))


def send(store: FilesApiStore, **options: Any) -> TransferStats:
    """Upload one file, in real time but for long pauses."""
    Path("source").write_bytes(DATA)
    options = {"max_workers": 2, "deadline_seconds": 30.0, "sleep": _shortly} | options
    return upload(store, [(NAME, Path("source"))], **options)


def _shortly(cancelled: threading.Event, seconds: float) -> None:
    cancelled.wait(min(seconds, 0.01))


def fetch(store: FilesApiStore, **options: Any) -> bytes:
    """Download that file."""
    options = {"max_workers": 2, "deadline_seconds": 30.0, "sleep": _shortly, "settle_seconds": 0.0} | options
    download(store, [(NAME, Path("target"))], **options)
    return Path("target").read_bytes()


@pytest.mark.parametrize(("config", "num_parts"), [({}, 0), (IN_PARTS, 4)], ids=["whole", "in parts"])
def test_a_file_goes_there_and_back(config: dict[str, Any], num_parts: int) -> None:
    with files_api() as volume:
        store = store_at(volume, **config)
        assert send(store).num_bytes == len(DATA)
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
        assert volume.count("PUT /cloud/part") == num_parts
        assert volume.count("PUT .*/files/") == (0 if num_parts else 1)
        assert fetch(store) == DATA
        assert volume.count("GET /cloud/Volumes") == 1


def test_parts_of_one_file_are_sent_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several files are sent at once already; all parts of all files at once would not fit into memory.
    before, most = threading.active_count(), []
    with files_api() as volume:
        fault_of = volume.fault_of
        clients = {"lightning-air-upload-0", "files-api-server"}

        def count(request: str) -> Any:
            names = [thread.name for thread in threading.enumerate()]
            most.append(len([name for name in names if name not in clients and "process_request" not in name]))
            return fault_of(request)

        monkeypatch.setattr(volume, "fault_of", count)
        send(store_at(volume, **IN_PARTS))
    assert max(most) == before


# ---- what passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "request_"), [({}, PUT), (IN_PARTS, "initiate-upload")], ids=["whole", "in parts"])
def test_a_server_that_is_too_busy_is_left_alone_as_long_as_it_says(config: dict[str, Any], request_: str) -> None:
    clock = FastClock()
    with files_api(Fault(request_, status=429, headers={"Retry-After": "17"})) as volume:
        stats = send(store_at(volume, clock, retry_timeout_seconds=60, **config))
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
    assert clock.slept_seconds >= 17
    assert stats.num_retries == 0


def test_a_server_that_stays_too_busy_is_tried_again_later() -> None:
    # Given more answers than the SDK has patience for.
    with files_api(Fault(PUT, status=429, headers={"Retry-After": "4"}, times=5)) as volume:
        stats = send(store_at(volume))
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
        assert volume.count(PUT) == 6
    assert stats.num_retries >= 1


@pytest.mark.parametrize("config", [SMALL, LARGE])
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_servers_own_errors_pass(config: dict[str, Any], status: int) -> None:
    with files_api(Fault(PUT, status=status, times=6), Fault(GET, status=status, times=2)) as volume:
        store = store_at(volume, **config)
        assert send(store).num_retries <= 6
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
        assert fetch(store) == DATA


@pytest.mark.parametrize("config", [SMALL, LARGE])
@pytest.mark.parametrize("request_", [PUT, "^POST .*(initiate|complete)", "^HEAD", "^PUT .*/directories", GET])
def test_connections_that_are_reset_are_made_again(config: dict[str, Any], request_: str) -> None:
    with files_api(Fault(request_, resets=True, times=3)) as volume:
        store = store_at(volume, **config)
        send(store)
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
        assert fetch(store) == DATA


@pytest.mark.parametrize("times", [1, 6], ids=["once", "often"])
def test_urls_that_expired_are_asked_for_again(times: int) -> None:
    # The SDK asks three times; then the file begins anew, with new URLs.
    with files_api(expired_url("PUT /cloud/part.*part=3", times=times), expired_url(GET, times=times)) as volume:
        store = store_at(volume, **IN_PARTS)
        stats = send(store)
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
        assert stats.num_retries <= 1
        assert fetch(store) == DATA


@pytest.mark.parametrize(
    ("config", "request_"), [({}, PUT), (IN_PARTS, PUT), (IN_PARTS, "complete-upload")], ids=["whole", "part", "end"]
)
def test_an_upload_that_was_cut_short_and_reported_as_a_success_is_repeated(
    config: dict[str, Any], request_: str
) -> None:
    with files_api(Fault(request_, keeps_bytes=100, times=2)) as volume:
        stats = send(store_at(volume, **config), settle_seconds=0.02)
        assert volume.files[f"{ROOT}/run/{NAME}"][0] == DATA
    assert stats.num_retries == 2


def test_an_upload_that_is_always_cut_short_fails_and_names_the_file() -> None:
    with files_api(Fault(PUT, keeps_bytes=100, times=10_000)) as volume:
        with pytest.raises(OSError, match=f"upload of '{NAME}'.*100 bytes arrived of {len(DATA)} bytes"):
            send(store_at(volume), deadline_seconds=0.5, settle_seconds=0.01)
        assert not [name for name in volume.files if "metadata" in name]


def test_a_download_that_breaks_off_is_gone_on_with() -> None:
    with files_api(Fault(GET, keeps_bytes=2500), Fault(GET, keeps_bytes=3000, nth=2)) as volume:
        store = store_at(volume, files_ext_client_download_streaming_chunk_size=1000)
        send(store)
        assert fetch(store) == DATA
        assert volume.count(GET) == 3


def test_a_download_that_always_breaks_off_fails() -> None:
    with files_api(Fault("^GET", keeps_bytes=0, times=10_000)) as volume:
        store = store_at(volume)
        send(store)
        with pytest.raises(OSError, match=f"download of '{NAME}'"):
            fetch(store, deadline_seconds=1.0)
        with pytest.raises(OSError, match=NAME):
            store.read(NAME)


# ---- what does not pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"), [(403, PermissionError), (401, PermissionError), (400, OSError), (501, OSError)]
)
def test_what_will_not_pass_is_raised_at_once(status: int, kind: type[OSError]) -> None:
    with files_api(Fault("/fs/", status=status, times=10_000)) as volume:
        store = store_at(volume)
        pauses: list[float] = []
        with pytest.raises(kind, match=f"upload of '{NAME}'.*as the test wants it") as raised:
            send(store, sleep=lambda _, seconds: pauses.append(seconds))
        assert pauses == []
        assert type(raised.value) is kind
        for call in (
            lambda: store.read(NAME),
            lambda: store.num_bytes(NAME),
            lambda: store.list("step=1"),
            lambda: store.delete(NAME),
            lambda: store.delete_folder("step=1"),
        ):
            with pytest.raises(kind, match=f"{ROOT}/run/step=1"):
                call()


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (sdk.TooManyRequests("slow down"), errno.EBUSY),
        (sdk.ResourceConflict("slow down"), errno.EBUSY),
        (sdk.DeadlineExceeded("slow down"), errno.ETIMEDOUT),
        (sdk.InternalError("slow down"), errno.EIO),
        (DatabricksError("slow down"), errno.EIO),  # 502, say
        (TimeoutError("slow down"), errno.ETIMEDOUT),  # the SDK has lost its patience
        (RuntimeError("slow down"), errno.EIO),
        (ValueError("slow down"), errno.EIO),  # a URL that expired too often
        (requests.ReadTimeout("slow down"), errno.ECONNRESET),
        (requests.exceptions.ChunkedEncodingError("slow down"), errno.ECONNRESET),
        (OSError(errno.ENOSPC, "slow down"), errno.ENOSPC),  # the local disk
        (sdk.NotFound("slow down"), errno.ENOENT),
        (sdk.InvalidParameterValue("slow down"), errno.EINVAL),
    ],
    ids=repr,
)
def test_what_the_sdk_raises_is_an_os_error(error: Exception, number: int) -> None:
    class Files:
        def download(self, _: str) -> None:
            raise error

    with pytest.raises(OSError, match=f"{ROOT}/run/a: slow down") as raised:
        FilesApiStore(f"{ROOT}/run", connect=Files).read("a")
    assert raised.value.errno == number
    assert raised.value.__cause__ is error


def test_a_volume_that_is_not_there_is_said_at_once() -> None:
    with files_api() as volume:
        store = FilesApiStore("/Volumes/main/default/other/run", connect=lambda: files_of(volume))
        assert store.list() == []
        with pytest.raises(FileNotFoundError, match="cannot be written to '/Volumes/main/default/other/run'"):
            check_writable(store)


def test_a_place_that_can_be_written_is_left_as_it_was() -> None:
    with files_api() as volume:
        check_writable(store_at(volume))
        assert volume.files == {}


def test_metadata_is_deleted_first() -> None:
    with files_api() as volume:
        store = store_at(volume)
        for name in ("-b", ".metadata", "a", "deeper/c"):
            store.put_bytes(f"step=1/{name}", b"data")
        store.delete_folder("step=1")
        deleted = [request.rpartition("/")[2] for request in volume.requests if request.startswith("DELETE")]
        assert deleted[0] == ".metadata"
        assert [name for name in deleted if name != ".metadata"] == ["-b", "a", "c", "deeper", "step%3D1"]
        assert (volume.files, store.list()) == ({}, [])


def test_a_folder_that_fills_up_meanwhile_is_worth_another_try() -> None:
    # The Files API refuses to delete a folder with something in it, in words of its own.
    with files_api() as volume:
        store = store_at(volume)
        store.put_bytes("step=1/a", b"data")
        volume.files[f"{ROOT}/run/step=1/b"] = (b"", time.time())
        list_directory = store.list
        store.list = lambda folder="": [e for e in list_directory(folder) if not e.name.endswith("/b")]  # type: ignore[method-assign]
        with pytest.raises(OSError, match="step=1") as raised:
            store.delete_folder("step=1")
        assert raised.value.errno == errno.ENOTEMPTY


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "GRACE_SECONDS", 0.1)
    with files_api(Fault(PUT, seconds=20)) as volume:
        store = store_at(volume)
        store.put_bytes("warm", b"")
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=f"upload of '{NAME}' .* did not end within 0.3 s"):
            send(store, deadline_seconds=0.3)
        assert 0.3 <= time.monotonic() - begun < 10


def test_a_server_that_stops_answering_is_given_up_by_the_sdk() -> None:
    with files_api(Fault(GET, seconds=20)) as volume:
        store = store_at(volume, files_ext_network_transfer_inactivity_timeout_seconds=0.2, http_timeout_seconds=0.2)
        send(store)
        assert fetch(store) == DATA


# ---- logging in ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Nothing to log in with, whoever runs the tests; what it yields sets a variable."""
    import os

    for name in [name for name in os.environ if name.startswith(("DATABRICKS_", "ARM_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATABRICKS_AUTH_TYPE", "pat")
    return monkeypatch.setenv


def test_the_workspace_is_logged_in_to_as_the_sdk_does_it(no_login: Callable[[str, str], None], tmp_path: Path) -> None:
    with files_api() as volume:
        no_login("DATABRICKS_HOST", volume.url)
        no_login("DATABRICKS_TOKEN", TOKEN)
        store = open_store(f"{ROOT}/run", volumes_root=tmp_path / "nowhere")
        assert volume.requests == []  # opening a place connects to nothing
        store.put_bytes("a", b"data")
        assert store.read("a") == b"data"


def test_who_cannot_log_in_is_told_how(no_login: Callable[[str, str], None], tmp_path: Path) -> None:
    store = open_store(f"{ROOT}/run", volumes_root=tmp_path / "nowhere")
    with pytest.raises(PermissionError, match=r"cannot log in to the workspace.*DATABRICKS_TOKEN"):
        check_writable(store)


def test_the_kit_logs_in_to_its_server_whatever_the_environment_and_the_home_say(
    no_login: Callable[[str, str], None], tmp_path: Path
) -> None:
    no_login("DATABRICKS_HOST", "http://127.0.0.1:9")
    no_login("DATABRICKS_TOKEN", "another")
    (tmp_path / ".databrickscfg").write_text("[DEFAULT]\nhost = http://127.0.0.1:9\ntoken = another\n")
    with files_api() as volume:
        store_at(volume).put_bytes("a", b"data")
        assert list(volume.files) == [f"{ROOT}/run/a"]
