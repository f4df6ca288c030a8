"""The batches of an iterable dataset, each with the dataset's state right behind it.

The state is taken where the batch is made, in the worker, and travels with it: what workers, the pinning thread or
Lightning have read ahead is in no state that counts. A worker takes up its state before it iterates.
"""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override

_NOTHING = "lightning_air: no sample"  # compared by identity


class Delivery(NamedTuple):
    """A batch, and what is known of it.

    Attributes:
        batch: For the training step.
        worker: Which made it.
        state: Of the dataset behind it, pickled; empty where there is none.
        num_samples: In it.
    """

    batch: Any
    worker: int
    state: bytes
    num_samples: int


class Start(NamedTuple):
    """Where an iteration starts.

    Attributes:
        epoch: Which it is of.
        states: By worker, what it goes on from; one that has none begins the epoch.
        first_worker: Which makes the first batch.
        cursors: Of all shards.
        first_reader: The number of this rank's first worker among those of all ranks.
        num_readers: How many there are.
    """

    epoch: int
    states: Mapping[int, Any]
    first_worker: int
    cursors: Mapping[str, int]
    first_reader: int
    num_readers: int


def has_state(thing: Any) -> bool:
    """Say whether it has `state_dict` and `load_state_dict`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def has_cursors(dataset: Any) -> bool:
    """Say whether it has `start_shards` and `shard_cursors`: see `ShardedDataset`."""
    return callable(getattr(dataset, "start_shards", None)) and callable(getattr(dataset, "shard_cursors", None))


class _Resuming(IterableDataset[Any]):
    """The user's dataset, which takes up a state before it is iterated. In each worker there is a copy."""

    def __init__(self, dataset: Any, num_blanks: int) -> None:
        self.dataset = dataset
        self.num_blanks = num_blanks
        self.start: Start | None = None
        self._epoch = 0

    @override
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        # A worker that lives on is told no new start: its next iteration is of the next epoch.
        start, self.start = self.start, None
        last = self._epoch
        self._epoch = start.epoch if start is not None else last + 1
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        if has_cursors(self.dataset):
            self._start_shards(start, worker)
        elif start is not None and worker in start.states:
            self.dataset.load_state_dict(start.states[worker])
        if start is not None and worker < start.first_worker:
            # DataLoader takes turns from worker 0 on: those before the first one make an empty batch.
            for _ in range(self.num_blanks):
                yield _NOTHING
        yield from self.dataset

    def _start_shards(self, start: Start | None, worker: int) -> None:
        if start is not None:
            self._reader, self._num_readers = start.first_reader + worker, start.num_readers
        self.dataset.start_shards(
            epoch=self._epoch,
            cursors=dict(start.cursors) if start is not None else {},
            reader=self._reader,
            num_readers=self._num_readers,
        )

    def snapshot(self) -> bytes:
        dataset = self.dataset
        return pickle.dumps(dataset.shard_cursors() if has_cursors(dataset) else dataset.state_dict())


class _Collating:
    """The user's `collate_fn`, which adds the state. It is called right after a batch's last sample was taken."""

    def __init__(self, dataset: _Resuming, collate_fn: Any, *, makes_batches: bool) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._makes_batches = makes_batches

    def __call__(self, samples: Any) -> tuple[Any, int, bytes, int]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if (samples[0] if self._makes_batches else samples) is _NOTHING:
            return None, worker, b"", 0
        state = self._dataset.snapshot()  # before anything else may iterate
        return self._collate_fn(samples), worker, state, len(samples) if self._makes_batches else 1


class WorkerStart:
    """The user's `worker_init_fn`, which finds the user's dataset where it looks for it."""

    def __init__(self, dataset: _Resuming, users: Any) -> None:
        self._dataset = dataset
        self.users = users

    def __call__(self, worker: int) -> None:
        """Run in a worker, before it iterates."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self._dataset.dataset)  # by assignment torch forbids it
        if self.users is not None:
            self.users(worker)


class SnapshotLoader:
    """A copy of a DataLoader over an iterable dataset, whose batches come with states.

    Args:
        loader: The user's, which stays as it is; the dataset is the same object.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset = _Resuming(loader.dataset, loader.batch_size or 1)
        collating = _Collating(self._dataset, loader.collate_fn, makes_batches=loader.batch_size is not None)
        self.worker_start = WorkerStart(self._dataset, loader.worker_init_fn)
        copied = type(loader).__new__(type(loader))
        # Not by assignment: DataLoader forbids that for what its constructor decides by, and Lightning records it.
        vars(copied).update(vars(loader))
        vars(copied).update(
            dataset=self._dataset, collate_fn=collating, worker_init_fn=self.worker_start, _iterator=None
        )
        self._loader = copied
        self._items: Iterator[Any] | None = None
        self._keeps_workers = copied.num_workers > 0 and copied.persistent_workers

    def iterate(self, start: Start) -> Iterator[Delivery]:
        """Begin an epoch, or go on in one.

        Workers that live on take only the start of an epoch, so they are let go where it is another one.
        """
        if self._keeps_workers and (start.states or start.cursors):
            self.close()
        self._dataset.start = start
        self._items = iter(self._loader)
        return _Deliveries(self._items)

    def close(self) -> None:
        """Let the workers end."""
        # Private: workers otherwise live as long as anything refers to the iterator, such as an exception's traceback.
        if isinstance(self._items, _MultiProcessingDataLoaderIter):
            self._items._shutdown_workers()  # noqa: SLF001
        self._items = None
        vars(self._loader)["_iterator"] = None


class _Deliveries(Iterator[Delivery]):
    """No generator: whoever lets go of it lets go of the workers."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    @override
    def __next__(self) -> Delivery:
        while True:
            delivery = Delivery(*next(self._items))
            if delivery.num_samples:
                return delivery
