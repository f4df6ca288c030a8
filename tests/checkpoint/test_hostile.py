"""Two ranks save to, and load from, places that do what volumes do on a bad day.

Whatever the place does, a save either comes through or fails on every rank with one error that names the file; what a
reader finds is whole in both cases, what was there before still is, and the next save works.
"""

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_air.checkpoint import (
    AsyncUCCheckpointIO,
    CheckpointFailedError,
    latest_checkpoint,
    opened,
    publishing,
    transfer,
    verify_checkpoint,
    writing,
)
from lightning_air.checkpoint.places import open_store
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.transfer import upload
from tests.checkpoint.test_killing import (
    VOLUME,
    Below,
    assert_equal_to_the_bit,
    checkpoint_at,
    hostile_places,
    make_io,
    newest_step,
    plain,
    reports_of,
)
from tests.kit.files_api_server import TOKEN, files_api
from tests.kit.files_api_server import Fault as ApiFault
from tests.kit.fuse_volume import FuseBehaviour, fuse_volume
from tests.kit.hostile import Behaviour, Fault, HostileStore, volume_rules
from tests.kit.ranks import run_ranks, values

ALWAYS = 10**6


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def patiently_but_shortly() -> None:
    """Wait as the library does, and much shorter."""

    def shortly(cancelled: threading.Event, seconds: float) -> None:
        cancelled.wait(min(seconds, 0.02))

    transfer.WRONG_SIZE_SECONDS = 0.1
    writing.upload = publishing.upload = partial(upload, settle_seconds=0.2, sleep=shortly)


def save_twice(
    folder: str, behaviours: tuple[Behaviour, Behaviour, Behaviour], options: dict[str, Any], faulty_rank: int | None
) -> tuple[list[str | None], int]:
    """Save steps 1, 2 and 3, each on a day of its own.

    Returns:
        What each save raised, and how often this rank had to try again.
    """
    import torch.distributed as dist

    patiently_but_shortly()
    outcomes: list[str | None] = []
    num_retries = 0
    io = make_io(open_store, **options)
    io.connect("ddp")
    for step, behaviour in enumerate(behaviours, 1):
        is_spared = faulty_rank is not None and dist.get_rank() != faulty_rank
        io._shelf.open_store = hostile_places(Path(folder), Behaviour() if is_spared else behaviour)
        try:
            io.save_checkpoint(checkpoint_at(step), f"{VOLUME}/step={step}.ckpt")
            io.settle()
            outcomes.append(None)
        except CheckpointFailedError as error:
            outcomes.append(f"{error} <- {error.__cause__}")
        num_retries += sum(report.num_retries for report in io.take_reports())
    io.teardown()
    return outcomes, num_retries


def three_days(
    folder: Path, second: Behaviour, *, faulty_rank: int | None = None, **options: Any
) -> list[tuple[list[str | None], int]]:
    behaviours = (Behaviour(), second, Behaviour())
    args = (str(folder), behaviours, options, faulty_rank)
    return values(run_ranks(save_twice, 2, args=args, init_process_group="gloo"))


# ---- what passes ----------------------------------------------------------------------------------------------------

RECOVERS: dict[str, tuple[Behaviour, int | None]] = {
    "a listing that lags": (Behaviour(listing_lag_seconds=3600), None),
    "failed look-ups that are remembered": (Behaviour(negative_seconds=0.3), None),
    "a shard cut short": (Behaviour(faults=[Fault("short", names="*distcp")]), 1),
    "a shard that was lost": (Behaviour(faults=[Fault("lost", names="*__0_*_0.distcp")]), 0),
    "meta.pt cut short": (Behaviour(faults=[Fault("short", names="*/meta.pt")]), 0),
    "a manifest cut short": (Behaviour(faults=[Fault("short", names="*/manifest.json")]), 0),
    ".metadata cut short": (Behaviour(faults=[Fault("short", names="*/.metadata")]), 0),
    ".metadata lost": (Behaviour(faults=[Fault("lost", names="*/.metadata")]), 0),
    "EIO for a while": (Behaviour(faults=[Fault(errno.EIO, nth=2, times=2)]), 1),
    "EBUSY for every first try": (Behaviour(faults=[Fault(errno.EBUSY, names=f"*{n}") for n in ("p", "t", "n")]), 0),
}


@pytest.mark.parametrize("day", RECOVERS)
def test_what_passes_costs_no_checkpoint(day: str, tmp_path: Path) -> None:
    behaviour, rank = RECOVERS[day]
    by_rank = three_days(tmp_path, behaviour, faulty_rank=rank)
    assert [outcomes for outcomes, _ in by_rank] == [[None] * 3] * 2
    reports = reports_of("remote", tmp_path)
    assert reports.keys() == {1, 2, 3}
    assert all(report.valid for report in reports.values()), reports
    assert newest_step("remote", tmp_path) == 3
    if any(fault.what != "lost" for fault in behaviour.faults) and rank == 1:
        assert by_rank[1][1] > 0  # it did happen


# ---- what does not --------------------------------------------------------------------------------------------------

FAILS: list[tuple[int, str, str]] = [
    (0, "step=2.ckpt/__0_*_0.distcp", "__0_0.distcp"),
    (1, "step=2.ckpt/__1_*_1.distcp", "__1_1.distcp"),
    (0, "step=2.ckpt/meta.pt", "meta.pt"),
    (0, "step=2.ckpt/manifest.json", "manifest.json"),
    (0, "step=2.ckpt/.metadata", ".metadata"),
]


@pytest.mark.parametrize("what", [errno.ENOSPC, errno.EIO, "short", "lost"])
@pytest.mark.parametrize(("rank", "name", "file"), FAILS, ids=[file for _, _, file in FAILS])
def test_what_stays_fails_on_every_rank_by_name_and_publishes_nothing(
    rank: int, name: str, file: str, what: Any, tmp_path: Path
) -> None:
    behaviour = Behaviour(faults=[Fault(what, names=name, times=ALWAYS)])
    by_rank = three_days(tmp_path, behaviour, faulty_rank=rank, upload_timeout=1.5)
    for outcomes, _ in by_rank:
        first, second, third = outcomes
        assert first is third is None
        assert f"step=2.ckpt (step 2) was not saved. Rank {rank}: " in (second or "")
        assert repr(file) in plain(second or "")
        if isinstance(what, int):
            assert os.strerror(what) in (second or "")
    reports = reports_of("remote", tmp_path)
    assert {step for step, report in reports.items() if report.valid} == {1, 3}
    assert reports.keys() == {1, 3} or file == ".metadata"  # of which a part may be seen
    if file.endswith(".distcp"):  # its space may be what was lacking
        assert not list(tmp_path.glob("step=2.ckpt/*.distcp"))
    assert newest_step("remote", tmp_path) == 3


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_full_store_at_the_nth_file_of_either_rank(nth: int, tmp_path: Path) -> None:
    behaviour = Behaviour(faults=[Fault(errno.ENOSPC, nth=nth, times=ALWAYS)])
    by_rank = three_days(tmp_path, behaviour)
    assert by_rank[0][0][1] is not None
    assert [outcomes[1].split(" <- ")[0] for outcomes, _ in by_rank] == [by_rank[0][0][1].split(" <- ")[0]] * 2
    assert "No space left on device" in by_rank[0][0][1]
    assert reports_of("remote", tmp_path).keys() == {1, 3}
    assert newest_step("remote", tmp_path) == 3


# ---- slow -----------------------------------------------------------------------------------------------------------


def save_slowly(folder: str, bytes_per_second: float, timeout: float) -> dict[str, Any]:
    """Save once, training on meanwhile; the state changes while it is on its way."""
    io = make_io(hostile_places(Path(folder), Behaviour(bytes_per_second=bytes_per_second)), upload_timeout=timeout)
    io.connect("ddp")
    checkpoint = checkpoint_at(1)
    started = time.monotonic()
    io.save_checkpoint(checkpoint, f"{VOLUME}/step=1.ckpt")
    blocked, is_saving = time.monotonic() - started, io.is_saving
    for weight in checkpoint["state_dict"].values():
        weight.zero_()
    error = None
    try:
        io.settle()
    except CheckpointFailedError as raised:
        error = str(raised)
    io.teardown()
    return {"blocked": blocked, "is_saving": is_saving, "seconds": time.monotonic() - started, "error": error}


def test_a_slow_store_is_waited_for_by_nobody_but_the_save(tmp_path: Path) -> None:
    for seen in values(run_ranks(save_slowly, 2, args=(str(tmp_path), 20e3, 60.0), init_process_group="gloo")):
        assert seen["error"] is None
        assert seen["is_saving"]
        assert seen["seconds"] > 0.5  # about ten thousand bytes per rank
        assert seen["blocked"] < seen["seconds"] / 2
    assert newest_step("remote", tmp_path) == 1  # as it was when it was saved


def test_a_store_too_slow_for_the_timeout_fails_in_time_by_name(tmp_path: Path) -> None:
    for seen in values(run_ranks(save_slowly, 2, args=(str(tmp_path), 2e3, 0.5), init_process_group="gloo")):
        assert seen["error"] is not None
        assert ".distcp'" in seen["error"]
        assert "within 0.5 s" in seen["error"] or "did not end" in seen["error"], seen
        assert seen["seconds"] < 10
    assert reports_of("remote", tmp_path) == {}


# ---- a volume as the kernel shows it --------------------------------------------------------------------------------


def volumes_at(root: Path) -> None:
    """Have this process find volumes below this folder instead of /Volumes."""
    open_store.__kwdefaults__["volumes_root"] = root


def save_and_load_on_a_mount(root: str, kept: str | None) -> list[str | None]:
    """Save three times under one name and once under another, and load after each."""
    volumes_at(Path(root))
    patiently_but_shortly()
    found = []
    with volume_rules(Path(kept)) if kept else ExitStack():
        io, reader = make_io(open_store), make_io(open_store)  # what an IO has loaded from it never deletes
        io.connect("ddp")
        reader.connect("ddp")
        for step, name in enumerate(["last.ckpt", "last.ckpt", "step=3.ckpt", "last.ckpt"], 1):
            with pytest.raises(FileNotFoundError):  # so that the kernel remembers it as missing
                reader.load_checkpoint(f"/Volumes/main/default/ckpt/run/none-{step}.ckpt")
            io.save_and_wait(checkpoint_at(step), f"/Volumes/main/default/ckpt/run/{name}")
            io.point("/Volumes/main/default/ckpt/run/newest.ckpt", link=True)  # there are no links: a file
            io.settle()
            loaded = reader.load_checkpoint(f"/Volumes/main/default/ckpt/run/{name}")
            assert_equal_to_the_bit(loaded, checkpoint_at(step))
        io.teardown()
        found.append(latest_checkpoint("/Volumes/main/default/ckpt/run"))
    return found


@pytest.fixture(params=["fuse", "rules"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path | None]]:
    """Where volumes are mounted, and a folder to be watched; as the kernel does it, or else by rules of our own."""
    volume = tmp_path / "Volumes" / "main" / "default" / "ckpt"
    volume.parent.mkdir(parents=True)
    with ExitStack() as stack:
        if request.param == "rules":
            volume.mkdir()
            yield tmp_path / "Volumes", volume
            return
        mount = stack.enter_context(fuse_volume(tmp_path, FuseBehaviour(negative_seconds=0.3)))
        if mount is None:
            pytest.skip("needs the right to mount")
        volume.symlink_to(mount.mount)
        yield tmp_path / "Volumes", None


def test_a_mount_without_append_seek_rename_and_links(
    mounted: tuple[Path, Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, watched = mounted
    args = (str(root), None if watched is None else str(watched))
    for (newest,) in values(run_ranks(save_and_load_on_a_mount, 2, args=args, init_process_group="gloo")):
        assert (newest or "").endswith(("/last@3.ckpt", "/last@4.ckpt", "/last.ckpt"))
    monkeypatch.setitem(open_store.__kwdefaults__, "volumes_root", root)
    run = root / "main" / "default" / "ckpt" / "run"
    folders = sorted(path.name for path in run.iterdir() if path.is_dir())
    assert len(folders) == 2  # of last.ckpt the older ones are gone
    for folder in folders:
        assert verify_checkpoint(f"/Volumes/main/default/ckpt/run/{folder}").valid


# ---- reading --------------------------------------------------------------------------------------------------------


class Unreadable(HostileStore):
    """Reading a file fails, so many times."""

    def __init__(self, folder: Path, name: str, times: int) -> None:
        super().__init__(folder, root=VOLUME)
        self.name = name
        self.times = times

    def read(self, name: str) -> bytes:
        if plain(name) == self.name and self.times > 0:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{VOLUME}/{name}")
        return super().read(name)


def load_unreadable(folder: str, name: str, times: int, timeout: float) -> tuple[int, list[str]]:
    opened._PATIENCE_SECONDS = timeout
    store = Unreadable(Path(folder), name, times)
    io = AsyncUCCheckpointIO(upload_timeout=timeout)
    io._shelf = Shelf(lambda path: Below(store, path.removeprefix(VOLUME).strip("/")))
    io.connect("ddp")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        loaded = io.load_checkpoint(f"{VOLUME}/step=2.ckpt")
    assert_equal_to_the_bit(loaded, checkpoint_at(loaded["global_step"]))
    return loaded["global_step"], [str(warning.message) for warning in given]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-steps")
    io = make_io(hostile_places(folder))
    for step in (1, 2):
        io.save_and_wait(checkpoint_at(step), f"{VOLUME}/step={step}.ckpt")
    io.teardown()
    return folder


@pytest.mark.parametrize("file", [".metadata", "manifest.json", "meta.pt", "__0_0.distcp"])
def test_a_read_error_that_passes_is_no_damage(file: str, two_steps: Path) -> None:
    args = (str(two_steps), f"step=2.ckpt/{file}", 1, 60.0)
    assert values(run_ranks(load_unreadable, 2, args=args, init_process_group="gloo")) == [(2, []), (2, [])]


@pytest.mark.parametrize("file", [".metadata", "__0_1.distcp"])
def test_a_read_error_that_stays_is_passed_over_by_name(file: str, two_steps: Path) -> None:
    args = (str(two_steps), f"step=2.ckpt/{file}", ALWAYS, 1.0)
    first, second = values(run_ranks(load_unreadable, 2, args=args, init_process_group="gloo"))
    assert (first[0], second[0]) == (1, 1)
    (warning,) = first[1]
    assert file in plain(warning)
    assert "Input/output error" in warning
    assert "Loading /Volumes/main/default/hostile/step=1.ckpt instead." in warning


# ---- the Files API --------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Log in to a workspace at this URL, and to no other; no volume is mounted."""
    for name in [name for name in os.environ if name.startswith(("DATABRICKS_", "ARM_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    monkeypatch.setenv("DATABRICKS_AUTH_TYPE", "pat")
    monkeypatch.setitem(open_store.__kwdefaults__, "volumes_root", tmp_path / "nowhere")
    monkeypatch.setattr(transfer, "WRONG_SIZE_SECONDS", 0.2)
    return partial(monkeypatch.setenv, "DATABRICKS_HOST")


def test_the_files_api_with_the_real_sdk_from_end_to_end(workspace: Callable[[str], None]) -> None:
    run = "dbfs:/Volumes/main/default/ckpt/run"
    faults = [
        ApiFault(r"^PUT .*/files/.*__0_\w+_0\.distcp", status=429, headers={"Retry-After": "1"}),
        ApiFault(r"^PUT .*/files/.*__0_\w+_1\.distcp", keeps_bytes=100),  # and reported as success
        ApiFault(r"^PUT .*/files/.*metadata", status=429, headers={"Retry-After": "1"}),
        ApiFault(r"^GET .*__0_\w+_1\.distcp", status=503),
    ]
    with files_api(*faults) as volume:
        workspace(volume.url)
        io = make_io(open_store)
        io.save_checkpoint(checkpoint_at(1), f"{run}/step=1.ckpt")
        io.settle()
        (report,) = io.take_reports()
        assert report.num_retries >= 1  # the truncated one was put again
        assert volume.count(r"^PUT .*/files/.*__0_\w+_1\.distcp") == 2
        assert volume.count(r"^PUT .*/files/.*__0_\w+_0\.distcp") == 2
        put = [request for request in volume.requests if request.startswith("PUT") and "/files/" in request]
        assert ".metadata?" in put[-1]
        io.save_and_wait(checkpoint_at(2), f"{run}/step=2.ckpt")
        assert latest_checkpoint(run) == "/Volumes/main/default/ckpt/run/step=2.ckpt"
        assert verify_checkpoint(f"{run}/step=1.ckpt").valid
        for step in (1, 2):
            assert_equal_to_the_bit(io.load_checkpoint(f"{run}/step={step}.ckpt"), checkpoint_at(step))
        io.remove_checkpoint(f"{run}/step=1.ckpt")  # loaded from: it stays
        io.save_and_wait(checkpoint_at(3), f"{run}/step=3.ckpt")
        io.remove_checkpoint(f"{run}/step=3.ckpt")
        io.teardown()
        left = {path.split("/")[-2] for path in volume.files}
        assert left == {"step=1.ckpt", "step=2.ckpt"}
