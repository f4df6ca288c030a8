"""The batches of a stream: a loader or a dataset that can only be gone through, and what is known of where it is."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, cast

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_air._lightning import (
    Tqdm,
    Trainer,
    rank_zero_info,
    read_anew,
    set_num_batches,
    will_read_anew,
)
from lightning_air.data.entry import Entry
from lightning_air.data.loader import Waiting
from lightning_air.data.loops import set_batches_before
from lightning_air.data.record import MAX_TEXT
from lightning_air.data.stream import Stream, StreamLoader
from lightning_air.data.stream_record import How, StreamRecord, decoded, encoded, merged_cursors
from lightning_air.data.stream_workers import Delivery, SnapshotLoader, Start, has_cursors, has_state

Iterable = Literal["stateful", "skip", "restart_epoch"]


def is_stream(loader: Any) -> bool:
    """Say whether a loader has no index behind it that we could read by."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def how_to_resume(loader: Any, asked: Iterable) -> How:
    """Return by what a stream can be resumed.

    Raises:
        ValueError: If not in the way that was asked for, and what to do.
    """
    if asked != "restart_epoch" and not getattr(loader, "in_order", True):
        raise ValueError("DataPosition needs batches in a fixed order, got in_order=False. Leave it out.")
    if asked != "stateful":
        return asked
    if has_state(loader):
        return "loader"
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not (has_cursors(dataset) or has_state(dataset)):
        name = _name(loader if dataset is None else dataset)
        raise ValueError(
            f"DataPosition cannot resume {name}: a stream needs state_dict and load_state_dict (on the loader, or on "
            "the dataset of a torch DataLoader), or start_shards and shard_cursors. Give it these, or choose "
            "DataPosition(iterable='skip'), which on resuming reads all again up to the position, or "
            "iterable='restart_epoch', which repeats the epoch's samples up to there."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"DataPosition cannot tell which state belongs to which batch of {_name(loader)}, which has an __iter__ of "
            "its own. Give it state_dict and load_state_dict, or use torch's DataLoader."
        )
    return "shards" if has_cursors(dataset) else "state"


class StreamFeed:
    """One rank's part of a stream.

    Args:
        loader: The user's.
        trainer: That will read it.
        asked: The option `iterable`.
        fingerprint: As DataPosition's.
        waiting: Is told how long batches take.

    Raises:
        ValueError: If it cannot be resumed in the way that was asked for.
    """

    def __init__(self, loader: Any, trainer: Trainer, asked: Iterable, fingerprint: str, waiting: Waiting) -> None:
        self._how = how_to_resume(loader, asked)
        self._users = loader
        self._trainer = trainer
        self._snapshots = SnapshotLoader(loader) if self._how in ("state", "shards") else None
        self._dataset = getattr(loader, "dataset", loader)
        self._batch_size = int(getattr(loader, "batch_size", None) or 1)
        self._num_workers = int(getattr(loader, "num_workers", 0))
        self._name = f"{_name(self._dataset)} {fingerprint}".strip()
        if len(self._name) > MAX_TEXT:
            raise ValueError(f"fingerprint, with the dataset's type, must have at most {MAX_TEXT} characters.")
        self._stream = Stream(_name(self._dataset), waiting)
        self.loader = StreamLoader(loader, self._stream)
        self._epoch = 0
        self._num_samples = 0  # of this rank, in the epoch, since it was entered
        self._entered = StreamRecord(  # where
            epoch=0,
            num_batches=0,
            num_samples=0,
            is_over=False,
            how=self._how,
            num_ranks=trainer.world_size,
            num_workers=self._num_workers,
            batch_size=self._batch_size,
            dataset=self._name,
        )
        self._num_batches = 0
        self._num_before = 0  # as Lightning counts, when it was entered
        self._is_over = False
        self._whole: int | float | None = None

    # ---- where it is -------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """What it is: to Lightning it is another thing with a length."""
        try:
            len(self.loader)
        except (TypeError, NotImplementedError):
            return f"a stream ({self._how})"
        return f"a stream with a length ({self._how})"

    @property
    def record(self) -> StreamRecord:
        """Where training would go on, as far as all ranks know it: without their states."""
        return replace(
            self._entered,
            epoch=self._epoch,
            num_batches=self._num_batches,
            num_samples=self._entered.num_samples + self._num_samples * self._trainer.world_size,
            is_over=self._is_over,
            ranks={},
            cursors={},
        )

    def saved(self) -> StreamRecord:
        """Return where training would go on, with all ranks' states. Collective: every rank calls this."""
        record = self.record
        own = self._own_state() if record.is_mid_epoch else b""
        gathered: list[Any] = [(own, self._num_samples)]
        if self._trainer.world_size > 1:
            gathered = [None] * self._trainer.world_size
            dist.all_gather_object(gathered, (own, self._num_samples))
        record = replace(record, num_samples=self._entered.num_samples + sum(count for _, count in gathered))
        states = {rank: state for rank, (state, _) in enumerate(gathered) if state}
        if self._how == "shards" and record.is_mid_epoch:
            read = [cursors for state in states.values() for cursors in decoded(state)["workers"].values()]
            return replace(record, cursors=merged_cursors(self._entered.cursors, *read))
        return replace(record, ranks=states)

    def _own_state(self) -> bytes:
        if self._how in ("skip", "restart_epoch"):
            return b""
        # What this process and its own workers have pickled.
        workers = {worker: pickle.loads(state) for worker, state in self._stream.states.items()}  # noqa: S301
        return encoded({"last": self._stream.last_worker, "workers": workers}, _name(self._dataset))

    @property
    def identity(self) -> Any:
        """What all ranks must have in common."""
        return self._entered.state_dict() | {"ranks": {}, "cursors": {}}

    def metrics(self) -> dict[str, float]:
        """Return where it is; samples as if all ranks had as many as this one."""
        return {"data/epoch": float(self._epoch), "data/position": float(self.record.num_samples)}

    # ---- going somewhere ---------------------------------------------------------------------------------------------

    def adopt(self, record: Any) -> None:
        """Take nothing."""

    def entry(self, record: Any) -> Entry:
        """Return where to go on, which is the record itself where that is exact."""
        if not isinstance(record, StreamRecord):
            problem = "In the checkpoint the data have an index; now they are a stream. Read the same dataset."
            bound = f"Up to {record.position} samples of epoch {record.epoch} are repeated."
            return Entry(self._entered.at_start(record.epoch), problem, bound, record.position)
        if not record.num_batches:
            return Entry(record)
        start = self._entered.at_start(record.epoch)
        bound = f"Up to {record.num_samples} samples of epoch {record.epoch} are repeated."
        if record.dataset != self._name:
            problem = f"In the checkpoint the data are {record.dataset!r}; now they are {self._name!r}. Read the same."
            return Entry(start, problem, bound, record.num_samples)
        if self._how == "restart_epoch":
            problem = f"Epoch {record.epoch} is begun anew, as iterable='restart_epoch' says."
            bound = f"Its {record.num_samples} samples up to there are repeated."
            return Entry(start, problem, bound, record.num_samples, is_chosen=True)
        if self._how == "skip":
            return self._entry_by_skipping(record)
        problem = self._why_not_exact(record)
        return Entry(start, problem, bound, record.num_samples) if problem else Entry(record)

    def _entry_by_skipping(self, record: StreamRecord) -> Entry:
        names = {"num_ranks": "ranks", "num_workers": "workers per rank", "batch_size": "samples per batch"}
        changed = [
            f"{getattr(record, name)} {what}, and now there are {getattr(self._entered, name)}"
            for name, what in names.items()
            if getattr(record, name) != getattr(self._entered, name)
        ]
        if not changed:
            return Entry(record)
        problem = (
            f"Skipping gets to the same samples only where they are read alike; in the checkpoint there were "
            f"{'; '.join(changed)}. Resume as it was, or give the dataset state_dict and load_state_dict."
        )
        num_batches = record.num_samples // (self._entered.num_ranks * self._batch_size)
        bound = f"Up to {record.num_samples} samples of epoch {record.epoch} are repeated, and as many skipped."
        return Entry(replace(record, num_batches=num_batches), problem, bound, record.num_samples)

    def _why_not_exact(self, record: StreamRecord) -> str:
        if record.how != self._how:
            return (
                f"The checkpoint holds a position by {record.how!r}, and the data now offer one by {self._how!r}. "
                "Offer that, or choose DataPosition(iterable='skip') or 'restart_epoch'."
            )
        before = record.num_ranks, max(1, record.num_workers)
        now = self._entered.num_ranks, max(1, self._num_workers)
        if self._how == "shards" or before == now:
            return ""
        return (
            f"The state of {self._name} is that of {before[0]} ranks with {before[1]} workers each, and now there are "
            f"{now[0]} with {now[1]}: it cannot be dealt out anew. Resume on as many, or give the dataset start_shards "
            "and shard_cursors."
        )

    def begin_epoch(self, trainer: Trainer) -> None:
        """Go to the start of the Trainer's epoch. Called in `on_train_epoch_start`."""
        whole = self._whole
        if whole is not None and whole != trainer.fit_loop.max_batches:
            set_num_batches(trainer, cast("int", whole))
        self._enter(self._entered.at_start(trainer.current_epoch), 0)
        if not will_read_anew(trainer):
            read_anew(trainer)

    def go_on(self, trainer: Trainer, record: StreamRecord) -> None:
        """Begin in the middle of an epoch. Called in `on_train_start`."""
        accumulate = trainer.accumulate_grad_batches
        done = record.num_batches
        if (record.num_ranks, record.batch_size) != (self._entered.num_ranks, self._batch_size):
            done, rest = divmod(record.num_samples, self._entered.num_ranks * self._batch_size)  # in today's batches
            record = replace(record, num_batches=done + (rest > 0))
        num_before = done // accumulate * accumulate  # windows of accumulation begin where it goes on
        self._enter(record, num_before)
        set_batches_before(trainer.fit_loop.epoch_loop.batch_progress, num_before)
        whole = self._whole = trainer.fit_loop.max_batches
        if whole != float("inf"):
            set_num_batches(trainer, num_before + max(0, int(whole) - done))
        else:
            read_anew(trainer)
        rank_zero_info(
            f"Epoch {record.epoch} goes on behind {record.num_batches} batches of each rank, {record.num_samples} "
            "samples in all."
        )

    def _enter(self, record: StreamRecord, num_before: int) -> None:
        self._entered = replace(
            self._entered, epoch=record.epoch, num_samples=record.num_samples, cursors=record.cursors
        )
        self._epoch, self._num_batches, self._num_samples = record.epoch, record.num_batches, 0
        self._behind = record.num_batches - num_before  # what Lightning counts fewer than there were
        self._is_over = False
        states, last = {}, -1
        if self._how in ("state", "loader") and record.ranks:
            own = decoded(record.ranks[self._trainer.global_rank])
            states, last = own["workers"], own["last"]
        workers = max(1, self._num_workers)
        start = Start(
            epoch=record.epoch,
            states=states,
            first_worker=(last + 1) % workers,
            cursors=record.cursors,
            first_reader=self._trainer.global_rank * workers,
            num_readers=self._trainer.world_size * workers,
        )
        pickled = {worker: pickle.dumps(state) for worker, state in states.items()}
        self._stream.open(lambda: self._reader(start, record), num_before, states=pickled)
        self._stream.last_worker = last

    def _reader(self, start: Start, record: StreamRecord) -> Iterator[Delivery]:
        """Return what reads from a record on; called when its first batch is asked for."""
        users = self._users
        if self._snapshots is not None:
            self._snapshots.worker_start.users = getattr(self.loader, "worker_init_fn", None)  # Lightning's, perhaps
            return self._snapshots.iterate(start)
        if "worker_init_fn" in vars(self.loader):
            users.worker_init_fn = self.loader.worker_init_fn
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(record.epoch)
        if self._how == "loader":
            if start.states:
                users.load_state_dict(start.states[0])
            return _Plain(iter(users), self._batch_size, users)
        deliveries = _Plain(iter(users), self._batch_size, None)
        return self._skipped(deliveries, record) if self._how == "skip" else deliveries

    def _skipped(self, deliveries: Iterator[Delivery], record: StreamRecord) -> Iterator[Delivery]:
        """Pass over what is trained on.

        Raises:
            ValueError: If the stream has not that much.
        """
        if not record.num_batches:
            return deliveries
        rank_zero_info(f"Skipping {record.num_batches} batches of epoch {record.epoch}, which takes reading them.")
        is_shown = self._trainer.progress_bar_callback is not None and self._trainer.is_global_zero
        to_skip = islice(deliveries, record.num_batches)
        num_skipped = sum(1 for _ in Tqdm(to_skip, "Skipping", record.num_batches, disable=not is_shown, leave=False))
        if num_skipped < record.num_batches:
            raise ValueError(
                f"Epoch {record.epoch} has {num_skipped} batches, and {record.num_batches} are to be skipped: this is "
                "not the stream that the checkpoint is of. Read that, or choose DataPosition(iterable='restart_epoch')."
            )
        rank_zero_info(f"Skipped {num_skipped} batches.")
        return deliveries

    # ---- while it is read --------------------------------------------------------------------------------------------

    def begin_batch(self, batch_idx: int) -> None:
        """Note that the epoch's batch of this number is trained on next."""
        self._stream.begin_batch(batch_idx)

    def loss_weight(self, batch_idx: int) -> float:  # noqa: ARG002 - sizes are not known beforehand
        """Return 1."""
        return 1.0

    def commit(self, num_batches: int, *, is_last: bool) -> int:
        """Note that the optimizer has stepped with the epoch's first batches; return their new samples on all ranks.

        Raises:
            ValueError: If the dataset's state is too large.
        """
        num_samples = self._stream.commit(num_batches)
        self._num_batches = num_batches + self._behind
        self._num_samples += num_samples
        self._is_over = is_last
        return num_samples * self._trainer.world_size

    def finish_epoch(self) -> bool:
        """Take the epoch for a whole one; return whether it was not."""
        was_over, self._is_over = self._is_over, True
        return not was_over

    def close(self) -> None:
        """Stop reading, and let workers end. What is committed stays."""
        self._stream.close()
        if self._snapshots is not None:
            self._snapshots.close()


class _Plain(Iterator[Delivery]):
    """Whatever gives batches, with the state of the loader, if it has one, behind each."""

    def __init__(self, batches: Iterator[Any], batch_size: int, loader: Any) -> None:
        self._batches = batches
        self._batch_size = batch_size
        self._loader = loader

    def __next__(self) -> Delivery:
        batch = next(self._batches)
        state = b"" if self._loader is None else pickle.dumps(self._loader.state_dict())
        return Delivery(batch, 0, state, self._batch_size)


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
