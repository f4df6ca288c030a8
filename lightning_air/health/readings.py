"""What is asked of a GPU: each question gives some attributes of `GPUSample`, and may be refused by itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_air.health.nvml import Call, NvmlError

_MEMORY_V2 = 0x02000028
_SLOWDOWN, _SHUTDOWN = 1, 0  # temperature thresholds
_SM, _MEMORY = 1, 2  # clocks
_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_DRIVER_LOAD = 0


@dataclass(frozen=True)
class Reading:
    """One question.

    Attributes:
        name: It stands in the warning when there is no answer.
        ask: From a way to call NVML, and a handle, to attributes of `GPUSample`.
        is_of_instance: A MIG instance answers for itself, else its GPU does.
        is_constant: One answer is enough.
    """

    name: str
    ask: Callable[[Call, Any], dict[str, Any]]
    is_of_instance: bool = False
    is_constant: bool = False


@dataclass(frozen=True)
class Field:
    """One of the values that NVML gives by number, many in one call.

    Only numbers that have kept their meaning since they appeared: those of the times of single throttle reasons moved
    between the drivers of CUDA 12 (251 to 253) and 13 (269 to 271), so that one asks for something else elsewhere.

    Attributes:
        id: NVML's number.
        attribute: Of `GPUSample`; the values of several fields with the same one are added up.
        convert: From NVML's number.
    """

    id: int
    attribute: str
    convert: Callable[[Any], Any] = int


def _from_nanoseconds(value: float) -> float:
    return value / 1e9


FIELDS = (
    Field(31, "has_pending_retirement", bool),
    Field(38, "nvlink_crc_errors"),  # flow control
    Field(45, "nvlink_crc_errors"),  # data
    Field(52, "nvlink_replays"),
    Field(59, "nvlink_recoveries"),
    Field(74, "throttled_power_seconds", _from_nanoseconds),
    Field(75, "throttled_thermal_seconds", _from_nanoseconds),
    Field(77, "throttled_board_seconds", _from_nanoseconds),
    Field(79, "throttled_reliability_seconds", _from_nanoseconds),
    Field(82, "hbm_temperature_c", float),
    Field(230, "recovery_action"),
)


def _newest(call: Call, *questions: tuple[Any, ...]) -> Any:
    """Return the answer of the first function that this library and this GPU have; they are in order of preference."""
    for question in questions[:-1]:
        try:
            return call(*question)
        except NvmlError as error:
            if error.kind != "unsupported":
                raise
    return call(*questions[-1])


def _utilization(call: Call, handle: Any) -> dict[str, Any]:
    return {"utilization_pct": float(call("nvmlDeviceGetUtilizationRates", handle).gpu)}


def _memory(call: Call, handle: Any) -> dict[str, Any]:
    # The first version counts what the driver keeps for itself as used.
    memory = _newest(call, ("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2), ("nvmlDeviceGetMemoryInfo", handle))
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _temperature(call: Call, handle: Any) -> dict[str, Any]:
    value = _newest(call, ("nvmlDeviceGetTemperatureV", handle, 0), ("nvmlDeviceGetTemperature", handle, 0))
    return {"temperature_c": float(value)}


def _margin(call: Call, handle: Any) -> dict[str, Any]:
    return {"temperature_margin_c": float(call("nvmlDeviceGetMarginTemperature", handle))}


def _slowdown(call: Call, handle: Any) -> dict[str, Any]:
    return {"temperature_slowdown_c": float(call("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN))}


def _shutdown(call: Call, handle: Any) -> dict[str, Any]:
    return {"temperature_shutdown_c": float(call("nvmlDeviceGetTemperatureThreshold", handle, _SHUTDOWN))}


def _power(call: Call, handle: Any) -> dict[str, Any]:
    return {"power_w": call("nvmlDeviceGetPowerUsage", handle) / 1000}


def _power_limit(call: Call, handle: Any) -> dict[str, Any]:
    return {"power_limit_w": call("nvmlDeviceGetEnforcedPowerLimit", handle) / 1000}


def _clocks(call: Call, handle: Any) -> dict[str, Any]:
    return {
        "sm_clock_mhz": float(call("nvmlDeviceGetClockInfo", handle, _SM)),
        "memory_clock_mhz": float(call("nvmlDeviceGetClockInfo", handle, _MEMORY)),
    }


def _clock_limits(call: Call, handle: Any) -> dict[str, Any]:
    return {
        "sm_clock_max_mhz": float(call("nvmlDeviceGetMaxClockInfo", handle, _SM)),
        "memory_clock_max_mhz": float(call("nvmlDeviceGetMaxClockInfo", handle, _MEMORY)),
    }


def _throttling(call: Call, handle: Any) -> dict[str, Any]:
    bits = _newest(
        call,
        ("nvmlDeviceGetCurrentClocksEventReasons", handle),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", handle),  # the same, before CUDA 12.2
    )
    return {"throttle_reasons": bits}


def _ecc(call: Call, handle: Any) -> dict[str, Any]:
    return {
        "ecc_corrected": call("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _SINCE_DRIVER_LOAD),
        "ecc_uncorrected": call("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_DRIVER_LOAD),
    }


def _remapped_rows(call: Call, handle: Any) -> dict[str, Any]:
    correctable, uncorrectable, is_pending, has_failed = call("nvmlDeviceGetRemappedRows", handle)
    return {
        "remapped_rows_correctable": correctable,
        "remapped_rows_uncorrectable": uncorrectable,
        "has_pending_remap": bool(is_pending),
        "has_failed_remap": bool(has_failed),
    }


def _pcie_replays(call: Call, handle: Any) -> dict[str, Any]:
    return {"pcie_replays": call("nvmlDeviceGetPcieReplayCounter", handle)}


def _pcie_link(call: Call, handle: Any) -> dict[str, Any]:
    return {
        "pcie_width": call("nvmlDeviceGetCurrPcieLinkWidth", handle),
        "pcie_generation": call("nvmlDeviceGetCurrPcieLinkGeneration", handle),
    }


def _pcie_limits(call: Call, handle: Any) -> dict[str, Any]:
    return {
        "pcie_width_max": call("nvmlDeviceGetMaxPcieLinkWidth", handle),
        "pcie_generation_max": call("nvmlDeviceGetMaxPcieLinkGeneration", handle),
    }


READINGS = (
    Reading("utilisation", _utilization, is_of_instance=True),
    Reading("memory", _memory, is_of_instance=True),
    Reading("temperature", _temperature),
    Reading("temperature margin", _margin),
    Reading("slowdown temperature", _slowdown, is_constant=True),
    Reading("shutdown temperature", _shutdown, is_constant=True),
    Reading("power", _power),
    Reading("power limit", _power_limit),
    Reading("clocks", _clocks),
    Reading("clock limits", _clock_limits, is_constant=True),
    Reading("throttle reasons", _throttling),
    Reading("ECC errors", _ecc),
    Reading("remapped rows", _remapped_rows),
    Reading("PCIe replays", _pcie_replays),
    Reading("PCIe link", _pcie_link),
    Reading("PCIe limits", _pcie_limits, is_constant=True),
)


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GPU's values with the margin that follows from its limit, where the GPU tells the limit only."""
    whole = dict(values)
    if "temperature_margin_c" not in whole and {"temperature_slowdown_c", "temperature_c"} <= whole.keys():
        whole["temperature_margin_c"] = whole["temperature_slowdown_c"] - whole["temperature_c"]
    return whole
