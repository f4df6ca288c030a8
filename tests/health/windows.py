"""Readings of some GPUs as a history keeps them, made without any GPU."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_air.health.history import METRICS, GpuId, Window

START_SECONDS = 1_764_500_000
PLACE = {name: place for place, name in enumerate(METRICS)}
HEALTHY = {
    "utilization_pct": 97.0,
    "memory_used_bytes": 60.0 * 2**30,
    "memory_total_bytes": 80.0 * 2**30,
    "temperature_c": 61.0,
    "temperature_margin_c": 26.0,
    "hbm_temperature_c": 70.0,
    "power_w": 640.0,
    "power_limit_w": 700.0,
    "sm_clock_mhz": 1900.0,
    "sm_clock_max_mhz": 1980.0,
    "pcie_width": 16.0,
    "pcie_width_max": 16.0,
    "pcie_generation": 5.0,
}


def gpu(number: int, *, node_rank: int = 0, name: str = "NVIDIA H100 80GB HBM3") -> GpuId:
    return GpuId(f"GPU-{number:08x}-0000-0000-0000-000000000000", number % 8, name, node_rank)


def gpus(count: int) -> list[GpuId]:
    """Return as many as asked for, eight to a node."""
    return [gpu(number, node_rank=number // 8) for number in range(count)]


def healthy(num_polls: int) -> npt.NDArray[np.float32]:
    """Return the readings of a GPU that works, all the same."""
    rows = np.zeros((len(METRICS), num_polls), dtype=np.float32)
    for name, value in HEALTHY.items():
        rows[PLACE[name]] = value
    return rows


def lively(num_polls: int, seed: int) -> npt.NDArray[np.float32]:
    """Return the readings of a GPU that trains: each has its own noise."""
    random = np.random.default_rng(seed)
    rows = healthy(num_polls)
    warmth = random.normal(0, 1.5, num_polls).round()
    rows[PLACE["utilization_pct"]] = np.clip(random.normal(96, 3, num_polls), 0, 100).round()
    rows[PLACE["temperature_c"]] += warmth
    rows[PLACE["temperature_margin_c"]] -= warmth
    rows[PLACE["hbm_temperature_c"]] += warmth + random.normal(0, 1, num_polls).round()
    rows[PLACE["power_w"]] += random.normal(0, 25, num_polls)
    rows[PLACE["sm_clock_mhz"]] -= 15 * random.integers(0, 8, num_polls)
    rows[PLACE["throttle_reasons"]] = 4 * (random.random(num_polls) < 0.1)
    return rows


def window(values: Mapping[GpuId, npt.NDArray[np.float32]], poll_seconds: float = 10.0) -> Window:
    """Return them as polled since `START_SECONDS`; a poll of which nobody has a reading was missed."""
    (num_polls,) = {rows.shape[1] for rows in values.values()}
    times = START_SECONDS + poll_seconds * np.arange(num_polls, dtype=np.float64)
    times[np.all([np.isnan(rows).all(axis=0) for rows in values.values()], axis=0)] = np.nan
    return Window(times, dict(values))
