"""A real `mlflow server` on loopback, with a database of its own: one per test session, started when first asked for.

Ask for it in a fixture of session scope: then it runs before a test's guards look around, and is no leak of that test.
Starting it takes seconds; `start_mlflow_server` lets them pass while other tests run.

    @pytest.fixture(scope="session")
    def server() -> MlflowServer:
        return mlflow_server()
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_air.tracking.points import Point
from tests.kit.environment import current_environment, reserved_port

START_SECONDS = 90.0
"""On a busy machine it takes 10 s."""

_TEMPORARY_DIR = tempfile.gettempdir()  # a test's own is gone before the next test
_TERMINATED_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15) if sys.platform == 'linux' else None\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'mlflow', *sys.argv[1:]])"
)


@dataclass(frozen=True)
class MlflowServer:
    """A server that runs until the test session ends.

    Attributes:
        url: The tracking URI.
        database: The file that it stores everything in.
    """

    url: str
    database: Path

    def create_run(self) -> str:
        """Return the id of a new run in the default experiment."""
        answer = self.post("runs/create", {"experiment_id": "0", "start_time": int(time.time() * 1000)})
        return str(answer["run"]["info"]["run_id"])

    def delete_run(self, run_id: str) -> None:
        """Delete a run; it can be restored."""
        self.post("runs/delete", {"run_id": run_id})

    def restore_run(self, run_id: str) -> None:
        """Take the deletion back."""
        self.post("runs/restore", {"run_id": run_id})

    def points_of(self, run_id: str) -> list[Point]:
        """Return every point that is stored of a run, sorted, straight from the database."""
        query = "SELECT key, value, timestamp, step FROM metrics WHERE run_uuid = ?"
        return sorted(Point(*row) for row in self._rows(query, [run_id]))

    def tags_of(self, run_id: str) -> dict[str, str]:
        """Return the tags of a run."""
        return dict(self._rows("SELECT key, value FROM tags WHERE run_uuid = ?", [run_id]))

    def post(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call an endpoint of its REST API, such as "runs/create", and return the answer."""
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{endpoint}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _rows(self, query: str, values: Sequence[object]) -> list[Any]:
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query, values).fetchall()


@dataclass(frozen=True)
class _Starting:
    server: MlflowServer
    process: "subprocess.Popen[bytes]"
    output: Path


@functools.cache
def start_mlflow_server() -> _Starting:
    """Start the session's server, if it was not, and return at once."""
    resources = contextlib.ExitStack()
    atexit.register(resources.close)
    folder = Path(tempfile.mkdtemp(prefix="mlflow-server-", dir=_TEMPORARY_DIR))
    resources.callback(shutil.rmtree, folder, ignore_errors=True)
    port = resources.enter_context(reserved_port())
    server = MlflowServer(f"http://127.0.0.1:{port}", folder / "mlflow.db")
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--workers": "1",
        "--backend-store-uri": f"sqlite:///{server.database}",
        "--artifacts-destination": str(folder / "artifacts"),
    }
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true", "TMPDIR": _TEMPORARY_DIR}
    words = [word for pair in options.items() for word in pair]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _TERMINATED_WITH_PARENT, "server", *words],
            cwd=folder,
            env=current_environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    resources.callback(_end, process)
    return _Starting(server, process, folder / "output")


@functools.cache
def mlflow_server() -> MlflowServer:
    """Return the session's server, which answers.

    Raises:
        RuntimeError: If it does not start; with its output.
    """
    starting = start_mlflow_server()
    _wait_until_healthy(starting)
    return starting.server


def _wait_until_healthy(starting: _Starting) -> None:
    deadline_seconds = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{starting.server.url}/health", timeout=5):
                return
        except OSError:
            if starting.process.poll() is not None or time.monotonic() > deadline_seconds:
                output = starting.output.read_text(errors="replace")
                raise RuntimeError(f"mlflow server does not start:\n{output}") from None
        time.sleep(0.05)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the server with all its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
