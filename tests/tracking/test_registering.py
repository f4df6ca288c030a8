"""The best checkpoint of a fit that ended well becomes a version of a registered model, once, that loads as it was."""

import threading
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow import MlflowClient

from lightning_air import AirCheckpoint, AirMLflowLogger, AsyncUCCheckpointIO
from lightning_air.tracking.registering import ModelRegistration, copy_on_cpu, signature_of
from tests.checkpoint.runs import fit as fit_sharded
from tests.checkpoint.runs import make_trainer as make_sharded_trainer
from tests.kit.ranks import run_ranks, values
from tests.strategy.training import Regression, loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import At, Logs, Store, make_logger, make_trainer, own_signal_handlers, press_ctrl_c, warned

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}"),
    # MLflow says this of itself when its models are imported.
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


class Rated(Logs):
    """The second validation is the best one."""

    scores = (3.0, 1.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", torch.tensor(self.scores[min(self.current_epoch, 2)]))


def train(
    logger: AirMLflowLogger, checkpoint: ModelCheckpoint, *callbacks: Any, module: Any = None, **options: Any
) -> Trainer:
    trainer = make_trainer(
        logger, *callbacks, checkpoint, enable_checkpointing=True, max_epochs=3, limit_val_batches=1, **options
    )
    trainer.fit(module or Rated(), loader(), loader())
    return trainer


def loaded(store: Store, monkeypatch: pytest.MonkeyPatch, name: str = "models:/digits/1") -> Any:
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", None)
    mlflow.set_tracking_uri(store.uri)
    try:
        return mlflow.pytorch.load_model(name)
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.parametrize("ours", [True, False], ids=["AirCheckpoint", "ModelCheckpoint"])
def test_the_best_checkpoint_is_registered(ours: bool, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = (AirCheckpoint if ours else ModelCheckpoint)("ckpt", monitor="score")
    options = {"plugins": [AsyncUCCheckpointIO()]} if ours else {}
    logger = make_logger(store, register_model="digits")
    module = Rated()
    train(logger, checkpoint, module=module, **options)
    [version] = store.client.search_model_versions("name = 'digits'")
    assert (str(version.version), version.run_id) == ("1", logger.run_id)
    assert version.tags["lightning_air.checkpoint"] == checkpoint.best_model_path
    assert store.tags(logger.run_id)["lightning_air.registered_model"] == "digits/1"
    model = loaded(store, monkeypatch)
    best = torch.load(checkpoint.open_checkpoint() if ours else checkpoint.best_model_path, weights_only=True)
    assert torch.equal(model.weight, best["state_dict"]["weight"])
    assert not torch.equal(model.weight, module.weight)
    assert model(torch.ones(1, 1)).item() == model.weight.item()
    info = mlflow.models.Model.load(str(Path(store.run(logger.run_id).info.artifact_uri, "model")))
    assert info.signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 1)
    requirements = Path(store.run(logger.run_id).info.artifact_uri, "model/requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.partition('+')[0]}" in requirements


def test_each_fit_makes_one_version_and_an_evaluation_none(store: Store) -> None:
    for folder in ("first", "second"):
        logger = make_logger(store, register_model="digits")
        trainer = train(logger, ModelCheckpoint(folder, monitor="score"))
        trainer.validate(Rated(), loader(), verbose=False)
    versions = store.client.search_model_versions("name = 'digits'")
    assert sorted(str(each.version) for each in versions) == ["1", "2"]
    assert len({each.run_id for each in versions}) == 2


def test_a_second_call_after_a_lost_answer_makes_no_second_version(store: Store) -> None:
    checkpoint = ModelCheckpoint("ckpt", monitor="score")
    logger = make_logger(store)
    module = Rated()
    train(logger, checkpoint, module=module)
    warnings: list[str] = []
    registration = ModelRegistration("digits", module, checkpoint, warn=lambda _, text: warnings.append(text))
    lost = _AnswerIsLost(store.client)
    with pytest.raises(ConnectionError):
        registration.send(lost, logger.run_id)  # type: ignore[arg-type]
    registration.send(store.client, logger.run_id)
    assert [str(each.version) for each in store.client.search_model_versions("name = 'digits'")] == ["1"]
    assert store.tags(logger.run_id)["lightning_air.registered_model"] == "digits/1"
    assert warnings == []


class _AnswerIsLost:
    """A client whose new version is there, though the answer never arrives."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def create_model_version(self, *args: Any, **kwargs: Any) -> None:
        self.client.create_model_version(*args, **kwargs)
        raise ConnectionError("reset by peer")


def test_what_did_not_end_well_is_not_registered(store: Store) -> None:
    logger = make_logger(store, register_model="digits")
    with own_signal_handlers(), pytest.raises(SystemExit), warned():
        train(logger, ModelCheckpoint("ckpt", monitor="score"), At(17, press_ctrl_c))
    assert store.status(logger.run_id) == "KILLED"
    assert store.client.search_registered_models() == []


@pytest.mark.parametrize("has_callback", [True, False])
def test_what_is_missing_is_said(has_callback: bool, store: Store) -> None:
    logger = make_logger(store, register_model="digits")
    callbacks = [ModelCheckpoint("ckpt", every_n_epochs=9)] if has_callback else []
    trainer = make_trainer(logger, *callbacks, enable_checkpointing=has_callback, limit_val_batches=1)
    with warned() as found:
        trainer.fit(Rated(), loader(), loader())
    expected = (
        "MLflow has not got the registered model digits: ValueError: training has saved no checkpoint."
        if has_callback
        else "register_model takes a ModelCheckpoint's best: add one."
    )
    assert expected in found.messages
    assert store.client.search_registered_models() == []


# ---- how the module is made ------------------------------------------------------------------------------------------


class Wide(Rated):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lock = threading.Lock()  # which nothing can copy
        self.weight = torch.nn.Parameter(torch.ones(width))


class WideWithHyperparameters(Wide):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.save_hyperparameters()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "lock": None}

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("FSDP does not support deepcopy")  # as torch's sharded modules


def test_what_cannot_be_copied_is_made_of_its_hyperparameters(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make_logger(store, register_model="digits")
    train(logger, ModelCheckpoint("ckpt", monitor="score"), module=WideWithHyperparameters(3))
    assert loaded(store, monkeypatch).weight.shape == (3,)


def test_without_hyperparameters_it_is_said_what_to_do(store: Store) -> None:
    logger = make_logger(store, register_model="digits")
    with warned() as found:
        train(logger, ModelCheckpoint("ckpt", monitor="score"), module=Wide(3))
    assert "call self.save_hyperparameters() in its __init__" in found.text
    assert store.status(logger.run_id) == "FINISHED"


def test_the_copy_shares_nothing_and_keeps_what_is_tied() -> None:
    module = Regression()
    module.again = module.net  # type: ignore[assignment]
    copied = copy_on_cpu(module)
    assert copied is not None
    assert copied.again is copied.net
    ours, theirs = dict(copied.state_dict()), dict(module.state_dict())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not {each.data_ptr() for each in copied.parameters()} & {each.data_ptr() for each in module.parameters()}


def test_a_forward_that_fails_costs_the_signature_only() -> None:
    module = Rated()
    told: list[str] = []
    module.example_input_array = torch.zeros(2, 3, dtype=torch.complex64)  # NumPy's signature knows no such type
    module.forward = lambda inputs: inputs.nowhere  # type: ignore[method-assign,assignment,attr-defined]
    assert signature_of(module, warn=lambda _, text: told.append(text)) is None
    [text] = told
    assert text.startswith("The registered model has no signature: forward(example_input_array) failed: AttributeError")


class Sharded(Regression):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.more = torch.nn.Linear(1, width)


def _registers_sharded(uri: str) -> str:
    logger = AirMLflowLogger("ranks", tracking_uri=uri, spool_dir="spool", register_model="digits", log_console=False)
    trainer = make_sharded_trainer(
        "air fsdp",
        "ours",
        AirCheckpoint("ckpt"),
        logger=logger,
        log_every_n_steps=1,
        max_steps=3,
        enable_checkpointing=True,
    )
    fit_sharded(trainer, Sharded(5))
    assert isinstance(trainer.checkpoint_callback, AirCheckpoint)
    return trainer.checkpoint_callback.best_model_path


def test_a_sharded_model_is_registered_whole(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.client.create_experiment("ranks", artifact_location=str(tmp_path / "artifacts"))
    best, _ = values(run_ranks(_registers_sharded, 2, args=(store.uri,), warnings_as_errors=False))
    model = loaded(store, monkeypatch)
    assert type(model) is Sharded
    assert model.more.weight.shape == (5, 1)
    assert best
