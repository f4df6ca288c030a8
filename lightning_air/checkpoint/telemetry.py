"""What a save took, as metrics with fixed names and as one line for the console.

Every logger gets these of each save that has ended, at the save's step. Times and bytes are rank 0's; times are in
seconds.

| metric | what it is |
|---|---|
| `checkpoint/blocking_seconds` | how long training waited, for all reasons |
| `checkpoint/wait_previous_seconds` | of that, for the save before |
| `checkpoint/stage_seconds` | of that, for the copy into host memory |
| `checkpoint/write_seconds` | writing shards, in the background like the next two |
| `checkpoint/upload_seconds` | sending them to a volume or an object store |
| `checkpoint/verify_seconds` | asking what had arrived, summed over the uploads |
| `checkpoint/commit_lag_seconds` | from the call to the publication, or to the failure |
| `checkpoint/bytes` | rank 0's share |
| `checkpoint/total_bytes` | the whole checkpoint; 0 if it failed |
| `checkpoint/gigabytes_per_second` | rank 0's share, written and uploaded |
| `checkpoint/retries` | repeated uploads |
| `checkpoint/failures` | failed saves of this run so far |
| `checkpoint/last_committed_step` | the step of the newest published checkpoint, once there is one |
"""

from lightning_air.checkpoint.report import bytes_text
from lightning_air.checkpoint.saver import SaveReport


def metrics(report: SaveReport, *, num_failures: int, last_committed_step: int | None) -> dict[str, float]:
    """Return the metrics of a save that has ended, by the names above.

    Args:
        report: What became of it.
        num_failures: How many saves of this run have failed so far.
        last_committed_step: The step of the newest published checkpoint.
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
    if last_committed_step is not None:
        values["last_committed_step"] = float(last_committed_step)
    return {f"checkpoint/{name}": value for name, value in values.items()}


def line(report: SaveReport) -> str:
    """Return one line about a published checkpoint."""
    return (
        f"Checkpoint {report.published_path} (step {report.step}, {bytes_text(report.total_bytes)}) published "
        f"{report.commit_lag_seconds:.1f} s after its step; training waited {report.blocking_seconds:.2f} s."
    )
