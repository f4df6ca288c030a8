"""A report in words: one sentence on whether anything was wrong, and a row for each GPU with its worst readings."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_air.health.events import HealthEvent
from lightning_air.health.history import GpuId
from lightning_air.health.report_data import Grid
from lightning_air.health.report_events import is_trouble, words_of
from lightning_air.health.report_maps import Rows, Series, is_lost, memory_used_pct, metric
from lightning_air.health.sample import GPUSample

UNKNOWN = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_BUSY_PCT = 50.0
_MAX_NAMED = 6
_HEAT = 0x20 | 0x40
_BRAKE = 0x80
_HARDWARE = 0x8
# What a kind of event is about, where the readings tell the same.
_TOPICS = {
    "gpu_lost": "lost",
    "xid_context_dead": "xid",
    "xid_hardware": "xid",
    "memory_errors": "ecc",
    "double_bit_ecc": "ecc",
    "remap_failed": "remap",
    "remap_pending": "remap",
    "retirement_pending": "remap",
    "recovery_needed": "recovery",
    "thermal_throttling": "heat",
    "power_brake": "brake",
}
_MINUTE, _HOUR = 60, 3600
_NODE_WORDS = {
    "node_stale": "fell silent",
    "nvml_silent": "the GPU driver did not answer",
    "nvml_lost": "the GPU driver stopped working",
}


@dataclass(frozen=True)
class GpuRow:
    """What the table says of one GPU.

    Attributes:
        gpu: Which.
        cells: The worst readings, as `COLUMNS`.
        troubles: What was wrong with it, in words.
    """

    gpu: GpuId
    cells: tuple[str, ...]
    troubles: tuple[str, ...]


COLUMNS = (
    "mean utilisation",
    "most memory",
    "hottest",
    "least margin",
    "hottest HBM",
    "most power",
    "lowest busy clock",
    "missing",
)


@dataclass(frozen=True)
class Summary:
    """A report at a glance.

    Attributes:
        is_well: Nothing was wrong.
        headline: In a sentence.
        details: The troubles, one sentence each; the first few of them.
        rows: Of all GPUs.
    """

    is_well: bool
    headline: str
    details: tuple[str, ...]
    rows: tuple[GpuRow, ...]


def summarise(grid: Grid, events: Sequence[HealthEvent]) -> Summary:
    """Return what there is to say of the readings and the events."""
    rows = tuple(_row(gpu, of_gpu, events) for gpu, of_gpu in zip(grid.gpus, grid.rows, strict=True))
    known = {gpu.uuid for gpu in grid.gpus}
    sick = [row for row in rows if row.troubles]
    others = Counter(
        (event.node_rank, event.kind) for event in events if is_trouble(event.kind) and event.uuid not in known
    )
    details = [f"{place_of(row.gpu, grid)}: {', '.join(row.troubles)}." for row in sick]
    details += [
        f"Node {node_rank}: {_NODE_WORDS.get(kind, words_of(kind))}{_times(count)}."
        for (node_rank, kind), count in others.items()
    ]
    watched = duration(grid.num_polls * grid.poll_seconds)
    num_nodes = len({gpu.node_rank for gpu in grid.gpus})
    all_gpus = _count(len(rows), "GPU") + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    if not rows:
        reasons = [event.message for event in events if event.kind == "nvml_absent"]
        headline = "No GPU was read."
        details = [*reasons[:1], *details]
    elif sick:
        headline = (
            f"{len(sick)} of {all_gpus} had trouble in {watched}."
            if len(rows) > 1
            else f"The GPU had trouble in {watched}."
        )
    elif details:
        headline = f"The GPUs were well, but something else was not: {all_gpus}, watched for {watched}."
    else:
        headline = f"Nothing was wrong: {all_gpus}, watched for {watched}."
    if len(details) > _MAX_NAMED:
        details = [*details[: _MAX_NAMED - 1], f"And {len(details) - _MAX_NAMED + 1} more, below."]
    return Summary(not sick and not others and bool(rows), headline, tuple(details), rows)


def place_of(gpu: GpuId, grid: Grid) -> str:
    """Return which GPU it is, as briefly as the run allows."""
    is_alone = len({other.node_rank for other in grid.gpus}) == 1
    instance = " (MIG)" if gpu.uuid.startswith("MIG-") else ""
    return f"GPU {gpu.index}{instance}" + ("" if is_alone else f" on node {gpu.node_rank}")


def duration(seconds: float) -> str:
    """Return a time in words, such as "2 h 5 min"."""
    seconds = round(seconds)
    if seconds < _MINUTE:
        return f"{seconds} s"
    hours, minutes = seconds // _HOUR, seconds % _HOUR // _MINUTE
    if hours == 0:
        return f"{minutes} min" + (f" {seconds % _MINUTE} s" if seconds % _MINUTE and minutes < 10 else "")  # noqa: PLR2004
    return f"{hours} h" + (f" {minutes} min" if minutes else "")


def _row(gpu: GpuId, rows: Rows, events: Sequence[HealthEvent]) -> GpuRow:
    busy = metric(rows, "utilization_pct") >= _BUSY_PCT
    power, limit = (metric(rows, name) for name in ("power_w", "power_limit_w"))
    unread = np.isnan(rows).all(axis=0)
    cells = (
        _number(_mean(metric(rows, "utilization_pct")), "%"),
        _number(_most(memory_used_pct(rows)), "%"),
        _number(_most(metric(rows, "temperature_c")), "°C"),
        _number(_least(metric(rows, "temperature_margin_c")), "°C"),
        _number(_most(metric(rows, "hbm_temperature_c")), "°C"),
        _number(_most(power), "W", of=_most(limit)),
        _number(_least(metric(rows, "sm_clock_mhz")[busy]), "MHz"),
        f"{100 * unread.mean():.1f} %".replace("0.0 %", "0 %") if unread.size else UNKNOWN,
    )
    return GpuRow(gpu, cells, tuple(_troubles(gpu, rows, events)))


def _troubles(gpu: GpuId, rows: Rows, events: Sequence[HealthEvent]) -> list[str]:
    """Return what was wrong, in words: what the readings say, and the events that are about something else."""
    of_gpu = [event for event in events if event.uuid == gpu.uuid and is_trouble(event.kind)]
    by_topic = {topic: words for topic, words in _told_by_readings(gpu, rows) if words}
    xids = Counter(int(event.value) for event in of_gpu if event.kind == "xid" and event.value is not None)
    if xids:
        by_topic["xid"] = ", ".join(f"XID {xid}{_times(count)}" for xid, count in xids.items())
    others = Counter(event.kind for event in of_gpu if _TOPICS.get(event.kind, event.kind) not in by_topic)
    return [*by_topic.values(), *(f"{words_of(kind)}{_times(count)}" for kind, count in others.items())]


def _told_by_readings(gpu: GpuId, rows: Rows) -> Iterator[tuple[str, str]]:
    """Yield what the readings are about, and what they say; "" is nothing."""
    lost = is_lost(rows)
    yield "lost", ("lost" if lost[-1] else "lost for a while") if lost.any() else ""
    errors = _most(metric(rows, "ecc_uncorrected"))
    yield "ecc", _count(int(errors), "uncorrected memory error") if errors else ""
    if _most(metric(rows, "has_failed_remap")):
        yield "remap", "row remapping failed"
    elif _most(metric(rows, "has_pending_remap")) or _most(metric(rows, "has_pending_retirement")):
        yield "remap", "memory repair pending (needs a reset)"
    if action := _newest(metric(rows, "recovery_action")):
        name = GPUSample(uuid=gpu.uuid, index=gpu.index, name=gpu.name, recovery_action=int(action)).recovery_name
        yield "recovery", f"needs {str(name).replace('_', ' ')}"
    reasons = metric(rows, "throttle_reasons")
    bits = reasons[~np.isnan(reasons)].astype(np.int64)
    heat, brake, hardware = (_share(bits, mask) for mask in (_HEAT, _BRAKE, _HARDWARE))
    yield "heat", f"slowed by heat {heat}" if heat else ""
    yield "brake", f"slowed by the power brake {brake}" if brake else ""
    yield "hardware", f"slowed by its hardware {hardware}" if hardware and not heat and not brake else ""


def _share(bits: npt.NDArray[np.int64], mask: int) -> str:
    """Return how much of the time some bits were set, in words; "" is never."""
    share = float(np.mean((bits & mask) != 0)) if bits.size else 0.0
    if not share:
        return ""
    return f"{100 * share:.0f} % of the time" if share >= 0.01 else "under 1 % of the time"  # noqa: PLR2004


def _number(value: float | None, unit: str, of: float | None = None) -> str:
    if value is None:
        return UNKNOWN
    value = round(value) + 0.0  # no "-0"
    return f"{value:.0f} {unit}".replace("-", _MINUS) if of is None else f"{value:.0f} of {of:.0f} {unit}"


def _most(series: Series) -> float | None:
    known = series[~np.isnan(series)]
    return float(known.max()) if known.size else None


def _least(series: Series) -> float | None:
    known = series[~np.isnan(series)]
    return float(known.min()) if known.size else None


def _mean(series: Series) -> float | None:
    known = series[~np.isnan(series)]
    return float(known.mean()) if known.size else None


def _newest(series: Series) -> float | None:
    known = series[~np.isnan(series)]
    return float(known[-1]) if known.size else None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _times(count: int) -> str:
    return "" if count == 1 else f" ({count:,} times)"
