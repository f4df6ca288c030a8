"""What a training reads its batches from, and how it enters it."""

from dataclasses import dataclass
from typing import Any, Protocol

from lightning_air._lightning import Trainer


@dataclass(frozen=True)
class Entry:
    """Where to go on, and what is not as it should be about that.

    Attributes:
        record: The position to go to.
        problem: Why samples may be repeated or skipped, and what to do; "" where none are.
        bound: How many at most, in words.
        num_inexact: The same as a number.
        is_chosen: The user has asked for it by name: it is told, and not refused.
    """

    record: Any
    problem: str = ""
    bound: str = ""
    num_inexact: int = 0
    is_chosen: bool = False


class Feed(Protocol):
    """A loader whose position is known; `MapFeed` and `StreamFeed`."""

    loader: Any

    @property
    def kind(self) -> str:
        """What it is, in words that differ where Lightning would treat it otherwise."""

    @property
    def record(self) -> Any:
        """Where training would go on: the same on every rank."""

    def saved(self) -> Any:
        """Return the same with all that a checkpoint needs. Collective: every rank calls this."""

    @property
    def identity(self) -> Any:
        """What all ranks must have in common before they begin."""

    def metrics(self) -> dict[str, float]:
        """Return where it is."""

    def adopt(self, record: Any) -> None:
        """Take from a checkpoint what the user has left open."""

    def entry(self, record: Any) -> Entry:
        """Return where to go on for a checkpoint's record."""

    def begin_epoch(self, trainer: Trainer) -> None:
        """Go to the start of the Trainer's epoch."""

    def go_on(self, trainer: Trainer, record: Any) -> None:
        """Begin in the middle of an epoch."""

    def begin_batch(self, batch_idx: int) -> None:
        """Note which of the epoch's batches is trained on next."""

    def loss_weight(self, batch_idx: int) -> float:
        """Return by what to multiply the loss of a batch."""

    def commit(self, num_batches: int, *, is_last: bool) -> int:
        """Note that the optimizer has stepped with so many of the epoch's batches; return the new samples."""

    def finish_epoch(self) -> bool:
        """Take the epoch for a whole one; return whether anything of it was left."""

    def close(self) -> None:
        """Stop reading. What is committed stays."""
