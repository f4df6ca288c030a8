"""GPUHealth: watches the GPUs of a run beside training, and logs a dozen numbers about all of them.

It observes, and never breaks what it observes: whatever NVML, the store or a logger does, `fit`, `validate`, `test` and
`predict` go on.
"""

import itertools
import logging
import math
import threading
import time
from typing import Any, final

from torch.distributed import HashStore
from typing_extensions import override

from lightning_air._lightning import Callback, LightningModule, Trainer, all_parts, refuse_other_package
from lightning_air.health.default_rules import default_rules
from lightning_air.health.events import EventLog
from lightning_air.health.hang_watch import RankPlace
from lightning_air.health.hangs import HangRule
from lightning_air.health.health_run import HealthOptions, HealthRun
from lightning_air.health.history import History
from lightning_air.health.leaving import choose_folder
from lightning_air.health.node_watch import Place
from lightning_air.health.nodes import OpenStore, open_store
from lightning_air.health.progress import Progress
from lightning_air.health.rules import Rule, check_names
from lightning_air.health.scene import Scene
from lightning_air.health.showing import Live, Showing, checked_live
from lightning_air.health.step_times import StepTimes
from lightning_air.runtime import detect_launch

log = logging.getLogger(__name__)

_MIN_POLL_SECONDS = 0.1
_MAX_POLLS = 1_000_000
_DEFAULT_HANG = HangRule()

# Every rank sets equally many of these callbacks up, so the same number means the same run of one on all of them.
_setups = itertools.count()


@final
class GPUHealth(Callback):
    """Watches all GPUs of all nodes; one sampler per node, on a background thread, nothing on the device.

    Every `poll_seconds` it reads utilisation, memory, temperatures, power, clocks, throttling, memory errors and links
    of every visible GPU, and hears of the driver's errors (XIDs) as they happen. What happens to a GPU is a warning in
    the log of its node and of rank 0. Rank 0 compares the readings of all nodes with `rules`; what breaks one is an
    incident, told once with the GPU, its node, the value, since when and what to do, until it is over. Every
    `log_every_seconds`, and once at the end, rank 0 logs about a dozen numbers about all GPUs
    (`gpu_health/temperature_c/max`, …) through the Trainer's loggers.

    Every rank also watches its own loop: a run in which nothing goes on is an incident, on machines without a GPU as
    well. All ranks' stacks then go to a folder and to the run's artifacts, and rank 0 says which rank holds up the
    others, and where in the program (see `HangRule`).

    By default nothing more is done about an incident. A rule with `checkpoint_stop` saves a checkpoint after the same
    step on all ranks and ends `fit` as an early stop does; `stop_reason` then says why. One with `abort` ends all
    processes with exit status 75, and the next attempt says at its start why.

    Without NVIDIA's driver it says so once, and logs torch's memory figures and, if psutil is installed, the host's.

        trainer = Trainer(callbacks=[GPUHealth()])

    Args:
        poll_seconds: The time between two readings; at least 0.1.
        history_seconds: How long readings are kept in memory, for all GPUs on rank 0: 0.7 MB for 8 GPUs and two hours.
        log_every_seconds: The time between two records in the loggers.
        rules: What is an incident; default: those of `default_rules`, in whose module a table shows them. [] is none.
        hang: When a rank's loop hangs; None is never.
        folder: Where stacks, the reasons of aborts and the list of excluded nodes go; default: `gpu_health` in the
            Trainer's `default_root_dir`. Name one on a volume where the next attempt runs on another machine.
        live: "table" shows the GPUs in the terminal of rank 0, "page" on a page of its machine, whose address is in
            the log.
        report: Whether rank 0 writes `gpu_health/report.html`, every ten minutes and at the end, to the `log_dir` of
            a logger that has one, else to `default_root_dir`, and to the artifacts of the MLflow run.

    Raises:
        ValueError: A number is out of its range, or `live` is none of these.
        TypeError: A value is no number, or the Trainer comes from `pytorch_lightning`.
    """

    def __init__(
        self,
        *,
        poll_seconds: float = 10,
        history_seconds: float = 7200,
        log_every_seconds: float = 60,
        rules: list[Rule] | None = None,
        hang: HangRule | None = _DEFAULT_HANG,
        folder: str | None = None,
        live: Live = False,
        report: bool = True,
    ) -> None:
        self.poll_seconds = _seconds("poll_seconds", poll_seconds, _MIN_POLL_SECONDS)
        self.history_seconds = _seconds("history_seconds", history_seconds, poll_seconds)
        self.log_every_seconds = _seconds("log_every_seconds", log_every_seconds, _MIN_POLL_SECONDS)
        if history_seconds / poll_seconds > _MAX_POLLS:
            raise ValueError(
                f"history_seconds must be at most {_MAX_POLLS:,} times poll_seconds, got {history_seconds} and "
                f"{poll_seconds}. Keep less, or poll less often."
            )
        self.rules = default_rules() if rules is None else list(rules)
        check_names(self.rules)
        if hang is not None and not isinstance(hang, HangRule):
            raise TypeError(f"hang must be a HangRule or None, got {hang!r}. Write HangRule(min_seconds=600).")
        if folder is not None and "://" in str(folder):
            raise ValueError(
                f"folder must be a path, got {folder!r}. A volume is '/Volumes/<catalog>/<schema>/<volume>'."
            )
        self.hang = hang
        self.folder = None if folder is None else str(folder)
        self._run: HealthRun | None = None
        self._progress = Progress()
        self._last_global_step = 0
        self._stop_reason: str | None = None
        self.live = checked_live(live)
        self.report = report
        self._showing: Showing | None = None
        self._steps: StepTimes | None = None
        self._history: History | None = None
        self._events: EventLog | None = None
        self._next_log_seconds = math.inf

    @property
    def history(self) -> History | None:
        """The readings: of all nodes on rank 0, of its own on the first rank of a node, None elsewhere."""
        return self._history

    @property
    def events(self) -> EventLog | None:
        """What has happened, likewise."""
        return self._events

    @property
    def stop_reason(self) -> str | None:
        """Why a rule's `checkpoint_stop` has ended the last `fit`, on every rank; None if none has."""
        return self._stop_reason

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what runs: copies and other processes start with the options only."""
        running = dict.fromkeys(("_run", "_history", "_events", "_showing", "_steps", "_stop_reason"))
        return {**vars(self), **running, "_next_log_seconds": math.inf}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start: the sampler on one rank of each node, and on every rank what watches its loop; waits for nothing."""
        refuse_other_package(trainer, *all_parts(trainer))
        number = next(_setups)  # on every rank, so that they count alike
        self._stop_reason = None
        self._close()
        try:
            self._start(trainer, number)
        except Exception:  # an observer that cannot observe says so, and training goes on
            log.exception("GPU health is off.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log a last time, and stop."""
        if self._next_log_seconds < math.inf:
            self._log(trainer)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop: Lightning calls no `teardown` after an exception. Logs nothing, which could take its time."""
        self._close()

    # ---- the loop goes on --------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._progress.batch_start("training", batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the step, and leave with all other ranks if they have agreed to."""
        progress = self._progress
        progress.batch_end("training", batch_idx)
        if self._steps is not None and trainer.global_step != self._last_global_step:
            self._steps.note()
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)
        if self._run is not None and self._run.stop.is_due(progress.mark.num_batches):
            self._stop_training(trainer, self._run.stop.reason)
        self._last_global_step = trainer.global_step

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.batch_start("evaluation", args[2])

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.batch_end("evaluation", args[3])
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    @override
    def on_test_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.batch_start("evaluation", args[2])

    @override
    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.batch_end("evaluation", args[3])
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    @override
    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.batch_start("evaluation", args[2])

    @override
    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.batch_end("evaluation", args[3])
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._progress.pause("saving a checkpoint")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_global_step = trainer.global_step
        if self._steps is not None:
            self._steps.begin()
        self._begin(trainer, "at the start of training")

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.pause(f"at the start of epoch {trainer.current_epoch}")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.pause(f"at the end of epoch {trainer.current_epoch}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.pause("at the end of training")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "at the start of a validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.pause("at the end of a validation")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "at the start of the test")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.pause("at the end of the test")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "at the start of the prediction")

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.pause("at the end of the prediction")

    def _begin(self, trainer: Trainer, where: str) -> None:
        self._progress.pause(where)
        if self._run is not None:
            self._run.meet(trainer.loggers)

    # ---- what runs ---------------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, number: int) -> None:
        is_first_of_node = trainer.local_rank == 0
        place = Place(
            node_rank=trainer.node_rank,
            num_nodes=trainer.num_nodes,
            is_rank_zero=trainer.global_rank == 0,
            num_gpus_used=trainer.num_devices if trainer.strategy.root_device.type == "cuda" else 0,
            open_store=_opener(trainer, number, "nodes") if trainer.num_nodes > 1 and is_first_of_node else None,
        )
        rank = RankPlace(
            global_rank=trainer.global_rank,
            local_rank=trainer.local_rank,
            node_rank=trainer.node_rank,
            world_size=trainer.world_size,
            thread_ident=threading.get_ident(),
        )
        if self._history is None and is_first_of_node:
            self._history = History(math.ceil(self.history_seconds / self.poll_seconds), self.poll_seconds)
            self._events = EventLog(place.node_rank)
        options = HealthOptions(
            poll_seconds=self.poll_seconds,
            rules=self.rules,
            hang=self.hang,
            folder=choose_folder(self.folder, trainer.default_root_dir),
        )
        run = HealthRun(
            place,
            rank,
            options,
            history=self._history,
            events=self._events,
            open_rank_store=_opener(trainer, number, "ranks") if options.watches_ranks else None,
        )
        run.start()
        self._run, self._progress = run, run.progress
        if place.is_rank_zero and trainer.loggers:
            self._next_log_seconds = time.monotonic() + self.log_every_seconds
        if place.is_rank_zero and self._history is not None and self._events is not None:
            self._steps = self._steps or StepTimes(self._history.num_polls, self.poll_seconds)
            scene = Scene(self._history, self._events, self._steps)
            self._showing = Showing.begin(scene, trainer, report=self.report, live=self.live)

    def _close(self) -> None:
        self._next_log_seconds = math.inf
        run, self._run = self._run, None
        if run is not None:
            run.close()
        showing, self._showing = self._showing, None
        if showing is not None:
            showing.close()

    def _stop_training(self, trainer: Trainer, reason: str) -> None:
        """Save a checkpoint and let the loop end, after an optimizer's step. Collective: every rank calls this."""
        if self._stop_reason is not None:
            return
        if trainer.accumulate_grad_batches > 1 and trainer.global_step == self._last_global_step:
            return  # within an accumulation, and on all ranks alike
        self._stop_reason = reason
        path = stop_checkpoint_path(trainer, self.folder)
        if self._events is not None:
            self._events.add(
                "stopped", f"Training stops after step {trainer.global_step} on all ranks, saved as {path}: {reason}"
            )
        trainer.save_checkpoint(path)
        # What a healthy run has to do at least does not count for a sick one.
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def _log(self, trainer: Trainer) -> None:
        self._next_log_seconds = time.monotonic() + self.log_every_seconds
        try:
            metrics = self._run.metrics() if self._run is not None else {}
            if metrics:
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=trainer.global_step)
        except Exception:
            self._next_log_seconds = math.inf
            log.exception("GPU health could not be logged, and is not from now on; the GPUs are still watched.")


def stop_checkpoint_path(trainer: Trainer, folder: str | None) -> str:
    """Return where a checkpoint goes before a stop: beside the others, or where GPU health's own files go.

    Args:
        trainer: Whose training stops.
        folder: That the user has named for GPU health's files.
    """
    beside = getattr(trainer.checkpoint_callback, "dirpath", None)
    place = beside or folder or f"{trainer.default_root_dir}/gpu_health"
    return f"{str(place).rstrip('/')}/gpu_health-step={trainer.global_step}.ckpt"


def _opener(trainer: Trainer, number: int, who: str) -> OpenStore | None:
    """Return what opens the store at which the ranks of this Trainer have met; None where that is not told.

    Args:
        trainer: Whose ranks meet.
        number: Of its run.
        who: Who meets there, for the names of the keys.
    """
    if trainer.world_size == 1:
        return HashStore
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None:
        log.warning(
            "GPU health knows of this %s only, and cannot stop all ranks: %s does not tell where they meet.",
            "node" if who == "nodes" else "rank",
            type(trainer.strategy).__name__,
        )
        return None
    address, port = environment.main_address, environment.main_port
    # torchrun's agent keeps its store, with the keys of the processes that it has started before.
    prefix = f"lightning_air/gpu_health/{detect_launch().restart_count}/{number}/{who}"
    return lambda: open_store(address, port, prefix)


def _seconds(name: str, value: float, minimum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}.")
    if not minimum <= value < math.inf:
        raise ValueError(f"{name} must be at least {minimum:g} and finite, got {value!r}.")
    return float(value)
