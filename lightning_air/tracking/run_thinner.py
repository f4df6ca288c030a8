"""The thinner of one run: its points under the server's keys, over all attempts that log into the run from one spool.

What an earlier process has left is thinned as that process would have done it, so that the server knows the points that
it has already. Behind it the thinner of the present attempt takes over, with its options, and with what is left of the
budget after all that any writer may have sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_air.tracking.metric_names import MetricNames
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.roll_back import RollBack
from lightning_air.tracking.thinning import Counts, Thinner
from lightning_air.tracking.window import Event

_VERSION = 2


@dataclass(kw_only=True)
class _Follower:
    """A thinner that takes over.

    Attributes:
        thinner: New.
        prefix: Put before each name.
        after: Records until then.
    """

    thinner: Thinner
    prefix: str
    after: int


class RunThinner:
    """Thins what one run logs, and names it. One thread's.

    Args:
        thinner: Knows the names as they were logged, so that its patterns are the user's.
        prefix: Put before each name, as Lightning's `prefix`.

    Attributes:
        thinner: The one at work.
        prefix: Its.
    """

    def __init__(self, thinner: Thinner, *, prefix: str = "") -> None:
        self._followers: list[_Follower] = []
        self._events: list[Event] = []
        self._past = Counts()
        self._elsewhere = thinner.spent  # points that the run may have beside those made here
        self._num_made = 0
        self._highest: dict[str, int] = {}  # step of each key
        self._shown: dict[str, tuple[int, int]] = {}
        self._roll_back: RollBack | None = None
        self._set(thinner, prefix)

    def _set(self, thinner: Thinner, prefix: str) -> None:
        self.thinner, self.prefix = thinner, prefix
        self._names = MetricNames(prefix)
        thinner.name_by(self._names.key)

    @property
    def newest(self) -> Thinner:
        """The present attempt's, which may be still to take over."""
        return self._followers[-1].thinner if self._followers else self.thinner

    @property
    def counts(self) -> Counts:
        """What became of the values, over all attempts."""
        return self._past.plus(self.thinner.counts)

    def add(self, record: Record) -> list[Point]:
        """Take a record, and return the points that are complete by it."""
        points = self._hand_over_if_due()
        for follower in self._followers:
            follower.after -= 1
        return points + self._noted(self.thinner.add(record))

    def flush(self) -> list[Point]:
        """Close all windows, as at the end of a run, and return their points."""
        points = self._hand_over_if_due() + self._close()
        if self._roll_back is not None:
            again = self._roll_back.say_again()
            self._num_made += len(again)
            points += again
            self._charge_roll_back()  # for the next end
        return points

    def take_events(self) -> list[Event]:
        """Return the values that were not finite since the last call, by the name that they were logged under."""
        events, self._events = self._events, []
        return events + self.thinner.take_events()

    def take_renamed(self) -> dict[str, str]:
        """Return what got another key than its name since the last call, with the key."""
        return self._names.take_renamed()

    # ---- attempts ----------------------------------------------------------------------------------------------------

    def hand_over(self, new: "RunThinner", *, after: int, elsewhere: int) -> None:
        """Let the thinner of a new attempt take over behind the records of the attempts so far.

        Args:
            new: Has not seen a record.
            after: Records of the attempts so far that are still to come.
            elsewhere: Points that the run may have beside those made here.
        """
        self._followers.append(_Follower(thinner=new.thinner, prefix=new.prefix, after=after))
        self.spend_elsewhere(elsewhere)

    def spend_elsewhere(self, num_points: int) -> None:
        """Say how many points the run may have beside those made here; fewer than before changes nothing."""
        grown = num_points - self._elsewhere
        if grown > 0:
            self._elsewhere = num_points
            # What an earlier attempt has left must become the points that the server may have of it already.
            if not self._followers:
                self.thinner.spend(grown)

    def begin_anew(self) -> None:
        """Count from here on: in a new spool, nothing of which is made yet."""
        now = self.thinner.counts
        self._past = Counts(logged=now.pending, pending=now.pending).minus(now)
        self._num_made = 0

    def continue_elsewhere(self, shown: Mapping[str, tuple[int, int]]) -> None:
        """Go on from a checkpoint's snapshot, though the attempt that took it may have gone on too.

        Args:
            shown: Time in ms and step of the latest value that the server shows of each key. A window that is open at
                the end and older than that is a part of one that the other attempt has closed and sent: no point.
        """
        self.begin_anew()
        self._shown = dict(shown)

    def roll_back(self, step: int, beyond: Mapping[str, int]) -> None:
        """Go on from an earlier step than was reached.

        Args:
            step: The last one that still counts.
            beyond: Keys to the later steps that the server has values of. What is left here needs no mention.
        """
        if self._roll_back is None:
            self._roll_back = RollBack(step)
        self._roll_back.step = step
        self._roll_back.reach(beyond)
        if not self._followers:  # else all is known once they take over
            self._roll_back.reach(self._highest)
            self._charge_roll_back()

    # ---- its state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return its whole state, as JSON can have it."""
        return {
            "version": _VERSION,
            "prefix": self.prefix,
            "names": self._names.snapshot(),
            "events": [list(event) for event in self._events],
            "followers": [vars(follower) | {"thinner": follower.thinner.snapshot()} for follower in self._followers],
            "past": list(self._past),
            "elsewhere": self._elsewhere,
            "made": self._num_made,
            "highest": dict(self._highest),
            "shown": {key: list(latest) for key, latest in self._shown.items()},
            "roll_back": None if self._roll_back is None else self._roll_back.snapshot(),
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
        made._names.restore(snapshot["names"])
        made._events = [Event(*event) for event in snapshot["events"]]
        made._followers = [
            _Follower(**follower | {"thinner": Thinner.from_snapshot(follower["thinner"])})
            for follower in snapshot["followers"]
        ]
        made._past = Counts(*snapshot["past"])
        made._elsewhere, made._num_made = snapshot["elsewhere"], snapshot["made"]
        made._highest = dict(snapshot["highest"])
        made._shown = {key: (timestamp_ms, step) for key, (timestamp_ms, step) in snapshot["shown"].items()}
        if snapshot["roll_back"] is not None:
            made._roll_back = RollBack.from_snapshot(snapshot["roll_back"])
        return made

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _close(self) -> list[Point]:
        shown, self._shown = self._shown, {}
        self.thinner.forget_shown(shown)
        return self._noted(self.thinner.flush())

    def _noted(self, points: list[Point]) -> list[Point]:
        self._num_made += len(points)
        for point in points:
            if point.step > self._highest.get(point.key, point.step - 1):
                self._highest[point.key] = point.step
            if self._roll_back is not None:
                self._roll_back.note(point)
        return points

    def _hand_over_if_due(self) -> list[Point]:
        points: list[Point] = []
        while self._followers and self._followers[0].after <= 0:
            points += self._close()
            self._events += self.thinner.take_events()
            self._past = self._past.plus(self.thinner.counts)
            used = max(self.thinner.used, self._elsewhere + self._num_made)
            follower = self._followers.pop(0)
            if follower.prefix == self.prefix:
                self.thinner = follower.thinner
                self.thinner.name_by(self._names.key)
            else:
                self._set(follower.thinner, follower.prefix)
            self.thinner.spend(used - self.thinner.used)
            if self._roll_back is not None and not self._followers:
                self._roll_back.reach(self._highest)
                self._charge_roll_back()
        return points

    def _charge_roll_back(self) -> None:
        if self._roll_back is not None:
            self.thinner.spend(self._roll_back.due())
