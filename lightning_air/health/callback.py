"""GPUHealth: watches the GPUs of a run beside training, and logs a dozen numbers about all of them.

It observes, and never breaks what it observes: whatever NVML, the store or a logger does, `fit`, `validate`, `test` and
`predict` go on.
"""

import itertools
import logging
import math
import time
from typing import Any, final

from typing_extensions import override

from lightning_air._lightning import Callback, LightningModule, Trainer, all_parts, refuse_other_package
from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.node_watch import NodeWatch, Place
from lightning_air.health.nodes import OpenStore, open_store
from lightning_air.health.scene import Scene
from lightning_air.health.showing import Live, Showing, checked_live
from lightning_air.health.step_times import StepTimes
from lightning_air.runtime import detect_launch

log = logging.getLogger(__name__)

_MIN_POLL_SECONDS = 0.1
_MAX_POLLS = 1_000_000

# Every rank sets equally many of these callbacks up, so the same number means the same run of one on all of them.
_setups = itertools.count()


@final
class GPUHealth(Callback):
    """Watches all GPUs of all nodes; one sampler per node, on a background thread, nothing on the device.

    Every `poll_seconds` it reads utilisation, memory, temperatures, power, clocks, throttling, memory errors and links
    of every visible GPU, and hears of the driver's errors (XIDs) as they happen. What happens to a GPU is a warning in
    the log of its node and of rank 0. Every `log_every_seconds`, and once at the end, rank 0 logs about a dozen numbers
    about all GPUs (`gpu_health/temperature_c/max`, …) through the Trainer's loggers.

    Without NVIDIA's driver it says so once, and logs torch's memory figures and, if psutil is installed, the host's.

        trainer = Trainer(callbacks=[GPUHealth()])

    Args:
        poll_seconds: The time between two readings; at least 0.1.
        history_seconds: How long readings are kept in memory, for all GPUs on rank 0: 0.7 MB for 8 GPUs and two hours.
        log_every_seconds: The time between two records in the loggers.
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
        self.live = checked_live(live)
        self.report = report
        self._showing: Showing | None = None
        self._steps: StepTimes | None = None
        self._num_stepped = 0
        self._watch: NodeWatch | None = None
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what runs: copies and other processes start with the options only."""
        running = dict.fromkeys(("_watch", "_history", "_events", "_showing", "_steps"))
        return {**vars(self), **running, "_next_log_seconds": math.inf}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the sampler, on one rank of each node; waits for nothing."""
        refuse_other_package(trainer, *all_parts(trainer))
        number = next(_setups)  # on every rank, so that they count alike
        if trainer.local_rank != 0:
            return
        self._stop()
        try:
            self._start(trainer, number)
        except Exception:  # an observer that cannot observe says so, and training goes on
            log.exception("GPU health is off.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log a last time, and stop."""
        if self._next_log_seconds < math.inf:
            self._log(trainer)
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop: Lightning calls no `teardown` after an exception. Logs nothing, which could take its time."""
        self._stop()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._num_stepped = trainer.global_step
            self._steps.begin()

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._steps is not None and trainer.global_step != self._num_stepped:
            self._num_stepped = trainer.global_step
            self._steps.note()
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    @override
    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    @override
    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next_log_seconds:
            self._log(trainer)

    def _start(self, trainer: Trainer, number: int) -> None:
        place = Place(
            node_rank=trainer.node_rank,
            num_nodes=trainer.num_nodes,
            is_rank_zero=trainer.global_rank == 0,
            num_gpus_used=trainer.num_devices if trainer.strategy.root_device.type == "cuda" else 0,
            open_store=_opener(trainer, number),
        )
        if self._history is None:
            self._history = History(math.ceil(self.history_seconds / self.poll_seconds), self.poll_seconds)
            self._events = EventLog(place.node_rank)
        assert self._events is not None
        self._watch = NodeWatch(place, poll_seconds=self.poll_seconds, history=self._history, events=self._events)
        self._watch.start()
        if place.is_rank_zero and trainer.loggers:
            self._next_log_seconds = time.monotonic() + self.log_every_seconds
        if place.is_rank_zero:
            self._steps = self._steps or StepTimes(self._history.num_polls, self.poll_seconds)
            scene = Scene(self._history, self._events, self._steps)
            self._showing = Showing.begin(scene, trainer, report=self.report, live=self.live)

    def _stop(self) -> None:
        self._next_log_seconds = math.inf
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        showing, self._showing = self._showing, None
        if showing is not None:
            showing.close()

    def _log(self, trainer: Trainer) -> None:
        self._next_log_seconds = time.monotonic() + self.log_every_seconds
        try:
            metrics = self._watch.metrics() if self._watch is not None else {}
            if metrics:
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=trainer.global_step)
        except Exception:
            self._next_log_seconds = math.inf
            log.exception("GPU health could not be logged, and is not from now on; the GPUs are still watched.")


def _opener(trainer: Trainer, number: int) -> OpenStore | None:
    """Return what opens the store at which the ranks of this Trainer have met; None where there is one node."""
    if trainer.num_nodes == 1:
        return None
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None:
        log.warning(
            "GPU health of rank 0's node only is logged: %s does not tell where its ranks meet.",
            type(trainer.strategy).__name__,
        )
        return None
    address, port = environment.main_address, environment.main_port
    # torchrun's agent keeps its store, with the keys of the processes that it has started before.
    prefix = f"lightning_air/gpu_health/{detect_launch().restart_count}/{number}"
    return lambda: open_store(address, port, prefix)


def _seconds(name: str, value: float, minimum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}.")
    if not minimum <= value < math.inf:
        raise ValueError(f"{name} must be at least {minimum:g} and finite, got {value!r}.")
    return float(value)
