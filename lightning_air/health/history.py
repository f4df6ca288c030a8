"""The last hours of every GPU, in memory: one number per GPU, metric and poll, and a gap where a poll was missed."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_air.health.sample import GPUSample

METRICS = (
    "utilization_pct",
    "memory_used_bytes",
    "memory_total_bytes",
    "temperature_c",
    "temperature_margin_c",
    "hbm_temperature_c",
    "power_w",
    "power_limit_w",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "throttle_reasons",
    "throttled_power_seconds",
    "throttled_thermal_seconds",
    "throttled_board_seconds",
    "throttled_reliability_seconds",
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_rows_correctable",
    "remapped_rows_uncorrectable",
    "has_pending_remap",
    "has_failed_remap",
    "has_pending_retirement",
    "nvlink_crc_errors",
    "nvlink_replays",
    "nvlink_recoveries",
    "pcie_replays",
    "pcie_width",
    "pcie_width_max",
    "pcie_generation",
    "pcie_generation_max",
    "recovery_action",
    "is_lost",
)
"""What is kept of a `GPUSample`, in this order."""

# Counters of a lifetime do not fit into 24 bits; what they have grown by does.
COUNTERS = frozenset(name for name in METRICS if name.endswith(("_seconds", "_corrected", "_uncorrected", "_errors")))
COUNTERS |= {"nvlink_replays", "nvlink_recoveries", "pcie_replays"}

Row = tuple[float, ...]
"""One number per metric; NaN where the GPU does not tell."""


def row_of(sample: GPUSample, first: GPUSample | None) -> Row:
    """Return what is kept of a sample: counters as what they have grown by since the first sample of the GPU."""
    return tuple(_number(name, sample, first or sample) for name in METRICS)


def _number(name: str, sample: GPUSample, first: GPUSample) -> float:
    value = getattr(sample, name)
    if value is None:
        return math.nan
    if name not in COUNTERS:
        return float(value)
    before = getattr(first, name)
    # Less than at first: the driver was loaded again, and counts from zero.
    return float(value - before) if before is not None and value >= before else float(value)


@dataclass(frozen=True)
class GpuId:
    """Which GPU of which node a series belongs to."""

    uuid: str
    index: int
    name: str
    node_rank: int


@dataclass(frozen=True)
class Window:
    """A copy of what happened in some time.

    Attributes:
        times: Of each poll, in seconds since the epoch; shape (polls,). NaN for a poll that was missed.
        values: By GPU, shape (metrics, polls), in the order of `METRICS`; NaN where nothing is known.
    """

    times: npt.NDArray[np.float64]
    values: dict[GpuId, npt.NDArray[np.float32]]


class History:
    """A ring of polls. Any thread may use it.

    Args:
        num_polls: How many are kept.
        poll_seconds: The time between two.
    """

    def __init__(self, num_polls: int, poll_seconds: float) -> None:
        self._num_polls = num_polls
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._times = np.full(num_polls, np.nan)
        self._series: dict[GpuId, npt.NDArray[np.float32]] = {}
        self._first_slot: int | None = None
        self._last_slot = 0

    @property
    def num_polls(self) -> int:
        """How many are kept."""
        return self._num_polls

    @property
    def poll_seconds(self) -> float:
        """The time between two polls."""
        return self._poll_seconds

    def append(self, time_seconds: float, rows: Mapping[GpuId, Sequence[float]]) -> None:
        """Add what GPUs said at one moment; several calls may fill one poll with different GPUs.

        A GPU that is not among the rows has a gap there, and so have all GPUs for the polls in between that never
        came. What is older than the ring is long is left out.

        Args:
            time_seconds: Since the epoch.
            rows: By GPU, as `row_of` makes them.
        """
        slot = math.floor(time_seconds / self._poll_seconds + 0.5)
        with self._lock:
            if self._first_slot is None:
                self._first_slot = self._last_slot = slot
            if slot <= self._last_slot - self._num_polls:
                return
            self._first_slot = min(self._first_slot, slot)
            self._clear(self._last_slot + 1, slot)
            self._last_slot = max(self._last_slot, slot)
            place = slot % self._num_polls
            if np.isnan(self._times[place]):
                self._times[place] = time_seconds
            for gpu, row in rows.items():
                series = self._series.get(gpu)
                if series is None:
                    series = np.full((len(METRICS), self._num_polls), np.nan, dtype=np.float32)
                    self._series[gpu] = series
                series[:, place] = row

    def _clear(self, start: int, end: int) -> None:
        """Empty the polls from `start` to `end`, both included."""
        for slot in range(max(start, end - self._num_polls + 1), end + 1):
            place = slot % self._num_polls
            self._times[place] = np.nan
            for series in self._series.values():
                series[:, place] = np.nan

    def window(self, seconds: float | None = None) -> Window:
        """Return a copy of the last so many seconds up to the newest poll; None is all."""
        with self._lock:
            if self._first_slot is None:
                return Window(np.empty(0), {})
            num = min(self._num_polls, self._last_slot - self._first_slot + 1)
            if seconds is not None:
                num = min(num, max(1, math.ceil(seconds / self._poll_seconds)))
            places = np.arange(self._last_slot - num + 1, self._last_slot + 1) % self._num_polls
            return Window(self._times[places], {gpu: series[:, places] for gpu, series in self._series.items()})

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        with self._lock:
            return self._times.nbytes + sum(series.nbytes for series in self._series.values())
