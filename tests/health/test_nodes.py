"""The nodes know of each other's GPUs through the store; silence is noticed, and a lost store breaks nothing."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_air import AirStrategy, GPUHealth
from lightning_air.health import aggregates, host
from lightning_air.health.aggregates import aggregate, combine_hosts
from lightning_air.health.events import EventLog
from lightning_air.health.history import METRICS, GpuId, History, row_of
from lightning_air.health.node_watch import NodeWatch, Place
from lightning_air.health.nodes import Nodes, Report, open_store
from lightning_air.health.rules import Rule
from lightning_air.health.sample import GPUSample
from lightning_air.health.sampler import Sampler
from lightning_air.runtime import detect_launch
from tests.health.records import KeepRecords
from tests.kit.environment import reserved_port
from tests.kit.nodes import namespaces_unavailable, network_namespaces
from tests.kit.nvml_stub import NvmlStub, compiler_missing, use_stub
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


def sample(uuid: str = "GPU-a", **values: Any) -> GPUSample:
    return GPUSample(uuid=uuid, index=0, name="NVIDIA H100", **values)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FakeSampler(Sampler):
    """Says what a test has it say."""

    def __init__(self, history: History, events: EventLog) -> None:
        super().__init__(events=events, history=history)

    def says(self, node_rank: int, *samples: GPUSample) -> None:
        self.num_polls += 1
        self.rows = {GpuId(each.uuid, each.index, each.name, node_rank): row_of(each, None) for each in samples}


class Node:
    """One node of some, in one process, on a store that a test can take away."""

    def __init__(self, store: dist.Store, node_rank: int, clock: Clock, num_nodes: int = 2) -> None:
        self.store: dist.Store | None = store
        self.node_rank = node_rank
        self.events = EventLog(node_rank)
        self.history = History(100, 10.0)
        self.sampler = FakeSampler(self.history, self.events)
        self.news: list[list[tuple[str, int]]] = []
        self.nodes = Nodes(
            sampler=self.sampler,
            events=self.events,
            history=self.history,
            node_rank=node_rank,
            num_nodes=num_nodes,
            reads_all=node_rank == 0,
            poll_seconds=10.0,
            open_store=self.open_store,
            take_news=lambda rows: self.news.append([(gpu.uuid, gpu.node_rank) for gpu in rows]),
            host=lambda: {"host/cpu_pct/mean": 50.0 * node_rank},
            clock=clock,
        )

    def open_store(self) -> dist.Store:
        if self.store is None:
            raise ConnectionRefusedError("nobody listens")
        return self.store

    def polls(self, *samples: GPUSample) -> None:
        self.sampler.says(self.node_rank, *samples)
        self.nodes.exchange()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.all]


def two_nodes() -> tuple[Node, Node, Clock]:
    store, clock = dist.HashStore(), Clock()
    return Node(store, 0, clock), Node(store, 1, clock), clock


def test_rank_0_sees_the_gpus_of_all_nodes() -> None:
    """CASES 29."""
    first, second, _ = two_nodes()
    second.polls(sample("GPU-b", temperature_c=80.0), sample("GPU-c", temperature_c=70.0))
    first.polls(sample("GPU-a", temperature_c=60.0))

    metrics = first.nodes.metrics()

    assert metrics["gpu_health/gpus_seen/count"] == 3
    assert metrics["gpu_health/temperature_c/max"] == 80.0
    assert second.nodes.metrics()["gpu_health/gpus_seen/count"] == 2
    assert [(gpu.uuid, gpu.node_rank) for gpu in first.nodes.rows()] == [("GPU-a", 0), ("GPU-b", 1), ("GPU-c", 1)]
    places = {(gpu.uuid, gpu.node_rank) for gpu in first.history.window().values}
    assert ("GPU-b", 1) in places
    assert ("GPU-c", 1) in places


def test_each_reading_of_each_node_is_news_once() -> None:
    first, second, _ = two_nodes()
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    first.nodes.exchange()
    second.polls(sample("GPU-b"))
    first.nodes.exchange()
    first.store = None
    first.polls(sample("GPU-a"))
    assert first.news == [[("GPU-a", 0), ("GPU-b", 1)], [], [("GPU-b", 1)], [("GPU-a", 0)]]


def test_a_node_that_is_silent_for_three_polls_is_stale_and_said_so() -> None:
    first, second, clock = two_nodes()
    second.polls(sample("GPU-b", temperature_c=80.0))
    first.polls(sample("GPU-a", temperature_c=60.0))
    for seconds in (10.0, 20.0, 30.0):
        clock.seconds = seconds
        first.polls(sample("GPU-a", temperature_c=60.0))
    assert first.kinds() == []
    clock.seconds = 31.0
    first.polls(sample("GPU-a", temperature_c=60.0))

    metrics = first.nodes.metrics()
    assert (metrics["gpu_health/nodes_stale/count"], metrics["gpu_health/gpus_seen/count"]) == (1, 1)
    assert metrics["gpu_health/temperature_c/max"] == 60.0, "what is old is not logged as if it were new"
    (event,) = first.events.all
    assert event.kind == "node_stale"
    assert event.message.startswith("Node 1 has not told of its GPUs for 31 s.")

    second.polls(sample("GPU-b", temperature_c=81.0))
    first.polls(sample("GPU-a", temperature_c=60.0))
    assert first.kinds() == ["node_stale", "node_back"]
    assert first.nodes.metrics()["gpu_health/temperature_c/max"] == 81.0


def test_a_node_whose_sampler_hangs_is_stale_although_it_writes() -> None:
    first, second, clock = two_nodes()
    second.polls(sample("GPU-b"))
    for seconds in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        clock.seconds = seconds
        second.nodes.exchange()
        first.polls(sample("GPU-a"))
    assert first.kinds() == ["node_stale", "nvml_silent"]
    assert second.kinds() == ["nvml_silent"]


def test_a_node_that_never_came_is_stale() -> None:
    first, _, clock = two_nodes()
    for seconds in (0.0, 10.0, 20.0, 31.0):
        clock.seconds = seconds
        first.polls(sample("GPU-a"))
    assert first.events.all[0].message.startswith("Node 1 has not told of its GPUs since the run began.")


def test_a_process_that_was_stopped_finds_nobody_silent_when_it_goes_on() -> None:
    first, second, clock = two_nodes()
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    clock.seconds = 1_000.0
    first.nodes.exchange()
    second.nodes.exchange()
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    assert first.kinds() == second.kinds() == []


def test_a_node_that_has_left_in_good_order_is_not_stale() -> None:
    first, second, clock = two_nodes()
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    second.events.add("xid", "XID 63", uuid="GPU-b", value=63)
    second.nodes.leave()
    for seconds in (10.0, 20.0, 30.0, 40.0, 50.0):
        clock.seconds = seconds
        first.polls(sample("GPU-a"))
    assert first.kinds() == ["xid"], "its last words are heard"
    assert first.nodes.metrics()["gpu_health/gpus_seen/count"] == 1
    assert first.nodes.metrics()["gpu_health/xids/count"] == 1


def test_events_of_other_nodes_arrive_once_with_their_node() -> None:
    first, second, _ = two_nodes()
    for xid in (31, 79):
        second.events.add("xid", f"XID {xid}", uuid="GPU-b", value=xid)
    for _ in range(3):
        second.polls(sample("GPU-b"))
        first.polls(sample("GPU-a"))
    second.events.add("xid", "XID 48", uuid="GPU-b", value=48)
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    told = [(event.node_rank, event.uuid, event.value) for event in first.events.all]
    assert told == [(1, "GPU-b", 31.0), (1, "GPU-b", 79.0), (1, "GPU-b", 48.0)]
    assert first.nodes.metrics()["gpu_health/xids/count"] == 3
    for number in range(100):
        second.events.add("xid", str(number))
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    assert len(first.events.all) == 3 + 20, "a flood is cut to the newest"


def test_rank_0_does_not_repeat_what_every_node_says_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = two_nodes()
    second.events.add("nvml_absent", "No GPU is watched: no library.")
    second.events.add("gpu_lost", "GPU 1 is lost.", uuid="GPU-b")
    second.polls()
    first.polls()
    assert [event.kind for event in first.events.all] == ["nvml_absent", "gpu_lost"]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["No GPU is watched: no library.", "GPU 1 is lost.", "Node 1: GPU 1 is lost."]


def test_a_store_that_is_gone_is_said_once_and_the_own_gpus_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, second, clock = two_nodes()
    second.polls(sample("GPU-b"))
    store, first.store = first.store, None
    for seconds in range(0, 60, 10):
        clock.seconds = float(seconds)
        first.polls(sample("GPU-a"))
    assert first.kinds() == ["node_stale", "store_lost"] or first.kinds() == ["store_lost", "node_stale"]
    assert "cannot exchange GPU readings with the others (nobody listens)" in caplog.text
    assert first.nodes.metrics()["gpu_health/gpus_seen/count"] == 1
    first.store = store
    second.polls(sample("GPU-b"))
    first.polls(sample("GPU-a"))
    assert first.nodes.metrics()["gpu_health/gpus_seen/count"] == 2


def test_what_is_no_report_is_taken_for_silence() -> None:
    first, _, clock = two_nodes()
    assert first.store is not None
    for garbage in ("[]", "{", '{"metrics": ["other"]}', '{"metrics": 1}'):
        first.store.set("node/1", garbage)
        clock.seconds += 10.0
        first.polls(sample("GPU-a", power_w=5.0))
        assert first.nodes.metrics()["gpu_health/power_w/mean"] == 5.0
    assert "node_stale" in first.kinds()


def test_one_node_needs_no_store() -> None:
    node = Node(dist.HashStore(), 0, Clock(), num_nodes=1)
    node.store = None
    node.polls(sample("GPU-a", temperature_c=60.0))
    node.nodes.leave()
    assert node.kinds() == []
    assert node.nodes.metrics()["gpu_health/temperature_c/max"] == 60.0


def test_a_report_survives_the_store() -> None:
    events = EventLog(1, clock=lambda: 7.0)
    events.add("xid", "XID 79", uuid="GPU-b", value=79)
    gpu = GpuId("GPU-b", 3, "NVIDIA H100", 1)
    report = Report(
        num_polls=4,
        gpus={gpu: (1.5,) * len(METRICS)},
        host={"host/cpu_pct/mean": 2.0},
        num_xids=1,
        num_events=1,
        events=tuple(events.all),
    )
    assert Report.decode(report.encode().encode()) == report
    unknown = Report(num_polls=1, gpus={gpu: row_of(sample(), None)})
    assert math.isnan(Report.decode(unknown.encode().encode()).gpus[gpu][METRICS.index("power_w")])


# ---- what is logged --------------------------------------------------------------------------------------------------


def rows(*samples: GPUSample) -> list[Any]:
    return [row_of(each, None) for each in samples]


def test_a_dozen_fixed_names_whatever_the_number_of_gpus() -> None:
    """CASES 25."""
    whole = sample(
        utilization_pct=80.0,
        memory_used_bytes=1,
        memory_total_bytes=4,
        temperature_c=60.0,
        temperature_margin_c=27.0,
        hbm_temperature_c=70.0,
        power_w=300.0,
        sm_clock_mhz=1900.0,
        throttle_reasons=0x4,
        ecc_uncorrected=0,
    )
    one = aggregate(rows(whole), num_stale_nodes=0, num_xids=0)
    many = aggregate(rows(*[whole] * 64), num_stale_nodes=0, num_xids=0)
    assert tuple(one) == tuple(many) == aggregates.NAMES == tuple(sorted(aggregates.NAMES))
    assert len(aggregates.NAMES) * 30 * 24 * 60 <= 600_000, "points in 30 days at one record a minute"
    assert not any(name.startswith("system/") for name in aggregates.NAMES)


def test_each_number_is_over_the_gpus_that_tell_it() -> None:
    found = aggregate(
        rows(
            sample(temperature_c=60.0, power_w=100.0, throttle_reasons=0x1, memory_used_bytes=1, memory_total_bytes=4),
            sample(temperature_c=75.0, power_w=300.0, throttle_reasons=0x40, sm_clock_mhz=700.0),
            sample(sm_clock_mhz=1900.0, ecc_uncorrected=2),
            sample(is_lost=True),
        ),
        num_stale_nodes=2,
        num_xids=5,
    )
    assert found == {
        "gpu_health/ecc_uncorrected/sum": 0.0,
        "gpu_health/gpus_lost/count": 1.0,
        "gpu_health/gpus_seen/count": 3.0,
        "gpu_health/gpus_throttled/count": 1.0,
        "gpu_health/memory_used_pct/max": 25.0,
        "gpu_health/nodes_stale/count": 2.0,
        "gpu_health/power_w/mean": 200.0,
        "gpu_health/sm_clock_mhz/min": 700.0,
        "gpu_health/temperature_c/max": 75.0,
        "gpu_health/xids/count": 5.0,
    }


# ---- without NVML ----------------------------------------------------------------------------------------------------


def test_without_gpus_the_hosts_are_logged_under_their_own_names() -> None:
    first, second, _ = two_nodes()
    second.polls()
    first.polls()
    assert first.nodes.metrics() == {"host/cpu_pct/mean": 25.0}
    found = combine_hosts([{"host/memory_used_pct/max": 10.0}, {"host/memory_used_pct/max": 30.0}, {}])
    assert found == {"host/memory_used_pct/max": 30.0}


class FakePsutil:
    """psutil is no dependency of ours, and may be missing where the tests run."""

    @staticmethod
    def cpu_percent(interval: float | None) -> float:
        assert interval is None, "anything else would wait"
        return 12.5

    @staticmethod
    def virtual_memory() -> Any:
        return type("Memory", (), {"percent": 40.0})


def test_the_host_is_read_with_psutil_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psutil", FakePsutil)
    assert host.read_host() == {"host/cpu_pct/mean": 12.5, "host/memory_used_pct/max": 40.0}
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    assert host.read_host() == {}


def test_torchs_figures_are_told_where_a_device_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device at hand: what is asked of torch, and that one refusal leaves the others."""
    cuda = host.torch.cuda
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 100 * (device + 1))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: 300)
    memory = {"torch_memory/allocated_bytes/max": 200.0, "torch_memory/reserved_bytes/max": 300.0}
    assert host.read_host() == memory
    monkeypatch.setattr(host.torch.version, "hip", "6.0")
    monkeypatch.setattr(cuda, "temperature", lambda device: 60 + device)
    monkeypatch.setattr(cuda, "power_draw", lambda device: 250_000)
    assert host.read_host() == {**memory, "torch_gpu/temperature_c/max": 61.0, "torch_gpu/power_w/mean": 250.0}


# ---- real processes --------------------------------------------------------------------------------------------------


class TrainUntil(Callback):
    """Ends training on all ranks when rank 0's condition holds, or after a minute."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition = condition
        self.deadline = time.monotonic() + 15
        self.threads: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.threads = sorted(each.name for each in threading.enumerate() if each.name.startswith("air-gpu-"))
        mine = trainer.global_rank == 0 and (self.condition() or time.monotonic() > self.deadline)
        trainer.should_stop = trainer.strategy.broadcast(mine)
        time.sleep(0.02)


def _train_on_two_nodes(folder: str, strategy: str) -> dict[str, Any]:
    logger, health = KeepRecords(), GPUHealth(poll_seconds=0.2, log_every_seconds=0.2)
    node_rank = int(__import__("os").environ["NODE_RANK"])
    use_stub(Path(folder, f"nvml-{node_rank}"))

    def is_seen() -> bool:
        return any(record["gpu_health/gpus_seen/count"] == 4 for record in logger.health())

    until = TrainUntil(is_seen)
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy() if strategy == "air" else "ddp",
            devices=2,
            **({} if strategy == "air" else {"num_nodes": 2}),  # AirStrategy takes it from the launch
            logger=logger,
            max_epochs=-1,
            limit_val_batches=0,
            use_distributed_sampler=False,
            callbacks=[health, until],
        )
    )
    data = loader(4, trainer.global_rank, batch_size=2)
    trainer.fit(Regression(), data, data)
    return {
        "last": next((each for each in reversed(logger.health()) if each["gpu_health/gpus_seen/count"] == 4), None),
        "threads": until.threads,
        "left": [each.name for each in threading.enumerate() if each.name.startswith("air-gpu-")],
        "gpus": sorted((gpu.node_rank, gpu.uuid[:12]) for gpu in health.history.window().values)
        if health.history
        else None,
        "events": [event.message for event in health.events.all] if health.events else [],
    }


@needs_compiler
@pytest.mark.parametrize("strategy", ["air", "ddp"])
def test_two_nodes_of_two_ranks_have_one_sampler_each_and_all_their_gpus_appear(tmp_path: Path, strategy: str) -> None:
    for node_rank in range(2):
        stub = NvmlStub(tmp_path / f"nvml-{node_rank}", num_gpus=2)
        for number in range(2):
            stub.gpu(number).uuid = f"GPU-{node_rank}{number}000000-0000".encode()
        stub.gpu(1).temperature = 70 + node_rank

    variables: dict[str, str | None] = {}
    if strategy == "ddp":  # which reads torchrun's names
        variables = {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2"}

    def environment(rank: int) -> dict[str, str | None]:
        if not variables:
            return {}
        return {**variables, "RANK": str(rank), "GROUP_RANK": str(rank // 2), "NODE_RANK": str(rank // 2)}

    with ExitStack() as stack:
        # Each node has its own network where that can be had, so that nothing is found by accident.
        networks = stack.enter_context(network_namespaces(2)) if namespaces_unavailable() is None else None
        ranks = run_ranks(
            _train_on_two_nodes,
            4,
            nodes=2,
            namespaces=networks,
            args=(str(tmp_path), strategy),
            env=environment,
            timeout_seconds=60,
        )
    told = values(ranks)

    assert [bool(each["threads"]) for each in told] == [True, False, True, False]
    assert all(each["left"] == [] for each in told)
    assert told[0]["last"]["gpu_health/temperature_c/max"] == 71.0
    assert told[0]["gpus"] == [(0, "GPU-00000000"), (0, "GPU-01000000"), (1, "GPU-10000000"), (1, "GPU-11000000")]
    assert told[2]["gpus"] == [(1, "GPU-10000000"), (1, "GPU-11000000")]
    assert [each["last"] is not None for each in told] == [True, False, False, False]
    assert all(each["events"] == [] for each in told)


def _train_on_two_nodes_until_stopped(folder: str) -> dict[str, Any]:
    node_rank = int(__import__("os").environ["NODE_RANK"])
    stub = NvmlStub(Path(folder, f"nvml-{node_rank}"), num_gpus=2)
    stub.gpu(1).uuid = f"GPU-{node_rank}".encode()
    use_stub(stub.path)

    class Heats(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 3 and trainer.fit_loop.total_batch_idx >= 3:
                stub.gpu(1).temperature = 95
            time.sleep(0.01)

    rule = Rule("temperature_c", above=90, action="checkpoint_stop")
    health = GPUHealth(poll_seconds=0.2, rules=[rule], folder=folder)
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(),
            devices=2,
            max_epochs=1_000,
            limit_val_batches=0,
            use_distributed_sampler=False,
            callbacks=[health, Heats()],
        )
    )
    data = loader(4, trainer.global_rank, batch_size=2)
    trainer.fit(Regression(), data, data)
    return {
        "step": trainer.global_step,
        "reason": health.stop_reason,
        "events": [(event.kind, event.node_rank) for event in health.events.all] if health.events else [],
    }


@needs_compiler
def test_a_sick_gpu_of_one_node_stops_the_ranks_of_all_nodes_after_one_step(tmp_path: Path) -> None:
    for node_rank in range(2):
        NvmlStub(tmp_path / f"nvml-{node_rank}", num_gpus=2)
    arguments = (str(tmp_path),)
    told = values(run_ranks(_train_on_two_nodes_until_stopped, 4, nodes=2, args=arguments, timeout_seconds=240))
    assert len({(each["step"], each["reason"]) for each in told}) == 1
    assert told[0]["reason"].startswith("GPU 1 (GPU-1, NVIDIA H100 80GB HBM3) of node 1: temperature_c is 95 °C, above")
    assert told[0]["events"][:2] == [("temperature_c", 1), ("stopped", 0)]
    assert told[0]["events"][2:] in ([], [("stopped", 1)])  # told by the other node, if it comes in time
    assert [each["events"] for each in told[1:]] == [[], [("stopped", 1)], []]
    assert (tmp_path / f"gpu_health-step={told[0]['step']}.ckpt").exists()


def _watch_one_node_of_two(folder: str) -> dict[str, Any]:
    launch = detect_launch()
    assert launch.master_address is not None
    assert launch.master_port is not None
    address, port = launch.master_address, launch.master_port
    stub = NvmlStub(Path(folder, f"nvml-{launch.node_rank}"), num_gpus=1)
    stub.gpu(0).uuid = f"GPU-{launch.node_rank}".encode()
    use_stub(stub.path)
    events = EventLog(launch.node_rank)
    place = Place(
        node_rank=launch.node_rank,
        num_nodes=2,
        is_rank_zero=launch.node_rank == 0,
        open_store=lambda: open_store(address, port, "run/1"),
    )
    watch = NodeWatch(place, poll_seconds=0.2, history=History(100, 0.2), events=events)
    watch.start()
    seen = [watch.metrics()]
    if launch.node_rank == 0:
        wait_until(lambda: watch.metrics().get("gpu_health/gpus_seen/count") == 2)
    dist.barrier()

    def has_told(*kinds: str) -> bool:
        return set(kinds) <= {event.kind for event in events.all}

    if launch.node_rank == 1:
        stub.hang("nvmlDeviceGetPowerUsage")
        wait_until(lambda: has_told("nvml_silent"))
    else:
        wait_until(lambda: has_told("node_stale", "nvml_silent"))
        seen.append(watch.metrics())
    dist.barrier()
    stub.release()
    if launch.node_rank == 0:
        wait_until(lambda: has_told("node_back", "nvml_back"))
        seen.append(watch.metrics())
    dist.barrier()
    watch.close()
    return {
        "events": [(event.kind, event.node_rank) for event in events.all],
        "seen": [each.get("gpu_health/gpus_seen/count") for each in seen],
    }


@needs_compiler
def test_a_node_whose_driver_hangs_is_found_by_the_other(tmp_path: Path) -> None:
    ranks = run_ranks(_watch_one_node_of_two, 2, nodes=2, args=(str(tmp_path),), init_process_group="gloo")
    first, second = values(ranks)
    assert first["seen"] == [None, 1.0, 2.0]
    assert sorted(first["events"]) == [("node_back", 0), ("node_stale", 0), ("nvml_back", 1), ("nvml_silent", 1)]
    assert second["events"] == [("nvml_silent", 1), ("nvml_back", 1)]


def test_the_store_is_reached_by_a_connection_of_its_own() -> None:
    with reserved_port() as port:
        server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
        ours = open_store("127.0.0.1", port, "run/1")
        ours.set("node/0", "hello")
        assert server.get("run/1/node/0") == b"hello"
        del ours, server
        begun = time.monotonic()
        with pytest.raises(OSError, match="refused"):
            open_store("127.0.0.1", port, "run/1")
        assert time.monotonic() - begun < 1.5
