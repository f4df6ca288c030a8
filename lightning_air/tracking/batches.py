"""Cut points into batches that a server takes."""

from collections.abc import Iterator, Sequence

from lightning_air.tracking.points import Point
from lightning_air.tracking.rest_door import point_bytes

MAX_POINTS = 1_000
MAX_BYTES = 1_000_000
"""Of the request's JSON; both limits are MLflow's."""

_FRAME_BYTES = 1_000  # the run's id, and what stands around the points


def batches_of(
    points: Sequence[Point], *, max_points: int = MAX_POINTS, max_bytes: int = MAX_BYTES
) -> Iterator[Sequence[Point]]:
    """Yield the points in order, as many at a time as fit; a point too large for any batch is one of its own."""
    begin, num_bytes = 0, _FRAME_BYTES
    for index, point in enumerate(points):
        size = point_bytes(point)
        if index > begin and (index - begin >= max_points or num_bytes + size > max_bytes):
            yield points[begin:index]
            begin, num_bytes = index, _FRAME_BYTES
        num_bytes += size
    if begin < len(points):
        yield points[begin:]
