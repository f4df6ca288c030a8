"""The batches of a dataset that has an index: any position is reached at once, on any ranks and batches."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_air._lightning import Trainer, rank_zero_info, set_num_batches
from lightning_air.data.entry import Entry
from lightning_air.data.loader import CountedBatches, Waiting, positioned, resumable_sampler_of, shuffles
from lightning_air.data.loops import set_batches_before
from lightning_air.data.record import PositionRecord
from lightning_air.data.samplers import ResumableSampler
from lightning_air.data.splitting import Split, Tail


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """What the user has decided about the order.

    Attributes:
        seed: None for the checkpoint's, else `default_seed`.
        default_seed: For a run that begins without one.
        shuffle: False keeps the dataset's order even where the loader shuffles.
        tail: As DataPosition's.
        fingerprint: As DataPosition's.
    """

    seed: int | None
    default_seed: int
    shuffle: bool
    tail: Tail
    fingerprint: str


class MapFeed:
    """One rank's part of each epoch.

    Args:
        loader: The user's.
        trainer: That will read it.
        options: The user's.
        waiting: Is told how long batches take.

    Raises:
        ValueError: If the position in the loader cannot be known.
    """

    def __init__(self, loader: Any, trainer: Trainer, options: MapOptions, waiting: Waiting) -> None:
        does_shuffle = shuffles(loader) and options.shuffle
        users = resumable_sampler_of(loader)
        self._takes_seed = users is None and options.seed is None
        seed = options.default_seed if options.seed is None else options.seed
        size = users.batch_size if users is not None and loader.batch_size is None else loader.batch_size
        self._sampler = ResumableSampler(
            loader.dataset,
            batch_size=size or loader.batch_sampler.batch_size,
            accumulate=trainer.accumulate_grad_batches,
            seed=users.seed if users is not None else seed,
            shuffle=does_shuffle,
            tail=users.tail if users is not None else options.tail,
            fingerprint=options.fingerprint or (users.fingerprint if users is not None else ""),
            **(trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}),
        )
        if users is not None and users.n != self._sampler.n:
            raise ValueError(
                f"The loader's sampler is of {users.n} samples, and its dataset has {self._sampler.n}. Make them one."
            )
        self._batches = CountedBatches(self._sampler)
        self.loader = positioned(loader, self._batches, waiting)

    # ---- where it is -------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """What it is."""
        return "a dataset with an index"

    @property
    def record(self) -> PositionRecord:
        """Where training would go on."""
        return self._sampler.record

    def saved(self) -> PositionRecord:
        """Return the same: all ranks have it."""
        return self.record

    @property
    def identity(self) -> Any:
        """What all ranks must have in common."""
        return asdict(self._sampler.record), self._sampler.batch_size

    def metrics(self) -> dict[str, float]:
        """Return where it is, and how many samples of the epoch are had twice for padding."""
        sampler = self._sampler
        found = {"data/epoch": float(sampler.epoch), "data/position": float(sampler.position)}
        return found | ({"data/padded_samples": float(sampler.num_padded)} if sampler.tail == "pad" else {})

    # ---- going somewhere ---------------------------------------------------------------------------------------------

    def adopt(self, record: Any) -> None:
        """Take the checkpoint's seed, unless the user has chosen one. All ranks have to do it before they compare."""
        if self._takes_seed and isinstance(record, PositionRecord):
            self._sampler.seed = record.seed

    def entry(self, record: Any) -> Entry:
        """Return where to go on, which is the record itself where today's data are the same."""
        sampler = self._sampler
        length = sampler.whole_epoch().end
        if not isinstance(record, PositionRecord):
            problem = (
                "In the checkpoint the data are read as a stream; now they have an index. Read the same dataset, or "
                "resume from a checkpoint of an epoch's end."
            )
            bound = f"Up to {record.num_samples} samples of epoch {record.epoch} are repeated."
            begun = replace(sampler.record, epoch=record.epoch, position=0, epoch_length=length)
            return Entry(begun, problem, bound, record.num_samples)
        differences = record.differences(sampler.record)
        if not differences:
            return Entry(record)
        position = min(record.position, max(length - sampler.global_batch, 0))  # Lightning counts on one step at least
        return Entry(
            replace(sampler.record, epoch=record.epoch, position=position, epoch_length=length),
            " ".join(differences),
            f"Up to {record.position} samples of epoch {record.epoch} are repeated, and as many skipped.",
            record.position,
        )

    def begin_epoch(self, trainer: Trainer) -> None:
        """Go to the start of the Trainer's epoch. Called in `on_train_epoch_start`."""
        sampler, batches = self._sampler, self._batches
        sampler.accumulate = trainer.accumulate_grad_batches
        split = sampler.whole_epoch()
        num_batches = _limited(split.num_batches, trainer.limit_train_batches)
        end = split.position_after(num_batches)
        sampler.begin(trainer.current_epoch, Split(0, end, split.num_replicas, split.batch_size))
        batches.num_before = 0
        if num_batches != trainer.fit_loop.max_batches:
            set_num_batches(trainer, num_batches)
        if sampler.num_padded:
            rank_zero_info(
                f"Epoch {sampler.epoch} is padded: {sampler.num_padded} of its {end} samples are repeated, so that its "
                f"{sampler.n} samples make whole global batches of {sampler.global_batch}."
            )

    def go_on(self, trainer: Trainer, record: PositionRecord) -> None:
        """Begin in the middle of an epoch. Called in `on_train_start`."""
        sampler, batches = self._sampler, self._batches
        split = record.rest(sampler.num_replicas, sampler.batch_size, sampler.accumulate)
        # As many batches are said to have been as a whole epoch of today has more than are to come, in whole windows
        # of accumulation: so that the epoch has its usual length, and its windows begin where the position is.
        whole = int(trainer.fit_loop.max_batches)
        steps_to_come = -(-split.num_batches // sampler.accumulate)
        num_before = max(0, -(-whole // sampler.accumulate) - steps_to_come) * sampler.accumulate
        sampler.begin(record.epoch, split)
        batches.num_before = num_before
        set_num_batches(trainer, num_before + split.num_batches)
        set_batches_before(trainer.fit_loop.epoch_loop.batch_progress, num_before)
        rank_zero_info(
            f"Epoch {record.epoch} goes on behind {record.position} of {split.end} samples: {split.num_batches} "
            f"batches of {sampler.num_replicas} x {sampler.batch_size} are to come."
        )

    # ---- while it is read --------------------------------------------------------------------------------------------

    def begin_batch(self, batch_idx: int) -> None:
        """Note that a batch, of this number in the epoch, is trained on next: nothing hangs on it here."""

    def loss_weight(self, batch_idx: int) -> float:
        """Return by what to multiply the loss of the epoch's batch of this number."""
        return self._sampler.loss_weight(batch_idx - self._batches.num_before)

    def commit(self, num_batches: int, *, is_last: bool) -> int:  # noqa: ARG002 - its position says so
        """Note that the optimizer has stepped with the epoch's first batches, and return how many samples are new.

        Args:
            num_batches: As Lightning counts them.
            is_last: Whether the epoch has no more.
        """
        before = self._sampler.position
        self._sampler.commit(num_batches - self._batches.num_before - self._sampler.num_committed)
        return self._sampler.position - before

    def finish_epoch(self) -> bool:
        """Take the epoch for a whole one; return whether anything of it was left."""
        left = self._sampler.split.num_batches - self._sampler.num_committed
        self._sampler.commit(left)
        return left > 0

    def close(self) -> None:
        """End: nothing is open."""


def _limited(num_batches: int, limit: float) -> int:
    """Return how many batches `limit_train_batches` leaves of an epoch."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
