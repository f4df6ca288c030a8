"""What returns has arrived; what fails says which file and why, once; nothing outlives its deadline."""

import errno
import hashlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_air.checkpoint import crew, transfer
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.store import Store
from lightning_air.checkpoint.transfer import TransferStats, download, upload
from tests.checkpoint.test_retry import FakeTime
from tests.kit.hostile import Behaviour, Fault, HostileStore
from tests.kit.ranks import run_ranks

DEADLINE_SECONDS = 600.0


def sources(*sizes: int) -> list[tuple[str, Path | bytes]]:
    """Files of these sizes: where they are to be put, and where they lie."""
    files: list[tuple[str, Path | bytes]] = []
    for index, size in enumerate(sizes):
        source = Path(f"source-{index}")
        source.write_bytes(bytes([index]) * size)
        files.append((f"step=1/__{index}_0.distcp", source))
    return files


class Call:
    """An `upload` or a `download` in a time that only its pauses move."""

    def __init__(self, store: Store, *, max_workers: int = 4, **options: Any) -> None:
        self.time = FakeTime()
        self.options = {"max_workers": max_workers, "deadline_seconds": DEADLINE_SECONDS} | options
        self.options |= {"clock": self.time.clock, "sleep": self.time.sleep, "chance": lambda: 0.0}
        self.store = store

    def upload(self, files: Sequence[tuple[str, Path | bytes]]) -> TransferStats:
        return upload(self.store, files, **self.options)

    def download(self, files: Sequence[tuple[str, Path]]) -> TransferStats:
        return download(self.store, files, **self.options)


def uploading() -> list[str]:
    """Return the names of threads that still upload."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-air-upload")]


def hostile(*faults: Fault, fake: FakeTime | None = None, **behaviour: Any) -> HostileStore:
    clock = {} if fake is None else {"clock": fake.clock}
    return HostileStore(Path("store"), Behaviour(faults=faults, **behaviour), on_point=lambda _: None, **clock)


# ---- what goes well --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_workers", [1, 3, 100])
def test_files_go_there_and_back(max_workers: int) -> None:
    store = hostile()
    files = [*sources(10, 0, 100_000, 3), ("step=1/.metadata", b"metadata")]
    call = Call(store, max_workers=max_workers)
    stats = call.upload(files)
    assert stats == TransferStats(seconds=0.0, num_bytes=100_021, num_retries=0, verify_seconds=0.0)
    targets = [(name, Path("back", name)) for name, _ in files]
    assert call.download(targets) == stats
    for (_, source), (_, target) in zip(files, targets, strict=True):
        assert target.read_bytes() == (source if isinstance(source, bytes) else source.read_bytes())


def test_nothing_to_do() -> None:
    assert Call(hostile()).upload([]).num_bytes == 0
    assert Call(hostile()).download([]).num_bytes == 0


def test_the_largest_goes_first_and_threads_have_names() -> None:
    began: list[tuple[str, str]] = []
    store = hostile()
    store._on_point = lambda point: began.append((point, threading.current_thread().name))
    Call(store, max_workers=1).upload(sources(1, 3, 2))
    order = [point for point, _ in began if point.startswith("put step")]
    assert order == [f"put step=1/__{index}_0.distcp" for index in (1, 2, 0)]
    assert {name for _, name in began} == {"lightning-air-upload-0"}
    assert uploading() == []


def test_files_go_at_once() -> None:
    meeting = threading.Barrier(3, timeout=10)
    store = hostile()
    store._on_point = lambda point: meeting.wait() if point.startswith("putting step") else None
    Call(store, max_workers=3).upload(sources(1, 1, 1))


@pytest.mark.parametrize("max_workers", [0, -1])
def test_a_transfer_needs_a_worker(max_workers: int) -> None:
    with pytest.raises(ValueError, match=f"max_workers must be at least 1, got {max_workers}"):
        Call(hostile(), max_workers=max_workers).upload(sources(1))


def test_a_name_is_moved_once() -> None:
    files = sources(1, 2)
    with pytest.raises(ValueError, match=r"once per call, got 'step=1/__1_0.distcp' twice"):
        Call(hostile()).upload([*files, files[1]])
    with pytest.raises(ValueError, match="got 'a' twice"):
        Call(hostile()).download([("a", Path("a")), ("a", Path("b"))])


# ---- what goes wrong and passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ECONNRESET, errno.ETIMEDOUT, errno.EBUSY])
def test_what_may_pass_is_tried_again(number: int) -> None:
    call = Call(hostile(Fault(number, names="*__1*", times=3)))
    stats = call.upload(sources(10, 20, 30))
    assert stats.num_retries == 3
    assert call.time.pauses == [0.5, 1, 2]
    assert stats.seconds == 3.5
    assert call.store.num_bytes("step=1/__1_0.distcp") == 20


def test_a_short_write_that_reports_success_is_noticed_and_repeated() -> None:
    call = Call(hostile(Fault("short", names="*__1*")))
    stats = call.upload(sources(10, 20))
    assert stats.num_retries == 1
    assert call.store.read("step=1/__1_0.distcp") == b"\1" * 20
    assert transfer.WRONG_SIZE_SECONDS <= stats.seconds < 10


def test_a_lost_write_that_reports_success_is_noticed_and_repeated() -> None:
    call = Call(hostile(Fault("lost", names=".metadata")), settle_seconds=20)
    stats = call.upload([(".metadata", b"metadata")])
    assert stats.num_retries == 1
    assert call.store.read(".metadata") == b"metadata"
    assert 20 <= stats.verify_seconds <= stats.seconds < 30


def test_a_file_that_is_seen_late_is_waited_for_and_not_put_again() -> None:
    call = Call(hostile())
    puts: list[str] = []
    store = call.store
    assert isinstance(store, HostileStore)
    store._on_point = puts.append
    seen, num_bytes = call.time.now + 12, store.num_bytes
    store.num_bytes = lambda name: num_bytes(name) if call.time.now >= seen else None  # type: ignore[method-assign]
    stats = call.upload(sources(10))
    assert stats.num_retries == 0
    assert 12 <= stats.verify_seconds < 15
    assert puts.count("put #1") == 1
    assert "put #2" not in puts


def test_a_failed_look_up_that_is_remembered_is_outlived() -> None:
    call = Call(hostile())
    store = hostile(fake=call.time, negative_seconds=7)
    store.put_bytes("step=1/a", b"data")
    store._missed["step=1/a"] = call.time.now  # this process has looked for it just before it was put
    call.store = store
    stats = call.download([("step=1/a", Path("a"))])
    assert Path("a").read_bytes() == b"data"
    assert 7 <= stats.seconds < 15


class Digests(HostileStore):
    """A store that tells an MD5, and stores other bytes of the same number as often as told."""

    num_wrong = 0

    def put(self, name: str, source: Path) -> None:
        super().put(name, source)
        self._spoil(name)

    def put_bytes(self, name: str, data: bytes) -> None:
        super().put_bytes(name, data)
        self._spoil(name)

    def _spoil(self, name: str) -> None:
        if self.num_wrong > 0:
            self.num_wrong -= 1
            Path("store", name).write_bytes(bytes(len(self.read(name))))

    def md5(self, name: str) -> str | None:
        return hashlib.md5(self.read(name)).hexdigest()


@pytest.mark.parametrize("source", [b"data", Path("source")], ids=["bytes", "file"])
def test_other_bytes_than_were_sent_are_noticed_where_the_store_tells_an_md5(source: Path | bytes) -> None:
    Path("source").write_bytes(b"data")
    store = Digests(Path("store"))
    store.num_wrong = 2
    stats = Call(store).upload([("a", source)])
    assert stats.num_retries == 2
    assert store.read("a") == b"data"
    store.num_wrong = 10_000
    with pytest.raises(OSError, match=r"upload of 'a' .*the store holds other bytes: MD5 f1d3ff") as raised:
        Call(store, deadline_seconds=60).upload([("a", source)])
    assert raised.value.errno == errno.EIO


def test_a_copy_that_is_too_short_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(hostile())
    call.upload(sources(1000))
    get, gets = call.store.get, []

    def cut(name: str, target: Path) -> None:
        get(name, target)
        gets.append(name)
        if len(gets) < 3:
            os.truncate(target, 10)

    monkeypatch.setattr(call.store, "get", cut)
    stats = call.download([("step=1/__0_0.distcp", Path("target"))])
    assert Path("target").read_bytes() == bytes(1000)
    assert (len(gets), stats.num_retries) == (3, 2)


# ---- what goes wrong and does not pass -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOENT])
def test_what_will_not_pass_is_raised_once_with_the_files_name(number: int) -> None:
    call = Call(hostile(Fault(number, names="*__1*", times=100)))
    with pytest.raises(OSError, match=r"upload of 'step=1/__1_0.distcp' \(/Volumes/main/default/hostile\)") as raised:
        call.upload(sources(10, 20, 30))
    assert raised.value.errno == number
    assert type(raised.value) is type(OSError(number, ""))
    assert isinstance(raised.value.__cause__, OSError)
    assert call.time.pauses == []


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError("a bug"), SystemExit("a bug")], ids=repr)
def test_whatever_a_worker_raises_is_raised(error: BaseException) -> None:
    store = hostile()

    def fail(_: str) -> None:
        raise error

    store._on_point = fail
    with pytest.raises(OSError, match=r"step=1/__0_0.distcp.*a bug") as raised:
        Call(store).upload(sources(10))
    assert raised.value.__cause__ is error


def test_an_error_keeps_the_rest_from_being_begun() -> None:
    began: list[str] = []
    store = hostile(Fault(errno.ENOSPC, names="*__0*"))
    store._on_point = began.append
    with pytest.raises(OSError, match="__0_0"):
        Call(store, max_workers=1).upload(sources(30, 20, 10))
    assert [point for point in began if point.startswith("put step")] == ["put step=1/__0_0.distcp"]


def test_an_error_ends_the_pauses_of_the_others() -> None:
    # Given one file that is tried again and again, in real time, and another that fails for good a little later.
    store = hostile(Fault(errno.EIO, names="*__0*", times=1000), Fault(errno.ENOSPC, names="*__1*"))
    retried = threading.Event()

    def on_point(point: str) -> None:
        if point == "putting step=1/__0_0.distcp":
            retried.set()
        if point == "put step=1/__1_0.distcp":
            assert retried.wait(10)

    store._on_point = on_point
    begun = time.monotonic()
    with pytest.raises(OSError, match="__1_0"):
        upload(store, sources(10, 10), max_workers=2, deadline_seconds=60, sleep=lambda event, _: event.wait(30))
    assert time.monotonic() - begun < 10


def test_what_does_not_pass_in_time_is_raised_with_the_last_error() -> None:
    call = Call(hostile(Fault(errno.ECONNRESET, names="*__1*", times=10_000)), deadline_seconds=50)
    with pytest.raises(ConnectionResetError, match=r"step=1/__1_0.distcp"):
        call.upload(sources(10, 20))
    assert sum(call.time.pauses) < 50


def test_a_file_that_never_arrives_is_an_error() -> None:
    call = Call(hostile(Fault("lost", times=10_000)), deadline_seconds=200)
    with pytest.raises(OSError, match="nothing arrived of 10 bytes"):
        call.upload(sources(10))
    assert sum(call.time.pauses) < 200
    call = Call(hostile(Fault("short", times=10_000)), deadline_seconds=200)
    with pytest.raises(OSError, match="5 bytes arrived of 10 bytes"):
        call.upload(sources(10))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_missing_source_is_named_before_anything_is_sent(is_there: bool) -> None:
    began: list[str] = []
    store = hostile()
    store._on_point = began.append
    with pytest.raises(FileNotFoundError, match=r"cannot upload 'b'.*no-such-file"):
        Call(store).upload([*(sources(10) if is_there else []), ("b", Path("no-such-file"))])
    assert began == []


def test_a_file_that_is_missing_is_missing_for_good_after_a_while() -> None:
    call = Call(hostile(), settle_seconds=25)
    with pytest.raises(FileNotFoundError, match="download of 'step=1/a'"):
        call.download([("step=1/a", Path("a"))])
    assert 25 <= sum(call.time.pauses) < 60
    call = Call(LocalStore(Path.cwd() / "local"))
    with pytest.raises(FileNotFoundError, match="download of 'step=1/a'"):
        call.download([("step=1/a", Path("a"))])
    assert call.time.pauses == []


def test_what_is_not_begun_in_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "GRACE_SECONDS", 30.0)  # the caller waits in real seconds for what takes none of ours
    call, points = Call(hostile(), max_workers=1), []

    def on_point(point: str) -> None:
        if not points:
            call.time.pass_by(DEADLINE_SECONDS)
        points.append(point)

    assert isinstance(call.store, HostileStore)
    call.store._on_point = on_point
    with pytest.raises(TimeoutError, match=r"__1_0.distcp.*600 s were over before it was begun"):
        call.upload(sources(20, 10))
    assert points
    assert not any("__1_0" in point for point in points)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_hanging", [1, 4])
def test_a_thread_that_hangs_is_left_behind_at_the_deadline(num_hanging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "GRACE_SECONDS", 0.1)
    released, puts = threading.Event(), []
    store = hostile()

    def on_point(point: str) -> None:
        puts.append(point)
        if point.startswith("putting step"):
            released.wait(30)

    store._on_point = on_point
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"upload of 'step=1/__\d_0.distcp'.* did not end within 0.3 s"):
        upload(store, sources(*[10] * (num_hanging + 3)), max_workers=num_hanging, deadline_seconds=0.3)
    assert 0.3 <= time.monotonic() - begun < 10
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("lightning-air-upload-")]
    assert len(hanging) == num_hanging
    assert all(thread.daemon for thread in hanging)
    # When they come back, they end, and put nothing more.
    released.set()
    for thread in hanging:
        thread.join(5)
    assert sum(point.startswith("put #") for point in puts) == num_hanging


def test_an_error_waits_for_what_is_in_flight() -> None:
    store, ended = hostile(Fault(errno.ENOSPC, names="*__0*")), []

    under_way = threading.Event()

    def on_point(point: str) -> None:
        if point == "putting step=1/__0_0.distcp":
            assert under_way.wait(10)
        if point == "putting step=1/__1_0.distcp":
            under_way.set()
            time.sleep(0.2)
            ended.append(point)

    store._on_point = on_point
    with pytest.raises(OSError, match="__0_0"):
        upload(store, sources(10, 10), max_workers=2, deadline_seconds=20)
    assert len(ended) == 1
    assert uploading() == []


def test_an_interrupt_cancels_what_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    released, began = threading.Event(), []
    store = hostile()

    def on_point(point: str) -> None:
        began.append(point)
        released.wait(10)

    store._on_point = on_point
    join = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        upload(store, sources(10, 10, 10), max_workers=1, deadline_seconds=20)
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lightning-air-upload-"):
            thread.join(5)
    assert "put #2" not in began


# ---- processes -------------------------------------------------------------------------------------------------------


def _two_uploads() -> None:
    rank = int(os.environ["RANK"])
    store = HostileStore(Path("store"), Behaviour(is_visible_early=False))
    upload(store, [(f"step=1/{rank}-{index}", bytes(100)) for index in range(2)], max_workers=1, deadline_seconds=20)


@pytest.mark.parametrize("point", ["put #2", "putting step=1/1-1", "put done #1"])
def test_a_rank_can_be_killed_at_a_point_of_a_put(point: str) -> None:
    killed = run_ranks(_two_uploads, 2, signals={(1, point): signal.SIGKILL}, cwd=Path.cwd())
    assert [result.exitcode for result in killed] == [0, -signal.SIGKILL], killed
    there = [entry.name for entry in HostileStore(Path("store")).list("step=1")]
    assert there == ["step=1/0-0", "step=1/0-1", "step=1/1-0"]
