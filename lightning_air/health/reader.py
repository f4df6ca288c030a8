"""Read all visible GPUs, asking each only what it answers; and `read_gpus`, which does it once.

What a GPU does not support or may not tell is not asked again, and said once. Whatever else fails, three times in a
row, is treated likewise. A lost GPU stays in the list; a lost NVML is an error, after which one opens another reader.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lightning_air.health.nvml import Gpu, Nvml, NvmlError
from lightning_air.health.readings import FIELDS, READINGS, Field, completed
from lightning_air.health.sample import GPUSample
from lightning_air.health.selection import Selection, select_gpus
from lightning_air.runtime import GpuVisibility, detect_gpu_visibility

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
# A lost GPU is asked again after so many sweeps, and then twice as many each time: the driver may be slow to say so.
_FIRST_PAUSE_SWEEPS = 1
_MAX_PAUSE_SWEEPS = 32
_READ_SECONDS = 30.0

Say = Callable[[str, str], object]
"""Told (kind, message): "unsupported" or "selection"."""


class GpuReader:
    """Reads the GPUs that are visible to this process, again and again. Not for several threads; any call may block.

    Args:
        visibility: What CUDA was told to show; by default what the environment says.
        say: Told what will not be read, and what may be wrong with the choice of GPUs.

    Raises:
        NvmlError: There is no NVML, or it does not work.
    """

    def __init__(self, *, visibility: GpuVisibility | None = None, say: Say = lambda *_: None) -> None:
        self._say = say
        self._nvml = Nvml()
        try:
            self._selection = select_gpus(self._nvml.gpus(), visibility or detect_gpu_visibility())
            self._states = [_State(gpu) for gpu in self._selection.gpus]
        except BaseException:
            self._nvml.close()
            raise
        for doubt in filter(None, (*self._nvml.unreachable, self._selection.doubt)):
            say("selection", doubt)

    @property
    def selection(self) -> Selection:
        """The GPUs that are read."""
        return self._selection

    def sweep(self) -> list[GPUSample]:
        """Read all GPUs once.

        Raises:
            NvmlError: NVML is lost, or all GPUs refuse all that is asked: close this reader and open another.
        """
        samples = [self._sample(state) for state in self._states]
        mute = [state for state in self._states if state.error is not None and not state.has_answered]
        if mute and len(mute) == len(self._states):
            # Such as after the container's access to the devices was revoked. No GPU has anything to do with it.
            raise NvmlError("all readings", mute[0].error.code if mute[0].error else 999, f"{mute[0].error}")
        self._settle()
        return samples

    def close(self) -> None:
        """Give NVML back."""
        self._nvml.close()

    def _sample(self, state: "_State") -> GPUSample:
        gpu = state.gpu
        parent = None if gpu.parent is None else gpu.parent.uuid
        if state.pause_is_on():
            return GPUSample(uuid=gpu.uuid, index=gpu.index, name=gpu.name, parent_uuid=parent, is_lost=True)
        state.begin()
        try:
            values = {**state.constants, **self._read_calls(state), **self._read_fields(state)}
        except NvmlError as error:
            if error.kind != "gpu_lost":
                raise
            state.pause()
            return GPUSample(uuid=gpu.uuid, index=gpu.index, name=gpu.name, parent_uuid=parent, is_lost=True)
        state.end_pauses()
        return GPUSample(uuid=gpu.uuid, index=gpu.index, name=gpu.name, parent_uuid=parent, **completed(values))

    def _read_calls(self, state: "_State") -> dict[str, Any]:
        values: dict[str, Any] = {}
        for reading in READINGS:
            if reading.name in state.refused or reading.name in state.read_for_good:
                continue
            handle = state.gpu.handle if reading.is_of_instance else state.gpu.board_handle
            try:
                answer = reading.ask(self._nvml.call, handle)
            except NvmlError as error:
                state.note(reading.name, error)
                continue
            state.note(reading.name, None)
            values.update(answer)
            if reading.is_constant:
                state.constants.update(answer)
                state.read_for_good.add(reading.name)
        return values

    def _read_fields(self, state: "_State") -> dict[str, Any]:
        wanted = [field for field in FIELDS if _name(field) not in state.refused]
        if not wanted:
            return {}
        try:
            answers = self._nvml.fields(state.gpu.board_handle, [field.id for field in wanted])
        except NvmlError as error:
            for field in wanted:
                state.note(_name(field), error)
            return {}
        values: dict[str, Any] = {}
        for field, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, NvmlError):
                state.note(_name(field), answer)
                continue
            state.note(_name(field), None)
            value = field.convert(answer)
            values[field.attribute] = values[field.attribute] + value if field.attribute in values else value
        return values

    def _settle(self) -> None:
        """Refuse what has failed, and say it in one message for all GPUs that refuse the same."""
        news: dict[tuple[str, ...], list[Gpu]] = {}
        for state in self._states:
            refused = state.newly_refused()
            if refused:
                news.setdefault(refused, []).append(state.gpu)
        for refused, gpus in news.items():
            names = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
            plural = "s" if len(gpus) > 1 else ""
            self._say("unsupported", f"Not read from GPU{plural} {names}: {'; '.join(refused)}.")


class _State:
    """What has been learnt of one GPU.

    Attributes:
        refused: Names of readings that are not asked for any more.
        constants: The values that do not change.
        read_for_good: Names of the readings that gave them.
        has_answered: Something, in this sweep.
        error: The first of this sweep.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.refused: set[str] = set()
        self.constants: dict[str, Any] = {}
        self.read_for_good: set[str] = set()
        self.has_answered = False
        self.error: NvmlError | None = None
        self._failures: Counter[str] = Counter()
        self._errors: dict[str, NvmlError] = {}
        self._pause_sweeps = 0
        self._next_pause_sweeps = _FIRST_PAUSE_SWEEPS

    def begin(self) -> None:
        self.has_answered = False
        self.error = None
        self._errors.clear()

    def note(self, name: str, error: NvmlError | None) -> None:
        """Remember how a reading went; an error that is not about this reading goes on to the caller."""
        if error is None:
            self.has_answered = True
            self._failures.pop(name, None)
            return
        if error.kind in ("gpu_lost", "nvml_lost", "absent"):
            raise error
        self.error = self.error or error
        self._errors[name] = error

    def newly_refused(self) -> tuple[str, ...]:
        """Give up on what failed in this sweep, for good reason or too often; return that with the reasons."""
        for name, error in self._errors.items():
            self._failures[name] += _MAX_FAILURES if error.kind in ("unsupported", "denied") else 1
        given_up = [name for name in self._errors if self._failures[name] >= _MAX_FAILURES]
        self.refused.update(given_up)
        reasons: dict[str, list[str]] = {}
        for name in given_up:
            reasons.setdefault(self._errors[name].reason, []).append(name)
        self._errors.clear()
        return tuple(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())

    def pause_is_on(self) -> bool:
        self._pause_sweeps -= 1
        return self._pause_sweeps >= 0

    def pause(self) -> None:
        self._errors.clear()
        self.error = None
        self._pause_sweeps = self._next_pause_sweeps
        self._next_pause_sweeps = min(2 * self._next_pause_sweeps, _MAX_PAUSE_SWEEPS)

    def end_pauses(self) -> None:
        self._pause_sweeps = 0
        self._next_pause_sweeps = _FIRST_PAUSE_SWEEPS


def _name(field: Field) -> str:
    """Return what a field goes by in messages."""
    return f"{field.attribute} (field {field.id})"


def read_gpus() -> list[GPUSample]:
    """Read every GPU that is visible to this process once. Needs neither Lightning nor a process group.

    CUDA_VISIBLE_DEVICES decides, as for CUDA: numbers, UUIDs or their beginnings, MIG instances. May be called on any
    thread; takes some milliseconds, and opens no CUDA context.

    Returns:
        One sample per GPU or MIG instance. Without NVML (no NVIDIA driver) an empty list, and the reason in the log.

    Raises:
        TimeoutError: The driver has not answered within 30 s.
    """
    try:
        return read_within(_READ_SECONDS)
    except NvmlError as error:
        log.warning("No GPU can be read: %s.", error)
        return []


def read_within(seconds: float) -> list[GPUSample]:
    """Read every visible GPU once, on a thread of its own: nothing can end a call to a driver that hangs.

    Raises:
        NvmlError: There is no NVML, or it does not work.
        TimeoutError: It has not answered in that time.
    """
    results: list[Sequence[GPUSample] | Exception] = []
    thread = threading.Thread(target=_read_once, args=(results,), name="air-gpu-read", daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError(
            f"NVML has not answered within {seconds:g} s: the GPU driver of this machine hangs. See `dmesg` for its "
            "errors (XID); a hung driver needs a reset of the GPU or a reboot."
        )
    if isinstance(results[0], Exception):
        raise results[0]
    return list(results[0])


def _read_once(results: list[Sequence[GPUSample] | Exception]) -> None:
    try:
        reader = GpuReader(
            say=lambda kind, message: log.warning(message) if kind == "selection" else log.debug(message)
        )
        try:
            results.append(reader.sweep())
        finally:
            reader.close()
    except Exception as error:  # noqa: BLE001 - raised by the thread that waits
        results.append(error)
