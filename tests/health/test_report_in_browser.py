"""The report in a real browser, from a file: drawn, without a request or a complaint, and its time can be chosen."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lightning_air.health.events import HealthEvent
from lightning_air.health.history import Window
from lightning_air.health.report import render_report
from lightning_air.health.step_times import StepWindow
from tests.health.test_report import HOSTILE, hostile_page
from tests.health.windows import PLACE, START_SECONDS, gpu, gpus, lively, window
from tests.kit.chromium import Page, chromium, chromium_missing

pytestmark = pytest.mark.skipif(chromium_missing() is not None, reason=str(chromium_missing()))

NUM_POLLS = 720


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as opened:
        yield opened


def a_report(num_gpus: int) -> str:
    """Return one with a hot GPU, a missed poll, an event and steps."""
    values = {each: lively(NUM_POLLS, seed) for seed, each in enumerate(gpus(num_gpus))}
    sick = gpu(num_gpus // 2, node_rank=num_gpus // 2 // 8)
    values[sick][PLACE["temperature_c"], 400:500] = 91
    for rows in values.values():
        rows[:, 200:240] = np.nan
    event = HealthEvent(
        kind="thermal",
        message="It is hot.",
        time_seconds=START_SECONDS + 4_500,
        node_rank=sick.node_rank,
        uuid=sick.uuid,
    )
    mean = np.full(NUM_POLLS, 0.4)
    steps = StepWindow(START_SECONDS, 10, np.full(NUM_POLLS, 25), 0.9 * mean, mean, 1.2 * mean)
    return render_report(window(values), [event], steps, poll_seconds=10)


def show(page: Page, folder: Path, text: str) -> None:
    path = folder / "report.html"
    path.write_text(text)
    page.open(path.as_uri())
    page.wait_for("document.documentElement.dataset.state")
    assert page.evaluate("document.documentElement.dataset.state") == "drawn"


def titles(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('.plot h2')].map(each => each.firstChild.textContent.trim())")


def shown_time(page: Page) -> str:
    settle(page)
    return page.evaluate("document.getElementById('range').textContent")


def settle(page: Page) -> None:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def colours_of(page: Page, title: str) -> list[int]:
    """Return how many different colours there are in each row of pixels of a drawing."""
    return page.evaluate(
        f"""(() => {{
        const plot = report.plots.find(each => each.title === {title!r}), {{ width, height }} = plot.canvas;
        const copy = new OffscreenCanvas(width, height).getContext("2d", {{ willReadFrequently: true }});
        copy.drawImage(plot.canvas, 0, 0);
        const {{ data }} = copy.getImageData(0, 0, width, height);
        const seen = [];
        for (let y = 0; y < height; y++) {{
          const row = new Set();
          for (let x = 80; x < width; x++) {{
            const at = 4 * (y * width + x);
            if (data[at + 3]) row.add(data[at] * 65536 + data[at + 1] * 256 + data[at + 2]);
          }}
          seen.push(row.size);
        }}
        return seen;
        }})()"""
    )


def place_in(page: Page, title: str, along: float, row: int = 0) -> tuple[float, float]:
    """Return the place in the window of some part of the time of a row, scrolled to where it can be seen."""
    x, y = page.evaluate(
        f"""(() => {{
        const plot = report.plots.find(each => each.title === {title!r});
        plot.field.scrollIntoView({{ block: "center" }});
        const box = plot.field.getBoundingClientRect(), heat = plot.heat;
        const y = heat ? heat.tops[{row}] + heat.rowHeight / 2 : box.height / 2;
        return [box.left + GUTTER + {along} * (box.width - GUTTER - RIGHT), box.top + y];
        }})()"""
    )
    return x, y


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("num_gpus", [1, 8, 64])
def test_all_is_drawn_without_a_request_or_a_complaint(page: Page, tmp_path: Path, num_gpus: int, scheme: str) -> None:
    page.look(1280, 800, scheme=scheme, ratio=2 if num_gpus == 8 else 1)
    show(page, tmp_path, a_report(num_gpus))
    assert titles(page) == [
        *("Events", "Step time", "Utilisation", "Memory", "Temperature", "Margin to slowdown", "Memory temperature"),
        *("Power", "SM clock", "Throttling"),
    ]
    assert page.requests == [page.evaluate("location.href")]
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    rows = colours_of(page, "Temperature")
    assert max(rows) >= 5
    if num_gpus <= 8:
        assert sum(count >= 3 for count in rows) >= num_gpus * 14
    assert max(colours_of(page, "Step time")) >= 3
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(250, 250, 248)" if scheme == "light" else "rgb(18, 20, 23)")


def test_time_is_chosen_by_dragging_keys_and_buttons(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    show(page, tmp_path, a_report(8))
    whole = shown_time(page)
    assert whole == "10:53:15 \N{EN DASH} 12:53:15 · 2 h · 30 Nov 2025"
    before = colours_of(page, "Temperature")

    page.drag(place_in(page, "Temperature", 0.25), place_in(page, "Temperature", 0.5, row=3))
    assert "· 30 min · " in shown_time(page)
    assert shown_time(page).startswith("11:23:15 \N{EN DASH} 11:53:15")
    assert colours_of(page, "Temperature") != before

    page.press("ArrowRight")
    assert "· 30 min · " in shown_time(page)
    assert not shown_time(page).startswith("11:23:15")
    page.press("+")
    assert "· 15 min · " in shown_time(page)
    page.press("0")
    assert shown_time(page) == whole
    page.evaluate("document.querySelector('[data-last=\"600\"]').click()")
    assert shown_time(page).startswith("12:43:15 \N{EN DASH} 12:53:15 · 10 min")
    for _ in range(40):
        page.press("+")
    assert "· 40 s · " in shown_time(page), "four polls are the least"
    page.evaluate("document.getElementById('reset').click()")
    assert shown_time(page) == whole
    assert page.complaints == []


def test_a_click_without_a_drag_changes_nothing_and_the_worst_reading_is_one_click_away(
    page: Page, tmp_path: Path
) -> None:
    page.look(1280, 800)
    show(page, tmp_path, a_report(8))
    whole = shown_time(page)
    place = place_in(page, "Power", 0.5)
    page.drag(place, place)
    assert shown_time(page) == whole
    button = "report.plots.find(each => each.title === 'Temperature').head.querySelector('button')"
    assert page.evaluate(f"{button}.textContent") == "highest 91 °C · GPU 4 · 12:00:00"
    page.evaluate(f"{button}.click()")
    assert shown_time(page).startswith("11:55:00 \N{EN DASH} 12:05:00 · 10 min")


def test_the_pointer_is_told_the_exact_value_and_the_gap(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    values = {each: lively(NUM_POLLS, seed) for seed, each in enumerate(gpus(8))}
    values[gpu(6)][:, 360] = np.nan
    values[gpu(6)][PLACE["power_w"], 361] = 123
    values[gpu(6)][PLACE["throttle_reasons"], 361] = 0x44
    show(page, tmp_path, render_report(window(values), poll_seconds=10))
    page.evaluate(f"report.view.set({START_SECONDS + 3_600 - 20}, {START_SECONDS + 3_600 + 40})")
    settle(page)

    page.hover(*place_in(page, "Power", 31 / 60, row=6))
    said = page.evaluate("document.getElementById('tip').innerText")
    assert said.startswith("123 W\nPower · GPU 6 · 11:53:30\nNVIDIA H100 80GB HBM3 · GPU-00000006")
    assert "power limit, heat (hardware)" in said
    assert "75.0 % (60.0 of 80 GiB)" in said
    assert page.evaluate("report.plots.every(each => each.cross.style.display === 'block')")

    page.hover(*place_in(page, "Power", 20 / 60, row=6))
    assert page.evaluate("document.getElementById('tip').innerText").startswith("no reading\n")
    assert page.complaints == []


def test_an_event_says_what_it_is(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    show(page, tmp_path, a_report(64))
    page.hover(*place_in(page, "Events", 4_505 / 7_200))
    said = page.evaluate("document.getElementById('tip').innerText")
    assert said.split("\n") == ["thermal · GPU 0, node 4", "12:08:20", "", "It is hot."]


def test_a_missed_poll_is_drawn_as_a_gap_and_not_as_a_colour(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    values = {gpu(0): lively(NUM_POLLS, 0)}
    values[gpu(0)][:, 300:420] = np.nan
    show(page, tmp_path, render_report(window(values), poll_seconds=10))
    greys = page.evaluate(
        """(() => {
        const plot = report.plots.find(each => each.title === "Power"), { width } = plot.canvas;
        const { data } = plot.canvas.getContext("2d").getImageData(0, 8, width, 12);
        const isGrey = (x, y) => { const at = 4 * (y * width + x);
          const rgb = data.slice(at, at + 3);
          return Math.max(...rgb) - Math.min(...rgb) < 12; };
        const found = [];
        for (let x = GUTTER; x < width - RIGHT; x++) { let all = true;
          for (let y = 0; y < 12; y++) all = all && isGrey(x, y);
          found.push(all); }
        return found;
        })()"""
    )
    along = np.flatnonzero(greys) / len(greys)
    assert (along[0], along[-1]) == pytest.approx((300 / 720, 420 / 720), abs=0.005)
    assert len(along) == pytest.approx(120 / 720 * len(greys), abs=4)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_shown_as_it_is(page: Page, tmp_path: Path, text: str) -> None:
    page.look(1280, 800)
    show(page, tmp_path, hostile_page(text))
    page.hover(*place_in(page, "Power", 0.5))
    page.hover(*place_in(page, "Events", 0.1))
    settle(page)
    assert page.evaluate("document.title") != "owned"
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert page.evaluate("document.querySelectorAll('img, svg, iframe').length") == 0
    assert page.complaints == []


def test_a_script_that_got_in_all_the_same_is_not_run_and_reaches_nobody(page: Page, tmp_path: Path) -> None:
    """The second lock: what the page may do is said by the page."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            bad = (
                f"<script>document.title='owned'</script><img src='{address}/img'><svg onload=\"fetch('{address}/f')\">"
            )
            text = a_report(1).replace("<main>", f"{bad}<main>")
            show(page, tmp_path, text)
            settle(page)
            assert page.evaluate("document.title") == "GPU health"
            assert page.evaluate(f"fetch('{address}/fetch').then(() => 'went', () => 'refused')") == "refused"
        finally:
            server.shutdown()
            thread.join()
    assert asked == []
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_it_is_readable_on_a_narrow_screen(page: Page, tmp_path: Path) -> None:
    page.look(390, 800, ratio=3)
    show(page, tmp_path, a_report(8))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert max(colours_of(page, "Temperature")) >= 5


def test_without_gpus_the_steps_are_drawn(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    steps = StepWindow(START_SECONDS, 10, np.array([3, 0, 4]), *(np.array([0.1, np.nan, 0.2]) for _ in range(3)))
    for readings in (Window(np.empty(0), {}), Window(np.empty(0), {gpu(0): lively(1, 0)[:, :0]})):
        show(page, tmp_path, render_report(readings, [], steps, poll_seconds=10))
        assert titles(page)[0] == "Step time"
        assert max(colours_of(page, "Step time")) >= 2
        assert page.complaints == []


def test_of_many_gpus_only_those_with_errors_have_a_row_there(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    values = {each: lively(NUM_POLLS, seed) for seed, each in enumerate(gpus(64))}
    for number in (5, 40):
        values[gpu(number, node_rank=number // 8)][PLACE["ecc_corrected"], 300:] = number
    show(page, tmp_path, render_report(window(values), poll_seconds=10))
    plot = "report.plots.find(each => each.title === 'Corrected memory errors')"
    assert page.evaluate(f"{plot}.heat.rows") == [5, 40]
    assert "none on the other 62 GPUs" in page.evaluate(f"{plot}.head.textContent")
    page.hover(*place_in(page, "Corrected memory errors", 0.9, row=1))
    said = page.evaluate("document.getElementById('tip').innerText")
    assert said.startswith("40\nCorrected memory errors · GPU 0, node 5 · ")
    assert page.evaluate("report.plots.find(each => each.title === 'Power').heat.rows.length") == 64
    assert page.complaints == []


def test_noise_is_not_drawn_as_news(page: Page, tmp_path: Path) -> None:
    page.look(1280, 800)
    show(page, tmp_path, a_report(8))
    ends = page.evaluate("Object.fromEntries(report.data.maps.map(each => [each.key, [each.from, each.to]]))")
    assert ends["sm_clock_mhz"] == [1100, 1900]
    assert ends["utilization_pct"] == [0, 100]
    low, high = ends["temperature_margin_c"]
    assert high - low >= 25
