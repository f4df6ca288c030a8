"""The GPUs that CUDA shows are the ones that are read: by number, by UUID, by instance."""

from collections.abc import Callable

import pytest

from lightning_air.health.nvml import Gpu
from lightning_air.health.reader import GpuReader, read_gpus
from lightning_air.health.selection import select_gpus
from lightning_air.runtime import GpuVisibility, detect_gpu_visibility
from tests.kit.nvml_stub import NO_PERMISSION, NvmlStub

Machine = Callable[[int], NvmlStub]

FOUR = [Gpu(uuid=f"GPU-{letter}-1234", index=i, name="NVIDIA H100", handle=i) for i, letter in enumerate("abcd")]


def chosen(devices: str | None, gpus: list[Gpu] = FOUR) -> str:
    selection = select_gpus(gpus, GpuVisibility(devices=devices, is_in_pci_order=False))
    return "".join(gpu.uuid[4] for gpu in selection.gpus)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("1", "b"),
        ("3,0", "da"),
        (" 2 , 1 ", "cb"),
        ("1,-1,0", "b"),
        ("1,1", "b"),
        ("GPU-c-1234", "c"),
        ("GPU-c", "c"),
        ("GPU-d,GPU-a", "da"),
    ],
)
def test_entries_are_read_as_cuda_reads_them(devices: str | None, expected: str) -> None:
    assert chosen(devices) == expected


@pytest.mark.parametrize("wrong", ["9", "GPU-x", "GPU-", "MIG-a", "gpu0"])
def test_an_entry_that_names_no_gpu_hides_the_rest_and_is_said(wrong: str) -> None:
    selection = select_gpus(FOUR, GpuVisibility(devices=f"1,{wrong},0", is_in_pci_order=False))
    assert [gpu.index for gpu in selection.gpus] == [1]
    assert (
        f"CUDA_VISIBLE_DEVICES='1,{wrong},0' names with '{wrong}' none, or more than one, of the 4" in selection.doubt
    )


@pytest.mark.parametrize(
    ("devices", "is_in_pci_order", "is_doubtful"),
    [("1", False, True), ("1", True, False), ("GPU-b", False, False), (None, False, False)],
)
def test_numbers_among_several_models_are_doubtful_unless_the_order_is_that_of_the_bus(
    devices: str | None, is_in_pci_order: bool, is_doubtful: bool
) -> None:
    mixed = [*FOUR, Gpu(uuid="GPU-e", index=4, name="NVIDIA T4", handle=4)]
    selection = select_gpus(mixed, GpuVisibility(devices=devices, is_in_pci_order=is_in_pci_order))
    assert ("Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in selection.doubt) == is_doubtful
    assert not select_gpus(FOUR, GpuVisibility(devices=devices, is_in_pci_order=False)).doubt


def test_the_environment_is_told_as_it_stands() -> None:
    assert detect_gpu_visibility({}) == GpuVisibility(devices=None, is_in_pci_order=False)
    assert detect_gpu_visibility({"CUDA_VISIBLE_DEVICES": ""}).devices == ""
    both = detect_gpu_visibility({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert both == GpuVisibility(devices="1", is_in_pci_order=True)


@pytest.mark.parametrize("entry", ["1", "GPU-00000001", "GPU-00000001-0000-0000-0000-000000000000"])
def test_the_visible_gpu_is_read_and_not_gpu_0(machine: Machine, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """CASES 26."""
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", entry)
    (sample,) = read_gpus()
    assert (sample.index, sample.temperature_c) == (1, 61.0)


def test_uuids_decide_when_the_driver_has_renumbered_the_gpus(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = machine(2)
    first, second = stub.gpu(0).uuid, stub.gpu(1).uuid
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", second.decode())
    stub.gpu(0).uuid, stub.gpu(1).uuid = second, first
    (sample,) = read_gpus()
    assert (sample.index, sample.uuid, sample.temperature_c) == (0, second.decode(), 60.0)


def test_what_a_cgroup_hides_is_not_counted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM gives a job the numbers of the GPUs in its cgroup, while NVML's count includes all."""
    stub = machine(4)
    for hidden in (0, 1):
        stub.refuse("nvmlDeviceGetHandleByIndex", NO_PERMISSION, hidden)
    said: list[str] = []
    gpus = GpuReader(say=lambda _, message: said.append(message))
    assert [sample.index for sample in gpus.sweep()] == [2, 3]
    gpus.close()
    assert said == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [sample.index for sample in read_gpus()] == [3]


# ---- MIG -------------------------------------------------------------------------------------------------------------


def in_mig_mode(stub: NvmlStub, number: int, *uuids: str) -> None:
    gpu = stub.gpu(number)
    gpu.is_in_mig_mode, gpu.num_instances = 1, len(uuids)
    for slot, uuid in enumerate(uuids):
        gpu.instance_uuids[slot].value = uuid.encode()


def test_instances_are_read_each_with_its_own_memory_and_its_gpus_temperature(machine: Machine) -> None:
    stub = machine(2)
    in_mig_mode(stub, 1, "MIG-aaaa", "MIG-bbbb")
    samples = read_gpus()
    parent = stub.gpu(1).uuid.decode()
    assert [(sample.uuid, sample.index, sample.parent_uuid) for sample in samples] == [
        (stub.gpu(0).uuid.decode(), 0, None),
        ("MIG-aaaa", 1, parent),
        ("MIG-bbbb", 1, parent),
    ]
    assert [sample.memory_total_bytes for sample in samples] == [80 * 2**30, 40 * 2**30, 40 * 2**30]
    assert [sample.utilization_pct for sample in samples] == [90.0, None, None], "NVML has none for an instance"
    assert [sample.temperature_c for sample in samples] == [60.0, 61.0, 61.0]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("MIG-b", ["MIG-bbbb"]), ("1", ["MIG-aaaa", "MIG-bbbb"]), ("MIG-GPU-00000000/3/0", ["MIG-GPU-00000000/3/0"])],
)
def test_an_instance_is_chosen_by_its_uuid(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, devices: str, expected: list[str]
) -> None:
    stub = machine(2)
    in_mig_mode(stub, 0, "MIG-GPU-00000000/3/0")
    in_mig_mode(stub, 1, "MIG-aaaa", "MIG-bbbb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert [sample.uuid for sample in read_gpus()] == expected


def test_a_gpu_in_mig_mode_without_instances_is_read_itself(machine: Machine) -> None:
    stub = machine(1)
    stub.gpu(0).is_in_mig_mode = 1
    assert [sample.uuid for sample in read_gpus()] == [stub.gpu(0).uuid.decode()]
