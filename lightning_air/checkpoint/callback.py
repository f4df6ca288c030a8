"""`AirCheckpoint`: when to save, what to keep, and what to resume from.

A `ModelCheckpoint` whose cadence is time, steps, epochs or what failures and saves cost, and which counts only what is
published: the newest `keep_last` checkpoints stay, the best `save_top_k` beside them, and nothing is deleted before its
replacement can be read.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from typing_extensions import override

from lightning_air._lightning import (
    FSDPStrategy,
    LightningModule,
    ModelCheckpoint,
    ModelParallelStrategy,
    SIGTERMException,
    Trainer,
    TrainerFn,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_air.checkpoint import telemetry
from lightning_air.checkpoint.cadence import FAILURES_PER_GPU_DAY, Schedule, auto_interval, parse_every
from lightning_air.checkpoint.io import AsyncUCCheckpointIO
from lightning_air.checkpoint.keeping import Keeping
from lightning_air.checkpoint.last_path import unwrapped, wrapped
from lightning_air.checkpoint.latest import latest_checkpoint
from lightning_air.checkpoint.places import check_writable, join, open_store, parse_place
from lightning_air.checkpoint.saver import SaveReport
from lightning_air.checkpoint.timing import SharedSchedule

# What a killed save has left is deleted once it is so old that no save can still be under way.
ORPHAN_AGE_SECONDS = 6 * 3600.0


class AirCheckpoint(ModelCheckpoint):
    """Save at a cadence, keep the newest and the best, and resume from the newest valid one.

    `trainer.fit(model, ckpt_path="last")` resumes from the newest valid checkpoint in `dirpath`, on any place, and
    starts anew where there is none. SIGTERM saves once more, as far as `exception_timeout` allows; so does any
    exception when there is one rank only (several cannot save together once one has failed). The end of training saves,
    too.

    With `AsyncUCCheckpointIO` the metrics `checkpoint/…` go to every logger. Works with Lightning's own CheckpointIO as
    well.

    Args:
        dirpath: A local folder, `/Volumes/<catalog>/<schema>/<volume>/…`, `dbfs:/Volumes/…`, or a URL that fsspec
            knows. Default: as ModelCheckpoint's, in the logger's folder.
        every: "30min", "2h", "500steps", "1epoch" and the like, a timedelta, or "auto": as often as keeps the time lost
            to saves and failures least, from what saves were measured to block and from `failures_per_gpu_day`.
        keep_last: How many of the newest valid checkpoints stay, at least.
        monitor: A logged metric; after each validation (or training epoch) the best `save_top_k` by it are kept, too.
        mode: "min" or "max": which is best.
        save_top_k: How many of the best are kept, when there is a `monitor`; -1 keeps all.
        save_last: Let `last.ckpt` stand for the newest: True writes a small pointer file, "link" a symbolic link where
            the file system has them. `ckpt_path="last"` needs neither.
        filename: As for ModelCheckpoint. Default: "{epoch}-{step}".
        failures_per_gpu_day: For `every="auto"`. Default: those published for Llama 3's 16,384 GPUs.
        exception_timeout: How long a save on SIGTERM or an exception may take, in seconds: what is left between the
            platform's signal and its kill.
        **kwargs: What else ModelCheckpoint takes and this class does not decide, such as `save_weights_only`.

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
        **kwargs: Any,
    ) -> None:
        taken = {"every_n_train_steps", "every_n_epochs", "train_time_interval", "save_on_exception"} & kwargs.keys()
        if taken:
            raise ValueError(
                f"{', '.join(sorted(taken))}: AirCheckpoint saves `every=…`, such as '30min' or '500steps'."
            )
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise ValueError(f"keep_last must be a whole number of at least 1, got {keep_last!r}.")
        for name, value in (("failures_per_gpu_day", failures_per_gpu_day), ("exception_timeout", exception_timeout)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")
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
            **kwargs,
        )
        self._last = save_last
        self._failures_per_gpu_day = failures_per_gpu_day
        self._exception_timeout = exception_timeout
        self._keeping = Keeping(keep_last, mode)
        self._schedule = Schedule(self._every)
        self._timing: SharedSchedule | None = None
        self._num_failures = 0
        self._commit_lag_seconds = 0.0
        self._reason = ""
        self._is_scoring = False

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, every=str(self._every))

    # ---- before training ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the place, and look what lies there. Collective: every rank calls this."""
        self._refuse_unasked_io(trainer)
        super().setup(trainer, pl_module, stage)
        self._refuse_different_starts(trainer)
        if stage != "fit":
            return
        found, error = [], None
        if trainer.is_global_zero:
            try:
                assert self.dirpath is not None
                check_writable(open_store(str(self.dirpath)))
                found = self._keeping.look(str(self.dirpath))
            except OSError as raised:
                error = raised
        told, found = trainer.strategy.broadcast((None if error is None else str(error), found))
        if told is not None:
            raise OSError(f"AirCheckpoint cannot write to {self.dirpath}: {told}") from error
        self._keeping.start(
            found, resumed_from=None if trainer.ckpt_path is None else unwrapped(str(trainer.ckpt_path))
        )
        io = self._io(trainer)
        if io is not None and (orphans := self._keeping.orphans(ORPHAN_AGE_SECONDS)):
            rank_zero_info(f"{len(orphans)} unfinished checkpoint(s) of killed saves in {self.dirpath} are deleted.")
            io.sweep(orphans)

    def _refuse_unasked_io(self, trainer: Trainer) -> None:
        """Stock FSDP strategies never call a CheckpointIO: the checkpoints would be others than the user asked for."""
        is_stock = type(trainer.strategy).__module__.startswith("lightning.")
        if is_stock and isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy) and self._io(trainer):
            raise ValueError(
                f"{type(trainer.strategy).__name__} does not use AsyncUCCheckpointIO. Use "
                "`strategy=AirStrategy(sharding='fsdp')`, or leave the plugin out."
            )

    def _refuse_different_starts(self, trainer: Trainer) -> None:
        """Ranks look for "last" before they can talk to each other; a folder that only some of them see hangs them."""
        mine = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        first = trainer.strategy.broadcast(mine)
        differs = mine != first
        if trainer.strategy.reduce_boolean_decision(differs, all=False):
            raise RuntimeError(
                f"Rank {trainer.global_rank} would resume from {mine}, and rank 0 from {first}. Every node has to see "
                f"the same checkpoints in {self.dirpath}: use a volume, a store or a shared folder."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step  # nothing to save before the first step
        self._keeping.score(self.best_k_models)
        self._timing = SharedSchedule(self._schedule, trainer.strategy.broadcast, time.monotonic)
        self._timing.start(trainer.global_step)

    # ---- saving ------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._collect(trainer)
        if self._should_skip_saving_checkpoint(trainer):
            return
        if self._asked(trainer).is_due(trainer.global_step):
            self._save_now(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_due = self._asked(trainer).is_due(trainer.global_step, epoch_end=True)
        with self._scoring():
            super().on_train_epoch_end(trainer, pl_module)  # the best by `monitor`
        if is_due and not self._should_skip_saving_checkpoint(trainer):
            self._save_now(trainer)

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
            try:
                io.settle()
            finally:
                self._collect(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save once more if all ranks are here, and there is time."""
        io = self._io(trainer)
        if self._timing is None or self._should_skip_saving_checkpoint(trainer):
            return
        is_agreed = trainer.world_size == 1 or isinstance(exception, SIGTERMException)
        if not is_agreed and getattr(trainer.strategy, "stop", None) is None:
            return
        started = time.monotonic()
        if io is not None:
            io.settle(self._exception_timeout, quietly=True)
            self._collect(trainer)
        left = self._exception_timeout - (time.monotonic() - started)
        if not trainer.strategy.broadcast(left > self._commit_lag_seconds):
            rank_zero_warn(
                f"Step {trainer.global_step} is not saved after {type(exception).__name__}: a save takes "
                f"{self._commit_lag_seconds:.0f} s, and {max(left, 0):.0f} of {self._exception_timeout:g} s are left."
            )
            return
        self._save_now(trainer)
        if io is not None:
            io.settle(left, quietly=True)
            self._collect(trainer)

    def _asked(self, trainer: Trainer) -> SharedSchedule:
        if self._timing is None:
            raise RuntimeError(f"AirCheckpoint was asked to save before {type(trainer).__name__} began to train.")
        return self._timing

    def _save_now(self, trainer: Trainer) -> None:
        name = self.format_checkpoint_name(self._monitor_candidates(trainer))
        self._save_checkpoint(trainer, name)

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
        if self._last_global_step_saved == trainer.global_step and self._last_checkpoint_saved:
            self._score_saved(filepath, self._last_checkpoint_saved)
            return
        score = self.best_k_models.get(filepath)
        self._keeping.begin(filepath, trainer.global_step, score)
        trainer.save_checkpoint(filepath, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if self._timing is not None:
            self._timing.record_save(trainer.global_step)
        io = self._io(trainer)
        if io is None:
            self._published(trainer, filepath, filepath)
        elif self._last:
            self.last_model_path = join(str(self.dirpath), self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION)
            io.point(self.last_model_path, link=self._last == "link")

    # ---- after a save ------------------------------------------------------------------------------------------------

    def _collect(self, trainer: Trainer) -> None:
        """Take note of saves that have ended. No rank waits for another."""
        io = self._io(trainer)
        if io is None:
            return
        for report in io.take_reports():
            if report.published_path is None:
                self._num_failures += 1
                self._forget(report.path)
            else:
                rank_zero_info(telemetry.line(report))
                self._published(trainer, report.path, report.published_path)
                self._commit_lag_seconds = report.commit_lag_seconds
                self._choose_interval(trainer, report)
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.log_metrics(telemetry.metrics(report, self._num_failures), step=report.step)

    def _published(self, trainer: Trainer, asked: str, path: str) -> None:
        self._keeping.publish(asked, path)
        io = self._io(trainer)
        for old in self._keeping.to_delete(self.save_top_k if self.monitor is not None else 0):
            if io is not None:
                io.remove_checkpoint(old)
            else:
                trainer.strategy.remove_checkpoint(old)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _score_saved(self, name: str, path: str) -> None:
        """Rate the checkpoint that was saved at this step instead of saving it again under another name."""
        if name != path and name in self.best_k_models:
            self.best_k_models[path] = self.best_k_models.pop(name)
            self.best_model_path, self.kth_best_model_path = (
                path if each == name else each for each in (self.best_model_path, self.kth_best_model_path)
            )
        self._keeping.score(self.best_k_models)

    def _forget(self, path: str) -> None:
        """A save failed: what it was to be is not among the best."""
        self._keeping.fail(path)
        if self.best_k_models.pop(path, None) is not None:
            best = min if self.mode == "min" else max
            self.best_model_path = best(self.best_k_models, key=lambda p: self.best_k_models[p], default="")
            self.best_model_score = self.best_k_models.get(self.best_model_path)
            self.kth_best_model_path = ""

    def _choose_interval(self, trainer: Trainer, report: SaveReport) -> None:
        if self._every.unit != "auto":
            return
        choice = auto_interval(
            blocking_seconds=report.blocking_seconds,
            upload_seconds=report.commit_lag_seconds,
            num_gpus=trainer.world_size,
            failures_per_gpu_day=self._failures_per_gpu_day,
        )
        before = self._schedule.interval_seconds or choice.seconds
        if not self._reason or not 0.8 < choice.seconds / before < 1.25:  # noqa: PLR2004 - as much as is worth a line
            self._reason = choice.reason
            rank_zero_info(f"Checkpoints: {choice.reason}.")
        self._schedule.retime(choice.seconds)

    # Private: ModelCheckpoint would delete a checkpoint while its replacement is still on its way. `Keeping` decides.
    @override
    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        return False

    # Private: where `ckpt_path="last"` comes from. Lightning's own looks at names only, and on local disks only.
    @override
    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # Private, and name-mangled: the default folder, which depends on the Trainer.
        dirpath = self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        newest = latest_checkpoint(str(dirpath))
        return set() if newest is None else {wrapped(newest)}

    # ---- state -------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedule": self._schedule.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "schedule" in state_dict:
            self._schedule.load_state_dict(state_dict["schedule"])

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the names of the optimizers' parameters, by which `AsyncUCCheckpointIO` stores their state."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._io(trainer) is not None and "lightning_air" not in checkpoint:
            names = {id(param): name for name, param in pl_module.named_parameters()}
            checkpoint["lightning_air"] = {
                "parameter_names": [
                    [
                        [names.get(id(param), f"unnamed.{at}") for at, param in enumerate(group["params"])]
                        for group in each
                    ]
                    for each in (optimizer.param_groups for optimizer in trainer.optimizers)
                ]
            }

    def _io(self, trainer: Trainer) -> AsyncUCCheckpointIO | None:
        io = trainer.strategy.checkpoint_io
        return io if isinstance(io, AsyncUCCheckpointIO) else None
