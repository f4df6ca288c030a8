"""How many of a run's points are not ours: MLflow's own system metrics, and what somebody else has logged before.

Pure functions. System metrics run into the same run, and count against its cap. On AI Runtime the platform switches
them on, at 2 s or 10 s; one node with 8 GPUs at 2 s uses up 10M points in 4.8 days, eight nodes in 14 hours.
"""

from collections.abc import Iterable

from lightning_air.runtime import Launch, LaunchKind, Platform

SYSTEM_PREFIX = "system/"
MAX_RUN_SECONDS = 7 * 86_400.0
"""The longest that AI Runtime lets a run last."""

DEFAULT_INTERVAL_SECONDS = 10.0
"""MLflow's own (MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL)."""

_PLATFORM_INTERVAL_SECONDS: dict[LaunchKind, float] = {"air-node": 2.0, "air-process": 10.0}

# mlflow.system_metrics.metrics: 3 of CPU and memory, 3 of the disk, 2 of the network; per GPU 2 of its memory,
# utilization, and power in watts and percent.
VALUES_PER_NODE = 8
VALUES_PER_GPU = 5


def estimate_system_points(
    *,
    num_nodes: int,
    gpus_per_node: int,
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    duration_seconds: float = MAX_RUN_SECONDS,
) -> int:
    """Return how many points the system metrics of a run take.

    Args:
        num_nodes: That log them into the run.
        gpus_per_node: NVIDIA's.
        interval_seconds: From one point to the next: the sampling interval times the samples per point.
        duration_seconds: How long the run lasts at most.

    Raises:
        ValueError: If a number is negative, or the interval not positive.
    """
    if min(num_nodes, gpus_per_node, duration_seconds) < 0:
        raise ValueError(
            "num_nodes, gpus_per_node and duration_seconds must not be negative, got "
            f"{num_nodes!r}, {gpus_per_node!r} and {duration_seconds!r}."
        )
    return int(points_per_second(num_nodes, gpus_per_node, interval_seconds) * duration_seconds)


def points_per_second(num_nodes: int, gpus_per_node: int, interval_seconds: float) -> float:
    """Return how many points a second the system metrics of so many nodes take.

    Raises:
        ValueError: If the interval is not positive.
    """
    if not interval_seconds > 0:
        raise ValueError(f"interval_seconds must be positive, got {interval_seconds!r}.")
    return num_nodes * (VALUES_PER_NODE + VALUES_PER_GPU * gpus_per_node) / interval_seconds


def count_system_points(latest: Iterable[tuple[str, int]]) -> int:
    """Return how many points the system metrics of a run have taken so far.

    MLflow counts their steps from 0, one per point. If a process starts counting anew in the same run, its points count
    from when they pass what was there.

    Args:
        latest: Each metric of the run with its greatest step; others than system metrics are left out.
    """
    return sum(max(0, step) + 1 for key, step in latest if key.startswith(SYSTEM_PREFIX))


def estimate_found_points(latest: Iterable[tuple[str, int]]) -> int:
    """Return how many points a run has at most that somebody else has logged into, system metrics left out.

    Nothing tells their number but the whole history of each metric, which takes minutes. So it is taken for one in each
    step from 0 on: too high where fewer steps were logged, and too low only where one was logged several times.

    Args:
        latest: Each metric of the run with its greatest step.
    """
    return sum(max(0, step) + 1 for key, step in latest if not key.startswith(SYSTEM_PREFIX))


def system_interval(platform: Platform, launch: Launch, *, is_adopted: bool, is_sampled: bool) -> float | None:
    """Return how many seconds lie between two points of a system metric in a run; None if nobody samples them.

    Args:
        platform: What MLflow's variables say.
        launch: AI Runtime switches them on.
        is_adopted: The run was there before we came; MLflow samples only for those that its fluent interface started.
        is_sampled: The run has some already.
    """
    by_platform = _PLATFORM_INTERVAL_SECONDS.get(launch.kind) if platform.is_databricks else None
    is_on = by_platform is not None and platform.system_metrics_enabled is not False
    if not (is_on or is_sampled or (platform.system_metrics_enabled is True and is_adopted)):
        return None
    seconds = platform.system_metrics_interval_seconds or by_platform or DEFAULT_INTERVAL_SECONDS
    return seconds * (platform.system_metrics_samples_per_point or 1)


def system_warning(*, there: int, estimate: int, cap: int, rate: float, interval_seconds: float) -> str | None:
    """Return what the user is to know if the platform's own metrics take more than half of the cap; else None.

    Args:
        there: Points that the run has of them.
        estimate: Points that will come.
        cap: Points that the run may have in all.
        rate: Points that they take in a second.
        interval_seconds: From one point of a metric to the next.
    """
    if 2 * (there + estimate) <= cap:
        return None
    hours = f"after {max(0, cap - there) / rate / 3600:.1f} hours" if rate > 0 else "before the run ends"
    total = there + estimate
    reach = f"reach the cap of {cap:,} metric steps {hours}" if total > cap else f"take {total:,} of {cap:,}"
    return (
        f"The platform's own system metrics alone {reach}; this logger keeps to half of it. Set "
        f"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL to more than {interval_seconds:g} seconds, on every node, to have "
        "them sampled less often."
    )
