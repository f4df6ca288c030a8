"""A machine with GPUs of the test's making."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.nvml_stub import NvmlStub, compiler_missing, stub_in_use


@pytest.fixture(autouse=True)
def _sees_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[int], NvmlStub]]:
    """Call it with the number of GPUs that this process then has."""
    if reason := compiler_missing():
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(num_gpus: int) -> NvmlStub:
            return stack.enter_context(stub_in_use(tmp_path / "nvml", num_gpus))

        yield make
