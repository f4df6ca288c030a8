"""Refused points are listed once each, in whole lines, whatever was killed when; and not without end."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking import set_aside as set_aside_module
from lightning_air.tracking.points import Point
from lightning_air.tracking.progress import load_progress
from lightning_air.tracking.set_aside import SET_ASIDE_NAME, SetAside, add_set_aside, whole_bytes
from tests.tracking.spooling import SECONDS, append, writing
from tests.tracking.stand_ins import ListDoor, Warnings

law = settings(derandomize=True, deadline=None, database=None, max_examples=60)


def item(step: int, reason: str = "no newline") -> SetAside:
    return SetAside(Point("a\n", 0.5, 1000, step), reason)


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / SET_ASIDE_NAME).read_text().splitlines()]


def test_refused_points_are_listed(tmp_path: Path) -> None:
    for step in (1, 2):
        add_set_aside(tmp_path, [item(step)])
    lines = [json.loads(line) for line in (tmp_path / SET_ASIDE_NAME).read_text().splitlines()]
    assert lines == [
        {"key": "a\n", "value": 0.5, "timestamp_ms": 1000, "step": step, "reason": "no newline"} for step in (1, 2)
    ]
    assert whole_bytes(tmp_path) == (tmp_path / SET_ASIDE_NAME).stat().st_size


def test_there_may_be_no_list(tmp_path: Path) -> None:
    assert whole_bytes(tmp_path) == 0
    assert add_set_aside(tmp_path, [item(1)], after_bytes=500)[1] == 0  # somebody took it away
    assert steps_in(tmp_path) == [1]


@law
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=5), st.integers(0, 10**5))
def test_a_line_that_is_not_whole_goes_and_all_others_stay(sizes: list[int], cut: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ends = [add_set_aside(folder, [item(step, "x" * size)])[0] for step, size in enumerate(sizes)]
        cut = min(cut, ends[-1])
        content = (folder / SET_ASIDE_NAME).read_bytes()
        (folder / SET_ASIDE_NAME).write_bytes(content[:cut])
        num_whole = sum(end <= cut for end in ends)
        assert whole_bytes(folder) == ([0, *ends][num_whole])
        add_set_aside(folder, [item(77)])
        assert steps_in(folder) == [*range(num_whole), 77]


def test_it_has_an_end_and_what_does_not_fit_in_is_counted(tmp_path: Path) -> None:
    num_bytes, num_left_out = add_set_aside(tmp_path, [item(step) for step in range(100)], max_bytes=1000)
    assert num_bytes == (tmp_path / SET_ASIDE_NAME).stat().st_size <= 1000
    assert 0 < len(steps_in(tmp_path)) == 100 - num_left_out < 20


def test_after_a_crash_between_the_list_and_the_progress_each_point_is_in_the_list_once(tmp_path: Path) -> None:
    door, folder = ListDoor(bad_keys=["bad"]), tmp_path / "run"
    with writing(door, folder=folder) as (spool, writer):
        append(spool, 0, ["bad"])
        assert writer.flush(SECONDS)
    texts = {path: path.read_bytes() for path in folder.glob("progress*.json")}
    with writing(door, folder=folder) as (spool, writer):
        append(spool, 1, ["bad"])
        assert writer.flush(SECONDS)
    assert steps_in(folder) == [0, 1]
    for path, text in texts.items():
        path.write_bytes(text)
    with (folder / SET_ASIDE_NAME).open("a") as file:
        file.write('{"key": "bad", "val')
    with writing(door, folder=folder) as (spool, writer):
        append(spool, 2, ["bad"])
        assert writer.close(SECONDS)
        assert writer.stats().num_set_aside == 3
    assert steps_in(folder) == [0, 1, 2]


def test_the_list_of_an_earlier_stage_stays(tmp_path: Path) -> None:
    """Nobody may have uploaded it yet, and its progress is gone."""
    add_set_aside(tmp_path, [item(1)])
    with writing(ListDoor(bad_keys=["bad"]), folder=tmp_path) as (spool, writer):
        assert load_progress(tmp_path).set_aside_bytes in (None, whole_bytes(tmp_path))
        append(spool, 2, ["bad"])
        assert writer.close(SECONDS)
    assert steps_in(tmp_path) == [1, 2]


def test_a_list_that_is_full_is_said_and_the_count_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = Warnings()
    monkeypatch.setattr(set_aside_module.add_set_aside, "__kwdefaults__", {"after_bytes": None, "max_bytes": 500})
    with writing(ListDoor(bad_keys=["bad"]), folder=tmp_path, warn=warnings) as (spool, writer):
        for step in range(20):
            append(spool, step, ["bad"])
        assert writer.close(SECONDS)
        assert writer.stats().num_set_aside == 20
    assert (tmp_path / SET_ASIDE_NAME).stat().st_size <= 500
    assert "is full" in warnings.text
