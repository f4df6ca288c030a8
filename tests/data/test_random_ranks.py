"""Random jobs on real ranks, killed at random; each attempt on other ranks, sharding, batches, workers."""

import functools
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air import sample_order
from tests.data.runs import epochs_of, run
from tests.data.streams import all_of
from tests.data.test_ranks import all_killed
from tests.kit.ranks import run_ranks, values

N = 84
KILLED = -9


@dataclass(frozen=True)
class Attempt:
    world_size: int
    is_sharded: bool
    batch_size: int
    accumulate: int
    num_workers: int
    num_batches: int  # until it is killed, counted from where the one before was

    def options(self, *, is_ours: bool) -> dict[str, Any]:
        stock = "single" if self.world_size == 1 else "ddp"
        ours = "air fsdp" if self.is_sharded else "air ddp"
        return {
            "strategy": ours if is_ours else stock,
            "is_ours": is_ours,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "num_workers": self.num_workers,
        }


attempts = st.builds(
    Attempt,
    world_size=st.integers(1, 3),
    is_sharded=st.booleans(),
    batch_size=st.integers(1, 4),
    accumulate=st.integers(1, 2),
    num_workers=st.integers(0, 1),
    num_batches=st.integers(3, 9),
)
FEW = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))


def epochs_of_job(job: list[Attempt], *, is_ours: bool, **common: Any) -> dict[int, list[int]]:
    """Run a job, whose last attempt is not killed, and return what its weights have seen."""
    kill_at = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, attempt in enumerate(job):
            kill_at += attempt.num_batches
            is_last = number == len(job) - 1
            fn = functools.partial(run, num_ranks=attempt.world_size, **attempt.options(is_ours=is_ours), **common)
            signals = {} if is_last else all_killed(attempt.world_size, f"batch:{kill_at}")
            results = run_ranks(fn, attempt.world_size, args=(folder, number), signals=signals, timeout_seconds=180)
            if not any(each.exitcode == KILLED for each in results):
                values(results)  # it has come to its end
                return epochs_of(folder, number + 1)
        raise AssertionError("The last attempt was killed by someone else.")


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "lightning-s"])
@FEW
@given(job=st.lists(attempts, min_size=2, max_size=4))
def test_the_global_order_is_one_order(job: list[Attempt], *, is_ours: bool) -> None:
    epochs = epochs_of_job(job, is_ours=is_ours, n=N, tail="exact")
    assert epochs == {epoch: sample_order(N, seed=3, epoch=epoch)[:].tolist() for epoch in (0, 1)}


@FEW
@given(job=st.lists(attempts, min_size=2, max_size=3))
def test_every_sample_of_every_shard_is_had_once(job: list[Attempt]) -> None:
    """The last attempt has one rank: ranks with unlike numbers of batches would wait for each other."""
    alone = Attempt(1, False, 4, 1, 1, 10**6)
    num_shards = 40  # more than the killed ones can come through
    epochs = epochs_of_job([*job, alone], is_ours=True, n=num_shards * 7, stream="shards", max_epochs=1)
    assert Counter(epochs[0]) == Counter(all_of(num_shards))
