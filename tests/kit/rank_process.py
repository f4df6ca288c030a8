"""What one rank's process does around the test's function: environment, output, warnings, and the way back."""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

from tests.kit import points
from tests.kit.environment import Placement
from tests.kit.expected_warnings import EXPECTED_WARNINGS
from tests.kit.nodes import enter_namespace

READY: Final = "ready"
VALUE: Final = "value"
ERROR: Final = "error"
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """Everything that a rank's process is told, all of it plainly picklable."""

    placement: Placement
    call: bytes
    """Pickle of (function, arguments), opened late so that a failing import is reported like any other error."""
    environment: Mapping[str, str]
    cwd: str
    output_path: str
    group_pid: int
    """The process group to join; 0 to lead a new one."""
    namespace: str | None
    signals: Mapping[str, signal.Signals]
    backend: str | None
    timeout_seconds: float
    warnings_as_errors: bool


@dataclass(frozen=True)
class Message:
    """One message of a rank: its kind, its pickled content, and how long the function ran."""

    kind: str
    content: Any
    seconds: float = 0.0


def send(file_descriptor: int, message: Message) -> None:
    """Write a message, however large.

    Not `Connection.send`: its pickler sends tensors as handles of shared memory, which die with the rank.
    """
    payload = pickle.dumps(message)
    for part in (len(payload).to_bytes(_LENGTH_BYTES, "big"), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(file_descriptor, view) :]


def take_message(buffer: bytearray) -> bytes | None:
    """Remove the first whole message from the buffer and return its pickle; None while it is incomplete."""
    end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "big")
    if len(buffer) < max(end, _LENGTH_BYTES + 1):
        return None
    with memoryview(buffer) as view:
        payload = bytes(view[_LENGTH_BYTES:end])
    del buffer[:end]
    return payload


def main(task: RankTask, go: Connection, results: Connection) -> None:
    """Run one rank; the target of its process."""
    start_seconds = time.monotonic()
    try:
        _settle(task)
        function, arguments = pickle.loads(task.call)
        send(results.fileno(), Message(READY, None))
        go.recv()
        start_seconds = time.monotonic()
        value = _run(task, function, arguments)
        send(results.fileno(), Message(VALUE, value, time.monotonic() - start_seconds))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        seconds = time.monotonic() - start_seconds
        message = Message(ERROR, traceback.format_exc(), seconds) if code else Message(VALUE, None, seconds)
        send(results.fileno(), message)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it.
        code = 1
        send(results.fileno(), Message(ERROR, traceback.format_exc(), time.monotonic() - start_seconds))
    # The end that a process of its own would have: `multiprocessing` skips `atexit`.
    getattr(threading, "_shutdown")()  # noqa: B009 - private, and unknown to typeshed.
    atexit._run_exitfuncs()
    sys.exit(code)


def _run(task: RankTask, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    if not task.warnings_as_errors:
        with _process_group(task):
            return function(*arguments)
    failures = _record_background_failures()
    warnings.simplefilter("error")
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    with _process_group(task):
        value = function(*arguments)
    gc.collect()  # what is only garbage now may have been left open
    if failures:
        raise RuntimeError("the function returned, but a thread or a finalizer raised:\n" + "\n".join(failures))
    return value


def _settle(task: RankTask) -> None:
    """Make the forked process look like one that a launcher started."""
    if task.namespace is not None:
        enter_namespace(task.namespace)
    os.setpgid(0, task.group_pid)
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _redirect_output(task.output_path)
    faulthandler.enable(file=2, all_threads=True)
    os.chdir(task.cwd)
    os.environ.clear()
    os.environ.update({**_import_variables(), **task.environment})
    tempfile.tempdir = None
    sys.argv = ["rank"]
    # `multiprocessing` made "forkserver" the default here; a training process has the platform's.
    multiprocessing.set_start_method(None, force=True)
    points.arm(task.signals)
    _reset_libraries()


def _die_with_parent() -> None:
    """Have the kernel kill this rank and its descendants when the test session is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    sentinel = parent.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Line by line, so that a killed rank has said what it printed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _import_variables() -> dict[str, str]:
    preload = sys.modules.get("tests.kit.preload")
    added: dict[str, str] = getattr(preload, "added_environment", {})
    return {name: value for name, value in added.items() if "MLFLOW" not in name}


def _reset_libraries() -> None:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    # Forked ranks would all draw the same numbers, unlike processes of their own.
    np.random.seed()  # noqa: NPY002


def _record_background_failures() -> list[str]:
    """Collect what would only be printed: exceptions of threads and finalizers, which pytest makes failures too."""
    failures: list[str] = []

    def on_thread(arguments: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(arguments)
        name = arguments.thread.name if arguments.thread else "a thread"
        failures.append(f"{name}: {traceback.format_exception_only(arguments.exc_value)[-1].strip()}")

    def on_unraisable(arguments: "sys.UnraisableHookArgs") -> None:
        sys.__unraisablehook__(arguments)
        failures.append(f"{arguments.object!r}: {traceback.format_exception_only(arguments.exc_value)[-1].strip()}")

    threading.excepthook = on_thread
    sys.unraisablehook = on_unraisable
    return failures


@contextlib.contextmanager
def _process_group(task: RankTask) -> Iterator[None]:
    if task.backend is None:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(
        task.backend,
        rank=task.placement.global_rank,
        world_size=task.placement.world_size,
        timeout=timedelta(seconds=task.timeout_seconds),
    )
    # A rank that has nothing to do would be gone before the slowest has connected to it, and that one fails.
    dist.barrier()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
