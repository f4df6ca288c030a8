"""What can be told where there is no NVML: torch's memory figures, the host's CPU and RAM, what an AMD GPU says."""

import importlib
from contextlib import suppress

import torch

# What torch asks of AMD's library; each may be missing there.
_AMD_READINGS: dict[str, tuple[str, float]] = {
    "torch_gpu/utilization_pct/mean": ("utilization", 1.0),
    "torch_gpu/temperature_c/max": ("temperature", 1.0),
    "torch_gpu/power_w/mean": ("power_draw", 1e-3),
}


def read_host() -> dict[str, float]:
    """Return the figures that this machine gives, by the name under which they are logged. Raises nothing.

    torch's memory is that of this process only, and on devices that it uses already: nothing here opens a CUDA context.
    """
    figures: dict[str, float] = {}
    for read in (_torch_memory, _amd, _cpu_and_ram):
        with suppress(Exception):  # none of them is worth a failure, and the message said what is missing
            figures.update(read())
    return figures


def _torch_memory() -> dict[str, float]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = range(torch.cuda.device_count())
    return {
        "torch_memory/allocated_bytes/max": float(max(torch.cuda.memory_allocated(device) for device in devices)),
        "torch_memory/reserved_bytes/max": float(max(torch.cuda.memory_reserved(device) for device in devices)),
    }


def _amd() -> dict[str, float]:
    if torch.version.hip is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    figures = {}
    for name, (function, scale) in _AMD_READINGS.items():
        with suppress(Exception):  # this one is not told
            read = getattr(torch.cuda, function)
            values = [scale * float(read(device)) for device in range(torch.cuda.device_count())]
            figures[name] = max(values) if name.endswith("/max") else sum(values) / len(values)
    return figures


def _cpu_and_ram() -> dict[str, float]:
    psutil = importlib.import_module("psutil")
    return {
        "host/cpu_pct/mean": float(psutil.cpu_percent(interval=None)),  # since the last call
        "host/memory_used_pct/max": float(psutil.virtual_memory().percent),
    }
