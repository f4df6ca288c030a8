"""How good checkpoints are, noted beside them: `scores.json`, for those that were rated after they had been saved.

A checkpoint that the cadence has saved before the validation of its step cannot hold its own score. Without this file a
run that resumes from it would not know how good it is, and might not keep it.
"""

import json
import logging
import math
from collections.abc import Mapping

from lightning_air.checkpoint.store import Store

log = logging.getLogger(__name__)

SCORES_NAME = "scores.json"

_VERSION = 1
_MOST_BYTES = 1 << 20


def write_scores(store: Store, monitor: str, scores: Mapping[str, float]) -> None:
    """Replace what a folder has.

    Args:
        store: The folder of the checkpoints.
        monitor: The metric that they were rated by.
        scores: By the checkpoints' names in that folder.

    Raises:
        OSError: If it cannot be written.
    """
    content = {"version": _VERSION, "monitor": monitor, "scores": dict(scores)}
    store.put_bytes(SCORES_NAME, json.dumps(content, indent=1).encode())


def read_scores(store: Store, monitor: str) -> dict[str, float]:
    """Return what a folder has; nothing if that was rated by another metric, or is damaged, which is logged.

    Raises:
        OSError: If it cannot be read.
    """
    num_bytes = store.num_bytes(SCORES_NAME)
    if num_bytes is None:
        return {}
    try:
        if num_bytes > _MOST_BYTES:
            raise ValueError(f"it has {num_bytes} bytes")  # noqa: TRY301 - as all else that may be wrong with it
        content = json.loads(store.read(SCORES_NAME))
        if content["version"] != _VERSION or content["monitor"] != monitor:
            return {}
        scores = {str(name): float(score) for name, score in content["scores"].items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        log.warning("%s/%s is damaged, and ignored: %r", store.root, SCORES_NAME, error)
        return {}
    return {name: score for name, score in scores.items() if not math.isnan(score)}
