"""Reading GPUs: all that they tell, nothing that they do not, and each refusal said once."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_air.health import reader
from lightning_air.health.nvml import NvmlError
from lightning_air.health.reader import GpuReader, read_gpus
from lightning_air.health.sample import GPUSample
from tests.kit.nvml_stub import (
    DRIVER_NOT_LOADED,
    FUNCTIONS,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    NvmlStub,
    compiler_missing,
    use_stub,
)
from tests.kit.ranks import run_ranks, values

Machine = Callable[[int], NvmlStub]

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


class Said(list[tuple[str, str]]):
    """What a reader has said."""

    def __call__(self, kind: str, message: str) -> None:
        self.append((kind, message))


def only(samples: list[GPUSample]) -> GPUSample:
    (sample,) = samples
    return sample


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
def test_all_gpus_are_read(machine: Machine, num_gpus: int) -> None:
    stub = machine(num_gpus)

    samples = read_gpus()

    assert [sample.index for sample in samples] == list(range(num_gpus))
    assert [sample.uuid for sample in samples] == [stub.gpu(i).uuid.decode() for i in range(num_gpus)]
    assert [sample.temperature_c for sample in samples] == [60.0 + i for i in range(num_gpus)]
    assert stub.state.num_initialised == 0, "NVML is given back"


def test_every_value_arrives_under_its_name_and_in_its_unit(machine: Machine) -> None:
    gpu = machine(1).gpu(0)
    gpu.memory_used, gpu.memory_total, gpu.memory_reserved = 3 * 2**30, 80 * 2**30, 5 * 2**30
    gpu.power_mw, gpu.power_limit_mw = 412_345, 700_000
    gpu.throttle_reasons = 0x4 | 0x80
    gpu.ecc_corrected, gpu.ecc_uncorrected = 2**40, 7
    gpu.remapped_correctable, gpu.remapped_uncorrectable, gpu.remap_pending = 3, 4, 1
    gpu.pcie_replays, gpu.pcie_width, gpu.pcie_generation = 11, 8, 4
    for field, value in {31: 1, 38: 5, 45: 6, 52: 8, 59: 9, 74: 10**9, 75: 5 * 10**8, 230: 2}.items():
        gpu.fields[field] = value

    sample = only(read_gpus())

    assert sample == GPUSample(
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        index=0,
        name="NVIDIA H100 80GB HBM3",
        utilization_pct=90.0,
        memory_used_bytes=3 * 2**30,
        memory_total_bytes=80 * 2**30,
        temperature_c=60.0,
        temperature_margin_c=27.0,
        temperature_slowdown_c=87.0,
        temperature_shutdown_c=92.0,
        hbm_temperature_c=70.0,
        power_w=412.345,
        power_limit_w=700.0,
        sm_clock_mhz=1900.0,
        sm_clock_max_mhz=1980.0,
        memory_clock_mhz=2619.0,
        memory_clock_max_mhz=2619.0,
        throttle_reasons=0x84,
        throttled_power_seconds=1.0,
        throttled_thermal_seconds=0.5,
        throttled_board_seconds=0.0,
        throttled_reliability_seconds=0.0,
        ecc_corrected=2**40,
        ecc_uncorrected=7,
        remapped_rows_correctable=3,
        remapped_rows_uncorrectable=4,
        has_pending_remap=True,
        has_failed_remap=False,
        has_pending_retirement=True,
        nvlink_crc_errors=11,
        nvlink_replays=8,
        nvlink_recoveries=9,
        pcie_replays=11,
        pcie_width=8,
        pcie_width_max=16,
        pcie_generation=4,
        pcie_generation_max=5,
        recovery_action=2,
    )
    assert sample.throttle_names == ("sw_power_cap", "hw_power_brake_slowdown")
    assert sample.is_throttled
    assert sample.recovery_name == "node_reboot"
    assert sample.memory_used_pct == 3.75


def test_a_gpu_whose_name_cannot_be_read_is_read_all_the_same(machine: Machine) -> None:
    machine(1).gpu(0).name = b"\xff\xfe"
    sample = only(read_gpus())
    assert (sample.name, sample.temperature_c) == ("unknown GPU", 60.0)


def test_idle_clocks_are_no_throttling_and_unknown_bits_have_a_name(machine: Machine) -> None:
    gpu = machine(1).gpu(0)
    gpu.throttle_reasons = 0x1 | 0x2
    assert not only(read_gpus()).is_throttled
    gpu.throttle_reasons, gpu.fields[230] = 0x1000, 99
    sample = only(read_gpus())
    assert (sample.throttle_names, sample.is_throttled, sample.recovery_name) == (("0x1000",), True, "action_99")


def test_values_that_change_are_read_again_and_limits_are_not(machine: Machine) -> None:
    stub = machine(1)
    gpus = GpuReader()
    try:
        gpus.sweep()
        asked = stub.calls("nvmlDeviceGetTemperatureThreshold")
        stub.gpu(0).temperature, stub.gpu(0).sm_clock = 80, 700
        sample = only(gpus.sweep())
    finally:
        gpus.close()
    assert (sample.temperature_c, sample.sm_clock_mhz) == (80.0, 700.0)
    assert sample.temperature_slowdown_c == 87.0
    assert stub.calls("nvmlDeviceGetTemperatureThreshold") == asked == 2


@pytest.mark.parametrize(
    ("function", "code", "lost", "reason"),
    [
        ("nvmlDeviceGetUtilizationRates", NOT_SUPPORTED, "utilization_pct", "utilisation (Not Supported)"),
        ("nvmlDeviceGetPowerUsage", NO_PERMISSION, "power_w", "power (Insufficient Permissions)"),
    ],
)
def test_what_one_gpu_refuses_is_said_once_and_the_others_go_on(
    machine: Machine, function: str, code: int, lost: str, reason: str
) -> None:
    """CASES 27."""
    stub, said = machine(3), Said()
    stub.refuse(function, code, 1)
    gpus = GpuReader(say=said)
    try:
        sweeps = [gpus.sweep() for _ in range(5)]
    finally:
        gpus.close()
    for samples in sweeps:
        assert [getattr(sample, lost) is None for sample in samples] == [False, True, False]
        assert samples[1].temperature_c == 61.0
    assert said == [("unsupported", f"Not read from GPU 1 ({stub.gpu(1).uuid.decode()}): {reason}.")]
    assert stub.calls(function) == 3 * 5 - 4, "it is not asked again"


def test_what_all_gpus_refuse_is_one_message(machine: Machine) -> None:
    stub, said = machine(8), Said()
    for function in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"):
        stub.refuse(function, NOT_SUPPORTED)
    for number in range(8):
        stub.gpu(number).field_codes[82] = NOT_SUPPORTED
    gpus = GpuReader(say=said)
    try:
        assert all(sample.hbm_temperature_c is None for sample in gpus.sweep())
        gpus.sweep()
    finally:
        gpus.close()
    ((_, message),) = said
    assert message.count("GPU-") == 8
    assert message.endswith("ECC errors, remapped rows, hbm_temperature_c (field 82) (Not Supported).")


def test_one_bad_field_of_two_leaves_the_other(machine: Machine) -> None:
    gpu = machine(1).gpu(0)
    gpu.field_codes[38], gpu.fields[45] = NOT_SUPPORTED, 6
    assert only(read_gpus()).nvlink_crc_errors == 6


def test_a_field_of_a_type_that_is_not_known_is_not_read(machine: Machine) -> None:
    machine(1).gpu(0).fields[82] = 2**64 - 1
    sample = only(read_gpus())
    assert (sample.hbm_temperature_c, sample.nvlink_replays) == (None, 0)


def test_a_call_that_fails_now_and_then_is_kept_and_one_that_always_does_is_not(machine: Machine) -> None:
    stub, said = machine(1), Said()
    gpus = GpuReader(say=said)
    try:
        for fails in (True, True, False, True, True, False):
            stub.refuse("nvmlDeviceGetPowerUsage", UNKNOWN if fails else 0)
            assert (only(gpus.sweep()).power_w is None) == fails
        assert said == []
        stub.refuse("nvmlDeviceGetPowerUsage", UNKNOWN)
        for _ in range(5):
            assert only(gpus.sweep()).power_w is None
    finally:
        gpus.close()
    assert [kind for kind, _ in said] == ["unsupported"]
    assert "power (Unknown Error)" in said[0][1]


def test_older_functions_are_used_where_the_newer_are_missing(machine: Machine) -> None:
    stub, said = machine(1), Said()
    for function in ("MemoryInfo_v2", "TemperatureV", "CurrentClocksEventReasons"):
        stub.refuse(f"nvmlDeviceGet{function}", NOT_SUPPORTED)
    stub.gpu(0).throttle_reasons = 0x40
    gpus = GpuReader(say=said)
    try:
        sample = only(gpus.sweep())
    finally:
        gpus.close()
    assert (sample.temperature_c, sample.throttle_names) == (60.0, ("hw_thermal_slowdown",))
    assert sample.memory_used_bytes == 21 * 2**30, "the first version counts the driver's own"
    assert said == []


def test_a_function_that_pynvml_lacks_is_not_read_and_it_is_said_what_to_do(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-ml-py 12.560 has no margin."""
    machine(1)
    said = Said()
    monkeypatch.delattr("pynvml.nvmlDeviceGetMarginTemperature")
    gpus = GpuReader(say=said)
    assert only(gpus.sweep()).temperature_margin_c == 27.0, "from the limit"
    gpus.close()
    ((_, message),) = said
    assert message.endswith("temperature margin (pynvml has no nvmlDeviceGetMarginTemperature: update nvidia-ml-py).")


def test_the_margin_follows_from_the_limit_where_only_that_is_told(machine: Machine) -> None:
    stub = machine(1)
    stub.refuse("nvmlDeviceGetMarginTemperature", NOT_SUPPORTED)
    stub.gpu(0).temperature = 80
    assert only(read_gpus()).temperature_margin_c == 7.0


# ---- loss ------------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_stays_in_the_list_and_comes_back(machine: Machine) -> None:
    stub = machine(2)
    gpus = GpuReader()
    try:
        assert [sample.is_lost for sample in gpus.sweep()] == [False, False]
        stub.gpu(1).is_lost = 1
        sweeps = [gpus.sweep() for _ in range(8)]
        asked = stub.calls("nvmlDeviceGetUtilizationRates")
        assert all([sample.is_lost for sample in samples] == [False, True] for samples in sweeps)
        assert sweeps[0][1] == GPUSample(
            uuid=stub.gpu(1).uuid.decode(), index=1, name="NVIDIA H100 80GB HBM3", is_lost=True
        )
        assert asked - 2 - 8 == 3, "the lost one is asked in sweeps 1, 3 and 6"
        stub.gpu(1).is_lost = 0
        later = [gpus.sweep()[1].is_lost for _ in range(10)]
        assert later[-1] is False
    finally:
        gpus.close()


def test_a_machine_whose_gpus_are_all_lost_is_told(machine: Machine) -> None:
    stub = machine(1)
    gpus = GpuReader()
    stub.gpu(0).is_lost = 1
    try:
        assert only(gpus.sweep()).is_lost
        assert only(gpus.sweep()).is_lost
    finally:
        gpus.close()


def test_a_gpu_that_is_broken_from_the_start_is_named(machine: Machine) -> None:
    stub, said = machine(2), Said()
    stub.gpu(0).is_lost = 1
    gpus = GpuReader(say=said)
    try:
        assert [sample.index for sample in gpus.sweep()] == [1]
    finally:
        gpus.close()
    ((kind, message),) = said
    assert kind == "selection"
    assert message.startswith("GPU 0 of this machine does not answer (nvmlDeviceGetHandleByIndex: GPU is lost)")


def test_nvml_that_is_lost_is_an_error_and_another_reader_works(machine: Machine) -> None:
    stub = machine(2)
    gpus = GpuReader()
    gpus.sweep()
    stub.refuse("nvmlDeviceGetUtilizationRates", DRIVER_NOT_LOADED)
    with pytest.raises(NvmlError, match="nvmlDeviceGetUtilizationRates: Driver Not Loaded"):
        gpus.sweep()
    gpus.close()
    stub.refuse("nvmlDeviceGetUtilizationRates", 0)
    again = GpuReader()
    assert len(again.sweep()) == 2
    again.close()


def test_when_all_calls_fail_at_once_nothing_is_given_up(machine: Machine) -> None:
    """CASES 28: a container that loses its devices gets "unknown error" or "no permission" for everything."""
    stub, said = machine(2), Said()
    gpus = GpuReader(say=said)
    gpus.sweep()
    for number in range(2):
        for place in range(64):
            stub.gpu(number).codes[place] = NO_PERMISSION
    for _ in range(4):
        with pytest.raises(NvmlError, match="all readings"):
            gpus.sweep()
    for number in range(2):
        for place in range(64):
            stub.gpu(number).codes[place] = 0
    assert [sample.power_w for sample in gpus.sweep()] == [650.0, 650.0]
    gpus.close()
    assert said == []


def test_without_nvml_there_are_no_gpus_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    use_stub(None)
    assert read_gpus() == []
    assert [record.getMessage() for record in caplog.records] == [
        "No GPU can be read: nvmlInit: NVML Shared Library Not Found."
    ]


def test_a_driver_that_hangs_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = machine(1)
    stub.hang("nvmlDeviceGetPowerUsage")
    monkeypatch.setattr(reader, "_READ_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"NVML has not answered within 0\.2 s: the GPU driver"):
        read_gpus()
    stub.release()


# ---- other libraries, each in a process of its own -------------------------------------------------------------------


def _read_with(path: str, missing: tuple[str, ...]) -> dict[str, Any]:
    use_stub(Path(path), missing=missing)
    said = Said()
    gpus = GpuReader(say=said)
    try:
        return {"sample": only(gpus.sweep()), "said": list(said)}
    finally:
        gpus.close()


@needs_compiler
def test_symbols_that_the_library_lacks_are_not_read(tmp_path: Path) -> None:
    NvmlStub(tmp_path / "nvml")
    missing = (
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMigMode",
    )
    (told,) = values(run_ranks(_read_with, 1, args=(str(tmp_path / "nvml"), missing)))
    sample = told["sample"]
    assert (sample.temperature_c, sample.temperature_margin_c, sample.throttle_reasons) == (60.0, 27.0, 0)
    assert (sample.hbm_temperature_c, sample.recovery_action) == (None, None)
    ((kind, message),) = told["said"]
    assert kind == "unsupported"
    assert "temperature margin, has_pending_retirement (field 31)" in message
    assert message.endswith("(Function Not Found).")


def _read_without_pynvml() -> str:
    import sys

    sys.modules["pynvml"] = None  # type: ignore[assignment]
    with pytest.raises(NvmlError) as raised:
        GpuReader()
    return f"{raised.value.kind}: {raised.value}"


def test_without_pynvml_it_is_said_what_to_install() -> None:
    (told,) = values(run_ranks(_read_without_pynvml, 1))
    assert told.startswith("absent: import pynvml: ")
    assert told.endswith("Install nvidia-ml-py.")


def _leave_a_hanging_read(path: str) -> float:
    use_stub(Path(path))
    thread = threading.Thread(target=read_gpus, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    return os.times().elapsed


@needs_compiler
def test_a_process_with_a_hanging_read_can_end(tmp_path: Path) -> None:
    NvmlStub(tmp_path / "nvml").hang("nvmlInit")
    begun = time.monotonic()
    (result,) = run_ranks(_leave_a_hanging_read, 1, args=(str(tmp_path / "nvml"),))
    assert (result.error, result.exitcode) == (None, 0)
    assert time.monotonic() - begun < 30


def test_a_healthy_gpu_answers_all_that_is_asked_and_nothing_slow_is(machine: Machine) -> None:
    """The stub has no process lists, fans and PCIe throughput: whoever asked for them would be refused."""
    machine(1)
    said = Said()
    gpus = GpuReader(say=said)
    gpus.sweep()
    gpus.close()
    assert said == []
    assert not any(word in name for name in FUNCTIONS for word in ("Process", "Fan", "Throughput"))
