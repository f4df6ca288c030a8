"""Every launcher's environment is told apart, completed, and refused where it contradicts itself."""

import ast
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_air
from lightning_air import runtime
from lightning_air.runtime import (
    JobRun,
    Launch,
    LaunchKind,
    Platform,
    detect_job_run,
    detect_launch,
    detect_platform,
    global_seed,
    staging_area,
)

Environ = dict[str, str]

MASTER = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29400"}


def torchrun_process(sizes: list[int], node: int, local: int, **changes: str) -> Environ:
    """What torchrun's agent gives to one process; `sizes` are the processes of each node."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(sum(sizes[:node]) + local),
        "WORLD_SIZE": str(sum(sizes)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(sizes[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(sizes)),
        **MASTER,
        **changes,
    }


def air_node(num_nodes: int, local_size: int, node: int, **changes: str) -> Environ:
    """What `databricks air run` gives to the one command of a node."""
    return {
        "NUM_NODES": str(num_nodes),
        "NODE_RANK": str(node),
        "WORLD_SIZE": str(num_nodes * local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MLFLOW_RUN_ID": "0123456789abcdef",
        "CODE_SOURCE_PATH": "/code",
        "HYPERPARAMETERS_PATH": "/code/parameters.yaml",
        **MASTER,
        **changes,
    }


def air_process(num_nodes: int, local_size: int, node: int, local: int, **changes: str) -> Environ:
    """What `@distributed` gives to one process."""
    return {
        "RANK": str(node * local_size + local),
        "WORLD_SIZE": str(num_nodes * local_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_size),
        "NODE_RANK": str(node),
        **MASTER,
        **changes,
    }


def slurm_task(sizes: list[int], node: int, local: int, **changes: str) -> Environ:
    """What srun gives to one task; `sizes` are the tasks of each node."""
    layout = ",".join(map(str, sizes))
    return {
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(sum(sizes)),
        "SLURM_NNODES": str(len(sizes)),
        "SLURM_PROCID": str(sum(sizes[:node]) + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_TASKS_PER_NODE": layout,
        "SLURM_STEP_TASKS_PER_NODE": layout,
        **changes,
    }


def lightning_local(local: int, **changes: str) -> Environ:
    """What Lightning's own launcher leaves in the parent (local 0) and gives to its children."""
    return {**MASTER, "NODE_RANK": "0", "LOCAL_RANK": str(local), "WORLD_SIZE": "4", **changes}


def without(environ: Environ, *names: str) -> Environ:
    return {name: value for name, value in environ.items() if name not in names}


def launch(kind: LaunchKind, **changes: Any) -> Launch:
    """A launch of one process that says nothing, but for `changes`."""
    fields: dict[str, Any] = {
        "node_rank": 0,
        "num_nodes": None,
        "local_rank": 0,
        "local_world_size": None,
        "global_rank": 0,
        "world_size": None,
        "master_address": None,
        "master_port": None,
        "starts_processes": False,
        "uses_agent_store": False,
        "restart_count": 0,
    }
    return Launch(kind=kind, **{**fields, **changes})


def shape(num_nodes: int | None, local_size: int | None, node: int, local: int, rank: int | None) -> dict[str, Any]:
    return {
        "num_nodes": num_nodes,
        "local_world_size": local_size,
        "node_rank": node,
        "local_rank": local,
        "global_rank": rank,
        "world_size": num_nodes * local_size if num_nodes and local_size else None,
    }


MET = {"master_address": "10.0.0.4", "master_port": 29400}
TORCHRUN_1_1 = launch("torchrun", **shape(2, 2, 1, 1, 3), **MET, uses_agent_store=True)
AIR_COMMAND_1 = launch("air-node", **shape(2, 8, 1, 0, 8), **MET, starts_processes=True)
AIR_PROCESS_1_3 = launch("air-process", **shape(2, 8, 1, 3, 11), **MET)
SLURM_1_1 = launch("slurm", **shape(2, 2, 1, 1, 3))
ALONE = launch("local", starts_processes=True)

LAUNCHES: dict[str, tuple[Environ, Launch]] = {
    # torchrun
    "torchrun": (torchrun_process([2, 2], 1, 1), TORCHRUN_1_1),
    "torchrun in SLURM": (slurm_task([1, 1], 0, 0) | torchrun_process([2, 2], 1, 1), TORCHRUN_1_1),
    "torchrun in an AIR command numbers nodes itself": (
        air_node(2, 8, 0) | torchrun_process([2, 2], 1, 1),
        TORCHRUN_1_1,
    ),
    "torchrun without GROUP_WORLD_SIZE": (without(torchrun_process([2, 2], 1, 1), "GROUP_WORLD_SIZE"), TORCHRUN_1_1),
    "torchrun, uneven nodes": (
        torchrun_process([3, 1], 1, 0),
        launch("torchrun", **shape(2, 1, 1, 0, 3) | {"world_size": 4}, **MET, uses_agent_store=True),
    ),
    "torchrun, second restart, no agent store": (
        torchrun_process([1], 0, 0, TORCHELASTIC_RESTART_COUNT="2", TORCHELASTIC_USE_AGENT_STORE="False"),
        launch("torchrun", **shape(1, 1, 0, 0, 0), **MET, restart_count=2),
    ),
    # AIR, one command per node
    "air-node before the local ranks": (air_node(2, 8, 1), AIR_COMMAND_1),
    "air-node, parent after the launch": (
        air_node(2, 8, 1, LOCAL_RANK="0"),
        launch("air-node", **shape(2, 8, 1, 0, 8), **MET),
    ),
    "air-node, child": (air_node(2, 8, 1, LOCAL_RANK="7"), launch("air-node", **shape(2, 8, 1, 7, 15), **MET)),
    "air-node after Lightning deleted WORLD_SIZE": (without(air_node(2, 8, 1), "WORLD_SIZE"), AIR_COMMAND_1),
    "air-node, empty variables are unset": (
        air_node(2, 8, 1, RANK="", LOCAL_RANK=" ", TORCHELASTIC_RUN_ID="", SLURM_NTASKS=""),
        AIR_COMMAND_1,
    ),
    "air-node, one GPU needs no address, RANK is of a LoRA": (
        without(air_node(1, 1, 0, RANK="16"), *MASTER),
        launch("air-node", **shape(1, 1, 0, 0, 0), starts_processes=True),
    ),
    # one process per GPU
    "air-process": (air_process(2, 8, 1, 3), AIR_PROCESS_1_3),
    "air-process inside an AIR command": (air_node(2, 8, 1) | air_process(2, 8, 1, 3), AIR_PROCESS_1_3),
    "air-process without NODE_RANK": (without(air_process(2, 8, 1, 3), "NODE_RANK"), AIR_PROCESS_1_3),
    "air-process without LOCAL_WORLD_SIZE": (
        without(air_process(2, 8, 1, 3), "LOCAL_WORLD_SIZE"),
        launch("air-process", **shape(None, None, 1, 3, 11) | {"world_size": 16}, **MET),
    ),
    "air-process without either": (
        without(air_process(2, 8, 1, 3), "LOCAL_WORLD_SIZE", "NODE_RANK"),
        launch("air-process", **shape(None, None, 0, 3, 11) | {"world_size": 16}, **MET),
    ),
    "air-process, uneven nodes": (
        without(air_process(1, 2, 0, 1, WORLD_SIZE="3"), "NODE_RANK"),
        launch("air-process", **shape(None, 2, 0, 1, 1) | {"world_size": 3}, **MET),
    ),
    "air-process of one": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        launch("air-process", world_size=1),
    ),
    "a launcher of its own inside SLURM": (slurm_task([1, 1], 1, 0) | air_process(2, 8, 1, 3), AIR_PROCESS_1_3),
    # SLURM
    "slurm": (slurm_task([2, 2], 1, 1), SLURM_1_1),
    "slurm, repeated layout": (slurm_task([2, 2], 1, 1, SLURM_STEP_TASKS_PER_NODE="2(x2)"), SLURM_1_1),
    "slurm, no layout": (
        without(slurm_task([2, 2], 1, 1), "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
        SLURM_1_1,
    ),
    "slurm, uneven layout": (
        slurm_task([2, 2, 1], 2, 0, SLURM_STEP_TASKS_PER_NODE="2(x2),1"),
        launch("slurm", **shape(3, 1, 2, 0, 4) | {"world_size": 5}),
    ),
    "slurm, uneven and no layout": (
        without(slurm_task([2, 1], 1, 0), "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
        launch("slurm", **shape(2, None, 1, 0, 2) | {"world_size": 3}),
    ),
    "slurm, the step has another layout than its job": (
        slurm_task([3, 1], 1, 0, SLURM_TASKS_PER_NODE="2(x2)"),
        launch("slurm", **shape(2, 1, 1, 0, 3) | {"world_size": 4}),
    ),
    "slurm, the layout is of a larger job": (
        without(slurm_task([2, 2], 1, 1, SLURM_TASKS_PER_NODE="8(x4)"), "SLURM_STEP_TASKS_PER_NODE"),
        SLURM_1_1,
    ),
    "slurm, ranks dealt out in turn": (
        slurm_task([2, 2], 1, 0, SLURM_PROCID="1"),
        launch("slurm", **shape(2, 2, 1, 0, 1)),
    ),
    "slurm, a step smaller than its job": (
        slurm_task([2], 0, 1, SLURM_NNODES="4", SLURM_TASKS_PER_NODE="2(x4)", SLURM_STEP_NUM_NODES="1"),
        launch("slurm", **shape(1, 2, 0, 1, 1)),
    ),
    "slurm with an address": (slurm_task([2, 2], 1, 1) | MASTER, launch("slurm", **shape(2, 2, 1, 1, 3), **MET)),
    "slurm whose ranks were exported by hand": (
        slurm_task([2, 2], 1, 1, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1"),
        SLURM_1_1,
    ),
    "slurm batch script of one task": (
        without(slurm_task([1], 0, 0), "SLURM_STEP_ID"),
        launch("slurm", **shape(1, 1, 0, 0, 0)),
    ),
    "slurm, interactive": (slurm_task([2, 2], 0, 0, SLURM_JOB_NAME="interactive"), ALONE),
    "slurm, shell": (slurm_task([2, 2], 0, 0, SLURM_JOB_NAME="bash"), ALONE),
    # one machine, Lightning's launcher
    "local": ({"PATH": "/usr/bin"}, ALONE),
    "local, leftover WORLD_SIZE": ({"WORLD_SIZE": "8"}, ALONE),
    "local, leftover world of one": ({"WORLD_SIZE": "1", "RANK": "0"}, ALONE),
    "local, a RANK that is none": ({"RANK": "low"}, ALONE),
    "local, NUM_NODES alone": ({"NUM_NODES": "2"}, ALONE),
    "local, parent after the launch": (lightning_local(0), launch("local", world_size=4, **MET)),
    "local, child": (lightning_local(2), launch("local", local_rank=2, global_rank=2, world_size=4, **MET)),
    "local, after Lightning deleted WORLD_SIZE": (
        without(lightning_local(2), "WORLD_SIZE"),
        launch("local", local_rank=2, global_rank=2, **MET),
    ),
    "local, forked child knows only the port": (
        {"LOCAL_RANK": "1", "MASTER_PORT": "29400", "WORLD_SIZE": "2"},
        launch("local", local_rank=1, global_rank=1, world_size=2, master_port=29400),
    ),
    "local, nodes started by hand": (
        {**MASTER, "NODE_RANK": "1"},
        launch("local", node_rank=1, global_rank=None, starts_processes=True, **MET),
    ),
    "local, child on the second node": (
        lightning_local(1, NODE_RANK="1"),
        launch("local", node_rank=1, local_rank=1, global_rank=None, world_size=4, **MET),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), LAUNCHES.values(), ids=LAUNCHES)
def test_launch(environ: Environ, expected: Launch) -> None:
    assert detect_launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "kind", "starts_processes"),
    [
        pytest.param({}, "notebook", True, id="nothing"),
        pytest.param({"LOCAL_RANK": "1"}, "notebook", False, id="forked child"),
        pytest.param(slurm_task([2], 0, 0, SLURM_JOB_NAME="bash"), "notebook", True, id="in an interactive job"),
        pytest.param(air_node(2, 8, 1), "air-node", True, id="AIR wins"),
        pytest.param(air_process(1, 2, 0, 1), "air-process", False, id="ranks win"),
        pytest.param(torchrun_process([2], 0, 1), "torchrun", False, id="torchrun wins"),
        pytest.param(slurm_task([2], 0, 1), "slurm", False, id="SLURM wins"),
    ],
)
def test_interactive_is_a_notebook_where_nothing_was_launched(
    environ: Environ, kind: LaunchKind, starts_processes: bool
) -> None:
    found = detect_launch(environ, interactive=True)
    assert (found.kind, found.starts_processes) == (kind, starts_processes)


REFUSALS: dict[str, tuple[Environ, list[str]]] = {
    "world is not nodes * local": (
        air_node(2, 8, 0, WORLD_SIZE="8"),
        ["NUM_NODES='2'", "LOCAL_WORLD_SIZE='8'", "WORLD_SIZE='8'", "2 nodes of 8 processes"],
    ),
    "the same, one process per GPU": (air_process(1, 8, 0, 0, NUM_NODES="2"), ["NUM_NODES='2'", "WORLD_SIZE='8'"]),
    "node rank too high": (air_node(2, 8, 2), ["NODE_RANK='2'", "NUM_NODES='2'"]),
    "node rank too high, torchrun": (torchrun_process([1, 1], 1, 0, GROUP_RANK="2"), ["GROUP_RANK='2'"]),
    "node rank too high, SLURM": (slurm_task([1, 1], 1, 0, SLURM_NODEID="2"), ["SLURM_NODEID='2'", "SLURM_NNODES='2'"]),
    "node rank missing": (without(air_node(2, 8, 1), "NODE_RANK"), ["NODE_RANK is missing", "NODE_RANK=''"]),
    "global rank too high": (air_process(1, 8, 0, 0, RANK="8"), ["RANK='8'", "WORLD_SIZE='8'"]),
    "global rank too high, SLURM": (slurm_task([2], 0, 1, SLURM_PROCID="2"), ["SLURM_PROCID='2'", "SLURM_NTASKS='2'"]),
    "local rank too high": (air_node(2, 8, 0, LOCAL_RANK="8"), ["LOCAL_RANK='8'", "LOCAL_WORLD_SIZE='8'"]),
    "local rank too high, Lightning": (lightning_local(4), ["LOCAL_RANK='4'", "WORLD_SIZE='4'"]),
    "global rank is another's": (
        air_process(2, 8, 1, 3, RANK="3"),
        ["RANK='3'", "NODE_RANK='1'", "LOCAL_RANK='3'", "global rank 11"],
    ),
    "global rank is another's, derived node": (
        without(air_process(2, 8, 1, 3, RANK="12"), "NODE_RANK"),
        ["RANK='12'", "LOCAL_RANK='3'", "LOCAL_WORLD_SIZE='8'"],
    ),
    "global rank is another's, torchrun": (torchrun_process([2, 2], 1, 1, RANK="2"), ["RANK='2'", "GROUP_RANK='1'"]),
    "a leftover RANK makes every local rank the first": (lightning_local(1, RANK="0"), ["RANK='0'", "LOCAL_RANK='1'"]),
    "a rank per node, not per process": (air_node(2, 8, 1, RANK="1"), ["LOCAL_RANK is missing", "RANK='1'"]),
    "half a launch": ({"RANK": "1", "WORLD_SIZE": "2", **MASTER}, ["LOCAL_RANK is missing", "WORLD_SIZE='2'"]),
    "world size missing": (without(air_process(1, 8, 0, 3), "WORLD_SIZE"), ["WORLD_SIZE is missing", "RANK='3'"]),
    "torchrun without RANK": (without(torchrun_process([2], 0, 1), "RANK"), ["RANK is missing", "LOCAL_RANK='1'"]),
    "SLURM without SLURM_PROCID": (without(slurm_task([2], 0, 1), "SLURM_PROCID"), ["SLURM_PROCID is missing"]),
    "SLURM without srun": (
        without(slurm_task([2, 2], 0, 0), "SLURM_STEP_ID"),
        ["SLURM_NTASKS='4'", "SLURM_STEP_ID=''", "`srun`", "interactive"],
    ),
    "no integer": (air_node(2, 8, 0, NUM_NODES="two"), ["NUM_NODES='two'", "whole number"]),
    "no integer, a float": (torchrun_process([1], 0, 0, WORLD_SIZE="1.0"), ["WORLD_SIZE='1.0'"]),
    "no integer, underscore": (slurm_task([1], 0, 0, SLURM_LOCALID="1_0"), ["SLURM_LOCALID='1_0'"]),
    "negative": (air_node(2, 8, 0, NODE_RANK="-1"), ["NODE_RANK='-1'", "from 0"]),
    "a world of none": (air_process(1, 1, 0, 0, WORLD_SIZE="0"), ["WORLD_SIZE='0'", "from 1"]),
    "too many digits": (air_process(1, 1, 0, 0, RANK="9" * 5000), ["RANK='999"]),
    "port 0": (air_node(2, 8, 0, MASTER_PORT="0"), ["MASTER_PORT='0'", "65535"]),
    "port too high": (torchrun_process([1], 0, 0, MASTER_PORT="65536"), ["MASTER_PORT='65536'", "65535"]),
    "port of a Kubernetes service": ({"MASTER_PORT": "tcp://10.0.0.1:80"}, ["MASTER_PORT='tcp://10.0.0.1:80'"]),
    "no address": (without(air_node(2, 8, 0), "MASTER_ADDR"), ["MASTER_ADDR=''", "MASTER_PORT='29400'"]),
    "empty port": (air_process(1, 2, 0, 0, MASTER_PORT=""), ["MASTER_ADDR='10.0.0.4'", "MASTER_PORT=''"]),
    "no port, Lightning": ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, ["MASTER_PORT=''", "LOCAL_RANK='1'"]),
    "no address, second node by hand": ({"NODE_RANK": "1", "MASTER_PORT": "1"}, ["MASTER_ADDR=''", "NODE_RANK='1'"]),
}


@pytest.mark.parametrize(("environ", "said"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_names_the_variables_and_their_values(environ: Environ, said: list[str]) -> None:
    with pytest.raises(ValueError, match="launch environment cannot be right") as error:
        detect_launch(environ)
    for words in said:
        assert words in str(error.value)


def processes(kind: str, sizes: list[int]) -> Iterator[Environ]:
    """The environments of all processes of one launch."""
    for node, local_size in enumerate(sizes):
        for local in range(local_size):
            if kind == "torchrun":
                yield torchrun_process(sizes, node, local)
            elif kind == "slurm":
                yield slurm_task(sizes, node, local)
            elif kind == "air-process":
                yield air_process(len(sizes), local_size, node, local)
            else:
                yield air_node(len(sizes), local_size, node, LOCAL_RANK=str(local))


even_sizes = st.builds(lambda num_nodes, size: [size] * num_nodes, st.integers(1, 6), st.integers(1, 9))
any_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def assert_ranks_are_the_world(kind: str, sizes: list[int]) -> None:
    found = [detect_launch(environ) for environ in processes(kind, sizes)]
    assert {process.kind for process in found} == {kind}
    assert [process.global_rank for process in found] == list(range(sum(sizes)))
    assert {process.world_size for process in found} == {sum(sizes)}
    assert [process.local_world_size for process in found] == [size for size in sizes for _ in range(size)]
    assert not any(process.starts_processes for process in found)


@pytest.mark.parametrize("kind", ["air-node", "air-process", "torchrun", "slurm"])
@given(sizes=even_sizes)
def test_global_ranks_are_the_world_once_each(kind: str, sizes: list[int]) -> None:
    assert_ranks_are_the_world(kind, sizes)


@given(sizes=any_sizes)
def test_global_ranks_are_the_world_on_uneven_slurm_nodes(sizes: list[int]) -> None:
    assert_ranks_are_the_world("slurm", sizes)


@given(num_nodes=st.integers(1, 6), local_size=st.integers(1, 9))
def test_air_commands_before_the_launch_are_the_first_ranks_of_their_nodes(num_nodes: int, local_size: int) -> None:
    found = [detect_launch(air_node(num_nodes, local_size, node)) for node in range(num_nodes)]
    assert [process.global_rank for process in found] == list(range(0, num_nodes * local_size, local_size))
    assert all(process.starts_processes for process in found)


@pytest.mark.parametrize("detect", [detect_launch, detect_platform])
@given(
    environ=st.sampled_from([environ for environ, _ in LAUNCHES.values()]),
    noise=st.dictionaries(st.text(min_size=1).map("X_{}".format), st.text(), max_size=3),
)
def test_detection_is_a_pure_function(detect: Any, environ: Environ, noise: Environ) -> None:
    frozen: Mapping[str, str] = MappingProxyType(environ | noise)
    first = detect(frozen)
    assert detect(frozen) == first == detect(environ)
    with pytest.raises(FrozenInstanceError):
        first.kind = "local"


def test_default_is_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in air_node(2, 8, 1).items():
        monkeypatch.setenv(name, value)
    assert detect_launch() == AIR_COMMAND_1
    assert detect_platform().code_source_path == "/code"


def platform(**changes: Any) -> Platform:
    nowhere: dict[str, Any] = dict.fromkeys(Platform.__dataclass_fields__)
    return Platform(**{**nowhere, "is_databricks": False, **changes})


PLATFORMS: dict[str, tuple[Environ, Platform]] = {
    "nowhere": ({}, platform()),
    "laptop that logs in": ({"DATABRICKS_HOST": "https://a.example"}, platform(workspace_url="https://a.example")),
    "cluster": (
        {"DATABRICKS_RUNTIME_VERSION": "16.4", "DATABRICKS_HOST": "", "MLFLOW_TRACKING_URI": "databricks"},
        platform(is_databricks=True, runtime_version="16.4", mlflow_tracking_uri="databricks"),
    ),
    "MLflow's system metrics": (
        {
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "True",
            "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.5",
            "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "3",
        },
        platform(system_metrics_enabled=True, system_metrics_interval_seconds=0.5, system_metrics_samples_per_point=3),
    ),
    "MLflow's system metrics, off, and numbers that are none": (
        {
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "0",
            "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "-1",
            "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "0",
        },
        platform(system_metrics_enabled=False),
    ),
    "MLflow's system metrics, nonsense": (
        {
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "maybe",
            "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "often",
            "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "1.5",
        },
        platform(),
    ),
    "serverless": (
        {"DATABRICKS_ENV_VERSION": "5", "SERVERLESS_GPU_COMPUTE_ASSOCIATED_JOB_RUN_ID": "77"},
        platform(is_databricks=True, runtime_version="client.5", job_run_id="77"),
    ),
    "AIR command": (
        air_node(2, 8, 1, MLFLOW_EXPERIMENT_NAME="/Users/a@b.example/x"),
        platform(
            is_databricks=True,
            mlflow_run_id="0123456789abcdef",
            mlflow_experiment_name="/Users/a@b.example/x",
            code_source_path="/code",
            hyperparameters_path="/code/parameters.yaml",
        ),
    ),
    "after mlflow.set_experiment": ({"MLFLOW_EXPERIMENT_ID": "12"}, platform(mlflow_experiment_id="12")),
    "user": ({"DATABRICKS_USERNAME": "a@b.example"}, platform(user="a@b.example")),
    "user without e-mail": ({"DATABRICKS_USERNAME": "token"}, platform()),
    "notebook": ({"DATABRICKS_NOTEBOOK_PATH": "/Users/a/n"}, platform(notebook_path="/Users/a/n")),
}


@pytest.mark.parametrize(("environ", "expected"), PLATFORMS.values(), ids=PLATFORMS)
def test_platform(environ: Environ, expected: Platform) -> None:
    assert detect_platform(environ) == expected


@pytest.mark.parametrize(
    "host",
    [
        "a.example",
        "a.example/",
        "https://a.example",
        "https://a.example/",
        "http://a.example/?o=1",
        "HTTPS://a.example#x",
    ],
)
def test_workspace_url_is_https_without_a_slash(host: str) -> None:
    assert detect_platform({"DATABRICKS_HOST": host}).workspace_url == "https://a.example"


DATABRICKS_JOB = {"SERVERLESS_GPU_COMPUTE_ASSOCIATED_JOB_RUN_ID": "77"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": " "}, None),
        (DATABRICKS_JOB, JobRun("databricks", "77")),
        ({"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}, JobRun("slurm", "4711")),
        (torchrun_process([1], 0, 0), None),
        (torchrun_process([1], 0, 0, TORCHELASTIC_RUN_ID="a1"), JobRun("torchrun", "a1")),
        (torchrun_process([1], 0, 0, TORCHELASTIC_RUN_ID="a1", SLURM_JOB_ID="4711"), JobRun("slurm", "4711")),
        (torchrun_process([1], 0, 0, TORCHELASTIC_RUN_ID="a1") | DATABRICKS_JOB, JobRun("databricks", "77")),
    ],
)
def test_job_run_is_the_outermost_submission(environ: Environ, expected: JobRun | None) -> None:
    assert detect_job_run(environ) == expected


def fresh_runtime() -> ModuleType:
    """A second copy of the module, as if it were imported now."""
    spec = importlib.util.spec_from_file_location("fresh_runtime", runtime.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_run_id_survives_its_deletion_by_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a launch that names a run, when mlflow.start_run() has adopted and deleted the variable ...
    monkeypatch.setenv("MLFLOW_RUN_ID", "given")
    module = fresh_runtime()
    monkeypatch.delenv("MLFLOW_RUN_ID")
    # ... then the run is still known, but an explicit environment stands for itself.
    assert module.detect_platform().mlflow_run_id == "given"
    assert module.detect_platform({}).mlflow_run_id is None
    # And what is set later wins.
    monkeypatch.setenv("MLFLOW_RUN_ID", "later")
    assert module.detect_platform().mlflow_run_id == "later"


def test_staging_area_is_the_temporary_directory() -> None:
    area = staging_area()
    assert area.path == Path(tempfile.gettempdir()).absolute()
    assert 0 < area.free_bytes <= shutil.disk_usage(area.path).total


def test_staging_area_need_not_exist(tmp_path: Path) -> None:
    area = staging_area(str(tmp_path / "not" / "yet"))
    assert area.path == tmp_path / "not" / "yet"
    assert area.free_bytes > 0
    assert not (tmp_path / "not").exists()


def test_staging_area_is_never_local_disk0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/local_disk0/tmp")
    assert staging_area().path == Path("/tmp")
    (tmp_path / "link").symlink_to("/local_disk0")
    for path in ("/local_disk0", "/local_disk0/tmp/x", tmp_path / "link" / "x"):
        with pytest.raises(ValueError, match=r"must not be under /local_disk0, .* got .* Pass one under '/tmp'"):
            staging_area(path)


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that read the process environment; setting or deleting one variable is no read."""
    written = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    names = {"environ", "environb", "getenv", "getenvb"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and node not in written)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
    ]


def test_no_other_file_reads_the_environment() -> None:
    package = Path(lightning_air.__file__).parent
    readers = {
        f"{path.relative_to(package)}:{line}"
        for path in package.rglob("*.py")
        if path != Path(runtime.__file__)
        for line in environment_reads(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert readers == set()


def test_the_reader_of_readers_sees_them() -> None:
    reads = "from os import getenv\nos.environ['A']\nos.getenv('A')\n"
    writes = "os.environ['A'] = '1'\ndel os.environ['A']\n"
    assert sorted(environment_reads(ast.parse(reads + writes))) == [1, 2, 3]


def test_runtime_imports_neither_lightning_nor_torch() -> None:
    tree = ast.parse(Path(runtime.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.partition(".")[0] in {"lightning", "torch", "lightning_air"}]


@pytest.mark.parametrize(
    ("environ", "seed"), [({}, None), ({"PL_GLOBAL_SEED": " "}, None), ({"PL_GLOBAL_SEED": "7"}, 7)]
)
def test_the_seed_is_what_seed_everything_has_left(environ: dict[str, str], seed: int | None) -> None:
    assert global_seed(environ) == seed


def test_a_seed_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="PL_GLOBAL_SEED must be a whole number, got 'x7'"):
        global_seed({"PL_GLOBAL_SEED": "x7"})
