"""Save in the background: one save at a time, and one outcome for all ranks.

The training thread waits for the save before, copies its share and goes on. A thread of our own does the rest
(`background.py`). What fails there is raised once, on every rank, at the next save or at the end.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning_air.checkpoint.background import Failure, Outcome, SaveJob, save_together
from lightning_air.checkpoint.holdings import OwnShare, own_share
from lightning_air.checkpoint.lightning_form import StoredForm, take_apart
from lightning_air.checkpoint.places import name
from lightning_air.checkpoint.publishing import Details, meta_bytes
from lightning_air.checkpoint.ranks import Ranks
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.staging import StagedCopy, Stager, wait_for_devices
from lightning_air.checkpoint.writing import WriteOptions
from lightning_air.runtime import free_memory_bytes

# Free memory that a save leaves to the rest of the process.
_SPARE_MEMORY_BYTES = 256 << 20


class CheckpointFailedError(RuntimeError):
    """A checkpoint did not reach its place.

    Raised on every rank, once, at the next save or at the end of the run; the checkpoints before it are untouched.
    """


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What became of one save, as one rank saw it.

    Attributes:
        path: As it was asked for.
        published_path: Where the checkpoint is; another name if that one was taken. None if it failed.
        step: Optimizer steps done.
        asynchronous: Whether training went on meanwhile.
        blocking_seconds: How long the training thread waited, for all reasons.
        wait_previous_seconds: Of that, for the save before.
        stage_seconds: Of that, for the copy into host memory.
        write_seconds: In the background, for this rank's files; so are the next two.
        upload_seconds: To a volume or an object store.
        verify_seconds: Of asking what had arrived, summed over the uploads.
        commit_lag_seconds: From the call to the publication.
        num_bytes: This rank's share.
        total_bytes: The whole checkpoint.
        num_retries: Of this rank's uploads.
        error: What went wrong, on whichever rank.
    """

    path: str
    published_path: str | None
    step: int
    asynchronous: bool
    blocking_seconds: float
    wait_previous_seconds: float
    stage_seconds: float
    write_seconds: float
    upload_seconds: float
    verify_seconds: float
    commit_lag_seconds: float
    num_bytes: int
    total_bytes: int
    num_retries: int
    error: str | None


@dataclass
class _Pending:
    """The save under way."""

    job: SaveJob
    started: float
    wait_previous_seconds: float
    stage_seconds: float
    blocking_seconds: float = 0.0
    done: "Future[tuple[Outcome, float]]" = field(default_factory=Future)


class Saver:
    """Saves and removes checkpoints for one rank. One thread at a time calls it, that of the training.

    Args:
        ranks: Who saves together.
        options: How shards are written.
        shelf: Where they lie.
        on_failure: "raise" at the next call, or "warn" and go on.
        max_consecutive_failures: With "warn": so many failed saves in a row are raised after all.
        warn: How to warn.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: WriteOptions,
        shelf: Shelf,
        *,
        on_failure: Literal["raise", "warn"],
        max_consecutive_failures: int,
        warn: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._options = options
        self._shelf = shelf
        self._on_failure = on_failure
        self._max_consecutive_failures = max_consecutive_failures
        self._warn = warn
        self._stager = Stager()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._given_up: threading.Thread | None = None
        self._pending: _Pending | None = None
        self._copy: StagedCopy | None = None
        self._num_failures = 0
        self._reports: list[SaveReport] = []
        # The next three belong to the worker.
        self._has_last_failed = False
        self._last_published: str | None = None
        self._to_remove: list[tuple[str, bool]] = []
        self._unsaid: deque[str] = deque()
        # One rank may wait for another's uploads; a hung local disk has no other deadline.
        self._limit_seconds = 2 * options.deadline_seconds + 300

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, checkpoint: Mapping[str, Any], path: str, details: Details, *, overlap: bool = False, wait: bool = False
    ) -> None:
        """Begin a save, and return once the state may change. Collective: every rank calls this.

        Args:
            checkpoint: Lightning's.
            path: The same on every rank.
            details: For the manifest.
            overlap: Return while trained parameters and their optimizer state are still being copied; `finish_copy`
                has to be called before they change.
            wait: Return once it is published.

        Raises:
            CheckpointFailedError: If the save before this one failed, or with `wait` this one.
            RuntimeError: If the ranks do not hold the same state.
        """
        started = time.monotonic()
        if not self.settle(self._limit_seconds):
            raise CheckpointFailedError(self._overdue(self._limit_seconds))
        waited = time.monotonic() - started
        form, share, meta, error = self._taken_apart(checkpoint)
        is_copied = self._agree(share, error)
        staged_from = time.monotonic()
        copy = None
        if is_copied:
            trained = _trained_keys(form) if overlap else frozenset()
            copy = self._staged(share, trained)
        stage_seconds = time.monotonic() - staged_from if is_copied else 0.0
        job = SaveJob(path=path, details=details, share=share, copy=copy, paths=form.paths, meta=meta)
        if copy is None:
            wait_for_devices(share.pieces)  # the worker copies on a stream of its own
        pending = _Pending(job, started, waited, stage_seconds)
        self._pending, self._copy = pending, copy
        self._submit(lambda: self._run(pending))
        if wait or not is_copied:
            pending.done.result()
        pending.blocking_seconds = time.monotonic() - started
        if wait:
            self.settle()

    def finish_copy(self) -> None:
        """Wait for a copy that overlaps with the training. To be called before anything changes parameters."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        begun = time.monotonic()
        with suppress(Exception):  # the save fails of it, on every rank, and that is told in its turn
            copy.wait()
        if self._pending is not None:
            self._pending.blocking_seconds += time.monotonic() - begun

    def settle(self, timeout_seconds: float | None = None, *, quietly: bool = False) -> bool:
        """Wait for the save under way, if any, and raise once what went wrong with it.

        Args:
            timeout_seconds: How long to wait.
            quietly: Warn instead: another exception is on its way, or there will be no next save.

        Returns:
            Whether it has ended.

        Raises:
            CheckpointFailedError: If it failed.
        """
        self._say()
        pending = self._pending
        if pending is None:
            return True
        try:
            outcome, ended = pending.done.result(timeout_seconds)
        except TimeoutError:
            return False
        self._pending = self._copy = None
        report = _report(pending, outcome, ended)
        self._reports.append(report)
        if outcome.failure is None:
            self._num_failures = 0
            return True
        self._num_failures += 1
        message = f"Checkpoint {report.path} (step {report.step}) was not saved. {report.error}"
        if quietly:
            self._warn(message)
        elif self._on_failure == "warn" and self._num_failures < self._max_consecutive_failures:
            left = self._max_consecutive_failures - self._num_failures
            self._warn(f"{message} Training goes on; {left} more in a row, and it is an error.")
        else:
            self._num_failures = 0
            raise CheckpointFailedError(message) from _cause(outcome, outcome.failure)
        return True

    def take_reports(self) -> list[SaveReport]:
        """Return what became of the saves that have ended since the last call; waits for none."""
        self._say()
        if self._pending is not None and self._pending.done.done() and self._pending.done.result()[0].failure is None:
            self.settle()
        reports, self._reports = self._reports, []
        return reports

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done.done()

    @property
    def is_at_work(self) -> bool:
        """Whether a thread of ours lives on after `close`, which gave a save up."""
        return self._given_up is not None and self._given_up.is_alive()

    def _taken_apart(
        self, checkpoint: Mapping[str, Any]
    ) -> tuple[StoredForm, OwnShare, bytes | None, Exception | None]:
        """Return the checkpoint's form, this rank's share, rank 0's `meta.pt`; or an error, which `_agree` raises."""
        is_first = self._ranks.global_rank == 0
        try:
            form = take_apart(checkpoint)
            share = own_share(form.leaves, self._ranks.global_rank, self._ranks.world_size)
            return form, share, meta_bytes(form.meta) if is_first else None, None
        except Exception as error:  # noqa: BLE001 - such as an object that rank 0 cannot pickle: the others wait
            return StoredForm({}, {}, {}), OwnShare([], {}, ""), None, error

    def _staged(self, share: OwnShare, trained: frozenset[str]) -> StagedCopy:
        """Return a copy of the share; if it fails, one whose `wait` raises: the other ranks wait in the background."""
        try:
            return self._stager.stage(share.pieces, lambda piece: piece.keys[0] in trained)
        except Exception as error:  # noqa: BLE001 - as above
            return StagedCopy([], partial(_raise, error))

    def _agree(self, share: OwnShare, error: Exception | None) -> bool:
        """Return whether all ranks have memory for their copies. Collective: every rank calls this.

        Raises:
            Exception: The error, if there is one.
            RuntimeError: If another rank has one, or the ranks do not hold the same state.
        """
        free = free_memory_bytes()
        short = 0
        if free is not None and (needed := self._stager.missing_bytes(share.pieces)):
            short = max(0, needed - max(0, free - _SPARE_MEMORY_BYTES) // self._options.num_sharing_disk)
        told = None if error is None else f"{type(error).__name__}: {error}"
        votes = self._ranks.all_gather((share.fingerprint, short, told))
        if error is not None:
            raise error
        failed = [rank for rank, vote in enumerate(votes) if vote[2] is not None]
        if failed:
            raise RuntimeError(f"No checkpoint is saved, since rank {failed[0]} cannot: {votes[failed[0]][2]}")
        odd = [rank for rank, vote in enumerate(votes) if vote[0] != votes[0][0]]
        if odd:
            raise RuntimeError(
                f"Rank(s) {', '.join(map(str, odd))} hold a state of other names, shapes or dtypes than rank 0, so the "
                "ranks cannot share the writing of it. Make model and optimizer the same on every rank."
            )
        worst = max(range(len(votes)), key=lambda rank: votes[rank][1])
        if votes[worst][1]:
            self._warn(
                f"No host memory for a copy of the state: {votes[worst][1] / 1e9:.2f} GB short on rank {worst}. This "
                "checkpoint is written synchronously, and training waits for it."
            )
        return not votes[worst][1]

    def _overdue(self, seconds: float) -> str:
        assert self._pending is not None
        return f"Checkpoint {self._pending.job.path} was not published within {seconds:g} s and is given up."

    # ---- removing and ending -----------------------------------------------------------------------------------------

    def remove(self, path: str) -> None:
        """Delete a checkpoint once the saves begun before are published; if the last of them fails, after the next."""
        if self._ranks.global_rank == 0:
            self._submit(lambda: self._remove(path))

    def discard(self, folders: Sequence[str]) -> None:
        """Delete these folders, and no other generation of them, once the saves begun before are published."""
        if self._ranks.global_rank == 0:
            for folder in folders:
                self._submit(partial(self._remove, folder, exactly=True))

    def point(self, pointer: str, *, link: bool) -> None:
        """Let a path stand for the checkpoint last begun, once that is published."""
        if self._ranks.global_rank == 0:
            self._submit(lambda: self._point(pointer, link=link))

    def note_scores(self, folder: str, monitor: str, scores: Mapping[str, float]) -> None:
        """Note how good the checkpoints in a folder are, beside them, once the save under way has ended."""
        asked = None if self._pending is None else name(self._pending.job.path)
        if self._ranks.global_rank == 0:
            self._submit(lambda: self._note_scores(folder, monitor, dict(scores), asked))

    def sweep(self, folders: Sequence[str]) -> None:
        """Delete what killed saves have left in these folders."""
        if self._ranks.global_rank == 0:
            for folder in folders:
                self._submit(partial(self._delete, folder, exactly=True))

    def close(self, timeout_seconds: float, *, quietly: bool) -> None:
        """Finish what is under way, and end the thread. Idempotent.

        Raises:
            CheckpointFailedError: If the last save failed or did not end in time; with `quietly` it is warned of.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            has_ended = self.settle(timeout_seconds, quietly=quietly)
        finally:
            worker, self._worker = self._worker, None
            if worker is not None:
                self._calls.put(None)
                worker.join(max(0.0, deadline - time.monotonic()))
            self._say()
            self._given_up = worker
            if worker is None or not worker.is_alive():  # else it may still read what was copied
                self._stager.release()
        if not has_ended:
            assert self._pending is not None
            message, self._pending = self._overdue(timeout_seconds), None
            if not quietly:
                raise CheckpointFailedError(message)
            self._warn(message)

    def _submit(self, call: Callable[[], None]) -> None:
        if self._worker is None:
            self._calls = queue.SimpleQueue()
            self._worker = threading.Thread(
                target=_serve, args=(self._calls,), name="lightning-air-checkpoint", daemon=True
            )
            self._worker.start()
        self._calls.put(call)

    # ---- on the worker -----------------------------------------------------------------------------------------------

    def _run(self, pending: _Pending) -> None:
        outcome = save_together(pending.job, self._ranks, self._shelf, self._options)
        pending.done.set_result((outcome, time.monotonic()))
        self._has_last_failed = outcome.failure is not None
        if not self._has_last_failed:
            self._last_published = outcome.published_path
            to_remove, self._to_remove = self._to_remove, []
            for path, exactly in to_remove:
                self._remove(path, exactly=exactly)

    def _remove(self, path: str, *, exactly: bool = False) -> None:
        if self._has_last_failed:
            self._to_remove.append((path, exactly))
            return
        self._delete(path, exactly=exactly)

    def _delete(self, path: str, *, exactly: bool) -> None:
        try:
            if exactly:
                self._shelf.remove_one(path)
            else:
                self._shelf.remove(path)
        except Exception as error:  # noqa: BLE001 - the worker has to live on, whatever a store raises
            self._unsaid.append(f"Checkpoint {path} could not be deleted: {error}")

    def _point(self, pointer: str, *, link: bool) -> None:
        if self._has_last_failed or self._last_published is None:
            return
        try:
            self._shelf.point(pointer, self._last_published, link=link)
        except Exception as error:  # noqa: BLE001 - as above
            self._unsaid.append(f"{pointer} could not be written: {error}")

    def _note_scores(self, folder: str, monitor: str, scores: dict[str, float], asked: str | None) -> None:
        if asked is not None and (score := scores.pop(asked, None)) is not None and not self._has_last_failed:
            scores[name(self._last_published or asked)] = score  # it may have been published under another name
        try:
            self._shelf.note_scores(folder, monitor, scores)
        except Exception as error:  # noqa: BLE001 - as above
            self._unsaid.append(f"How good the checkpoints in {folder} are could not be noted there: {error}")

    def _say(self) -> None:
        """Warn of what went wrong on the worker; where warnings are errors, a warning there would end it."""
        while self._unsaid:
            self._warn(self._unsaid.popleft())


def _serve(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def _raise(error: Exception) -> None:
    raise error


def _trained_keys(form: StoredForm) -> frozenset[str]:
    """Return the leaves that only an optimizer's step changes: its state, and the parameters it names."""
    state = {key for key, path in form.paths.items() if str(path[0]).startswith("optimizer_") and "state" in path[1:2]}
    names = {
        name
        for key, value in form.leaves.items()
        if key.startswith("optimizer_") and key.endswith(".params") and isinstance(value, list)
        for name in value
    }
    return frozenset(state | {f"state_dict.{name}" for name in names})


def _cause(outcome: Outcome, failure: Failure) -> BaseException:
    return outcome.error or RuntimeError(f"On rank {failure.global_rank}:\n{failure.traceback}")


def _report(pending: _Pending, outcome: Outcome, ended: float) -> SaveReport:
    stats, failure = outcome.written.stats, outcome.failure
    return SaveReport(
        path=pending.job.path,
        published_path=outcome.published_path,
        step=pending.job.details.step,
        asynchronous=pending.job.copy is not None,
        blocking_seconds=pending.blocking_seconds,
        wait_previous_seconds=pending.wait_previous_seconds,
        stage_seconds=pending.stage_seconds,
        write_seconds=stats.write_seconds,
        upload_seconds=stats.upload_seconds,
        verify_seconds=stats.verify_seconds,
        commit_lag_seconds=ended - pending.started,
        num_bytes=stats.num_bytes,
        total_bytes=outcome.total_bytes,
        num_retries=stats.num_retries,
        error=None if failure is None else f"Rank {failure.global_rank}: {failure.summary}",
    )
