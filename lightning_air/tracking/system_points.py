"""How many of a run's points MLflow's own system metrics take: they run into the same run, and count against its cap.

Pure functions. On AI Runtime the platform switches these metrics on, at 2 s or 10 s; one node with 8 GPUs at 2 s uses
up 10M points in 4.8 days, eight nodes in 14 hours.
"""

from collections.abc import Iterable

SYSTEM_PREFIX = "system/"
MAX_RUN_SECONDS = 7 * 86_400.0
"""The longest that AI Runtime lets a run last."""

DEFAULT_INTERVAL_SECONDS = 10.0
"""MLflow's own (MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL)."""

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


def project_system_points(num_points: int, *, elapsed_seconds: float, duration_seconds: float = MAX_RUN_SECONDS) -> int:
    """Return how many points the system metrics will take in all, if they go on as they have so far.

    Args:
        num_points: That they have taken.
        elapsed_seconds: In which they did.
        duration_seconds: How long the run lasts at most, what has elapsed included.
    """
    if elapsed_seconds <= 0:
        return num_points
    return int(num_points * max(1.0, duration_seconds / elapsed_seconds))


def system_warning(*, estimate: int, cap: int, rate: float) -> str | None:
    """Return what the user is to know if the platform's own metrics take more than half of the cap; else None.

    Args:
        estimate: Points that they will take.
        cap: Points that the run may have in all.
        rate: Points that they take in a second.
    """
    if 2 * estimate <= cap:
        return None
    hours = f"after {cap / rate / 3600:.1f} hours" if rate > 0 else "before the run ends"
    reach = f"reach the cap of {cap:,} metric steps {hours}" if estimate > cap else f"take {estimate:,} of {cap:,}"
    return (
        f"The platform's own system metrics alone {reach}; this logger keeps to half of it. Set "
        "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL to more seconds, on every node, to have them sampled less often."
    )
