"""Streams on real ranks that are killed and come back, through Lightning's checkpoints and ours."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_air import AirStrategy, DataPosition
from tests.data.runs import epochs_of, run
from tests.data.streams import Plain, Stateful, all_of
from tests.data.test_ranks import KILL, all_killed, attempts
from tests.data.training import Learner, loader
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

N = 96


@pytest.mark.parametrize(
    ("strategy", "is_ours", "num_workers"),
    [("ddp", False, 2), ("air fsdp", True, 0), ("model parallel", False, 0)],
    ids=["ddp", "air-fsdp", "model-parallel"],
)
def test_each_rank_goes_on_in_its_own_part(tmp_path: Path, strategy: str, *, is_ours: bool, num_workers: int) -> None:
    common: dict[str, Any] = {
        "strategy": strategy,
        "is_ours": is_ours,
        "stream": "stateful",
        "num_workers": num_workers,
    }
    job = [
        (2, {**common, "batch_size": 4}, all_killed(2, "batch:7")),
        (2, {**common, "batch_size": 4, "accumulate": 2}, all_killed(2, "batch:17")),
        (2, {**common, "batch_size": 4}, {}),
    ]
    attempts(tmp_path, job)
    epochs = epochs_of(tmp_path, len(job))
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(range(N))


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "lightning-s"])
def test_shards_go_from_two_ranks_to_one_to_three_to_one(tmp_path: Path, *, is_ours: bool) -> None:
    common: dict[str, Any] = {"is_ours": is_ours, "stream": "shards", "n": 28 * 7, "max_epochs": 1}
    several = "air ddp" if is_ours else "ddp"
    one = "air fsdp" if is_ours else "single"
    job = [
        (2, {**common, "strategy": several, "batch_size": 2, "num_workers": 1}, all_killed(2, "batch:9")),
        (1, {**common, "strategy": one, "batch_size": 3, "accumulate": 2}, {(0, "batch:17"): KILL}),
        (3, {**common, "strategy": several, "batch_size": 2}, all_killed(3, "batch:22")),
        (1, {**common, "strategy": one, "batch_size": 5}, {}),
    ]
    attempts(tmp_path, job)
    assert Counter(epochs_of(tmp_path, len(job))[0]) == Counter(all_of(28))


def test_a_state_of_other_ranks_is_refused(tmp_path: Path) -> None:
    common: dict[str, Any] = {"strategy": "air ddp", "stream": "stateful", "batch_size": 4}
    run_ranks(run_with(common, 2), 2, args=(str(tmp_path), 0), signals=all_killed(2, "batch:7"), timeout_seconds=120)
    results = run_ranks(run_with(common, 1), 1, args=(str(tmp_path), 1), timeout_seconds=120)
    assert "is that of 2 ranks with 1 workers each, and now there are 1 with 1" in str(results[0].error)
    assert not (tmp_path / "1-0.jsonl").exists()


def run_with(options: dict[str, Any], num_ranks: int) -> Any:
    import functools

    return functools.partial(run, num_ranks=num_ranks, **options)


def _fit_on_unlike_loaders(is_plain: bool) -> tuple[str, int]:
    trainer = Trainer(**fast_trainer_kwargs(".", strategy=AirStrategy(), callbacks=[DataPosition()]))
    module = Learner(50)
    try:
        data = DataLoader(Stateful(40), batch_size=4)
        if trainer.global_rank:
            data = DataLoader(Plain(40), batch_size=4) if is_plain else loader(40)
        trainer.fit(module, data, loader(shuffle=False))
    except (RuntimeError, ValueError) as error:
        return str(error), len(module.batches)
    return "", len(module.batches)


def test_what_one_rank_refuses_all_refuse() -> None:
    (first, first_batches), (second, second_batches) = values(run_ranks(_fit_on_unlike_loaders, 2, args=(True,)))
    for message in (first, second):
        assert "DataPosition cannot resume tests.data.streams.Plain: a stream needs" in message
    assert first_batches == second_batches == 0


def test_ranks_with_unlike_kinds_of_data_are_refused() -> None:
    for message, num_batches in values(run_ranks(_fit_on_unlike_loaders, 2, args=(False,))):
        assert "not the same kind of data: a stream (state); a dataset with an index" in message
        assert num_batches == 0
