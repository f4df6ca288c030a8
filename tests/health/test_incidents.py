"""A rule fires at its threshold after its time, and not before; gaps change nothing; each incident is told once."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.health import Rule, default_rules
from lightning_air.health.events import EventLog, HealthEvent
from lightning_air.health.history import GpuId, Row, row_of
from lightning_air.health.incidents import Incidents
from lightning_air.health.judge import Judge
from lightning_air.health.sample import GPUSample

POLL = 10.0
GAP = math.nan


def gpu(number: int = 0, node_rank: int = 0) -> GpuId:
    return GpuId(f"GPU-{number}", number, "NVIDIA H100", node_rank)


def healthy(**values: Any) -> GPUSample:
    whole = {
        "utilization_pct": 95.0,
        "memory_used_bytes": 20 * 2**30,
        "memory_total_bytes": 80 * 2**30,
        "temperature_c": 60.0,
        "temperature_margin_c": 27.0,
        "hbm_temperature_c": 70.0,
        "power_w": 650.0,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1900.0,
        "sm_clock_max_mhz": 1980.0,
        "throttle_reasons": 0,
        "throttled_power_seconds": 0.0,
        "throttled_thermal_seconds": 0.0,
        "throttled_board_seconds": 0.0,
        "throttled_reliability_seconds": 0.0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "remapped_rows_correctable": 0,
        "remapped_rows_uncorrectable": 0,
        "has_pending_remap": False,
        "has_failed_remap": False,
        "has_pending_retirement": False,
        "nvlink_crc_errors": 0,
        "nvlink_replays": 0,
        "nvlink_recoveries": 0,
        "pcie_replays": 0,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "recovery_action": 0,
    }
    return GPUSample(uuid="", index=0, name="", **{**whole, **values})


def row(**values: Any) -> Row:
    return row_of(healthy(**values), healthy())


def power(value: float) -> Row:
    return row(power_w=None if math.isnan(value) else value)


def begun_at(rule: Rule, series: Sequence[float], *, poll_seconds: float = POLL) -> list[int]:
    """The polls at which a series of power readings begins an incident."""
    incidents = Incidents([rule], poll_seconds=poll_seconds)
    found = []
    for number, value in enumerate(series):
        if incidents.look(number * poll_seconds, {gpu(): power(value)}).begun:
            found.append(number)
    return found


# ---- thresholds, times and gaps --------------------------------------------------------------------------------------

values = st.sampled_from([100.0, 299.0, 300.0, 301.0, 500.0])
series_of = st.lists(values, max_size=40)


def runs_of(is_bad: Sequence[bool]) -> list[tuple[int, int]]:
    """First poll and number of polls of each stretch."""
    found: list[tuple[int, int]] = []
    for number, bad in enumerate(is_bad):
        if bad and found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif bad:
            found.append((number, 1))
    return found


@settings(deadline=None)
@given(series_of, st.integers(0, 5), st.booleans())
def test_it_fires_exactly_when_a_stretch_of_bad_values_has_lasted(
    series: list[float], num_polls: int, is_below: bool
) -> None:
    side: dict[str, Any] = {"below": 300} if is_below else {"above": 300}
    rule = Rule("power_w", **side, for_seconds=num_polls * POLL)
    bad = [value < 300 if is_below else value > 300 for value in series]

    # The first to last long enough begins it; it is over after as long a stretch of good ones, and so on.
    expected, start = [], 0
    while True:
        first = next((at for at in stretches(bad, num_polls, start)), None)
        if first is None:
            break
        expected.append(first)
        over = next((at for at in stretches([not each for each in bad], num_polls, first + 1)), None)
        if over is None:
            break
        start = over + 1
    assert begun_at(rule, series) == expected


def stretches(is_so: Sequence[bool], num_polls: int, start: int) -> list[int]:
    """The polls from `start` on at which a stretch that begins there or later has lasted `num_polls` intervals."""
    return [start + at + num_polls for at, num in runs_of(is_so[start:]) if num > num_polls]


@settings(deadline=None)
@given(series_of, st.data(), st.integers(0, 5))
def test_gaps_neither_begin_nor_end_anything(series: list[float], data: st.DataObject, num_polls: int) -> None:
    """Told values at the same times, with or without gaps that are said to be gaps, come to the same."""
    rule = Rule("power_w", above=300, for_seconds=num_polls * POLL, clear_at=250)
    keep = data.draw(st.lists(st.booleans(), min_size=len(series), max_size=len(series)))
    said, unsaid = Incidents([rule], poll_seconds=POLL), Incidents([rule], poll_seconds=POLL)
    for number, (value, is_told) in enumerate(zip(series, keep, strict=True)):
        change = said.look(number * POLL, {gpu(): power(value if is_told else GAP)})
        if is_told:
            assert unsaid.look(number * POLL, {gpu(): power(value)}) == change
        else:
            assert (change.begun, change.ended) == ((), ())
    assert said.open == unsaid.open


@settings(deadline=None)
@given(st.lists(st.just(GAP), min_size=3, max_size=30), st.integers(1, 5))
def test_the_time_of_a_long_gap_is_not_counted(gap: list[float], num_polls: int) -> None:
    rule = Rule("power_w", above=300, for_seconds=num_polls * POLL)
    after = begun_at(rule, [301.0, *gap, *[301.0] * (num_polls + 1)])
    assert after == [1 + len(gap) + num_polls]


def test_up_to_two_missing_polls_are_bridged() -> None:
    assert begun_at(Rule("power_w", above=300, for_seconds=60), [301, GAP, GAP, 301, GAP, GAP, 301]) == [6]


@settings(deadline=None)
@given(series_of)
def test_what_is_not_told_never_fires(series: list[float]) -> None:
    incidents = Incidents(default_rules(), poll_seconds=POLL)
    for number in range(len(series)):
        nothing = GPUSample(uuid="", index=0, name="")
        assert not incidents.look(number * POLL, {gpu(): row_of(nothing, None)}).begun


@settings(deadline=None)
@given(st.floats(250, 300), st.integers(0, 4))
def test_between_the_threshold_and_clear_at_an_incident_stays(value: float, num_polls: int) -> None:
    rule = Rule("power_w", above=300, clear_at=250, for_seconds=num_polls * POLL)
    incidents = Incidents([rule], poll_seconds=POLL)
    polls = [301.0] * (num_polls + 1) + [math.nextafter(value, 301)] * 10 + [250.0] * (num_polls + 1)
    ended = [at for at, each in enumerate(polls) if incidents.look(at * POLL, {gpu(): power(each)}).ended]
    assert ended == [len(polls) - 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 6))
def test_growth_is_that_of_the_last_seconds(increments: list[int], num_polls: int) -> None:
    rule = Rule("pcie_replays", above=16, over_seconds=num_polls * POLL, name="replays")
    incidents = Incidents([rule], poll_seconds=POLL)
    counts = [sum(increments[: at + 1]) for at in range(len(increments))]
    is_open = []
    for at, count in enumerate(counts):
        incidents.look(at * POLL, {gpu(): row(pcie_replays=count)})
        is_open.append(bool(incidents.open))
    grown = [count - counts[max(0, at - num_polls)] for at, count in enumerate(counts)]
    assert is_open == [each > 16 for each in grown]


def test_a_counter_that_begins_anew_is_no_growth() -> None:
    incidents = Incidents([Rule("pcie_replays", above=16, over_seconds=60)], poll_seconds=POLL)
    for at, count in enumerate([10_000, 10_000, 0, 16]):
        incidents.look(at * POLL, {gpu(): row(pcie_replays=count)})
    assert incidents.open == []
    assert len(incidents.look(40.0, {gpu(): row(pcie_replays=17)}).begun) == 1


@settings(deadline=None)
@given(st.lists(st.floats(100, 2000), min_size=2, max_size=20), st.integers(0, 3))
def test_clocks_are_compared_with_the_busy_ones_of_the_same_model(clocks: list[float], num_idle: int) -> None:
    rule = Rule("sm_clock_mhz", below=85, compared="pct_of_median", given={"utilization_pct": (50, 100)}, name="slow")
    rows = {gpu(at): row(sm_clock_mhz=clock) for at, clock in enumerate(clocks)}
    rows |= {gpu(100 + at): row(sm_clock_mhz=1.0, utilization_pct=0.0) for at in range(num_idle)}
    rows[GpuId("GPU-other", 200, "NVIDIA A10", 1)] = row(sm_clock_mhz=1.0)
    change = Incidents([rule], poll_seconds=POLL).look(0.0, rows)
    ordered = sorted(clocks)
    median = (ordered[(len(clocks) - 1) // 2] + ordered[len(clocks) // 2]) / 2
    slow = {gpu(at) for at, clock in enumerate(clocks) if 100 * clock / median < 85}
    assert {incident.gpu for incident in change.begun} == slow


# ---- the default rules, each at its threshold ------------------------------------------------------------------------

MINUTE = 7  # polls
DEFAULT = {rule.name: rule for rule in default_rules()}


def counting(name: str, last: float, num_polls: int) -> list[dict[str, Any]]:
    """A counter that jumps at the end."""
    return [{name: 0}] * (num_polls - 1) + [{name: last}]


AT_THRESHOLD: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "gpu_lost": ([{"is_lost": False}], [{"is_lost": True}]),
    "recovery_needed": ([{"recovery_action": 1}] * 3, [{"recovery_action": 1}] * 4),
    "memory_errors": ([{"ecc_uncorrected": 0}], [{"ecc_uncorrected": 1}]),
    "remap_failed": ([{}], [{"has_failed_remap": True}]),
    "remap_pending": ([{}], [{"has_pending_remap": True}]),
    "retirement_pending": ([{}], [{"has_pending_retirement": True}]),
    "many_remapped_rows": ([{"remapped_rows_uncorrectable": 511}], [{"remapped_rows_uncorrectable": 512}]),
    "memory_full": (
        [{"memory_used_bytes": 98 * 2**20, "memory_total_bytes": 100 * 2**20}] * MINUTE,
        [{"memory_used_bytes": 98 * 2**20 + 1, "memory_total_bytes": 100 * 2**20}] * MINUTE,
    ),
    "hot": ([{"temperature_margin_c": 2}] * 4, [{"temperature_margin_c": 1}] * 4),
    "hot_memory": ([{"hbm_temperature_c": 95}] * MINUTE, [{"hbm_temperature_c": 96}] * MINUTE),
    "thermal_throttling": (
        counting("throttled_thermal_seconds", 6.0, 3),
        counting("throttled_thermal_seconds", 6.1, 3),
    ),
    "power_brake": ([{"throttle_reasons": 0x8 | 0x4}] * 4, [{"throttle_reasons": 0x80}] * 4),
    "power_capped": (counting("throttled_power_seconds", 30.0, 3), counting("throttled_power_seconds", 30.1, 3)),
    "nvlink_errors": (counting("nvlink_crc_errors", 6000, 3), counting("nvlink_crc_errors", 6001, 3)),
    "nvlink_recoveries": (counting("nvlink_recoveries", 0, 3), counting("nvlink_recoveries", 1, 3)),
    "pcie_replays_gen4": (
        [{"pcie_replays": count, "pcie_generation_max": 4} for count in (0, 0, 16)],
        [{"pcie_replays": count, "pcie_generation_max": 4} for count in (0, 0, 17)],
    ),
    "pcie_replays_gen5": (counting("pcie_replays", 31, 3), counting("pcie_replays", 32, 3)),
    "pcie_lanes": ([{"pcie_width": 8}] * (MINUTE - 1), [{"pcie_width": 8}] * MINUTE),
    "pcie_speed": ([{"pcie_generation": 1, "utilization_pct": 49}] * 31, [{"pcie_generation": 1}] * 31),
    "stuck": (
        [{"power_w": 280, "utilization_pct": 100}] * 13,
        [{"power_w": 279, "utilization_pct": 100}] * 13,
    ),
    "slow_clock": ([{"sm_clock_mhz": 1615}] * MINUTE, [{"sm_clock_mhz": 1614}] * MINUTE),
    "slow_throttled": (
        counting("throttled_board_seconds", 60.0, 3),
        counting("throttled_board_seconds", 60.1, 3),
    ),
}


def test_all_default_rules_are_tested() -> None:
    assert set(AT_THRESHOLD) == {name for name, rule in DEFAULT.items() if rule.signal != "xid"}


@pytest.mark.parametrize("name", sorted(AT_THRESHOLD))
def test_a_default_rule_fires_at_its_threshold_and_not_before(name: str) -> None:
    """Beside two healthy GPUs on another node; no other GPU is blamed."""
    for polls, fires in zip(AT_THRESHOLD[name], (False, True), strict=True):
        incidents = Incidents([DEFAULT[name]], poll_seconds=POLL)
        begun = []
        for at, poll in enumerate(polls):
            rows = {gpu(0): row(**poll), gpu(1, 1): row(), gpu(2, 1): row()}
            change = incidents.look(at * POLL, rows, seconds_without_step=at * POLL + 120.0)
            begun += [(incident.gpu, at) for incident in change.begun]
        assert begun == ([(gpu(0), len(polls) - 1)] if fires else []), polls


def test_a_stuck_gpu_is_none_while_steps_go_on() -> None:
    incidents = Incidents([DEFAULT["stuck"]], poll_seconds=POLL)
    for at in range(30):
        stuck = {gpu(): row(power_w=100, utilization_pct=100)}
        assert not incidents.look(at * POLL, stuck, seconds_without_step=119.0).begun


def test_healthy_gpus_break_no_rule() -> None:
    incidents = Incidents(default_rules(), poll_seconds=POLL)
    for at in range(100):
        busy = {gpu(number): row(power_w=650 + at % 7, utilization_pct=90 + at % 11) for number in range(8)}
        assert not incidents.look(at * POLL, busy, seconds_without_step=1.0).begun


# ---- what is told ----------------------------------------------------------------------------------------------------


class Told:
    """A judge whose time a test sets."""

    def __init__(self, *rules: Rule, events: EventLog | None = None) -> None:
        self.seconds = 1_000_000.0
        self.events = events or EventLog(clock=lambda: self.seconds)
        self.acted: list[tuple[str, str]] = []
        self.judge = Judge(
            rules,
            poll_seconds=POLL,
            events=self.events,
            act=lambda incident, message: self.acted.append((incident.rule.name, message)),
            clock=lambda: self.seconds,
            wall_clock=lambda: self.seconds,
        )

    def poll(self, rows: dict[GpuId, Row], num: int = 1) -> None:
        for _ in range(num):
            self.seconds += POLL
            self.judge.take(rows)


def test_an_incident_is_told_once_with_all_that_one_needs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    told = Told(Rule("temperature_c", above=85, for_seconds=20, name="hot", advice="Look at its fans."))
    told.poll({gpu(3, 1): row(temperature_c=60.0), gpu(4, 1): row()}, 2)
    told.poll({gpu(3, 1): row(temperature_c=91.0), gpu(4, 1): row()}, 10)
    message = (
        "GPU 3 (GPU-3, NVIDIA H100) of node 1: hot: temperature_c is 91 °C, above 85 °C, for 20 s "
        "(since 1970-01-12 13:47:10 UTC). Look at its fans."
    )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", message)]
    assert told.acted == [("hot", message)]
    (event,) = told.events.all
    assert (event.kind, event.uuid, event.node_rank, event.value) == ("hot", "GPU-3", 1, 91.0)

    told.poll({gpu(3, 1): row(temperature_c=60.0)}, 10)
    assert [event.kind for event in told.events.all] == ["hot", "hot_over"]
    assert told.judge.open == []


@pytest.mark.parametrize(
    ("rule", "values", "text"),
    [
        (
            Rule("pcie_replays", above=16, over_seconds=60),
            [{"pcie_replays": 0}, {"pcie_replays": 20}],
            "of node 0: the growth of pcie_replays in 60 s is 20, above 16 (since",
        ),
        (
            Rule("sm_clock_mhz", below=85, compared="pct_of_median", name="slow"),
            [{"sm_clock_mhz": 950}],
            "slow: sm_clock_mhz relative to the median of its peers is 50 %, below 85 % (since",
        ),
        (
            Rule("power_w", above=10, compared="minus_median", name="greedy"),
            [{"power_w": 670}],
            "greedy: power_w, less the median of its peers, is 20 W, above 10 W (since",
        ),
        (Rule("has_failed_remap", above=0.5), [{"has_failed_remap": True}], "node 0: has_failed_remap (since"),
    ],
)
def test_a_message_says_what_was_compared(rule: Rule, values: list[dict[str, Any]], text: str) -> None:
    told = Told(rule)
    for each in values:
        told.poll({gpu(0): row(**each), gpu(1): row(), gpu(2): row()})
    ((_, message),) = told.acted
    assert text in message


def test_log_is_told_quietly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Told(Rule("power_w", above=1, action="log")).poll({gpu(): row()})
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_value_that_comes_and_goes_is_not_told_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(Rule("power_w", above=300))
    for at in range(100):
        told.poll({gpu(): row(power_w=301.0 + at if at % 2 else 200.0)})
    assert len([record for record in caplog.records if "power_w is" in record.getMessage()]) == 5
    assert len(told.acted) == 50


def test_an_xid_is_an_incident_of_its_number_and_gpu_once_on_whichever_node() -> None:
    told = Told(*default_rules())
    told.events.add("xid", "of the run before", uuid="GPU-0", value=79.0)
    told = Told(*default_rules(), events=told.events)
    told.poll({gpu(0): row(), gpu(1, 1): row()})
    assert told.acted == []

    def elsewhere(xid: int) -> None:
        told.events.add_from(
            HealthEvent(kind="xid", message="!", time_seconds=0.0, node_rank=1, uuid="GPU-1", value=float(xid))
        )

    for xid in (79, 79, 48, 13, 7):
        elsewhere(xid)
    told.events.add("xid", "!", uuid="GPU-MIG-parent", value=74.0)
    told.poll({})
    told.poll({})
    assert [name for name, _ in told.acted] == [
        "xid_context_dead",
        "xid_context_dead",
        "xid_application",
        "xid_hardware",
    ]
    assert told.acted[0][1].startswith("GPU 1 (GPU-1, NVIDIA H100) of node 1: xid_context_dead: XID 79 (since ")
    assert told.acted[3][1].startswith("GPU (GPU-MIG-parent) of node 0: xid_hardware: XID 74 (since ")


def test_what_the_node_itself_has_told_is_not_warned_of_twice(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(*default_rules())
    told.poll({gpu(): row(is_lost=True)})
    assert [name for name, _ in told.acted] == ["gpu_lost"]
    assert caplog.records == []
    told = Told(Rule("is_lost", above=0.5, action="abort"))
    told.poll({gpu(): row(is_lost=True)})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
