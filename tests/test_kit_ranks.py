"""Ranks are real processes: what they return, raise and warn of comes back to the test."""

import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs


def _square_plus(offset: int) -> int:
    return int(os.environ["RANK"]) ** 2 + offset


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_back_in_order_of_rank(world_size: int) -> None:
    assert values(run_ranks(_square_plus, world_size, args=(10,))) == [10, 11, 14, 19][:world_size]


def test_ranks_start_in_a_fraction_of_a_second_once_the_fork_server_runs() -> None:
    run_ranks(_square_plus, 1, args=(0,))
    for world_size in (1, 2, 4):
        start_seconds = time.monotonic()
        results = run_ranks(_square_plus, world_size, args=(0,))
        wall_seconds = time.monotonic() - start_seconds
        sys.stdout.write(f"{world_size} ranks: {wall_seconds:.3f} s\n")
        # Importing torch and Lightning takes seconds; this is far from a measure of speed, for a busy machine's sake.
        assert wall_seconds < 5.0
        assert [result.error for result in results] == [None] * world_size


def _fail_on_rank_1() -> str:
    print("about to decide")  # noqa: T201
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 is unwell")
    time.sleep(0.2)
    return "well"


def test_a_raising_rank_gives_its_traceback_and_the_others_go_on() -> None:
    results = run_ranks(_fail_on_rank_1, 3)
    assert [result.value for result in results] == ["well", None, "well"]
    assert [result.exitcode for result in results] == [0, 1, 0]
    assert results[0].error is None
    assert results[0].seconds >= 0.2
    assert "in _fail_on_rank_1" in str(results[1].error)
    assert "ValueError: rank 1 is unwell" in str(results[1].error)


def test_values_shows_each_failed_rank_with_its_output() -> None:
    with pytest.raises(AssertionError, match=r"1 of 3 ranks failed(.|\n)*rank 1 is unwell(.|\n)*about to decide"):
        values(run_ranks(_fail_on_rank_1, 3))


def _big_tensor() -> torch.Tensor:
    return torch.arange(50_000_000 // 8, dtype=torch.int64)


def test_a_big_tensor_comes_back_whole() -> None:
    assert torch.equal(values(run_ranks(_big_tensor, 2))[1], _big_tensor())


def _last_element(tensor: torch.Tensor) -> float:
    return float(tensor[-1])


def test_a_big_tensor_goes_in() -> None:
    assert values(run_ranks(_last_element, 2, args=(torch.arange(1e7),))) == [9_999_999.0] * 2


def _return_a_lambda() -> Any:
    return lambda: None


def test_a_value_that_cannot_be_pickled_is_the_ranks_failure() -> None:
    [result] = run_ranks(_return_a_lambda, 1)
    assert result.exitcode == 1
    assert "pickle" in str(result.error)


def _sum_over_ranks(backend: str) -> float:
    assert torch.distributed.get_backend() == backend
    tensor = torch.tensor([float(torch.distributed.get_rank() + 1)])
    torch.distributed.all_reduce(tensor)
    return float(tensor)


def test_ranks_share_a_process_group() -> None:
    assert values(run_ranks(_sum_over_ranks, 3, args=("gloo",), init_process_group="gloo")) == [6.0] * 3


def _warn(message: str) -> str:
    warnings.warn(message, stacklevel=2)
    return "warned"


def test_a_warning_fails_a_rank_unless_told_otherwise() -> None:
    [result] = run_ranks(_warn, 1, args=("look out",))
    assert "UserWarning: look out" in str(result.error)
    assert values(run_ranks(_warn, 1, args=("look out",), warnings_as_errors=False)) == ["warned"]


def test_an_expected_warning_passes() -> None:
    assert values(run_ranks(_warn, 1, args=("GPU available but not used",))) == ["warned"]


def _fail_in_a_thread() -> str:
    thread = threading.Thread(target=_fail, name="uploader")
    thread.start()
    thread.join()
    return "did not notice"


def _fail() -> None:
    raise ValueError("in the background")


def _leave_a_file_open() -> str:
    cycle: list[Any] = [open(__file__)]  # noqa: PTH123, SIM115
    cycle.append(cycle)
    return "did not notice"


def test_a_failing_thread_or_finalizer_fails_a_rank() -> None:
    [result] = run_ranks(_fail_in_a_thread, 1)
    assert "uploader: ValueError: in the background" in str(result.error)
    [result] = run_ranks(_leave_a_file_open, 1)
    assert "ResourceWarning: unclosed file" in str(result.error)


def _fit(root: str) -> int:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(**fast_trainer_kwargs(Path(root), devices=2, strategy="ddp", max_steps=2, max_epochs=-1))
    trainer.fit(BoringModel())
    return trainer.global_step


def test_lightning_trains_on_ranks_without_a_warning_or_a_file(tmp_path: Path) -> None:
    assert values(run_ranks(_fit, 2, args=(str(tmp_path),))) == [2, 2]
    assert list(tmp_path.iterdir()) == []


def test_ranks_must_spread_evenly_over_nodes() -> None:
    with pytest.raises(ValueError, match="got 3 ranks on 2 nodes"):
        run_ranks(_square_plus, 3, args=(0,), nodes=2)
