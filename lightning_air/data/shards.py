"""Streams that move to another number of ranks and workers: a cursor per shard, which any reader can take over."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from lightning_air.data.permutation import sample_order, whole_number
from lightning_air.data.stream_record import FINISHED


@runtime_checkable
class ShardedDataset(Protocol):
    """What an iterable dataset offers so that `DataPosition` can resume it on other ranks and workers.

    A shard is what one reader reads from its start to its end: a file, a partition. A reader is one worker of one rank.
    """

    def start_shards(self, *, epoch: int, cursors: Mapping[str, int], reader: int, num_readers: int) -> None:
        """Choose this reader's shards; called before each iteration, in the worker.

        Every shard that is not finished must be some reader's, and no shard two readers'.

        Args:
            epoch: From 0 on.
            cursors: By shard: how many of its samples, from its start, the epoch has had; -1 if all. Those that are not
                in it have not been begun.
            reader: From 0 to `num_readers` - 1.
            num_readers: Over all ranks.
        """

    def shard_cursors(self) -> Mapping[str, int]:
        """Return the cursors of this reader's shards as of the last sample that was taken from the iterator."""


class ResumableShards(IterableDataset[Any]):
    """An iterable dataset of shards that are each read from start to end, such as tar, Parquet or JSON-lines files.

    With `DataPosition` every sample is had once an epoch, across resumes on other ranks and workers: of a shard in
    whose middle a run was killed, the rest is read; to get there, its samples before that are read and passed
    over. All ranks must make the same number of batches, as Lightning requires of any iterable dataset: let
    `limit_train_batches` end the epoch where they may not.

        dataset = ResumableShards(sorted(glob("/Volumes/main/default/data/*.jsonl")), read_lines)
        trainer.fit(model, DataLoader(dataset, batch_size=32, num_workers=4), ckpt_path="last")

    Args:
        shards: Their names, each once.
        read: Gives the samples of one, always the same ones in the same order.
        shuffle: Whether each epoch has an order of shards of its own; within a shard, the order is that of `read`.
        seed: Of that order.

    Raises:
        TypeError, ValueError: If an option is wrong.
    """

    def __init__(
        self, shards: Sequence[str], read: Callable[[str], Iterable[Any]], *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._shards = list(shards)
        if not self._shards or len(set(self._shards)) < len(self._shards):
            raise ValueError(f"shards must be names, at least one, each once; got {self._shards!r:.300}.")
        if not callable(read):
            raise TypeError(f"read must be a function of a shard's name, got {read!r}.")
        self._read = read
        self._shuffle = shuffle
        self._seed = whole_number("seed", seed, 0, 2**64 - 1)
        self._own: list[tuple[str, int]] | None = None
        self._cursors: dict[str, int] = {}

    def start_shards(self, *, epoch: int, cursors: Mapping[str, int], reader: int, num_readers: int) -> None:
        """Deal out what is left of the epoch: see `ShardedDataset`.

        Raises:
            ValueError: If there are fewer shards than readers.
        """
        if len(self._shards) < num_readers:
            raise ValueError(
                f"{len(self._shards)} shards cannot be dealt out to {num_readers} workers of all ranks. Make more "
                "shards, or fewer workers."
            )
        names = self._shards
        if self._shuffle:
            names = [names[index] for index in sample_order(len(names), seed=self._seed, epoch=epoch)]
        left = [(name, cursors.get(name, 0)) for name in names if cursors.get(name, 0) != FINISHED]
        self._own = left[reader::num_readers]
        self._cursors = {}

    def shard_cursors(self) -> dict[str, int]:
        """Return how far this reader has read: see `ShardedDataset`."""
        return dict(self._cursors)

    @override
    def __iter__(self) -> Iterator[Any]:
        if self._own is None:  # without DataPosition, in one process
            info = get_worker_info()
            reader, num_readers = (0, 1) if info is None else (info.id, info.num_workers)
            self.start_shards(epoch=0, cursors={}, reader=reader, num_readers=num_readers)
        own, self._own = self._own or [], None
        for name, cursor in own:
            self._cursors[name] = cursor
            for sample in islice(self._read(name), cursor, None):
                self._cursors[name] += 1
                yield sample
            self._cursors[name] = FINISHED
