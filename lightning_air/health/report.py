"""The report: what the GPUs of a run did, as one HTML file that needs no network, no server and no other file.

It opens from a disk, a volume or a run's artifacts. Whatever a GPU's name or a message holds is shown as text, and the
page forbids itself all scripts but its own and all requests. The same readings give the same bytes.
"""

import base64
import contextlib
import functools
import hashlib
import html
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from lightning_air.health.events import HealthEvent
from lightning_air.health.history import Window
from lightning_air.health.report_data import Grid, Payload, encode
from lightning_air.health.report_events import EventGroup, group_events, words_of
from lightning_air.health.report_words import COLUMNS, GpuRow, Summary, place_of, summarise
from lightning_air.health.step_times import StepWindow

MAX_BYTES = 490_000
_MIN_DATA_BYTES = 150_000
_SCRIPTS = ("data.js", "words.js", "colours.js", "time.js", "heat_map.js", "strips.js", "tip.js", "main.js")
_LIVE_SCRIPT = "live.js"
_MAX_LISTED = 200
_REST_OF_POLICY = "img-src data:; base-uri 'none'; form-action 'none'"


def render_report(
    window: Window,
    events: Sequence[HealthEvent] = (),
    steps: StepWindow | None = None,
    *,
    poll_seconds: float,
    title: str = "GPU health",
    is_live: bool = False,
    max_bytes: int = MAX_BYTES,
) -> str:
    """Return the report. Any thread may call it; it takes about half a second for 64 GPUs and two hours.

    Args:
        window: What the GPUs have said.
        events: What has happened to them.
        steps: How long the optimizer steps took, if there were any.
        poll_seconds: The time between two polls in the window.
        title: Of the page.
        is_live: It is served, and asks where it came from for a newer one.
        max_bytes: How large it gets for 64 GPUs; of many more, the table alone may be larger.
    """
    grid = Grid.of(window, poll_seconds)
    groups, num_left_out = group_events(events)
    summary = summarise(grid, events)
    body = [
        _header(summary, grid, title, is_live=is_live),
        _TOOLS,
        _gpu_table(sorted(summary.rows, key=lambda row: not row.troubles), grid),
        _event_table(groups, grid, num_left_out),
    ]
    fixed = sum(len(_encoded(part)) for part in (*body, _style(), _script(is_live=is_live)))
    payload = encode(grid, groups, steps, max_bytes=max(max_bytes - fixed - 5_000, _MIN_DATA_BYTES))
    body.append(_footer(payload, grid))
    # Half a surrogate pair, which a name may hold, cannot be written.
    return _encoded("".join([_head(title, is_live=is_live), *body, _end(payload, is_live=is_live)])).decode()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def write_report(path: Path, text: str) -> None:
    """Put a report where another one may be, whole or not at all; on a volume, which cannot rename, all the same.

    Raises:
        OSError: The folder cannot be made or written.
    """
    content = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        with contextlib.suppress(OSError):
            Path(name).chmod(0o644)  # mkstemp makes it for its owner only
        try:
            Path(name).replace(path)
        except OSError:
            path.write_bytes(content)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


@functools.cache
def _style() -> str:
    return _read("report.css")


@functools.cache
def _script(*, is_live: bool) -> str:
    names = (*_SCRIPTS, _LIVE_SCRIPT) if is_live else _SCRIPTS
    return "\n".join(_read(name) for name in names)


def _read(name: str) -> str:
    return (resources.files("lightning_air.health") / "report_page" / name).read_text("utf-8")


def content_security_policy(*, is_live: bool) -> str:
    """Return what the page may do: run this script, use this style, and if it is live, ask its own server."""
    script, style = (_digest(text) for text in (_script(is_live=is_live), _style()))
    connect = "connect-src 'self'; " if is_live else ""
    return f"default-src 'none'; script-src '{script}'; style-src '{style}'; {connect}{_REST_OF_POLICY}"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _head(title: str, *, is_live: bool) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy(is_live=is_live)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" '
        'content="light dark">\n<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
    )


def _header(summary: Summary, grid: Grid, title: str, *, is_live: bool) -> str:
    details = "".join(f"<li>{html.escape(detail)}</li>" for detail in summary.details)
    span = ""
    if grid.num_polls:
        span = f" · {_time(grid.start_seconds)} to {_time(grid.end_seconds)} · read every {grid.poll_seconds:g} s"
    live = ""
    if is_live:
        live = '<div class="live"><button id="refresh">Refresh</button><span id="state" role="status"></span></div>\n'
    state = "well" if summary.is_well else "trouble"
    listed = f'<ul class="details">{details}</ul>' if details else ""
    return (
        f'<header>\n<div id="summary" class="{state}">\n'
        f'<p class="kicker">{html.escape(title)}{span}</p>\n<h1>{html.escape(summary.headline)}</h1>\n'
        f"{listed}\n</div>\n{live}</header>\n"
    )


_TOOLS = """<main>
<div class="bar"><div class="tools" role="toolbar" aria-label="Time">
<span class="range" id="range" role="status"></span>
<button data-last="600">Last 10 min</button><button data-last="1800">Last 30 min</button>
<button data-last="3600">Last hour</button>
<button id="earlier" title="Earlier (left arrow)" aria-label="Earlier">←</button>
<button id="later" title="Later (right arrow)" aria-label="Later">→</button>
<button id="in" title="Zoom in (+)" aria-label="Zoom in">+</button>
<button id="out" title="Zoom out (-)" aria-label="Zoom out">−</button>
<button id="reset" title="All of the time (0, or double-click)">Reset</button>
<button id="zone">Show local time</button>
</div><div><canvas id="axis" class="axis" aria-hidden="true"></canvas></div></div>
<p id="broken" class="broken" hidden></p>
<noscript><p class="broken">The drawings need JavaScript; the tables below do not.</p></noscript>
<div id="plots"></div>
"""  # noqa: RUF001 (a minus sign for the eye)


def _gpu_table(rows: Sequence[GpuRow], grid: Grid) -> str:
    if not rows:
        return '<section id="gpus"></section>\n'
    heads = "".join(f'<th scope="col" class="number">{name}</th>' for name in COLUMNS)
    models = Counter(row.gpu.name for row in rows)
    has_several = len(models) > 1
    body = []
    for row in rows:
        cells = "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in row.cells)
        words = html.escape(", ".join(row.troubles)) or "well"
        name = f'<td class="name">{html.escape(row.gpu.name)}</td>' if has_several else ""
        place = html.escape(place_of(row.gpu, grid))
        body.append(
            f'<tr class="{"bad" if row.troubles else "well"}"><td class="name">{place}</td>'
            f'<td class="words">{words}</td>{cells}{name}<td class="uuid">{html.escape(row.gpu.uuid)}</td></tr>\n'
        )
    counted = ", ".join(
        f"{count} \N{MULTIPLICATION SIGN} {html.escape(name)}" for name, count in sorted(models.items())
    )
    model = '<th scope="col">model</th>' if has_several else ""
    return (
        f'<section id="gpus"><h2>GPUs <small>{counted}; the worst readings of this time, the sick first</small></h2>\n'
        '<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">GPU</th><th scope="col">state</th>'
        f'{heads}{model}<th scope="col">UUID</th></tr></thead>\n<tbody>\n{"".join(body)}</tbody>'
        "</table></div></section>\n"
    )


def _event_table(groups: Sequence[EventGroup], grid: Grid, num_left_out: int) -> str:
    if not groups:
        return '<section id="events"><h2>Events</h2><p class="note">Nothing was reported.</p></section>\n</main>\n'
    gpus = {gpu.uuid: gpu for gpu in grid.gpus}
    listed = sorted(groups, key=lambda group: -group.times[-1])[:_MAX_LISTED]
    body = []
    for group in sorted(listed, key=lambda group: group.times[0]):
        gpu = gpus.get(group.uuid or "")
        place = place_of(gpu, grid) if gpu is not None else f"node {group.node_rank}"
        count = "" if len(group.times) == 1 else f"{len(group.times):,} times, last {_time(group.times[-1])}"
        body.append(
            f'<tr><td class="name">{_time(group.times[0])}</td><td class="name">{html.escape(place)}</td>'
            f'<td class="name{" bad" if group.is_trouble else ""}">{html.escape(words_of(group.kind))}</td>'
            f'<td class="words">{html.escape(group.text)}</td><td class="name">{count}</td></tr>\n'
        )
    num_unlisted = num_left_out + sum(len(group.times) for group in groups) - sum(len(g.times) for g in listed)
    more = f'<p class="note">{num_unlisted:,} earlier events are not listed.</p>' if num_unlisted else ""
    return (
        '<section id="events"><h2>Events <small>in order; alike ones together</small></h2>\n<div class="scroll" '
        'tabindex="0"><table><thead><tr><th scope="col">when</th><th scope="col">where</th><th scope="col">what</th>'
        f'<th scope="col">in words</th><th scope="col">how often</th></tr></thead>\n<tbody>\n{"".join(body)}</tbody>'
        f"</table></div>{more}</section>\n</main>\n"
    )


def _footer(payload: Payload, grid: Grid) -> str:
    lines = []
    if payload.quiet:
        lines.append(f"Zero all the time, and so not drawn: {', '.join(payload.quiet)}.")
    if payload.untold and grid.gpus:
        lines.append(f"Not told by any of these GPUs: {', '.join(payload.untold)}.")
    by = payload.coarser
    exact = f"Values are exact to {by} °C, {by} W, {by} MHz, {by} % (memory {by / 10:g} %), and times to the poll."
    if payload.num_merged > 1:
        exact += (
            f" {payload.num_merged} polls ({payload.num_merged * grid.poll_seconds:g} s) are one column, of which the "
            "worst value is kept."
        )
    lines.append(exact)
    lines.append(
        "Drag over a drawing to look closer, double-click to see all again; + and -, arrows and Ctrl with the wheel "
        "work, too. Where several polls share a pixel, the worst is drawn: the lowest utilisation, margin and clock, "
        "the highest of the others. Red diamonds are events of that GPU. The table is made from all polls, unrounded."
    )
    return '<footer id="about">\n' + "".join(f"<p>{html.escape(line)}</p>\n" for line in lines) + "</footer>\n"


def _end(payload: Payload, *, is_live: bool) -> str:
    return (
        '<div id="tip" role="tooltip"></div>\n'
        f'<script type="text/plain" id="data">{payload.text}</script>\n<script>{_script(is_live=is_live)}</script>\n'
        "</body>\n</html>\n"
    )


def _time(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC)
    words = f"{when.day} {when:%b %Y, %H:%M:%S} UTC"
    return f'<time data-seconds="{seconds:.3f}" datetime="{when:%Y-%m-%dT%H:%M:%SZ}">{words}</time>'
