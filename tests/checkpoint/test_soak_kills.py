"""Hundreds of kills and resumes of one training, over one folder: nothing that was published is ever lost.

Two ranks train and save every few steps; one of them or both are killed at a random moment or at a random point of a
save, and the next attempt starts with the same line. Every attempt starts from a published checkpoint, at a step no
earlier than the last one that is known to have been published, with the weights that a run which was never killed
has at this step, to the last bit. `make soak` does 500 of them, `make test` a few.
"""

import hashlib
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_air import AirCheckpoint, AirStrategy, AsyncUCCheckpointIO
from lightning_air.checkpoint import background, callback
from lightning_air.checkpoint.latest import list_checkpoints
from lightning_air.checkpoint.places import open_store
from lightning_air.checkpoint.verify import verify_checkpoint
from lightning_air.strategy import failure
from tests.checkpoint.test_hostile import volumes_at
from tests.checkpoint.test_killing import SURVIVORS_SECONDS, Bomb, named_points
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression

STEPS_PER_SAVE = 3
KEEP_LAST = 2
NUM_BATCHES = 10**6
VOLUME = "/Volumes/main/default/ckpt/run"


class Stepwise(Regression):
    """Its data depend on the step and the rank alone, so that its weights depend on the step alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * self.trainer.global_step + self.trainer.global_rank)
        x = torch.randn(4, 8, generator=generator)
        return nn.functional.mse_loss(self(x), torch.sin(x.sum(dim=1, keepdim=True)))


def digest_of(trainer: Trainer, module: LightningModule) -> str:
    """Return a digest of all weights and of all that the optimizer keeps."""
    digest = hashlib.sha256()
    state = trainer.optimizers[0].state_dict()["state"]
    for name, weight in module.state_dict().items():
        digest.update(name.encode() + weight.numpy().tobytes())
    for number in sorted(state):
        for field in sorted(state[number]):
            digest.update(state[number][field].numpy().tobytes())
    return digest.hexdigest()


class Note(Callback):
    """Writes down where training started, lets the fuse burn, and digests the steps that are asked for."""

    def __init__(
        self, path: Path, bomb: Bomb | None = None, seconds: float = 0.0, at: frozenset[int] = frozenset()
    ) -> None:
        self.path = path
        self.bomb = bomb
        self.seconds = seconds
        self.at = at
        self.digests: dict[int, str] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        write(self.path, start=trainer.global_step, digest=digest_of(trainer, pl_module))
        if self.seconds:
            timer = threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        if self.bomb is not None:
            self.bomb.is_armed = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step in self.at:
            self.digests[trainer.global_step] = digest_of(trainer, pl_module)


class ArmedLater(Bomb):
    """Counts from the start of the training."""

    is_armed = False

    def __call__(self, point: str) -> None:
        if self.is_armed:
            super().__call__(point)


def write(log: Path, **values_: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps(values_) + "\n")


def train_until_killed(volumes: str, folder: str, log: str, kills: dict[int, tuple[int, float]], max_steps: int) -> int:
    """Train until a bomb goes off; a rank has a number of points of a save, or of seconds, to live."""
    # A rank whose peer was killed waits for its last words; here nobody has any.
    failure.LATE_POST_SECONDS = failure.ACK_SECONDS = 0.2
    callback.ORPHAN_AGE_SECONDS = 0.0  # what the attempt before has left is nobody's
    volumes_at(Path(volumes))
    rank = int(os.environ["RANK"])
    fuse, seconds = kills.get(rank, (0, 0.0))
    bomb, path = ArmedLater(fuse or None), Path(log, str(rank))
    publish = background.publish

    def noting(store: Any, *args: Any, **kwargs: Any) -> Any:
        manifest = publish(store, *args, **kwargs)
        write(path, published=manifest.step)
        return manifest

    background.publish = noting  # type: ignore[attr-defined]
    io = AsyncUCCheckpointIO()
    with named_points(Path(volumes) if folder.startswith("/Volumes") else Path(folder), bomb):
        trainer = Trainer(
            **fast_trainer_kwargs(
                Path.cwd(),
                strategy=AirStrategy(),
                plugins=[io],
                callbacks=[
                    Note(path, bomb, seconds),
                    AirCheckpoint(folder, f"{STEPS_PER_SAVE}steps", keep_last=KEEP_LAST, filename="{step}"),
                ],
                enable_checkpointing=True,
                use_distributed_sampler=False,
                max_epochs=-1,
                max_steps=max_steps,
            )
        )
        torch.manual_seed(1)
        trainer.fit(Stepwise(), DataLoader(range(NUM_BATCHES)), ckpt_path="last")
    return trainer.global_step


def train_without_kills(at: frozenset[int]) -> dict[int, str]:
    """Return the digests at these steps of a run that is never killed."""
    note = Note(Path("log"), at=at)
    strategy = AirStrategy()
    options = {"max_epochs": -1, "max_steps": max(at, default=0), "use_distributed_sampler": False}
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=strategy, callbacks=[note], **options))
    torch.manual_seed(1)
    trainer.fit(Stepwise(), DataLoader(range(NUM_BATCHES)))
    start = json.loads(Path("log").read_text().splitlines()[0])
    return {0: start["digest"], **note.digests}


def drawn(chance: random.Random) -> dict[int, tuple[int, float]]:
    """Return who is killed, and when: at a point of a save, or after so many seconds of training."""
    ranks = chance.choice([[0], [1], [0, 1]])
    return {
        rank: (chance.randint(1, 120 if rank == 0 else 40), 0.0)
        if chance.random() < 0.7
        else (0, chance.uniform(0.02, 0.6))
        for rank in ranks
    }


def kill_and_resume(tmp_path: Path, num_kills: int, *, folder: str, seed: int) -> None:
    chance = random.Random(seed)
    volumes = tmp_path / "Volumes"
    (volumes / "main" / "default" / "ckpt").mkdir(parents=True)
    known, num_killed = 0, 0
    valid: set[int] = set()
    digests: dict[int, str] = {}
    for attempt in range(num_kills + 1):
        log = tmp_path / f"log-{attempt}"
        log.mkdir()
        is_last = attempt == num_kills
        kills = {} if is_last else drawn(chance)
        max_steps = known + 10 if is_last else NUM_BATCHES
        results = run_ranks(
            train_until_killed,
            2,
            args=(str(volumes), folder, str(log), kills, max_steps),
            timeout_seconds=2 * SURVIVORS_SECONDS,
            warnings_as_errors=False,
        )
        what = f"attempt {attempt}, {kills}"
        assert not any("timed out after" in (result.error or "") for result in results), (what, results)
        if is_last:
            assert values(results) == [max_steps, max_steps]
        else:
            assert any(result.exitcode == -signal.SIGKILL for result in results), (what, results)
            num_killed += 1
        notes = [json.loads(line) for path in log.iterdir() for line in path.read_text().splitlines()]
        starts = [note for note in notes if "start" in note]  # of one rank only, if it was killed at once
        start = starts[0]["start"]
        assert start >= known, what  # nothing is lost
        for note in starts:
            assert note["start"] == start, what
            assert digests.setdefault(start, note["digest"]) == note["digest"], what
        known = max([start, *(note["published"] for note in notes if "published" in note)])
        found = [each for each in list_checkpoints(folder) if each.has_metadata]
        steps = {each.step or 0: verify_checkpoint(each.path, settle_seconds=0.0) for each in found}
        valid = {step for step, report in steps.items() if report.valid}
        # Only a volume shows a `.metadata` that is still being written.
        assert len(steps.keys() - valid) <= int(folder.startswith("/Volumes")), (what, steps)
        assert known == 0 or known in valid, (what, steps)
        known = max(valid, default=0)  # published, and killed before it was noted
    assert num_killed == num_kills
    assert len(valid) <= KEEP_LAST + 1, steps  # killed attempts have left more; beside the newest, that resumed from
    assert known > 0
    by_rank = values(
        run_ranks(
            train_without_kills,
            2,
            args=(frozenset(digests) - {0},),
            timeout_seconds=60 + max(digests) / 20,
            warnings_as_errors=False,  # that there is no validation is warned of
        )
    )
    assert digests.items() <= by_rank[0].items()


PLACES = ["local", "volume"]


def folder_at(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(open_store.__kwdefaults__, "volumes_root", tmp_path / "Volumes")
    return VOLUME if place == "volume" else str(tmp_path / "run")


@pytest.mark.parametrize("place", PLACES)
def test_a_few_kills_and_resumes(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_and_resume(tmp_path, 4, folder=folder_at(place, tmp_path, monkeypatch), seed=7)


@pytest.mark.soak
@pytest.mark.parametrize(("place", "num_kills"), [("local", 350), ("volume", 150)])
def test_five_hundred_kills_and_resumes(
    place: str, num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_and_resume(tmp_path, num_kills, folder=folder_at(place, tmp_path, monkeypatch), seed=random.randrange(10**9))
