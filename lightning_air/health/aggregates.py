"""The dozen numbers that are logged for all GPUs of all nodes, whatever their number: their names never change."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from lightning_air.health.history import METRICS, Row
from lightning_air.health.sample import HARMLESS_REASONS

_PLACE = {name: place for place, name in enumerate(METRICS)}

NAMES = (
    "gpu_health/ecc_uncorrected/sum",
    "gpu_health/gpus_lost/count",
    "gpu_health/gpus_seen/count",
    "gpu_health/gpus_throttled/count",
    "gpu_health/hbm_temperature_c/max",
    "gpu_health/memory_used_pct/max",
    "gpu_health/nodes_stale/count",
    "gpu_health/power_w/mean",
    "gpu_health/sm_clock_mhz/min",
    "gpu_health/temperature_c/max",
    "gpu_health/temperature_margin_c/min",
    "gpu_health/utilization_pct/mean",
    "gpu_health/xids/count",
)
"""All names; one is left out of a record as long as no GPU tells what it needs."""


def aggregate(rows: Sequence[Row], *, num_stale_nodes: int, num_xids: int) -> dict[str, float]:
    """Return what is logged, by name.

    Args:
        rows: The last row of every GPU of every node that is not stale.
        num_stale_nodes: Nodes that have gone silent.
        num_xids: The driver's errors on all nodes since sampling began.

    Returns:
        Name to value; temperatures in degrees Celsius, clocks in MHz, power in watts per GPU. Counts of errors are
        those since sampling began.
    """
    is_lost = [row[_PLACE["is_lost"]] == 1.0 for row in rows]
    shares = [
        100 * row[_PLACE["memory_used_bytes"]] / row[_PLACE["memory_total_bytes"]] for row in rows if _has_memory(row)
    ]
    reasons = _told(rows, "throttle_reasons")
    found: dict[str, float | None] = {
        "gpu_health/ecc_uncorrected/sum": _of(sum, _told(rows, "ecc_uncorrected")),
        "gpu_health/gpus_lost/count": sum(is_lost),
        "gpu_health/gpus_seen/count": len(rows) - sum(is_lost),
        "gpu_health/gpus_throttled/count": _of(sum, [float(bool(int(bits) & ~HARMLESS_REASONS)) for bits in reasons]),
        "gpu_health/hbm_temperature_c/max": _of(max, _told(rows, "hbm_temperature_c")),
        "gpu_health/memory_used_pct/max": _of(max, shares),
        "gpu_health/nodes_stale/count": num_stale_nodes,
        "gpu_health/power_w/mean": _of(_mean, _told(rows, "power_w")),
        "gpu_health/sm_clock_mhz/min": _of(min, _told(rows, "sm_clock_mhz")),
        "gpu_health/temperature_c/max": _of(max, _told(rows, "temperature_c")),
        "gpu_health/temperature_margin_c/min": _of(min, _told(rows, "temperature_margin_c")),
        "gpu_health/utilization_pct/mean": _of(_mean, _told(rows, "utilization_pct")),
        "gpu_health/xids/count": num_xids,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def combine_hosts(hosts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several hosts as one: names that end in "/max" by the largest, others by the mean."""
    by_name: dict[str, list[float]] = {}
    for host in hosts:
        for name, value in host.items():
            by_name.setdefault(name, []).append(value)
    return {name: max(each) if name.endswith("/max") else _mean(each) for name, each in by_name.items()}


def _told(rows: Sequence[Row], metric: str) -> list[float]:
    place = _PLACE[metric]
    return [row[place] for row in rows if not math.isnan(row[place])]


def _has_memory(row: Row) -> bool:
    used, total = row[_PLACE["memory_used_bytes"]], row[_PLACE["memory_total_bytes"]]
    return not math.isnan(used) and total > 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of(combine: Callable[[list[float]], float], values: list[float]) -> float | None:
    return combine(values) if values else None
