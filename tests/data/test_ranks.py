"""Real ranks that are killed and come back as others: each epoch still has every sample once, in one order."""

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_air import AirStrategy, DataPosition, sample_order
from tests.data.runs import Model, epochs_of, first_step, run
from tests.data.training import Learner, loader
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

N = 96
KILL = signal.SIGKILL


def order(epoch: int) -> list[int]:
    return sample_order(N, seed=3, epoch=epoch)[:].tolist()


def all_killed(world_size: int, point: str) -> dict[tuple[int, str], signal.Signals]:
    """As when nodes are lost; a rank that survives takes seconds to find out."""
    return {(rank, point): KILL for rank in range(world_size)}


def attempts(folder: Path, job: list[tuple[int, dict[str, Any], dict[tuple[int, str], signal.Signals]]]) -> list[Any]:
    """Run the attempts one after the other; all but the last are killed, and all but the first go on."""
    folder.mkdir(exist_ok=True)
    for number, (world_size, options, signals) in enumerate(job):
        fn = functools.partial(run, num_ranks=world_size, **options)
        results = run_ranks(fn, world_size, args=(str(folder), number), signals=signals, timeout_seconds=120)
        if signals:
            assert any(each.exitcode == -KILL for each in results), [each.error for each in results]
    starts = [first_step(folder, number) for number in range(len(job))]
    assert starts == sorted(starts)
    assert min(starts[1:], default=1) > 0
    return values(results)


@pytest.mark.parametrize("strategies", [("air ddp", "air ddp"), ("air ddp", "air fsdp")], ids=str)
def test_two_ranks_then_one_then_three_then_two(tmp_path: Path, strategies: tuple[str, str]) -> None:
    first, second = strategies
    job = [
        (2, {"strategy": first, "batch_size": 2, "accumulate": 2}, all_killed(2, "batch:9")),
        (1, {"strategy": second, "batch_size": 3}, {(0, "batch:17"): KILL}),
        (3, {"strategy": first, "batch_size": 5, "num_workers": 2}, all_killed(3, "batch:22")),
        (2, {"strategy": second, "batch_size": 4}, {}),
    ]
    told = attempts(tmp_path, job)
    epochs = epochs_of(tmp_path, len(job))
    assert epochs[0] == order(0)  # 96 is 12 global batches of 8
    assert epochs[1][:90] == order(1)[:90]  # as begun: with three ranks (90), or two (96)
    assert len(epochs[1]) in {90, 96}
    assert told[0]["steps"] == told[1]["steps"]


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_stock_ddp_with_lightning_s_own_checkpoints(tmp_path: Path, use_distributed_sampler: bool) -> None:
    common = {"strategy": "ddp", "is_ours": False, "use_distributed_sampler": use_distributed_sampler}
    job = [
        (2, {**common, "batch_size": 4}, {(0, "batch:6"): KILL}),
        (1, {**common, "strategy": "single", "batch_size": 3, "accumulate": 2}, {(0, "batch:14"): KILL}),
        (2, {**common, "batch_size": 2, "num_workers": 1}, {}),
    ]
    attempts(tmp_path, job)
    epochs = epochs_of(tmp_path, len(job))
    assert epochs == {0: order(0), 1: order(1)}


def test_stock_fsdp_with_lightning_s_own_checkpoints(tmp_path: Path) -> None:
    common = {"strategy": "model parallel", "is_ours": False}
    job = [
        (2, {**common, "batch_size": 4}, {(0, "batch:6"): KILL}),
        (3, {**common, "batch_size": 2, "accumulate": 2}, {(2, "batch:12"): KILL}),
        (2, {**common, "batch_size": 3}, {}),
    ]
    attempts(tmp_path, job)
    epochs = epochs_of(tmp_path, len(job))
    assert epochs == {0: order(0), 1: order(1)}


@pytest.mark.parametrize("strategy", ["air ddp", "air fsdp"])
def test_a_ragged_last_step_on_three_ranks_is_that_of_one_rank(tmp_path: Path, strategy: str) -> None:
    """100 samples: on three ranks the last step has 4, so one rank has 2 and two have 1; on one rank it has 4."""
    common = {"n": 100, "tail": "exact", "max_epochs": 1}
    one = attempts(tmp_path / "one", [(1, {"strategy": "air ddp", "batch_size": 12, **common}, {})])
    three = attempts(tmp_path / "three", [(3, {"strategy": strategy, "batch_size": 4, **common}, {})])
    assert three[0]["steps"] == one[0]["steps"] == 9
    for each in three:
        assert each["weights"] == pytest.approx(one[0]["weights"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["air ddp", "air fsdp"])
def test_a_rank_without_a_sample_in_the_last_step_changes_nothing(tmp_path: Path, strategy: str) -> None:
    """97 samples in steps of 6: the last step has one, which one of three ranks has."""
    common = {"n": 97, "tail": "exact", "max_epochs": 1}
    one = attempts(tmp_path / "one", [(1, {"strategy": "air ddp", "batch_size": 6, **common}, {})])
    three = attempts(tmp_path / "three", [(3, {"strategy": strategy, "batch_size": 2, **common}, {})])
    assert three[0]["steps"] == one[0]["steps"] == 17
    for each in three:
        assert each["weights"] == pytest.approx(one[0]["weights"], rel=1e-5)


def test_a_ragged_last_step_of_several_batches_is_that_of_one_rank_and_one_batch(tmp_path: Path) -> None:
    """100 samples in steps of 24: the last one has 4, of which with accumulation there is one batch instead of 4."""
    common = {"n": 100, "tail": "exact", "max_epochs": 1, "strategy": "air ddp"}
    one = attempts(tmp_path / "one", [(1, {"batch_size": 24, **common}, {})])
    three = attempts(tmp_path / "three", [(3, {"batch_size": 2, "accumulate": 4, **common}, {})])
    assert three[0]["steps"] == one[0]["steps"] == 5
    for each in three:
        assert each["weights"] == pytest.approx(one[0]["weights"], rel=1e-5)


class OneCycle(Model):
    """Asks for the length of the training while its optimizer is made, which sets up the loader early."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=self.total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("strategy", ["air ddp", "air fsdp"])
def test_one_cycle_on_ranks(tmp_path: Path, strategy: str) -> None:
    """Under fsdp the loader is set up before the checkpoint is loaded; its workers must not have begun by then."""
    common = {"strategy": strategy, "model": OneCycle, "num_workers": 1}
    job = [
        (2, {**common, "batch_size": 4}, all_killed(2, "batch:8")),
        (2, {**common, "batch_size": 2, "accumulate": 2}, {}),
    ]
    attempts(tmp_path, job)
    assert epochs_of(tmp_path, len(job)) == {0: order(0), 1: order(1)}


def _fit_on_unlike_data() -> tuple[str, int]:
    trainer = Trainer(**fast_trainer_kwargs(".", strategy=AirStrategy(), callbacks=[DataPosition()]))
    module = Learner(50)
    try:
        trainer.fit(module, loader(40 + 4 * trainer.global_rank), loader(shuffle=False))
    except RuntimeError as error:
        return str(error), len(module.batches)
    return "", len(module.batches)


def test_ranks_with_unlike_data_are_refused_on_all() -> None:
    for number, (message, num_batches) in enumerate(values(run_ranks(_fit_on_unlike_data, 2))):
        assert "The ranks have not the same data: rank 0 has" in message
        assert f"and rank {number} has" in message
        assert num_batches == 0
