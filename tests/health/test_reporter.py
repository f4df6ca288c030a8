"""Reports while a run goes on: written on time and at the end, uploaded without anybody waiting, whatever fails."""

import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.report import write_report
from lightning_air.health.reporter import Reporter
from lightning_air.health.scene import Scene
from tests.health.report_decoding import decode_report
from tests.health.windows import START_SECONDS, gpu, healthy

PATH = Path("gpu_health/report.html")


def a_scene(num_polls: int = 3) -> Scene:
    scene = Scene(History(720, 10), EventLog())
    for poll in range(num_polls):
        add_poll(scene, poll)
    return scene


def add_poll(scene: Scene, poll: int) -> None:
    scene.history.append(START_SECONDS + 10.0 * poll, {gpu(0): [float(value) for value in healthy(1)[:, 0]]})


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_columns(text: str) -> int:
    return decode_report(text).head["columns"]


def test_it_is_written_again_and_again_and_at_the_end(tmp_path: Path) -> None:
    scene, path = a_scene(1), tmp_path / PATH
    reporter = Reporter(scene, str(tmp_path), first_seconds=0.01, every_seconds=0.05)
    reporter.start()
    wait_until(path.exists)
    assert num_columns(path.read_text()) == 1
    add_poll(scene, 1)
    wait_until(lambda: num_columns(path.read_text()) == 2)
    reporter.close()

    last = Reporter(scene, str(tmp_path))
    last.start()
    add_poll(scene, 2)
    last.close()
    wait_until(lambda: num_columns(path.read_text()) == 3)
    last.close()


def test_where_there_is_nothing_to_report_nothing_is_written(tmp_path: Path) -> None:
    scene = Scene(History(720, 10), EventLog())
    scene.events.add("nvml_absent", "No GPU is watched.")
    reporter = Reporter(scene, str(tmp_path), first_seconds=0.01, every_seconds=0.01)
    reporter.start()
    reporter.close()
    assert list(tmp_path.iterdir()) == []
    scene.events.add("hang", "A rank is stuck.")
    reporter = Reporter(scene, str(tmp_path))
    reporter.start()
    reporter.close()
    wait_until((tmp_path / PATH).exists)


def test_it_goes_to_a_url(tmp_path: Path) -> None:
    reporter = Reporter(a_scene(), "memory://run/")
    reporter.start()
    reporter.close()
    files = fsspec.filesystem("memory")
    wait_until(lambda: files.exists("/run/gpu_health/report.html"))
    assert num_columns(files.cat("/run/gpu_health/report.html").decode()) == 3
    files.rm("/run", recursive=True)


def test_an_upload_that_hangs_delays_neither_the_file_nor_the_end(tmp_path: Path) -> None:
    released = threading.Event()
    uploaded: list[int] = []

    def hang(text: str) -> None:
        released.wait()
        uploaded.append(num_columns(text))

    scene = a_scene(1)
    reporter = Reporter(scene, str(tmp_path), [hang], first_seconds=0.01, every_seconds=0.01)
    reporter.start()
    wait_until((tmp_path / PATH).exists)
    add_poll(scene, 1)
    wait_until(lambda: num_columns((tmp_path / PATH).read_text()) == 2)
    begun = time.monotonic()
    reporter.close()
    assert time.monotonic() - begun < 10  # it would be for ever
    assert uploaded == []
    released.set()
    wait_until(lambda: uploaded[-1:] == [2])
    assert len(uploaded) <= 2, "one that waited was replaced by a newer one"


def test_an_upload_that_fails_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def fail(text: str) -> None:
        tries.append(text)
        if len(tries) < 4:
            raise ConnectionError("the server is gone")

    reporter = Reporter(a_scene(), str(tmp_path), [fail], first_seconds=0.01, every_seconds=0.01)
    reporter.start()
    wait_until(lambda: len(tries) >= 5)
    reporter.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "could not be uploaded" in message
    assert "the server is gone" in message


def test_a_folder_that_cannot_be_written_is_said_once_and_the_upload_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gpu_health").write_text("a file where the folder should be")
    uploaded: list[str] = []
    reporter = Reporter(a_scene(), str(tmp_path), [uploaded.append], first_seconds=0.01, every_seconds=0.01)
    reporter.start()
    wait_until(lambda: len(uploaded) >= 3)
    reporter.close()
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(tmp_path / PATH) in message


def test_where_files_cannot_be_renamed_the_report_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "replace", refuse)
    write_report(tmp_path / PATH, "one")
    write_report(tmp_path / PATH, "two")
    assert (tmp_path / PATH).read_text() == "two"
    assert [each.name for each in (tmp_path / PATH).parent.iterdir()] == ["report.html"]


SCRIPT = """
    import sys, time
    from pathlib import Path
    from lightning_air.health import reporter
    from tests.health.test_reporter import a_scene
    seconds = float(sys.argv[1])
    reporter.EXIT_SECONDS = float(sys.argv[2])

    def upload(text):
        time.sleep(seconds)
        Path("uploaded").write_text(text)

    running = reporter.Reporter(a_scene(), ".", [upload])
    running.start()
    running.close()
"""


@pytest.mark.parametrize(("seconds", "arrives"), [(1.5, True), (600, False)])
def test_a_process_that_ends_gives_the_last_upload_some_time(tmp_path: Path, seconds: float, arrives: bool) -> None:
    limit = 60 if arrives else 1
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(seconds), str(limit)],
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
    )
    assert (tmp_path / PATH).exists()
    assert (tmp_path / "uploaded").exists() == arrives
