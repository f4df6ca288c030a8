"""Which names of metrics the server refuses, so that it is not asked about them again and again."""

from collections.abc import Iterable

from lightning_air.tracking.points import Point

_TIMES = 3


class Refusals:
    """Remembers why points were refused, by their names. A name is bad once that happened three times in a row."""

    def __init__(self) -> None:
        self._by_key: dict[str, tuple[int, str]] = {}

    def is_bad(self, point: Point) -> bool:
        """Return whether there is no use in asking."""
        return bool(self._by_key) and self._by_key.get(point.key, (0, ""))[0] >= _TIMES

    def reason(self, point: Point) -> str:
        """Return why the server refused the last point of this name."""
        return self._by_key[point.key][1]

    def refused(self, point: Point, reason: str) -> None:
        """Note that a point was refused alone."""
        self._by_key[point.key] = self._by_key.get(point.key, (0, ""))[0] + 1, reason

    def stored(self, points: Iterable[Point]) -> None:
        """Note that points were stored."""
        if self._by_key:
            for point in points:
                self._by_key.pop(point.key, None)
