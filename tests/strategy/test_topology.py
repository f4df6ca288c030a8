"""The launch decides what the Trainer left open, and what contradicts it is refused before any process group exists."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from lightning_air import AirStrategy
from lightning_air.runtime import Launch, LaunchKind
from lightning_air.strategy.topology import (
    AIR_KINDS,
    AirEnvironment,
    check_world,
    current_launch,
    resolve_devices,
    resolve_num_nodes,
)
from tests.kit.environment import (
    Placement,
    distributed_variables,
    node_command_variables,
    without_launch_variables,
)
from tests.kit.trainers import fast_trainer_kwargs

Environ = dict[str, str]

CPU = torch.device("cpu")


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def launch(kind: LaunchKind = "air-process", **changes: Any) -> Launch:
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


# ---- real environments -----------------------------------------------------------------------------------------------


def node_command(rank: int, world_size: int, num_nodes: int, **changes: str) -> Environ:
    """What AI Runtime gives to the one command of the rank's node, before Lightning's launcher has run."""
    placement = Placement(global_rank=rank, world_size=world_size, num_nodes=num_nodes)
    return node_command_variables(placement, "10.0.0.4", 29400) | changes


def process(rank: int, world_size: int, num_nodes: int = 1, **changes: str) -> Environ:
    """What `@distributed` gives to each process."""
    placement = Placement(global_rank=rank, world_size=world_size, num_nodes=num_nodes)
    return distributed_variables(placement, "10.0.0.4", 29400) | changes


def torchrun(rank: int, world_size: int, num_nodes: int = 1, **changes: str) -> Environ:
    placement = Placement(global_rank=rank, world_size=world_size, num_nodes=num_nodes)
    variables = distributed_variables(placement, "10.0.0.4", 29400)
    del variables["NODE_RANK"]
    return {
        **variables,
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **changes,
    }


def slurm(rank: int, world_size: int, num_nodes: int = 1, **changes: str) -> Environ:
    placement = Placement(global_rank=rank, world_size=world_size, num_nodes=num_nodes)
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(world_size),
        "SLURM_NTASKS_PER_NODE": str(placement.local_world_size),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(placement.local_rank),
        "SLURM_NODEID": str(placement.node_rank),
        **changes,
    }


@pytest.fixture(autouse=True)
def _rank_zero_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a Trainer makes this process its rank for good, and other tests would log and save nothing."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Be a process that was launched with exactly these launch variables."""
    with patch.dict(os.environ, {**without_launch_variables(os.environ), **variables}, clear=True):
        yield


def trainer_under(variables: Mapping[str, str], strategy: Any = None, **options: Any) -> Trainer:
    """Build a Trainer under an environment; its own `devices` are left at their default, unless an option says so."""
    kwargs = fast_trainer_kwargs(os.curdir, **options)  # type: ignore[arg-type]
    if "devices" not in options:
        del kwargs["devices"]
    with environment(variables):
        return Trainer(strategy=strategy or AirStrategy(), **kwargs)


def strategy_of(trainer: Trainer) -> ParallelStrategy:
    assert isinstance(trainer.strategy, ParallelStrategy)
    return trainer.strategy


def place(trainer: Trainer, variables: Mapping[str, str]) -> dict[str, int]:
    """What the Trainer says of itself; most of it is read from the environment when it is asked for."""
    with environment(variables):
        return {
            "global_rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "node_rank": trainer.node_rank,
            "num_nodes": trainer.num_nodes,
            "local_rank": trainer.local_rank,
            "num_devices": trainer.num_devices,
        }


# ---- resolve_num_nodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "launched", "expected"),
    [
        pytest.param(1, 2, 2, id="left alone"),
        pytest.param(2, 2, 2, id="said, and true"),
        pytest.param(1, 1, 1, id="one"),
        pytest.param(4, None, 4, id="the launch does not say"),
        pytest.param(1, None, 1, id="nobody says"),
    ],
)
def test_num_nodes(given: int, launched: int | None, expected: int) -> None:
    assert resolve_num_nodes(given, launch(num_nodes=launched)) == expected


@pytest.mark.parametrize(("given", "launched"), [(3, 2), (2, 1), (2, 4)])
def test_num_nodes_that_contradict_the_launch(given: int, launched: int) -> None:
    with pytest.raises(ValueError, match="contradicts the launch") as error:
        resolve_num_nodes(given, launch("air-node", num_nodes=launched))
    assert str(error.value) == (
        f"Trainer(num_nodes={given}) contradicts the launch (air-node), which has {launched} node(s). "
        "Leave num_nodes out: AirStrategy takes it from the launch."
    )


# ---- resolve_devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "ranks", "num_visible", "expected"),
    [
        pytest.param([CPU], 4, 1, [CPU] * 4, id="CPU, left alone"),
        pytest.param([CPU], 1, 1, [CPU], id="CPU, one rank"),
        pytest.param([CPU] * 3, 3, 1, [CPU] * 3, id="CPU, said, and true"),
        pytest.param([CPU] * 3, None, 1, [CPU] * 3, id="CPU, the launch does not say"),
        pytest.param(gpus(0, 1, 2, 3), 4, 4, gpus(0, 1, 2, 3), id="a rank for each GPU"),
        pytest.param(gpus(0, 1, 2, 3), 2, 4, gpus(0, 1), id="fewer ranks than GPUs"),
        pytest.param(gpus(0, 1, 2, 3), 1, 4, gpus(0), id="one rank beside idle GPUs"),
        pytest.param(gpus(2, 3), 2, 4, gpus(2, 3), id="GPUs that the user chose"),
        pytest.param(gpus(0), 4, 1, gpus(0) * 4, id="each process sees its own GPU only"),
        pytest.param(gpus(0, 1), None, 2, gpus(0, 1), id="GPUs, the launch does not say"),
        pytest.param(gpus(1), None, 8, gpus(1), id="one GPU chosen, the launch does not say"),
    ],
)
def test_devices(
    devices: list[torch.device], ranks: int | None, num_visible: int, expected: list[torch.device]
) -> None:
    assert resolve_devices(devices, launch(local_world_size=ranks), num_visible=num_visible) == expected


@pytest.mark.parametrize(
    ("devices", "ranks", "num_visible", "shown"),
    [
        pytest.param([CPU] * 3, 8, 1, "8 rank(s) on this node. ", id="CPU, too few"),
        pytest.param([CPU] * 3, 1, 1, "1 rank(s) on this node. ", id="CPU, too many"),
        pytest.param(gpus(0), 8, 8, "8 rank(s) on this node (8 cuda device(s) visible). ", id="devices=1"),
        pytest.param(gpus(0, 1), 4, 8, "4 rank(s) on this node (8 cuda device(s) visible). ", id="too few chosen"),
        pytest.param(gpus(0, 1, 2), 2, 8, "2 rank(s) on this node (8 cuda device(s) visible). ", id="too many chosen"),
        pytest.param(gpus(0, 1), 8, 2, "8 rank(s) on this node (2 cuda device(s) visible). ", id="GPUs are missing"),
    ],
)
def test_devices_that_contradict_the_launch(
    devices: list[torch.device], ranks: int, num_visible: int, shown: str
) -> None:
    with pytest.raises(ValueError, match="contradicts the launch") as error:
        resolve_devices(devices, launch("torchrun", local_world_size=ranks), num_visible=num_visible)
    assert str(error.value) == (
        f"Trainer(devices={len(devices)}) contradicts the launch (torchrun), which has {shown}"
        "Leave devices out: AirStrategy takes it from the launch."
    )


def test_ranks_that_are_yet_to_be_started_do_not_share_one_gpu() -> None:
    # Given an AIR command of 8 ranks in which somebody set CUDA_VISIBLE_DEVICES=0, which all 8 will inherit.
    command = launch("air-node", local_world_size=8, starts_processes=True)
    with pytest.raises(ValueError, match=r"has 8 rank\(s\) on this node \(1 cuda device\(s\) visible\)"):
        resolve_devices(gpus(0), command, num_visible=1)


@given(
    ranks=st.one_of(st.none(), st.integers(1, 16)),
    num_visible=st.integers(1, 16),
    chosen=st.sets(st.integers(0, 15), min_size=1),
)
def test_there_is_one_device_for_each_rank(ranks: int | None, num_visible: int, chosen: set[int]) -> None:
    devices = gpus(*sorted(index for index in chosen if index < num_visible)) or gpus(0)
    try:
        resolved = resolve_devices(devices, launch(local_world_size=ranks), num_visible=num_visible)
    except ValueError:
        assert ranks not in {None, len(devices)}
    else:
        assert len(resolved) == (len(devices) if ranks is None else ranks)
        assert set(resolved) <= set(devices)


# ---- AirEnvironment --------------------------------------------------------------------------------------------------

LAUNCHES: dict[str, tuple[Environ, LaunchKind]] = {
    "air-node": (node_command(8, 16, 2), "air-node"),
    "air-node, a started rank": (node_command(11, 16, 2, LOCAL_RANK="3"), "air-node"),
    "air-process": (process(11, 16, 2), "air-process"),
    "torchrun": (torchrun(3, 4, 2), "torchrun"),
    "torchrun inside an AIR command": (node_command(8, 16, 2) | torchrun(3, 4, 2), "torchrun"),
    "slurm": (slurm(3, 4, 2), "slurm"),
    "local": ({}, "local"),
}


@pytest.mark.parametrize(("variables", "kind"), LAUNCHES.values(), ids=LAUNCHES)
def test_detection(variables: Environ, kind: LaunchKind, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert current_launch().kind == kind
    assert AirEnvironment.detect() is (kind in AIR_KINDS)


def test_a_prompt_makes_a_notebook_unless_something_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert current_launch().kind == "notebook"
    for name, value in process(1, 2).items():
        monkeypatch.setenv(name, value)
    assert current_launch().kind == "air-process"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param(node_command(8, 16, 2), (8, 16, 0, 1, False), id="command of node 1"),
        pytest.param(node_command(8, 16, 2, LOCAL_RANK="0"), (8, 16, 0, 1, True), id="after its ranks were started"),
        pytest.param(node_command(8, 16, 2, LOCAL_RANK="7"), (15, 16, 7, 1, True), id="its last rank"),
        pytest.param(node_command(0, 1, 1), (0, 1, 0, 0, False), id="one GPU"),
        pytest.param(process(0, 4), (0, 4, 0, 0, True), id="first process"),
        pytest.param(process(11, 16, 2), (11, 16, 3, 1, True), id="a process of node 1"),
        pytest.param({}, (0, 1, 0, 0, False), id="nothing was launched"),
    ],
)
def test_air_environment_answers(variables: Environ, expected: tuple[object, ...]) -> None:
    air = AirEnvironment()
    with environment(variables):
        assert (
            air.global_rank(),
            air.world_size(),
            air.local_rank(),
            air.node_rank(),
            air.creates_processes_externally,
        ) == expected
        if variables:
            assert (air.main_address, air.main_port) == ("10.0.0.4", 29400)


def test_air_environment_reads_when_it_is_asked() -> None:
    # Given one environment object, as it lives through Lightning's launcher, which sets LOCAL_RANK in the parent.
    air = AirEnvironment()
    with environment(node_command(8, 16, 2)):
        assert not air.creates_processes_externally
        with patch.dict(os.environ, LOCAL_RANK="0"):
            assert air.creates_processes_externally


def test_nobody_overrules_the_launch() -> None:
    air = AirEnvironment()
    with environment(node_command(8, 16, 2)):
        before = dict(os.environ)
        air.set_global_rank(3)
        air.set_world_size(8)
        assert (air.global_rank(), air.world_size()) == (8, 16)
        assert dict(os.environ) == before


def test_without_a_port_it_says_what_to_set() -> None:
    with environment({}), pytest.raises(RuntimeError, match=r"MASTER_PORT is not set.* Set it to a free port"):
        _ = AirEnvironment().main_port
    with environment({}):
        assert AirEnvironment().main_address == "127.0.0.1"


@given(num_nodes=st.integers(1, 4), local_size=st.integers(1, 8))
def test_every_rank_of_an_air_launch_is_there_once(num_nodes: int, local_size: int) -> None:
    world = num_nodes * local_size
    air = AirEnvironment()
    found: dict[str, list[int]] = {"command": [], "process": []}
    for rank in range(world):
        local_rank = str(rank % local_size)
        for kind, variables in (
            ("command", node_command(rank, world, num_nodes, LOCAL_RANK=local_rank)),
            ("process", process(rank, world, num_nodes)),
        ):
            with environment(variables):
                found[kind].append(air.global_rank())
                assert air.world_size() == world
                assert air.node_rank() * local_size + air.local_rank() == rank
    assert found == {"command": list(range(world)), "process": list(range(world))}


# ---- Trainers: what stock Lightning makes of these launches, and what ours does --------------------------------------


def test_stock_lightning_numbers_a_rank_outside_of_its_world_when_num_nodes_is_forgotten() -> None:
    variables = node_command(8, 16, 2)
    trainer = trainer_under(variables, "ddp", devices=8)
    assert (trainer.global_rank, trainer.world_size) == (8, 8)
    assert strategy_of(trainer).distributed_sampler_kwargs == {"num_replicas": 8, "rank": 8}


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("options", [{}, {"devices": 8}, {"num_nodes": 2}, {"devices": 8, "num_nodes": 2}], ids=str)
@pytest.mark.parametrize("node_rank", [0, 1])
def test_air_command_without_topology(node_rank: int, options: dict[str, int], sharding: Any) -> None:
    # Given the command of a node, in which Lightning will have to start eight ranks.
    variables = node_command(8 * node_rank, 16, 2)
    trainer = trainer_under(variables, AirStrategy(sharding), **options)
    assert place(trainer, variables) == {
        "global_rank": 8 * node_rank,
        "world_size": 16,
        "node_rank": node_rank,
        "num_nodes": 2,
        "local_rank": 0,
        "num_devices": 8,
    }
    with environment(variables):
        assert strategy_of(trainer).distributed_sampler_kwargs == {
            "num_replicas": 16,
            "rank": 8 * node_rank,
        }
        assert trainer.is_global_zero is (node_rank == 0)
        air = strategy_of(trainer).cluster_environment
        assert isinstance(air, AirEnvironment)
        assert not air.creates_processes_externally


def test_a_rank_that_the_air_command_started() -> None:
    variables = node_command(11, 16, 2, LOCAL_RANK="3")
    trainer = trainer_under(variables)
    assert place(trainer, variables) == {
        "global_rank": 11,
        "world_size": 16,
        "node_rank": 1,
        "num_nodes": 2,
        "local_rank": 3,
        "num_devices": 8,
    }


def test_stock_lightning_leaves_its_world_when_devices_is_one_in_a_launched_process() -> None:
    trainer = trainer_under(variables := process(3, 4), "ddp", devices=1)
    assert place(trainer, variables)["world_size"] == 1
    # It goes by LOCAL_RANK, and would put this rank on device 3 of 1.
    assert place(trainer, variables)["local_rank"] == 3
    assert trainer.global_rank == 3


@pytest.mark.parametrize("devices", [None, 1, 4])
def test_air_process(devices: int | None) -> None:
    variables = process(3, 4)
    options = {} if devices is None else {"devices": devices}
    trainer = trainer_under(variables, **options)
    assert place(trainer, variables) == {
        "global_rank": 3,
        "world_size": 4,
        "node_rank": 0,
        "num_nodes": 1,
        "local_rank": 3,
        "num_devices": 4,
    }
    with environment(variables):
        assert strategy_of(trainer).distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
        assert trainer.strategy.root_device == CPU


@pytest.mark.parametrize(
    ("variables", "environment_class"),
    [(torchrun(3, 4, 2), TorchElasticEnvironment), (slurm(3, 4, 2), SLURMEnvironment)],
    ids=["torchrun", "slurm"],
)
def test_launchers_that_lightning_knows_keep_its_environment(variables: Environ, environment_class: type) -> None:
    trainer = trainer_under(variables)
    assert place(trainer, variables) == {
        "global_rank": 3,
        "world_size": 4,
        "node_rank": 1,
        "num_nodes": 2,
        "local_rank": 1,
        "num_devices": 2,
    }
    assert type(strategy_of(trainer).cluster_environment) is environment_class


@pytest.mark.parametrize("devices", [None, 1, 3])
def test_locally_the_user_decides(devices: int | None) -> None:
    options = {} if devices is None else {"devices": devices}
    trainer = trainer_under({}, **options)
    assert place(trainer, {})["world_size"] == (devices or 1)
    assert place(trainer, {})["num_devices"] == (devices or 1)
    assert type(strategy_of(trainer).cluster_environment) is LightningEnvironment


def test_an_environment_that_the_user_chose_stands() -> None:
    class Own(AirEnvironment):
        pass

    trainer = trainer_under(node_command(8, 16, 2), plugins=[Own()])
    assert type(strategy_of(trainer).cluster_environment) is Own


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize(
    "variables",
    [node_command(8, 16, 2), process(11, 16, 2), torchrun(11, 16, 2), slurm(11, 16, 2)],
    ids=["air-node", "air-process", "torchrun", "slurm"],
)
@pytest.mark.parametrize(("option", "launched"), [("devices", "8 rank(s)"), ("num_nodes", "2 node(s)")])
def test_a_contradiction_is_refused_when_the_trainer_is_built(
    option: str, launched: str, variables: Environ, sharding: Any
) -> None:
    with pytest.raises(ValueError, match="contradicts the launch") as error:
        trainer_under(variables, AirStrategy(sharding), **{option: 3})
    assert f"Trainer({option}=3) contradicts the launch (" in str(error.value)
    assert launched in str(error.value)
    assert f"Leave {option} out" in str(error.value)
    assert not dist.is_initialized()


def test_an_environment_that_contradicts_itself_is_refused_when_the_trainer_is_built() -> None:
    with pytest.raises(ValueError, match="2 nodes of 8 processes do not make a world of 8"):
        trainer_under(node_command(8, 16, 2, WORLD_SIZE="8"))
    assert not dist.is_initialized()


class _Scattered(LightningEnvironment):
    """Ranks dealt out in turn, as `srun --distribution=cyclic` does: rank 1 is the first of node 1."""

    def global_rank(self) -> int:
        return 1

    def world_size(self) -> int:
        return 4

    def node_rank(self) -> int:
        return 1

    def local_rank(self) -> int:
        return 0


def test_hsdp_refuses_ranks_that_are_not_numbered_node_by_node() -> None:
    strategy: Any = AirStrategy("hsdp")
    strategy.cluster_environment = _Scattered()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.num_nodes = 2
    with pytest.raises(ValueError, match=r"local rank 0 of 2 on node 1 of 2 is rank 1 of 4.* use 'fsdp'"):
        strategy._refuse_scattered_nodes()


@pytest.mark.parametrize(("num_devices", "num_nodes", "local_rank"), [(1, 1, 0), (1, 1, 1), (5, 1, 0), (2, 2, 0)])
def test_what_does_not_make_up_the_world_of_a_launch_without_node_sizes(
    num_devices: int, num_nodes: int, local_rank: int
) -> None:
    # The five variables of a hand-made launch, without LOCAL_WORLD_SIZE.
    unsized = launch(local_world_size=None, num_nodes=None, local_rank=local_rank, global_rank=local_rank, world_size=2)
    with pytest.raises(ValueError, match=rf"devices={num_devices}, num_nodes={num_nodes}.*Set LOCAL_WORLD_SIZE to"):
        check_world(num_devices, num_nodes, unsized)


@pytest.mark.parametrize(("num_devices", "num_nodes"), [(2, 1), (1, 2)])
def test_what_makes_up_the_world_of_a_launch_without_node_sizes(num_devices: int, num_nodes: int) -> None:
    check_world(num_devices, num_nodes, launch(local_world_size=None, num_nodes=None, local_rank=0, world_size=2))


def without(variables: Environ, *names: str) -> Environ:
    return {name: value for name, value in variables.items() if name not in names}


LEFT_BEHIND = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
UNEVEN = slurm(0, 4, 2, SLURM_NTASKS="5")


@pytest.mark.parametrize(
    ("variables", "advice", "followed"),
    [
        pytest.param(
            without(process(1, 2), "LOCAL_WORLD_SIZE"),
            "Set LOCAL_WORLD_SIZE to the number",
            process(1, 2),
            id="process",
        ),
        pytest.param(LEFT_BEHIND, "Unset WORLD_SIZE and LOCAL_RANK if", {}, id="local"),
        pytest.param(UNEVEN, "Correct SLURM_TASKS_PER_NODE: ", UNEVEN | {"SLURM_TASKS_PER_NODE": "3,2"}, id="slurm"),
    ],
)
def test_a_trainer_refuses_what_does_not_make_up_the_world_with_advice_that_helps(
    variables: Environ, advice: str, followed: Environ
) -> None:
    with pytest.raises(ValueError, match=r"Trainer\(devices=1, num_nodes=.* contradicts the launch") as error:
        trainer_under(variables)
    assert advice in str(error.value)
    trainer_under(followed)
