"""Turn any name into a key that MLflow takes, and never two names into one.

A name that MLflow takes stays as it is. Any other gets its bad characters replaced, is cut where it is too long, and
carries a hash of the whole name, so that the same name has the same key in every process and attempt. Metrics,
parameters and tags obey the same rules.
"""

import hashlib
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

MAX_KEY_LENGTH = 250
"""Characters, on the server."""

# What `mlflow.utils.validation` allows; its client refuses the colon on Windows.
_FORBIDDEN = re.compile(r"[^/\w.\- ]" if os.name == "nt" else r"[^/\w.\- :]")
_HASH_LENGTH = 8
NONFINITE = "nonfinite"
"""The aspect of a metric that counts its values that are not finite."""
_MAX_EXAMPLES = 10


def is_valid_key(name: str) -> bool:
    """Return whether MLflow takes the name as it is, as the key of a metric, parameter or tag."""
    return (
        len(name) <= MAX_KEY_LENGTH
        and _FORBIDDEN.search(name) is None
        and posixpath.normpath(name) == name  # so it is not empty: that would be "."
        and name != "."
        and not name.startswith(("..", "/"))
    )


def valid_key(name: str) -> str:
    """Return the name if MLflow takes it, else a readable key with a hash of the name at its end.

    Idempotent, and the same in every process. Two names share a key only if one of them contains the other's hash.
    """
    if is_valid_key(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    segments = [part for part in _FORBIDDEN.sub("_", name).split("/") if part not in {"", "."}]
    # A segment of dots would climb, and MLflow refuses every name that starts with two of them.
    readable = "/".join("_" + part.lstrip(".") if part.startswith("..") else part for part in segments)
    return f"{readable[: MAX_KEY_LENGTH - _HASH_LENGTH - 1]}-{digest}"


def plain_key(name: str, aspect: str = "") -> str:
    """Return what an aspect of a metric is called.

    Args:
        name: Of the metric, as it was logged.
        aspect: "" for what has the metric's own name, `NONFINITE`, or the name of an aggregate.
    """
    if not aspect:
        return name
    return f"{NONFINITE}/{name}" if aspect == NONFINITE else f"{name}/{aspect}"


class MetricNames:
    """The keys of the metrics seen so far, and of their aspects; one per run. Not for two threads at a time.

    Within one instance no two share a key, whatever their names are. Where that takes more than `valid_key` (a name
    that contains another's hash; a metric "loss/max" beside the maximum of "loss"), what is seen first keeps the plain
    key.
    """

    def __init__(self, prefix: str = "") -> None:
        """Start without names.

        Args:
            prefix: Put before each name and joined by "-", as Lightning's loggers do; none if empty.
        """
        self._prefix = f"{prefix}-" if prefix else ""
        self._keys: dict[tuple[str, str], str] = {}
        self._owners: dict[str, tuple[str, str]] = {}
        self._unsaid: dict[str, str] = {}

    def key(self, name: str, aspect: str = "") -> str:
        """Return the key under which the server has a metric, or an aspect of it as `plain_key` knows them."""
        key = self._keys.get((name, aspect))
        return self._add(name, aspect) if key is None else key

    def snapshot(self) -> list[list[str]]:
        """Return the names and aspects in the order in which they got their keys, as JSON can have it."""
        return [list(owner) for owner in self._keys]

    def restore(self, snapshot: Iterable[Sequence[str]]) -> None:
        """Give keys in the order of a snapshot, so that each gets the one that it had."""
        for name, aspect in snapshot:
            self.key(name, aspect)

    def take_renamed(self) -> dict[str, str]:
        """Return what got another key than its name since the last call, with the key: to be said once."""
        renamed, self._unsaid = self._unsaid, {}
        return renamed

    def _add(self, name: str, aspect: str) -> str:
        owner = (name, aspect)
        full_name = salted = self._prefix + plain_key(name, aspect)
        while self._owners.setdefault(key := valid_key(salted), owner) != owner:
            salted += "\0"  # no valid character, so that the key gets another hash
        self._keys[owner] = key
        if key != full_name:
            self._unsaid[f"{aspect} of {name}" if aspect else name] = key
        return key


def renamed_warning(what: str, renamed: Mapping[str, str]) -> str:
    """Say in one sentence which names the server has under other keys.

    Args:
        what: What they are names of, as "metric".
        renamed: Names to keys; not empty.
    """
    some = examples(f"{name!r} as {key!r}" for name, key in renamed.items())
    return f"MLflow cannot store {len(renamed)} {what} name(s) as they are, so it has them changed: {some}."


def examples(items: Iterable[str]) -> str:
    """Join the items by commas, the first ten of them, and say how many more there are."""
    listed = list(items)
    more = len(listed) - _MAX_EXAMPLES
    return ", ".join(listed[:_MAX_EXAMPLES]) + (f" and {more} more" if more > 0 else "")
