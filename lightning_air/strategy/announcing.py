"""When a failure is announced to the other ranks: once a run, before any callback hears of it, and between runs too.

After it this rank is alone: nobody joins its collectives any more, until it begins another run.
"""

from collections.abc import Callable

import torch.distributed as dist

from lightning_air.strategy.failure import FailureWatch
from lightning_air.strategy.world import World, current_world


class Announcer:
    """What one strategy does about failures, its own rank's and the others', run after run.

    Args:
        abort: Ends the collectives that this process hangs in.

    Attributes:
        has_failed: Whether this rank has failed in the run that began last.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.has_failed = False
        self._has_announced = False  # since the last run has ended, or in the one that is on
        self._abort = abort
        self._watch: FailureWatch | None = None

    def begin(self) -> None:
        """Forget the failure of the run before."""
        self.has_failed = False

    def open(self, world: World) -> None:
        """Watch for the failures of others from now on, until `close`.

        Raises:
            RuntimeError: If a rank has failed that will not come.
        """
        self._watch = FailureWatch(world, abort=self._abort)
        self._watch.start()
        self._watch.raise_if_another_failed()

    def raise_if_another_failed(self) -> None:
        """Raise `RuntimeError` with the first rank's error, if another rank has failed. Costs two attribute reads."""
        if self._watch is not None:
            self._watch.raise_if_another_failed()

    def announce(self, exception: BaseException) -> None:
        """Tell the other ranks of an exception that they do not share. Idempotent."""
        if self._has_announced or not self._has_others():
            return
        self._has_announced = self.has_failed = True
        watch, world = self._watch, current_world()
        if watch is None and world is not None:  # between two runs: it meets the others' watches in their next one
            watch = FailureWatch(world, abort=self._abort)
        if watch is not None:
            watch.on_exception(exception)

    def close(self) -> None:
        """End the watch, and the run. Idempotent."""
        self._has_announced = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _has_others(self) -> bool:
        # An aborted group is no longer initialized.
        return self._watch is not None or (dist.is_initialized() and dist.get_world_size() > 1)
