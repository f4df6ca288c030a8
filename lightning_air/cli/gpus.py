"""`lightning-air gpus`: what the GPUs of this machine say now, as a table or as JSON; with `--watch` again and again.

It shows the GPUs that a training started in the same shell would see (CUDA_VISIBLE_DEVICES), and needs neither a
training nor CUDA. With `--watch` it also tells of the driver's errors (XIDs) as they happen; Ctrl-C ends it. With
`--report FILE` it watches them for a while, and writes what it has seen as a page for the browser.
"""

import argparse
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_air.cli.gpu_report import report_gpus
from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.node_watch import NodeWatch, Place
from lightning_air.health.nvml import NvmlError
from lightning_air.health.reader import read_within
from lightning_air.health.sample import GPUSample

_NO_ANSWER = 1
_READ_SECONDS = 30.0
_MAX_EVENTS_SHOWN = 5
_CLEAR_SCREEN = "\x1b[H\x1b[J"
_UNKNOWN = "-"


def run(arguments: Sequence[str]) -> int:
    """Show the GPUs, and return 0; 1 if NVML is not there or does not answer, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments[1:])
    if options.report is not None:
        if options.json:
            parser.error("--report writes a page: it does not go with --json")
        problem = report_gpus(options.report, seconds=options.seconds, interval=options.interval, pause=_pause)
        return 0 if problem is None else _complain(problem)
    if options.watch:
        return _watch(options)
    try:
        samples = read_within(_READ_SECONDS)
    except (NvmlError, TimeoutError) as error:
        return _complain(str(error))
    _show(samples, as_json=options.json)
    return 0


def _watch(options: argparse.Namespace) -> int:
    """Show the GPUs until Ctrl-C, or until it turns out that there is no NVML."""
    events = EventLog()
    node = NodeWatch(Place(), poll_seconds=options.interval, history=History(1, options.interval), events=events)
    health_log = logging.getLogger("lightning_air.health")
    level = health_log.level
    health_log.setLevel(logging.CRITICAL)  # events are shown below the table
    node.start()
    try:
        while not node.sampler.is_absent:
            _pause(options.interval)
            _show_again(node, as_json=options.json)
    except KeyboardInterrupt:
        return 0
    finally:
        node.close()
        health_log.setLevel(level)
    return _complain(events.all[-1].message)


def _show_again(node: NodeWatch, *, as_json: bool) -> None:
    if node.sampler.is_absent or (node.sampler.num_polls == 0 and not node.events.all):  # nothing is known yet
        return
    if as_json:
        _show(node.sampler.samples, as_json=True)
        return
    if sys.stdout.isatty():
        sys.stdout.write(_CLEAR_SCREEN)
    sys.stdout.write(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    _show(node.sampler.samples, as_json=False)
    for event in node.events.all[-_MAX_EVENTS_SHOWN:]:
        sys.stdout.write(f"{time.strftime('%H:%M:%S', time.localtime(event.time_seconds))} {event.message}\n")
    sys.stdout.write("\n")
    sys.stdout.flush()


def _show(samples: Sequence[GPUSample], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps([_plain(sample) for sample in samples])}\n")
        sys.stdout.flush()
    elif samples:
        sys.stdout.write(_table([_HEADINGS, *(_columns(sample) for sample in samples)]))
    else:
        sys.stdout.write("No GPU is visible here.\n")


def _plain(sample: GPUSample) -> dict[str, Any]:
    """Return a sample as JSON has it, with its states spelt out."""
    return {
        **dataclasses.asdict(sample),
        "throttle_names": sample.throttle_names,
        "recovery_name": sample.recovery_name,
    }


_HEADINGS = ("GPU", "name", "UUID", "util", "memory", "temp", "margin", "HBM", "power", "SM clock", "state")


def _columns(sample: GPUSample) -> tuple[str, ...]:
    return (
        str(sample.index),
        sample.name,
        sample.uuid,
        _number(sample.utilization_pct, "%"),
        _of(_scaled(sample.memory_used_bytes, 2**30), _scaled(sample.memory_total_bytes, 2**30), " GiB"),
        _number(sample.temperature_c, " C"),
        _number(sample.temperature_margin_c, " C"),
        _number(sample.hbm_temperature_c, " C"),
        _of(sample.power_w, sample.power_limit_w, " W"),
        _of(sample.sm_clock_mhz, sample.sm_clock_max_mhz, " MHz"),
        ", ".join(_troubles(sample)) or "ok",
    )


def _troubles(sample: GPUSample) -> list[str]:
    """Return what is not as it should be, in words."""
    if sample.is_lost:
        return ["lost"]
    found = [f"XID {xid}" for xid in sample.xids]
    if sample.is_throttled:
        found.extend(name.replace("_", " ") for name in sample.throttle_names)
    if sample.ecc_uncorrected:
        found.append(f"{sample.ecc_uncorrected} uncorrected ECC")
    if sample.has_failed_remap:
        found.append("row remap failed")
    if sample.has_pending_remap or sample.has_pending_retirement:
        found.append("memory repair pending (reset)")
    if sample.recovery_action:
        found.append(f"needs {str(sample.recovery_name).replace('_', ' ')}")
    if sample.pcie_width and sample.pcie_width_max and sample.pcie_width < sample.pcie_width_max:
        found.append(f"PCIe x{sample.pcie_width} of x{sample.pcie_width_max}")
    return found


def _number(value: float | None, unit: str) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}{unit}"


def _of(value: float | None, limit: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.0f}{unit}" if limit is None else f"{value:.0f}/{limit:.0f}{unit}"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _complain(message: str) -> int:
    sys.stderr.write(f"lightning-air gpus: {message}\n")
    return _NO_ANSWER


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-air gpus", description=__doc__)
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--once", action="store_true", help="show them once (the default)")
    times.add_argument("--watch", action="store_true", help="show them again and again, until Ctrl-C")
    times.add_argument("--report", type=Path, metavar="FILE", help="watch them for --seconds, and write an HTML report")
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, metavar="SECONDS", help="how long --report watches (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON: one line with one list for each time")
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="the time between two (default: 2)"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds < math.inf:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 on, got {text!r}")
    return seconds
