"""Hyperparameters as MLflow takes them: flat, few enough, short enough, and never changed.

MLflow refuses a parameter that a run already has with another value, and the whole batch with it. So the parameters
that an attempt wants are compared with those the run has: new ones are sent, changed ones become tags that show the
difference.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_air.tracking.metric_names import MetricNames, examples, valid_key
from lightning_air.tracking.texts import MAX_PARAM_LENGTH, MAX_TAG_LENGTH, storable

MAX_PARAMS = 1_600
"""Per run, on Databricks."""

MAX_CHANGE_TAGS = 100
"""Tags about changed parameters per run; Databricks has a limit for tags, too."""

_MAX_BATCH_PARAMS = 100
_MAX_BATCH_BYTES = 900_000  # the server takes 1 MB, with some of it around the parameters
_BYTES_AROUND_PARAM = 30  # {"key": , "value": },
_CHANGED = "param_changed/"
_CHANGED_MORE = "param_changed_more"
_ARROW = " -> "
_MAX_CHANGE_LENGTH = 1_500  # three of them fit into a tag


class Change(NamedTuple):
    """A parameter's value in the run, and the one that this attempt has."""

    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """What to do with the parameters of this attempt; all by key.

    Attributes:
        new: To be sent.
        changed: Never sent as parameters.
        unchanged: The run has them already.
        left_out: New ones beyond the number that a run may have, whole.
        renamed: Names that MLflow does not take, with their keys.
    """

    new: dict[str, str]
    changed: dict[str, Change]
    unchanged: dict[str, str]
    left_out: dict[str, str]
    renamed: dict[str, str]


def plan_params(wanted: Mapping[str, str], existing: Mapping[str, str], *, max_params: int = MAX_PARAMS) -> ParamPlan:
    """Compare what an attempt wants to record with what its run has.

    Args:
        wanted: Names to whole values, from `flatten_params`; when there are too many, the first ones are sent.
        existing: The run's parameters.
        max_params: How many the run may have.
    """
    names = MetricNames()
    new: dict[str, str] = {}
    changed: dict[str, Change] = {}
    unchanged: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, whole in wanted.items():
        key, value = names.key(name), storable(whole, MAX_PARAM_LENGTH)
        if key not in existing and len(existing) + len(new) >= max_params:
            left_out[key] = whole
        elif key not in existing:
            new[key] = value
        elif existing[key] == value:
            unchanged[key] = value
        else:
            changed[key] = Change(existing[key], value)
    return ParamPlan(new=new, changed=changed, unchanged=unchanged, left_out=left_out, renamed=names.take_renamed())


def change_tags(plan: ParamPlan, tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that show the changed parameters: `param_changed/<key>` is "old -> new", and so on.

    A value that came back to the old one is shown, too. Nothing is returned for what the tags already say.

    Args:
        plan: What this attempt wants.
        tags: Those of the run.
    """
    updates: dict[str, str] = {}
    unshown = []
    room = MAX_CHANGE_TAGS - sum(tag.startswith(_CHANGED) for tag in tags)
    returned = {key: Change(value, value) for key, value in plan.unchanged.items() if _change_tag(key) in tags}
    for key, change in (plan.changed | returned).items():
        tag, new = _change_tag(key), storable(change.new, _MAX_CHANGE_LENGTH)
        old = storable(change.old, _MAX_CHANGE_LENGTH)
        history = tags.get(tag, old)
        if tag not in tags and room <= 0:
            unshown.append(key)
        elif not history.endswith(_ARROW + new):
            room -= tag not in tags
            appended = history + _ARROW + new
            updates[tag] = appended if len(appended) <= MAX_TAG_LENGTH else f"{old}{_ARROW}…{_ARROW}{new}"
    more = storable(f"{len(unshown)} more: {', '.join(unshown)}", MAX_TAG_LENGTH)
    if unshown and tags.get(_CHANGED_MORE) != more:
        updates[_CHANGED_MORE] = more
    return updates


def param_batches(params: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the parameters in pieces that one request may carry."""
    batch: dict[str, str] = {}
    num_bytes = 0
    for key, value in params.items():
        size = len(json.dumps(key)) + len(json.dumps(value)) + _BYTES_AROUND_PARAM  # MLflow sends them as ASCII
        if batch and (len(batch) == _MAX_BATCH_PARAMS or num_bytes + size > _MAX_BATCH_BYTES):
            yield batch
            batch, num_bytes = {}, 0
        batch[key] = value
        num_bytes += size
    if batch:
        yield batch


def left_out_warning(plan: ParamPlan, *, max_params: int = MAX_PARAMS) -> str | None:
    """Say in one sentence which parameters the run does not show; None where it shows all."""
    if not plan.left_out:
        return None
    return (
        f"A run takes {max_params} parameters, so {len(plan.left_out)} stand only in the configuration among its "
        f"artifacts: {examples(plan.left_out)}. Log fewer with `log_hyperparams`."
    )


def _change_tag(key: str) -> str:
    return valid_key(_CHANGED + key)
