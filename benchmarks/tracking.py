"""What logging to MLflow costs a training: Lightning's `MLFlowLogger`, synchronous or not, and ours, on a real server.

Each client is a process of its own that logs so many metrics per step, with a pause between two steps, through a proxy
that counts the requests. All kinds take turns. A synchronous call takes so long that it gets fewer steps; its figures
are of those steps, and nothing is scaled.

- blocked: how long `log_metrics` takes to return. CPU: of the client's process, from the logger's making to its exit.
- visible: from the first call until the database has every point.
- lost: points of calls that had returned, and that never came; for ours after what a user would do, a replay.

    python -m benchmarks.tracking [--steps 2000] [--synchronous-steps 200] [--rounds 2] [--outage 20] [--part cost]
"""

import argparse
import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_air import AirMLflowLogger
from lightning_air.tracking.leftovers import send_left
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import RankResult, run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.tracking.killing import SafeSteps, killed

KINDS = {"synchronous": "MLFlowLogger", "asynchronous": "MLFlowLogger, asynchronous", "ours": "AirMLflowLogger"}
SLOW_SECONDS = 3.0
SLOW_SYNCHRONOUS_STEPS = 4
OUTAGE_PAUSE_SECONDS = 0.02
FIT_STEPS = 400
DEADLINE_SECONDS = 300.0

Metrics = dict[str, float]


def make_logger(kind: str, url: str, run_id: str | None, folder: Path) -> Logger:
    """Return a logger at its defaults, into a run that is there."""
    if kind == "ours":
        return AirMLflowLogger("benchmark", tracking_uri=url, run_id=run_id, spool_dir=folder, log_console=False)
    asynchronously: Any = {"synchronous": False} if kind == "asynchronous" else {}
    return MLFlowLogger("benchmark", tracking_uri=url, run_id=run_id, **asynchronously)


def metrics_of(step: int, num_metrics: int) -> Metrics:
    """Return what is logged at a step."""
    return {f"train/metric_{index}": step + index / 7 for index in range(num_metrics)}


# ---- the clients: each in a process of its own -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a client does."""

    kind: str
    url: str
    run_id: str
    folder: Path
    num_steps: int
    num_metrics: int
    pause_seconds: float

    @property
    def logger(self) -> Logger:
        """A new logger."""
        return make_logger(self.kind, self.url, self.run_id, self.folder)

    @property
    def blocked(self) -> list[float]:
        """How many seconds each call took that has returned."""
        seconds: list[float] = json.loads((self.folder / "blocked").read_text())
        return seconds


def log_all(load: Load) -> None:
    """Log, and leave in the folder how long each call took, and the CPU seconds until the process' end."""
    warnings.simplefilter("ignore")
    cpu_seconds = time.process_time()
    # The first one registered is the last one to run: MLflow sends the rest of what it has queued at the exit.
    atexit.register(lambda: (load.folder / "cpu").write_text(str(time.process_time() - cpu_seconds)))
    log_steps(load).finalize("success")


def log_and_die(load: Load) -> None:
    """Log, and end at once, whatever has arrived: nobody waits for a slow server here."""
    warnings.simplefilter("ignore")
    log_steps(load)
    os.kill(os.getpid(), signal.SIGKILL)


def log_steps(load: Load) -> Logger:
    """Log, leave in the folder how long each call took, and return the logger."""
    logger, blocked = load.logger, []
    assert logger.version is not None  # opens the run: no part of the first call
    (load.folder / "begun").write_text(str(time.time()))
    try:
        for step in range(load.num_steps):
            metrics = metrics_of(step, load.num_metrics)
            begun = time.perf_counter()
            logger.log_metrics(metrics, step)
            blocked.append(time.perf_counter() - begun)
            time.sleep(load.pause_seconds)
    finally:
        (load.folder / "blocked").write_text(json.dumps(blocked))
    return logger


def log_until_killed(path: Path, load: Load) -> None:
    """Log without end, and say which steps are safe."""
    warnings.simplefilter("ignore")
    logger = load.logger
    assert logger.version is not None
    safe = SafeSteps(path)
    for step in range(10**9):
        logger.log_metrics(metrics_of(step, load.num_metrics), step)
        safe.say(step)
        time.sleep(load.pause_seconds)


# ---- a server, and what it has ---------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The server and what is asked of it."""

    server: MlflowServer
    options: argparse.Namespace
    folder: Path
    num_folders: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, kind: str, url: str, num_steps: int, pause_seconds: float = 0.001) -> Load:
        """Return what a client is to do, in a new run and a new folder."""
        with self.lock:
            self.num_folders += 1
            folder = self.folder / str(self.num_folders)
        folder.mkdir()
        return Load(
            kind=kind,
            url=url,
            run_id=self.server.create_run(),
            folder=folder,
            num_steps=num_steps,
            num_metrics=self.options.metrics,
            pause_seconds=pause_seconds,
        )

    def num_steps(self, kind: str) -> int:
        """Return how many steps a kind gets."""
        steps: int = self.options.synchronous_steps if kind == "synchronous" else self.options.steps
        return steps

    def count(self, load: Load) -> tuple[int, int]:
        """Return how many points the database has, and how many of them twice."""
        query = "SELECT COUNT(*), COUNT(DISTINCT key || ' ' || step) FROM metrics WHERE run_uuid = ? AND key LIKE ?"
        database = f"file:{self.server.database}?mode=ro"
        with contextlib.closing(sqlite3.connect(database, uri=True, timeout=30)) as connection:
            num_points, num_different = connection.execute(query, [load.run_id, "train/%"]).fetchone()
        return int(num_points), int(num_points - num_different)

    def wait_until_visible(self, load: Load, has_ended: Callable[[], bool]) -> float:
        """Return the time at which every point is there; infinity if the client has ended before."""
        while True:
            is_last = has_ended()
            if self.count(load)[0] >= load.num_steps * load.num_metrics:
                return time.time()
            if is_last:
                return float("inf")
            time.sleep(0.1)


def run_client(function: Callable[..., Any], *args: Any) -> RankResult:
    """Run a client's process until its end."""
    (result,) = run_ranks(function, 1, args=args, timeout_seconds=DEADLINE_SECONDS, warnings_as_errors=False)
    return result


def percentile(seconds: list[float], percent: int) -> float:
    """Return a percentile, in milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


# ---- the tables ------------------------------------------------------------------------------------------------------


def measure_cost(bench: Bench, proxy: FaultyProxy) -> None:
    """Print what logging costs when all is well."""
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for index in range(bench.options.rounds):
        for kind in list(KINDS) if index % 2 else list(KINDS)[::-1]:
            load = bench.load(kind, proxy.url, bench.num_steps(kind))
            num_requests = proxy.count(".")
            with ThreadPoolExecutor(1) as pool:
                client = pool.submit(run_client, log_all, load)
                visible = bench.wait_until_visible(load, client.done)
                values([client.result()])
            rows[kind].append(
                {
                    "p50": percentile(load.blocked, 50),
                    "p99": percentile(load.blocked, 99),
                    "requests": (proxy.count(".") - num_requests) / load.num_steps * 1_000,
                    "cpu": 1e3 * float((load.folder / "cpu").read_text()) / load.num_steps,
                    "visible": visible - float((load.folder / "begun").read_text()),
                }
            )
    print(f"\nAll is well: {bench.options.metrics} metrics, {bench.options.steps} steps, 1 ms between two")
    print(f"({bench.options.synchronous_steps} steps where synchronous)")
    print("| | p50 blocked ms | p99 | requests per 1,000 steps | CPU ms per step | s until all is visible |")
    print("|---|---|---|---|---|---|")
    middle = {
        kind: {name: statistics.median(row[name] for row in found) for name in found[0]} for kind, found in rows.items()
    }
    for kind, row in middle.items():
        forms = {"p50": ".3f", "p99": ".2f", "requests": ".0f", "cpu": ".2f", "visible": ".1f"}
        is_whole = bench.num_steps(kind) == bench.options.steps
        cells = [
            f"{row[name]:{form}}" + f" ({row[name] / middle['ours'][name]:.1f}x)" * (name != "visible" or is_whole)
            for name, form in forms.items()
        ]
        print(f"| {KINDS[kind]} | {' | '.join(cells)} |", flush=True)


def measure_slow(bench: Bench, proxy: FaultyProxy) -> None:
    """Print how long calls block while the server takes 3 s for each batch."""
    print(f"\nA server that takes {SLOW_SECONDS:g} s for each batch ({SLOW_SYNCHRONOUS_STEPS} steps where synchronous)")
    print("| | p50 blocked ms | p99 | largest |")
    print("|---|---|---|---|")
    proxy.set(Fault("log-batch", seconds=SLOW_SECONDS))
    for kind in list(KINDS)[::-1]:
        load = bench.load(kind, proxy.url, SLOW_SYNCHRONOUS_STEPS if kind == "synchronous" else bench.options.steps)
        run_client(log_and_die, load)
        cells = [percentile(load.blocked, 50), percentile(load.blocked, 99), 1e3 * max(load.blocked)]
        print(f"| {KINDS[kind]} | {' | '.join(f'{cell:.3f}' for cell in cells)} |", flush=True)
    proxy.set()


def measure_kill(bench: Bench, proxy: FaultyProxy) -> None:
    """Print what a SIGKILL loses."""
    print("\nkill -9")
    print("| | points logged | lost | twice |")
    print("|---|---|---|---|")
    for kind, name in KINDS.items():
        load = bench.load(kind, proxy.url, 0)
        safe = killed(load.folder / "safe", log_until_killed, load, least=bench.num_steps(kind) // 2)
        replay(load)
        num_logged = len(safe) * load.num_metrics
        num_points, num_twice = bench.count(load)
        lost = _share(max(0, num_logged - num_points), num_logged)
        print(f"| {name} | {num_logged} | {lost} | {num_twice} |", flush=True)


def measure_outage(bench: Bench, _: FaultyProxy) -> None:
    """Print what an outage costs, all kinds at once, each behind a proxy of its own."""
    seconds = bench.options.outage
    num_steps = int((seconds + 5) / OUTAGE_PAUSE_SECONDS)
    print(f"\nA server that refuses connections for {seconds:g} s, from the third second on")
    print("| | points logged | lost | twice | s blocked in all | largest | how the client ended |")
    print("|---|---|---|---|---|---|---|")

    def measure(kind: str) -> str:
        with faulty_proxy(bench.server.url) as proxy:
            load = bench.load(kind, proxy.url, num_steps // (8 if kind == "synchronous" else 1), OUTAGE_PAUSE_SECONDS)
            with ThreadPoolExecutor(1) as pool:
                client = pool.submit(run_client, log_all, load)
                while not (load.folder / "begun").exists() and not client.done():
                    time.sleep(0.01)
                time.sleep(3)
                proxy.refuse()
                time.sleep(seconds)
                proxy.accept()
                result = client.result()
            replay(load)
            blocked = load.blocked
            num_logged = len(blocked) * load.num_metrics
            num_points, num_twice = bench.count(load)
            how = "well" if result.error is None else result.error.strip().splitlines()[-1][:80]
            times = f"{sum(blocked):.2f} | {max(blocked, default=float('nan')):.3f}"
            lost = _share(max(0, num_logged - num_points), num_logged)
            return f"| {KINDS[kind]} | {num_logged} | {lost} | {num_twice} | {times} | {how} |"

    with ThreadPoolExecutor(len(KINDS)) as pool:
        for row in pool.map(measure, KINDS):
            print(row, flush=True)


def replay(load: Load) -> None:
    """Do what a user of ours does after a crash; the others have nothing to do it with."""
    if load.kind == "ours" and (load.folder / load.run_id).exists():
        send_left(load.folder / load.run_id, deadline_seconds=DEADLINE_SECONDS)


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / max(1, whole):.1f} %)"


# ---- a Trainer -------------------------------------------------------------------------------------------------------


class Network(LightningModule):
    """A step of some milliseconds that logs so many metrics."""

    def __init__(self, num_metrics: int) -> None:
        super().__init__()
        self.num_metrics = num_metrics
        self.network = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """Return a loss, and log it under many names."""
        loss: Tensor = self.network(batch).square().mean()
        self.log_dict({f"train/metric_{index}": loss.detach() for index in range(self.num_metrics)})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(Callback):
    """Times from one batch's start to the next one's."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note the time."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def step(self) -> tuple[float, float, float]:
        """Return the median and the mean step and the CPU seconds of one, without the first tenth."""
        skip = len(self.wall) // 10
        wall, cpu = ([after - before for before, after in itertools.pairwise(t[skip:])] for t in (self.wall, self.cpu))
        return statistics.median(wall), statistics.mean(wall), statistics.mean(cpu)


class Nothing(Logger):
    """Lightning's own share: metrics are gathered for it, and it drops them."""

    name, version = "nothing", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Do nothing."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def fit_all(url: str, folder: Path, num_rounds: int, num_metrics: int) -> dict[str, list[tuple[float, ...]]]:
    """Return the step of each round, by the logger's kind. One process: all take turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kinds = ["off", "nothing", "asynchronous", "ours"]
    rows: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    for index in range(num_rounds + 1):
        for kind in kinds if index % 2 else kinds[::-1]:
            logger: Logger | bool = kind != "off"
            if logger:
                logger = Nothing() if kind == "nothing" else make_logger(kind, url, None, folder)
            clock = Clock()
            options = fast_trainer_kwargs(folder, logger=logger, callbacks=[clock], log_every_n_steps=1)
            num_steps = FIT_STEPS if index else 10  # the first round warms up
            batches: Any = DataLoader([torch.randn(512)] * 32 * num_steps, batch_size=32)  # type: ignore[arg-type]
            Trainer(**options).fit(Network(num_metrics), batches)
            if index:
                rows[kind].append(clock.step())
    return rows


def measure_overhead(bench: Bench, proxy: FaultyProxy) -> None:
    """Print a training step with a logger ÷ without one."""
    folder = bench.folder / "fit"
    folder.mkdir()
    result = run_client(fit_all, proxy.url, folder, bench.options.rounds + 1, bench.options.metrics)
    (rows,) = values([result])
    print(f"\nA Trainer's step on the CPU, {bench.options.metrics} metrics logged in each")
    print("| logger | median step ms | median ÷ off | mean ÷ off | CPU ÷ off |")
    print("|---|---|---|---|---|")
    for kind, found in rows.items():
        ratios = [
            statistics.median(mine[column] / off[column] for mine, off in zip(found, rows["off"], strict=True))
            for column in range(3)
        ]
        name = {"off": "off", "nothing": "one that does nothing"}.get(kind) or KINDS[kind]
        middle = 1e3 * statistics.median(step[0] for step in found)
        print(f"| {name} | {middle:.2f} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |", flush=True)


PARTS = {
    "cost": measure_cost,
    "slow": measure_slow,
    "kill": measure_kill,
    "outage": measure_outage,
    "overhead": measure_overhead,
}


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="benchmark-tracking-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--synchronous-steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--outage", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="by default all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    server = mlflow_server()
    with _scratch() as folder, faulty_proxy(server.url) as proxy:
        bench = Bench(server, options, folder)
        for part in options.part or PARTS:
            PARTS[part](bench, proxy)


if __name__ == "__main__":
    main()
