"""The data of a report: whole numbers of a stated step, deflated; as exact as fits into a given size, and it says how.

The page decodes it: a little-endian length, that much JSON, then for each map the changes from poll to poll of every
GPU, first all their low bytes and then all their high bytes, as deflate likes them. A gap is the number 0.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_air.health.history import GpuId, Window
from lightning_air.health.report_events import EventGroup, words_of
from lightning_air.health.report_maps import MAPS, Map, Series, is_lost, metric
from lightning_air.health.step_times import StepWindow

VERSION = 1
_GAP = 0
_MAX_WHOLE = 65_534
# 64 GPUs for two hours at 10 s, and some more; what is more than this is merged first.
_MAX_CELLS = 51_200
_MAX_STEP_COLUMNS = 1_500
_NUM_COARSER = 8
_LOST_KEY = "is_lost"


@dataclass(frozen=True)
class Grid:
    """What is known of each GPU at each poll.

    Attributes:
        start_seconds: Of the first column, in seconds since the epoch; a column is the time around its poll.
        poll_seconds: The time between two polls.
        num_polls: How many there are.
        gpus: In the order of the page.
        rows: Of each, as in the history.
    """

    start_seconds: float
    poll_seconds: float
    num_polls: int
    gpus: tuple[GpuId, ...]
    rows: tuple[npt.NDArray[np.float32], ...]

    @staticmethod
    def of(window: Window, poll_seconds: float) -> "Grid":
        """Return what a window of the history holds: by node, and there by NVML's number."""
        known = np.flatnonzero(~np.isnan(window.times))
        start = 0.0
        if known.size:  # polls are made when the clock shows a multiple of `poll_seconds`
            place = math.floor(window.times[known[0]] / poll_seconds + 0.5) - int(known[0])
            start = (place - 0.5) * poll_seconds
        gpus = sorted(window.values, key=lambda gpu: (gpu.node_rank, gpu.index, gpu.uuid))
        return Grid(start, poll_seconds, len(window.times), tuple(gpus), tuple(window.values[gpu] for gpu in gpus))

    @property
    def end_seconds(self) -> float:
        """Of the last column."""
        return self.start_seconds + self.num_polls * self.poll_seconds


@dataclass(frozen=True)
class Drawn:
    """A map in whole numbers.

    Attributes:
        map: Which.
        whole: Shape (GPUs, columns); 0 is a gap, else the value is `offset + (whole - 1) * step`.
        offset: In the map's unit.
        step: Likewise.
    """

    map: Map
    whole: npt.NDArray[np.uint16]
    offset: float
    step: float

    def describe(self) -> dict[str, Any]:
        """Return what the page needs to know."""
        return {
            "key": self.map.key,
            "title": self.map.title,
            "unit": self.map.unit,
            "note": self.map.note,
            "worst": self.map.worst,
            "low": self.map.low,
            "high": self.map.high,
            "span": self.map.least_span,
            "counts": self.map.only_if_any,
            "offset": self.offset,
            "step": self.step,
        }


@dataclass(frozen=True)
class Payload:
    """What the page decodes.

    Attributes:
        text: Base64.
        num_merged: How many polls stand in one column.
        coarser: By how much the steps are larger than the maps'.
        drawn: The titles of the maps that are there.
        quiet: Of those that are 0 everywhere.
        untold: Of those that no GPU tells.
    """

    text: str
    num_merged: int
    coarser: int
    drawn: tuple[str, ...]
    quiet: tuple[str, ...]
    untold: tuple[str, ...]


@dataclass(frozen=True)
class _Choice:
    series: list[tuple[Map, list[Series]]] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def encode(grid: Grid, events: Sequence[EventGroup], steps: StepWindow | None, *, max_bytes: int) -> Payload:
    """Return the data, in at most `max_bytes` if the events leave room for it.

    More polls than a screen has pixels are merged, the worst standing for all; what is still too large gets coarser
    steps, and then fewer columns.

    Args:
        grid: What is known of the GPUs.
        events: What happened.
        steps: How long the optimizer steps took.
        max_bytes: Of base64.
    """
    choice = _choose(grid)
    num_merged = max(1, math.ceil(len(grid.gpus) * grid.num_polls / _MAX_CELLS))
    while True:
        merged = [
            (map_, [_merge(series, num_merged, map_.worst) for series in of_gpus]) for map_, of_gpus in choice.series
        ]
        lost = [_merge(is_lost(rows).astype(np.float64), num_merged, "max") for rows in grid.rows]
        for power in range(_NUM_COARSER):
            maps = [_quantise(Map(key=_LOST_KEY, title="", unit="", note="", series=lambda *_: np.empty(0)), lost, 1)]
            maps += [_quantise(map_, of_gpus, 2**power) for map_, of_gpus in merged]
            text = _deflate(_head(grid, maps, events, steps, num_merged), maps)
            if len(text) <= max_bytes or (power == _NUM_COARSER - 1 and num_merged >= grid.num_polls):
                titles = tuple(drawn.map.title for drawn in maps[1:])
                return Payload(text, num_merged, 2**power, titles, tuple(choice.quiet), tuple(choice.untold))
        num_merged *= 2


def _choose(grid: Grid) -> _Choice:
    choice = _Choice()
    for map_ in MAPS:
        of_gpus = [map_.series(rows, grid.poll_seconds) for rows in grid.rows]
        known = [series[~np.isnan(series)] for series in of_gpus]
        if not any(values.size for values in known):
            choice.untold.append(map_.title)
        elif map_.only_if_any and not any(np.any(values) for values in known):
            choice.quiet.append(map_.title)
        else:
            choice.series.append((map_, of_gpus))
    return choice


def _merge(series: Series, num_merged: int, worst: str) -> Series:
    """Let the worst of so many neighbours stand for them; a gap is where nothing is known of all of them."""
    if num_merged == 1:
        return series
    found: Series
    padded = np.full(math.ceil(len(series) / num_merged) * num_merged, math.nan)
    padded[: len(series)] = series
    parts = padded.reshape(-1, num_merged)
    is_gap = np.isnan(parts).all(axis=1)
    if worst == "bits":
        found = np.bitwise_or.reduce(np.nan_to_num(parts).astype(np.int64), axis=1).astype(np.float64)
    elif worst == "min":
        found = np.where(np.isnan(parts), np.inf, parts).min(axis=1)
    else:
        found = np.where(np.isnan(parts), -np.inf, parts).max(axis=1)
    found[is_gap] = math.nan
    return found


def _quantise(map_: Map, of_gpus: Sequence[Series], coarser: int) -> Drawn:
    values = np.array(of_gpus) if of_gpus else np.empty((0, 0))
    known = ~np.isnan(values)
    offset, top = (float(values[known].min()), float(values[known].max())) if known.any() else (0.0, 0.0)
    step = map_.step * (1 if map_.worst == "bits" else coarser)
    offset = math.floor(offset / step) * step
    while (top - offset) / step > _MAX_WHOLE - 1:
        step *= 2
        offset = math.floor(offset / step) * step
    whole = np.full(values.shape, _GAP, dtype=np.uint16)
    whole[known] = np.rint((values[known] - offset) / step).astype(np.uint16) + 1
    return Drawn(map_, whole, offset, step)


def _head(
    grid: Grid, maps: Sequence[Drawn], events: Sequence[EventGroup], steps: StepWindow | None, num_merged: int
) -> dict[str, Any]:
    place = {gpu.uuid: number for number, gpu in enumerate(grid.gpus)}
    return {
        "version": VERSION,
        "start": grid.start_seconds,
        "seconds": grid.poll_seconds * num_merged,
        "columns": math.ceil(grid.num_polls / num_merged),
        "end": grid.end_seconds,
        "gpus": [
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "name": gpu.name,
                "node": gpu.node_rank,
                "memory": _newest(metric(rows, "memory_total_bytes")),
            }
            for gpu, rows in zip(grid.gpus, grid.rows, strict=True)
        ],
        "maps": [drawn.describe() for drawn in maps],
        "events": [
            {
                "kind": words_of(group.kind),
                "text": group.text,
                "node": group.node_rank,
                "uuid": group.uuid,
                "gpu": place.get(group.uuid, -1) if group.uuid is not None else -1,
                "trouble": group.is_trouble,
                "times": [round(seconds, 3) for seconds in group.times],
                "ends": [None if seconds is None else round(seconds, 3) for seconds in group.ends],
            }
            for group in events
        ],
        "steps": None if steps is None else _steps(steps),
    }


def _newest(series: Series) -> float | None:
    known = series[~np.isnan(series)]
    return float(known[-1]) if known.size else None


def _steps(steps: StepWindow) -> dict[str, Any]:
    num_merged = max(1, math.ceil(len(steps.counts) / _MAX_STEP_COLUMNS))
    counts = steps.counts.astype(np.float64)
    totals = np.where(counts > 0, steps.mean * counts, 0.0)
    counts, totals = (_sums(values, num_merged) for values in (counts, totals))
    means = np.divide(totals, counts, out=np.full(counts.shape, math.nan), where=counts > 0)
    return {
        "start": steps.start_seconds,
        "seconds": steps.column_seconds * num_merged,
        "counts": [int(count) for count in counts],
        "low": _plain(_merge(steps.lowest, num_merged, "min")),
        "mean": _plain(means),
        "high": _plain(_merge(steps.highest, num_merged, "max")),
    }


def _sums(values: Series, num_merged: int) -> Series:
    padded = np.zeros(math.ceil(len(values) / num_merged) * num_merged)
    padded[: len(values)] = values
    sums: Series = padded.reshape(-1, num_merged).sum(axis=1)
    return sums


def _plain(values: Series) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.4g}") for value in values]


def _deflate(head: dict[str, Any], maps: Sequence[Drawn]) -> str:
    # Half a surrogate pair, which a name may hold, has no UTF-8; escaped it has.
    text = json.dumps(head, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    parts = [len(text).to_bytes(4, "little"), text]
    for drawn in maps:
        first = np.zeros((len(drawn.whole), 1), dtype=np.uint16)
        changes = np.diff(drawn.whole, axis=1, prepend=first).view(np.int16)  # modulo 2**16
        folded = ((changes << 1) ^ (changes >> 15)).view(np.uint16)  # small ones of either sign have no high byte
        parts += [(folded & 0xFF).astype(np.uint8).tobytes(), (folded >> 8).astype(np.uint8).tobytes()]
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(b"".join(parts)) + deflate.flush()).decode()
