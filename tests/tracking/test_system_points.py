"""What MLflow's own system metrics take of the budget is known before they take it."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_air.runtime import detect_launch, detect_platform
from lightning_air.tracking.system_points import (
    VALUES_PER_GPU,
    VALUES_PER_NODE,
    count_system_points,
    estimate_found_points,
    estimate_system_points,
    points_per_second,
    system_interval,
    system_warning,
)

CAP = 10_000_000


def test_a_node_with_eight_gpus_takes_48_values() -> None:
    assert estimate_system_points(num_nodes=1, gpus_per_node=8, interval_seconds=10, duration_seconds=10) == 48


def test_the_platform_at_two_seconds_for_seven_days() -> None:
    assert estimate_system_points(num_nodes=1, gpus_per_node=8, interval_seconds=2) == 14_515_200
    assert estimate_system_points(num_nodes=8, gpus_per_node=8, interval_seconds=2) == 116_121_600


def test_the_values_are_those_of_the_installed_mlflow() -> None:
    # Read, not run: its monitors need psutil, which is not ours to require.
    package = Path(importlib.util.find_spec("mlflow").submodule_search_locations[0])

    def names(monitor: str) -> set[str]:
        source = (package / "system_metrics" / "metrics" / f"{monitor}_monitor.py").read_text()
        return {*re.findall(r'self\._metrics\[f?"([^"]+)"\]', source)}

    assert len(names("cpu") | names("disk") | names("network")) == VALUES_PER_NODE
    assert len(names("gpu")) == VALUES_PER_GPU


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": -1, "gpus_per_node": 8}, "must not be negative, got -1, 8"),
        ({"num_nodes": 1, "gpus_per_node": 8, "interval_seconds": 0}, "interval_seconds must be positive, got 0"),
        ({"num_nodes": 1, "gpus_per_node": 8, "interval_seconds": float("nan")}, "must be positive, got nan"),
    ],
)
def test_a_bad_number_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_system_points(**options)


def test_what_is_there_is_counted_from_the_latest_steps() -> None:
    latest = [("system/cpu_utilization_percentage", 9), ("system/node_1/gpu_0_power_usage_watts", 0), ("loss", 1_000)]

    assert count_system_points(latest) == 11
    assert count_system_points([]) == 0


def test_what_others_have_logged_is_taken_for_one_point_in_each_step() -> None:
    latest = [("system/cpu_utilization_percentage", 9), ("loss", 999), ("lr", 0), ("odd", -5)]

    assert estimate_found_points(latest) == 1_000 + 1 + 1
    assert estimate_found_points([]) == 0


AIR = {"NUM_NODES": "2", "LOCAL_WORLD_SIZE": "8", "HYPERPARAMETERS_PATH": "/h", "NODE_RANK": "0"}
AIR |= {"WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
ON = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true"}
OFF = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
EVERY_60 = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "60"}


@pytest.mark.parametrize(
    ("environ", "is_adopted", "is_sampled", "seconds"),
    [
        (AIR, False, False, 2.0),
        (AIR | EVERY_60, False, False, 60.0),
        (AIR | EVERY_60 | {"MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "5"}, True, False, 300.0),
        (AIR | OFF, True, False, None),
        (AIR | OFF, True, True, 2.0),
        ({}, True, False, None),
        ({}, True, True, 10.0),
        (ON, False, False, None),
        (ON, True, False, 10.0),
        (ON | EVERY_60, True, False, 60.0),
    ],
)
def test_the_interval_is_what_the_platform_or_mlflows_variables_say(
    environ: dict[str, str], seconds: float | None, *, is_adopted: bool, is_sampled: bool
) -> None:
    platform, launch = detect_platform(environ), detect_launch(environ)

    assert system_interval(platform, launch, is_adopted=is_adopted, is_sampled=is_sampled) == seconds


def warning(**changes: Any) -> str | None:
    return system_warning(**{"there": 0, "estimate": 0, "cap": CAP, "rate": 24, "interval_seconds": 2.0, **changes})


def test_no_warning_up_to_half_of_the_cap() -> None:
    assert warning(estimate=CAP // 2) is None
    assert warning(there=CAP // 4, estimate=CAP // 4) is None
    assert warning(there=CAP // 4, estimate=CAP // 4 + 1) is not None


def test_a_warning_says_after_how_many_hours_the_cap_is_reached() -> None:
    rate = points_per_second(1, 8, 2)
    estimate = estimate_system_points(num_nodes=1, gpus_per_node=8, interval_seconds=2)

    text = warning(estimate=estimate, rate=rate) or ""
    assert "reach the cap of 10,000,000 metric steps after 115.7 hours" in text
    assert "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL to more than 2 seconds" in text
    assert "after 57.9 hours" in (warning(there=CAP // 2, estimate=estimate, rate=rate) or "")


def test_a_warning_says_how_much_is_taken_if_the_cap_is_not_reached() -> None:
    assert "take 6,000,000 of 10,000,000" in (warning(there=1_000_000, estimate=5_000_000) or "")
    assert "before the run ends" in (warning(estimate=11_000_000, rate=0) or "")
