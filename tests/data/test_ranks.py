"""Real ranks that are killed and come back as others: each epoch still has every sample once, in one order."""

import functools
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_air import sample_order
from tests.data.runs import epochs_of, first_step, run
from tests.kit.ranks import run_ranks, values

N = 96
KILL = signal.SIGKILL


def order(epoch: int) -> list[int]:
    return sample_order(N, seed=3, epoch=epoch)[:].tolist()


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
        (2, {"strategy": first, "batch_size": 2, "accumulate": 2}, {(1, "batch:9"): KILL}),
        (1, {"strategy": second, "batch_size": 3}, {(0, "batch:17"): KILL}),
        (3, {"strategy": first, "batch_size": 5, "num_workers": 2}, {(2, "batch:22"): KILL}),
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
