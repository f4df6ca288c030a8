"""Samplers that go on at the exact sample, on any number of ranks; no Lightning needed.

What a sampler has yielded says nothing, since workers read ahead: its position moves when `commit` is called.
"""

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler
from typing_extensions import override

from lightning_air.data.permutation import MAX_SAMPLES, SampleOrder, sample_order, whole_number
from lightning_air.data.record import MAX_TEXT, DataChangedError, PositionRecord, checked_tail
from lightning_air.data.splitting import Split, Tail, epoch_length

_CHUNK = 4096  # indices that are computed at a time


# A DistributedSampler to Lightning (and others), which then leaves the loader as it is; nothing of torch's runs.
class ResumableSampler(DistributedSampler[int]):
    """One rank's samples of an epoch, from any position on; for `DataLoader(sampler=…, batch_size=…)`.

    All ranks together take `num_replicas * batch_size` consecutive positions of one global order at a time. So an epoch
    may go on with other ranks, batches and workers than it began with, and still has every sample once:

        sampler = ResumableSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        if resuming:
            sampler.load_state_dict(state)
        for epoch in range(sampler.epoch, 10):
            sampler.set_epoch(epoch)
            for batch in loader:
                train(batch)
                sampler.commit()  # after the optimizer's step, for the batches of that step
                # sampler.state_dict() is now where training goes on

    At the end of an epoch a rank may have a smaller batch than others; where it would have none, it gets one sample
    that is another's, so that all ranks go through the same steps. `loss_weight` tells.

    Args:
        dataset: What has a length, or that length.
        batch_size: Per rank: the loader's.
        num_replicas: How many ranks share an epoch. Default: those of the process group, 1 without one.
        rank: Which of them this is. Default: as in the process group.
        accumulate: Batches per optimizer step; with `batch_size` and `num_replicas` it makes the global batch.
        seed: Of the order.
        shuffle: False for the dataset's own order.
        tail: What becomes of the samples that make no whole global batch. "drop": left out. "pad": filled up with the
            epoch's first samples. "exact": each is had once, and the last step is smaller.
        fingerprint: Text that stands for the dataset's content, such as a version: changed, a resume is refused.

    Raises:
        TypeError, ValueError: If an option is wrong, or an epoch has no whole global batch to offer.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "drop",
        fingerprint: str = "",
    ) -> None:
        is_sized = hasattr(dataset, "__len__")
        if not is_sized and not isinstance(dataset, int | np.integer):
            raise TypeError(f"dataset must have a length, or be one, got {dataset!r}.")
        self.n = whole_number("the dataset's length", len(dataset) if is_sized else dataset, 0, MAX_SAMPLES)  # type: ignore[arg-type]
        if num_replicas is None:
            num_replicas = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        num_replicas = whole_number("num_replicas", num_replicas, 1, MAX_SAMPLES)
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be text, got {fingerprint!r}.")
        super().__init__(
            range(self.n),  # type: ignore[arg-type] # all that it wants is a length
            num_replicas=num_replicas,
            rank=whole_number("rank", rank, 0, num_replicas - 1),
            shuffle=bool(shuffle),
            seed=whole_number("seed", seed, 0, 2**64 - 1),
        )
        self.batch_size = whole_number("batch_size", batch_size, 1, MAX_SAMPLES)
        self.accumulate = whole_number("accumulate", accumulate, 1, MAX_SAMPLES)
        self.tail = checked_tail(tail)
        self.fingerprint = fingerprint
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}" if is_sized else ""
        self.dataset_name = f"{kind} {fingerprint}".strip()
        if len(self.dataset_name) > MAX_TEXT:
            raise ValueError(
                f"fingerprint, with the dataset's type, must have at most {MAX_TEXT} characters, got "
                f"{len(self.dataset_name)}. Pass a digest of it."
            )
        if self.n and not self.whole_epoch().num_batches:
            raise ValueError(
                f"tail='drop' leaves nothing of {self.n} samples: a global batch is {self.global_batch} ("
                f"{num_replicas} ranks x batch size {self.batch_size} x {self.accumulate} accumulated). Make it "
                "smaller, or pass tail='exact' or tail='pad'."
            )
        self._order: SampleOrder | None = None
        self.begin(0, self.whole_epoch())

    # ---- where it is -------------------------------------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return self.num_replicas * self.batch_size * self.accumulate

    def whole_epoch(self) -> Split:
        """Return how an epoch is dealt out that begins now."""
        return Split(0, epoch_length(self.n, self.tail, self.global_batch), self.num_replicas, self.batch_size)

    def begin(self, epoch: int, split: Split) -> None:
        """Go to an epoch, of which these positions are to come."""
        self.epoch = whole_number("epoch", epoch, 0, MAX_SAMPLES)
        self.split = split
        self.num_committed = 0

    @override
    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; in the epoch that it is in, stay."""
        if epoch != self.epoch:
            self.begin(epoch, self.whole_epoch())

    def commit(self, num_batches: int = 1) -> None:
        """Note that this many more of this rank's batches are trained on: the optimizer has stepped with them.

        Raises:
            ValueError: If the epoch has not that many.
        """
        left = self.split.num_batches - self.num_committed
        self.num_committed += whole_number("num_batches", num_batches, 0, left)

    @property
    def position(self) -> int:
        """How many of the epoch's positions are trained on."""
        return self.split.position_after(self.num_committed)

    @property
    def record(self) -> PositionRecord:
        """Where training would go on."""
        return PositionRecord(
            epoch=self.epoch,
            position=self.position,
            epoch_length=self.split.end,
            n=self.n,
            seed=self.seed,
            shuffle=self.shuffle,
            tail=self.tail,
            dataset=self.dataset_name,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where training would go on: the same on every rank, less than 1 kB."""
        return self.record.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler, of whatever ranks and batches, has committed.

        Raises:
            DataChangedError: If it went through other samples, or in another order.
            ValueError: If it is no such state.
        """
        record = PositionRecord.from_state_dict(state_dict)
        differences = record.differences(self.record)
        if differences:
            raise DataChangedError(" ".join(differences))
        self.resume(record)

    def resume(self, record: PositionRecord) -> None:
        """Go on at a record, without asking whether it fits."""
        record = record.begun()
        split = record.rest(self.num_replicas, self.batch_size, self.accumulate)
        self.begin(record.epoch, split if record.position else self.whole_epoch())

    # ---- what it yields ----------------------------------------------------------------------------------------------

    def samples(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the samples at positions of the current epoch."""
        asked: npt.NDArray[np.int64] = np.asarray(positions, dtype=np.int64) % max(self.n, 1)  # padding goes round
        if not self.shuffle:
            return asked
        if self._order is None or (self._order.n, self._order.seed, self._order.epoch) != (
            self.n,
            self.seed,
            self.epoch,
        ):
            self._order = sample_order(self.n, seed=self.seed, epoch=self.epoch)
        return self._order(asked)

    def loss_weight(self, batch: int) -> float:
        """Return by what to multiply the mean loss of a batch, so that every sample of a step counts the same.

        The step's gradient must be the mean over ranks of the sum over `accumulate` batches, divided by `accumulate`.

        Args:
            batch: Counted from where the epoch was begun, or resumed.
        """
        return self.split.loss_weight(self.rank, batch, self.accumulate)

    @property
    def num_padded(self) -> int:
        """How many of the epoch's samples are had twice, to fill up its last global batch."""
        return max(0, self.split.end - self.n)

    def batches(self) -> Iterator[list[int]]:
        """Give the rank's batches from where it stands; its position does not move by that."""
        split, rank, size = self.split, self.rank, self.batch_size
        per_chunk = max(1, _CHUNK // size)
        for chunk in range(self.num_committed, split.num_batches, per_chunk):
            indices = self.samples(split.positions(rank, chunk * size, (chunk + per_chunk) * size)).tolist()
            for batch in range(chunk, min(chunk + per_chunk, split.num_batches)):
                start = (batch - chunk) * size
                # Without a sample of its own, a rank takes part with the first of this step, which then weighs 0.
                yield indices[start : start + size] or self.samples([split.position_after(batch)]).tolist()

    @override
    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch

    @override
    def __len__(self) -> int:
        """Return how many samples of this rank are to come."""
        own = max(self.split.num_positions(self.rank) - self.num_committed * self.batch_size, 0)
        is_filled = self.split.num_batches > self.num_committed and not self.loss_weight(self.split.num_batches - 1)
        return own + is_filled


class ResumableBatchSampler(Sampler[list[int]]):
    """One rank's batches of an epoch, from any position on; for `DataLoader(batch_sampler=…)`.

    As `ResumableSampler`, of which it has one as `sampler`, but it is the one to make when batches are asked for:

        sampler = ResumableBatchSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)

    Args:
        dataset: What has a length, or that length.
        **options: As ResumableSampler's.

    Raises:
        TypeError, ValueError: As ResumableSampler.
    """

    def __init__(self, dataset: Sized | int, **options: Any) -> None:
        self.sampler = ResumableSampler(dataset, **options)
        self.batch_size = self.sampler.batch_size
        self.drop_last = False

    @property
    def epoch(self) -> int:
        """The epoch that it is in."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; in the epoch that it is in, stay."""
        self.sampler.set_epoch(epoch)

    def commit(self, num_batches: int = 1) -> None:
        """Note that this many more of this rank's batches are trained on: the optimizer has stepped with them.

        Raises:
            ValueError: If the epoch has not that many.
        """
        self.sampler.commit(num_batches)

    def loss_weight(self, batch: int) -> float:
        """Return by what to multiply the mean loss of a batch: see ResumableSampler."""
        return self.sampler.loss_weight(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return where training would go on: the same on every rank, less than 1 kB."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler, of whatever ranks and batches, has committed.

        Raises:
            DataChangedError: If it went through other samples, or in another order.
            ValueError: If it is no such state.
        """
        self.sampler.load_state_dict(state_dict)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        """Return how many batches are to come."""
        return self.sampler.split.num_batches - self.sampler.num_committed


__all__ = ["ResumableBatchSampler", "ResumableSampler"]
