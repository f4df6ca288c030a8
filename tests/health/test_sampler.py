"""The sampler of a node: what it keeps, what it says, and that nothing NVML does keeps its process from ending."""

import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_air.health.events import EventLog, HealthEvent
from lightning_air.health.history import COUNTERS, METRICS, GpuId, History, row_of
from lightning_air.health.node_watch import NodeWatch, Place
from lightning_air.health.sample import GPUSample
from lightning_air.health.sampler import MAX_PAUSE_SECONDS, Sampler
from tests.kit.nvml_stub import (
    DRIVER_NOT_LOADED,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    NvmlStub,
    compiler_missing,
    use_stub,
)
from tests.kit.ranks import run_ranks

Machine = Callable[[int], NvmlStub]

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


class Clock:
    def __init__(self, seconds: float = 1_000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


class Polls:
    """A sampler whose time a test sets."""

    def __init__(self, poll_seconds: float = 10.0, num_polls: int = 6) -> None:
        self.clock = Clock()
        self.events = EventLog(clock=self.clock)
        self.history = History(num_polls, poll_seconds)
        self.sampler = Sampler(events=self.events, history=self.history, poll_seconds=poll_seconds, clock=self.clock)
        self.closed = threading.Event()

    def poll(self, num: int = 1, *, seconds: float = 10.0) -> tuple[GPUSample, ...]:
        for _ in range(num):
            self.clock.seconds += seconds
            self.sampler.poll()
        return self.sampler.samples

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.all]

    def series(self, metric: str, number: int = 0) -> list[float | None]:
        """A GPU's row of the history, with None for a gap."""
        window = self.history.window()
        gpu = sorted(window.values, key=lambda gpu: gpu.index)[number]
        return [None if math.isnan(value) else float(value) for value in window.values[gpu][METRICS.index(metric)]]

    def end(self) -> None:
        self.closed.set()
        self.sampler.run(self.closed)


@pytest.fixture
def polls() -> Any:
    made = Polls()
    yield made
    made.end()


# ---- history ---------------------------------------------------------------------------------------------------------


def test_values_that_change_become_a_series(machine: Machine, polls: Polls) -> None:
    stub = machine(2)
    for temperature in (50, 60, 70):
        stub.gpu(1).temperature = temperature
        polls.poll()
    assert polls.series("temperature_c", 1) == [50.0, 60.0, 70.0]
    assert polls.history.window().times.tolist() == [1_010.0, 1_020.0, 1_030.0]


def test_a_missed_poll_is_a_gap_and_the_ring_forgets_the_oldest(machine: Machine, polls: Polls) -> None:
    stub = machine(1)
    stub.gpu(0).temperature = 1
    polls.poll()
    stub.gpu(0).temperature = 2
    polls.poll(seconds=30)
    assert polls.series("temperature_c") == [1.0, None, None, 2.0]
    assert np.isnan(polls.history.window().times).tolist() == [False, True, True, False]
    for temperature in range(3, 7):
        stub.gpu(0).temperature = temperature
        polls.poll()
    assert polls.series("temperature_c") == [None, 2.0, 3.0, 4.0, 5.0, 6.0]
    polls.poll(seconds=10_000)
    assert polls.series("temperature_c") == [None] * 5 + [6.0]


def test_a_window_holds_what_was_asked_for_and_is_a_copy(machine: Machine, polls: Polls) -> None:
    machine(1)
    assert polls.history.window().values == {}
    polls.poll(5)
    window = polls.history.window(seconds=25)
    (values,) = window.values.values()
    assert values.shape == (len(METRICS), 3)
    assert values.dtype == np.float32
    values[:] = 0
    assert polls.series("temperature_c") == [60.0] * 5


def test_polls_that_are_a_little_early_or_late_leave_no_gap() -> None:
    history = History(100, 10.0)
    gpu = GpuId("GPU-a", 0, "NVIDIA H100", 0)
    for number in range(20):
        history.append(1_000 + 10 * number + (-1) ** number * 4.9, {gpu: [float(number)] * len(METRICS)})
    assert history.window().values[gpu][0].tolist() == list(range(20))


def test_what_is_older_than_the_ring_is_left_out() -> None:
    history, gpu = History(4, 10.0), GpuId("GPU-a", 0, "NVIDIA H100", 0)
    history.append(1_000, {gpu: [1.0] * len(METRICS)})
    history.append(900, {gpu: [2.0] * len(METRICS)})
    history.append(980, {gpu: [3.0] * len(METRICS)})
    assert np.nan_to_num(history.window().values[gpu][0]).tolist() == [3.0, 0.0, 1.0]


def test_two_hours_of_eight_gpus_fit_into_a_megabyte() -> None:
    history = History(720, 10.0)
    history.append(0.0, {GpuId(f"GPU-{i}", i, "", 0): [0.0] * len(METRICS) for i in range(8)})
    assert history.num_bytes < 1_000_000


def test_counters_are_kept_as_what_they_have_grown_by() -> None:
    """A lifetime's counter does not fit into 24 bits, and its errors are not this run's."""
    first = GPUSample(uuid="a", index=0, name="", ecc_corrected=2**40, pcie_replays=None, temperature_c=50.0)
    later = GPUSample(uuid="a", index=0, name="", ecc_corrected=2**40 + 3, pcie_replays=7, temperature_c=51.0)
    reloaded = GPUSample(uuid="a", index=0, name="", ecc_corrected=2)
    kept = dict(zip(METRICS, row_of(later, first), strict=True))
    assert (kept["ecc_corrected"], kept["pcie_replays"], kept["temperature_c"]) == (3.0, 7.0, 51.0)
    assert math.isnan(kept["power_w"])
    assert dict(zip(METRICS, row_of(first, None), strict=True))["ecc_corrected"] == 0.0
    assert dict(zip(METRICS, row_of(reloaded, first), strict=True))["ecc_corrected"] == 2.0
    assert "temperature_c" not in COUNTERS


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_is_told_once_and_so_is_its_return(machine: Machine, polls: Polls) -> None:
    stub = machine(2)
    polls.poll()
    stub.gpu(1).is_lost = 1
    polls.poll(3)
    assert polls.series("is_lost", 1) == [0.0, 1.0, 1.0, 1.0]
    assert polls.series("temperature_c", 1) == [61.0, None, None, None]
    assert polls.series("temperature_c", 0) == [60.0] * 4
    stub.gpu(1).is_lost = 0
    polls.poll(5)
    assert polls.kinds() == ["gpu_lost", "gpu_back"]
    lost = polls.events.all[0]
    assert (lost.uuid, lost.time_seconds) == (stub.gpu(1).uuid.decode(), 1_020.0)
    assert lost.message.startswith(f"GPU 1 ({lost.uuid}, NVIDIA H100 80GB HBM3) is lost")


def test_nvml_lost_mid_run_is_an_event_and_is_opened_again_after_growing_pauses(machine: Machine, polls: Polls) -> None:
    """CASES 28."""
    stub = machine(1)
    polls.poll()
    stub.refuse("nvmlDeviceGetUtilizationRates", DRIVER_NOT_LOADED)
    stub.refuse("nvmlInit", DRIVER_NOT_LOADED)
    assert polls.poll() == ()
    polls.poll(1000, seconds=1)
    tries = stub.calls("nvmlInit") - 1
    assert 8 <= tries <= 12, "after 1, 2, 4, … s, and then every five minutes"
    assert polls.kinds() == ["nvml_lost"]
    assert stub.state.num_initialised == 0

    stub.refuse("nvmlDeviceGetUtilizationRates", 0)
    stub.refuse("nvmlInit", 0)
    assert len(polls.poll(seconds=MAX_PAUSE_SECONDS)) == 1
    assert polls.kinds() == ["nvml_lost", "nvml_back"]
    polls.poll(3)
    assert polls.series("temperature_c")[-3:] == [60.0] * 3


def test_a_container_that_loses_its_devices_is_nvml_lost_and_nothing_is_given_up(
    machine: Machine, polls: Polls
) -> None:
    stub = machine(1)
    polls.poll()
    for place in range(64):
        stub.gpu(0).codes[place] = NO_PERMISSION
    stub.refuse("nvmlInit", UNKNOWN)
    polls.poll(3)
    assert polls.kinds() == ["nvml_lost"]
    for place in range(64):
        stub.gpu(0).codes[place] = 0
    stub.refuse("nvmlInit", 0)
    (sample,) = polls.poll(seconds=100)
    assert sample.power_w == 650.0


def test_a_gpu_that_is_missing_when_nvml_is_opened_again_is_lost(machine: Machine, polls: Polls) -> None:
    stub = machine(2)
    polls.poll()
    stub.refuse("nvmlDeviceGetUtilizationRates", DRIVER_NOT_LOADED)
    polls.poll()
    stub.refuse("nvmlDeviceGetUtilizationRates", 0)
    stub.state.num_gpus = 1
    samples = polls.poll(2)
    assert [sample.is_lost for sample in samples] == [False, True]
    assert polls.kinds() == ["nvml_lost", "nvml_back", "gpu_lost"]


def test_a_refusal_is_said_once_also_after_nvml_was_lost(machine: Machine, polls: Polls) -> None:
    stub = machine(1)
    stub.refuse("nvmlDeviceGetPowerUsage", NOT_SUPPORTED)
    polls.poll(2)
    stub.refuse("nvmlDeviceGetUtilizationRates", DRIVER_NOT_LOADED)
    polls.poll()
    stub.refuse("nvmlDeviceGetUtilizationRates", 0)
    polls.poll(2)
    assert polls.kinds() == ["not_read", "nvml_lost", "nvml_back"]


def test_without_nvml_one_message_and_no_second_try(
    machine: Machine, polls: Polls, caplog: pytest.LogCaptureFixture
) -> None:
    stub = machine(1)
    use_stub(None)
    polls.poll(5)
    use_stub(stub.path)
    polls.poll(5)
    assert polls.sampler.is_absent
    assert polls.kinds() == ["nvml_absent"]
    assert stub.calls("nvmlInit") == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("No GPU is watched: nvmlInit: NVML Shared Library Not Found. Without NVIDIA")


def test_gpus_that_the_node_uses_and_this_process_cannot_see_are_said_once(
    machine: Machine, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for num_used in (1, 4):
        sampler = Sampler(events=polls.events, history=polls.history, num_used=num_used)
        sampler.poll()
        sampler.poll()
        closed = threading.Event()
        closed.set()
        sampler.run(closed)
    (event,) = polls.events.all
    assert event.message.startswith("1 of the 4 GPUs that this node trains on can be seen")


def test_no_visible_gpu_is_no_trouble(machine: Machine, polls: Polls, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    polls.poll(2)
    assert (polls.sampler.num_polls, polls.sampler.samples, polls.kinds()) == (2, (), [])


# ---- threads ---------------------------------------------------------------------------------------------------------


def watch(place: Place | None = None, poll_seconds: float = 0.1) -> NodeWatch:
    return NodeWatch(
        place or Place(), poll_seconds=poll_seconds, history=History(1000, poll_seconds), events=EventLog()
    )


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def our_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("air-gpu-"))


def test_three_named_daemon_threads_run_and_end(machine: Machine) -> None:
    stub = machine(2)
    node = watch()
    assert our_threads() == []
    node.start()
    wait_until(lambda: node.sampler.num_polls >= 3)
    assert our_threads() == ["air-gpu-events", "air-gpu-nodes", "air-gpu-sampler"]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name in our_threads())
    begun = time.monotonic()
    node.close()
    assert time.monotonic() - begun < 2.0
    assert our_threads() == []
    assert stub.state.num_initialised == 0
    node.close()


def test_an_xid_is_told_with_its_gpu_and_stays_with_it(machine: Machine) -> None:
    stub = machine(3)
    node = watch()
    node.start()
    try:
        wait_until(lambda: stub.calls("nvmlEventSetWait"))
        for xid in (48, 79):
            stub.tell(2, data=xid)
        stub.tell(1, data=0, event_type=0x2)
        wait_until(lambda: len(node.events.all) >= 3 and node.sampler.samples[2].xids == (48, 79))
    finally:
        node.close()
    told = [(event.kind, event.uuid, event.value) for event in node.events.all]
    uuids = [stub.gpu(number).uuid.decode() for number in range(3)]
    assert told == [("xid", uuids[2], 48.0), ("xid", uuids[2], 79.0), ("double_bit_ecc", uuids[1], None)]
    assert node.events.all[1].message.startswith(f"GPU 2 ({uuids[2]}): the driver tells of an error, XID 79.")
    assert [sample.xids for sample in node.sampler.samples] == [(), (), (48, 79)]
    assert node.events.num_xids == 2


def test_gpus_that_tell_of_nothing_are_said(machine: Machine) -> None:
    stub = machine(1)
    stub.refuse("nvmlDeviceRegisterEvents", NOT_SUPPORTED)
    node = watch()
    node.start()
    try:
        wait_until(lambda: node.events.all and node.sampler.samples)
    finally:
        node.close()
    (event,) = node.events.all
    assert event.message == "The driver's errors (XIDs) of this node are not told: the GPUs refuse."


def test_events_are_heard_again_after_nvml_was_lost(machine: Machine) -> None:
    stub = machine(1)
    node = watch()
    node.start()
    try:
        wait_until(lambda: stub.calls("nvmlEventSetWait"))
        stub.refuse("nvmlEventSetWait", DRIVER_NOT_LOADED)
        wait_until(lambda: stub.calls("nvmlEventSetFree"))
        stub.refuse("nvmlEventSetWait", 0)
        stub.tell(0, data=31)
        wait_until(lambda: node.events.all)
    finally:
        node.close()
    assert [event.value for event in node.events.all] == [31.0]


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetTemperatureV", "nvmlEventSetWait", "nvmlShutdown"])
def test_nvml_that_hangs_for_good_does_not_delay_the_end(machine: Machine, function: str) -> None:
    stub = machine(1)
    if function != "nvmlShutdown":
        stub.hang(function)
    node = watch()
    node.start()
    wait_until(lambda: stub.calls(function) or function == "nvmlShutdown")
    wait_until(lambda: node.sampler.num_polls >= 2 or function in ("nvmlInit", "nvmlDeviceGetTemperatureV"))
    stub.hang(function)
    begun = time.monotonic()
    node.close()
    assert time.monotonic() - begun < 2.0
    assert our_threads() != [], "what hangs is left behind"
    num_polls, events = node.sampler.num_polls, node.events.all
    stub.release()
    wait_until(lambda: our_threads() == [])
    assert (node.sampler.num_polls, node.events.all) == (num_polls, events), "what comes too late is dropped"


def test_a_driver_that_hangs_is_told_and_so_is_its_return(machine: Machine) -> None:
    stub = machine(1)
    node = watch()
    node.start()
    try:
        wait_until(node.metrics)
        stub.hang("nvmlDeviceGetTemperatureV")
        wait_until(lambda: node.events.all)
        assert node.metrics() == {
            "gpu_health/gpus_lost/count": 0.0,
            "gpu_health/gpus_seen/count": 0.0,
            "gpu_health/nodes_stale/count": 1.0,
            "gpu_health/xids/count": 0.0,
        }
        stub.release()
        wait_until(lambda: len(node.events.all) == 2)
    finally:
        stub.release()
        node.close()
    assert [event.kind for event in node.events.all] == ["nvml_silent", "nvml_back"]
    assert re.match(r"NVML has not answered for \d+ s: the GPU driver of this node hangs\.", node.events.all[0].message)


def _end_while_nvml_hangs(path: str, function: str) -> float:
    use_stub(Path(path))
    node = watch()
    node.start()
    wait_until(lambda: NvmlStub(Path(path)).calls(function))
    begun = time.monotonic()
    node.close()
    return time.monotonic() - begun


@needs_compiler
@pytest.mark.parametrize("function", ["nvmlDeviceGetTemperatureV", "nvmlEventSetWait"])
def test_the_process_ends_with_code_0_while_nvml_hangs(tmp_path: Path, function: str) -> None:
    NvmlStub(tmp_path / "nvml").hang(function)
    (result,) = run_ranks(_end_while_nvml_hangs, 1, args=(str(tmp_path / "nvml"), function))
    assert (result.error, result.exitcode) == (None, 0)
    assert result.value < 2.0


# ---- events ----------------------------------------------------------------------------------------------------------


def test_what_happens_again_and_again_is_said_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    for _ in range(100):
        events.add("xid", "XID 31 on a", uuid="GPU-a", value=31)
    events.add("xid", "XID 79 on a", uuid="GPU-a", value=79)
    events.add("xid", "XID 31 on b", uuid="GPU-b", value=31)
    said = [record.getMessage() for record in caplog.records]
    again = "XID 31 on a (Not said again; it is still counted.)"
    assert said == ["XID 31 on a"] * 4 + [again, "XID 79 on a", "XID 31 on b"]
    assert events.num_xids == len(events.all) == 102


def test_the_log_of_events_is_bounded_and_tells_what_is_new() -> None:
    events = EventLog(node_rank=3, clock=lambda: 5.0)
    for number in range(1_200):
        events.add("xid", str(number), uuid="GPU-a", value=float(number))
    assert len(events.all) == 1_000
    assert events.xids_of("GPU-a") == tuple(range(1_184, 1_200))
    assert events.xids_of("GPU-b") == ()
    number, new = events.own_since(1_198)
    assert number == 1_200
    assert [event.message for event in new] == ["1198", "1199"]
    assert new[0] == HealthEvent(kind="xid", message="1198", time_seconds=5.0, node_rank=3, uuid="GPU-a", value=1198.0)
    assert len(events.own_since(0)[1]) == 1_000
