"""What an error of an upload means: whether to try again, and how soon.

Uploads go through MLflow's client and the stores' own: each has its own errors for a network that is down, a server
that is busy, and a request that is refused.
"""

import errno
import http.client
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import requests
import urllib3
from mlflow.exceptions import MlflowException

from lightning_air.tracking.door_errors import Busy, DoorError, Refused, Unreachable, judge, one_line

_NETWORK = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
    requests.exceptions.JSONDecodeError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    socket.gaierror,
)
# The disk of a volume, or a full one.
_PASSING_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EDQUOT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOSPC,
    errno.ENOTCONN,
    errno.ESTALE,
}
# Of clients of stores that need not be installed: Azure's, AWS's, Databricks'.
_PASSING_NAMES = {
    "DeadlineExceeded",
    "EndpointConnectionError",
    "InternalError",
    "ResourceExhausted",
    "ServiceRequestError",
    "ServiceResponseError",
    "TemporarilyUnavailable",
    "TooManyRequests",
}


def trouble_of(error: Exception) -> DoorError:
    """Return what the error of an upload means: `Refused` where to try again is of no use.

    Args:
        error: MLflow's, of the libraries below it, of the disk, or any other: that is refused.
    """
    reason = one_line(f"{type(error).__name__}: {error}")
    for each in _chain(error):
        if (trouble := _trouble_in(each, reason)) is not None:
            return trouble
    if isinstance(error, MlflowException):
        mlflow: Any = error  # its methods have no types
        return _judged(mlflow.get_http_status_code(), reason, {})
    return Refused(reason, blames_content=True)


def _trouble_in(error: BaseException, reason: str) -> DoorError | None:
    """Return what an error by itself tells of a server or of the way to it; None if it is of another kind."""
    if isinstance(error, DoorError):
        return error
    status, headers = _answer(error)
    if status is not None:
        return _judged(status, reason, headers)
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, requests.exceptions.RetryError) or names & _PASSING_NAMES:  # answered, with 429 or 5xx
        return Busy(reason)
    is_network = isinstance(error, _NETWORK) and not isinstance(error, urllib3.exceptions.LocationValueError)
    is_disk = isinstance(error, OSError) and error.errno in _PASSING_ERRNOS
    return Unreachable(reason) if is_network or is_disk else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it came from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _answer(error: BaseException) -> tuple[int | None, Mapping[str, str]]:
    """Return the HTTP status that an error tells of, and the answer's headers."""
    response = getattr(error, "response", None)
    if isinstance(response, requests.Response):
        return response.status_code, response.headers
    if isinstance(response, Mapping):  # botocore's
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = [getattr(error, "status_code", None), response, getattr(response, "status_code", None)]
    return next((status for status in found if isinstance(status, int)), None), {}


def _judged(status: int, reason: str, headers: Mapping[str, str]) -> DoorError:
    try:
        judge(status, reason, headers)
    except DoorError as error:
        return type(error)(reason, **vars(error))
    return Unreachable(reason)
