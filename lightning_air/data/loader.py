"""The user's DataLoader, with our sampler in it: a copy, so that it stays as it was for validation and for the user.

A copy needs no constructor, so any subclass of DataLoader will do. It reads nothing, and starts no worker, before its
first batch is asked for: Lightning makes the iterator before it has loaded the checkpoint.
"""

import time
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from lightning_air.data.samplers import ResumableBatchSampler, ResumableSampler


class CountedBatches(ResumableBatchSampler):
    """The batches of the rest of an epoch, which counts those before as Lightning does: they are in its length."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self.sampler = sampler
        self.batch_size = sampler.batch_size
        self.drop_last = False
        self.num_before = 0

    @override
    def __len__(self) -> int:
        return self.num_before + self.sampler.split.num_batches


class Waiting:
    """How long batches were waited for, in seconds, since it was last asked."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds = 0.0

    def take(self) -> float:
        """Return it, and begin anew."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Refused:
    """Stands for a loader until training begins, which is then refused; long enough for all that Lightning checks."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        """Return a length."""
        return 2**31


class _LateIterator(Iterator[Any]):
    """An iterator that is made when its first item is asked for."""

    def __init__(self, make: Callable[[], Iterator[Any]], waiting: Waiting) -> None:
        self._make = make
        self._waiting = waiting
        self._made: Iterator[Any] | None = None

    @override
    def __next__(self) -> Any:
        begin = self._waiting.clock()
        try:
            if self._made is None:
                self._made = self._make()
            return next(self._made)
        finally:
            self._waiting.seconds += self._waiting.clock() - begin


class _Positioned:
    """What stands before the user's class in the copy."""

    waiting: Waiting

    def __iter__(self) -> Iterator[Any]:
        return _LateIterator(super().__iter__, self.waiting)  # type: ignore[misc] # DataLoader's

    # With these two, Lightning does not warn that the loader cannot resume. The callback has its state.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def positioned(loader: DataLoader[Any], batches: CountedBatches, waiting: Waiting) -> DataLoader[Any]:
    """Return a copy of a loader that reads these batches."""
    kind: type[DataLoader[Any]] = type(type(loader).__name__, (_Positioned, type(loader)), {})
    copied = kind.__new__(kind)
    # Not by assignment: DataLoader forbids that for what its constructor decides by, and Lightning records it.
    vars(copied).update(vars(loader))
    vars(copied).update(
        sampler=batches.sampler, batch_sampler=batches, drop_last=False, waiting=waiting, _iterator=None
    )
    return copied


def shuffles(loader: Any) -> bool:
    """Say whether a loader asks for shuffling.

    Raises:
        ValueError: If the position in it cannot be known, and what to do.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(f"DataPosition needs a torch DataLoader to train on, got {_name(loader)}. Wrap it in one.")  # noqa: TRY004
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        raise ValueError(  # noqa: TRY004 - like what else is refused
            f"DataPosition needs a dataset with __len__ and __getitem__, got {_name(loader.dataset)}. Give it a "
            "length, or leave DataPosition out."
        )
    if loader.batch_sampler is None:
        raise ValueError("DataPosition needs a DataLoader that makes batches, got batch_size=None. Pass a batch_size.")
    if not getattr(loader, "in_order", True):
        raise ValueError("DataPosition needs batches in the order of the sampler, got in_order=False. Leave it out.")
    sampler: Any = loader.batch_sampler
    if type(sampler) is BatchSampler or isinstance(sampler, ResumableBatchSampler):
        sampler = sampler.sampler
    kind = type(sampler)
    if isinstance(sampler, ResumableSampler) or kind is DistributedSampler:
        return bool(sampler.shuffle)
    is_whole = kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    if kind is SequentialSampler or is_whole:
        return kind is RandomSampler
    raise ValueError(
        f"DataPosition cannot resume a sampler of the user's own, got {_name(sampler)}. Pass shuffle=True or "
        "shuffle=False instead, or a ResumableSampler or ResumableBatchSampler; for a part of the data, pass a Subset."
    )


def resumable_sampler_of(loader: DataLoader[Any]) -> ResumableSampler | None:
    """Return the sampler of ours that the user has put into a loader, if any."""
    batches = loader.batch_sampler
    found = batches.sampler if isinstance(batches, ResumableBatchSampler | BatchSampler) else None
    return found if isinstance(found, ResumableSampler) else None


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
