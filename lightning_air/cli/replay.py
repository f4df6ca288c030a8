"""`lightning-air replay`: send what a training has left to its MLflow run: metrics, each point once, and all else.

The folder is the one that the warning at the end of training names, `spool_dir/<run id>`, or the one above it with the
folders of several runs.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow.environment_variables import (
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
    MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT,
)

from lightning_air.tracking.folder_lock import SpoolInUseError
from lightning_air.tracking.leftovers import LeftSent, send_left, spools_in
from lightning_air.tracking.logger_options import default_spool_dir
from lightning_air.tracking.warn_once import WarnOnce

_WRONG_USAGE = 2
_NOT_COMPLETE = 1


def run(arguments: Sequence[str]) -> int:
    """Send what is left, and return 0 if nothing is left any more, 1 if something is, 2 for wrong arguments."""
    options = _parser().parse_args(arguments[1:])
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # MLflow's own tries would take minutes, whatever --timeout says; we try again anyway.
    settings: list[tuple[Any, object]] = [(MLFLOW_HTTP_REQUEST_MAX_RETRIES, 0), (MLFLOW_HTTP_REQUEST_TIMEOUT, 10)]
    settings.append((MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT, True))
    for variable, value in settings:
        if not variable.is_set():
            variable.set(value)
    folders = spools_in(options.folder)
    if not folders:
        sys.stderr.write(
            f"lightning-air replay: {options.folder} holds nothing that is not sent. Name a run's folder, "
            "spool_dir/<run id>, or the spool_dir.\n"
        )
        return _WRONG_USAGE
    return max([_send(folder, options) for folder in folders])


def _send(folder: Path, options: argparse.Namespace) -> int:
    try:
        result = send_left(
            folder,
            tracking_uri=options.tracking_uri,
            deadline_seconds=options.timeout,
            warn=WarnOnce(lambda text: sys.stderr.write(f"{text}\n")),
        )
    except (SpoolInUseError, ValueError, OSError) as error:
        sys.stderr.write(f"{folder}: {error}\n")
        return _NOT_COMPLETE
    sys.stdout.write(f"{folder}: {_said_of(result, folder)}\n")
    return 0 if result.is_complete else _NOT_COMPLETE


def _said_of(result: LeftSent, folder: Path) -> str:
    parts = []
    stats = result.stats
    if stats is not None:
        parts.append(f"{stats.num_sent} points of the run {result.run_id} are on the server")
        parts += [f"{stats.num_set_aside} refused (see {folder}/set_aside.jsonl)"] if stats.num_set_aside else []
        parts += [f"{stats.num_cut} dropped: the run's budget is used up"] if stats.num_cut else []
        parts += [f"{stats.num_lost} records lost with files that are gone"] if stats.num_lost else []
        parts += [f"{stats.num_damaged} damaged places left out"] if stats.num_damaged else []
    if result.has_told:
        parts.append(f"the run {result.run_id} has what else was left" if stats is None else "so is all else")
    left = "" if result.is_complete else f"; the rest stays: {result.reason}"
    return ", ".join(parts or [f"nothing has reached the run {result.run_id}"]) + left


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-air replay", description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=default_spool_dir(),
        metavar="DIR",
        help="the folder of a run's metrics, or the one above it (default: %(default)s)",
    )
    parser.add_argument("--tracking-uri", help="the server; by default the one that the metrics were meant for")
    parser.add_argument("--timeout", type=_seconds, default=math.inf, metavar="SECONDS", help="give up after so long")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds
