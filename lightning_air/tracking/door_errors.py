"""What may come of a request to the tracking server, other than its acknowledgement.

DoorError
├── Refused       the server has looked at it and says no
├── Busy          the server says later
└── Unreachable   nobody knows what the server says
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isfinite

_MOST_REASON_CHARACTERS = 500
_USER_INFO = re.compile(r"//[^/@\s]+@")

_LATER = {408, 425, 429}
# Other refusals (no permission, no such run, a quota) say nothing about the points.
_BLAMES_CONTENT = {400, 413, 422}
_CONTENT_CODES = {"", "BAD_REQUEST", "INVALID_PARAMETER_VALUE", "MALFORMED_REQUEST"}
# MLflow's for nearly everything that goes wrong between it and its database: no free connection, a failover.
_DOUBTFUL_CODE = "BAD_REQUEST"


class DoorError(Exception):
    """A request that the server has not acknowledged; what it carried may be stored all the same."""


class Refused(DoorError):  # noqa: N818 - the name says it
    """The server looked at it and says no.

    Attributes:
        blames_content: Something in the request may be at fault. False if it is the run or the right to write it: then
            the same content may be taken later.
        is_doubtful: It blames the content, but may mean a fault of the server's own that passes.
        is_mlflows: It is MLflow that says so, and not something in front of it that may be starting up.
    """

    def __init__(
        self, reason: str, *, blames_content: bool, is_doubtful: bool = False, is_mlflows: bool = True
    ) -> None:
        super().__init__(reason)
        self.blames_content = blames_content
        self.is_doubtful = is_doubtful
        self.is_mlflows = is_mlflows


class Busy(DoorError):  # noqa: N818
    """The server says later, or that it has failed.

    Attributes:
        retry_after_seconds: What it asks for; None if it does not say.
    """

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class Unreachable(DoorError):  # noqa: N818
    """No answer, or not one of MLflow's."""


class TooLate(Unreachable):
    """No answer in time: the request may be more than the server can do at once."""


def judge(status: int, text: str, headers: Mapping[str, str], *, is_body: bool = False) -> None:
    """Raise what an answer means, unless it is an acknowledgement.

    Args:
        status: HTTP's.
        text: The body; MLflow's is a JSON object.
        headers: Of the answer.
        is_body: The text is the body as it came, and not what MLflow's client has made of it: so it tells who answered.

    Raises:
        DoorError: What it means.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    answer = found if isinstance(found, dict) else None
    # MLflow answers with an object. An empty answer is one of something in front of it, or was cut off in its headers.
    if status == HTTPStatus.OK and answer is not None:
        return
    code, message = (str(answer.get("error_code", "")), str(answer.get("message", ""))) if answer else ("", text)
    reason = one_line(f"HTTP {status} {code}: {message}")
    if status in _LATER or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Busy(reason, retry_after_seconds(headers.get("Retry-After")))
    if status < HTTPStatus.BAD_REQUEST:
        raise Unreachable(f"An answer that is not MLflow's: {reason}")
    blames_content = status in _BLAMES_CONTENT and code in _CONTENT_CODES
    is_doubtful = blames_content and code == _DOUBTFUL_CODE
    is_mlflows = answer is not None or not is_body
    raise Refused(reason, blames_content=blames_content, is_doubtful=is_doubtful, is_mlflows=is_mlflows)


def retry_after_seconds(header: str | None) -> float | None:
    """Return what a Retry-After header asks for, in seconds or as a date; None if it is missing or says nothing."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return None
    return max(0.0, seconds) if isfinite(seconds) else None


def one_line(reason: str) -> str:
    """Return a reason as it may stand in a warning: short, on one line, and without passwords of a URL."""
    line = _USER_INFO.sub("//", " ".join(reason.split()))
    return line if len(line) <= _MOST_REASON_CHARACTERS else f"{line[:_MOST_REASON_CHARACTERS]} …"
