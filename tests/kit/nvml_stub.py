"""A real libnvidia-ml.so.1 that a test steers: compiled from nvml_stub.c, found by pynvml as it finds NVIDIA's.

`pynvml` loads "libnvidia-ml.so.1" by name; the linker takes a library for it that is loaded already under that name. So
a process that calls `use_stub` has NVIDIA machines of the test's making, until it ends or calls `use_stub(None)`.
"""

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("nvml_stub.c")

FUNCTIONS = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlEventSetWait",
    "nvmlEventSetFree",
)
_NUMBER = {name: number for number, name in enumerate(FUNCTIONS)}

XID = 0x8
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 4, 9, 15, 999

_U32, _I32, _U64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64
_UUID = ctypes.c_char * 96


class _Gpu(ctypes.Structure):
    _fields_ = [
        ("uuid", _UUID),
        ("name", _UUID),
        *((name, _U64) for name in ("memory_used", "memory_total", "memory_reserved", "throttle_reasons")),
        *((name, _U64) for name in ("ecc_corrected", "ecc_uncorrected", "event_types")),
        ("fields", _U64 * 320),
        ("field_codes", _I32 * 320),
        ("codes", _I32 * 64),
        *(
            (name, _U32)
            for name in ("utilization", "temperature", "slowdown", "shutdown", "power_mw", "power_limit_mw")
        ),
        ("margin", _I32),
        *((name, _U32) for name in ("sm_clock", "memory_clock", "sm_clock_max", "memory_clock_max")),
        *((f"{name}", _U32) for name in ("remapped_correctable", "remapped_uncorrectable", "remap_pending")),
        *((name, _U32) for name in ("remap_failure", "pcie_replays", "pcie_width", "pcie_width_max")),
        *((name, _U32) for name in ("pcie_generation", "pcie_generation_max", "is_lost", "is_in_mig_mode")),
        ("num_instances", _U32),
        ("instance_uuids", _UUID * 4),
    ]


class _Event(ctypes.Structure):
    _fields_ = [("type", _U64), ("data", _U64), ("gpu", _U32), ("padding", _U32)]


class _State(ctypes.Structure):
    _fields_ = [
        ("calls", _U64 * 64),
        ("codes", _I32 * 64),
        ("hangs", _I32 * 64),
        ("num_gpus", _U32),
        ("num_initialised", _U32),
        ("num_events_told", _U64),
        ("num_events", _U64),
        ("events", _Event * 64),
        ("gpus", _Gpu * 16),
    ]


class NvmlStub:
    """A machine's GPUs, in a file that the library reads; healthy at first.

    Args:
        path: The file. An existing one is joined, as it is.
        num_gpus: How many GPUs a new one has.
    """

    def __init__(self, path: Path, num_gpus: int = 1) -> None:
        self.path = path
        is_new = not path.exists()
        if is_new:
            path.write_bytes(bytes(ctypes.sizeof(_State)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_State))
        self.state: Any = _State.from_buffer(self._map)
        if is_new:
            self.state.num_gpus = num_gpus
            for number in range(16):
                _make_healthy(self.state.gpus[number], number)

    def gpu(self, number: int) -> Any:
        """The GPU in this place of the PCI bus, whose attributes may be set."""
        return self.state.gpus[number]

    def refuse(self, function: str, code: int, number: int | None = None) -> None:
        """Have a function answer with this code (0: as it should), for one GPU or for all."""
        codes = self.state.codes if number is None else self.state.gpus[number].codes
        codes[_NUMBER[function]] = code

    def hang(self, function: str, *, hangs: bool = True) -> None:
        """Have a function not come back, until it is told not to hang."""
        self.state.hangs[_NUMBER[function]] = hangs

    def release(self) -> None:
        """Have all calls that hang come back."""
        for number in range(len(FUNCTIONS)):
            self.state.hangs[number] = 0

    def calls(self, function: str) -> int:
        """How often a function was called."""
        return int(self.state.calls[_NUMBER[function]])

    def tell(self, number: int, *, data: int, event_type: int = XID) -> None:
        """Have the driver tell of an event; an XID's number is its data."""
        event = self.state.events[self.state.num_events % 64]
        event.gpu, event.data, event.type = number, data, event_type
        self.state.num_events += 1


def _make_healthy(gpu: Any, number: int) -> None:
    gpu.uuid = f"GPU-{number:08x}-0000-0000-0000-000000000000".encode()
    gpu.name = b"NVIDIA H100 80GB HBM3"
    gpu.memory_used, gpu.memory_total, gpu.memory_reserved = 20 * 2**30, 80 * 2**30, 2**30
    gpu.utilization, gpu.temperature, gpu.margin, gpu.slowdown, gpu.shutdown = 90, 60 + number, 27 - number, 87, 92
    gpu.power_mw, gpu.power_limit_mw = 650_000, 700_000
    gpu.sm_clock, gpu.sm_clock_max, gpu.memory_clock, gpu.memory_clock_max = 1_900, 1_980, 2_619, 2_619
    gpu.pcie_width = gpu.pcie_width_max = 16
    gpu.pcie_generation = gpu.pcie_generation_max = 5
    gpu.event_types = XID | 0x2
    gpu.fields[82] = 70 + number


def compiler_missing() -> str | None:
    """Return why the stub cannot be compiled, for `pytest.skip`; None where it can."""
    return None if shutil.which("cc") else "the stub of NVML needs a C compiler named cc"


@functools.cache
def compiled_stub(missing: Sequence[str] = ()) -> Path:
    """Return the library, compiled once per machine and source.

    Args:
        missing: Symbols that it does not export, as an older driver's would not.
    """
    content = "\0".join([SOURCE.read_text(), *FUNCTIONS, "", *missing])
    folder = Path("/tmp", f"nvml-stub-{os.getuid()}-{hashlib.sha256(content.encode()).hexdigest()[:16]}")
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
            built = Path(scratch, library.name)
            version_script = Path(scratch, "symbols")
            local = f"local: {'; '.join(missing)};" if missing else ""
            version_script.write_text(f"{{ global: *; {local} }};")
            functions = ",".join(f"f_{name}" for name in FUNCTIONS)
            flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{library.name}"]
            flags += [f"-Wl,--version-script={version_script}", f"-DFUNCTIONS={functions}"]
            subprocess.run(["cc", *flags, "-o", str(built), str(SOURCE)], check=True)
            folder.mkdir(exist_ok=True)
            shutil.copy(built, folder / f"{library.name}.{os.getpid()}")
            (folder / f"{library.name}.{os.getpid()}").replace(library)
    return library


_loaded: dict[Path, ctypes.CDLL] = {}


def use_stub(path: Path | None, *, missing: Sequence[str] = ()) -> None:
    """Have this process find the GPUs of a stub's file; or, with None, as if it had no NVML.

    A process can load one set of symbols only: whoever wants others needs a process of its own (`run_ranks`).
    """
    if path is None:
        for library in _loaded.values():
            library.stub_attach(None)
        return
    library_path = compiled_stub(tuple(missing))
    assert set(_loaded) <= {library_path}, "another stub is loaded in this process"
    library = _loaded.setdefault(library_path, ctypes.CDLL(str(library_path)))
    library.stub_state_bytes.restype = ctypes.c_uint64
    assert library.stub_state_bytes() == ctypes.sizeof(_State), "the layouts in C and in Python differ"
    assert library.stub_attach(str(path).encode()) == 0


@contextlib.contextmanager
def stub_in_use(path: Path, num_gpus: int = 1) -> Any:
    """Yield a stub that this process finds, and have none afterwards."""
    stub = NvmlStub(path, num_gpus)
    use_stub(path)
    try:
        yield stub
    finally:
        stub.release()
        use_stub(None)
