"""The door to the tracking server or database: what the writer asks of it, behind any tracking URI."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.file_store import FileStore
from mlflow.store.tracking.rest_store import RestStore
from mlflow.tracking._tracking_service import utils

from lightning_air.tracking.door_errors import Unreachable, judge, one_line
from lightning_air.tracking.points import Point
from lightning_air.tracking.rest_door import REQUEST_SECONDS, RestDoor

logger = logging.getLogger(__name__)

_tracking_service: Any = utils  # it has no types


class Door(Protocol):
    """What the writer asks of a tracking server. One thread's."""

    def log_batch(self, run_id: str, points: Sequence[Point], *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Store points, all or none; those that are there already stay as they are.

        Raises:
            DoorError: If they are not known to be stored.
        """

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Set a tag of the run.

        Raises:
            DoorError: If it is not known to be set.
        """

    def get_tags(self, run_id: str, *, timeout_seconds: float = REQUEST_SECONDS) -> Mapping[str, str]:
        """Return all tags of the run.

        Raises:
            DoorError: If they are not known.
        """


def open_door(tracking_uri: str, *, clock: Callable[[], float] = time.monotonic) -> Door:
    """Return the door to the server or the database behind a tracking URI; nothing is opened before it is used."""
    return _LazyDoor(tracking_uri, clock)


class _LazyDoor:
    def __init__(self, tracking_uri: str, clock: Callable[[], float]) -> None:
        self._tracking_uri = tracking_uri
        self._clock = clock
        self._door: Door | None = None

    def log_batch(self, run_id: str, points: Sequence[Point], *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        self._open().log_batch(run_id, points, timeout_seconds=timeout_seconds)

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        self._open().set_tag(run_id, key, value, timeout_seconds=timeout_seconds)

    def get_tags(self, run_id: str, *, timeout_seconds: float = REQUEST_SECONDS) -> Mapping[str, str]:
        return self._open().get_tags(run_id, timeout_seconds=timeout_seconds)

    def _open(self) -> Door:
        if self._door is None:
            try:
                store = _tracking_service._get_store(self._tracking_uri)  # noqa: SLF001 - there is no public way
            except Exception as error:
                raise Unreachable(one_line(f"{self._tracking_uri} cannot be opened: {error}")) from error
            rest = isinstance(store, RestStore)
            if isinstance(store, FileStore):
                logger.warning(
                    "%s is a folder of files, which keeps points twice that have to be sent again, after a crash or an "
                    "error. A database keeps each once: tracking_uri='sqlite:///mlflow.db'.",
                    one_line(self._tracking_uri),
                )
            self._door = RestDoor(store.get_host_creds, self._clock) if rest else StoreDoor(store)
        return self._door


class StoreDoor:
    """A database that this process writes itself; its time limits are the store's own.

    MLflow's folder of files, where MLflow still allows it, keeps a point twice that is sent twice, as after a crash.

    Args:
        store: MLflow's.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def log_batch(self, run_id: str, points: Sequence[Point], *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Store points."""
        del timeout_seconds
        metrics = [Metric(key, float(value), timestamp_ms, step) for key, value, timestamp_ms, step in points]
        self._call(self._store.log_batch, run_id, metrics, [], [])

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Set a tag of the run."""
        del timeout_seconds
        self._call(self._store.set_tag, run_id, RunTag(key, value))

    def get_tags(self, run_id: str, *, timeout_seconds: float = REQUEST_SECONDS) -> Mapping[str, str]:
        """Return all tags of the run."""
        del timeout_seconds
        tags: Mapping[str, str] = self._call(self._store.get_run, run_id).data.tags
        return tags

    def _call(self, call: Callable[..., Any], *args: object) -> Any:
        try:
            return call(*args)
        except MlflowException as error:
            answer: Any = error  # its methods have no types
            judge(answer.get_http_status_code(), answer.serialize_as_json(), {})
            raise Unreachable(one_line(str(error))) from error
        except Exception as error:
            raise Unreachable(one_line(f"{type(error).__name__}: {error}")) from error
