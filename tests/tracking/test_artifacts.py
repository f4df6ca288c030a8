"""Artifacts hold all of what they were made of, and no attempt overwrites another's."""

import json
import threading
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from lightning_air.tracking.artifacts import (
    FileUpload,
    attempt_folder,
    config_artifact,
    events_artifact,
    hyperparameters_artifact,
    log_growing_file,
    log_set_aside,
    log_text,
    yaml_text,
)
from lightning_air.tracking.points import Point
from lightning_air.tracking.set_aside import SetAside, add_set_aside
from lightning_air.tracking.window import Event
from tests.tracking.local_store import MLFLOW_WARNING, local_client

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")
law = settings(derandomize=True, deadline=None, database=None)

texts = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(), inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return local_client(tmp_path_factory)


@pytest.fixture
def run_id(client: MlflowClient, tmp_path: Path) -> str:
    experiment = client.create_experiment(tmp_path.name, artifact_location=str(tmp_path / "artifacts"))
    return client.create_run(experiment).info.run_id


def stored(tmp_path: Path) -> dict[str, bytes]:
    """Every artifact of the test's run, by its path in the run."""
    files = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    return {path.relative_to(tmp_path / "artifacts").as_posix().split("/", 2)[2]: path.read_bytes() for path in files}


@law
@given(plain)
@example({"a\x85b": "\x85", "\u2028": ["c\u2029d"]})
def test_yaml_holds_what_it_was_made_of(content: Any) -> None:
    assert yaml.safe_load(yaml_text(content)) == content


class Mode(Enum):
    FAST = 1


class Silent:
    def __str__(self) -> str:
        raise ValueError("never")

    __repr__ = __str__


@dataclass
class Options:
    depth: int
    inner: object


def test_yaml_of_what_is_no_plain_value() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    content = {
        "namespace": Namespace(lr=np.float64(0.1), betas=(0.9, 0.999), kind=Mode.FAST),
        "options": Options(3, {"path": Path("/data"), "names": {"b", "a"}}),
        "tensor": torch.tensor(1.5),
        "module": torch.nn.Linear,
        "version": torch.__version__,
        "silent": Silent(),
        "undecodable": "a\udcffb",
        "loop": loop,
        "nan": float("nan"),
        "prompt": "line\n" * 2000,
    }
    read = yaml.safe_load(yaml_text(content))
    assert read["namespace"] == {"lr": 0.1, "betas": [0.9, 0.999], "kind": "FAST"}
    assert read["options"] == {"depth": 3, "inner": {"path": "/data", "names": ["a", "b"]}}
    assert read["tensor"] == 1.5
    assert read["module"] == "torch.nn.modules.linear.Linear"
    assert read["version"] == str(torch.__version__)
    assert read["silent"] == "<Silent: ValueError>"
    assert read["loop"][0] == 1
    assert read["nan"] != read["nan"]
    assert read["prompt"] == content["prompt"]


def test_attempts_of_one_run_keep_theirs(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    """Given a run that a second attempt continues; then the files of both are there."""
    for ordinal, launch_id, rate in ((1, "aaaaaaaabbbb", 0.1), (2, "ccccccccdddd", 0.2), (1, "eeeeeeee", 0.3)):
        attempt = attempt_folder(ordinal, launch_id)
        log_text(client, run_id, config_artifact(f"lr: {rate}\n# from the user\n", attempt))
        log_text(client, run_id, hyperparameters_artifact({"lr": rate, "nested": {"a": [1, 2]}}, attempt))
        log_text(client, run_id, events_artifact([Event("loss", 7, 1000, "nan")], attempt))
    artifacts = stored(tmp_path)
    assert len(artifacts) == 9
    assert artifacts["config/attempt_1-aaaaaaaa/config.yaml"] == b"lr: 0.1\n# from the user\n"
    assert yaml.safe_load(artifacts["config/attempt_2-cccccccc/hyperparameters.yaml"]) == {
        "lr": 0.2,
        "nested": {"a": [1, 2]},
    }
    assert json.loads(artifacts["tracking/attempt_1-eeeeeeee/events.jsonl"]) == {
        "key": "loss",
        "step": 7,
        "timestamp_ms": 1000,
        "value": "nan",
    }


def test_a_configuration_that_is_no_text(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    log_text(client, run_id, config_artifact(Namespace(fit=Namespace(seed=1)), "attempt_1-x"))
    log_text(client, run_id, config_artifact(Namespace(fit=Namespace(seed=2)), "attempt_1-x"))
    assert stored(tmp_path) == {"config/attempt_1-x/config.yaml": b"fit:\n  seed: 2\n"}


def test_set_aside_points(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    assert not log_set_aside(client, run_id, spool, "attempt_1-x")
    add_set_aside(spool, [SetAside(Point("a", 1.0, 2, 3), "bad key")])
    assert log_set_aside(client, run_id, spool, "attempt_1-x")
    lines = stored(tmp_path)["tracking/attempt_1-x/set_aside.jsonl"].splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["bad key"]


def test_a_file_that_grows_is_uploaded_as_it_was(run_id: str, tmp_path: Path) -> None:
    """Given a log that is being written; then the upload reads a file that does not change."""

    class Growing:
        """Stands for a client whose upload takes long."""

        def log_artifact(self, run_id: str, path: str, folder: str) -> None:
            size = Path(path).stat().st_size
            with log.open("ab") as file:
                file.write(b"later\n")
            assert Path(path).stat().st_size == size
            assert (Path(path).name, folder) == ("stdout.log", "logs/node_0")

    log = tmp_path / "stdout.log"
    log.write_bytes(b"line\n")
    assert log_growing_file(Growing(), run_id, log, "logs/node_0")
    assert log.read_bytes() == b"line\nlater\n"


def test_upload_of_a_folder_goes_on_where_it_failed(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    source = tmp_path / "step=2.ckpt"
    (source / "deep" / "er").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "deep/er/meta.pt"):
        (source / name).write_bytes(name.encode())
    sent = []

    class Failing:
        """Fails once for each file."""

        def log_artifact(self, run_id: str, path: str, folder: str) -> None:
            sent.append(path)
            if sent.count(path) == 1:
                raise ConnectionError
            client.log_artifact(run_id, path, folder)

    upload = FileUpload(source, "step=2")
    for _ in range(3):
        with pytest.raises(ConnectionError):
            upload.send(Failing(), run_id)
    upload.send(Failing(), run_id)
    assert stored(tmp_path) == {
        "step=2/step=2.ckpt/__0_0.distcp": b"__0_0.distcp",
        "step=2/step=2.ckpt/.metadata": b".metadata",
        "step=2/step=2.ckpt/deep/er/meta.pt": b"deep/er/meta.pt",
    }
    assert len(sent) == 6


def test_upload_of_a_file_that_is_gone(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist any more"):
        FileUpload(tmp_path / "gone.ckpt", "gone").send(client, run_id)


def test_uploads_need_no_thread(
    client: MlflowClient, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a process none can be started any more."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    (tmp_path / "x.ckpt").write_bytes(b"x")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    FileUpload(tmp_path / "x.ckpt", "x").send(client, run_id)
    log_text(client, run_id, config_artifact({"a": 1}, "attempt_1-x"))
    assert len(stored(tmp_path)) == 2
