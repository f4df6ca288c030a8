"""Reads the GPUs of a node every few seconds, and survives all that NVML may do: refuse, lose a GPU, vanish, hang.

Each poll is one sweep of `GpuReader`. What a sweep cannot say is an event. NVML that is lost is opened again after a
pause that grows; no library at all is said once, and that is that. A poll that hangs is seen by others: `num_polls`
stands still.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from lightning_air.health.events import EventLog
from lightning_air.health.history import GpuId, History, Row, row_of
from lightning_air.health.nvml import NvmlError
from lightning_air.health.reader import GpuReader, Say
from lightning_air.health.sample import GPUSample

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 300.0


class Reader(Protocol):
    """What a sampler needs of `GpuReader`."""

    def sweep(self) -> list[GPUSample]:
        """Read all GPUs once."""

    def close(self) -> None:
        """Give NVML back."""


def _open_reader(say: Say) -> Reader:
    return GpuReader(say=say)


class Sampler:
    """The polls of one node. `poll` is called by one thread, the rest may be by any.

    Args:
        events: Gets what happens.
        history: Gets what is read.
        node_rank: Of this node.
        poll_seconds: The time between two polls.
        num_used: How many GPUs the ranks of this node use, where that is known.
        open_reader: Opens NVML, and may raise `NvmlError`.
        clock: Seconds since the epoch.

    Attributes:
        num_polls: How many polls have ended, whatever came of them.
        samples: Of the last poll; () while NVML is not there.
        rows: The same as it stands in the history.
        is_absent: There is no NVML on this machine, and none will come.
    """

    def __init__(
        self,
        *,
        events: EventLog,
        history: History,
        node_rank: int = 0,
        poll_seconds: float = 10.0,
        num_used: int = 0,
        open_reader: Callable[[Say], Reader] = _open_reader,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.num_polls = 0
        self.samples: tuple[GPUSample, ...] = ()
        self.rows: dict[GpuId, Row] = {}
        self.is_absent = False
        self._events = events
        self._history = history
        self._node_rank = node_rank
        self._poll_seconds = poll_seconds
        self._num_used = num_used
        self._open_reader = open_reader
        self._clock = clock
        self._reader: Reader | None = None
        self._said: set[str] = set()
        self._known: dict[str, GPUSample] = {}  # by UUID, the first good sample
        self._lost: set[str] = set()
        self._is_down = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next_opening = 0.0

    def run(self, closed: threading.Event) -> None:
        """Poll until told to end: at once, and then whenever the clock shows a multiple of `poll_seconds`.

        All nodes poll at the same moments then, and a poll never falls between two places of the history.
        """
        while not closed.is_set():
            self.poll(closed)
            now = self._clock()
            closed.wait(self._poll_seconds - now % self._poll_seconds)
        self._close_reader()

    def poll(self, closed: threading.Event | None = None) -> None:
        """Read all GPUs once. Raises nothing; may block for ever."""
        samples = self._sweep()
        if closed is not None and closed.is_set():  # it was stuck, and nobody waits for what it has read any more
            return
        if samples is not None:
            samples = self._with_missing(samples)
            self._tell_losses(samples)
            for sample in samples:
                if not sample.is_lost:
                    self._known.setdefault(sample.uuid, sample)
        self.samples = tuple(
            replace(sample, xids=self._events.xids_of(sample.parent_uuid or sample.uuid)) for sample in samples or ()
        )
        self.rows = {
            GpuId(sample.uuid, sample.index, sample.name, self._node_rank): row_of(sample, self._known.get(sample.uuid))
            for sample in self.samples
        }
        if self.rows:
            self._history.append(self._clock(), self.rows)
        self.num_polls += 1

    def _sweep(self) -> list[GPUSample] | None:
        """Return what the GPUs say; None while NVML is not there."""
        if self.is_absent or (self._reader is None and self._clock() < self._next_opening):
            return None
        try:
            if self._reader is None:
                self._reader = self._open_reader(self._say)
            samples = self._reader.sweep()
        except NvmlError as error:
            self._lose(error)
            return None
        if self._is_down:
            self._is_down = False
            self._events.add("nvml_back", "NVML answers again; the GPUs of this node are watched as before.")
        self._pause_seconds = FIRST_PAUSE_SECONDS
        if len(samples) < self._num_used:  # such as under `srun --gpus-per-task=1`
            self._say(
                "selection",
                f"{len(samples)} of the {self._num_used} GPUs that this node trains on can be seen by the process that "
                "reads them all; the others are not watched. Let every process see all GPUs of the node "
                "(CUDA_VISIBLE_DEVICES; with SLURM, --gpus-per-node instead of --gpus-per-task).",
            )
        return samples

    def _lose(self, error: NvmlError) -> None:
        self._close_reader()
        if error.kind == "absent":
            self.is_absent = True
            self._events.add(
                "nvml_absent",
                f"No GPU is watched: {str(error).rstrip('.')}. Without NVIDIA's driver, torch's memory figures and the "
                "CPU and RAM of the host (if psutil is installed) are logged instead.",
            )
            return
        if not self._is_down:
            self._is_down = True
            self._events.add(
                "nvml_lost",
                f"NVML does not work ({error}); it is opened again after a while. If the driver was replaced or a "
                "container lost its devices, restart the job there; training itself may go on.",
            )
        self._next_opening = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _say(self, kind: str, message: str) -> None:
        """Pass on what a reader says, once: after NVML was lost, another one finds out the same."""
        if message not in self._said:
            self._said.add(message)
            self._events.add("not_read" if kind == "unsupported" else kind, message)

    def _with_missing(self, samples: list[GPUSample]) -> list[GPUSample]:
        """Add the GPUs that were there before NVML was opened again, and are not any more."""
        present = {sample.uuid for sample in samples}
        missing = [
            GPUSample(uuid=known.uuid, index=known.index, name=known.name, parent_uuid=known.parent_uuid, is_lost=True)
            for known in self._known.values()
            if known.uuid not in present
        ]
        return [*samples, *missing]

    def _tell_losses(self, samples: list[GPUSample]) -> None:
        for sample in samples:
            if sample.is_lost == (sample.uuid in self._lost):
                continue
            where = f"GPU {sample.index} ({sample.uuid}, {sample.name})"
            if sample.is_lost:
                self._lost.add(sample.uuid)
                self._events.add(
                    "gpu_lost",
                    f"{where} is lost: the driver does not reach it. What runs on it will fail or hang. Its machine "
                    "needs a reset of the GPU or a reboot, and should be left out until then.",
                    uuid=sample.uuid,
                )
            else:
                self._lost.discard(sample.uuid)
                self._events.add("gpu_back", f"{where} answers again.", uuid=sample.uuid)
