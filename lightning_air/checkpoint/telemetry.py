"""What a save took, as metrics with fixed names and as one line for the console."""

from lightning_air.checkpoint.saver import SaveReport


def metrics(report: SaveReport, num_failures: int) -> dict[str, float]:
    """Return the metrics of a save that has ended, as rank 0 saw it.

    Args:
        report: What became of it.
        num_failures: How many saves of this run have failed so far.

    Returns:
        Seconds, bytes (this rank's share; the whole checkpoint), gigabytes per second of this rank's way to the place,
        counts; `last_committed_step` only once there is one.
    """
    on_the_way = report.write_seconds + report.upload_seconds
    values = {
        "blocking_seconds": report.blocking_seconds,
        "wait_previous_seconds": report.wait_previous_seconds,
        "stage_seconds": report.stage_seconds,
        "write_seconds": report.write_seconds,
        "upload_seconds": report.upload_seconds,
        "verify_seconds": report.verify_seconds,
        "commit_lag_seconds": report.commit_lag_seconds,
        "bytes": float(report.num_bytes),
        "total_bytes": float(report.total_bytes),
        "gigabytes_per_second": report.num_bytes / 1e9 / on_the_way if on_the_way > 0 else 0.0,
        "retries": float(report.num_retries),
        "failures": float(num_failures),
    }
    if report.published_path is not None:
        values["last_committed_step"] = float(report.step)
    return {f"checkpoint/{name}": value for name, value in values.items()}


def line(report: SaveReport) -> str:
    """Return one line about a published checkpoint."""
    return (
        f"Checkpoint {report.published_path} (step {report.step}, {report.total_bytes / 1e9:.3g} GB) published "
        f"{report.commit_lag_seconds:.1f} s after its step; training waited {report.blocking_seconds:.2f} s."
    )
