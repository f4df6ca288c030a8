"""A table of the GPUs in the terminal, with a sparkline of the last minutes; drawn with rich, on rank 0.

Without a progress bar it stands still and is renewed with each poll. Two things cannot be redrawn in one place, so
beside a progress bar it is printed above the bar, once a minute, through what draws the bar.
"""

import importlib
import importlib.util
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from lightning_air.health.history import GpuId
from lightning_air.health.report_data import Grid
from lightning_air.health.report_maps import Rows, Series, memory_used_pct, metric
from lightning_air.health.report_words import UNKNOWN, place_of, summarise
from lightning_air.health.scene import Scene
from lightning_air.health.threads import Background, close_all

log = logging.getLogger(__name__)

Bar = Literal["none", "tqdm", "rich"]

CLOSE_SECONDS = 0.5
BESIDE_BAR_SECONDS = 60.0
_SPARK_POLLS = 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_MIN_ROWS = 4
_OTHER_LINES = 7
_HEADINGS = ("GPU", "utilisation", "", "memory", "temperature", "", "power", "clock", "state")
_WIDE = 100


def table_unavailable() -> str | None:
    """Return why no table can be shown, and what to do; None if one can."""
    if not sys.stdout.isatty():
        return "the output is no terminal. Use live='page' for a page in the browser, or look at the report."
    if importlib.util.find_spec("rich") is None:
        return "it is drawn with rich, which is not installed: pip install 'lightning-air[cli]'."
    return None


def sparkline(series: Series, low: float, high: float) -> str:
    """Return one character per value, as high as the value is between two ends; a dot is a gap."""
    span = max(high - low, 1e-9)
    places = np.clip((series - low) / span * (len(_BLOCKS) - 1), 0, len(_BLOCKS) - 1)
    return "".join(_GAP if math.isnan(place) else _BLOCKS[round(place)] for place in places)


def table_rows(scene: Scene) -> list[tuple[tuple[str, ...], bool]]:
    """Return the cells of each GPU as `_HEADINGS`, and whether something is wrong with it; the sick ones come first."""
    grid = Grid.of(scene.history.window(), scene.history.poll_seconds)
    summary = summarise(grid, scene.events.all)
    rows = []
    for row, of_gpu in zip(summary.rows, grid.rows, strict=True):
        cells = _cells(row.gpu, grid, of_gpu, ", ".join(row.troubles) or "well")
        rows.append((cells, bool(row.troubles)))
    rows.sort(key=lambda row: not row[1])  # else as they are
    return rows


def _cells(gpu: GpuId, grid: Grid, rows: Rows, state: str) -> tuple[str, ...]:
    recent = rows[:, -_SPARK_POLLS:]
    load, heat = metric(recent, "utilization_pct"), metric(recent, "temperature_c")
    return (
        place_of(gpu, grid),
        _last(load, "%"),
        sparkline(load, 0, 100),
        _last(memory_used_pct(recent), "%"),
        _last(heat, "°C"),
        sparkline(heat, 30, 90),
        _last(metric(recent, "power_w"), "W"),
        _last(metric(recent, "sm_clock_mhz"), "MHz"),
        state,
    )


def _last(series: Series, unit: str) -> str:
    value = float(series[-1]) if series.size else math.nan
    return UNKNOWN if math.isnan(value) else f"{value:.0f} {unit}"


def draw_table(rows: Sequence[tuple[tuple[str, ...], bool]], *, width: int, height: int) -> Any:
    """Return rich's table of as many GPUs as there is room for; the sick ones come first.

    Args:
        rows: From `table_rows`.
        width: Of the terminal, in characters.
        height: Likewise, in lines.
    """
    table_module, text, box = (importlib.import_module(f"rich.{name}") for name in ("table", "text", "box"))
    num_shown = max(_MIN_ROWS, height - _OTHER_LINES)
    num_hidden = len(rows) - num_shown
    caption = None
    if num_hidden > 0:
        num_sick = sum(is_sick for _, is_sick in rows[num_shown:])
        caption = f"and {num_hidden} more, " + (f"{num_sick} of them with trouble" if num_sick else "all of them well")
    table = table_module.Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    is_narrow = width < _WIDE
    kept = [place for place, name in enumerate(_HEADINGS) if not (is_narrow and name in {"", "clock"})]
    for place in kept:
        justify = "left" if _HEADINGS[place] in {"GPU", "", "state"} else "right"
        table.add_column(_HEADINGS[place], justify=justify, no_wrap=_HEADINGS[place] != "state")
    for cells, is_sick in rows[:num_shown]:
        style = "red" if is_sick else ""
        table.add_row(*(text.Text(cells[place], style=style) for place in kept))
    return table


class LiveTable:
    """Shows the table from `start` to `close`; where `table_unavailable` says nothing against it.

    Args:
        scene: What it shows.
        bar: What kind of progress bar there is.
        seconds: The time between two tables; by default that of the polls, or a minute beside a bar.
    """

    def __init__(self, scene: Scene, *, bar: Bar = "none", seconds: float | None = None) -> None:
        self._scene = scene
        self._bar = bar
        self._seconds = seconds or (scene.history.poll_seconds if bar == "none" else BESIDE_BAR_SECONDS)
        self._thread = Background("air-gpu-table", self._run)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """End, within `CLOSE_SECONDS`. Idempotent."""
        close_all([self._thread], CLOSE_SECONDS)

    def _run(self, closed: threading.Event) -> None:
        if self._bar == "none":
            self._stand_still(closed)
            return
        show = _print_over_rich if self._bar == "rich" else _print_over_tqdm
        while not closed.wait(self._seconds):
            self._show_once(show)

    def _show_once(self, show: Callable[[Callable[[int, int], Any]], None]) -> None:
        rows = table_rows(self._scene)
        if rows:
            show(lambda width, height: draw_table(rows, width=width, height=height))

    def _stand_still(self, closed: threading.Event) -> None:
        console = importlib.import_module("rich.console").Console()
        live = importlib.import_module("rich.live").Live(console=console, auto_refresh=False)
        with live:
            while not closed.is_set():
                rows = table_rows(self._scene)
                if rows:
                    live.update(draw_table(rows, width=console.width, height=console.height), refresh=True)
                closed.wait(self._seconds if rows else min(self._seconds, 0.5))


def _print_over_rich(draw: Callable[[int, int], Any]) -> None:
    """Print to rich's own console, whose bar then moves down."""
    console = importlib.import_module("rich").get_console()
    console.print(draw(console.width, console.height))


def _print_over_tqdm(draw: Callable[[int, int], Any]) -> None:
    """Have tqdm take its bars away for a moment, under its own lock."""
    console = importlib.import_module("rich.console").Console()
    with console.capture() as captured:
        console.print(draw(console.width, console.height))
    importlib.import_module("tqdm").tqdm.write(captured.get().rstrip("\n"), file=sys.stdout)
