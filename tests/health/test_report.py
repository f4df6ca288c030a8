"""The report as a file: its size, its exactness, its words, and that nothing in it can become markup."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.health.events import HealthEvent
from lightning_air.health.history import METRICS, History, Window
from lightning_air.health.report import render_report, write_report
from lightning_air.health.report_data import Grid, encode
from lightning_air.health.report_maps import MAPS
from lightning_air.health.step_times import StepTimes
from tests.health.report_decoding import decode, decode_report
from tests.health.windows import PLACE, START_SECONDS, gpu, gpus, healthy, lively, window

KEYS = {"utilization_pct", "temperature_c", "temperature_margin_c", "hbm_temperature_c", "power_w", "sm_clock_mhz"}


def happened(
    kind: str, message: str = "", *, uuid: str | None = None, node_rank: int = 0, poll: int = 0
) -> HealthEvent:
    time_seconds = START_SECONDS + 10.0 * poll
    return HealthEvent(
        kind=kind, message=message or f"{kind}.", time_seconds=time_seconds, node_rank=node_rank, uuid=uuid
    )


def headline(page: str) -> str:
    (found,) = re.findall("<h1>(.*)</h1>", page)
    return found


def details(page: str) -> list[str]:
    (summary,) = re.findall('<div id="summary".*?</div>', page, re.DOTALL)
    return re.findall("<li>(.*?)</li>", summary)


# ---- size and exactness ----------------------------------------------------------------------------------------------


def test_64_gpus_for_two_hours_take_under_500_kb_and_are_exact() -> None:
    values = {each: lively(720, seed) for seed, each in enumerate(gpus(64))}
    page = render_report(window(values), poll_seconds=10)
    assert len(page.encode()) < 400_000
    decoded = decode_report(page)
    for key in KEYS:
        assert decoded.step(key) == 1
        given_values = [values[each][PLACE[key]] for each in gpus(64)]
        if key != "power_w":  # the others are whole numbers
            np.testing.assert_array_equal(decoded.values[key], given_values)
        np.testing.assert_allclose(decoded.values[key], given_values, atol=0.5, rtol=0)


def test_noise_that_does_not_fit_gets_coarser_and_the_page_says_so() -> None:
    random = np.random.default_rng(0)
    values = {each: healthy(720) for each in gpus(64)}
    for rows in values.values():
        for key in KEYS:
            rows[PLACE[key]] = random.uniform(0, 2000, 720)
    page = render_report(window(values), poll_seconds=10)
    assert len(page.encode()) < 500_000
    decoded = decode_report(page)
    step = decoded.step("power_w")
    assert step > 1
    assert f"exact to times {step:g} 1 " not in page
    assert f"exact to {step:g} °C, {step:g} W, {step:g} MHz" in page
    worst = np.abs(decoded.values["power_w"] - [values[each][PLACE["power_w"]] for each in gpus(64)]).max()
    assert worst <= step / 2


def test_polls_that_do_not_fit_are_merged_to_their_worst_and_the_page_says_so() -> None:
    values = {each: lively(7_200, seed) for seed, each in enumerate(gpus(64))}
    page = render_report(window(values, poll_seconds=1), poll_seconds=1)
    assert len(page.encode()) < 500_000
    decoded = decode_report(page)
    num_merged = int(decoded.head["seconds"])
    assert num_merged > 1
    assert f"{num_merged} polls ({num_merged} s) are one column, of which the worst value is kept" in page
    columns = decoded.head["columns"]
    assert columns == math.ceil(7_200 / num_merged)
    for key, worst in (("temperature_c", np.max), ("temperature_margin_c", np.min), ("throttle_reasons", np.max)):
        series = values[gpus(64)[5]][PLACE[key]]
        parts = [series[at * num_merged : (at + 1) * num_merged] for at in range(columns)]
        np.testing.assert_allclose(decoded.values[key][5], [worst(part) for part in parts], atol=decoded.step(key) / 2)


series_of_any_kind = st.lists(
    st.one_of(st.just(math.nan), st.floats(0, 1e9, width=32), st.integers(0, 100).map(float)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(series_of_any_kind, st.sampled_from(sorted(KEYS)), st.integers(1_000, 100_000))
def test_what_is_decoded_is_within_half_a_step_and_gaps_stay_gaps(
    series: list[float], key: str, max_bytes: int
) -> None:
    rows = np.full((len(METRICS), len(series)), np.nan, dtype=np.float32)
    rows[PLACE["is_lost"]] = 0
    rows[PLACE[key]] = series
    grid = Grid.of(window({gpu(0): rows}), 10)
    decoded = decode(encode(grid, [], None, max_bytes=max_bytes).text)
    found = decoded.values.get(key)
    if found is None:
        assert np.isnan(series).all()
        return
    step = decoded.step(key)
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(series))
    np.testing.assert_allclose(found[0], np.float32(series), atol=step / 2 * (1 + 1e-9), rtol=0)
    finite = [value for value in series if not math.isnan(value)]
    assert step == 1 or max_bytes < 5_000 or max(finite) - min(finite) > 60_000


def test_a_missed_poll_is_a_gap_in_its_place() -> None:
    history = History(100, 10)
    row = [float(value) for value in healthy(1)[:, 0]]
    for poll in (0, 1, 2, 5, 6):
        history.append(START_SECONDS + 10.0 * poll + 0.003, {gpu(0): row})
    decoded = decode_report(render_report(history.window(), poll_seconds=history.poll_seconds))
    assert decoded.head["start"] == START_SECONDS - 5
    assert np.isnan(decoded.values["power_w"][0]).tolist() == [False, False, False, True, True, False, False]


def test_the_same_readings_give_the_same_bytes_in_any_order() -> None:
    values = {each: lively(50, seed) for seed, each in enumerate(gpus(16))}
    events = [happened("gpu_lost", uuid=gpu(3).uuid), happened("xid", uuid=gpu(9).uuid)]
    backwards = Window(window(values).times, dict(reversed(values.items())))
    first, second = (render_report(each, events, poll_seconds=10) for each in (window(values), backwards))
    assert first == second


# ---- nothing becomes markup ------------------------------------------------------------------------------------------

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"'><svg/onload=document.title='owned'>",
    "<!--",
    "]]>&lt;&amp;",
    "\u2028\u202e\x00\x1b[31m",
    "half a pair: \ud800",
)


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def hostile_page(text: str) -> str:
    sick = gpu(0, name=text)
    rows = healthy(5)
    events = [happened("xid", text, uuid=sick.uuid), happened(text, text, node_rank=0)]
    return render_report(window({sick: rows}), events, poll_seconds=10, title=text)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_message_or_title_breaks_out(text: str) -> None:
    page = hostile_page(text)
    page.encode()
    assert _Tags(page).found == _Tags(hostile_page("harmless")).found
    decoded = decode_report(page)
    assert decoded.head["gpus"][0]["name"] == text
    assert {event["text"] for event in decoded.head["events"]} == {text}


def test_the_page_asks_nobody_for_anything() -> None:
    page = render_report(window({gpu(0): healthy(3)}), poll_seconds=10)
    assert re.findall(r"https?:|@import|url\(|src=|action=|fetch\(|XMLHttp|WebSocket|import\(", page) == []
    assert re.findall(r"href=\S*", page) == ['href="data:,">']
    assert "connect-src" not in page


# ---- words -----------------------------------------------------------------------------------------------------------


def test_nothing_was_wrong() -> None:
    values = {each: lively(720, seed) for seed, each in enumerate(gpus(64))}
    page = render_report(window(values), [happened("not_read", "x"), happened("node_back")], poll_seconds=10)
    assert headline(page) == "Nothing was wrong: 64 GPUs on 8 nodes, watched for 2 h."
    assert details(page) == []
    assert '<div id="summary" class="well">' in page


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("is_lost", 1, "lost"),
        ("ecc_uncorrected", 2, "2 uncorrected memory errors"),
        ("has_failed_remap", 1, "row remapping failed"),
        ("has_pending_retirement", 1, "memory repair pending (needs a reset)"),
        ("has_pending_remap", 1, "memory repair pending (needs a reset)"),
        ("recovery_action", 1, "needs gpu reset"),
        ("throttle_reasons", 0x48, "slowed by heat 25 % of the time"),
        ("throttle_reasons", 0x88, "slowed by the power brake 25 % of the time"),
        ("throttle_reasons", 0x08, "slowed by its hardware 25 % of the time"),
    ],
)
def test_what_a_gpu_says_of_itself_is_in_the_headline(metric: str, value: float, words: str) -> None:
    values = {each: healthy(100) for each in gpus(8)}
    values[gpu(3)][PLACE[metric], 75:] = value
    page = render_report(window(values), poll_seconds=10)
    assert headline(page) == "1 of 8 GPUs had trouble in 16 min."
    assert details(page) == [f"GPU 3: {words}."]
    (row,) = re.findall('<tr class="bad">.*', page)
    assert f'<td class="words">{words}</td>' in row


@pytest.mark.parametrize(
    ("metric", "value"),
    [("throttle_reasons", 0x1 | 0x2 | 0x4 | 0x10), ("remapped_rows_correctable", 3), ("ecc_corrected", 5)],
)
def test_what_is_usual_is_no_trouble(metric: str, value: float) -> None:
    values = {each: healthy(100) for each in gpus(2)}
    values[gpu(1)][PLACE[metric], 50:] = value
    assert headline(render_report(window(values), poll_seconds=10)).startswith("Nothing was wrong: 2 GPUs, ")


def test_events_are_trouble_of_their_gpu_or_their_node() -> None:
    xids = [HealthEvent(kind="xid", message="m", time_seconds=1, node_rank=1, uuid=gpu(9).uuid, value=63.0)] * 3
    values = {each: healthy(360) for each in gpus(16)}
    page = render_report(window(values), [*xids, happened("node_stale", node_rank=1)], poll_seconds=10)
    assert headline(page) == "1 of 16 GPUs on 2 nodes had trouble in 1 h."
    assert details(page) == ["GPU 1 on node 1: XID 63 (3 times).", "Node 1: fell silent."]
    only_node = render_report(window(values), [happened("node_stale", node_rank=1)], poll_seconds=10)
    assert headline(only_node).startswith("The GPUs were well, but something else was not: 16 GPUs on 2 nodes")


def test_many_troubles_are_counted_in_the_headline_and_listed_in_the_table() -> None:
    values = {each: healthy(10) for each in gpus(64)}
    for rows in values.values():
        rows[PLACE["ecc_uncorrected"]] = 1
    page = render_report(window(values), poll_seconds=10)
    assert len(details(page)) == 6
    assert details(page)[-1] == "And 59 more, below."
    assert page.count('<tr class="bad">') == 64


def test_without_gpus_it_says_why_and_shows_the_steps() -> None:
    steps = StepTimes(10, 10, clock=iter((0.0, 1.0, 2.0, 4.0)).__next__, wall_clock=lambda: float(START_SECONDS))
    steps.begin()
    steps.note()
    steps.note()
    reason = "No GPU is watched: NVML is not there."
    page = render_report(Window(np.empty(0), {}), [happened("nvml_absent", reason)], steps.window(), poll_seconds=10)
    assert headline(page) == "No GPU was read."
    assert details(page) == [reason]
    assert decode_report(page).head["steps"]["counts"] == [2]


def test_an_empty_report_is_one() -> None:
    page = render_report(Window(np.empty(0), {}), poll_seconds=10)
    assert headline(page) == "No GPU was read."
    assert decode_report(page).head["gpus"] == []


def test_a_storm_of_events_is_one_line_with_all_its_times() -> None:
    storm = [happened("xid", "the same", uuid=gpu(0).uuid, poll=poll) for poll in range(1_000)]
    decoded = decode_report(render_report(window({gpu(0): healthy(1_000)}), storm, poll_seconds=10))
    (event,) = decoded.head["events"]
    assert len(event["times"]) == 1_000


def test_a_thousand_different_long_messages_still_fit() -> None:
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    storm = [happened("rule", "".join(random.choice(letters, 900)), poll=poll) for poll in range(1_000)]
    values = {each: lively(720, seed) for seed, each in enumerate(gpus(64))}
    page = render_report(window(values), storm, poll_seconds=10)
    assert len(page.encode()) < 1_000_000
    assert "events are not listed" in page


def test_every_metric_has_a_place_or_is_left_out_on_purpose() -> None:
    """A metric that is added to the history is added here, or to this list."""
    drawn = set()
    for name in METRICS:
        rows = np.full((len(METRICS), 4), np.nan, dtype=np.float32)
        rows[PLACE["memory_total_bytes"]] = 100
        rows[PLACE["pcie_width_max"]] = 16
        before = [map_.series(rows, 10) for map_ in MAPS]
        rows[PLACE[name]] = [1, 2, 3, 4]
        after = [map_.series(rows, 10) for map_ in MAPS]
        if any(not np.array_equal(one, other, equal_nan=True) for one, other in zip(before, after, strict=True)):
            drawn.add(name)
    in_words = {"has_pending_remap", "has_pending_retirement", "has_failed_remap", "recovery_action", "is_lost"}
    scale_of_others = {"memory_total_bytes", "power_limit_w", "sm_clock_max_mhz", "pcie_width_max"}
    not_shown = {"throttled_power_seconds", "pcie_generation", "pcie_generation_max"}  # usual: it saves power when idle
    assert set(METRICS) - drawn == in_words | scale_of_others | not_shown


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_report_is_written_whole_over_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "report.html"
    write_report(path, "one")
    write_report(path, "two é \ud800".encode("utf-8", "replace").decode())
    assert path.read_text("utf-8").startswith("two é")
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_report_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_report(path, "\ud800")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_the_data_is_plain_json(tmp_path: Path) -> None:
    head = decode_report(render_report(window({gpu(0): healthy(2)}), poll_seconds=10)).head
    assert json.loads(json.dumps(head, allow_nan=False)) == head


# ---- incidents -------------------------------------------------------------------------------------------------------


def test_what_readings_and_events_tell_alike_is_said_once() -> None:
    values = {each: healthy(100) for each in gpus(8)}
    values[gpu(3)][PLACE["throttle_reasons"], 75:] = 0x48
    values[gpu(3)][PLACE["is_lost"], 90:] = 1
    kinds = ("thermal_throttling", "gpu_lost", "hot", "hot", "power_capped", "thermal_throttling_over")
    events = [happened(kind, uuid=gpu(3).uuid) for kind in kinds]
    page = render_report(window(values), events, poll_seconds=10)
    assert details(page) == ["GPU 3: lost, slowed by heat 25 % of the time, hot (2 times)."]
    only_events = render_report(window({gpu(3): healthy(100)}), events[:2], poll_seconds=10)
    assert headline(only_events) == "The GPU had trouble in 16 min."
    assert details(only_events) == ["GPU 3: thermal throttling, GPU lost."]


def test_each_incident_has_its_own_end() -> None:
    one, other = gpu(0).uuid, gpu(1).uuid
    events = [
        happened("hot", "a", uuid=one, poll=1),
        happened("hot", "a", uuid=one, poll=5),
        happened("hot_over", "b", uuid=one, poll=3),
        happened("hot_over", "b", uuid=other, poll=4),
        happened("gpu_lost", "c", uuid=other, poll=2),
        happened("gpu_back", "d", uuid=other, poll=6),
        happened("node_stale", "e", poll=2),
    ]
    head = decode_report(render_report(window({gpu(0): healthy(9), gpu(1): healthy(9)}), events, poll_seconds=10)).head
    ends = {event["text"]: event["ends"] for event in head["events"] if event["trouble"]}
    assert ends == {"a": [START_SECONDS + 30, None], "c": [START_SECONDS + 60], "e": [None]}
    assert {event["text"]: event["trouble"] for event in head["events"]} == {
        **dict.fromkeys("ace", True),
        **dict.fromkeys("bd", False),
    }
