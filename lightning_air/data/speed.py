"""How fast samples go, and how long the training waits for them."""

import time
from collections.abc import Callable


class DataSpeed:
    """Counts samples and batches between two looks."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._since = self._clock()
        self._num_samples = self._num_steps = 0

    def count(self, num_samples: int) -> None:
        """Note the samples, of all ranks, that an optimizer step has used."""
        self._num_samples += num_samples
        self._num_steps += 1

    def take(self, waited_seconds: float) -> dict[str, float]:
        """Return the metrics since the last look, and begin anew.

        Args:
            waited_seconds: For data, since then.

        Returns:
            Samples per second, and seconds of waiting per optimizer step.
        """
        seconds = max(self._clock() - self._since, 1e-9)
        metrics = {
            "data/samples_per_second": self._num_samples / seconds,
            "data/wait_seconds": waited_seconds / max(self._num_steps, 1),
        }
        self.start()
        return metrics
