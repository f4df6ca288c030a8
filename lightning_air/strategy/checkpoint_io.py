"""What a CheckpointIO must offer to be called on every rank.

Lightning calls a CheckpointIO on rank 0 only under DDP, and never under FSDP. An IO in which every rank writes its own
share declares `collective = True`; then AirStrategy calls it on every rank, for saving, loading and removing.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeGuard

from torch import Tensor

from lightning_air._lightning import CheckpointIO, PathLike

# Where a collective IO looks, in the checkpoint that it is given, for what only a strategy knows.
NOTES_KEY = "lightning_air"


class CollectiveCheckpointIO(Protocol):
    """A CheckpointIO whose methods every rank calls, at the same point and with the same path."""

    collective: Literal[True]

    def connect(self, sharding: str) -> None:
        """Meet the other ranks. Collective: every rank calls this once the process group stands, before all else.

        Args:
            sharding: "ddp", "fsdp" or "hsdp".
        """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Save. Collective: every rank calls this.

        Args:
            checkpoint: Under fsdp and hsdp the tensors of `state_dict` and `optimizer_states` are DTensors; under ddp
                every rank holds the same values. `optimizer_states` are as `Optimizer.state_dict` makes them;
                `checkpoint["lightning_air"]["parameter_names"]` has, for each optimizer and each of its groups, the
                names of the parameters.
            path: The same on every rank.
            storage_options: Passed through from `Trainer.save_checkpoint`.
        """

    def load_checkpoint(
        self,
        path: PathLike,
        map_location: Any | None = None,
        weights_only: bool | None = None,
        *,
        state: dict[str, Any] | None = None,
        like: Callable[[str, tuple[int, ...]], Tensor | None] | None = None,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Load. Collective: every rank calls this.

        Args:
            path: The same on every rank.
            map_location: As for `torch.load`.
            weights_only: As for `torch.load`.
            state: Under fsdp and hsdp: `{"state_dict": …, "optimizer_0": …}` with the sharded tensors to fill in
                place; optimizer states are keyed by parameter name. Then what is returned holds everything else.
            like: With `state`: given the last key and the shape of a further large tensor, the tensor to load it into,
                or None for a whole one in host memory.
            strict: With `state`: whether the checkpoint must hold exactly the weights of `state["state_dict"]`. If not,
                those that it lacks stay as they are, and those that are not in the state are left out.

        Returns:
            The checkpoint, without what was filled in place.
        """

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove. Collective: every rank calls this."""

    def teardown(self) -> None:
        """End the IO's work. Called on every rank, also after an exception. Idempotent."""


def is_collective(io: CheckpointIO | CollectiveCheckpointIO) -> TypeGuard[CollectiveCheckpointIO]:
    """Return whether the IO asks to be called on every rank."""
    return getattr(io, "collective", False) is True
