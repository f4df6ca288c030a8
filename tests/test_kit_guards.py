"""A test that leaves something behind fails, and the next one starts clean."""

import contextlib
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import conftest
from tests.kit import guards

pytest_plugins = ["pytester"]

_REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("is_daemon", [False, True])
def test_a_thread_that_still_runs_is_a_leak(is_daemon: bool) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="poller", daemon=is_daemon)
    with pytest.raises(guards.LeakError, match="poller"), guards.no_leaked_threads(grace_seconds=0.05):
        thread.start()
    stop.set()
    thread.join()


def test_a_thread_that_is_ending_is_no_leak() -> None:
    stop = threading.Event()
    with guards.no_leaked_threads(grace_seconds=10.0):
        threading.Thread(target=stop.wait, args=(0.1,)).start()


def test_a_thread_of_a_known_library_is_no_leak() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="tqdm_monitor")
    with guards.no_leaked_threads(grace_seconds=0.0):
        thread.start()
    stop.set()
    thread.join()


def test_a_process_group_is_a_leak_and_is_destroyed() -> None:
    with pytest.raises(guards.LeakError, match="destroy_process_group"), guards.no_leaked_process_group():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    assert not dist.is_initialized()


def test_environment_variables_are_leaks_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "old")
    monkeypatch.setenv("REMOVED", "old")
    before = dict(os.environ)
    changes = r"ADDED: None -> 'new', CHANGED: 'old' -> 'new', REMOVED: 'old' -> None"
    with pytest.raises(guards.LeakError, match=changes), guards.no_leaked_environment():
        _change_environment()
    assert dict(os.environ) == before


def _change_environment() -> None:
    os.environ.update(ADDED="new", CHANGED="new")
    del os.environ["REMOVED"]


def test_a_seed_is_put_back_without_complaint() -> None:
    with guards.no_leaked_environment():
        os.environ["PL_GLOBAL_SEED"] = "1"
    assert "PL_GLOBAL_SEED" not in os.environ


def test_files_that_are_made_changed_or_removed_are_leaks(tmp_path: Path) -> None:
    (tmp_path / "changed.ckpt").write_text("old")
    (tmp_path / "removed.ckpt").write_text("old")
    with pytest.raises(guards.LeakError) as caught, guards.no_leaked_files(tmp_path):
        _change_files(tmp_path)
    for name in ("lightning_logs", "lightning_logs/made.ckpt", "changed.ckpt", "removed.ckpt"):
        assert f"'{tmp_path}/{name}'" in str(caught.value)


def _change_files(directory: Path) -> None:
    (directory / "lightning_logs").mkdir()
    (directory / "lightning_logs" / "made.ckpt").touch()
    (directory / "changed.ckpt").write_text("newer")
    (directory / "removed.ckpt").unlink()


def test_caches_and_edited_sources_are_no_leaks(tmp_path: Path) -> None:
    with guards.no_leaked_files(tmp_path):
        (tmp_path / ".hypothesis" / "examples").mkdir(parents=True)
        (tmp_path / "edited.py").touch()


def test_a_child_process_is_a_leak_and_is_killed() -> None:
    with pytest.raises(guards.LeakError, match="sleep"), guards.no_leaked_processes(grace_seconds=0.2):
        child = subprocess.Popen(["sleep", "60"])
    child.wait()


def test_an_ended_child_that_nobody_waited_for_is_a_leak() -> None:
    with pytest.raises(guards.LeakError, match="child processes"), guards.no_leaked_processes(grace_seconds=0.2):
        child = subprocess.Popen(["true"])
    child.wait()


def test_each_test_starts_in_its_own_directory_and_has_its_own_temporary_one(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []
    with tempfile.NamedTemporaryFile() as file:
        assert Path(file.name).parent == Path(os.environ["TMPDIR"])
        assert Path(file.name).is_relative_to(tmp_path.parent)


_LEAKY_TESTS = """
import os, pathlib, subprocess, sys, threading, types
import pytest

@pytest.fixture(scope="session")
def guarded_root():
    root = pathlib.Path(__file__).with_name("guarded")
    root.mkdir()
    return root

def test_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_environment():
    os.environ["LEFT_BEHIND"] = "1"

def test_file(guarded_root):
    (guarded_root / "left.ckpt").touch()

def test_process():
    subprocess.Popen(["sleep", "60"])

def test_process_group(monkeypatch):
    sys.modules["torch.distributed"] = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        destroy_process_group=lambda: sys.modules.pop("torch.distributed"),
    )

def test_clean(tmp_path):
    assert "LEFT_BEHIND" not in os.environ
    pathlib.Path("made").touch()
    assert (tmp_path / "made").exists()
"""


def test_the_guards_are_around_every_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_REPOSITORY))
    pytester.makeconftest("from tests.kit import guards\n\nguards.GRACE_SECONDS = 0.1\n")
    pytester.makepyfile(_LEAKY_TESTS)
    outcome = pytester.runpytest_subprocess("-p", "tests.conftest", "-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=6, errors=5)
    for name, complaint in {
        "thread": "threads still run",
        "environment": "environment variables changed: LEFT_BEHIND",
        "file": "changed under *: ['*left.ckpt']",
        "process": "child processes are left: ['* (sleep)']",
        "process_group": "torch.distributed is still initialized",
    }.items():
        outcome.stdout.fnmatch_lines([f"*ERROR at teardown of test_{name} *", f"E * {complaint}*".replace("[", "[[]")])


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_test_is_skipped_where_there_is_no_gpu(
    has_gpu: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    request.node.add_marker("gpu")
    expectation = contextlib.nullcontext() if has_gpu else pytest.raises(pytest.skip.Exception, match="NVIDIA GPU")
    with expectation:
        conftest.pytest_runtest_setup(request.node)
