"""Guards: a test that leaves something behind fails, and the next one starts clean.

Each guard is a context manager that compares what is there before and after its block, cleans up, and raises
`LeakError`. `tests/conftest.py` puts all of them around every test.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.kit.fork_server import server_pids
from tests.kit.processes import descendants

_Leak = TypeVar("_Leak")

GRACE_SECONDS = 2.0
"""How long threads and processes that were told to stop may take."""

_POLL_SECONDS = 0.01

_EXPECTED_THREADS = {
    "tqdm_monitor": "tqdm's monitor of progress bars serves all of a process' bars, and never ends",
}
"""Start of a thread's lower-case name, and why that thread may outlive a test."""

_SET_BY_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "_MLFLOW_TELEMETRY_SESSION_ID"}
"""Lightning, torch's compiler and MLflow set these when they are imported, in whichever test comes first."""

_SET_BY_HOSTS = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
"""`seed_everything` talks to data-loading workers through these; put back without complaint."""

_CACHES = {
    ".git",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".oldest",
    ".pytest_cache",
    ".ruff_cache",
    ".venv",
    "__pycache__",
}
# Someone may save source code while the tests run, or have their output in a file here; tests have no reason to.
_EDITED_SUFFIXES = {
    ".cfg",
    ".ini",
    ".lock",
    ".log",
    ".md",
    ".out",
    ".py",
    ".pyi",
    ".swp",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}


class LeakError(AssertionError):
    """A test left something behind."""


@contextlib.contextmanager
def private_directory(directory: Path, temporary_directory: Path) -> Iterator[None]:
    """Work in one directory, and have `tempfile` use the other."""
    cwd, tempdir, variable = Path.cwd(), tempfile.tempdir, os.environ.get("TMPDIR")
    os.chdir(directory)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary_directory)
    try:
        yield
    finally:
        os.chdir(cwd)
        tempfile.tempdir = tempdir
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable


@contextlib.contextmanager
def no_leaked_threads(grace_seconds: float | None = None) -> Iterator[None]:
    """Fail for threads, daemons included, that were started inside and still run.

    Args:
        grace_seconds: How long a thread that was told to stop may take; by default `GRACE_SECONDS`.
    """
    before = set(threading.enumerate())
    yield
    leaked = _wait_until_empty(
        lambda: [t for t in threading.enumerate() if t not in before and _is_leak(t)], grace_seconds
    )
    if leaked:
        raise LeakError(f"threads still run: {leaked}. Close what started them; wait for them to end.")


def _is_leak(thread: threading.Thread) -> bool:
    # Python invents a _DummyThread for a C++ thread (autograd's) that once called it, and never forgets it.
    is_foreign = isinstance(thread, threading._DummyThread)
    return not is_foreign and not thread.name.lower().startswith(tuple(_EXPECTED_THREADS))


@contextlib.contextmanager
def no_leaked_process_group() -> Iterator[None]:
    """Fail for a default process group of `torch.distributed` that was left initialized, and destroy it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        raise LeakError("torch.distributed is still initialized. Call destroy_process_group(), or use run_ranks.")


@contextlib.contextmanager
def no_leaked_environment() -> Iterator[None]:
    """Fail for environment variables that were added, changed or removed, and put them back."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    unguarded = {"PYTEST_CURRENT_TEST", *_SET_BY_IMPORTS}
    changed = {name for name in (before.keys() | after.keys()) - unguarded if before.get(name) != after.get(name)}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    leaked = sorted(changed - _SET_BY_HOSTS)
    if leaked:
        changes = ", ".join(f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in leaked)
        raise LeakError(f"environment variables changed: {changes}. Use monkeypatch.setenv.")


@contextlib.contextmanager
def no_leaked_files(root: Path) -> Iterator[None]:
    """Fail for files and directories under the root that were made, changed or removed; they stay as they are.

    Caches do not count, nor does source code, which someone may edit while the tests run.
    """
    before = dict(_files(root))
    yield
    after = dict(_files(root))
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        raise LeakError(
            f"changed under {root} while the test ran: {changed}. Write below tmp_path, where every test starts."
        )


def _files(directory: Path | str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each path below the directory with its time and size; for a directory, only that it is there."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name in _CACHES or os.path.splitext(entry.name)[1] in _EDITED_SUFFIXES:  # noqa: PTH122 - ten times faster
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield entry.path, (0, 0)
                yield from _files(entry.path)
            else:
                status = entry.stat(follow_symlinks=False)
                yield entry.path, (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            continue


@contextlib.contextmanager
def no_leaked_processes(grace_seconds: float | None = None) -> Iterator[None]:
    """Fail for processes that were started inside, by whatever descendant, and not waited for; and kill them.

    Args:
        grace_seconds: How long a process that was told to stop may take; by default `GRACE_SECONDS`.
    """
    before = descendants(os.getpid()).keys()
    yield

    def new() -> list[int]:
        multiprocessing.active_children()  # waits for those that have ended
        return [pid for pid in descendants(os.getpid()) if pid not in before and pid not in server_pids()]

    leaked = _wait_until_empty(new, grace_seconds)
    if leaked:
        names = descendants(os.getpid())
        for pid in leaked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        raise LeakError(f"child processes are left: {[f'{pid} ({names.get(pid)})' for pid in leaked]}. Wait for them.")


def _wait_until_empty(list_leaks: Callable[[], list[_Leak]], grace_seconds: float | None) -> list[_Leak]:
    deadline_seconds = time.monotonic() + (GRACE_SECONDS if grace_seconds is None else grace_seconds)
    while (leaks := list_leaks()) and time.monotonic() < deadline_seconds:
        time.sleep(_POLL_SECONDS)
    return leaks
