"""Every test runs in a directory of its own, and fails if it leaves anything behind."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.kit import guards
from tests.kit.expected_warnings import EXPECTED_WARNINGS
from tests.kit.long_grid import is_long
from tests.kit.nodes import Namespace, namespaces_unavailable, network_namespaces

# A busy machine is no fault of an example's. `make test` tries the same examples each time, `make soak` others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("soak", deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make soak` what the large grids have too much of."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def guarded_root() -> Path:
    """Where no test may write: the repository."""
    return Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _private_directory(tmp_path: Path) -> Iterator[None]:
    # Beside tmp_path, not below it: a test may list what it has made there.
    temporary_directory = tmp_path.with_name(f"{tmp_path.name}-tmp")
    temporary_directory.mkdir()
    with guards.private_directory(tmp_path, temporary_directory):
        yield


@pytest.fixture(autouse=True)
def _no_leaked_files(_private_directory: None, guarded_root: Path) -> Iterator[None]:
    with guards.no_leaked_files(guarded_root):
        yield


@pytest.fixture(autouse=True)
def _no_leaked_environment(_private_directory: None) -> Iterator[None]:
    with guards.no_leaked_environment():
        yield


@pytest.fixture(autouse=True)
def _no_leaked_process_group(_private_directory: None) -> Iterator[None]:
    with guards.no_leaked_process_group():
        yield


@pytest.fixture(autouse=True)
def _no_leaked_threads(_private_directory: None) -> Iterator[None]:
    with guards.no_leaked_threads():
        yield


@pytest.fixture(autouse=True)
def _no_leaked_processes(_private_directory: None) -> Iterator[None]:
    with guards.no_leaked_processes():
        yield


@pytest.fixture
def two_networks() -> Iterator[list[Namespace]]:
    """Two nodes' networks, for `run_ranks(..., nodes=2, namespaces=two_networks)`; skips where there are none."""
    reason = namespaces_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with network_namespaces(2) as namespaces:
        yield namespaces


def pytest_configure(config: pytest.Config) -> None:
    """Let the known noise of our dependencies pass, and have none of them report its use."""
    for message in EXPECTED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    # A shell has commands in the background (`make test &`) ignore Ctrl-C, and they leave that to what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import while the first tests run, if any test module uses it."""
    if "tests.kit.ranks" in sys.modules and session.items and not session.config.option.collectonly:
        from tests.kit.fork_server import start_fork_server

        start_fork_server()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU that torch can use")
