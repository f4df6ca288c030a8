"""Keep a run's high-water mark ahead of its points: before any is sent, the run says that it may have so many."""

from lightning_air.tracking.budget import Mark
from lightning_air.tracking.door import Door
from lightning_air.tracking.run_tags import TAG_PREFIX

MARK_TAG = f"{TAG_PREFIX}metric_steps"
"""Points charged to the run, rounded up: what an attempt that knows nothing else goes on from."""


class Charge:
    """A writer's `before_send`. On its thread.

    Args:
        door: To the server.
        run_id: Of the run.
        spent: Points that the run may have beside those that are sent of the spool.
        mark: What the run's tag says.
        cap: Points that the run may have in all.
    """

    def __init__(self, door: Door, run_id: str, *, spent: int, mark: int, cap: int) -> None:
        self._door = door
        self._run_id = run_id
        self._spent = spent
        self._mark = Mark(cap, value=mark)

    @property
    def mark(self) -> int:
        """What the run's tag says; never less than the points charged."""
        return self._mark.value

    def __call__(self, num_points: int) -> None:
        """Raise the mark if so many points of the spool would pass it; raises what the server does."""
        to = self._mark.needs_raise(self._spent + num_points)
        if to is not None:
            self._door.set_tag(self._run_id, MARK_TAG, str(to))
            self._mark.raised(to)


def mark_of(tag: str | None) -> int:
    """Return what a run's tag says; 0 if it has none."""
    return int(tag) if tag is not None and tag.isdecimal() else 0
