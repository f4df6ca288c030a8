"""How a stretch of the global order is dealt out to ranks: pure arithmetic on positions.

Each micro-step takes the next `num_replicas * batch_size` positions, whatever these are, so that an epoch which changes
them in its middle still goes through one order. The last micro-step takes what is left.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Tail = Literal["drop", "pad", "exact"]
TAILS: tuple[str, ...] = get_args(Tail)


def epoch_length(n: int, tail: Tail, global_batch: int) -> int:
    """Return how many positions an epoch has.

    Args:
        n: Samples in the dataset.
        tail: "drop": whole global batches only. "pad": the last one is filled up with the epoch's first samples.
            "exact": each sample once.
        global_batch: Samples per optimizer step: ranks x batch size x accumulation.
    """
    if tail == "exact":
        return n
    num_whole = n // global_batch if tail == "drop" else -(-n // global_batch)
    return num_whole * global_batch


@dataclass(frozen=True)
class Split:
    """The positions from `start` to `end`, micro-step by micro-step; within one, the ranks take turns.

    Where the last micro-step has too few positions, some ranks have one less than others, or none.
    """

    start: int
    end: int
    num_replicas: int
    batch_size: int

    @property
    def num_batches(self) -> int:
        """Micro-steps, which is also the number of batches of each rank."""
        return -(-(self.end - self.start) // (self.num_replicas * self.batch_size))

    def position_after(self, num_batches: int) -> int:
        """Return the first position that is not trained on after so many micro-steps."""
        return min(self.end, self.start + num_batches * self.num_replicas * self.batch_size)

    def num_positions(self, rank: int) -> int:
        """Return how many positions are a rank's."""
        return max(0, -(-(self.end - self.start - rank) // self.num_replicas))

    def positions(self, rank: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return a rank's positions number `first` to `last` (exclusive), as far as there are."""
        last = min(last, self.num_positions(rank))
        offset = self.start + rank
        return np.arange(offset + first * self.num_replicas, offset + last * self.num_replicas, self.num_replicas)

    def loss_weight(self, rank: int, batch: int, accumulate: int = 1) -> float:
        """Return by what a rank's mean loss counts, so that every sample of the optimizer's step counts the same.

        The step's gradient is the mean over ranks, and over `accumulate` batches even where the last step has fewer.
        1 in all whole steps; 0 for a rank that has no position.
        """
        first = batch - batch % accumulate
        whole = self.position_after(first + accumulate) - self.position_after(first)
        own = min(self.batch_size, self.num_positions(rank) - batch * self.batch_size)
        return max(0, own) * self.num_replicas * accumulate / whole
