"""The batches of an epoch by their number, read once each, and the states behind those that are trained on."""

from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from lightning_air.data.loader import Waiting
from lightning_air.data.stream_record import check_size
from lightning_air.data.stream_workers import Delivery


class Stream:
    """One rank's batches. Nothing is read before `open`: Lightning asks before it has loaded the checkpoint.

    Lightning may make several iterators of an epoch, each of which reads ahead: those batches are kept until they are
    trained on, and each iterator begins behind the last one that is.

    Args:
        owner: Whose states these are, for errors.
        waiting: Is told how long batches take.
    """

    def __init__(self, owner: str, waiting: Waiting) -> None:
        self._owner = owner
        self._waiting = waiting
        self._make: Callable[[], Iterator[Delivery]] | None = None
        self._read: Iterator[Delivery] | None = None
        self._is_open = False
        self._ahead: dict[int, Delivery] = {}  # batches that have been read and not begun
        self._behind: dict[int, tuple[int, bytes, int]] = {}  # worker, state, samples of those that are not committed
        self._next = self.num_begun = self.num_committed = 0
        self.states: dict[int, bytes] = {}
        self.last_worker = -1  # which gave the last batch that is committed

    def open(
        self, read: Callable[[], Iterator[Delivery]], first: int, *, states: dict[int, bytes] | None = None
    ) -> None:
        """Begin an epoch, or go on in it.

        Args:
            read: Makes what reads the batches that are to come, when the first is asked for.
            first: The number, as Lightning counts, of the next batch.
            states: Pickled, by worker, before it.
        """
        self.close()
        self._make, self._is_open = read, True
        self._next = self.num_begun = self.num_committed = first
        self._behind = {}
        self.states = dict(states or {})

    def close(self) -> None:
        """Stop reading. What is committed stays."""
        self._make = self._read = None
        self._is_open = False
        self._ahead = {}

    def take(self, number: int) -> Any:
        """Return a batch.

        Raises:
            StopIteration: If the epoch has not that many, or has not begun.
        """
        while number not in self._ahead:
            if not self._is_open:
                raise StopIteration
            begin = self._waiting.clock()
            try:
                if self._read is None:
                    assert self._make is not None
                    self._read = self._make()
                delivery = next(self._read)
            except StopIteration:
                self._is_open = False
                raise
            finally:
                self._waiting.seconds += self._waiting.clock() - begin
            self._ahead[self._next] = delivery
            self._behind[self._next] = delivery.worker, delivery.state, delivery.num_samples
            self._next += 1
        return self._ahead[number].batch

    def begin_batch(self, number: int) -> None:
        """Note that a batch is trained on now: it is not asked for again."""
        self.num_begun = number + 1
        for each in [each for each in self._ahead if each <= number]:
            del self._ahead[each]

    def commit(self, number: int) -> int:
        """Note that an optimizer step has used the batches before a number, and return their samples.

        Raises:
            ValueError: If the states have become too large.
        """
        num_samples = 0
        for each in sorted(each for each in self._behind if each < number):
            worker, state, count = self._behind.pop(each)
            num_samples += count
            if state:
                self.states[worker] = state
            self.last_worker = worker
        self.num_committed = number
        check_size(sum(map(len, self.states.values())), self._owner)
        return num_samples


class StreamLoader:
    """What Lightning reads: a Stream that looks like the user's loader."""

    def __init__(self, loader: Any, stream: Stream) -> None:
        self._users = loader
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self._stream)

    def __len__(self) -> int:
        """Return the user's loader's length.

        Raises:
            TypeError: If it has none.
        """
        return len(self._users)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what is private to torch's loaders is not for others to end
            raise AttributeError(name)
        return getattr(self._users, name)

    # With these two, Lightning does not warn that the loader cannot resume. The callback has its state.
    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


class _Batches(Iterator[Any]):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number: int | None = None

    @override
    def __next__(self) -> Any:
        if self._number is None:
            self._number = self._stream.num_begun
        batch = self._stream.take(self._number)
        self._number += 1
        return batch
