"""A table of the GPUs at the bottom of the terminal, with sparklines of the last minutes; drawn with rich, on rank 0.

The terminal is told to scroll above it only, so that logs, prints and progress bars of any kind go on as they were,
and the table stands still. It is renewed after each poll; the sick GPUs come first if there is no room for all.
"""

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lightning_air.health.history import GpuId
from lightning_air.health.report_data import Grid
from lightning_air.health.report_maps import Rows, Series, memory_used_pct, metric
from lightning_air.health.report_words import UNKNOWN, place_of, summarise
from lightning_air.health.scene import Scene
from lightning_air.health.threads import Background, close_all

log = logging.getLogger(__name__)

CLOSE_SECONDS = 0.5
_SPARK_POLLS = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_HEADINGS = ("GPU", "utilisation", "", "memory", "temperature", "", "power", "clock", "state")
_ON_THE_RIGHT = {"utilisation", "memory", "temperature", "power", "clock"}
_GAP_WIDTH, _STATE_WIDTH = 2, 14
_MIN_HEIGHT, _MIN_WIDTH = 12, 40
_OTHER_LINES = 3  # the headline, the headings, and how many more there are

_SAVE, _RESTORE, _TO_LINE_END = "\x1b7", "\x1b8", "\x1b[K"


def table_unavailable() -> str | None:
    """Return why no table can be shown, and what to do; None if one can."""
    if not sys.stdout.isatty():
        return "the output is no terminal. Use live='page' for a page in the browser, or look at the report."
    if importlib.util.find_spec("rich") is None:
        return "it is drawn with rich, which is not installed: pip install 'lightning-air[cli]'."
    size = shutil.get_terminal_size()
    if size.lines < _MIN_HEIGHT or size.columns < _MIN_WIDTH:
        return (
            f"the terminal has {size.lines} lines of {size.columns} characters, and it takes {_MIN_HEIGHT} of "
            f"{_MIN_WIDTH}. Make it larger, or use live='page'."
        )
    return None


def sparkline(series: Series, low: float, high: float) -> str:
    """Return one character per value, as high as the value is between two ends; a dot is a gap."""
    places = np.clip((series - low) / (high - low) * (len(_BLOCKS) - 1), 0, len(_BLOCKS) - 1)
    return "".join(_GAP if math.isnan(place) else _BLOCKS[round(place)] for place in places)


def draw_table(scene: Scene, *, width: int, num_lines: int, time_words: str) -> list[str]:
    """Return exactly so many lines, with colours; fewer if there are fewer GPUs, and none before the first poll.

    Args:
        scene: What is shown.
        width: Of a line, in characters.
        num_lines: The most there may be, with the headline.
        time_words: The time of day.
    """
    grid = Grid.of(scene.history.window(), scene.history.poll_seconds)
    if not grid.gpus:
        return []
    summary = summarise(grid, scene.events.all)
    rows = [
        (_cells(row.gpu, grid, of_gpu, ", ".join(row.troubles) or "well"), bool(row.troubles))
        for row, of_gpu in zip(summary.rows, grid.rows, strict=True)
    ]
    rows.sort(key=lambda row: not row[1])  # else as they are
    num_shown = min(len(rows), max(1, num_lines - _OTHER_LINES))
    if num_shown == len(rows) - 1 and num_lines > len(rows) + 1:
        num_shown = len(rows)
    more = []
    if num_hidden := len(rows) - num_shown:
        num_sick = sum(is_sick for _, is_sick in rows[num_shown:])
        more = [f"and {num_hidden} more" + (f", {num_sick} of them with trouble" if num_sick else ", all of them well")]
    return _with_rich(f"{time_words}  {summary.headline}", rows[:num_shown], more, is_well=summary.is_well, width=width)


def _with_rich(
    headline: str, rows: Sequence[tuple[tuple[str, ...], bool]], more: Sequence[str], *, is_well: bool, width: int
) -> list[str]:
    console_module, table_module, text, rule = (
        importlib.import_module(f"rich.{name}") for name in ("console", "table", "text", "rule")
    )
    widest = [max(len(name), *(len(cells[at]) for cells, _ in rows)) for at, name in enumerate(_HEADINGS)]
    has_room = sum(widest[:-1]) + _GAP_WIDTH * (len(widest) - 1) + _STATE_WIDTH <= width
    kept = [place for place, name in enumerate(_HEADINGS) if has_room or name not in {"", "clock"}]
    table = table_module.Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for place in kept:
        name = _HEADINGS[place]
        justify = "right" if name in _ON_THE_RIGHT else "left"
        least = None if name == "state" else widest[place]  # what is cut if there is no room for all
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    for cells, is_sick in rows:
        table.add_row(*(text.Text(cells[place], style="red" if is_sick else "") for place in kept))
    console = console_module.Console(width=width, file=sys.stdout)
    with console.capture() as captured:
        title = text.Text(headline, style="green" if is_well else "bold red", overflow="ellipsis", no_wrap=True)
        console.print(rule.Rule(title, align="left", style="dim"))
        console.print(table)
        for line in more:
            console.print(text.Text(line, style="dim"))
    lines: list[str] = captured.get().splitlines()
    return lines


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


class Footer:
    """The last lines of a terminal, out of which all other output is kept.

    Args:
        write: Puts text on the terminal, all at once.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._height = 0
        self._num_lines = 0

    def show(self, lines: Sequence[str], height: int) -> None:
        """Show these lines in a terminal of so many."""
        begin = "" if (height, len(lines)) == (self._height, self._num_lines) else self._reserve(len(lines), height)
        first = height - len(lines) + 1
        drawn = "".join(f"\x1b[{first + at};1H{line}{_TO_LINE_END}" for at, line in enumerate(lines))
        self._write(f"{begin}{_SAVE}{drawn}{_RESTORE}")

    def _reserve(self, num_lines: int, height: int) -> str:
        taken = self._give_back() if self._num_lines else ""
        self._height, self._num_lines = height, num_lines
        # New lines scroll what is there upwards, if the cursor is where the footer comes; setting the region moves it.
        room = "\n" * num_lines
        return f"{taken}{room}{_SAVE}\x1b[1;{height - num_lines}r{_RESTORE}\x1b[{num_lines}A"

    def _give_back(self) -> str:
        first = self._height - self._num_lines + 1
        cleared = "".join(f"\x1b[{first + at};1H{_TO_LINE_END}" for at in range(self._num_lines))
        return f"{_SAVE}{cleared}\x1b[r{_RESTORE}"

    def close(self) -> None:
        """Give the lines back. Idempotent."""
        if self._num_lines:
            self._write(self._give_back())
            self._num_lines = 0


class LiveTable:
    """Shows the table from `start` to `close`; where `table_unavailable` says nothing against it.

    Args:
        scene: What it shows.

    Attributes:
        thread: On which it draws.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.thread = Background("air-gpu-table", self._run)

    def start(self) -> None:
        """Begin; returns at once."""
        self.thread.start()

    def close(self) -> None:
        """End, within `CLOSE_SECONDS`. Idempotent."""
        close_all([self.thread], CLOSE_SECONDS)

    def _run(self, closed: threading.Event) -> None:
        footer = Footer(_write)
        seconds = min(0.5, self._scene.history.poll_seconds / 2)
        try:
            while not closed.wait(seconds):
                width, height = shutil.get_terminal_size()
                if height < _MIN_HEIGHT:  # it has become too small
                    footer.close()
                    continue
                lines = draw_table(
                    self._scene, width=width, num_lines=height // 2, time_words=time.strftime("%H:%M:%S")
                )
                if lines:
                    footer.show(lines, height)
                    seconds = self._scene.history.poll_seconds
        finally:
            footer.close()


def _write(text: str) -> None:
    """Write to the terminal in one go; what is buffered comes before."""
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), text.encode())
