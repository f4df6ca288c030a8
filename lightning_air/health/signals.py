"""What rules look at: the readings of a GPU, and what follows from them. Each is a number with its unit in the name."""

import math
from collections.abc import Callable

from lightning_air.health.history import METRICS, Row

_PLACE = {name: place for place, name in enumerate(METRICS)}

XID = "xid"
SECONDS_WITHOUT_STEP = "seconds_without_step"

_POWER_CAP, _THERMAL, _POWER_BRAKE = 0x4, 0x20 | 0x40, 0x80
_THROTTLED = (
    "throttled_power_seconds",
    "throttled_thermal_seconds",
    "throttled_board_seconds",
    "throttled_reliability_seconds",
)


def _reading(name: str) -> Callable[[Row], float]:
    place = _PLACE[name]
    return lambda row: row[place]


def _share(part: str, whole: str) -> Callable[[Row], float]:
    part_place, whole_place = _PLACE[part], _PLACE[whole]
    return lambda row: 100.0 * row[part_place] / row[whole_place] if row[whole_place] > 0 else math.nan


def _missing(now: str, most: str) -> Callable[[Row], float]:
    now_place, most_place = _PLACE[now], _PLACE[most]
    return lambda row: max(0.0, row[most_place] - row[now_place]) if row[most_place] > 0 else math.nan


def _has_reason(bits: int) -> Callable[[Row], float]:
    place = _PLACE["throttle_reasons"]
    return lambda row: math.nan if math.isnan(row[place]) else float(bool(int(row[place]) & bits))


def _throttled_seconds(row: Row) -> float:
    told = [row[_PLACE[name]] for name in _THROTTLED if not math.isnan(row[_PLACE[name]])]
    return sum(told) if told else math.nan


OF_ROW: dict[str, Callable[[Row], float]] = {
    **{name: _reading(name) for name in METRICS if name != "throttle_reasons"},
    "memory_used_pct": _share("memory_used_bytes", "memory_total_bytes"),
    "power_used_pct": _share("power_w", "power_limit_w"),
    "pcie_lanes_missing": _missing("pcie_width", "pcie_width_max"),
    "pcie_generations_missing": _missing("pcie_generation", "pcie_generation_max"),
    "is_power_capped": _has_reason(_POWER_CAP),
    "is_thermally_slowed": _has_reason(_THERMAL),
    "is_power_braked": _has_reason(_POWER_BRAKE),
    "throttled_seconds": _throttled_seconds,
}
"""From a row of the history to the value; NaN where the GPU does not tell.

All readings of `METRICS` but `throttle_reasons` (counters: what they have grown by since the start), and

- `memory_used_pct`, `power_used_pct`: the share of what there is, and of the enforced limit.
- `pcie_lanes_missing`, `pcie_generations_missing`: what the link is below the best of this GPU in this slot.
- `is_power_capped`, `is_thermally_slowed`, `is_power_braked`: 1 while the driver gives that as a reason for low clocks.
- `throttled_seconds`: the time below the wanted clocks, whatever the reason, since the start.
"""

SIGNALS = (*OF_ROW, SECONDS_WITHOUT_STEP, XID)
"""All names. `seconds_without_step` is the time since rank 0's loop last went on; `xid` the number of each driver's
error, as it happens."""
