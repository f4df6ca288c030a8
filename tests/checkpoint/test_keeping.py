"""What a run knows of its folder: what earlier attempts left counts, what failed is forgotten, the best have order."""

import os
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_air.checkpoint.keeping import Keeping, Known
from lightning_air.checkpoint.local_store import LocalStore
from lightning_air.checkpoint.scores import SCORES_NAME, read_scores, write_scores
from lightning_air.checkpoint.store import METADATA_NAME
from tests.checkpoint.samples import save_ours, save_stock

HOUR = 3600.0


def keeping(*known: Known, keep_last: int = 1, mode: Literal["min", "max"] = "min") -> Keeping:
    made = Keeping(keep_last, mode)
    made.start(known)
    return made


def published(step: int, score: float | None = None) -> Known:
    return Known(f"step={step}", step, float(step), is_published=True, score=score)


def save(made: Keeping, step: int, score: float | None = None, *, name: str | None = None) -> list[str]:
    """Save, publish, and return what is deleted then."""
    asked = f"step={step}"
    made.begin(asked, step, None if score is None else torch.tensor(score))
    assert made.to_delete(10) == []  # nothing goes for what is not there yet
    made.publish(asked, name or asked)
    return made.to_delete(1)


# ---- looking ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_looked_at(tmp_path: Path) -> None:
    save_ours(tmp_path / "step=7", step=7, created_seconds=1000.0)
    (save_ours(tmp_path / "step=9", step=9, created_seconds=2000.0) / METADATA_NAME).unlink()
    save_stock(tmp_path / "step=3")
    torch.save({}, tmp_path / "step=4.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=7")
    (tmp_path / "notes").mkdir()
    found = {Path(known.path).name: known for known in Keeping.look(str(tmp_path), only_ours=False)}
    assert {name: (known.step, known.is_published) for name, known in found.items()} == {
        "step=7": (7, True),
        "step=9": (9, False),
        "step=3": (3, True),
        "step=4.ckpt": (4, True),
    }
    assert found["step=7"].created_seconds == 1000.0
    ours = {Path(known.path).name for known in Keeping.look(str(tmp_path), only_ours=True)}
    assert ours == {"step=7", "step=9"}  # what other programs have published neither counts nor goes
    assert Keeping.look(str(tmp_path / "nothing here"), only_ours=False) == []


def test_orphans_go_by_age_once(tmp_path: Path) -> None:
    for name, hours in (("old", 7.0), ("young", 5.0)):
        shard = save_stock(tmp_path / name) / "__0_0.distcp"
        for path in shard.parent.iterdir():
            os.utime(path, (time.time() - hours * HOUR,) * 2)
        (shard.parent / METADATA_NAME).unlink()
    made = keeping(*Keeping.look(str(tmp_path), only_ours=True))
    assert [Path(path).name for path in made.orphans(6 * HOUR)] == ["old"]
    assert made.orphans(6 * HOUR) == []


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_what_earlier_attempts_left_counts() -> None:
    made = keeping(published(10), published(20), keep_last=2)
    assert made.to_delete(0) == []
    assert save(made, 30) == ["step=10"]
    assert save(made, 40) == ["step=20"]


def test_the_one_resumed_from_and_damaged_ones_stay_and_do_not_count() -> None:
    made = keeping(published(10), published(20), published(30), keep_last=2)
    made.resume("step=10", damaged={"step=30", "elsewhere"}, scores={})
    assert save(made, 15) == []
    assert save(made, 40) == []  # 20 and 40 by their steps, 15 and 40 by their times
    assert save(made, 50) == ["step=15", "step=20"]


def test_a_failed_save_never_was() -> None:
    made = keeping(published(10, score=0.5))
    made.begin("step=20", 20, torch.tensor(0.1))
    assert made.begun == {"step=20"}
    assert list(made.best(1)) == ["step=20"]
    assert list(made.best(1, only_published=True)) == ["step=10"]
    made.fail("step=20")
    assert made.begun == set()
    assert made.best(1) == {"step=10": 0.5}
    assert made.to_delete(1) == []


def test_a_save_may_be_published_under_another_name() -> None:
    made = keeping()
    save(made, 10, score=1.0, name="step=10@2")
    assert made.best(-1) == {"step=10@2": 1.0}
    assert save(made, 20) == []
    assert save(made, 30, score=0.5) == ["step=10@2", "step=20"]


def test_scores_of_what_is_gone_are_ignored() -> None:
    made = keeping(published(10), published(20))
    made.resume(None, damaged=(), scores={"step=10": torch.tensor(0.3), "step=15": torch.tensor(0.1)})
    assert made.best(-1) == {"step=10": pytest.approx(0.3)}
    assert made.to_delete(1) == []
    assert made.to_delete(0) == ["step=10"]


@pytest.mark.parametrize(
    ("mode", "number", "expected"),
    [("min", 2, ["step=30", "step=20"]), ("max", 1, ["step=10"]), ("min", 0, []), ("max", -1, "all")],
)
def test_the_best_come_first_and_of_equal_ones_the_newer(
    mode: Literal["min", "max"], number: int, expected: list[str] | str
) -> None:
    made = keeping(published(10, 3.0), published(20, 1.0), published(30, 1.0), published(40), mode=mode)
    everything = ["step=10", "step=30", "step=20"]
    assert list(made.best(number)) == (everything if expected == "all" else expected)


@given(
    scores=st.lists(st.one_of(st.none(), st.integers(0, 3).map(float)), min_size=1, max_size=15),
    keep_last=st.integers(1, 3),
    number=st.integers(-1, 3),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_best_and_the_newest_are_never_deleted(
    scores: list[float | None], keep_last: int, number: int, mode: Literal["min", "max"]
) -> None:
    made, left = keeping(keep_last=keep_last, mode=mode), set()
    for step, score in enumerate(scores, start=1):
        made.begin(f"step={step}", step, None if score is None else torch.tensor(score))
        made.publish(f"step={step}", f"step={step}")
        left.add(f"step={step}")
        left -= set(made.to_delete(number))
        assert set(made.best(number)) <= left
        newest = {f"step={each}" for each in range(max(1, step - keep_last + 1), step + 1)}
        assert newest <= left
        assert left == newest | set(made.best(number))


# ---- scores ----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=9), st.floats(allow_nan=False), max_size=5), st.text(max_size=5))
def test_scores_are_read_as_they_were_written(scores: dict[str, float], monitor: str) -> None:
    store = LocalStore(Path.cwd())
    write_scores(store, monitor, scores)
    assert read_scores(store, monitor) == scores
    assert read_scores(store, monitor + "2") == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"version": 1, "monitor": "m", "scores": []}',
        b'{"version": 1, "monitor": "m", "scores": {"a": "b"}}',
        b'{"version": 1, "monitor": "m", "scores": {"a": null}}',
        b"[" * 100_000,
        b" " * (2 << 20),
    ],
    ids=range(8),
)
def test_damaged_scores_are_ignored_and_said(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SCORES_NAME).write_bytes(content)
    assert read_scores(LocalStore(tmp_path), "m") == {}
    assert f"{SCORES_NAME} is damaged, and ignored" in caplog.text


def test_scores_of_another_version_and_those_that_are_no_number_do_not_count(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert read_scores(store, "m") == {}
    write_scores(store, "m", {"a": float("nan"), "b": float("inf")})
    assert read_scores(store, "m") == {"b": float("inf")}
    (tmp_path / SCORES_NAME).write_text('{"version": 2, "monitor": "m", "scores": {"a": 1}}')
    assert read_scores(store, "m") == {}


def test_scores_beside_the_checkpoints_count_if_they_are_of_the_same_metric(tmp_path: Path) -> None:
    save_ours(tmp_path / "step=7", step=7, created_seconds=1000.0)
    write_scores(LocalStore(tmp_path), "loss", {"step=7": 0.5, "gone": 0.1})
    [known] = Keeping.look(str(tmp_path), only_ours=True, monitor="loss")
    assert known.score == 0.5
    [known] = Keeping.look(str(tmp_path), only_ours=True, monitor="accuracy")
    assert known.score is None
    [known] = Keeping.look(str(tmp_path), only_ours=True)
    assert known.score is None
