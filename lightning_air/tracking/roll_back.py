"""A run that goes on from an earlier step than it had reached: its last values are to be the latest ones all the same.

The server shows the value at the highest step as a metric's latest. After a roll-back that is a value of the abandoned
part, until training has passed it. Where it never does, the last value is said again at that step when the run ends.
"""

from collections.abc import Mapping
from typing import Any

from lightning_air.tracking.points import Point


class RollBack:
    """What had been reached, and what is not so far yet.

    Args:
        step: The last one that still counts.

    Attributes:
        step: The same.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._reached: dict[str, int] = {}
        self._behind: dict[str, Point] = {}
        self._num_charged = 0

    def reach(self, steps: Mapping[str, int]) -> None:
        """Note the steps that keys have values of, as far as these no longer count."""
        for key, step in steps.items():
            if step > self.step:
                self._reached[key] = max(step, self._reached.get(key, step))

    def note(self, point: Point) -> None:
        """Note a point that is sent."""
        reached = self._reached.get(point.key)
        if reached is None:
            return
        if point.step < reached:
            self._behind[point.key] = point
        else:
            self._behind.pop(point.key, None)

    def say_again(self) -> list[Point]:
        """Return the last points of the keys that are behind, at the steps that these had reached; each once."""
        points = [point._replace(step=self._reached[key]) for key, point in self._behind.items()]
        self._num_charged -= len(points)
        self._behind = {}
        return points

    def due(self) -> int:
        """Return how many points are to be charged, so that all keys could be said again; and take them as charged."""
        num_due = len(self._reached) - self._num_charged
        self._num_charged = len(self._reached)
        return num_due

    def snapshot(self) -> dict[str, Any]:
        """Return its state, as JSON can have it."""
        return {
            "step": self.step,
            "reached": dict(self._reached),
            "behind": [list(point) for point in self._behind.values()],
            "charged": self._num_charged,
        }

    @classmethod
    def from_snapshot(cls, snapshot: Mapping[str, Any]) -> "RollBack":
        """Return one that goes on as that of which the snapshot is."""
        made = cls(snapshot["step"])
        made._reached, made._num_charged = dict(snapshot["reached"]), snapshot["charged"]
        made._behind = {values[0]: Point(*values) for values in snapshot["behind"]}
        return made
