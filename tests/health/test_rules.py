"""A rule says what it means, or is refused with its value and what to write instead; YAML can say all of it."""

import copy
import math
import pickle
import sys
from dataclasses import fields
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_air import GPUHealth
from lightning_air.health import HangRule, Rule, default_rules
from lightning_air.health.signals import SIGNALS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"signal": "temprature_c", "above": 85}, ValueError, "signal 'temprature_c' is not known. Did you mean 'temp"),
        ({"signal": "?", "above": 85}, ValueError, "signal '\\?' is not known. There are utilization_pct, "),
        ({}, ValueError, "exactly one of above, below and any_of, got none for 'temperature_c'"),
        ({"above": 85, "below": 3}, ValueError, "exactly one of .*, got above=85, below=3 for"),
        ({"above": "85"}, TypeError, "above must be a number, got '85'"),
        ({"above": True}, TypeError, "above must be a number, got True"),
        ({"above": math.nan}, ValueError, "above must be a number, got nan"),
        ({"above": math.inf}, ValueError, "above must be a number, and finite, got inf"),
        ({"any_of": [48]}, ValueError, "any_of is for the signal 'xid', got \\[48\\] for 'temperature_c'"),
        ({"above": 85, "for_seconds": -1}, ValueError, "for_seconds must be a number from 0 to 86400, got -1"),
        ({"above": 85, "over_seconds": 0}, ValueError, "over_seconds must be a number from 1 to 3600, got 0"),
        ({"above": 85, "clear_at": 86}, ValueError, "clear_at must be at most above=85, got 86"),
        ({"below": 85, "clear_at": 84}, ValueError, "clear_at must be at least below=85, got 84"),
        ({"above": 85, "action": "stop"}, ValueError, "action must be one of 'log', 'warn', .*, got 'stop'"),
        ({"above": 85, "compared": "median"}, ValueError, "compared must be one of 'plainly', .*, got 'median'"),
        ({"above": 85, "name": "Too hot"}, ValueError, "name must be made of .*, got 'Too hot'"),
        ({"above": 85, "given": {"util": [0, 1]}}, ValueError, "given 'util' is not known"),
        ({"above": 85, "given": {"power_w": [0]}}, ValueError, "given\\['power_w'\\] must be the lowest and the high"),
        ({"above": 85, "given": {"power_w": [2, 1]}}, ValueError, "must have its lowest value first, got \\[2, 1\\]"),
        ({"above": 85, "given": {"power_w": ["a", 1]}}, TypeError, "given\\['power_w'\\] must be a number, got 'a'"),
        ({"above": 85, "given": {"xid": [1, 2]}}, ValueError, "given cannot name 'xid'"),
        ({"signal": "xid", "above": 48}, ValueError, "The signal 'xid' takes any_of"),
        ({"signal": "xid", "any_of": ["48"]}, ValueError, "any_of must be numbers of XIDs, .*, got '48'"),
        ({"signal": "xid", "any_of": [48], "for_seconds": 3}, ValueError, "for_seconds means nothing for 'xid', got 3"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Rule(**{"signal": "temperature_c", **options})


def test_two_rules_of_one_name_and_what_is_no_rule_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Two rules are called 'power_w'\. Give one of them another name"):
        GPUHealth(rules=[Rule("power_w", above=1), Rule("power_w", below=0)])
    with pytest.raises(TypeError, match="rules must be of type Rule, got 'temperature_c'"):
        GPUHealth(rules=["temperature_c"])  # type: ignore[list-item]


def test_a_rule_is_data() -> None:
    rule = Rule("power_w", above=1, given={"utilization_pct": (0, 50)})
    assert rule == Rule("power_w", above=1.0, given={"utilization_pct": (0.0, 50.0)})
    assert len({rule, pickle.loads(pickle.dumps(copy.deepcopy(rule)))}) == 1
    with pytest.raises(AttributeError):
        rule.above = 2  # type: ignore[misc]


def test_the_default_rules_have_names_of_their_own_and_none_stops_a_run() -> None:
    rules = default_rules()
    assert len({rule.name for rule in rules}) == len(rules)
    assert {rule.action for rule in rules} == {"log", "warn"}
    assert all(rule.advice.endswith(".") for rule in rules)
    assert GPUHealth().rules == rules
    assert GPUHealth(rules=[]).rules == []
    rules.clear()
    assert default_rules(), "everyone gets a list of one's own"


def test_the_table_of_the_default_rules_is_that_of_the_code() -> None:
    table = sys.modules[default_rules.__module__].__doc__ or ""
    listed = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| `")]
    marks = {"log": " (log)", "warn": ""}
    assert sorted(listed) == sorted(f"`{rule.name}`{marks[rule.action]}" for rule in default_rules())


RULE = {
    "signal": "sm_clock_mhz",
    "below": 85,
    "for_seconds": 60,
    "compared": "pct_of_median",
    "given": {"utilization_pct": [50, 100], "seconds_without_step": [0, float("inf")]},
    "clear_at": 90,
    "action": "checkpoint_stop",
    "excludes_node": True,
    "name": "slow",
    "advice": "Look.",
}


@pytest.mark.parametrize("form", ["plain", "class_path"])
def test_yaml_can_say_all_of_it(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    rules: list[dict[str, Any]] = [RULE, {"signal": "xid", "any_of": [48, 79], "action": "abort"}]
    if form == "class_path":
        rules = [{"class_path": "lightning_air.health.Rule", "init_args": rule} for rule in rules]
    hang = {"multiple_of_step": 10, "min_seconds": 600, "pause_seconds": 3600, "action": "abort"}
    options: dict[str, Any] = {
        "class_path": "lightning_air.GPUHealth",
        "init_args": {"rules": rules, "hang": hang, "folder": "f"},
    }
    parsed = parser.parse_object({"callback": options})
    health = parser.instantiate_classes(parsed).callback
    assert health.rules == [Rule(**RULE), Rule("xid", any_of=(48, 79), action="abort")]
    assert (health.hang, health.folder) == (HangRule(**hang), "f")
    options["init_args"]["hang"] = None
    assert parser.instantiate_classes(parser.parse_object({"callback": options})).callback.hang is None


def test_every_field_of_a_rule_is_in_its_docstring_and_every_signal_is_a_plain_name() -> None:
    documented = (Rule.__doc__ or "").split("Args:")[1]
    assert all(f"        {each.name}: " in documented for each in fields(Rule))
    assert all(name.isidentifier() for name in SIGNALS)
