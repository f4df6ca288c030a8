"""`lightning-air gpus`: the visible GPUs as a table or JSON, once or again and again; how it exits."""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_air.cli import gpus, main
from tests.health.report_decoding import decode_report
from tests.kit.nvml_stub import NO_PERMISSION, NvmlStub, compiler_missing, stub_in_use, use_stub


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlStub]:
    if reason := compiler_missing():
        pytest.skip(reason)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with stub_in_use(tmp_path / "nvml", 2) as machine:
        yield machine


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens in each pause of --watch; after the last one, Ctrl-C."""
    left: list[Callable[[], object]] = []

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    monkeypatch.setattr(gpus, "_pause", pause)
    return left


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    try:
        code: int | str | None = main(["gpus", *arguments])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def is_read(stub: NvmlStub, num_more: int = 4) -> None:
    """Wait until both GPUs have been read, and have surely been kept: another reading has begun since."""
    deadline = time.monotonic() + 20
    wanted = stub.calls("nvmlDeviceGetFieldValues") + num_more
    while stub.calls("nvmlDeviceGetFieldValues") < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("arguments", [(), ("--once",)])
def test_a_table_of_the_gpus(stub: NvmlStub, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    sick = stub.gpu(1)
    sick.throttle_reasons, sick.ecc_uncorrected, sick.pcie_width, sick.fields[230] = 0x40, 3, 8, 1
    stub.refuse("nvmlDeviceGetPowerUsage", NO_PERMISSION, 1)

    code, shown, complaints = run(capsys, *arguments)

    assert (code, complaints) == (0, "")
    heading, first, second = shown.splitlines()
    assert heading.split("  ")[0] == "GPU"
    cells = ["0", "NVIDIA H100 80GB HBM3", "GPU-00000000-0000-0000-0000-000000000000", "90%", "20/80 GiB", "60 C"]
    cells += ["27 C", "70 C", "650/700 W", "1900/1980 MHz", "ok"]
    assert re.split(r"  +", first) == cells
    assert second.endswith("hw thermal slowdown, 3 uncorrected ECC, needs gpu reset, PCIe x8 of x16")
    assert second.split()[13:17] == ["71", "C", "-", "1900/1980"]
    assert [line.index("GPU-") for line in (first, second)] == [heading.index("UUID")] * 2


def test_json_has_every_value_under_its_name(stub: NvmlStub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.gpu(0).throttle_reasons = 0x4
    stub.gpu(1).is_lost = 1
    code, shown, _ = run(capsys, "--once", "--json")
    assert code == 0
    (found,) = json.loads(shown)
    assert found["uuid"] == stub.gpu(0).uuid.decode()
    assert (found["temperature_c"], found["memory_used_bytes"], found["is_lost"]) == (60.0, 20 * 2**30, False)
    assert (found["throttle_names"], found["recovery_name"], found["parent_uuid"]) == (["sw_power_cap"], "none", None)


def test_a_machine_without_gpus_is_said(
    stub: NvmlStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(capsys) == (0, "No GPU is visible here.\n", "")
    assert run(capsys, "--json") == (0, "[]\n", "")


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--watch", "--interval=0.1")])
def test_without_nvml_it_is_said_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    use_stub(None)
    code, shown, complaints = run(capsys, *arguments)
    assert (code, shown) == (1, "")
    assert complaints.startswith("lightning-air gpus: ")
    assert "NVML Shared Library Not Found" in complaints
    assert complaints.count("\n") == 1


def test_a_driver_that_hangs_is_said(
    stub: NvmlStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_READ_SECONDS", 0.2)
    stub.hang("nvmlInit")
    code, shown, complaints = run(capsys)
    assert (code, shown) == (1, "")
    assert "NVML has not answered within 0.2 s" in complaints
    stub.release()


def test_watching_shows_what_changes_and_what_happens(
    stub: NvmlStub, capsys: pytest.CaptureFixture[str], pauses: list[Callable[[], object]]
) -> None:
    def heat() -> None:
        stub.gpu(0).temperature = 85
        stub.tell(1, data=79)
        is_read(stub, num_more=6)
        while not stub.state.num_events_told:
            time.sleep(0.01)
        time.sleep(0.3)

    pauses[:] = [lambda: is_read(stub), heat]
    code, shown, complaints = run(capsys, "--watch", "--interval", "0.1")

    assert (code, complaints) == (0, "")
    before, after = shown.strip().split("\n\n")
    assert " 60 C " in before
    assert "XID" not in before
    assert " 85 C " in after
    assert "the driver tells of an error, XID 79." in after
    assert logging.getLogger("lightning_air.health").level == logging.NOTSET
    assert not [each.name for each in threading.enumerate() if each.name.startswith("air-gpu-")]


def test_watching_as_json_is_one_line_for_each_time(
    stub: NvmlStub, capsys: pytest.CaptureFixture[str], pauses: list[Callable[[], object]]
) -> None:
    pauses[:] = [lambda: is_read(stub)] * 2
    code, shown, _ = run(capsys, "--watch", "--json", "--interval", "0.1")
    assert code == 0
    assert [[gpu["index"] for gpu in json.loads(line)] for line in shown.splitlines()] == [[0, 1]] * 2


@pytest.mark.parametrize("seconds", ["0", "0.01", "nan", "inf", "soon"])
def test_an_interval_must_be_a_time(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    code, _, complaints = run(capsys, "--watch", f"--interval={seconds}")
    assert code == 2
    assert f"argument --interval: must be a number of seconds from 0.1 on, got '{seconds}'" in complaints


def test_once_and_again_exclude_each_other_and_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--once", "--watch")[0] == 2
    code, shown, _ = run(capsys, "--help")
    assert code == 0
    assert "CUDA_VISIBLE_DEVICES" in shown


# ---- --report --------------------------------------------------------------------------------------------------------


@pytest.fixture
def report_path(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_a_report_of_some_seconds(stub: NvmlStub, capsys: pytest.CaptureFixture[str], report_path: Path) -> None:
    stub.gpu(1).ecc_uncorrected = 0
    code, shown, complaints = run(capsys, "--report", str(report_path), "--seconds", "1.5", "--interval", "0.1")
    assert code == 0
    assert complaints == "Watching the GPUs for 1.5 s; Ctrl-C ends it sooner.\n"
    assert re.fullmatch(rf"Nothing was wrong: 2 GPUs, watched for [12] s. See {re.escape(str(report_path))}\n", shown)
    head = decode_report(report_path.read_text()).head
    assert [each["uuid"][:12] for each in head["gpus"]] == ["GPU-00000000", "GPU-00000001"]
    assert head["seconds"] == 0.1


def test_ctrl_c_ends_the_watching_and_the_report_is_written(
    stub: NvmlStub, capsys: pytest.CaptureFixture[str], pauses: list[Callable[[], object]], report_path: Path
) -> None:
    pauses.append(lambda: stub.tell(1, data=79))
    pauses.append(lambda: is_read(stub, 8))
    code, shown, _ = run(capsys, "--report", str(report_path), "--seconds", "3600", "--interval", "0.1")
    assert code == 0
    assert shown.startswith("1 of 2 GPUs had trouble in ")
    assert "XID 79" in report_path.read_text()


@pytest.mark.parametrize("place", ["missing/report.html", "."])
def test_a_report_that_has_no_place_is_refused_at_once(
    stub: NvmlStub, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    code, shown, complaints = run(capsys, "--report", place)
    assert (code, shown) == (1, "")
    assert complaints.startswith(f"lightning-air gpus: {place} cannot be written: ")
    assert stub.calls("nvmlInit") == 0


def test_without_nvml_there_is_no_report(capsys: pytest.CaptureFixture[str], report_path: Path) -> None:
    use_stub(None)
    code, _, complaints = run(capsys, "--report", str(report_path))
    assert code == 1
    assert "No GPU is watched: " in complaints
    assert not report_path.exists()


@pytest.mark.parametrize("other", ["--json", "--watch", "--once"])
def test_a_report_goes_with_no_other_way_to_show(
    capsys: pytest.CaptureFixture[str], report_path: Path, other: str
) -> None:
    code, _, complaints = run(capsys, "--report", str(report_path), other)
    assert code == 2
    assert other in complaints
