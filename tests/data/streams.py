"""Iterable datasets and loaders that keep their place, each by another protocol."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_air.data import ResumableShards

NUM_SAMPLES = 40


class Plain(IterableDataset):
    """Numbers from 0 on, dealt out to workers; keeps no place."""

    def __init__(self, n: int = NUM_SAMPLES, ranks: tuple[int, int] = (0, 1)) -> None:
        self.n = n
        self.rank, self.num_ranks = ranks

    def own(self) -> list[int]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return list(range(self.n))[self.rank :: self.num_ranks][worker::num_workers]

    def __iter__(self) -> Iterator[int]:
        yield from self.own()


class Stateful(Plain):
    """As the usual ones are written: the state is of the current iteration, and the next one begins at the start."""

    position = start = 0

    def __iter__(self) -> Iterator[int]:
        own = self.own()
        self.position, self.start = self.start, 0
        while self.position < len(own):
            self.position += 1
            yield own[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class Sized(Stateful):
    def __len__(self) -> int:
        return self.n


class StandsInForHuggingFace(Stateful):
    """A stand-in for `datasets.IterableDataset`: `set_epoch` decides the order, and a state is of its own epoch only.

    `state_dict()` has the epoch, and an iteration after `set_epoch` of another one begins at its start.
    """

    epoch = 0
    loaded: dict[str, Any] | None = None

    def own(self) -> list[int]:
        own = super().own()
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(7 + self.epoch)).tolist()
        return [own[index] for index in order]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.start = self.loaded["position"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = dict(state)


class StandsInForStatefulDataLoader:
    """A stand-in for torchdata's StatefulDataLoader: no torch DataLoader; its `state_dict` has the loader's place."""

    def __init__(self, n: int = NUM_SAMPLES, batch_size: int = 4) -> None:
        self.n, self.batch_size = n, batch_size
        self.position = 0
        self.next: int | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.position, self.next = self.next or 0, None
        while self.position < self.n:
            first = self.position
            self.position = min(self.n, first + self.batch_size)
            yield torch.arange(first, self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["position"]


SAMPLES_PER_SHARD = 7


def read_shard(name: str) -> list[int]:
    """Return a shard's samples: names are numbers, and every third shard has one sample less."""
    number = int(name)
    return list(range(number * SAMPLES_PER_SHARD, (number + 1) * SAMPLES_PER_SHARD - (number % 3 == 2)))


def shards(num_shards: int = 6, **options: Any) -> ResumableShards:
    return ResumableShards([str(number) for number in range(num_shards)], read_shard, **options)


def all_of(num_shards: int) -> list[int]:
    return [sample for number in range(num_shards) for sample in read_shard(str(number))]
