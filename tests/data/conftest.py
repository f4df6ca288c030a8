"""Workers of loaders get a short place for their sockets, whose paths may have 107 characters."""

import multiprocessing
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _short_socket_paths() -> Iterator[None]:
    # A test's own temporary directory has a longer name, and a socket that cannot be made is a batch that never comes.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="w-") as folder:
        config["tempdir"] = folder
        yield
        config["tempdir"] = before
