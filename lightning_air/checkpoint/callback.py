"""`AirCheckpoint`: when to save, what to keep, and what to resume from.

A `ModelCheckpoint` whose cadence is time, steps, epochs or what failures and saves cost, and which counts only what is
published: the newest `keep_last` checkpoints stay, the best `save_top_k` beside them, and nothing is deleted before its
replacement can be read.
"""

import copy
import os
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_air._lightning import (
    LightningModule,
    ModelCheckpoint,
    SIGTERMException,
    Trainer,
    TrainerFn,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_air.checkpoint import telemetry
from lightning_air.checkpoint.cadence import FAILURES_PER_GPU_DAY, Schedule, parse_every
from lightning_air.checkpoint.consolidating import open_checkpoint
from lightning_air.checkpoint.io import AsyncUCCheckpointIO
from lightning_air.checkpoint.keeping import Keeping
from lightning_air.checkpoint.last_path import wrapped
from lightning_air.checkpoint.latest import latest_checkpoint
from lightning_air.checkpoint.lightning_form import META_KEY
from lightning_air.checkpoint.places import join, parse_place
from lightning_air.checkpoint.report import CheckpointReport
from lightning_air.checkpoint.saver import CheckpointFailedError, SaveReport
from lightning_air.checkpoint.shelf import Shelf
from lightning_air.checkpoint.suitable import (
    check_filename,
    check_own_folder,
    check_parts,
    check_same_start,
    check_seconds,
    look_together,
)
from lightning_air.checkpoint.timing import SharedSchedule
from lightning_air.checkpoint.untrusted import DamagedCheckpointError

# What a killed save has left is deleted once it is so old that no save can still be under way.
ORPHAN_AGE_SECONDS = 6 * 3600.0


class AirCheckpoint(ModelCheckpoint):
    """Save at a cadence, keep the newest and the best, and resume from the newest valid one.

    `trainer.fit(model, ckpt_path="last")` resumes from the newest valid checkpoint in `dirpath`, on any place, and
    starts anew where there is none. The end of training saves, too. So does SIGTERM, as far as `exception_timeout`
    allows: on several ranks with AirStrategy only, which stops all of them at one step. So does any other exception
    when there is one rank only (several cannot save together once one has failed).

    With `AsyncUCCheckpointIO` the metrics `checkpoint/…` go to every logger (`telemetry.py` lists them), loggers are
    told of a checkpoint once it is published, and what killed saves have left is deleted after six hours. Works with
    Lightning's own CheckpointIO as well. A folder belongs to one AirCheckpoint of one run and its retries.

    Args:
        dirpath: A local folder, `/Volumes/<catalog>/<schema>/<volume>/…`, `dbfs:/Volumes/…`, or a URL that fsspec
            knows. Default: as ModelCheckpoint's, in the logger's folder.
        every: "30min", "2h", "500steps", "1epoch" and the like, a timedelta, or "auto": as often as keeps the time lost
            to saves and failures least, from what saves were measured to block and from `failures_per_gpu_day`. Within
            gradient accumulation a save waits for the optimizer's step.
        keep_last: How many of the newest valid checkpoints stay, at least.
        monitor: A logged metric; after each validation (or training epoch) the best `save_top_k` by it are kept, too.
        mode: "min" or "max": which is best.
        save_top_k: How many of the best are kept, when there is a `monitor`; -1 keeps all.
        save_last: Let `last.ckpt` stand for the newest: True writes a small pointer file, "link" a symbolic link where
            the file system has them. Lightning's own CheckpointIO reads links only, so there both make one.
            `ckpt_path="last"` needs neither.
        filename: As for ModelCheckpoint; with `{step}`, so that no two checkpoints have one name. Default:
            "{epoch}-{step}".
        failures_per_gpu_day: For `every="auto"`. Default: those published for Llama 3's 16,384 GPUs.
        exception_timeout: How long a save on SIGTERM or an exception may take, in seconds: what is left between the
            platform's signal and its kill. 0: none is begun.
        save_weights_only: Leave out what only resuming needs: the optimizer's state, the position, callbacks.
        save_on_train_epoch_end: Rate by `monitor` at the end of training epochs (True) or of validations (False).
            Default: as ModelCheckpoint decides.
        auto_insert_metric_name: Let `{name}` in `filename` become "name=value" instead of the value alone.
        verbose: Tell for each rating whether it is among the best.

    Raises:
        ValueError: If an option is wrong.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every: str | timedelta = "30min",
        *,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool | Literal["link"] | None = None,
        filename: str | None = None,
        failures_per_gpu_day: float = FAILURES_PER_GPU_DAY,
        exception_timeout: float = 120.0,
        save_weights_only: bool = False,
        save_on_train_epoch_end: bool | None = None,
        auto_insert_metric_name: bool = True,
        verbose: bool = False,
    ) -> None:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise ValueError(f"keep_last must be a whole number of at least 1, got {keep_last!r}.")
        if save_last not in (None, True, False, "link"):
            raise ValueError(f"save_last must be True, False or 'link', got {save_last!r}.")
        if dirpath is not None and not isinstance(dirpath, str | os.PathLike):
            raise ValueError(f"dirpath must be a path or a URL, got {dirpath!r}.")
        check_seconds("failures_per_gpu_day", failures_per_gpu_day)
        check_seconds("exception_timeout", exception_timeout)
        check_filename(filename, auto_insert_metric_name=auto_insert_metric_name)
        self._every = parse_every(every)
        super().__init__(
            dirpath=None if dirpath is None else parse_place(dirpath).root,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=False,
            every_n_train_steps=0,
            every_n_epochs=1 if monitor is not None else 0,
            enable_version_counter=False,  # names differ by step, and a published checkpoint is not written over
            save_weights_only=save_weights_only,
            save_on_train_epoch_end=save_on_train_epoch_end,
            auto_insert_metric_name=auto_insert_metric_name,
            verbose=verbose,
        )
        self._given_dirpath = self.dirpath
        self._pointer = save_last
        self._failures_per_gpu_day = failures_per_gpu_day
        self._exception_timeout = exception_timeout
        self._keeping = Keeping(keep_last, mode)
        self._clock = time.monotonic
        self._schedule = Schedule(self._every)
        self._timing: SharedSchedule | None = None  # while training
        self._is_scoring = self._is_fitting = False
        self._found_last: str | None = None
        self._damaged: set[str] = set()
        # What rank 0 has learnt of saves, as they were asked for and published, and the others not.
        self._news: list[tuple[str, str | None]] = []
        self._num_failures = 0
        self._committed_step: int | None = None
        self._commit_lag_seconds = 0.0

    @property
    @override
    def state_key(self) -> str:
        # Without the cadence: a run may resume with another one, and must not forget its best checkpoints for it.
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, dirpath=self._given_dirpath)

    # ---- before training ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the place, and look what lies there. Collective: every rank calls this."""
        with warnings.catch_warnings():
            # It is where every attempt but the first begins.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        self.dirpath = folder = parse_place(str(self.dirpath)).root
        self._is_fitting = stage == "fit"
        check_parts(trainer, folder, has_pointer=bool(self._pointer))
        others = [each for each in trainer.checkpoint_callbacks if each is not self and isinstance(each, AirCheckpoint)]
        check_own_folder(folder, [each.dirpath for each in others])
        found, self._found_last = self._found_last, None
        check_same_start(trainer, found, folder)
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined] # set by a connector
            return
        io = self._io(trainer)
        self._keeping.start(look_together(trainer, folder, only_ours=io is not None, monitor=self.monitor))
        if io is not None:
            io.begin()
        if io is not None and (orphans := self._keeping.orphans(ORPHAN_AGE_SECONDS)) and trainer.is_global_zero:
            rank_zero_info(f"{len(orphans)} unfinished checkpoint(s) of killed saves in {folder} are deleted.")
            io.sweep(orphans)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        _begin_the_next_epoch(trainer)
        # There is nothing to save before the first step.
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = ""
        self._news = []
        io = self._io(trainer)
        path = None
        if trainer.ckpt_path is not None:
            path = io.loaded_from if io is not None else Shelf().resolve(str(trainer.ckpt_path))
            first = trainer.strategy.broadcast(path)
            if trainer.strategy.reduce_boolean_decision(path != first, all=False):  # each may have passed over its own
                raise RuntimeError(f"Rank {trainer.global_rank} has resumed from {path}, and rank 0 from {first}.")
        damaged = self._damaged | (io.passed_over if io is not None else set())
        self._keeping.resume(path, damaged=damaged, scores=self.best_k_models)
        self._rank_best()
        self._timing = SharedSchedule(self._schedule, trainer.strategy.broadcast, self._clock)
        self._timing.start(trainer.global_step)

    # ---- when to save ------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._collect(trainer)
        if not self._should_skip_saving_checkpoint(trainer) and self._is_due(trainer):
            self._save_now(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_due = self._is_due(trainer, epoch_end=True)
        with self._scoring():
            super().on_train_epoch_end(trainer, pl_module)  # the best by `monitor`
        if is_due and not self._should_skip_saving_checkpoint(trainer):
            self._save_now(trainer)

    def _is_due(self, trainer: Trainer, *, epoch_end: bool = False) -> bool:
        assert self._timing is not None  # from on_train_start on
        io = self._io(trainer)
        is_saving = io is not None and io.is_saving
        return self._timing.is_due(trainer.global_step, epoch_end=epoch_end, is_saving=is_saving)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._scoring():
            super().on_validation_end(trainer, pl_module)

    @contextmanager
    def _scoring(self) -> Generator[None, None, None]:
        """Let ModelCheckpoint rate this step even if the cadence has just saved it."""
        self._is_scoring = self.monitor is not None
        try:
            yield
        finally:
            self._is_scoring = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is not saved yet, and wait until it is published. Collective: every rank calls this.

        Raises:
            CheckpointFailedError: If it could not be saved.
        """
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_now(trainer)
        io = self._io(trainer)
        if io is not None:
            error = None
            try:
                io.settle()
            except CheckpointFailedError as raised:
                error = raised
            self._agree(trainer, error)
        self._timing = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save once more if all ranks are here, and there is time."""
        timing, self._timing = self._timing, None
        if timing is None:
            return
        if trainer.world_size > 1 and getattr(trainer.strategy, "stop", None) is None:
            if isinstance(exception, SIGTERMException):
                rank_zero_warn(
                    f"Step {trainer.global_step} is not saved: only AirStrategy stops all ranks at one step."
                )
            return
        try:
            self._save_before(trainer, self._clock() + self._exception_timeout, type(exception).__name__)
        except Exception as error:  # noqa: BLE001 - what ended the training is what the user has to see
            rank_zero_warn(f"Step {trainer.global_step} is not saved: {type(error).__name__}: {error}")

    def _save_before(self, trainer: Trainer, deadline: float, cause: str) -> None:
        """Finish the save under way and, if there is time for another one, save. Collective: every rank calls this."""
        io = self._io(trainer)
        if io is not None:
            io.settle(self._exception_timeout, quietly=True)
            self._agree(trainer, None)
        if self._should_skip_saving_checkpoint(trainer):
            return
        left = deadline - self._clock()
        if not trainer.strategy.broadcast(left > self._commit_lag_seconds):
            rank_zero_warn(
                f"Step {trainer.global_step} is not saved after {cause}: a save takes {self._commit_lag_seconds:.0f} "
                f"s, and {max(left, 0):.0f} of {self._exception_timeout:g} s are left."
            )
            return
        self._save_now(trainer)
        if io is not None:
            io.settle(max(0.0, deadline - self._clock()), quietly=True)
            self._agree(trainer, None)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _save_now(self, trainer: Trainer) -> None:
        self._save_checkpoint(trainer, self.format_checkpoint_name(self._monitor_candidates(trainer)))

    # Private: whether ModelCheckpoint does nothing at this point.
    @override
    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        if self._is_scoring:
            is_off: bool = trainer.fast_dev_run or trainer.sanity_checking  # type: ignore[attr-defined] # set by its connectors
            return is_off or trainer.state.fn != TrainerFn.FITTING
        return super()._should_skip_saving_checkpoint(trainer)

    # Private, and the one place through which ModelCheckpoint saves: it would tell the loggers of files to come.
    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Save, or rate what was saved at this step. Collective: every rank calls this.

        Raises:
            CheckpointFailedError: On every rank, if the save before failed.
        """
        asked, filepath = filepath, trainer.strategy.broadcast(filepath)  # a metric in it may differ between ranks
        self._rename(asked, filepath)
        if self._last_global_step_saved == trainer.global_step and self._last_checkpoint_saved:
            self._rename(filepath, self._last_checkpoint_saved)
            self._keeping.score(self._last_checkpoint_saved, self.best_k_models.get(self._last_checkpoint_saved))
            self._note_scores(trainer)
            self._delete_what_may_go(trainer)
            return
        self._keeping.begin(filepath, trainer.global_step, self.best_k_models.get(filepath))
        self._save(trainer, filepath)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if self._timing is not None:
            self._timing.record_save(trainer.global_step)
        io = self._io(trainer)
        if self._pointer:
            self.last_model_path = join(str(self.dirpath), self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION)
            if io is not None and trainer.is_global_zero:
                io.point(self.last_model_path, link=self._pointer == "link")
            elif trainer.is_global_zero:
                _link(self.last_model_path, filepath)
        if io is None:
            self._note_published(trainer, filepath, filepath)

    def _save(self, trainer: Trainer, filepath: str) -> None:
        error = None
        try:
            trainer.save_checkpoint(filepath, self.save_weights_only)
        except CheckpointFailedError as raised:  # the one before
            error = raised
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where ranks wait whom Lightning lets save nothing
        try:
            self._agree(trainer, error)
        except CheckpointFailedError:
            self._forget(filepath)  # it was not begun
            raise

    def _agree(self, trainer: Trainer, error: CheckpointFailedError | None) -> None:
        """Let every rank know how saves have ended. Collective: every rank calls this.

        Under stock DDP only rank 0 saves, and only it knows. What is among the best has to be the same on every rank.

        Raises:
            CheckpointFailedError: On every rank, if there was one on rank 0.
        """
        if self._io(trainer) is None:
            return
        self._collect(trainer)
        news, self._news = self._news, []
        told, news = trainer.strategy.broadcast((None if error is None else str(error), news))
        for asked, published in news:
            if published is None:
                self._forget(asked)
            elif asked in self._keeping.begun:
                self._note_published(trainer, asked, published)
        if error is not None:
            raise error
        if told is not None:
            raise CheckpointFailedError(told)

    # ---- after a save ------------------------------------------------------------------------------------------------

    def _collect(self, trainer: Trainer) -> None:
        """Take note of saves that have ended. No rank waits for another."""
        io = self._io(trainer)
        if io is None:
            return
        for report in io.take_reports(self._keeping.begun):
            self._news.append((report.path, report.published_path))
            if report.published_path is None:
                self._num_failures += 1
            else:
                rank_zero_info(telemetry.line(report))
                self._committed_step = report.step
                self._commit_lag_seconds = report.commit_lag_seconds
                self._choose_interval(trainer, report)
                self._note_published(trainer, report.path, report.published_path)
            if trainer.is_global_zero:
                metrics = telemetry.metrics(
                    report, num_failures=self._num_failures, last_committed_step=self._committed_step
                )
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=report.step)

    def _note_published(self, trainer: Trainer, asked: str, path: str) -> None:
        self._keeping.publish(asked, path)
        self._rename(asked, path)
        if self.monitor is None:
            self.best_model_path = path
        self._note_scores(trainer)
        self._delete_what_may_go(trainer)
        if trainer.is_global_zero:
            shown = self._as_published(path)
            for logger in trainer.loggers:
                logger.after_save_checkpoint(shown)

    def _note_scores(self, trainer: Trainer) -> None:
        """Note the scores beside the checkpoints: one that was rated after it was saved does not hold its own."""
        io = self._io(trainer)
        if self.monitor is None or not trainer.is_global_zero or not (scores := self._keeping.scores()):
            return
        if io is not None:
            io.note_scores(str(self.dirpath), self.monitor, scores)
            return
        try:
            Shelf().note_scores(str(self.dirpath), self.monitor, scores)
        except OSError as error:
            rank_zero_warn(f"How good the checkpoints in {self.dirpath} are could not be noted there: {error}")

    def _delete_what_may_go(self, trainer: Trainer) -> None:
        io = self._io(trainer)
        for old in self._keeping.to_delete(self.save_top_k if self.monitor is not None else 0):
            if io is None:
                trainer.strategy.remove_checkpoint(old)
            elif trainer.is_global_zero:
                io.discard([old])

    def _as_published(self, newest: str) -> "AirCheckpoint":
        """Return what loggers may see: a copy that knows of nothing that is on its way."""
        shown = copy.copy(self)
        shown._rank_best(only_published=True)  # noqa: SLF001 - a copy of this very object
        shown.last_model_path = newest if self._pointer else ""
        shown._last_checkpoint_saved = newest  # noqa: SLF001
        return shown

    def _rename(self, before: str, after: str) -> None:
        """Let what is known of a checkpoint stand under the name that it was published, or saved, under."""
        if before == after:
            return
        self.best_k_models = {after if path == before else path: score for path, score in self.best_k_models.items()}
        for name in ("best_model_path", "kth_best_model_path", "_last_checkpoint_saved"):
            if getattr(self, name) == before:
                setattr(self, name, after)

    def _forget(self, path: str) -> None:
        """A save failed: it is not among the best, and what it had ousted is there again."""
        self._keeping.fail(path)
        self._rank_best()
        if self._last_checkpoint_saved == path:  # the same step may be saved again
            self._last_checkpoint_saved, self._last_global_step_saved = "", -1

    def _rank_best(self, *, only_published: bool = False) -> None:
        """Set ModelCheckpoint's record of the best from what is there."""
        if self.monitor is None:
            return
        best = self._keeping.best(self.save_top_k, only_published=only_published)
        self.best_k_models = {path: torch.tensor(score) for path, score in best.items()}
        ranked = list(best)
        self.best_model_path = ranked[0] if ranked else ""
        self.best_model_score = self.best_k_models.get(self.best_model_path)
        self.kth_best_model_path = ranked[-1] if ranked and len(ranked) == self.save_top_k else ""
        if self.kth_best_model_path:
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def _choose_interval(self, trainer: Trainer, report: SaveReport) -> None:
        if self._timing is None or self._every.unit != "auto":
            return
        reason = self._timing.measure(
            blocking_seconds=report.blocking_seconds - report.wait_previous_seconds,
            upload_seconds=report.commit_lag_seconds,
            num_gpus=trainer.world_size,
            failures_per_gpu_day=self._failures_per_gpu_day,
        )
        if reason is not None:
            rank_zero_info(f"Checkpoints: {reason}.")

    # Private: ModelCheckpoint would delete a checkpoint while its replacement is still on its way. `Keeping` decides.
    @override
    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        return False

    # ---- resuming ----------------------------------------------------------------------------------------------------

    # Private: where `ckpt_path="last"` comes from. Lightning's own looks at names only, and on local disks only.
    @override
    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # Private, and name-mangled: the default folder, which depends on the Trainer.
        dirpath = self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        self._damaged = set()
        # Whether code in it may run is for the load to say, with an error: it is no reason to begin anew.
        self._found_last = latest_checkpoint(parse_place(dirpath).root, weights_only=False, on_skip=self._pass_over)
        if self._found_last is None:
            if self._damaged:
                damaged = ", ".join(sorted(self._damaged))
                raise DamagedCheckpointError(
                    f"No checkpoint in {dirpath} is valid, so `last` cannot resume: {damaged}. "
                    "`lightning-air checkpoints verify` says what is wrong. To begin anew, move them away."
                )
            return set()
        return {self._found_last if self._io(trainer) is None else wrapped(self._found_last)}

    def _pass_over(self, report: CheckpointReport) -> None:
        self._damaged.add(report.path)
        rank_zero_warn(f"Passing over a checkpoint. {report}")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedule": self._schedule.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._is_fitting and self.best_model_path:
            return  # a checkpoint that is evaluated knows nothing of those after it
        super().load_state_dict(state_dict)
        if "schedule" in state_dict:
            self._schedule.load_state_dict(state_dict["schedule"])

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the names of the optimizers' parameters, by which `AsyncUCCheckpointIO` stores their state."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._io(trainer) is not None and META_KEY not in checkpoint:
            names = {id(param): name for name, param in pl_module.named_parameters()}
            checkpoint[META_KEY] = {
                "parameter_names": [
                    [
                        [names.get(id(param), f"unnamed.{number}.{at}") for at, param in enumerate(group["params"])]
                        for number, group in enumerate(optimizer.param_groups)
                    ]
                    for optimizer in trainer.optimizers
                ]
            }

    def open_checkpoint(self, path: str | None = None) -> BytesIO:
        """Return one of its checkpoints, the best by default, as `load_from_checkpoint` and `torch.load` take it.

        All but the optimizers' states, verified, in this process' memory; of any of its forms and places. Any rank's.

        Raises:
            ValueError: If there is none yet.
            FileNotFoundError, BadCheckpointError, OSError: As `lightning_air.open_checkpoint`.
        """
        if not (path := path or self.best_model_path):
            raise ValueError("There is no best checkpoint yet. Name one: open_checkpoint(path).")
        return open_checkpoint(path)

    def _io(self, trainer: Trainer) -> AsyncUCCheckpointIO | None:
        found = trainer.strategy.checkpoint_io
        return found if isinstance(found, AsyncUCCheckpointIO) else None


def _begin_the_next_epoch(trainer: Trainer) -> None:
    """Have Lightning begin an epoch as any other when the checkpoint was taken after the last batch of the one before.

    It would take the new epoch for the rest of the old one: no `on_train_epoch_start`, and a count of begun epochs that
    is one too low, so that what resumes from this run's own checkpoints trains an epoch twice (Lightning 18060, 19815).
    """
    loop = trainer.fit_loop
    counts = loop.epoch_progress.current
    if loop.restarted_mid_epoch and counts.completed == counts.ready:  # its last batch is done, and counted
        loop.reset_restart_stage()


def _link(pointer: str, target: str) -> None:
    try:
        Shelf().point(pointer, target, link=True)
    except OSError as error:
        rank_zero_warn(f"{pointer} could not be made a link to {target}: {error}")
