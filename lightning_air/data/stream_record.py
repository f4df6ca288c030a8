"""How far a stream is trained on, as a checkpoint holds it: counts that all ranks share, and what each rank must know.

The states of datasets come from the user's code, so they are kept as bytes that are read by torch's restricted
unpickler only: numbers, text, bytes, lists, tuples, dicts, sets and tensors.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

import torch

from lightning_air.data.permutation import MAX_SAMPLES, whole_number
from lightning_air.data.record import MAX_TEXT

STREAM_VERSION = 1
MAX_STATE_BYTES = 4 * 2**20
"""Of one rank. Every rank holds all ranks' states while a checkpoint is written."""

FINISHED = -1
"""A shard's cursor once all of it is read."""

How = Literal["loader", "state", "shards", "skip", "restart_epoch"]


def encoded(state: Any, owner: str) -> bytes:
    """Return a state as bytes.

    Raises:
        TypeError: If they could not be read again.
        ValueError: If they are too many.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    check_size(len(data), owner)
    try:
        decoded(data)
    except ValueError as error:
        raise TypeError(
            f"The state of {owner} must be made of numbers, text, bytes, lists, tuples, dicts, sets and tensors, since "
            f"checkpoints are read without running code of theirs: {state!r:.300}. Convert the rest in its state_dict, "
            "such as `array.tolist()`."
        ) from error
    return data


def decoded(data: bytes) -> Any:
    """Return the state that `encoded` got.

    Raises:
        ValueError: If it is damaged, or something else than plain data.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise ValueError(f"The state of a stream in the checkpoint cannot be read: {error}") from error


def check_size(num_bytes: int, owner: str) -> None:
    """Refuse what would make checkpoints slow.

    Raises:
        ValueError: If a rank's state is too large.
    """
    if num_bytes > MAX_STATE_BYTES:
        raise ValueError(
            f"The state of {owner} has {num_bytes} bytes on one rank, and at most {MAX_STATE_BYTES} are kept: every "
            "rank holds those of all ranks while a checkpoint is written. Keep positions in it, not samples."
        )


def merged_cursors(*all_cursors: Mapping[str, int]) -> dict[str, int]:
    """Return how far each shard is read, by whoever has read it furthest."""
    merged: dict[str, int] = {}
    for cursors in all_cursors:
        for shard, cursor in cursors.items():
            before = merged.get(shard, 0)
            merged[shard] = FINISHED if FINISHED in (before, cursor) else max(before, cursor)
    return merged


@dataclass(frozen=True)
class StreamRecord:
    """How far an epoch of a stream is trained on.

    Raises:
        TypeError, ValueError: If a field cannot be.
    """

    epoch: int
    num_batches: int
    """Of each rank, that optimizer steps have used."""
    num_samples: int
    """In them, on all ranks together."""
    is_over: bool
    """Whether the epoch had no more than them."""
    how: How
    num_ranks: int
    num_workers: int
    batch_size: int
    dataset: str
    """Its type, and what the user adds."""
    version: int = STREAM_VERSION
    ranks: dict[int, bytes] = field(default_factory=dict, repr=False)
    """By rank: its workers' states, and which of them gave the last batch."""
    cursors: dict[str, int] = field(default_factory=dict, repr=False)
    """By shard: how many of its samples are read."""

    def __post_init__(self) -> None:
        for name in ("epoch", "num_batches", "num_samples", "num_workers"):
            whole_number(f"{name} of a stream", getattr(self, name), 0, MAX_SAMPLES)
        for name in ("num_ranks", "batch_size"):
            whole_number(f"{name} of a stream", getattr(self, name), 1, MAX_SAMPLES)
        if self.how not in get_args(How):
            raise ValueError(f"how of a stream must be one of {', '.join(get_args(How))}, got {self.how!r}.")
        if not isinstance(self.is_over, bool):
            raise TypeError(f"is_over of a stream must be True or False, got {self.is_over!r}.")
        if not isinstance(self.dataset, str) or len(self.dataset) > MAX_TEXT:
            raise ValueError(f"dataset of a stream must be text of at most {MAX_TEXT} characters: {self.dataset!r}.")
        if not all(isinstance(rank, int) and isinstance(data, bytes) for rank, data in self.ranks.items()):
            raise TypeError("ranks of a stream must be bytes by number.")
        if not all(isinstance(name, str) and isinstance(cursor, int) for name, cursor in self.cursors.items()):
            raise TypeError("cursors of a stream must be numbers by name.")

    @property
    def position(self) -> int:
        """0 where an epoch is about to begin."""
        return self.num_batches

    @property
    def is_mid_epoch(self) -> bool:
        """Whether some of the epoch is trained on, and some not."""
        return self.num_batches > 0 and not self.is_over

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Any) -> Self:
        """Return the record that `state_dict` gave.

        Raises:
            ValueError: If it is none, or of a later version of this package.
        """
        if not isinstance(state, dict):
            raise ValueError(f"The stream's position in the checkpoint must be a dict, got {state!r}.")  # noqa: TRY004 - as all damage
        if state.get("version") not in range(1, STREAM_VERSION + 1):
            raise ValueError(
                f"The stream's position in the checkpoint has version {state.get('version')!r}, and this lightning_air "
                f"knows those from 1 to {STREAM_VERSION}. Resume with the lightning_air that wrote it, or a newer one."
            )
        try:
            return cls(**state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The stream's position in the checkpoint is damaged: {error}") from error

    def begun(self) -> Self:
        """Return where training goes on: after the end of an epoch, at the start of the next."""
        return self.at_start(self.epoch + 1) if self.is_over else self

    def at_start(self, epoch: int) -> Self:
        """Return the start of an epoch."""
        return replace(self, epoch=epoch, num_batches=0, num_samples=0, is_over=False, ranks={}, cursors={})

    def shared(self) -> Self:
        """Return what all ranks must have in common: ranks may have other samples in as many batches."""
        return replace(self, num_samples=0, ranks={}, cursors={})
