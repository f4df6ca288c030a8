"""Whatever ranks, batches and look-ahead an epoch has and comes to have, its samples are trained on once, in order."""

import itertools
import json
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_air.data import DataChangedError, ResumableBatchSampler, ResumableSampler, sample_order
from lightning_air.data.splitting import Split
from tests.kit.ranks import run_ranks, values

# ---- a model of training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One start of a job, and how it ends."""

    num_ranks: int
    batch_size: int
    accumulate: int
    look_ahead: int  # batches that workers have read and that are not trained on
    saves_every: int  # optimizer steps
    dies_after: int  # batches; it may be in the middle of an accumulation window

    @property
    def global_batch(self) -> int:
        return self.num_ranks * self.batch_size * self.accumulate


@dataclass
class Checkpoint:
    trained: list[list[int]]  # by epoch
    state: dict[str, Any] | None = None


def train(  # noqa: C901 - what a training script does, and no more
    n: int, tail: str, attempt: Attempt, start: Checkpoint, num_epochs: int
) -> tuple[Checkpoint, bool]:
    """Return the newest checkpoint that an attempt leaves, and whether it came to the end."""
    options: dict[str, Any] = {
        "num_replicas": attempt.num_ranks,
        "batch_size": attempt.batch_size,
        "seed": 4,
        "tail": tail,
    }
    samplers = [
        ResumableBatchSampler(n, rank=rank, accumulate=attempt.accumulate, **options)
        for rank in range(attempt.num_ranks)
    ]
    if start.state is not None:
        for each in samplers:
            each.load_state_dict(json.loads(json.dumps(start.state)))
    newest, trained = start, [list(epoch) for epoch in start.trained]
    num_batches = num_steps = 0
    for epoch in range(samplers[0].epoch, num_epochs):
        for each in samplers:
            each.set_epoch(epoch)
        left = len(samplers[0])
        window: list[int] = []
        for index, batches in enumerate(read_ahead(zip(*samplers, strict=True), attempt.look_ahead)):
            if num_batches == attempt.dies_after:
                return newest, False
            num_batches += 1
            own = [b if each.loss_weight(index) else [] for each, b in zip(samplers, batches, strict=True)]
            assert all(0 < len(b) <= attempt.batch_size for b in batches)
            window += [s for turn in itertools.zip_longest(*own) for s in turn if s is not None]
            if (index + 1) % attempt.accumulate and index + 1 < left:
                continue
            while len(trained) <= epoch:
                trained.append([])
            trained[epoch] += window
            for each in samplers:
                each.commit(index % attempt.accumulate + 1)
            window = []
            num_steps += 1
            states = [each.state_dict() for each in samplers]
            assert all(state == states[0] for state in states)
            if num_steps % attempt.saves_every == 0:
                newest = Checkpoint([list(each) for each in trained], states[0])
    return Checkpoint(trained, newest.state), True


def read_ahead(batches: Any, number: int) -> Any:
    queue: list[Any] = []
    for batch in batches:
        queue.append(batch)
        if len(queue) > number:
            yield queue.pop(0)
    yield from queue


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    return Attempt(
        num_ranks=draw(st.integers(1, 5)),
        batch_size=draw(st.integers(1, 4)),
        accumulate=draw(st.integers(1, 3)),
        look_ahead=draw(st.integers(0, 6)),
        saves_every=draw(st.integers(1, 4)),
        dies_after=draw(st.integers(0, 25)),
    )


@settings(max_examples=250, deadline=None)
@given(
    n=st.integers(60, 150),
    tail=st.sampled_from(["drop", "pad", "exact"]),
    job=st.lists(attempts(), min_size=1, max_size=8),
)
def test_every_sample_is_trained_on_once_in_one_order_whatever_the_job_goes_through(
    n: int, tail: str, job: list[Attempt]
) -> None:
    num_epochs = 2
    last = Attempt(2, 2, 2, 1, 1, 10**9)
    checkpoint, is_done = Checkpoint([]), False
    for attempt in [*job, last]:
        checkpoint, is_done = train(n, tail, attempt, checkpoint, num_epochs)
        if is_done:
            break
    assert is_done
    for epoch, trained in enumerate(checkpoint.trained):
        order = sample_order(n, seed=4, epoch=epoch)[:].tolist()
        once = trained[:n]
        assert once == order[: len(once)]
        assert trained[n:] == order[: len(trained) - n] if len(trained) > n else True
        if tail == "exact":
            assert len(trained) == n
        elif tail == "pad":
            assert n <= len(trained) < n + max(each.global_batch for each in [*job, last])
        else:  # as it was when the epoch began, by one of the attempts
            assert len(trained) in {n // each.global_batch * each.global_batch for each in [*job, last]}
    assert len(checkpoint.trained) == num_epochs


@settings(max_examples=200, deadline=None)
@given(
    left=st.integers(1, 60),
    num_ranks=st.integers(1, 7),
    batch_size=st.integers(1, 5),
    accumulate=st.integers(1, 4),
    start=st.integers(0, 10**12),
)
def test_weighted_means_over_ranks_and_batches_are_the_mean_over_the_samples_of_a_step(
    left: int, num_ranks: int, batch_size: int, accumulate: int, start: int
) -> None:
    split = Split(start, start + left, num_ranks, batch_size)
    end = start
    for first in range(0, split.num_batches, accumulate):
        step = range(first, min(first + accumulate, split.num_batches))
        gradient, together = 0.0, []
        for batch in step:
            for rank in range(num_ranks):
                share = split.positions(rank, batch * batch_size, (batch + 1) * batch_size)
                weight = split.loss_weight(rank, batch, accumulate)
                assert weight == 1 or step[-1] == split.num_batches - 1
                gradient += weight * float((share - start).mean()) / num_ranks / accumulate if len(share) else 0
                assert len(share) or weight == 0
                together += share.tolist()
        assert sorted(together) == list(range(end, split.position_after(step[-1] + 1)))
        end = split.position_after(step[-1] + 1)
        assert gradient == pytest.approx(sum(together) / len(together) - start)
        end = split.position_after(batch + 1)
    assert end == start + left


# ---- behind a loader -------------------------------------------------------------------------------------------------


def indices(loader: DataLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_goes_on_behind_what_was_committed_not_behind_what_was_read(
    num_workers: int, persistent: bool
) -> None:
    dataset = TensorDataset(torch.arange(40))
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent}
    sampler = ResumableSampler(dataset, batch_size=4, seed=2)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, **options)
    order = sample_order(40, seed=2, epoch=0)[:].tolist()
    assert len(loader) == 10
    for number, batch in enumerate(loader):
        assert batch[0].tolist() == order[4 * number : 4 * number + 4]
        if number == 5:
            break
        sampler.commit()
    state = sampler.state_dict()
    assert state["position"] == 20
    again = ResumableBatchSampler(dataset, batch_size=3, num_replicas=2, rank=1)
    with pytest.raises(
        DataChangedError, match=r"shuffled by the seed 2; now it is shuffled by the seed 0\. Pass that seed"
    ):
        again.load_state_dict(state)
    again = ResumableBatchSampler(dataset, batch_size=3, num_replicas=2, rank=1, seed=2)
    again.load_state_dict(state)
    loader = DataLoader(dataset, batch_sampler=again, **options)
    assert len(loader) == 4
    assert indices(loader) == [order[21:26:2], order[27:32:2], order[33:38:2], order[39:]]
    again.set_epoch(1)
    order = sample_order(40, seed=2, epoch=1)[:].tolist()
    assert indices(loader) == [order[at + 1 : at + 6 : 2] for at in range(0, 36, 6)]


def test_the_dataset_s_own_order_is_kept_on_request() -> None:
    sampler = ResumableSampler(10, batch_size=2, num_replicas=2, rank=1, shuffle=False, tail="exact")
    assert list(sampler) == [1, 3, 5, 7, 9]
    assert len(sampler) == 5


def test_a_rank_without_a_sample_takes_part_with_one_that_weighs_nothing() -> None:
    ranks = [
        ResumableBatchSampler(9, batch_size=1, num_replicas=4, rank=rank, shuffle=False, tail="exact")
        for rank in range(4)
    ]
    assert [list(each) for each in ranks] == [[[0], [4], [8]], [[1], [5], [8]], [[2], [6], [8]], [[3], [7], [8]]]
    assert [each.loss_weight(2) for each in ranks] == [4, 0, 0, 0]
    assert [each.loss_weight(1) for each in ranks] == [1, 1, 1, 1]
    assert [len(each.sampler) for each in ranks] == [len(list(each.sampler)) for each in ranks] == [3, 3, 3, 3]


def test_padding_goes_round() -> None:
    sampler = ResumableSampler(3, batch_size=4, num_replicas=2, rank=0, shuffle=False, tail="pad")
    other = ResumableSampler(3, batch_size=4, num_replicas=2, rank=1, shuffle=False, tail="pad")
    assert [list(sampler), list(other)] == [[0, 2, 1, 0], [1, 0, 2, 1]]


def test_a_finished_epoch_resumes_at_the_next() -> None:
    sampler = ResumableSampler(12, batch_size=4)
    sampler.commit(3)
    with pytest.raises(ValueError, match="num_batches must be from 0 to 0, got 1"):
        sampler.commit()
    other = ResumableSampler(12, batch_size=4)
    other.load_state_dict(sampler.state_dict())
    assert other.epoch == 1
    assert list(other) == sample_order(12, seed=0, epoch=1)[:].tolist()


def _in_a_process_group() -> list[list[int]]:
    return list(ResumableBatchSampler(12, batch_size=2, shuffle=False))


def test_the_ranks_are_those_of_the_process_group() -> None:
    assert values(run_ranks(_in_a_process_group, 2, init_process_group="gloo")) == [
        [[0, 2], [4, 6], [8, 10]],
        [[1, 3], [5, 7], [9, 11]],
    ]


def test_others_take_it_for_a_distributed_sampler_and_workers_can_have_it() -> None:
    sampler = ResumableSampler(12)
    assert isinstance(sampler, DistributedSampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


# ---- the record ------------------------------------------------------------------------------------------------------


def test_a_state_is_small_and_plain() -> None:
    sampler = ResumableSampler(2**62, seed=2**64 - 1, fingerprint="é" * 300)
    sampler.set_epoch(2**62)
    sampler.commit(2**61)
    assert len(json.dumps(sampler.state_dict(), ensure_ascii=False).encode()) < 1000
    with pytest.raises(ValueError, match="at most 300 characters, got 301"):
        ResumableSampler(10, fingerprint="x" * 301)


STATE = ResumableSampler(100, batch_size=10).state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, and this lightning_air knows those from 1 to 1. Resume with the"),
        ({"order_version": 0}, "has order_version 0, and"),
        ({"version": None}, "has version None, and"),
        ({"more": 1}, "other fields than it should: more"),
        ({"position": -1}, "damaged: position of a position must be from 0 to"),
        ({"position": 200}, "position 200 is beyond the epoch's length 100"),
        ({"epoch_length": 101}, "an epoch of 101 is longer than the dataset of 100 samples"),
        ({"seed": "x"}, "seed of a position must be a whole number, got 'x'"),
        ({"tail": "x"}, "tail of a position must be one of drop, pad, exact, got 'x'"),
        ({"shuffle": 1}, "shuffle of a position must be True or False, got 1"),
        ({"dataset": None}, "dataset of a position must be text"),
        ({"n": 101, "epoch_length": 100}, "has 101 samples; now it has 100 samples. Read the same samples"),
        ({"shuffle": False}, "has shuffle=False; now it has shuffle=True. Shuffle as before"),
        ({"tail": "exact"}, "has tail='exact'; now it has tail='drop'. Pass the same tail"),
        ({"dataset": "other"}, "is 'other'; now it is ''. Read the same dataset"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableSampler(100, batch_size=10).load_state_dict({**STATE, **change})


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (None, {}, TypeError, "dataset must have a length, or be one, got None"),
        (-1, {}, ValueError, "the dataset's length must be from 0 to .*, got -1"),
        (10, {"batch_size": 0}, ValueError, "batch_size must be from 1 to .*, got 0"),
        (10, {"rank": 2, "num_replicas": 2}, ValueError, "rank must be from 0 to 1, got 2"),
        (10, {"accumulate": 1.5}, TypeError, r"accumulate must be a whole number, got 1\.5"),
        (10, {"tail": "keep"}, ValueError, "tail must be one of 'drop', 'pad', 'exact', got 'keep'"),
        (10, {"fingerprint": 3}, TypeError, "fingerprint must be text, got 3"),
        (
            10,
            {"batch_size": 4, "accumulate": 3},
            ValueError,
            r"nothing of 10 samples: a global batch is 12 \(1 ranks x",
        ),
    ],
)
def test_a_bad_option_is_named(dataset: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ResumableSampler(dataset, **options)
