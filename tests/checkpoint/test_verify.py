"""A checkpoint is valid if no byte of it has changed; what is wrong is told as data; the newest valid one is found."""

import errno
import itertools
import logging
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_air import runtime
from lightning_air.checkpoint import reading, scratch
from lightning_air.checkpoint.latest import latest_checkpoint, list_checkpoints
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.manifest import FileRecord, Manifest, digest_file
from lightning_air.checkpoint.pointer import write_pointer
from lightning_air.checkpoint.report import CheckpointReport, Problem
from lightning_air.checkpoint.retry import Patience
from lightning_air.checkpoint.safe_pickle import load_metadata
from lightning_air.checkpoint.verify import verify_checkpoint
from tests.checkpoint.samples import (
    Calls,
    RemoteStore,
    flip,
    save_ours,
    save_stock,
    shards,
    write_manifest,
)
from tests.checkpoint.test_manifest import spelt

GOOD = {"max_workers": 1}


class Settings:
    """A user's own class."""


def found(report: CheckpointReport) -> list[tuple[str, str]]:
    return [(problem.file, problem.what) for problem in report.problems]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return save_ours(tmp_path / "step=7.ckpt")


# ---- whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["size", "digest"])
@pytest.mark.parametrize("max_workers", [1, 4])
def test_whole_checkpoint_is_valid(level: Any, max_workers: int, ours: Path) -> None:
    report = verify_checkpoint(str(ours), level=level, max_workers=max_workers)
    assert report.valid
    assert report.problems == ()
    assert report.notes == ()
    assert (report.path, report.level, report.step) == (str(ours), level, 7)
    assert report.num_files == 5  # two tensors, an object, meta.pt and .metadata
    assert report.num_bytes == sum(path.stat().st_size for path in ours.iterdir() if path.name != "manifest.json")
    assert report.manifest == Manifest.from_json((ours / "manifest.json").read_bytes())
    assert report.metadata == load_metadata((ours / ".metadata").read_bytes(), source="x")
    assert str(report).startswith(
        f"{ours}: valid, step 7, 5 file(s), {report.num_bytes / 1e3:.3g} kB, checked by {level}"
    )


def test_checkpoint_is_found_by_path_store_and_name(ours: Path) -> None:
    for report in (
        verify_checkpoint(ours),
        verify_checkpoint(f"{ours}/"),
        verify_checkpoint(os.path.relpath(ours)),
        verify_checkpoint(LocalStore(ours)),
        verify_checkpoint(LocalStore(ours.parent), name=ours.name),
    ):
        assert report.valid
        assert report.path == str(ours)


def test_checkpoint_in_a_remote_store_is_downloaded_file_by_file_and_removed_again(ours: Path, tmp_path: Path) -> None:
    store = RemoteStore(ours.parent)
    staging = tmp_path / "staging"
    seen: list[int] = []
    store.spoil_get = lambda *_: seen.append(len(list(next(staging.iterdir()).iterdir())))
    report = verify_checkpoint(store, name=ours.name, staging_dir=str(staging), max_workers=1)
    assert report.valid
    assert report.path == f"far://{ours.parent.name}/step=7.ckpt"
    gets = [name for what, name in store.calls if what == "get"]
    assert sorted(gets) == sorted(f"{ours.name}/{path.name}" for path in [*shards(ours), ours / "meta.pt"])
    assert seen == [1] * 4
    assert list(staging.iterdir()) == []


def test_size_level_reads_no_content(ours: Path) -> None:
    store = RemoteStore(ours)
    assert verify_checkpoint(store, level="size").valid
    assert [call for call in store.calls if call[0] in {"get", "read"}] == [
        ("read", ".metadata"),
        ("read", "manifest.json"),
    ]


def test_progress_reaches_the_end(ours: Path) -> None:
    told: list[tuple[int, int]] = []
    verify_checkpoint(ours, on_progress=lambda done, total: told.append((done, total)), max_workers=3)
    total = sum(path.stat().st_size for path in [*shards(ours), ours / "meta.pt"])
    assert [each[1] for each in told] == [total] * len(told)
    assert [each[0] for each in told] == sorted(each[0] for each in told)
    assert told[-1] == (total, total)


def test_what_progress_raises_ends_it(ours: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_checkpoint(ours, on_progress=stop, max_workers=3)


def test_unknown_level_is_refused(ours: Path) -> None:
    with pytest.raises(ValueError, match="level must be 'size' or 'digest', got 'fast'"):
        verify_checkpoint(ours, level="fast")  # type: ignore[arg-type]


# ---- any single fault ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ours(tmp_path_factory.mktemp("pristine") / "step=7.ckpt")


@pytest.fixture
def copied(pristine: Path, tmp_path: Path) -> Callable[[], Path]:
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(pristine, tmp_path / f"{next(numbers)}"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_byte_counts(copied: Callable[[], Path]) -> None:
    folder = copied()
    for name in names_in(folder):
        path = folder / name
        data = path.read_bytes()
        for position in range(0, len(data), 5):  # test_manifest and test_safe_pickle take every bit
            flip(path, position, position % 8)
            report = verify_checkpoint(folder, **GOOD)
            assert name in {problem.file for problem in report.problems}, (name, position)
            path.write_bytes(data)
    assert verify_checkpoint(folder, **GOOD).valid


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_flipped_bit_is_noticed(copied: Callable[[], Path], data: st.DataObject) -> None:
    folder = copied()
    path = folder / data.draw(st.sampled_from(names_in(folder)))
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7)))
    assert not verify_checkpoint(folder, **GOOD).valid


@pytest.mark.parametrize("level", ["size", "digest"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_truncation_or_addition_is_noticed(copied: Callable[[], Path], level: Any, data: st.DataObject) -> None:
    folder = copied()
    path = folder / data.draw(st.sampled_from(names_in(folder)))
    content = path.read_bytes()
    added = data.draw(st.binary(min_size=1, max_size=10))
    length = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(data.draw(st.sampled_from([content[:length], content + added])))
    report = verify_checkpoint(folder, level=level, **GOOD)
    assert path.name in {problem.file for problem in report.problems}


@pytest.mark.parametrize("level", ["size", "digest"])
def test_deletion_of_any_file_is_noticed(copied: Callable[[], Path], level: Any) -> None:
    folder = copied()
    for name in names_in(folder):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        assert found(verify_checkpoint(folder, level=level)) == [(name, "missing")]
        (folder / name).write_bytes(data)


def test_swap_of_any_two_files_is_noticed(copied: Callable[[], Path]) -> None:
    folder = copied()
    for one, other in itertools.combinations(names_in(folder), 2):
        content = (folder / one).read_bytes(), (folder / other).read_bytes()
        assert content[0] != content[1]
        (folder / one).write_bytes(content[1])
        (folder / other).write_bytes(content[0])
        assert {one, other} <= {problem.file for problem in verify_checkpoint(folder).problems}
        (folder / one).write_bytes(content[0])
        (folder / other).write_bytes(content[1])


def test_files_of_another_checkpoint_are_noticed(copied: Callable[[], Path], tmp_path: Path) -> None:
    other = save_ours(tmp_path / "other", step=8)
    for name in [path.name for path in shards(other)[:2]]:
        folder = copied()
        shutil.copyfile(other / name, folder / name)
        assert (name, "wrong digest") in found(verify_checkpoint(folder))


# ---- what a problem says ---------------------------------------------------------------------------------------------


def test_problem_says_file_expected_and_found(ours: Path) -> None:
    shard = shards(ours)[0]
    before = digest_file(shard)
    flip(shard, 100)
    report = verify_checkpoint(ours)
    after = digest_file(shard)
    assert report.problems == (Problem(shard.name, "wrong digest", before.xxh3_128, after.xxh3_128),)
    assert str(report) == (
        f"{ours}: NOT valid, 1 problem(s), step 7, 5 file(s), {report.num_bytes / 1e3:.3g} kB, checked by digest\n"
        f"  {shard.name}: wrong digest, expected {before.xxh3_128}, found {after.xxh3_128}"
    )
    shard.write_bytes(b"abc")
    assert verify_checkpoint(ours).problems == (Problem(shard.name, "wrong size", before.num_bytes, 3),)


def test_all_that_is_wrong_is_told_at_once(ours: Path) -> None:
    one, other = shards(ours)[:2]
    one.unlink()
    flip(other, 5)
    flip(ours / "meta.pt", 200)
    assert found(verify_checkpoint(ours, max_workers=4)) == [
        (one.name, "missing"),
        (other.name, "wrong digest"),
        ("meta.pt", "wrong digest"),
    ]


def test_unpublished_checkpoint_says_so(ours: Path) -> None:
    (ours / ".metadata").unlink()
    report = verify_checkpoint(ours)
    assert found(report) == [(".metadata", "missing")]
    assert "not published" in str(report)
    assert report.step == 7


@pytest.mark.parametrize("kind", ["nothing", "an empty folder"])
def test_no_checkpoint_at_all_is_not_valid(kind: str, tmp_path: Path) -> None:
    if kind == "an empty folder":
        (tmp_path / "x").mkdir()
    report = verify_checkpoint(tmp_path / "x")
    assert found(report) == [(".metadata", "missing, as is all else")]
    assert report.step is None


def test_manifest_that_is_damaged_or_newer_is_a_problem(ours: Path) -> None:
    path = ours / "manifest.json"
    path.write_bytes(path.read_bytes()[:-5])
    assert found(verify_checkpoint(ours)) == [("manifest.json", "damaged")]
    path.write_bytes(spelt({"format_version": 9}))
    (problem,) = verify_checkpoint(ours).problems
    assert "format version 9" in str(problem)


def test_shard_that_the_manifest_does_not_name_is_a_problem(ours: Path) -> None:
    shard = shards(ours)[0]
    write_manifest(ours, change={shard.name: None})
    assert found(verify_checkpoint(ours)) == [(shard.name, "not in the manifest, but in .metadata")]
    write_manifest(ours, change={".metadata": None})
    assert found(verify_checkpoint(ours)) == [(".metadata", "not in the manifest")]


def test_shard_that_is_too_short_for_metadata_is_a_problem(ours: Path) -> None:
    shard = shards(ours)[0]
    shard.write_bytes(b"abc")
    write_manifest(ours)
    assert found(verify_checkpoint(ours)) == [(shard.name, "shorter in the manifest than in .metadata")]


def test_file_that_the_manifest_names_elsewhere_is_never_touched(ours: Path) -> None:
    (ours.parent / "secret").write_bytes(b"secret")
    document = Manifest.from_json((ours / "manifest.json").read_bytes())
    with pytest.raises(ValueError, match=r"\.\./secret"):
        Manifest(**vars(document) | {"files": {"../secret": FileRecord(6, "0" * 32)}})
    evil = pickle.loads((ours / ".metadata").read_bytes())
    for info in evil.storage_data.values():
        info.relative_path = "../secret"
    (ours / ".metadata").write_bytes(pickle.dumps(evil))
    write_manifest(ours)
    store = RemoteStore(ours)
    report = verify_checkpoint(store)
    assert found(report) == [(".metadata", "unsafe")]
    assert "'../secret'" in str(report)
    assert not any("secret" in name for _, name in store.calls)


def test_planted_code_is_a_problem_and_does_not_run(ours: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"x": Calls(os.system, f"touch {mark}")}, ours / "meta.pt")
    write_manifest(ours)
    assert [str(each) for each in verify_checkpoint(ours).problems] == ["meta.pt: unsafe, found posix.system"]
    (ours / ".metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch {mark}")))
    write_manifest(ours)
    report = verify_checkpoint(ours)
    assert found(report)[0] == (".metadata", "unsafe")
    assert "posix.system" in str(report.problems[0])
    assert not mark.exists()


def test_users_types_are_told_and_no_problem(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "x", objects={"hyper_parameters": Settings()})
    report = verify_checkpoint(folder)
    assert report.valid
    assert "Settings: a load needs torch.serialization.add_safe_globals or weights_only=False" in report.notes[0]
    assert verify_checkpoint(folder, weights_only=False).notes == ()
    with torch.serialization.safe_globals([Settings]):
        assert verify_checkpoint(folder).notes == ()


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04"])
def test_meta_that_cannot_be_opened_is_a_problem(content: bytes, ours: Path) -> None:
    (ours / "meta.pt").write_bytes(content)
    write_manifest(ours)
    assert found(verify_checkpoint(ours)) == [("meta.pt", "damaged")]
    assert verify_checkpoint(ours, level="size").valid


def test_metadata_that_is_too_large_is_not_read(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_air.checkpoint.verify.MAX_METADATA_BYTES", 100)
    store = RemoteStore(ours)
    assert found(verify_checkpoint(store)) == [(".metadata", "too large to be one")]
    assert ("read", ".metadata") not in store.calls


# ---- of others -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["size", "digest"])
def test_stock_checkpoint_is_checked_as_far_as_possible(level: Any, tmp_path: Path) -> None:
    folder = save_stock(tmp_path / "epoch=0-step=40.ckpt")
    torch.save({"epoch": 0}, folder / "meta.pt")
    report = verify_checkpoint(folder, level=level)
    assert report.valid
    assert report.step == 40
    assert "its content could not be verified" in report.notes[0]
    shard = shards(folder)[0]
    num_bytes = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    assert verify_checkpoint(folder, level=level).problems == (
        Problem(shard.name, "too short", num_bytes, num_bytes - 1),
    )
    shard.unlink()
    assert found(verify_checkpoint(folder, level=level)) == [(shard.name, "missing")]


def test_stock_checkpoint_without_objects_is_valid(tmp_path: Path) -> None:
    assert verify_checkpoint(save_stock(tmp_path / "x")).valid
    assert verify_checkpoint(RemoteStore(save_stock(tmp_path / "y"))).valid


def test_broken_objects_of_a_stock_checkpoint_are_a_problem(tmp_path: Path) -> None:
    folder = save_stock(tmp_path / "x")
    torch.save({"epoch": 0}, folder / "meta.pt")
    (folder / "meta.pt").write_bytes((folder / "meta.pt").read_bytes()[:-30])
    assert found(verify_checkpoint(folder)) == [("meta.pt", "damaged")]


@pytest.mark.parametrize("is_remote", [False, True])
def test_single_file_is_opened(is_remote: bool, tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(3)}, "global_step": 3}, tmp_path / "epoch=1-step=3.ckpt")

    def verify() -> CheckpointReport:
        if is_remote:
            return verify_checkpoint(RemoteStore(tmp_path), name="epoch=1-step=3.ckpt")
        return verify_checkpoint(tmp_path / "epoch=1-step=3.ckpt")

    report = verify()
    assert report.valid
    assert report.step == 3
    assert "could not be verified" in report.notes[0]
    path = tmp_path / "epoch=1-step=3.ckpt"
    path.write_bytes(path.read_bytes()[:-1])
    assert found(verify()) == [("epoch=1-step=3.ckpt", "damaged")]


def test_single_file_of_an_old_format_is_valid_for_those_who_trust_it(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert found(verify_checkpoint(path)) == [("old.ckpt", "unsafe")]
    assert verify_checkpoint(path, weights_only=False).valid


def test_planted_code_in_a_single_file_is_a_problem(tmp_path: Path) -> None:
    torch.save({"x": Calls(os.system, f"touch {tmp_path}/mark")}, tmp_path / "a.ckpt")
    assert [str(each) for each in verify_checkpoint(tmp_path / "a.ckpt").problems] == [
        "a.ckpt: unsafe, found posix.system"
    ]
    assert not (tmp_path / "mark").exists()


# ---- pointers --------------------------------------------------------------------------------------------------------


def test_pointer_is_followed(ours: Path) -> None:
    write_pointer(LocalStore(ours.parent), "last.ckpt", ours.name)
    report = verify_checkpoint(ours.parent / "last.ckpt")
    assert report.valid
    assert report.path == str(ours)


@pytest.mark.parametrize("content", [b'{"lightning_air_pointer": "none"}', b'{"lightning_air_pointer": "../x"}', b"{"])
def test_pointer_to_nothing_is_a_problem(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    report = verify_checkpoint(tmp_path / "last.ckpt")
    assert found(report) == [("last.ckpt", "leads to no checkpoint")]


# ---- stores that fail ------------------------------------------------------------------------------------------------


def failing(what: str, times: int, error: type[OSError] | int) -> Callable[[str, str], None]:
    left = itertools.repeat(None, times)

    def before(asked: str, name: str) -> None:
        if asked == what and next(left, "done") is None:
            raise error(name) if isinstance(error, type) else OSError(error, os.strerror(error), name)

    return before


@pytest.fixture
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(Patience):
        def __init__(self, deadline_seconds: float, **options: Any) -> None:
            super().__init__(deadline_seconds, **options | {"sleep": lambda *_: None})

    for module in ("reading", "verify", "latest", "transfer"):
        monkeypatch.setattr(f"lightning_air.checkpoint.{module}.Patience", Hasty)


@pytest.mark.usefixtures("_quick_retries")
@pytest.mark.parametrize("what", ["num_bytes", "read", "get"])
@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, errno.EIO, errno.EBUSY])
def test_passing_failure_of_a_remote_store_is_tried_again(what: str, error: Any, ours: Path) -> None:
    assert verify_checkpoint(RemoteStore(ours, failing(what, 3, error))).valid


@pytest.mark.parametrize("what", ["num_bytes", "read", "get"])
def test_remote_store_that_refuses_says_nothing_about_the_checkpoint(what: str, ours: Path) -> None:
    with pytest.raises(PermissionError):
        verify_checkpoint(RemoteStore(ours, failing(what, 100, errno.EACCES)))


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "meta.pt"])
def test_unreadable_file_of_this_machine_is_a_problem(name: str, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, *_: Any, **__: Any) -> Any:
        if self.name == name:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return real(self, *_, **__)

    real = Path.open
    monkeypatch.setattr(Path, "open", fail)
    report = verify_checkpoint(ours, max_workers=2)
    assert (name, "cannot be read") in found(report)
    assert "Input/output error" in str(report)


def test_bad_transfer_is_told_from_a_bad_file(ours: Path) -> None:
    store = RemoteStore(ours)
    spoilt: set[str] = set()

    def spoil(name: str, target: Path) -> None:
        if name not in spoilt:
            spoilt.add(name)
            flip(target, 50)

    store.spoil_get = spoil
    assert verify_checkpoint(store).valid
    assert len(spoilt) == 4


def test_file_that_is_bad_in_the_store_is_a_problem(ours: Path) -> None:
    flip(shards(ours)[0], 50)
    assert found(verify_checkpoint(RemoteStore(ours))) == [(shards(ours)[0].name, "wrong digest")]


def test_file_that_is_not_to_be_seen_yet_is_waited_for(ours: Path) -> None:
    hidden = shards(ours)[0]
    data = hidden.read_bytes()
    hidden.unlink()
    asked = 0

    def before(what: str, name: str) -> None:
        nonlocal asked
        if what == "num_bytes" and name == hidden.name:
            asked += 1
            if asked == 2:
                hidden.write_bytes(data)

    assert verify_checkpoint(RemoteStore(ours, before), level="size", settle_seconds=60).valid
    hidden.unlink()
    report = verify_checkpoint(RemoteStore(ours), level="size", settle_seconds=0)
    assert found(report) == [(hidden.name, "missing")]


def test_staging_disk_that_is_full_says_nothing_about_the_checkpoint(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = runtime.StagingArea(path=ours.parent / "staging", free_bytes=100)
    monkeypatch.setattr(reading, "staging_area", lambda _: area)
    with pytest.raises(OSError, match=r"has 100 bytes left, .* name another staging_dir"):
        verify_checkpoint(RemoteStore(ours))


def test_no_more_files_are_staged_than_fit(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(path.stat().st_size for path in ours.iterdir())
    area = runtime.StagingArea(path=ours.parent / "staging", free_bytes=2 * largest)
    for module in (reading, scratch):
        monkeypatch.setattr(module, "staging_area", lambda _: area)
    store = RemoteStore(ours)
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, len(list(next(area.path.iterdir()).iterdir())))

    store.spoil_get = count
    assert verify_checkpoint(store, max_workers=8).valid
    assert 1 <= most <= 2


def test_threads_end_with_the_call(ours: Path) -> None:
    before = threading.active_count()
    verify_checkpoint(RemoteStore(ours), max_workers=8)
    with pytest.raises(PermissionError):
        verify_checkpoint(RemoteStore(ours, failing("get", 100, errno.EACCES)), max_workers=8)
    assert threading.active_count() == before


# ---- the newest ------------------------------------------------------------------------------------------------------


def several(folder: Path) -> Path:
    """Three checkpoints; step 30 was saved last but one, as a run that went back leaves it."""
    for step, created in ((10, 100.0), (30, 200.0), (20, 300.0)):
        save_ours(folder / f"step={step}.ckpt", step=step, created_seconds=created)
    return folder


@pytest.mark.parametrize("make", [LocalStore, RemoteStore])
@pytest.mark.parametrize("level", ["size", "digest"])
def test_newest_is_what_was_saved_last(make: Any, level: Any, tmp_path: Path) -> None:
    store = make(several(tmp_path))
    assert latest_checkpoint(store, level=level) == f"{store.root}/step=20.ckpt"
    assert [candidate.step for candidate in list_checkpoints(store)] == [20, 30, 10]


def test_file_times_do_not_count_where_there_is_a_manifest(tmp_path: Path) -> None:
    several(tmp_path)
    os.utime(tmp_path / "step=10.ckpt" / ".metadata", (5e9, 5e9))
    os.utime(tmp_path / "step=10.ckpt", (5e9, 5e9))
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step=20.ckpt")


def test_broken_ones_are_skipped_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    several(tmp_path)
    shard = shards(tmp_path / "step=20.ckpt")[0]
    shard.write_bytes(b"x")
    (tmp_path / "step=30.ckpt" / ".metadata").unlink()  # never published, so nothing to tell
    skipped: list[CheckpointReport] = []
    assert latest_checkpoint(tmp_path, on_skip=skipped.append) == str(tmp_path / "step=10.ckpt")
    assert [(report.path, found(report)) for report in skipped] == [
        (str(tmp_path / "step=20.ckpt"), [(shard.name, "wrong size")])
    ]
    with caplog.at_level(logging.WARNING):
        latest_checkpoint(tmp_path)
    assert "step=20.ckpt: NOT valid" in caplog.text
    assert shard.name in caplog.text


def test_digest_level_skips_what_size_level_cannot_tell(tmp_path: Path) -> None:
    several(tmp_path)
    flip(shards(tmp_path / "step=20.ckpt")[0], 99)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step=20.ckpt")
    assert latest_checkpoint(tmp_path, level="digest", on_skip=lambda _: None) == str(tmp_path / "step=30.ckpt")


def test_size_level_downloads_nothing_and_looks_no_further_than_needed(tmp_path: Path) -> None:
    store = RemoteStore(several(tmp_path))
    latest_checkpoint(store)
    assert not [name for what, name in store.calls if what == "get"]
    assert not [
        name for what, name in store.calls if what == "num_bytes" and ".distcp" in name and "step=20" not in name
    ]


@pytest.mark.parametrize("kind", ["nothing", "an empty folder", "other things", "unpublished"])
def test_none_is_found_where_there_is_none(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if kind != "nothing":
        folder.mkdir()
    if kind == "other things":
        (folder / "lightning_logs").mkdir()
        (folder / "lightning_logs" / "metrics.csv").write_bytes(b"a")
        (folder / "config.yaml").write_bytes(b"a")
    if kind == "unpublished":
        (save_ours(folder / "x") / ".metadata").unlink()
    assert latest_checkpoint(folder, on_skip=lambda _: pytest.fail("nothing to tell")) is None
    assert [candidate.has_metadata for candidate in list_checkpoints(folder)] == (
        [False] if kind == "unpublished" else []
    )


def test_checkpoint_that_no_listing_shows_is_found_through_the_pointer(tmp_path: Path) -> None:
    store = RemoteStore(several(tmp_path))
    write_pointer(store, "last.ckpt", "step=20.ckpt")
    store.unlisted = {"step=20.ckpt", "last.ckpt", "step=20.ckpt/.metadata", "step=20.ckpt/manifest.json"}
    assert latest_checkpoint(store) == f"{store.root}/step=20.ckpt"


def test_broken_pointer_hides_nothing(tmp_path: Path) -> None:
    several(tmp_path)
    for content in (b"{", b'{"lightning_air_pointer": "../x"}', b'{"lightning_air_pointer": "gone.ckpt"}'):
        (tmp_path / "last.ckpt").write_bytes(content)
        assert latest_checkpoint(tmp_path) == str(tmp_path / "step=20.ckpt")
        assert len(list_checkpoints(tmp_path)) == 3


def test_stock_checkpoints_are_ordered_by_time_then_step(tmp_path: Path) -> None:
    for step, seconds in ((5, 300.0), (6, 100.0), (7, 100.0)):
        folder = save_stock(tmp_path / f"step={step}.ckpt")
        for path in folder.iterdir():
            os.utime(path, (seconds, seconds))
    torch.save({"w": 1}, tmp_path / "step=8.ckpt")
    os.utime(tmp_path / "step=8.ckpt", (200.0, 200.0))
    assert [candidate.step for candidate in list_checkpoints(tmp_path)] == [5, 8, 7, 6]
    assert [candidate.is_file for candidate in list_checkpoints(tmp_path)] == [False, True, False, False]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step=5.ckpt")


def test_store_without_times_leaves_the_step(tmp_path: Path) -> None:
    for step in (9, 10):
        save_stock(tmp_path / f"step={step}.ckpt")
    store = RemoteStore(tmp_path)
    assert latest_checkpoint(store) == f"{store.root}/step=10.ckpt"


def test_truncated_single_file_is_skipped_also_by_size_level(tmp_path: Path) -> None:
    for step, seconds in ((1, 100.0), (2, 200.0)):
        path = tmp_path / f"step={step}.ckpt"
        torch.save({"w": torch.ones(3)}, path)
        if step == 2:
            path.write_bytes(path.read_bytes()[:500])
        os.utime(path, (seconds, seconds))
    for store in (LocalStore(tmp_path), RemoteStore(tmp_path)):
        assert latest_checkpoint(store, on_skip=lambda _: None) == f"{store.root}/step=1.ckpt"


def test_manifest_that_cannot_be_read_does_not_end_the_search(tmp_path: Path) -> None:
    several(tmp_path)
    (tmp_path / "step=20.ckpt" / "manifest.json").write_bytes(b"{")
    skipped: list[CheckpointReport] = []
    assert latest_checkpoint(tmp_path, on_skip=skipped.append) == str(tmp_path / "step=30.ckpt")
    assert [found(report) for report in skipped] == [[("manifest.json", "damaged")]]
    broken = next(each for each in list_checkpoints(tmp_path) if each.name == "step=20.ckpt")
    assert broken.manifest is None
    assert broken.has_metadata


def test_place_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        latest_checkpoint(RemoteStore(several(tmp_path), failing("list", 1, errno.EACCES)))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_newest_valid_one_is_found_whatever_is_broken(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = several(tmp_path_factory.mktemp("run"))
    order = ["step=20.ckpt", "step=30.ckpt", "step=10.ckpt"]
    broken = data.draw(st.sets(st.sampled_from(order)))
    assume(broken)
    for name in broken:
        path = folder / name / data.draw(st.sampled_from(names_in(folder / name)))
        change: Any = data.draw(st.sampled_from([Path.unlink, flip_somewhere]))
        change(path)
    expected = next((str(folder / name) for name in order if name not in broken), None)
    assert latest_checkpoint(folder, level="digest", on_skip=lambda _: None) == expected


def flip_somewhere(path: Path) -> None:
    flip(path, path.stat().st_size // 2, 3)
