"""Where the next attempt goes on: written whole, read whole, or not at all."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.tracking.points import Point
from lightning_air.tracking.progress import Progress, load_progress, save_progress
from lightning_air.tracking.segments import BEGINNING, Position
from lightning_air.tracking.spool_folder import (
    PROGRESS_NAME,
    SET_ASIDE_NAME,
    RunInfo,
    SetAside,
    add_set_aside,
    read_run_info,
    remove_folder,
    write_run_info,
)

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SOME = Progress(
    position=Position(3, 1040), thinner={"open": {"loss": [0.5, 3]}}, num_sent=7, num_set_aside=1, num_cut=40
)
count = st.integers(0, 2**60)
snapshots = st.none() | st.dictionaries(st.text(), st.floats(allow_nan=False) | st.text() | st.lists(st.integers()))


@law
@given(
    st.builds(
        Progress,
        position=st.builds(Position, count, count),
        thinner=snapshots,
        num_sent=count,
        num_set_aside=count,
        num_cut=count,
    )
)
def test_what_was_saved_is_loaded(progress: Progress) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_progress(Path(folder), SOME)
        save_progress(Path(folder), progress)
        assert load_progress(Path(folder)) == progress
        assert [path.name for path in Path(folder).iterdir()] == [PROGRESS_NAME]


def test_none_saved_is_the_beginning_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_progress(tmp_path) == Progress(position=BEGINNING)
    assert caplog.text == ""


@law
@given(st.data())
def test_a_file_that_was_cut_is_damaged(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_progress(Path(folder), SOME)
        path = Path(folder, PROGRESS_NAME)
        text = path.read_bytes()
        path.write_bytes(text[: data.draw(st.integers(0, len(text) - 1))])
        assert load_progress(Path(folder)) == Progress()


GOOD = {"version": 1, "position": [3, 16], "thinner": None, "num_sent": 1, "num_set_aside": 0, "num_cut": 0}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        GOOD | {"version": 2},
        GOOD | {"position": [1]},
        GOOD | {"position": ["1", 2]},
        GOOD | {"position": [1, -2]},
        GOOD | {"thinner": "text"},
        GOOD | {"num_sent": None},
        GOOD | {"num_sent": -1},
        GOOD | {"num_sent": 1.5},
        GOOD | {"num_cut": -1},
        GOOD | {"more": 1},
    ],
    ids=repr,
)
def test_what_does_not_make_sense_is_damaged_and_said(
    fields: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROGRESS_NAME).write_text(json.dumps(fields))
    assert load_progress(tmp_path) == Progress()
    assert f"{tmp_path / PROGRESS_NAME} is damaged" in caplog.text


def test_whose_records_a_folder_holds(tmp_path: Path) -> None:
    info = RunInfo(run_id="abc", tracking_uri="http://host", thinner={"step": [1, 2]})
    write_run_info(tmp_path, info)
    assert read_run_info(tmp_path) == info


@pytest.mark.parametrize("text", [None, "", "[]", '{"run_id": "abc"}'])
def test_another_folder_is_no_spool(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path} is no spool of metrics: run.json .* Pass the folder of one run"):
        read_run_info(tmp_path)


def test_a_folder_that_is_done_is_removed_but_for_what_is_not_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for others in ([], [SET_ASIDE_NAME], ["mine.txt"]):
        folder.mkdir()
        write_run_info(folder, RunInfo(run_id="abc", tracking_uri="", thinner={}))
        save_progress(folder, SOME)
        for name in ("00000001.records", "00000012.records", "lock", "progress.json.new", *others):
            (folder / name).touch()
        remove_folder(folder)
        left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        assert left == others
        for name in left:
            (folder / name).unlink()
        if left:
            folder.rmdir()


def test_refused_points_are_listed(tmp_path: Path) -> None:
    for step in (1, 2):
        add_set_aside(tmp_path, [SetAside(Point("a\n", 0.5, 1000, step), "no newline")])
    lines = [json.loads(line) for line in (tmp_path / SET_ASIDE_NAME).read_text().splitlines()]
    assert lines == [
        {"key": "a\n", "value": 0.5, "timestamp_ms": 1000, "step": step, "reason": "no newline"} for step in (1, 2)
    ]
