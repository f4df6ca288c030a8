"""What a report draws of the GPUs: one map, GPU by time, for each of these, made from what the history keeps."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_air.health.history import METRICS

Rows = npt.NDArray[np.float32]
"""Of one GPU: shape (metrics, polls), in the order of `METRICS`."""

Series = npt.NDArray[np.float64]
"""Of one GPU: shape (polls,); NaN where nothing is known."""

_PLACE = {name: place for place, name in enumerate(METRICS)}
_MAX_BITS = 0x7FFF


@dataclass(frozen=True, kw_only=True)
class Map:
    """One of the drawings.

    Attributes:
        key: Its name in the data.
        title: Its name on the page.
        unit: Of its values; "bits" is `throttle_reasons`, which is drawn in words.
        note: What it says, in a few words.
        series: Makes its values.
        step: They are kept to the nearest multiple of this.
        worst: What stands for several polls that share a pixel: "max", "min", or "bits" for all bits of all of them.
        low: Lower end of the colours; None is the least value.
        high: Upper end; None is the greatest value.
        least_span: How far apart the ends are at least, so that noise is not taken for news.
        only_if_any: Drawn only where it is not 0 everywhere, which is said in words.
    """

    key: str
    title: str
    unit: str
    note: str
    series: Callable[[Rows, float], Series]
    step: float = 1.0
    worst: str = "max"
    low: float | None = None
    high: float | None = None
    least_span: float = 1.0
    only_if_any: bool = False


def _of(*metrics: str) -> Callable[[Rows, float], Series]:
    """Return what adds up metrics; one that is not told counts as 0 beside one that is."""
    places = [_PLACE[metric] for metric in metrics]

    def add(rows: Rows, _: float) -> Series:
        values: Series = rows[places].astype(np.float64)
        total: Series = np.nansum(values, axis=0)
        total[np.isnan(values).all(axis=0)] = math.nan
        return total

    return add


def memory_used_pct(rows: Rows, _: float = 0.0) -> Series:
    """Return the share of the memory that is taken."""
    used, total = (rows[_PLACE[name]].astype(np.float64) for name in ("memory_used_bytes", "memory_total_bytes"))
    share: Series = np.divide(100.0 * used, total, out=np.full(used.shape, math.nan), where=total > 0)
    return share


def _throttle_bits(rows: Rows, _: float) -> Series:
    bits = metric(rows, "throttle_reasons")
    known = ~np.isnan(bits)
    bits[known] = bits[known].astype(np.int64) & _MAX_BITS
    return bits


def _share_of_time(*metrics: str) -> Callable[[Rows, float], Series]:
    """Return what tells how much of the time before each poll a counter of seconds has counted, in percent."""
    add = _of(*metrics)

    def share(rows: Rows, poll_seconds: float) -> Series:
        counted = add(rows, poll_seconds)
        grown = np.diff(counted, prepend=math.nan)
        percent: Series = np.clip(100.0 * grown / poll_seconds, 0.0, 100.0)
        return percent

    return share


def _grown(*metrics: str) -> Callable[[Rows, float], Series]:
    """Return what tells how far a counter is above its first value here."""
    add = _of(*metrics)

    def grow(rows: Rows, poll_seconds: float) -> Series:
        counted = add(rows, poll_seconds)
        known = counted[~np.isnan(counted)]
        return counted - known[0] if known.size else counted

    return grow


def _lacking_lanes(rows: Rows, _: float) -> Series:
    """Return by how many lanes the PCIe link is narrower than it can be."""
    return np.maximum(metric(rows, "pcie_width_max") - metric(rows, "pcie_width"), 0.0)


MAPS = (
    Map(
        key="utilization_pct",
        title="Utilisation",
        unit="%",
        note="share of the time in which a kernel ran",
        series=_of("utilization_pct"),
        worst="min",
        low=0,
        high=100,
    ),
    Map(
        key="memory_used_pct",
        title="Memory",
        unit="%",
        note="taken by processes",
        series=memory_used_pct,
        step=0.1,
        low=0,
        high=100,
    ),
    Map(
        key="temperature_c",
        title="Temperature",
        unit="°C",
        note="of the chip",
        series=_of("temperature_c"),
        least_span=25,
    ),
    Map(
        key="temperature_margin_c",
        title="Margin to slowdown",
        unit="°C",
        note="how far below the temperature at which it slows itself down",
        series=_of("temperature_margin_c"),
        worst="min",
        least_span=25,
    ),
    Map(
        key="hbm_temperature_c",
        title="Memory temperature",
        unit="°C",
        note="of the HBM",
        series=_of("hbm_temperature_c"),
        least_span=25,
    ),
    Map(key="power_w", title="Power", unit="W", note="drawn", series=_of("power_w"), low=0, least_span=50),
    Map(
        key="sm_clock_mhz",
        title="SM clock",
        unit="MHz",
        note="of the multiprocessors",
        series=_of("sm_clock_mhz"),
        worst="min",
        least_span=800,
    ),
    Map(
        key="throttle_reasons",
        title="Throttling",
        unit="bits",
        note="why the clocks are not higher",
        series=_throttle_bits,
        worst="bits",
    ),
    Map(
        key="throttled_thermal_pct",
        title="Time slowed by heat",
        unit="%",
        note="share of the time before each poll",
        series=_share_of_time("throttled_thermal_seconds"),
        high=100,
        low=0,
        only_if_any=True,
    ),
    Map(
        key="throttled_board_pct",
        title="Time slowed by the board or for reliability",
        unit="%",
        note="share of the time before each poll",
        series=_share_of_time("throttled_board_seconds", "throttled_reliability_seconds"),
        high=100,
        low=0,
        only_if_any=True,
    ),
    Map(
        key="ecc_uncorrected",
        title="Uncorrected memory errors",
        unit="",
        note="ECC, since watching began",
        series=_of("ecc_uncorrected"),
        only_if_any=True,
        low=0,
    ),
    Map(
        key="ecc_corrected",
        title="Corrected memory errors",
        unit="",
        note="ECC, since watching began",
        series=_of("ecc_corrected"),
        only_if_any=True,
        low=0,
    ),
    Map(
        key="remapped_rows",
        title="Newly remapped memory rows",
        unit="",
        note="since the left edge",
        series=_grown("remapped_rows_correctable", "remapped_rows_uncorrectable"),
        only_if_any=True,
        low=0,
    ),
    Map(
        key="nvlink_errors",
        title="NVLink errors",
        unit="",
        note="CRC, replays and recoveries since watching began",
        series=_of("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries"),
        only_if_any=True,
        low=0,
    ),
    Map(
        key="pcie_replays",
        title="PCIe replays",
        unit="",
        note="since watching began",
        series=_of("pcie_replays"),
        only_if_any=True,
        low=0,
    ),
    Map(
        key="pcie_lanes_lost",
        title="Lost PCIe lanes",
        unit="",
        note="against what the GPU and its slot can have",
        series=_lacking_lanes,
        only_if_any=True,
        low=0,
    ),
)
"""All of them, in the order of the page."""


def is_lost(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return where the driver did not reach the GPU."""
    lost: npt.NDArray[np.bool_] = rows[_PLACE["is_lost"]] == 1.0
    return lost


def metric(rows: Rows, name: str) -> Series:
    """Return the values of one of `METRICS`."""
    series: Series = rows[_PLACE[name]].astype(np.float64)
    return series
