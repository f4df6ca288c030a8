"""What MLflow's own system metrics take of the budget is known before they take it."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_air.tracking.system_points import (
    VALUES_PER_GPU,
    VALUES_PER_NODE,
    count_system_points,
    estimate_system_points,
    points_per_second,
    project_system_points,
    system_warning,
)

HOUR = 3600.0
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


def test_what_is_to_come_is_projected_from_what_was() -> None:
    assert project_system_points(100, elapsed_seconds=HOUR, duration_seconds=10 * HOUR) == 1_000
    assert project_system_points(100, elapsed_seconds=11 * HOUR, duration_seconds=10 * HOUR) == 100
    assert project_system_points(100, elapsed_seconds=0) == 100


def test_no_warning_up_to_half_of_the_cap() -> None:
    assert system_warning(estimate=CAP // 2, cap=CAP, rate=24) is None


def test_a_warning_says_after_how_many_hours_the_cap_is_reached() -> None:
    rate = points_per_second(1, 8, 2)

    warning = system_warning(
        estimate=estimate_system_points(num_nodes=1, gpus_per_node=8, interval_seconds=2), cap=CAP, rate=rate
    )

    assert warning is not None
    assert "reach the cap of 10,000,000 metric steps after 115.7 hours" in warning
    assert "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL" in warning


def test_a_warning_says_how_much_is_taken_if_the_cap_is_not_reached() -> None:
    assert "take 6,000,000 of 10,000,000" in (system_warning(estimate=6_000_000, cap=CAP, rate=24) or "")
    assert "before the run ends" in (system_warning(estimate=11_000_000, cap=CAP, rate=0) or "")
