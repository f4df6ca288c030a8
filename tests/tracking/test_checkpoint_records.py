"""The run knows its checkpoints, and gets their files as Lightning's own logger would bring them."""

import gc
import json
import os
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_air import AirCheckpoint
from lightning_air.checkpoint.manifest import Manifest
from lightning_air.tracking.checkpoint_records import (
    MAX_PINNED,
    CheckpointHistory,
    CheckpointUploads,
    Sighting,
    look_at,
)
from tests.checkpoint.runs import CuriousLogger, Scored, fit, make_trainer
from tests.tracking.local_store import MLFLOW_WARNING, local_client

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
law = settings(derandomize=True, deadline=None, database=None)
NOW = 1_796_000_000.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return local_client(tmp_path_factory)


@pytest.fixture
def new_run(client: MlflowClient, tmp_path: Path) -> Callable[[str], str]:
    def make(name: str) -> str:
        experiment = client.create_experiment(
            f"{tmp_path.name} {name}", artifact_location=str(tmp_path / "artifacts" / name)
        )
        return client.create_run(experiment).info.run_id

    return make


def stored(tmp_path: Path, name: str) -> dict[str, bytes]:
    """Every artifact of a run, by its path in the run."""
    root = tmp_path / "artifacts" / name
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix().split("/", 2)[2]: path.read_bytes() for path in files}


def callback(**attributes: Any) -> Any:
    """Return what stands for a checkpoint callback."""
    return Namespace(**{"state_key": "one", "save_top_k": 1, "monitor": "loss", "mode": "min", **attributes})


def sighting(**attributes: Any) -> Sighting:
    return look_at(callback(**attributes))


def write_ours(folder: Path, *, step: int = 40, num_bytes: int = 7) -> dict[str, Any]:
    """Write a checkpoint of our form, small, and return its manifest."""
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * num_bytes)
    (folder / ".metadata").write_bytes(b"m")
    record: Any = {"num_bytes": num_bytes, "xxh3_128": "0" * 32}
    manifest = {
        "step": step,
        "epoch": 3,
        "created_seconds": NOW - 60,
        "files": {"__0_0.distcp": record},
        "digest": "ab" * 16,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


class WatchingLogger(CuriousLogger):
    """Keeps a history as our logger does."""

    def __init__(self) -> None:
        super().__init__()
        self.history = CheckpointHistory()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.history.add(look_at(checkpoint_callback), seconds=NOW)


# ---- records ---------------------------------------------------------------------------------------------------------


def test_history_of_lightnings_callback(tmp_path: Path) -> None:
    """Given the best two of four epochs, and `last.ckpt`; then the record of each that was saved is there."""
    watching = WatchingLogger()
    saves = ModelCheckpoint(
        tmp_path / "saved", filename="{epoch}-{step}", monitor="score", save_top_k=2, save_last=True
    )
    trainer = make_trainer(
        "single", "lightning's", saves, logger=watching, max_epochs=4, limit_val_batches=1, enable_checkpointing=True
    )
    fit(trainer, Scored([3.0, 1.0, 2.0, 4.0]))
    content = json.loads(watching.history.artifact().text)
    rows = {Path(row["path"]).name: row for row in content["checkpoints"]}
    assert set(rows) == {"epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt", "epoch=2-step=24.ckpt", "last.ckpt"}
    best = rows["epoch=1-step=16.ckpt"]
    assert (best["step"], best["epoch"], best["score"], best["monitor"]) == (16, 1, 1.0, "score")
    assert best["num_bytes"] == Path(best["path"]).stat().st_size
    assert best["digest"] is None
    assert best["is_best"]
    assert rows["last.ckpt"]["step"] == 24 + 8 * (saves.current_score == 4.0)
    assert rows["last.ckpt"]["is_last"]
    assert content["best"] == best["path"]
    assert watching.history.tags() == {
        "lightning_air.best_checkpoint": best["path"],
        "lightning_air.last_checkpoint": str(tmp_path / "saved" / "last.ckpt"),
    }


def test_history_of_our_callback(tmp_path: Path) -> None:
    """Given checkpoints that are folders; then each record has what its manifest says."""
    watching = WatchingLogger()
    saves = AirCheckpoint(str(tmp_path / "saved"), every="4steps", keep_last=1, monitor="score", save_top_k=1)
    trainer = make_trainer("single", "ours", saves, logger=watching, max_epochs=2, limit_val_batches=1)
    fit(trainer, Scored([1.0, 2.0]))
    records = watching.history._records
    best, last = watching.history.best, watching.history.last
    assert best is not None
    assert (best.step, best.score, best.monitor) == (8, 1.0, "score")
    manifest = Manifest.from_json(Path(best.path, "manifest.json").read_bytes())
    assert best.num_bytes == manifest.num_bytes
    assert best.epoch == manifest.epoch
    assert best.digest == json.loads(manifest.to_json())["digest"]
    assert best.saved_seconds == manifest.created_seconds
    assert last is not None
    assert last.step == 16
    assert len(records) >= 2


def test_a_checkpoint_on_its_way_is_none(tmp_path: Path) -> None:
    """Given a folder that lacks `.metadata`; then it is recorded when it is whole, not before."""
    folder = tmp_path / "step=40.ckpt"
    write_ours(folder)
    (folder / ".metadata").unlink()
    history = CheckpointHistory()
    history.add(sighting(_last_checkpoint_saved=str(folder)), seconds=NOW)
    assert history.tags() == {}
    (folder / ".metadata").touch()
    history.add(sighting(_last_checkpoint_saved=str(folder), _last_global_step_saved=41), seconds=NOW)
    assert history.last is not None
    assert (history.last.step, history.last.epoch, history.last.num_bytes) == (40, 3, 7)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[" * 100_000,
        b"[1]",
        b'{"digest": 7}',
        b'{"digest": "x", "created_seconds": NaN, "step": 1, "epoch": 1, "files": {}}',
        b'{"digest": "x", "created_seconds": 1e300, "step": 1, "epoch": 1, "files": {}}',
        b'{"digest": "x", "created_seconds": 1, "step": 1, "epoch": 1, "files": {"a": 1}}',
        b'{"digest": "x", "created_seconds": 1, "step": 1, "epoch": 1e999, "files": {}}',
    ],
)
def test_any_manifest_will_do(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "epoch=1-step=40.ckpt"
    write_ours(folder)
    (folder / "manifest.json").write_bytes(content)
    history = CheckpointHistory()
    history.add(sighting(best_model_path=str(folder)), seconds=NOW)
    assert history.best is not None
    assert (history.best.step, history.best.epoch, history.best.digest) == (40, 1, None)
    assert history.best.num_bytes == 8 + len(content)
    history.artifact()


@pytest.mark.parametrize("place", ["dbfs:/Volumes/a/b/c", "s3://bucket/run"])
def test_remote_paths_are_recorded_as_they_are(place: str) -> None:
    path = f"{place}/epoch=2-step=30.ckpt"
    history = CheckpointHistory()
    seen = sighting(
        best_model_path=path,
        best_k_models={path: torch.tensor(0.5)},
        _last_checkpoint_saved=path,
        _last_global_step_saved=31,
    )
    history.add(seen, seconds=NOW)
    record = history.best
    assert record is not None
    assert record == history.last
    assert (record.step, record.epoch, record.num_bytes, record.score) == (31, 2, None, 0.5)
    assert CheckpointUploads("all").after_save(callback(best_model_path=path)) == []


def test_a_name_that_only_looks_like_a_step(tmp_path: Path) -> None:
    path = tmp_path / "train_step=12-loss=0.5.ckpt"
    path.touch()
    history = CheckpointHistory()
    history.add(sighting(best_model_path=str(path)), seconds=NOW)
    assert history.best is not None
    assert history.best.step is None


def test_saved_again_under_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    history = CheckpointHistory()
    for step, size in ((5, 1), (10, 2)):
        path.write_bytes(b"x" * size)
        seen = sighting(
            last_model_path=str(path), _last_checkpoint_saved=str(path), _last_global_step_saved=step, monitor=None
        )
        history.add(seen, seconds=NOW)
        history.add(seen, seconds=NOW + 1)
    assert history.last is not None
    assert (history.last.step, history.last.num_bytes) == (10, 2)
    assert len(history._records) == 1


def test_the_best_is_of_the_callback_that_rates(tmp_path: Path) -> None:
    """Given one callback that saves by time and one that saves the best; then the best one is the second's."""
    for name in ("timed", "rated"):
        (tmp_path / name).touch()
    history = CheckpointHistory()
    timed = sighting(state_key="timed", monitor=None, best_model_path=str(tmp_path / "timed"))
    history.add(timed, seconds=NOW)
    assert history.tags()["lightning_air.best_checkpoint"] == str(tmp_path / "timed")
    history.add(sighting(state_key="rated", best_model_path=str(tmp_path / "rated")), seconds=NOW)
    history.add(timed, seconds=NOW)
    assert history.tags()["lightning_air.best_checkpoint"] == str(tmp_path / "rated")


def test_a_continued_run_goes_on_with_the_history(tmp_path: Path) -> None:
    """Given a state that was saved in a checkpoint; then that checkpoint, and all before it, are in the history."""
    paths = [tmp_path / f"step={step}.ckpt" for step in range(3)]
    for path in paths:
        path.touch()
    history = CheckpointHistory()
    history.add(sighting(best_k_models={str(paths[0]): torch.tensor(float("inf"))}), seconds=NOW)
    state = json.loads(json.dumps(history.snapshot(), allow_nan=False))
    continued = CheckpointHistory.from_snapshot(state)
    assert continued.snapshot() == history.snapshot()
    continued.add_path(str(paths[1]), seconds=NOW)
    continued.add(sighting(best_model_path=str(paths[2])), seconds=NOW)
    content = json.loads(continued.artifact().text, parse_constant=pytest.fail)
    assert [Path(row["path"]).name for row in content["checkpoints"]] == [path.name for path in paths]
    assert content["checkpoints"][0]["score"] == "inf"
    assert CheckpointHistory.from_snapshot({"version": 99}).last is None


@law
@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1)), max_size=60), st.integers(3, 8))
def test_history_is_bounded_and_keeps_best_and_last(saves: list[tuple[int, float]], bound: int) -> None:
    history = CheckpointHistory(max_records=bound)
    scores: dict[str, float] = {}
    for number, score in saves:
        path = f"s3://bucket/step={number}.ckpt"
        scores[path] = score
        best = min(scores, key=scores.__getitem__)
        seen = sighting(
            best_model_path=best,
            best_k_models={each: torch.tensor(scores[each]) for each in {best, path}},
            _last_checkpoint_saved=path,
        )
        history.add(seen, seconds=NOW)
        assert len(history._records) <= bound
        assert history.best is not None
        assert history.best.path == best
        assert history.last is not None
        assert history.last.path == path
    assert CheckpointHistory.from_snapshot(history.snapshot()).snapshot() == history.snapshot()


@pytest.mark.parametrize("strange", [Namespace(), Namespace(best_k_models=7, save_top_k=None, current_score="x"), None])
def test_any_callback_will_do(strange: Any) -> None:
    history = CheckpointHistory()
    history.add(look_at(strange), seconds=NOW)
    assert history.tags() == {}
    assert CheckpointUploads("all").after_save(strange) == []


# ---- their files -----------------------------------------------------------------------------------------------------


def test_files_lie_as_lightnings_logger_has_them(
    client: MlflowClient, new_run: Callable[[str], str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("epoch=0-step=8.ckpt", "epoch=1-loss=0.25.ckpt", "last.ckpt"):
        (saved / name).write_bytes(name.encode())
    saves = ModelCheckpoint(saved, monitor="loss", save_top_k=2, save_last=True)
    saves.best_k_models = {
        str(saved / "epoch=0-step=8.ckpt"): torch.tensor(0.5),
        str(saved / "epoch=1-loss=0.25.ckpt"): torch.tensor(0.25),
    }
    saves.best_model_path = str(saved / "epoch=1-loss=0.25.ckpt")
    saves.best_model_score = torch.tensor(0.25)
    saves.last_model_path = str(saved / "last.ckpt")
    saves.current_score = torch.tensor(0.5)

    theirs = MLFlowLogger(tracking_uri=client.tracking_uri, run_id=new_run("theirs"), log_model=True)
    theirs._initialized = True  # by `experiment`, which would set MLflow's tracking URI for the process
    theirs.after_save_checkpoint(saves)
    theirs.finalize("success")
    run_id = new_run("ours")
    uploads = CheckpointUploads(True)
    assert uploads.after_save(weakref.proxy(saves)) == []
    due = uploads.at_end()
    for upload in due:
        upload.send(client, run_id)

    ours = stored(tmp_path, "ours")
    assert ours.keys() == stored(tmp_path, "theirs").keys()
    for path, content in stored(tmp_path, "theirs").items():
        same = yaml.safe_load if path.endswith(".yaml") else bytes
        assert same(ours[path]) == same(content), path
    assert len(ours) == 9
    assert uploads.at_end() == []


def test_all_uploads_each_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{index}.ckpt") for index in range(3)]
    uploads = CheckpointUploads("all")
    for index, path in enumerate(paths):
        Path(path).touch()
        seen = callback(best_k_models=dict.fromkeys(paths[: index + 1], torch.tensor(1.0)), best_model_path=path)
        assert [upload.path for upload in uploads.after_save(seen)] == [path]
        assert uploads.after_save(seen) == []
    os.utime(paths[0], (NOW + 1e6, NOW + 1e6))  # saved again
    assert [upload.path for upload in uploads.after_save(seen)] == [paths[0]]
    assert uploads.at_end() == []


@pytest.mark.parametrize(
    ("log_model", "save_top_k", "num_now", "num_at_end"),
    [(False, -1, 0, 0), (True, 1, 0, 1), (True, -1, 1, 0), ("all", 1, 1, 0)],
)
def test_when(tmp_path: Path, log_model: Any, save_top_k: int, num_now: int, num_at_end: int) -> None:
    path = tmp_path / "x.ckpt"
    path.touch()
    uploads = CheckpointUploads(log_model)
    now = uploads.after_save(callback(best_model_path=str(path), save_top_k=save_top_k))
    assert (len(now), len(uploads.at_end())) == (num_now, num_at_end)


def test_at_the_end_what_each_callback_has_then(tmp_path: Path) -> None:
    """Given two callbacks, one of which is gone by then; then the checkpoints of both are uploaded."""
    for name in ("a.ckpt", "b.ckpt", "last.ckpt"):
        (tmp_path / name).touch()
    uploads = CheckpointUploads(True)
    gone = callback(state_key="gone", best_model_path=str(tmp_path / "a.ckpt"))
    stays = callback(state_key="stays", best_model_path=str(tmp_path / "b.ckpt"))
    uploads.after_save(weakref.proxy(gone))
    uploads.after_save(weakref.proxy(stays))
    del gone
    stays.last_model_path = str(tmp_path / "last.ckpt")  # a link that was made without telling
    assert sorted(upload.folder for upload in uploads.at_end()) == ["a", "b", "last"]


def test_a_folder_is_uploaded_as_it_was_when_it_was_saved(
    client: MlflowClient, new_run: Callable[[str], str], tmp_path: Path
) -> None:
    """Given a callback that deletes it before its turn; then it arrives all the same, and nothing is left behind."""
    run_id = new_run("run")
    folder = tmp_path / "step=40.ckpt"
    write_ours(folder)
    (tmp_path / "pins" / "killed").mkdir(parents=True)
    (tmp_path / "pins" / "killed" / "old.ckpt").touch()
    uploads = CheckpointUploads("all", pin_name="pins")
    (upload,) = uploads.after_save(callback(best_model_path=str(folder)))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    upload.send(client, run_id)
    assert set(stored(tmp_path, "run")) == {
        "step=40/step=40.ckpt/__0_0.distcp",
        "step=40/step=40.ckpt/.metadata",
        "step=40/step=40.ckpt/manifest.json",
        "step=40/metadata.yaml",
        "step=40/aliases.txt",
    }
    assert stored(tmp_path, "run")["step=40/aliases.txt"] == b"['latest', 'best']"
    assert len(list((tmp_path / "pins").iterdir())) == 1
    del upload
    gc.collect()
    assert not (tmp_path / "pins").exists()


def test_few_are_pinned(tmp_path: Path) -> None:
    """So that a server that is away does not fill the disk."""
    uploads = CheckpointUploads("all", pin_name="pins")
    due = []
    for index in range(MAX_PINNED + 2):
        path = tmp_path / f"{index}.ckpt"
        path.touch()
        due += uploads.after_save(callback(best_model_path=str(path)))
    assert len(due) == MAX_PINNED + 2
    assert len(list((tmp_path / "pins").iterdir())) == MAX_PINNED


def test_no_links_on_this_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    path = tmp_path / "x.ckpt"
    path.touch()
    uploads = CheckpointUploads("all", pin_name="pins")
    (upload,) = uploads.after_save(callback(best_model_path=str(path)))
    assert upload._files.source == path
    assert not (tmp_path / "pins").exists()


def test_a_checkpoint_that_is_gone_tells(client: MlflowClient, new_run: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.touch()
    (upload,) = CheckpointUploads("all").after_save(callback(best_model_path=str(path)))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        upload.send(client, new_run("run"))


def test_remote_files_are_said_once(tmp_path: Path) -> None:
    said = []
    uploads = CheckpointUploads("all", warn=lambda kind, message: said.append((kind, message)))
    uploads.after_save(callback(best_model_path="s3://bucket/x.ckpt"))
    assert said == [
        (
            "checkpoint remote",
            "s3://bucket/x.ckpt is not on this machine's disk: such checkpoints are recorded, but not uploaded.",
        )
    ]


def test_settings_are_those_of_lightnings_logger(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, monitor="loss", every_n_train_steps=5)
    assert look_at(saves).settings == {
        "monitor": "loss",
        "mode": "min",
        "save_last": None,
        "save_top_k": 1,
        "save_weights_only": False,
        "_every_n_train_steps": 5,
    }
