"""The only door to NVML, NVIDIA's management library, through `pynvml` (nvidia-ml-py); imported when it is opened.

It asks for nothing slow: no process lists, no fans, no PCIe throughput, each of which blocks for milliseconds. Any call
may block for ever in a driver that hangs, so none may be made on a thread that somebody waits for. NVML counts its
initialisations: each `Nvml` is one, torch's own are others, and closing one leaves the others as they are.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

Call = Callable[..., Any]
"""The name of one of pynvml's functions and its arguments; raises `NvmlError` only."""

ErrorKind = Literal["unsupported", "denied", "gpu_lost", "nvml_lost", "absent", "failed"]

_ABSENT = 12
_KINDS: dict[int, ErrorKind] = {
    1: "nvml_lost",  # uninitialised
    2: "unsupported",  # invalid argument: this driver does not know what is asked for
    3: "unsupported",
    4: "denied",
    9: "nvml_lost",  # the driver is not loaded
    _ABSENT: "absent",  # no library
    13: "unsupported",  # this library has no such function
    15: "gpu_lost",
    16: "gpu_lost",  # it answers again after a reset only
    18: "nvml_lost",  # the driver was replaced under the library
    21: "unsupported",
    25: "unsupported",  # this library knows another version of the structure
    26: "unsupported",  # deprecated
    28: "gpu_lost",  # no longer on the bus
}
_FUNCTION_NOT_FOUND = 13
_UNKNOWN = 999
_TIMEOUT = 10
_MAX_INSTANCES = 8

# Event types as the library numbers them.
_XID = 0x8
_EVENT_NAMES = {0x2: "double_bit_ecc", _XID: "xid", 0x200: "single_bit_ecc_storm", 0x800: "dram_retirement_failure"}
_EVENTS = sum(_EVENT_NAMES)

# Which member of the union holds a field's value, by NVML's number of the type.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NvmlError(Exception):
    """A call that NVML did not answer.

    Attributes:
        kind: What that means for what comes next.
    """

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.code = code
        self.reason = reason
        self.kind: ErrorKind = _KINDS.get(code, "failed")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance, that NVML lets us talk to.

    Attributes:
        uuid: Its name for good.
        index: NVML's number, in the order of the PCI bus; an instance has its GPU's.
        name: The model.
        handle: NVML's own; valid until the library is shut down.
        parent: The GPU of an instance.
        instances: The instances of a GPU in MIG mode.
    """

    uuid: str
    index: int
    name: str
    handle: Any
    parent: "Gpu | None" = None
    instances: "tuple[Gpu, ...]" = ()

    @property
    def board_handle(self) -> Any:
        """The handle of the whole GPU."""
        return self.handle if self.parent is None else self.parent.handle


@dataclass(frozen=True)
class NvmlEvent:
    """Something that the driver told of.

    Attributes:
        kind: "xid", or one of the memory's ("double_bit_ecc", …).
        uuid: The GPU; None if the driver did not say which.
        xid: The driver's number of the error, for "xid".
    """

    kind: str
    uuid: str | None
    xid: int | None


class Nvml:
    """One initialisation of NVML, from construction to `close`. May block for ever, as all its methods may.

    Attributes:
        unreachable: What `gpus` has found to be broken, in sentences.

    Raises:
        NvmlError: There is no library, or it cannot be initialised; so does every method whose call fails.
    """

    def __init__(self) -> None:
        self.unreachable: list[str] = []
        try:
            self._library: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlError("import pynvml", _ABSENT, f"{error}. Install nvidia-ml-py.") from error
        self.call("nvmlInit")

    def close(self) -> None:
        """Give the initialisation back; a library that is gone already is none of our business."""
        with suppress(NvmlError):
            self.call("nvmlShutdown")

    def gpus(self) -> list[Gpu]:
        """Return the GPUs that this process may talk to, in NVML's order; a cgroup or container may hide others."""
        return list(self._gpus())

    def _gpus(self) -> Iterator[Gpu]:
        for index in range(self.call("nvmlDeviceGetCount")):
            try:
                handle = self.call("nvmlDeviceGetHandleByIndex", index)
                uuid = self.call("nvmlDeviceGetUUID", handle)
                gpu = Gpu(uuid=uuid, index=index, name=self._name(handle), handle=handle)
            except NvmlError as error:
                # The count includes what a cgroup keeps from us, and GPUs that have fallen off the bus.
                if error.kind in ("nvml_lost", "absent"):
                    raise
                if error.kind != "denied":
                    self.unreachable.append(f"GPU {index} of this machine does not answer ({error}); it is left out.")
                continue
            yield replace(gpu, instances=tuple(self._instances(gpu)))

    def _instances(self, gpu: Gpu) -> Iterator[Gpu]:
        try:
            if not self.call("nvmlDeviceGetMigMode", gpu.handle)[0]:
                return
            num_slots = self.call("nvmlDeviceGetMaxMigDeviceCount", gpu.handle)
        except NvmlError:
            return  # this model has no MIG
        for slot in range(min(num_slots, _MAX_INSTANCES)):
            with suppress(NvmlError):  # an empty slot
                handle = self.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, slot)
                uuid = self.call("nvmlDeviceGetUUID", handle)
                yield Gpu(uuid=uuid, index=gpu.index, name=self._name(handle), handle=handle, parent=gpu)

    def _name(self, handle: Any) -> str:
        try:
            return str(self.call("nvmlDeviceGetName", handle))
        except NvmlError as error:
            if error.kind in ("gpu_lost", "nvml_lost", "absent"):
                raise
            return "unknown GPU"

    def fields(self, handle: Any, ids: Sequence[int]) -> "list[float | NvmlError]":
        """Return several field values by one call; each is a number, or why this one is not told."""
        values = self.call("nvmlDeviceGetFieldValues", handle, list(ids))
        return [
            getattr(value.value, _MEMBERS[value.valueType])
            if value.nvmlReturn == 0 and value.valueType < len(_MEMBERS)
            else NvmlError(f"field {value.fieldId}", value.nvmlReturn or _UNKNOWN, self._reason(value.nvmlReturn))
            for value in values
        ]

    def watch(self, gpus: Sequence[Gpu]) -> "NvmlWatch":
        """Begin to wait for what the driver tells of these GPUs by itself."""
        return NvmlWatch(self.call, gpus)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call one function of pynvml; `NvmlError` is all that it raises."""
        try:
            return getattr(self._library, function)(*arguments)
        except AttributeError as error:  # an old pynvml
            reason = f"pynvml has no {function}: update nvidia-ml-py"
            raise NvmlError(function, _FUNCTION_NOT_FOUND, reason) from error
        except self._library.NVMLError as error:
            raise NvmlError(function, error.value, self._reason(error.value)) from error
        except Exception as error:  # such as a name that is no UTF-8, or a mismatch of pynvml and the library
            raise NvmlError(function, _UNKNOWN, f"{type(error).__name__}: {error}") from error

    def _reason(self, code: int) -> str:
        try:
            return str(self._library.NVMLError(code))
        except Exception:  # noqa: BLE001 - the text comes from the library, which may be gone
            return f"NVML error {code}"


class NvmlWatch:
    """Events of some GPUs. One thread at a time; `close` on the same thread."""

    def __init__(self, call: Call, gpus: Sequence[Gpu]) -> None:
        self._call = call
        boards = {gpu.uuid if gpu.parent is None else gpu.parent.uuid: gpu.board_handle for gpu in gpus}
        self._set = call("nvmlEventSetCreate")
        self.num_watched = 0
        for handle in boards.values():
            with suppress(NvmlError):  # this GPU tells of nothing
                wanted = _EVENTS & call("nvmlDeviceGetSupportedEventTypes", handle)
                call("nvmlDeviceRegisterEvents", handle, wanted, self._set)
                self.num_watched += 1

    def wait(self, seconds: float) -> NvmlEvent | None:
        """Return the next event, or None if there was none in that time."""
        try:
            data = self._call("nvmlEventSetWait", self._set, int(seconds * 1000))
        except NvmlError as error:
            if error.code == _TIMEOUT:
                return None
            raise
        try:
            uuid = self._call("nvmlDeviceGetUUID", data.device)
        except NvmlError:
            uuid = None
        kind = _EVENT_NAMES.get(data.eventType, f"event_{data.eventType:#x}")
        return NvmlEvent(kind, uuid, int(data.eventData) if data.eventType == _XID else None)

    def close(self) -> None:
        """Stop waiting."""
        with suppress(NvmlError):
            self._call("nvmlEventSetFree", self._set)
