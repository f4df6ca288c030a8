"""The names of the metrics are fixed and documented, their values are what was measured, a failure is told as one."""

import re
from dataclasses import replace

import pytest

from lightning_air.checkpoint import SaveReport, telemetry

REPORT = SaveReport(
    path="/run/step=7.ckpt",
    published_path="/run/step=7@2.ckpt",
    step=7,
    asynchronous=True,
    blocking_seconds=1.5,
    wait_previous_seconds=1.0,
    stage_seconds=0.25,
    write_seconds=2.0,
    upload_seconds=6.0,
    verify_seconds=0.5,
    commit_lag_seconds=12.0,
    num_bytes=4_000_000_000,
    total_bytes=16_000_000_000,
    num_retries=3,
    error=None,
)


def test_every_metric_is_documented_and_there_is_no_other() -> None:
    documented = re.findall(r"^\| `(checkpoint/\w+)` \| \S.* \|$", telemetry.__doc__ or "", re.MULTILINE)
    assert sorted(telemetry.metrics(REPORT, num_failures=0, last_committed_step=7)) == sorted(documented)
    assert len(documented) == len(set(documented)) == 13


def test_the_values() -> None:
    assert telemetry.metrics(REPORT, num_failures=2, last_committed_step=7) == {
        "checkpoint/blocking_seconds": 1.5,
        "checkpoint/wait_previous_seconds": 1.0,
        "checkpoint/stage_seconds": 0.25,
        "checkpoint/write_seconds": 2.0,
        "checkpoint/upload_seconds": 6.0,
        "checkpoint/verify_seconds": 0.5,
        "checkpoint/commit_lag_seconds": 12.0,
        "checkpoint/bytes": 4e9,
        "checkpoint/total_bytes": 16e9,
        "checkpoint/gigabytes_per_second": 0.5,
        "checkpoint/retries": 3.0,
        "checkpoint/failures": 2.0,
        "checkpoint/last_committed_step": 7.0,
    }


@pytest.mark.parametrize("last_committed_step", [None, 3])
def test_a_failed_save_commits_nothing(last_committed_step: int | None) -> None:
    failed = replace(REPORT, published_path=None, error="disk full", write_seconds=0.0, upload_seconds=0.0)
    values = telemetry.metrics(failed, num_failures=1, last_committed_step=last_committed_step)
    assert values.get("checkpoint/last_committed_step") == last_committed_step
    assert values["checkpoint/gigabytes_per_second"] == 0.0
    assert all(isinstance(value, float) for value in values.values())


def test_one_line_tells_what_was_published_where_and_what_it_cost() -> None:
    assert telemetry.line(REPORT) == (
        "Checkpoint /run/step=7@2.ckpt (step 7, 16 GB) published 12.0 s after its step; training waited 1.50 s."
    )
