"""Say each kind of trouble once, and never make trouble by saying it."""

import logging
from collections.abc import Callable

Warn = Callable[[str, str], None]
"""Told (kind, message). May be called on any thread, and never raises."""

logger = logging.getLogger(__name__)


class WarnOnce:
    """A `Warn` that passes the first message of each kind on.

    Args:
        say: Gets the message; by default a log record of level WARNING. What it raises (a warning that is turned into
            an error) is only logged: training must not end because its logger complains.
    """

    def __init__(self, say: Callable[[str], object] = logger.warning) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        """Pass the message on, unless one of this kind has been passed on before."""
        if kind in self._said:
            return
        self._said.add(kind)
        try:
            self._say(message)
        except Exception:
            logger.exception("Could not warn: %s", message)
