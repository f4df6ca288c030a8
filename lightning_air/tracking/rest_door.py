"""A tracking server behind HTTP: one request, one answer, and no wait of a client's own.

MLflow's client tries again for minutes by itself, and hides the status and Retry-After. So requests go out through its
own `http_request`, with its credentials, but one at a time and within a time limit. The process-wide
MLFLOW_HTTP_REQUEST_* variables stay as the user has set them.

Two waits are longer than the time limit: an answer's headers that come byte by byte, each byte within the limit, and a
login through the Databricks SDK, which has minutes of its own. They delay the writer's thread, and nobody who waits for
it until a deadline.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from http import HTTPStatus
from math import isfinite
from typing import Any

import requests
from mlflow.utils import rest_utils
from urllib3.exceptions import ReadTimeoutError

from lightning_air.tracking.door_errors import TooLate, Unreachable, judge, one_line
from lightning_air.tracking.points import Point

REQUEST_SECONDS = 30.0
"""How long a request may take by default: the server's work, and every byte of its answer's body."""

_LOG_BATCH = "/api/2.0/mlflow/runs/log-batch"
_SET_TAG = "/api/2.0/mlflow/runs/set-tag"
_GET_RUN = "/api/2.0/mlflow/runs/get"
_CONNECT_SECONDS = 10.0
_CREDENTIALS_SECONDS = 60.0
_MOST_ANSWER_BYTES = 1 << 16
# A run with 1,600 parameters of 6,000 characters; read byte by byte it would take seconds.
_MOST_RUN_BYTES = 64 << 20
_RUN_BYTES_AT_ONCE = 1 << 12
_POINTS_AT_ONCE = 100
_NOT_FINITE = {float("inf"): '"Infinity"', float("-inf"): '"-Infinity"'}

_rest: Any = rest_utils  # it has no types


class RestDoor:
    """A server that is reached by HTTP.

    Args:
        get_host_creds: MLflow's, of the tracking URI.
        clock: The time in seconds.
    """

    def __init__(self, get_host_creds: Callable[[], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._get_host_creds = get_host_creds
        self._clock = clock
        self._host_creds: Any = None
        self._renew_at_seconds = 0.0

    def log_batch(self, run_id: str, points: Sequence[Point], *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Store points."""
        self._post(_LOG_BATCH, batch_json(run_id, points), timeout_seconds)

    def set_tag(self, run_id: str, key: str, value: str, *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Set a tag of the run."""
        self._post(_SET_TAG, json.dumps({"run_id": run_id, "key": key, "value": value}).encode(), timeout_seconds)

    def get_tags(self, run_id: str, *, timeout_seconds: float = REQUEST_SECONDS) -> Mapping[str, str]:
        """Return all tags of the run."""
        text = self._request("GET", _GET_RUN, timeout_seconds, params={"run_id": run_id})
        try:
            tags = json.loads(text)["run"]["data"].get("tags", [])
            return {tag["key"]: tag.get("value", "") for tag in tags}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unreachable(one_line(f"An answer that is not MLflow's: {text}")) from error

    def _post(self, endpoint: str, body: bytes, timeout_seconds: float) -> None:
        self._request("POST", endpoint, timeout_seconds, data=body)

    def _request(self, method: str, endpoint: str, timeout_seconds: float, **content: Any) -> str:
        deadline_seconds = self._clock() + timeout_seconds
        try:
            host_creds, headers = self._credentials()
            response = _rest.http_request(
                host_creds,
                endpoint,
                method,
                max_retries=0,
                retry_codes=frozenset(),
                raise_on_status=False,
                respect_retry_after_header=False,
                timeout=(min(_CONNECT_SECONDS, timeout_seconds), timeout_seconds),
                extra_headers={"Content-Type": "application/json", **headers},
                stream=True,
                **content,
            )
            with closing(response):
                is_short = method == "POST"
                text = self._read(response, deadline_seconds, is_short=is_short)
        except Exception as error:
            kind = TooLate if _is_late(error) else Unreachable
            raise kind(one_line(f"{type(error).__name__}: {error}")) from error
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            self._forget_credentials()
        judge(response.status_code, text, response.headers, is_body=True)
        return text

    def _read(self, response: requests.Response, deadline_seconds: float, *, is_short: bool) -> str:
        """Return the answer's body; the timeout of `requests` starts anew with every byte of it."""
        found = bytearray()
        for piece in response.iter_content(1 if is_short else _RUN_BYTES_AT_ONCE):
            found += piece
            if self._clock() > deadline_seconds:
                raise TimeoutError("the answer came too slowly")
            if len(found) > (_MOST_ANSWER_BYTES if is_short else _MOST_RUN_BYTES):
                break
        return found.decode(errors="replace")

    def _credentials(self) -> tuple[Any, dict[str, str]]:
        if self._clock() >= self._renew_at_seconds or self._host_creds is None:
            self._host_creds = self._get_host_creds()
            self._renew_at_seconds = self._clock() + _CREDENTIALS_SECONDS
        creds = self._host_creds
        if not creds.use_databricks_sdk:
            return creds, {}
        # Through the SDK, `http_request` would sleep as long as Retry-After says, and hide it. What the SDK knows best
        # is how to log in.
        config = _rest.get_workspace_client(
            creds.use_secret_scope_token, creds.host, creds.token, creds.databricks_auth_profile
        ).config
        headers = dict(config.authenticate())
        if workspace_id := getattr(creds, "workspace_id", None):
            headers["x-databricks-org-id"] = str(workspace_id)
        return _rest.MlflowHostCreds(config.host), headers

    def _forget_credentials(self) -> None:
        self._host_creds = None
        _rest.get_workspace_client.cache_clear()


def _is_late(error: BaseException | None) -> bool:
    """Return whether the server was reached and did not answer in time; MLflow wraps what `requests` has wrapped."""
    if isinstance(error, TimeoutError):
        return True  # ours
    while error is not None and not isinstance(error, ReadTimeoutError):
        error = error.__cause__ or error.__context__
    return error is not None


def batch_json(run_id: str, points: Sequence[Point]) -> bytes:
    """Return the body of a log-batch request."""
    parts = []
    for begin in range(0, len(points), _POINTS_AT_ONCE):
        if begin:
            time.sleep(0.0001)  # lets training have the GIL, for which it would otherwise wait up to 5 ms
        parts.append(",".join([_point_json(point) for point in points[begin : begin + _POINTS_AT_ONCE]]))
    return f'{{"run_id":{json.dumps(run_id)},"metrics":[{",".join(parts)}]}}'.encode()


def point_bytes(point: Point) -> int:
    """Return how many bytes a point takes in a request, or a few more."""
    return len(_key_json(point.key)) + 120


def _point_json(point: Point) -> str:
    key, value, timestamp_ms, step = point
    number = repr(float(value)) if isfinite(value) else _NOT_FINITE.get(value, '"NaN"')
    return f'{{"key":{_key_json(key)},"value":{number},"timestamp":{timestamp_ms},"step":{step}}}'


@lru_cache(maxsize=4096)
def _key_json(key: str) -> str:
    return json.dumps(key)
