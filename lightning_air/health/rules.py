"""Rules are data: which signal of a GPU, beyond which value, for how long, is an incident, and what is done about it.

All values are plain, so that YAML can say them; a rule that cannot be meant is refused when it is made.

    GPUHealth(rules=[*default_rules(), Rule("temperature_c", above=85, for_seconds=60, action="checkpoint_stop")])

    rules:
      - {signal: temperature_c, above: 85, for_seconds: 60, action: checkpoint_stop}
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_air.health.signals import SIGNALS, XID

Action = Literal["log", "warn", "checkpoint_stop", "abort"]
Compared = Literal["plainly", "minus_median", "pct_of_median"]

MAX_OVER_SECONDS = 3600.0
_MAX_FOR_SECONDS = 86400.0


@dataclass(frozen=True)
class Rule:
    """When a GPU's signal is an incident. Exactly one of `above`, `below` and `any_of` says which values are bad.

    A value that is missing neither begins an incident nor ends one, and the time of a gap is not counted. An incident
    is told once, and is over when the value has been good again for `for_seconds`.

    Args:
        signal: What is looked at: a reading such as "temperature_c", or one of `lightning_air.health.signals`.
        above: Larger values are bad, in the signal's unit.
        below: Smaller values are bad.
        any_of: These values are bad: the numbers of XIDs, each of which is an incident of its own and never over.
        for_seconds: How long the value has to have been bad, in seconds; 0 is at once.
        over_seconds: Look at what the signal has grown by in so many last seconds instead: for counters.
        compared: "minus_median" and "pct_of_median" compare the value with the median of the run's GPUs of this model
            that meet `given`, as the difference from it or as a percentage of it.
        given: Conditions: the value is bad only while each of these signals is within its bounds, both included.
        clear_at: Where the value is good again: on the good side of the threshold, or the threshold itself (default).
        action: "log" tells it at level INFO, "warn" as a warning. "checkpoint_stop" warns and ends training on all
            ranks at one step with a checkpoint (an evaluation goes on); "abort" warns and ends all processes at once,
            without a checkpoint.
        excludes_node: Name the node in `excluded_nodes.json` and in a tag of the run. Nothing here acts upon it.
        name: Of the incident; default: the signal.
        advice: What to do, as a sentence; it ends the message.

    Raises:
        ValueError: A value cannot be meant.
        TypeError: A value is no number.
    """

    signal: str
    above: float | None = field(default=None, kw_only=True)
    below: float | None = field(default=None, kw_only=True)
    any_of: tuple[int, ...] = field(default=(), kw_only=True)
    for_seconds: float = field(default=0.0, kw_only=True)
    over_seconds: float | None = field(default=None, kw_only=True)
    compared: Compared = field(default="plainly", kw_only=True)
    given: dict[str, tuple[float, float]] = field(default_factory=dict, kw_only=True, hash=False)
    clear_at: float | None = field(default=None, kw_only=True)
    action: Action = field(default="warn", kw_only=True)
    excludes_node: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)
    advice: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_signal("signal", self.signal)
        if not self.name:
            object.__setattr__(self, "name", self.signal)
        elif not isinstance(self.name, str) or re.fullmatch(r"[a-z][a-z0-9_]*", self.name) is None:
            raise ValueError(f"name must be made of a-z, 0-9 and _, such as 'too_hot', got {self.name!r}.")
        self._check_choice("action", self.action, get_args(Action))
        self._check_choice("compared", self.compared, get_args(Compared))
        self._check_threshold()
        self._set("for_seconds", self._number("for_seconds", 0.0, _MAX_FOR_SECONDS))
        if self.over_seconds is not None:
            self._set("over_seconds", self._number("over_seconds", 1.0, MAX_OVER_SECONDS))
        self._check_given()
        if self.signal == XID:
            self._check_xid()
        elif self.any_of:
            raise ValueError(
                f"any_of is for the signal 'xid', got {self.any_of!r} for {self.signal!r}. Use above or below."
            )

    @property
    def threshold(self) -> float:
        """The value of `above` or `below`; NaN for `any_of`."""
        if self.above is not None:
            return self.above
        return self.below if self.below is not None else math.nan

    def is_bad(self, value: float) -> bool:
        """Whether a value, which is no NaN, is beyond the threshold."""
        return value > self.above if self.above is not None else value < self.threshold

    def is_good(self, value: float) -> bool:
        """Whether a value, which is no NaN, ends an incident: on the good side of `clear_at`, or on it."""
        limit = self.threshold if self.clear_at is None else self.clear_at
        return value <= limit if self.above is not None else value >= limit

    def _check_choice(self, what: str, value: object, choices: Sequence[str]) -> None:
        if value not in choices:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, got {value!r}.")

    def _check_threshold(self) -> None:
        given = {"above": self.above, "below": self.below, "any_of": self.any_of or None}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            found = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "none"
            raise ValueError(f"A rule takes exactly one of above, below and any_of, got {found} for {self.signal!r}.")
        for name in ("above", "below", "clear_at"):
            if getattr(self, name) is not None:
                self._set(name, self._number(name, -math.inf, math.inf))
        if self.clear_at is not None and not (self.above is None or self.clear_at <= self.above):
            raise ValueError(f"clear_at must be at most above={self.above:g}, got {self.clear_at:g}.")
        if self.clear_at is not None and not (self.below is None or self.clear_at >= self.below):
            raise ValueError(f"clear_at must be at least below={self.below:g}, got {self.clear_at:g}.")

    def _check_given(self) -> None:
        bounds: dict[str, tuple[float, float]] = {}
        for name, pair in self.given.items():
            _check_signal("given", name)
            if name == XID:
                raise ValueError("given cannot name 'xid': it happens, and does not last.")
            if isinstance(pair, str) or len(pair) != 2:  # noqa: PLR2004 - the two bounds
                raise ValueError(f"given[{name!r}] must be the lowest and the highest value, got {pair!r}.")
            low, high = (_as_number(f"given[{name!r}]", value) for value in pair)
            if not low <= high:
                raise ValueError(f"given[{name!r}] must have its lowest value first, got {list(pair)!r}.")
            bounds[name] = (low, high)
        self._set("given", bounds)

    def _check_xid(self) -> None:
        """An XID has a number and a moment, and nothing else."""
        if not self.any_of:
            raise ValueError("The signal 'xid' takes any_of, the numbers of the errors, such as any_of=[48, 79].")
        for number in self.any_of:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"any_of must be numbers of XIDs, such as [48, 79], got {number!r}.")
        self._set("any_of", tuple(self.any_of))
        for name, empty in (
            ("for_seconds", 0.0),
            ("over_seconds", None),
            ("clear_at", None),
            ("given", {}),
            ("compared", "plainly"),
        ):
            if getattr(self, name) != empty:
                raise ValueError(f"{name} means nothing for 'xid', got {getattr(self, name)!r}. Leave it out.")
        if self.compared != "plainly":
            raise ValueError(f"compared means nothing for 'xid', got {self.compared!r}. Leave it out.")

    def _number(self, name: str, minimum: float, maximum: float) -> float:
        value = _as_number(name, getattr(self, name))
        if not (minimum <= value <= maximum and math.isfinite(value)):
            bounds = f" from {minimum:g} to {maximum:g}" if maximum < math.inf else ", and finite"
            raise ValueError(f"{name} must be a number{bounds}, got {value!r} for {self.signal!r}.")
        return value

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # as YAML gives it, it may be an int or a list


def check_names(rules: Sequence[Rule]) -> None:
    """Refuse rules whose incidents could not be told apart, and what is no rule.

    Raises:
        ValueError: Two rules have one name.
        TypeError: One is no `Rule`.
    """
    seen: set[str] = set()
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules must be of type Rule, got {rule!r}. Write Rule('temperature_c', above=85).")
        if rule.name in seen:
            raise ValueError(f"Two rules are called {rule.name!r}. Give one of them another name, or leave it out.")
        seen.add(rule.name)


def _check_signal(what: str, signal: object) -> None:
    if signal not in SIGNALS:
        close = difflib.get_close_matches(str(signal), SIGNALS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(SIGNALS)}."
        raise ValueError(f"{what} {signal!r} is not known. {hint}")


def _as_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)
