"""What flows through the tracker: records as they were logged, and points as the server gets them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Record:
    """One call of `log_metrics`.

    Attributes:
        timestamp_ms: When, in milliseconds since 1970.
        step: On the horizontal axis, as Lightning counts: batches after which an optimizer stepped.
        values: By the metric's name as it was logged; not a number and infinite ones too.
    """

    timestamp_ms: int
    step: int
    values: Mapping[str, float]


class Point(NamedTuple):
    """One point of one curve; what the platform counts as one metric step.

    Attributes:
        key: The metric's name as the server takes it.
        value: A finite number.
        timestamp_ms: Milliseconds since 1970. With the other fields it is what the server knows a point by, so that
            sending one again changes nothing.
        step: On the horizontal axis.
    """

    key: str
    value: float
    timestamp_ms: int
    step: int
