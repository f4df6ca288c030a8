"""Where the next attempt goes on: written whole, read whole, or not at all."""

import contextlib
import errno
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_air.tracking.full_record import Kept
from lightning_air.tracking.progress import Progress, load_progress, save_progress
from lightning_air.tracking.segments import BEGINNING, Position
from lightning_air.tracking.set_aside import SET_ASIDE_NAME
from lightning_air.tracking.spool_folder import (
    PREVIOUS_NAME,
    PROGRESS_NAME,
    RunInfo,
    read_run_info,
    remove_folder,
    write_run_info,
)

law = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SOME = Progress(
    position=Position(3, 1040), thinner={"open": {"loss": [0.5, 3]}}, num_sent=7, num_set_aside=1, num_cut=40
)
LATER = replace(SOME, position=Position(4, 16), num_sent=70)
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
        num_damaged=count,
        kept=st.none() | st.builds(Kept, st.text(), count),
        set_aside_bytes=st.none() | count,
    )
)
def test_what_was_saved_is_loaded(progress: Progress) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_progress(Path(folder), SOME)
        save_progress(Path(folder), progress)
        assert load_progress(Path(folder)) == progress
        assert sorted(path.name for path in Path(folder).iterdir()) == [PROGRESS_NAME, PREVIOUS_NAME]
        Path(folder, PROGRESS_NAME).unlink()
        assert load_progress(Path(folder)) == SOME


def test_none_saved_is_the_beginning_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_progress(tmp_path) == Progress(position=BEGINNING)
    assert caplog.text == ""


@law
@given(st.data())
def test_if_a_file_was_cut_the_one_before_it_counts(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_progress(Path(folder), SOME)
        path = Path(folder, PROGRESS_NAME)
        text = path.read_bytes()
        cut = text[: data.draw(st.integers(0, len(text) - 1))]
        path.write_bytes(cut)
        assert load_progress(Path(folder)) == Progress()
        path.write_bytes(text)
        save_progress(Path(folder), LATER)
        path.write_bytes(cut)
        assert load_progress(Path(folder)) == SOME


@pytest.mark.parametrize("at", range(4))
def test_a_kill_while_it_is_saved_leaves_one_of_the_two(at: int, tmp_path: Path) -> None:
    """A rename is not done by halves; so it is killed before the first one, between the two, or after them."""

    class Killed(BaseException):
        pass

    save_progress(tmp_path, SOME)
    left, rename = at, Path.replace

    def counting(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Path, "replace", counting)
        save_progress(tmp_path, LATER)
    assert load_progress(tmp_path) == (SOME if at < 2 else LATER)
    save_progress(tmp_path, LATER)
    assert load_progress(tmp_path) == LATER
    remove_folder(tmp_path)
    assert not tmp_path.exists()


def test_what_is_not_wanted_any_more_when_it_is_on_the_disk_changes_nothing(tmp_path: Path) -> None:
    save_progress(tmp_path, SOME)
    assert not save_progress(tmp_path, LATER, is_wanted=lambda: False)
    assert load_progress(tmp_path) == SOME
    assert [path.name for path in tmp_path.iterdir()] == [PROGRESS_NAME]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that goes down may leave the name with nothing in it."""
    flushed: list[int] = []
    fsync, rename = os.fsync, Path.replace

    def flush(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        assert flushed == [path.stat().st_size]
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", replace)
    save_progress(tmp_path, SOME)
    assert flushed


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.ENOSPC])
def test_a_file_system_that_cannot_flush_is_no_error_but_a_full_one_is(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", refuse)
    if reason == errno.EINVAL:
        save_progress(tmp_path, SOME)
        assert load_progress(tmp_path) == SOME
    else:
        with pytest.raises(OSError, match="No space left"):
            save_progress(tmp_path, SOME)
        assert list(tmp_path.iterdir()) == []


GOOD = {"version": 1, "position": [3, 16], "thinner": None, "num_sent": 1, "num_set_aside": 0, "num_cut": 0}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        None,
        5,
        "x",
        GOOD | {"kept": []},
        GOOD | {"num_damaged": -1},
        GOOD | {"set_aside_bytes": "9"},
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
        for name in ("00000001.records", "00000012.records", "lock", "progress.json.9-1.new", PREVIOUS_NAME, *others):
            (folder / name).touch()
        remove_folder(folder)
        left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        assert left == others
        for name in left:
            (folder / name).unlink()
        if left:
            folder.rmdir()


def test_where_segments_are_gone_and_nothing_tells_how_far_it_got_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "00000003.records").touch()
    assert load_progress(tmp_path) == Progress()
    assert "is not known any more" in caplog.text
