"""Lightning's counters, put where the position is.

What Lightning restores is where its loops stood when the checkpoint was written, which depends on the hook that wrote
it; several of these places it takes for others (the next epoch lost, a batch counted twice). So before it reads them,
the counters in the checkpoint are made one of two plain states: an epoch is about to begin, or a batch has just ended.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counts:
    """What Lightning counts over all epochs, at the position.

    Attributes:
        num_batches: Batches of this rank, in whatever size they were.
        num_stepped: Those that ended in an optimizer's step.
    """

    num_batches: int
    num_stepped: int


def rewind(fit_loop: dict[str, Any], epoch: int, counts: Counts, *, is_mid_epoch: bool) -> None:
    """Change the state of a fit loop to one that stands in, or before, an epoch.

    How many batches the epoch has had is not known before there is a loader: `set_batches_before` says it.

    Args:
        fit_loop: What `checkpoint["loops"]["fit_loop"]` holds.
        epoch: Which.
        counts: As of then.
        is_mid_epoch: Whether a part of it is done.
    """
    begun = epoch + is_mid_epoch
    progress = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    fit_loop["epoch_progress"] = {"total": dict(progress), "current": dict(progress)}
    total = dict.fromkeys(("ready", "started", "processed", "completed"), counts.num_batches)
    current = dict.fromkeys(total, 0)
    if is_mid_epoch:  # "a batch has ended, in a hook of which this was saved": Lightning then counts it as completed
        total["completed"] -= 1
        current["completed"] -= 1
    fit_loop["epoch_loop.batch_progress"] = {"total": total, "current": current, "is_last_batch": False}
    none = dict.fromkeys(total, 0)  # no validation is under way
    fit_loop["epoch_loop.val_loop.batch_progress"] = {
        "total": dict(none),
        "current": dict(none),
        "is_last_batch": False,
    }
    # On that batch's account it adds one.
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = counts.num_stepped - is_mid_epoch


def set_batches_before(batch_progress: Any, num_batches: int) -> None:
    """Say how many batches, of today's size, an epoch that goes on has had; before its loop begins."""
    current = batch_progress.current
    current.ready = current.started = current.processed = num_batches
    current.completed = num_batches - 1


@dataclass(frozen=True)
class Stand:
    """Where a checkpoint without a position of ours was written."""

    epoch: int
    counts: Counts
    num_batches_of_epoch: int
    """0 between two epochs."""


def stand(fit_loop: dict[str, Any]) -> Stand:
    """Read where the loops of stock Lightning stood."""
    epochs, batches = fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"]
    total, num_batches = batches["total"], batches["current"]["processed"]
    is_complete = batches["is_last_batch"] or not num_batches
    epoch = epochs["processed"]
    if epochs["ready"] > epoch:  # within its batches, or in a hook of its end
        epoch += is_complete and num_batches > 0
    elif not is_complete:  # `max_steps` ended it, and Lightning has counted it as a whole one
        epoch -= 1
    # A hook within the batch saves before the batch is counted.
    num_stepped = fit_loop["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    num_stepped += total["completed"] < total["processed"]
    return Stand(epoch, Counts(total["processed"], num_stepped), 0 if is_complete else num_batches)
