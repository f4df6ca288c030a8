"""Processes that log until they are killed, and that say of each record when it was safe.

They write a word of 8 bytes into a file after each call that has returned: first their process' number, then the steps.
What is written survives a SIGKILL, as the records have to.
"""

import os
import random
import signal
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_air import AirMLflowLogger
from lightning_air.tracking.charging import charges_of
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.tails import Tail
from lightning_air.tracking.thinning import Thinner
from lightning_air.tracking.tracker import Tracker
from lightning_air.tracking.warn_once import Warn
from lightning_air.tracking.window import Event
from tests.kit.mlflow_server import MlflowServer
from tests.kit.ranks import run_ranks
from tests.tracking.runs import fit

NAMES = ("train/loss", "lr", "acc@5")  # the last one has another key on the server
_WORD = struct.Struct("=q")


def open_tracker(
    tracking_uri: str,
    run_id: str,
    folder: Path,
    *,
    charged: Mapping[str, int] | None = None,
    found: int = 0,
    shown: Mapping[str, tuple[int, int]] | None = None,
    earlier: Tracker | None = None,
    tail: Tail | None = None,
    prefix: str = "",
    flush_seconds: float = 0.1,
    warn: Warn = lambda *_: None,
    on_events: Callable[[list[Event]], object] = lambda _: None,
    full_record: bool = False,
    **options: Any,
) -> Tracker:
    """Return a tracker; each record's values are points of their own, unless the options say otherwise."""
    chosen = {"step": 1, "exempt": (), "max_metric_steps": 10**7, **options}
    return Tracker(
        run_id,
        tracking_uri,
        folder,
        new_thinner=lambda spent: RunThinner(Thinner(spent=spent, **chosen), prefix=prefix),
        charged=charged or {},
        found=found,
        shown=shown,
        earlier=earlier,
        tail=tail,
        flush_seconds=flush_seconds,
        full_record=full_record,
        on_events=on_events,
        warn=warn,
    )


def stored_charges(server: MlflowServer, run_id: str) -> dict[str, int]:
    """Return the points that each writer may have sent, as the run says."""
    return charges_of(server.tags_of(run_id))


def stored_mark(server: MlflowServer, run_id: str) -> int:
    """Return the points that the run says it may have."""
    return sum(stored_charges(server, run_id).values())


class SafeSteps:
    """Where a process says which steps are safe."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.say(os.getpid())

    def say(self, step: int) -> None:
        os.write(self._descriptor, _WORD.pack(step))


def append_forever(path: Path, spool: tuple[str, str, Path], first_step: int, options: Mapping[str, Any]) -> None:
    """Append a record each millisecond.

    Args:
        path: Where to say which are safe.
        spool: The tracking URI, the run, its folder.
        first_step: Of the first record.
        options: Of the tracker.
    """
    tracker = open_tracker(*spool, **options)
    safe = SafeSteps(path)
    for step in range(first_step, first_step + 10**6):
        tracker.append(step, {name: step + index / 7 for index, name in enumerate(NAMES)})
        safe.say(step)
        time.sleep(0.001)


class Reporter(Logger):
    """Says what the loggers before it have been given, and keeps nothing."""

    name, version = "reporter", 0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.safe = SafeSteps(path)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "loss" in metrics and step is not None:
            self.safe.say(step)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def fit_forever(
    path: Path, tracking_uri: str, spool_dir: Path, options: Mapping[str, Any], num_steps: int = -1
) -> None:
    """Train, and log each step's loss.

    Args:
        path: Where to say which are safe.
        tracking_uri: Of the server.
        spool_dir: Of the logger.
        options: Its others.
        num_steps: Until when; -1 for no end.
    """
    chosen = {"step": 1, "exempt": (), "flush_seconds": 0.1, "log_console": False, **options}
    logger = AirMLflowLogger("kills", tracking_uri=tracking_uri, spool_dir=spool_dir, **chosen)
    fit([logger, Reporter(path)], max_epochs=-1, max_steps=num_steps)


def killed(path: Path, function: Callable[..., None], *args: Any, least: int = 100) -> list[int]:
    """Run a function in a process of its own, kill it at some moment, and return the steps that were safe by then.

    Args:
        path: Where the process says it; the function's first argument.
        function: At the top of a module.
        args: Its others.
        least: So many steps it may do, and up to half as many more.
    """
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill, path, least + random.randrange(1 + least // 2))
        (result,) = run_ranks(function, 1, args=(path, *args), timeout_seconds=60, warnings_as_errors=False)
        is_killed = killing.result()
    assert is_killed, result.output + str(result.error)
    assert result.exitcode == -signal.SIGKILL, result.output + str(result.error)
    return words_of(path)[1:]


def _kill(path: Path, num_steps: int) -> bool:
    for _ in range(60_000):
        if path.exists() and len(words := words_of(path)) > num_steps:
            time.sleep(random.random() / 100)
            os.kill(words[0], signal.SIGKILL)
            return True
        time.sleep(0.001)
    return False


def words_of(path: Path) -> list[int]:
    """Return what a process has said: its number, and then the steps that are safe."""
    content = path.read_bytes()
    return [word for (word,) in _WORD.iter_unpack(content[: len(content) // 8 * 8])]
