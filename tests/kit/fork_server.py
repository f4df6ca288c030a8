"""One fork server per test session: it imports the heavy packages once, and every rank is forked from it."""

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from tests.kit.environment import without_launch_variables

# The server's socket lives here, whatever TMPDIR a test has: a test's own directory may be gone before the next test,
# and a socket's path may have no more than about 100 characters.
_SOCKET_DIR = tempfile.gettempdir()

_SERVER_ENVIRONMENT = {
    # A pool of threads started by an import would not survive the fork.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # Otherwise looking for a GPU initializes CUDA, which does not survive the fork either.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # MLflow reports its use from a thread.
    "DO_NOT_TRACK": "true",
}


@contextlib.contextmanager
def _server_surroundings() -> Iterator[None]:
    """Give the process that is started inside its environment, and give ours back afterwards."""
    environment = dict(os.environ)
    temporary_dir = tempfile.tempdir
    os.environ.update(without_launch_variables(environment), **_SERVER_ENVIRONMENT)
    for name in environment.keys() - without_launch_variables(environment).keys():
        del os.environ[name]
    # The server is not told our sys.path before it preloads.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["TMPDIR"] = tempfile.tempdir = _SOCKET_DIR
    try:
        yield
    finally:
        tempfile.tempdir = temporary_dir
        os.environ.clear()
        os.environ.update(environment)


def start_fork_server() -> ForkServerContext:
    """Start the fork server, if it does not run yet, and return the context whose processes it forks.

    Returns at once: the server imports while the caller goes on, and the first rank waits for it.
    """
    context = multiprocessing.get_context("forkserver")
    with _server_surroundings():
        context.set_forkserver_preload(["tests.kit.preload"])
        forkserver.ensure_running()
    return context


def server_pids() -> set[int]:
    """Return the processes that the fork server needs and that outlive every test."""
    pids = {
        getattr(forkserver, "_forkserver")._forkserver_pid,  # noqa: B009 - private, and unknown to typeshed.
        getattr(resource_tracker, "_resource_tracker")._pid,  # noqa: B009
    }
    return {pid for pid in pids if pid is not None}
