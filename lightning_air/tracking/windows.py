"""The open windows of some metrics: what was logged in them, and the points that they become.

Each metric has a window of its own. It closes when a value of that metric is logged beyond its end, or before the last
one (a run that went back to an earlier step; a metric with an axis of its own does not disturb the others). The windows
of metrics that have gone quiet are swept up.

Not a number and infinite values are kept out of the aggregates. They are counted per window, and become the point
`nonfinite/<name>` and events.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_air.tracking.metric_names import NONFINITE, plain_key
from lightning_air.tracking.points import Point
from lightning_air.tracking.strides import Strides
from lightning_air.tracking.window import SCALE, Aggregate, Event, Window

MAX_EVENTS_PER_METRIC = 5


class Windows:
    """The windows of all metrics that share their strides. One thread's.

    Attributes:
        strides: Where windows end, and what is left for them.
        key_of: Gives a metric's aspect its key, as `plain_key` does.
        ask_for_more: Called when nothing is left for a window; returns whether there is more now.
        events: Of values that are not finite; whoever takes them clears the list.
        num_windows: Windows that became points.
        num_thinned: Values that such a window held beside its first.
        num_dropped: Values that no point stands for, since none was left.
    """

    def __init__(self, strides: Strides, aggregates: tuple[Aggregate, ...]) -> None:
        self.strides = strides
        self.key_of: Callable[[str, str], str] = plain_key
        self.ask_for_more: Callable[[], bool] = lambda: False
        self.events: list[Event] = []
        self.num_windows = self.num_thinned = self.num_dropped = 0
        self._first, *self._others = aggregates
        self._has_extremes = not {"min", "max"}.isdisjoint(aggregates)
        self._windows: dict[str, Window] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._windows)

    def __contains__(self, key: str) -> bool:
        return key in self._windows

    @property
    def num_pending(self) -> int:
        """Values in open windows."""
        return sum(window.num_values for window in self._windows.values())

    def register(self, keys: Iterable[str], step: int) -> None:
        """Make metrics known, all of a record before their first window, so that one plan is made for all."""
        for key in keys:
            self._windows[key] = Window(key, step)
        self._weigh()

    def add(
        self, values: Iterable[tuple[str, float]], step: int, timestamp_ms: int, points: list[Point]
    ) -> list[tuple[str, float]]:
        """Put values into their windows.

        Args:
            values: By metric.
            step: At which they were logged.
            timestamp_ms: When they were.
            points: Takes the points of windows that close.

        Returns:
            The values of metrics that are not known here.
        """
        others: list[tuple[str, float]] = []
        window_of, has_extremes = self._windows.get, self._has_extremes
        for key, value in values:
            window = window_of(key)
            if window is None:
                others.append((key, value))
                continue
            if not window.step <= step < window.end:
                if window.count or window.num_nonfinite:
                    self._close(window, points)
                if not self._open(window, step):
                    continue
            window.step = step
            window.timestamp_ms = timestamp_ms
            if value - value != 0.0:
                self._add_nonfinite(window, value)
                continue
            window.count += 1
            window.total += value * SCALE
            window.last = value
            if has_extremes:
                window.low = min(window.low, value)
                window.high = max(window.high, value)
        return others

    def close(self, key: str, points: list[Point]) -> None:
        """Close a metric's window now."""
        window = self._windows[key]
        if window.num_values:
            self._close(window, points)

    def close_all(self, points: list[Point]) -> None:
        """Close all windows now, in the order in which the metrics appeared."""
        for key in self._windows:
            self.close(key, points)

    def forget_shown(self, latest: Mapping[str, tuple[int, int]]) -> None:
        """Empty the windows that are shown already, with what followed in them.

        Args:
            latest: Time in ms and step of the latest value that is shown of each key.
        """
        for window in self._windows.values():
            now = (window.timestamp_ms, window.step)
            aspect = "" if window.count else NONFINITE
            if window.num_values and now < latest.get(self.key_of(window.key, aspect), now):
                self.strides.refund(self.strides.points_per_window)
                self.num_thinned += window.num_values
                window.empty()

    def sweep(self, step: int, before_ms: int, points: list[Point]) -> None:
        """Close the windows that a step lies beyond, or before, if nothing was logged in them since a time."""
        for window in self._windows.values():
            is_idle = window.timestamp_ms < before_ms and window.num_values
            if is_idle and not window.step <= step < window.end:
                self._close(window, points)

    def snapshot(self) -> dict[str, Any]:
        """Return its state, as JSON can have it."""
        return {
            "strides": self.strides.snapshot(),
            "windows": {key: window.snapshot() for key, window in self._windows.items()},
            "events": [list(event) for event in self.events],
            "counts": [self.num_windows, self.num_thinned, self.num_dropped],
        }

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any], aggregates: tuple[Aggregate, ...]) -> "Windows":
        """Return windows that go on as those of which the snapshot is."""
        windows = cls(Strides.from_snapshot(snapshot["strides"]), aggregates)
        for key, state in snapshot["windows"].items():
            windows._windows[key] = Window(key, 0)
            windows._windows[key].restore(state)
        windows._weigh()
        windows.events = [Event(*event) for event in snapshot["events"]]
        windows.num_windows, windows.num_thinned, windows.num_dropped = snapshot["counts"]
        return windows

    def _open(self, window: Window, step: int) -> bool:
        strides = self.strides
        if step >= strides.stop:
            self._retire(strides.start)
        if not window.is_active:
            window.is_active = True
            self._set_weight(self._weight + self._weight_of(window))
        end = strides.open(step)
        if end is None and self.ask_for_more():
            end = strides.open(step)
        if end is None:
            self.num_dropped += 1
            window.step = window.end = step
            return False
        window.end = end
        return True

    def _close(self, window: Window, points: list[Point]) -> None:
        step, timestamp_ms, count = window.step, window.timestamp_ms, window.count
        if count:
            points.append(Point(self.key_of(window.key, ""), window.aggregate(self._first), timestamp_ms, step))
            if self._others:
                points += [
                    Point(self.key_of(window.key, aggregate), window.aggregate(aggregate), timestamp_ms, step)
                    for aggregate in self._others
                ]
        else:
            self.strides.refund(self.strides.points_per_window - 1)
        if num_nonfinite := window.num_nonfinite:
            # A window of nothing else has paid for this point.
            if not count or self.strides.charge_one(step):
                key = self.key_of(window.key, NONFINITE)
                points.append(Point(key, float(num_nonfinite), timestamp_ms, step))
                count += num_nonfinite
            else:
                self.num_dropped += num_nonfinite
        self.num_windows += 1
        self.num_thinned += count - 1
        window.empty()

    def _add_nonfinite(self, window: Window, value: float) -> None:
        window.num_nonfinite += 1
        window.num_events += 1
        if window.num_events <= MAX_EVENTS_PER_METRIC:
            self.events.append(Event(window.key, window.step, window.timestamp_ms, str(float(value))))
        if window.num_events == 1:
            self._set_weight(self._weight + 1)

    def _retire(self, since: int) -> None:
        """Leave metrics out of the plan that logged nothing in all of the octave that is over."""
        for window in self._windows.values():
            window.is_active = window.step >= since
        self._weigh()

    def _weigh(self) -> None:
        self._set_weight(sum(self._weight_of(window) for window in self._windows.values() if window.is_active))

    def _weight_of(self, window: Window) -> int:
        return self.strides.points_per_window + (window.num_events > 0)

    def _set_weight(self, weight: int) -> None:
        self._weight = weight
        self.strides.set_weight(weight)
