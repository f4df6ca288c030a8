"""The thinner of one run: its points under the server's keys, over all attempts that log into the run.

What an earlier attempt has left is thinned as that attempt would have done it, so that the server knows the points that
it has already. Behind it the thinner of the present attempt takes over, with its options, and with what is left of the
budget after all that any machine may have sent.

The server shows the value at the highest step as a metric's latest. After a roll-back (a continued run resumes at an
earlier step than it had reached) that is a value of the abandoned part, until training has passed it. Where it never
does, the last value is said again at that step when the run ends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_air.tracking.metric_names import MetricNames
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.thinning import Thinner
from lightning_air.tracking.window import Event

_VERSION = 1


@dataclass(kw_only=True)
class _Follower:
    """A thinner that takes over.

    Attributes:
        thinner: Of a new attempt.
        after: Records until then.
        spent: Points that the run may have by now.
    """

    thinner: "RunThinner"
    after: int
    spent: int


class RunThinner:
    """Thins what one run logs, and names it. One thread's.

    Args:
        thinner: Works with the names as they were logged, so that its patterns are the user's.
        prefix: Put before each name, as Lightning's `prefix`.

    Attributes:
        thinner: The one at work.
        prefix: Its.
    """

    def __init__(self, thinner: Thinner, *, prefix: str = "") -> None:
        self.thinner = thinner
        self.prefix = prefix
        self._names = MetricNames(prefix)
        self._events: list[Event] = []
        self._followers: list[_Follower] = []
        self._highest: dict[str, int] = {}  # step of each name, in the order in which they got their keys
        self._reached: dict[str, int] = {}  # step of each key, by the end of earlier attempts
        self._behind: dict[str, Point] = {}  # the last point of each key that is not so far yet

    @property
    def used(self) -> int:
        """Points charged so far, with those that may be said again at the end."""
        return self.thinner.used

    @property
    def newest(self) -> "RunThinner":
        """The present attempt's, which may be still to take over."""
        return self._followers[-1].thinner if self._followers else self

    def add(self, record: Record) -> list[Point]:
        """Take a record, and return the points that are complete by it."""
        points = self._hand_over_if_due()
        for follower in self._followers:
            follower.after -= 1
        return points + self._counted(self._named(self.thinner.add(record)))

    def flush(self) -> list[Point]:
        """Close all windows, as at the end of a run, and return their points."""
        points = self._hand_over_if_due()
        points += self._counted(self._named(self.thinner.flush()))
        if self._behind and self.thinner.used <= self.thinner.cap:
            points += [point._replace(step=self._reached[key]) for key, point in self._behind.items()]
            self._spend(len(self._behind))  # for the next end
            self._behind = {}
        return points

    def take_events(self) -> list[Event]:
        """Return the values that were not finite since the last call, by the name that they were logged under."""
        events, self._events = self._events, []
        return events + self.thinner.take_events()

    def take_renamed(self) -> dict[str, str]:
        """Return the names that the server does not take, with their keys, since the last call."""
        return self._names.take_renamed()

    # ---- attempts ----------------------------------------------------------------------------------------------------

    def hand_over(self, thinner: "RunThinner", *, after: int, spent: int) -> None:
        """Let the thinner of a new attempt take over behind the records of the attempts so far.

        Args:
            thinner: New.
            after: Records of the attempts so far that are still to come.
            spent: Points that the run may have by now.
        """
        self._followers.append(_Follower(thinner=thinner.newest, after=after, spent=spent))

    def roll_back(self, beyond: Mapping[str, int]) -> None:
        """Go on from an earlier step than these keys have values of on the server."""
        num_reached = len(self._reached)
        self._reach(beyond)
        if not self._followers:  # who takes over is charged for all of them
            self._spend(len(self._reached) - num_reached)

    # ---- its state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return its whole state, as JSON can have it."""
        return {
            "version": _VERSION,
            "prefix": self.prefix,
            "events": [list(event) for event in self._events],
            "followers": [vars(follower) | {"thinner": follower.thinner.snapshot()} for follower in self._followers],
            "highest": dict(self._highest),
            "reached": dict(self._reached),
            "behind": [list(point) for point in self._behind.values()],
            "thinner": self.thinner.snapshot(),
        }

    @classmethod
    def from_snapshot(cls, snapshot: Mapping[str, Any]) -> "RunThinner":
        """Return one that goes on as that of which the snapshot is.

        Raises:
            ValueError: If the snapshot is of another version.
        """
        if snapshot.get("version") != _VERSION:
            raise ValueError(f"the snapshot must be of version {_VERSION}, got {snapshot.get('version')!r}.")
        made = cls(Thinner.from_snapshot(snapshot["thinner"]), prefix=snapshot["prefix"])
        made._highest, made._reached = dict(snapshot["highest"]), dict(snapshot["reached"])
        for name in made._highest:
            made._names.key(name)
        made._behind = {values[0]: Point(*values) for values in snapshot["behind"]}
        made._events = [Event(*event) for event in snapshot["events"]]
        made._followers = [
            _Follower(**follower | {"thinner": cls.from_snapshot(follower["thinner"])})
            for follower in snapshot["followers"]
        ]
        return made

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _named(self, points: Iterable[Point]) -> list[Point]:
        named = []
        for point in points:
            name, step = point.key, point.step
            if step > self._highest.get(name, step - 1):
                self._highest[name] = step
            point = point._replace(key=self._names.key(name))  # noqa: PLW2901
            if point.key in self._reached:
                if step < self._reached[point.key]:
                    self._behind[point.key] = point
                else:
                    self._behind.pop(point.key, None)
            named.append(point)
        return named

    def _counted(self, points: list[Point]) -> list[Point]:
        """Return the points that earlier attempts may have beside all that other machines may have sent."""
        if self._followers:
            points = points[: max(0, self.thinner.cap - self._followers[-1].spent)]
        for follower in self._followers:
            follower.spent += len(points)
        return points

    def _hand_over_if_due(self) -> list[Point]:
        points: list[Point] = []
        while self._followers and self._followers[0].after <= 0:
            points += self._counted(self._named(self.thinner.flush()))
            follower = self._followers.pop(0)
            self._events += self.thinner.take_events()
            self._reach({self._names.key(name): step for name, step in self._highest.items()})
            self.thinner = follower.thinner.thinner
            if follower.thinner.prefix != self.prefix:
                self.prefix = follower.thinner.prefix
                self._names, self._highest = MetricNames(self.prefix), {}
            self._spend(follower.spent + len(self._reached) - self.thinner.used)
        return points

    def _reach(self, steps: Mapping[str, int]) -> None:
        self._reached |= {key: max(step, self._reached.get(key, step)) for key, step in steps.items()}

    def _spend(self, num_points: int) -> None:
        """Charge points that the thinner has not made."""
        if num_points > 0:
            snapshot = self.thinner.snapshot()
            snapshot["budget"]["spent"] += num_points
            self.thinner = Thinner.from_snapshot(snapshot)
            self.thinner.set_system(snapshot["budget"]["system"])  # it counts anew what is left
