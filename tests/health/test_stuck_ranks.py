"""A rank that is stuck, for real: in a collective, in a data loader, in a sleep. Found, named, dumped, and ended."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_air import GPUHealth
from lightning_air.health import HangRule
from lightning_air.health.hang_watch import GATHER_SECONDS, LEAVE_SECONDS
from lightning_air.health.leaving import ABORT_EXIT_CODE
from lightning_air.health.sending import SEND_SECONDS
from tests.kit.nvml_stub import use_stub
from tests.kit.points import reach
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import NUM_FEATURES, Regression
from tests.tracking.local_store import MLFLOW_WARNING, local_client

MIN_SECONDS = 5.0
CHECK_SECONDS = 0.5
STUCK_BATCH = 5
BOUND_SECONDS = MIN_SECONDS + CHECK_SECONDS + GATHER_SECONDS + SEND_SECONDS + LEAVE_SECONDS


def get_stuck(folder: str) -> None:
    Path(folder, "stuck").write_text(str(time.time()))
    time.sleep(3_600)


class Samples(Dataset):
    """Of which one never comes on rank 1."""

    def __init__(self, folder: str, stuck_at: int | None) -> None:
        self.folder = folder
        self.stuck_at = stuck_at

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.stuck_at:
            get_stuck(self.folder)
        return torch.ones(NUM_FEATURES), torch.ones(1)


class SleepsInAStep(Regression):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == STUCK_BATCH and self.global_rank == 1:
            get_stuck(self.folder)
        return super().training_step(batch, batch_idx)


class EntersACollectiveAlone(Regression):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == STUCK_BATCH and self.global_rank == 1:
            Path(self.folder, "stuck").write_text(str(time.time()))
            dist.barrier()
        return super().training_step(batch, batch_idx)


class Stops(Callback):
    """The process is stopped, as a debugger or an overcommitted host does."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STUCK_BATCH and trainer.global_rank == 1:
            reach("stop")


def train(folder: str, what: str, action: str) -> int:
    use_stub(None)
    rank = int(os.environ["RANK"])
    module = {"sleep": SleepsInAStep, "collective": EntersACollectiveAlone}.get(what)
    model = module(folder) if module is not None else Regression()
    stuck_at = STUCK_BATCH if what == "loader" and rank == 1 else None
    batches = DataLoader(Samples(folder, stuck_at), batch_size=1, num_workers=1 if what == "loader" else 0)
    rule = HangRule(min_seconds=MIN_SECONDS, pause_seconds=120, action=action)
    trainer = Trainer(
        **fast_trainer_kwargs(
            folder,
            strategy="ddp",
            devices=2,
            use_distributed_sampler=False,
            max_steps=20,
            limit_val_batches=0,
            callbacks=[GPUHealth(poll_seconds=CHECK_SECONDS, hang=rule), *([Stops()] if what == "stop" else [])],
        )
    )
    trainer.fit(model, batches, batches)
    return trainer.global_step


EXPECTED = {
    "sleep": "The others wait for rank 1: rank 1 (node 0, local rank 1) is in training batch 5",
    "loader": "The others wait for rank 1: rank 1 (node 0, local rank 1) is after training batch 4",
    "collective": "Rank 0 (node 0, local rank 0) is in training batch 5",
}
LINES = {
    "sleep": "at get_stuck (health/test_stuck_ranks.py:",
    "loader": "at train (health/test_stuck_ranks.py:",
    "collective": "at training_step (health/test_stuck_ranks.py:",
}


@pytest.mark.parametrize("what", ["sleep", "loader", "collective"])
def test_a_stuck_rank_is_found_named_dumped_and_ended_within_the_bound(tmp_path: Path, what: str) -> None:
    results = run_ranks(train, 2, args=(str(tmp_path), what, "abort"), timeout_seconds=240)

    assert [result.exitcode for result in results] == [ABORT_EXIT_CODE] * 2, results[0].output + results[1].output
    markers = [
        json.loads((tmp_path / "gpu_health" / f"aborted-node-0-rank-{rank}.json").read_text()) for rank in (0, 1)
    ]
    message = markers[0]["reason"]
    assert markers[1]["reason"] == message
    assert EXPECTED[what] in message
    assert LINES[what] in message
    # In which collective the other waits for a batch is Lightning's choice.
    assert f"waiting in gloo:{'' if what == 'loader' else 'all_reduce (number'}" in message
    if what == "collective":
        assert "waiting in gloo:barrier (number" in message
        assert "They wait in different collectives" in message
    stuck_seconds = float((tmp_path / "stuck").read_text())
    assert max(marker["time_seconds"] for marker in markers) - stuck_seconds < BOUND_SECONDS

    (folder,) = (tmp_path / "gpu_health").glob("hang-*")
    assert message.startswith((folder / "hang.txt").read_text()[:40])
    stacks = [(folder / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert ("get_stuck" in stacks[1]) == (what == "sleep")
    assert "in barrier" in stacks[1] if what == "collective" else "barrier" not in stacks[1].split("All threads")[1]
    assert all("gloo:all_reduce number" in text for text in stacks)
    assert message in results[0].output


def goes_on(folder: str) -> dict[str, Any]:
    """A rank that is stuck for a while only, with the default action."""
    use_stub(None)

    class Dawdles(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == STUCK_BATCH and self.global_rank == 1:
                deadline = time.monotonic() + 120
                while not list(Path(folder, "gpu_health").glob("hang-*/hang.txt")) and time.monotonic() < deadline:
                    time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    health = GPUHealth(poll_seconds=CHECK_SECONDS, hang=HangRule(min_seconds=MIN_SECONDS, pause_seconds=120))

    class WaitsForTheEnd(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            deadline = time.monotonic() + 60
            while args[3] == STUCK_BATCH and trainer.global_rank == 0 and time.monotonic() < deadline:
                assert health.events is not None
                if any(event.kind == "hang_over" for event in health.events.all):
                    return
                time.sleep(0.1)

    trainer = Trainer(
        **fast_trainer_kwargs(
            folder,
            strategy="ddp",
            devices=2,
            use_distributed_sampler=False,
            max_steps=8,
            limit_val_batches=0,
            callbacks=[health, WaitsForTheEnd()],
        )
    )
    batches = DataLoader(Samples(folder, None), batch_size=1)
    trainer.fit(Dawdles(), batches, batches)
    events = health.events.all if health.events is not None else []
    return {"step": trainer.global_step, "events": [event.kind for event in events if "nvml" not in event.kind]}


def test_by_default_it_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    told = values(run_ranks(goes_on, 2, args=(str(tmp_path),), timeout_seconds=240))
    assert told == [{"step": 8, "events": ["hang", "hang_over"]}, {"step": 8, "events": []}]
    assert not list((tmp_path / "gpu_health").glob("aborted-*"))


@pytest.mark.soak  # nothing ends a stopped process but the time limit
def test_a_rank_whose_process_is_stopped_is_named_by_the_others(tmp_path: Path) -> None:
    results = run_ranks(
        train,
        2,
        args=(str(tmp_path), "stop", "abort"),
        signals={(1, "stop"): signal.SIGSTOP},
        timeout_seconds=120,
    )
    assert results[0].exitcode == ABORT_EXIT_CODE
    marker = json.loads((tmp_path / "gpu_health" / "aborted-node-0-rank-0.json").read_text())
    assert "No answer from rank 1: stopped, dead, or stuck outside of Python. Rank 0" in marker["reason"]


def alone(folder: str, uri: str) -> str:
    from lightning_air import AirMLflowLogger

    use_stub(None)

    class Sleeps(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == STUCK_BATCH:
                time.sleep(3_600)
            return super().training_step(batch, batch_idx)

    logger = AirMLflowLogger(tracking_uri=uri, experiment_name="stuck")
    Path(folder, "run").write_text(str(logger.run_id))
    rule = HangRule(min_seconds=MIN_SECONDS, pause_seconds=120, action="abort")
    callbacks = [GPUHealth(hang=rule)]
    trainer = Trainer(**fast_trainer_kwargs(folder, logger=logger, callbacks=callbacks, limit_val_batches=0))
    batches = DataLoader(Samples(folder, None), batch_size=1)
    trainer.fit(Sleeps(), batches, batches)
    return "not stuck"


@pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
def test_the_stacks_go_to_the_artifacts_of_the_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    client = local_client(tmp_path_factory)
    uri = client._tracking_client.tracking_uri
    client.create_experiment("stuck", artifact_location=str(tmp_path / "artifacts"))
    (result,) = run_ranks(alone, 1, args=(str(tmp_path), uri), timeout_seconds=240, warnings_as_errors=False)
    assert result.exitcode == ABORT_EXIT_CODE, result.output
    run_id = Path(tmp_path, "run").read_text()
    (folder,) = client.list_artifacts(run_id, "gpu_health")
    assert folder.path.startswith("gpu_health/hang-")
    files = [file.path.rpartition("/")[2] for file in client.list_artifacts(run_id, folder.path)]
    assert sorted(files) == ["hang.txt", "rank-0.txt"]
