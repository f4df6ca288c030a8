"""Many kills of one run, at random moments of logging, sending, noting and removing: every point is there once.

Between the attempts and the server stands a proxy that has a bad day, another one for each attempt; and now and then
the last thing that was written before a kill is found empty, as after a power failure. `make soak` kills some hundreds
of times, `make test` a few. A failure names its seed.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_air.tracking.door import open_door
from lightning_air.tracking.leftovers import send_left
from lightning_air.tracking.points import Point
from lightning_air.tracking.progress import load_progress
from lightning_air.tracking.replaying import replay
from lightning_air.tracking.rest_door import RestDoor
from lightning_air.tracking.segments import Segment
from lightning_air.tracking.spool import Spool
from lightning_air.tracking.spool_folder import PREVIOUS_NAME, PROGRESS_NAME, RunInfo
from lightning_air.tracking.writer import Writer
from tests.kit.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.kit.mlflow_server import MlflowServer, mlflow_server
from tests.kit.ranks import run_ranks
from tests.tracking.killing import NAMES, SafeSteps, open_tracker, words_of
from tests.tracking.spooling import record_at
from tests.tracking.stand_ins import Warnings, Windows

TEN = [f"train/metric_{index}" for index in range(10)]
FAR = 1_000_000  # steps from one attempt to the next
LAST_SECONDS = 120.0

BAD_DAYS = [
    [],
    [Fault("log-batch", cuts=True, times=2)],
    [Fault("log-batch", cuts=True)],
    [Fault("log-batch", status=500, times=3)],
    [Fault("log-batch", status=503, seconds=0.05), Fault("set-tag", cuts=True, times=1)],
    [Fault("log-batch", status=429, headers={"Retry-After": "0"}, times=2)],
    [Fault("log-batch", status=200, body=b"", times=2)],  # something between that knows nothing of it
    [Fault("log-batch", seconds=0.1)],
    [Fault("log-batch", seconds=0.02, drip_seconds=0.05, times=3)],
    [Fault("set-tag", status=500, times=2), Fault("runs/get", cuts=True, times=1)],
]
"""And one on which the proxy is not there at all."""


@pytest.fixture(scope="session")
def server() -> MlflowServer:
    return mlflow_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as running:
        yield running


def begin_day(proxy: FaultyProxy, chance: random.Random) -> None:
    proxy.accept()
    faults = chance.choice([*BAD_DAYS, None])
    if faults is None:
        proxy.refuse()
    else:
        proxy.set(*(Fault(**vars(fault)) for fault in faults))  # they count down


def run_and_kill(path: Path, function: Callable[..., None], *args: Any, seconds: float) -> tuple[list[int], bool]:
    """Run a function in a process of its own, and kill it so many seconds after its beginning.

    Returns:
        The steps that it said were safe, and whether it was killed: it may have ended before.
    """
    is_over = threading.Event()

    def kill() -> None:
        while not (path.exists() and words_of(path)):
            if is_over.wait(0.001):
                return
        if not is_over.wait(seconds):
            os.kill(words_of(path)[0], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        (result,) = run_ranks(function, 1, args=(path, *args), timeout_seconds=120, warnings_as_errors=False)
        is_over.set()
        killing.result()
    assert result.exitcode in (0, -signal.SIGKILL), result.output + str(result.error)
    return words_of(path)[1:], result.exitcode != 0


def lose_power(folder: Path, chance: random.Random) -> bool:
    """Sometimes leave of the progress that was written last its name only."""
    is_lost = chance.random() < 0.2 and (folder / PREVIOUS_NAME).exists() and (folder / PROGRESS_NAME).exists()
    if is_lost:
        (folder / PROGRESS_NAME).write_bytes(b"")
    return is_lost


class Tally:
    """What a soak has done, for whoever reads its output."""

    def __init__(self) -> None:
        self.begun_seconds = time.monotonic()
        self.numbers: dict[str, int] = {}

    def add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0) + number

    def __str__(self) -> str:
        shown = ", ".join(f"{number:,} {name}" for name, number in self.numbers.items())
        return f"{shown} in {time.monotonic() - self.begun_seconds:.0f} s"


def arm(chance: random.Random) -> None:
    """In a process that is to be killed: let it be right before or right behind something that others can see."""
    if chance.random() < 0.4:
        return  # at any moment
    owner, name = chance.choice(
        [
            (Path, "unlink"),
            (Path, "replace"),
            (Path, "rmdir"),
            (os, "fsync"),
            (Segment, "__init__"),
            (RestDoor, "log_batch"),
        ]
    )
    inner, left, is_behind = getattr(owner, name), chance.randrange(1, 15), chance.random() < 0.5

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not is_behind:
            os.kill(os.getpid(), signal.SIGKILL)
        result = inner(*args, **options)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counting)


# ---- a tracker: opened, closed and killed ----------------------------------------------------------------------------


def log_until_killed(path: Path, run: tuple[str, str, Path], first_step: int, seed: int) -> None:
    """Log, and now and then close and open again, as stages of training do."""
    assert Spool.__init__.__kwdefaults__ is not None
    Spool.__init__.__kwdefaults__["segment_bytes"] = 4096  # so that much is released
    chance, safe, step = random.Random(seed), SafeSteps(path), first_step
    arm(chance)
    while True:
        tracker = open_tracker(*run, flush_seconds=0.02)
        for _ in range(chance.randrange(20, 600)):
            tracker.append(step, {name: step + index / 7 for index, name in enumerate(NAMES)})
            safe.say(step)
            step += 1
            time.sleep(chance.choice([0, 0, 0.0002, 0.002]))
        tracker.close(chance.choice([0, 0.05, 5]))


@pytest.mark.parametrize(
    ("seed", "num_kills"),
    [(1, 4), pytest.param(2, 60, marks=pytest.mark.soak), pytest.param(3, 60, marks=pytest.mark.soak)],
)
def test_of_an_attempt_that_is_killed_again_and_again_every_point_arrives_once(
    seed: int, num_kills: int, server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    chance, run_id, folder, tally = random.Random(seed), server.create_run(), tmp_path / "spool" / "run", Tally()
    attempts: list[tuple[int, list[int]]] = []
    for number in range(num_kills):
        begin_day(proxy, chance)
        args = (proxy.url, run_id, folder), FAR * number, chance.randrange(10**9)
        steps, is_killed = run_and_kill(
            tmp_path / f"safe {number}", log_until_killed, *args, seconds=0.02 + 4 * chance.random() ** 2
        )
        assert is_killed
        assert steps == list(range(FAR * number, FAR * number + len(steps)))
        attempts.append((FAR * number, steps))
        tally.add(kills=1, records=len(steps), losses_of_progress=lose_power(folder, chance))
    proxy.accept()
    proxy.set()
    if folder.exists():
        result = send_left(folder, deadline_seconds=LAST_SECONDS, warn=Warnings())
        assert result.is_complete, (seed, result)
    print(f"seed {seed}: {tally}, {proxy.count()} requests with points")  # noqa: T201

    points = server.points_of(run_id)
    steps_of = {name: sorted(point.step for point in points if point.key == name) for name in {p.key for p in points}}
    assert len(steps_of) == len(NAMES)
    (found, *others) = steps_of.values()
    assert all(other == found for other in others), f"seed {seed}: some are not whole"
    assert len(found) == len(set(found)), f"seed {seed}: some are twice"
    safe = {step for _, steps in attempts for step in steps}
    assert safe <= set(found), f"seed {seed}: lost {sorted(safe - set(found))[:20]}"
    # Of each attempt the record may be there that it had no time to call safe.
    assert set(found) - safe <= {first + len(steps) for first, steps in attempts}, f"seed {seed}"
    expected = {step + index / 7 for step in found for index in range(len(NAMES))}
    assert {point.value for point in points} == expected


# ---- windows: what is replayed must be cut as it was -----------------------------------------------------------------


def log_windows_until_killed(path: Path, run: tuple[str, str, Path], first_step: int, seed: int) -> None:
    uri, run_id, folder = run
    chance, safe = random.Random(seed), SafeSteps(path)
    arm(chance)
    spool = Spool(folder, segment_bytes=2048, warn=Warnings())
    progress = load_progress(folder)
    info = RunInfo(run_id=run_id, tracking_uri=uri, thinner={})
    writer = Writer(
        spool,
        Windows(progress.thinner),
        open_door(uri),
        run_id,
        progress=progress,
        info=info,
        warn=Warnings(),
        flush_seconds=0.02,
    )
    writer.start()
    for step in range(first_step, first_step + FAR):
        record = record_at(step, TEN)
        assert spool.append(record.timestamp_ms, record.step, record.values)
        safe.say(step)
        time.sleep(chance.choice([0, 0.0002, 0.002]))


def replay_until_killed(path: Path, folder: Path, seed: int) -> None:
    SafeSteps(path)
    arm(random.Random(seed))
    replay(folder, restore_thinner=Windows, warn=Warnings(), deadline_seconds=LAST_SECONDS)


def is_what_windows_make(points: Sequence[Point], attempts: Sequence[tuple[int, list[int]]]) -> bool:
    """Return whether these are the points of all safe records, and perhaps of one more of each attempt."""
    there = set(points)
    branches: list[tuple[Windows, int]] = [(Windows(), 0)]  # and how many points are found so far
    for first, steps in attempts:
        following = []
        for thinner, num_found in branches:
            for num_steps in (len(steps), len(steps) + 1):
                branch, made = Windows(thinner.snapshot()), []
                for step in range(first, first + num_steps):
                    made += branch.add(record_at(step, TEN))
                if there.issuperset(made):
                    following.append((branch, num_found + len(made)))
        branches = following
    for thinner, num_found in branches:
        made = thinner.flush()
        if there.issuperset(made) and num_found + len(made) == len(points) == len(there):
            return True
    return False


@pytest.mark.parametrize(
    ("seed", "num_kills"),
    [(11, 4), pytest.param(12, 60, marks=pytest.mark.soak), pytest.param(13, 60, marks=pytest.mark.soak)],
)
def test_points_of_many_records_are_cut_as_if_nobody_had_killed_anything(
    seed: int, num_kills: int, server: MlflowServer, proxy: FaultyProxy, tmp_path: Path
) -> None:
    chance, run_id, folder, tally = random.Random(seed), server.create_run(), tmp_path / "run", Tally()
    attempts: list[tuple[int, list[int]]] = []
    for number in range(num_kills):
        begin_day(proxy, chance)
        args = (proxy.url, run_id, folder), FAR * number, chance.randrange(10**9)
        seconds = 0.02 + 3 * chance.random() ** 2
        steps, _ = run_and_kill(tmp_path / f"safe {number}", log_windows_until_killed, *args, seconds=seconds)
        attempts.append((FAR * number, steps))
        tally.add(kills=1, records=len(steps), losses_of_progress=lose_power(folder, chance))
    for number in range(num_kills // 2):
        if not folder.exists():
            break
        begin_day(proxy, chance)
        _, is_killed = run_and_kill(
            tmp_path / f"replay {number}",
            replay_until_killed,
            folder,
            chance.randrange(10**9),
            seconds=0.5 * chance.random(),
        )
        tally.add(killed_replays=is_killed, losses_of_progress=lose_power(folder, chance))
    proxy.accept()
    proxy.set()
    if folder.exists():
        assert replay(folder, restore_thinner=Windows, warn=Warnings(), deadline_seconds=LAST_SECONDS).is_complete
    print(f"seed {seed}: {tally}, {proxy.count()} requests with points")  # noqa: T201

    assert is_what_windows_make(server.points_of(run_id), attempts), f"seed {seed}"
    assert not folder.exists()
