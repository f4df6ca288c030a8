"""The position in the data as a checkpoint holds it: a few numbers, the same on every rank.

No part of it is about ranks, batches or workers: those may be others when training goes on.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, cast

from lightning_air.data.permutation import MAX_SAMPLES, ORDER_VERSION, whole_number
from lightning_air.data.splitting import TAILS, Split, Tail, epoch_length

RECORD_VERSION = 1
MAX_TEXT = 300
"""Characters of `dataset`, so that a record stays below 1 kB."""


class DataChangedError(ValueError):
    """What is read now is not what the checkpoint's position is in."""


@dataclass(frozen=True)
class PositionRecord:
    """How far an epoch's samples are trained on.

    Raises:
        TypeError, ValueError: If a field cannot be.
    """

    epoch: int
    position: int
    """How many of the epoch's positions are trained on: an optimizer step has used them."""
    epoch_length: int
    """Where the epoch ends, as it was when it began."""
    n: int
    """Samples in the dataset."""
    seed: int
    shuffle: bool
    tail: Tail
    dataset: str
    """What else must not change: the dataset's type, and what the user adds."""
    order_version: int = ORDER_VERSION
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        for name in ("epoch", "position", "epoch_length", "n"):
            whole_number(f"{name} of a position", getattr(self, name), 0, MAX_SAMPLES)
        whole_number("seed of a position", self.seed, 0, 2**64 - 1)
        if self.tail not in TAILS:
            raise ValueError(f"tail of a position must be one of {', '.join(TAILS)}, got {self.tail!r}.")
        if not isinstance(self.shuffle, bool):
            raise TypeError(f"shuffle of a position must be True or False, got {self.shuffle!r}.")
        if not isinstance(self.dataset, str) or len(self.dataset) > MAX_TEXT:
            raise ValueError(f"dataset of a position must be text of at most {MAX_TEXT} characters: {self.dataset!r}.")
        if self.position > self.epoch_length:
            raise ValueError(f"position {self.position} is beyond the epoch's length {self.epoch_length}.")
        if self.tail != "pad" and self.epoch_length > self.n:
            raise ValueError(f"an epoch of {self.epoch_length} is longer than the dataset of {self.n} samples.")

    @property
    def is_mid_epoch(self) -> bool:
        """Whether some of the epoch's samples are trained on, and some not."""
        return 0 < self.position < self.epoch_length

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain numbers and text."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Any) -> Self:
        """Return the record that `state_dict` gave.

        Raises:
            ValueError: If it is none, or of a later version of this package.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(state, dict):
            raise ValueError(f"The position in the checkpoint must be a dict, got {state!r}.")  # noqa: TRY004 - as all damage
        for name, newest in (("version", RECORD_VERSION), ("order_version", ORDER_VERSION)):
            if state.get(name) not in range(1, newest + 1):
                raise ValueError(
                    f"The position in the checkpoint has {name} {state.get(name)!r}, and this lightning_air knows "
                    f"those from 1 to {newest}. Resume with the lightning_air that wrote it, or with a newer one."
                )
        if set(state) != names:
            odd = ", ".join(sorted(set(state) ^ names))
            raise ValueError(f"The position in the checkpoint has other fields than it should: {odd}.")
        try:
            return cls(**state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The position in the checkpoint is damaged: {error}") from error

    def begun(self) -> Self:
        """Return where training goes on: after the end of an epoch, at the start of the next."""
        if self.position < self.epoch_length or self.position == 0:
            return self
        return replace(self, epoch=self.epoch + 1, position=0)

    def at_start(self, epoch: int) -> Self:
        """Return the start of an epoch."""
        return replace(self, epoch=epoch, position=0)

    def shared(self) -> Self:
        """Return what all ranks must have in common, which is all."""
        return self

    def rest(self, num_replicas: int, batch_size: int, accumulate: int) -> Split:
        """Return how the rest of the epoch is dealt out to these ranks.

        It ends where it would have ended with those before. Padding alone depends on them: it is as much as is needed.
        """
        end = self.epoch_length
        if self.tail == "pad" and end >= self.n:
            end = self.position + epoch_length(
                max(0, self.n - self.position), "pad", num_replicas * batch_size * accumulate
            )
        return Split(self.position, end, num_replicas, batch_size)

    def differences(self, now: "PositionRecord") -> list[str]:
        """Say in which ways this run's data are others than those of the checkpoint, and what to do; [] if none."""
        remedies = {
            "n": ("has {} samples", "Read the same samples"),
            "dataset": ("is {!r}", "Read the same dataset"),
            "seed": ("is shuffled by the seed {}", "Pass that seed, or none"),
            "shuffle": ("has shuffle={}", "Shuffle as before"),
            "tail": ("has tail={!r}", "Pass the same tail"),
            "order_version": ("has order version {}", "Resume with the lightning_air that wrote it"),
        }
        found = []
        for name, (what, remedy) in remedies.items():
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                found.append(
                    f"In the checkpoint the data {what.format(before)}; now it {what.format(after)}. {remedy}."
                )
        return found


def checked_tail(tail: Any) -> Tail:
    """Return the option `tail`.

    Raises:
        ValueError: If it is none of the three.
    """
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(map(repr, TAILS))}, got {tail!r}.")
    return cast("Tail", tail)
