"""Waits for what the driver tells by itself: XIDs and memory errors. It waits inside NVML, on a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable

from lightning_air.health.events import EventLog
from lightning_air.health.nvml import Nvml, NvmlError, NvmlEvent
from lightning_air.health.sampler import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
from lightning_air.health.selection import select_gpus
from lightning_air.health.xids import meaning
from lightning_air.runtime import detect_gpu_visibility

log = logging.getLogger(__name__)

# How long one wait inside the library may last: as long as it takes this thread to see that it has to end.
_WAIT_SECONDS = 0.2


class DriverEvents:
    """Adds to the events what the driver tells of the visible GPUs.

    Args:
        events: Gets it.
        pause: Waits so many seconds, or until the event is set.
    """

    def __init__(
        self, events: EventLog, pause: Callable[[threading.Event, float], object] = threading.Event.wait
    ) -> None:
        self._events = events
        self._pause = pause
        self._indices: dict[str, int] = {}

    def run(self, closed: threading.Event) -> None:
        """Listen until told to end, or until there is nothing to listen to. A lost NVML is the sampler's to tell."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while not closed.is_set():
            begun = time.monotonic()
            try:
                if not self._listen(closed):
                    return
            except NvmlError as error:
                if error.kind == "absent":
                    return
                log.debug("waiting for the driver's events failed: %s", error)
                if time.monotonic() - begun > MAX_PAUSE_SECONDS:  # it has worked for a while
                    pause_seconds = FIRST_PAUSE_SECONDS
                self._pause(closed, pause_seconds)
                pause_seconds = min(2 * pause_seconds, MAX_PAUSE_SECONDS)

    def _listen(self, closed: threading.Event) -> bool:
        """Listen until told to end; return False if no GPU tells of anything."""
        nvml = Nvml()
        try:
            gpus = select_gpus(nvml.gpus(), detect_gpu_visibility()).gpus
            self._indices = {(gpu.parent or gpu).uuid: gpu.index for gpu in gpus}
            try:
                watch = nvml.watch(gpus)
            except NvmlError as error:
                if error.kind not in ("unsupported", "denied"):
                    raise
                self._tell_of_silence(str(error))
                return False
            try:
                if not watch.num_watched:
                    if gpus:
                        self._tell_of_silence("the GPUs refuse")
                    return False
                while not closed.is_set():
                    event = watch.wait(_WAIT_SECONDS)
                    if event is not None and not closed.is_set():
                        self._add(event)
            finally:
                watch.close()
        finally:
            nvml.close()
        return True

    def _tell_of_silence(self, reason: str) -> None:
        self._events.add("not_read", f"The driver's errors (XIDs) of this node are not told: {reason}.")

    def _add(self, event: NvmlEvent) -> None:
        where = "A GPU"
        if event.uuid is not None:
            where = f"GPU {self._indices.get(event.uuid, '?')} ({event.uuid})"
        if event.xid is None:
            self._events.add(
                event.kind, f"{where}: the driver tells of {event.kind.replace('_', ' ')}.", uuid=event.uuid
            )
        else:
            message = (
                f"{where}: the driver tells of an error, XID {event.xid}. {meaning(event.xid)}. "
                "`dmesg` on that node has the details."
            )
            self._events.add("xid", message, uuid=event.uuid, value=float(event.xid))
