"""Small parts that the tests of the writer share: thinners, a server that is a list, and time that only pauses move."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_air.tracking.door_errors import DoorError, Refused
from lightning_air.tracking.points import Point, Record
from lightning_air.tracking.thinning import Counts


class PassThrough:
    """Every value is a point."""

    counts = Counts()

    def add(self, record: Record) -> list[Point]:
        return [Point(key, value, record.timestamp_ms, record.step) for key, value in record.values.items()]

    def flush(self) -> list[Point]:
        return []

    def snapshot(self) -> dict[str, Any]:
        return {}


class Windows:
    """One point, the mean, of each three values of a metric; so a wrong snapshot gives wrong points."""

    counts = Counts()

    def __init__(self, snapshot: Mapping[str, Any] | None = None) -> None:
        self.open: dict[str, list[list[float]]] = json.loads(json.dumps(dict(snapshot or {})))

    def add(self, record: Record) -> list[Point]:
        points = []
        for key, value in record.values.items():
            window = self.open.setdefault(key, [])
            window.append([value, record.timestamp_ms, record.step])
            if len(window) == 3:
                points.append(self._close(key))
        return points

    def flush(self) -> list[Point]:
        return [self._close(key) for key in list(self.open)]

    def snapshot(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.open))

    def _close(self, key: str) -> Point:
        window = self.open.pop(key)
        return Point(key, sum(entry[0] for entry in window) / len(window), int(window[-1][1]), int(window[-1][2]))


class ListDoor:
    """A server that keeps each point once, and misbehaves as told.

    Args:
        bad_keys: It refuses every batch that holds one.
        trouble: Called before anything is stored; it may raise.
    """

    def __init__(self, bad_keys: Sequence[str] = (), trouble: Callable[[int], object] = lambda _: None) -> None:
        self.bad_keys = bad_keys
        self.trouble = trouble
        self.stored: dict[Point, None] = {}
        self.tags: dict[str, str] = {}
        self.batches: list[list[Point]] = []
        self.timeouts: list[float] = []
        self.refuses_all: str | None = None

    def log_batch(self, run_id: str, points: Sequence[Point], *, timeout_seconds: float = 30.0) -> None:
        self.batches.append(list(points))
        self.timeouts.append(timeout_seconds)
        self.trouble(len(self.batches))
        if self.refuses_all is not None:
            raise Refused(self.refuses_all, blames_content=True)
        for point in points:
            if point.key in self.bad_keys:
                raise Refused(f"bad name {point.key!r}", blames_content=True)
        self.stored.update(dict.fromkeys(points))

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = 30.0) -> None:
        self.tags[key] = value
        if self.refuses_all is not None:
            raise Refused(self.refuses_all, blames_content=True)

    def get_tags(self, run_id: str, *, timeout_seconds: float = 30.0) -> dict[str, str]:
        return dict(self.tags)


class FakeTime:
    """A clock that only waiting moves, unless told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.now += seconds
        return event.is_set()


class Warnings(list):
    """A `Warn` that keeps what it is told, as (kind, message)."""

    def __call__(self, kind: str, message: str) -> None:
        self.append((kind, message))

    @property
    def text(self) -> str:
        return "\n".join(message for _, message in self)


def failing(error: DoorError, *, times: int) -> Callable[[int], None]:
    """Return a `trouble` that happens to so many requests."""

    def trouble(number: int) -> None:
        if number <= times:
            raise error

    return trouble
