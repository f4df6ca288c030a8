"""Which of NVML's GPUs are the ones that CUDA shows to this process: by UUID, whatever CUDA numbers them.

NVML shows what the container or the SLURM cgroup lets this process talk to, in the order of the PCI bus, and knows
nothing of CUDA_VISIBLE_DEVICES. The numbers there are CUDA's: they count in the order of the PCI bus if
CUDA_DEVICE_ORDER says so, and otherwise from the fastest GPU on. Only CUDA knows which is faster, but GPUs of one model
are equally fast and keep the order of the bus. So a number is taken as a place in that order, and with several models
it is said that it may be another GPU.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_air.health.nvml import Gpu
from lightning_air.runtime import GpuVisibility


@dataclass(frozen=True)
class Selection:
    """The GPUs to read.

    Attributes:
        gpus: In the order of CUDA_VISIBLE_DEVICES, without repetition. A GPU in MIG mode is its instances.
        doubt: What may be wrong with them, and what to do; "" if nothing is.
    """

    gpus: tuple[Gpu, ...]
    doubt: str = ""


def select_gpus(gpus: Sequence[Gpu], visibility: GpuVisibility) -> Selection:
    """Choose as CUDA does: entries up to the first that names no GPU; a UUID may be cut short as long as it is unique.

    Args:
        gpus: All that NVML shows.
        visibility: What the environment says.

    Returns:
        The GPUs. A MIG instance is chosen by its UUID; the number or UUID of its GPU chooses all its instances, of
        which CUDA would use the first.
    """
    if visibility.devices is None:
        return Selection(_leaves(gpus))
    chosen: list[Gpu] = []
    for entry in filter(None, (text.strip() for text in visibility.devices.split(","))):
        if entry.startswith("-"):  # "-1" hides all that follows, on purpose
            break
        found = _find(entry, gpus)
        if not found:
            return Selection(
                _distinct(chosen),
                f"CUDA_VISIBLE_DEVICES={visibility.devices!r} names with {entry!r} none, or more than one, of the "
                f"{len(gpus)} GPUs here; CUDA ignores it and what follows. Correct it.",
            )
        chosen.extend(found)
    return Selection(_distinct(chosen), _doubt_of_order(gpus, visibility))


def _find(entry: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    if re.fullmatch(r"[+]?[0-9]+", entry):
        number = int(entry)
        return _leaves(gpus[number : number + 1])
    instances = [instance for gpu in gpus for instance in gpu.instances]
    candidates = instances if entry.startswith("MIG-") else gpus
    matches = [gpu for gpu in candidates if gpu.uuid.startswith(entry)]
    return _leaves(matches) if len(matches) == 1 else ()


def _leaves(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    return tuple(leaf for gpu in gpus for leaf in (gpu.instances or (gpu,)))


def _distinct(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    return tuple({gpu.uuid: gpu for gpu in gpus}.values())


def _doubt_of_order(gpus: Sequence[Gpu], visibility: GpuVisibility) -> str:
    models = sorted({gpu.name for gpu in gpus})
    has_numbers = re.search(r"(^|,)\s*[+]?[0-9]+\s*(,|$)", visibility.devices or "")
    if len(models) == 1 or visibility.is_in_pci_order or not has_numbers:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={visibility.devices!r} may mean other GPUs than those read: there are several models "
        f"here ({', '.join(models)}), and CUDA numbers the fastest first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name "
        "the GPUs by UUID."
    )
