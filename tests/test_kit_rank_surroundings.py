"""A rank finds what a launcher would have set up, and nothing of the test session around it."""

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.kit.environment import reserved_port, without_launch_variables
from tests.kit.ranks import run_ranks, values


def _launch_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ.keys() - without_launch_variables(os.environ).keys()}


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test session itself runs under a launcher, with an MLflow server."""
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "NUM_NODES", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://example.com")


@pytest.mark.usefixtures("_launched")
def test_a_rank_finds_the_variables_of_distributed_and_no_other_launchers() -> None:
    first, second = values(run_ranks(_launch_variables, 2))
    assert {name: value for name, value in first.items() if name != "MASTER_PORT"} == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert second == first | {"RANK": "1", "LOCAL_RANK": "1"}
    assert 1024 < int(first["MASTER_PORT"]) < 32768


@pytest.mark.usefixtures("_launched")
def test_ranks_of_nodes_find_the_variables_of_a_node_command() -> None:
    ranks = values(run_ranks(_launch_variables, 4, nodes=2))
    assert {name: value for name, value in ranks[3].items() if name != "MASTER_PORT"} == {
        "NUM_NODES": "2",
        "NODE_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert [(rank["NODE_RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]


def _variable(name: str) -> str | None:
    return os.environ.get(name)


def test_variables_are_inherited_added_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SETTING", "inherited")
    assert values(run_ranks(_variable, 1, args=("OUR_SETTING",))) == ["inherited"]
    assert values(run_ranks(_variable, 1, args=("OUR_SETTING",), env={"OUR_SETTING": "set"})) == ["set"]
    by_rank = run_ranks(_variable, 2, args=("OUR_SETTING",), env=lambda rank: {"OUR_SETTING": f"of {rank}"})
    assert values(by_rank) == ["of 0", "of 1"]
    assert values(run_ranks(_variable, 1, args=("RANK",), env={"RANK": None})) == [None]


def _environment() -> dict[str, str]:
    return dict(os.environ)


def test_nothing_of_the_fork_servers_own_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "ours")
    [environment] = values(run_ranks(_environment, 1))
    assert "OPENBLAS_NUM_THREADS" not in environment
    assert environment["PYTHONPATH"] == "ours"
    assert environment["OMP_NUM_THREADS"] == "1"


@dataclass(frozen=True)
class _Preload:
    is_in_server: bool
    has_torch_and_lightning: bool
    failures: dict[str, str]
    threads: list[str]
    is_cuda_initialized: bool


def _preload() -> _Preload:
    preload = sys.modules["tests.kit.preload"]
    return _Preload(
        is_in_server=preload.server_pid == os.getppid(),
        has_torch_and_lightning=preload.modules_at_start >= {"torch", "lightning.pytorch"},
        failures=preload.failures,
        threads=preload.threads_at_start,
        is_cuda_initialized=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    )


def test_the_fork_server_has_imported_everything_and_has_one_thread() -> None:
    [preload] = values(run_ranks(_preload, 1))
    assert preload.is_in_server
    assert preload.has_torch_and_lightning
    assert [name for name in preload.failures if not name.startswith("lightning_air")] == []
    assert len(preload.threads) == 1, preload.threads
    assert not preload.is_cuda_initialized


def _cwd() -> tuple[str, list[str]]:
    return str(Path.cwd()), [path.name for path in Path().iterdir()]


def test_ranks_start_in_an_empty_directory_that_is_removed() -> None:
    (cwd, content), (other_cwd, _) = values(run_ranks(_cwd, 2))
    assert cwd == other_cwd
    assert content == []
    assert not Path(cwd).exists()


def test_ranks_start_where_the_test_wants(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    assert values(run_ranks(_cwd, 1, cwd=tmp_path)) == [(str(tmp_path), ["here"])]


def _print_everywhere() -> None:
    print("python")  # noqa: T201
    sys.stderr.write("error\n")
    os.write(2, b"descriptor\n")
    subprocess.run(["echo", "child"], check=True)


def test_output_of_every_kind_comes_back_in_order() -> None:
    assert [result.output for result in run_ranks(_print_everywhere, 2)] == ["python\nerror\ndescriptor\nchild\n"] * 2


def _chance() -> tuple[float, float]:
    return random.random(), float(np.random.random())  # noqa: NPY002


def test_ranks_do_not_share_a_seed() -> None:
    (python, numpy), (other_python, other_numpy) = values(run_ranks(_chance, 2))
    assert python != other_python
    assert numpy != other_numpy


def _defaults() -> tuple[str | None, int, list[str], str]:
    return (
        multiprocessing.get_start_method(allow_none=True),
        torch.get_num_threads(),
        sys.argv,
        tempfile.gettempdir(),
    )


def test_a_rank_has_the_defaults_of_a_process_of_its_own() -> None:
    [(start_method, num_threads, argv, temporary_directory)] = values(run_ranks(_defaults, 1))
    assert start_method is None
    assert num_threads == 1
    assert argv == ["rank"]
    assert temporary_directory == tempfile.gettempdir() == os.environ["TMPDIR"]


def _listen_on_master_port() -> int:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store.port


def test_a_rank_can_listen_on_the_port_that_the_session_holds() -> None:
    [port] = values(run_ranks(_listen_on_master_port, 1))
    assert port > 0


def test_two_reservations_give_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.environment._PORTS", range(31_990, 32_000))
    with reserved_port() as first, reserved_port() as second:
        assert first != second
