"""What a fit leaves in its run: points within the budget, parameters, configuration, checkpoints, output."""

import contextlib
import gc
import json
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from mlflow import MlflowClient
from torch import Tensor

from lightning_air import AirCheckpoint, AsyncUCCheckpointIO
from tests.strategy.training import loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import At, Exit, Logs, Store, fit, make_logger, new_launch, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


def many(logger: Any, *callbacks: Callback, steps: int, module: Any = None, **options: Any) -> Trainer:
    """Train for so many steps, quickly."""
    return fit(logger, *callbacks, module=module or Logs(float), max_epochs=-1, max_steps=steps, **options)


# ---- points ----------------------------------------------------------------------------------------------------------


def test_each_value_is_a_point_while_there_is_room(store: Store) -> None:
    logger = make_logger(store)
    many(logger, steps=20)
    assert store.curve(logger.run_id, "loss") == [(step, float(step)) for step in range(20)]


def test_a_point_for_ten_steps_is_their_mean(store: Store) -> None:
    logger = make_logger(store, step=10, aggregate=["mean", "max", "min", "last"])
    many(logger, steps=35)
    ends = [9, 19, 29, 34]
    assert store.curve(logger.run_id, "loss") == [(9, 4.5), (19, 14.5), (29, 24.5), (34, 32.0)]
    assert store.curve(logger.run_id, "loss/max") == [(end, float(end)) for end in ends]
    assert store.curve(logger.run_id, "loss/last") == [(end, float(end)) for end in ends]
    assert store.curve(logger.run_id, "loss/min") == [(9, 0.0), (19, 10.0), (29, 20.0), (34, 30.0)]


def test_validation_is_exempt_and_keeps_each_value(store: Store) -> None:
    logger = make_logger(store, step=100)
    trainer = many(logger, steps=16, module=Logs(float), limit_val_batches=1, val_check_interval=2)
    assert store.steps(logger.run_id, "val_loss") == list(range(1, 16, 2))
    assert store.steps(logger.run_id, "loss") == [15]
    trainer.test(trainer.lightning_module, loader(), verbose=False)
    assert store.steps(logger.run_id, "test_loss") == [16]


def test_other_patterns_are_exempt(store: Store) -> None:
    logger = make_logger(store, step=100, exempt=["lo*"])
    many(logger, steps=8, limit_val_batches=1, val_check_interval=2)
    assert store.steps(logger.run_id, "loss") == list(range(8))
    assert store.steps(logger.run_id, "val_loss") == [7]


def test_never_above_the_budget_over_stages_and_attempts(store: Store) -> None:
    cap = 60
    logger = make_logger(store, max_metric_steps=cap)
    callback = ModelCheckpoint("ckpt")
    counts = []
    with warned() as found:
        trainer = many(logger, callback, steps=100, limit_val_batches=1, enable_checkpointing=True)
        counts.append(len(store.points(logger.run_id)))
        trainer.test(trainer.lightning_module, loader(), verbose=False)
        counts.append(len(store.points(logger.run_id)))
        with new_launch("second"):
            second = make_logger(store, max_metric_steps=cap, resume_run="continue")
            best = callback.best_model_path
            many(
                second,
                ModelCheckpoint("ckpt"),
                steps=200,
                limit_val_batches=1,
                enable_checkpointing=True,
                ckpt_path=best,
            )
    assert second.run_id == logger.run_id
    counts.append(len(store.points(logger.run_id)))
    assert counts == sorted(counts)
    assert counts[-1] <= cap
    assert "budget" in found.text
    assert counts[-1] <= int(store.tags(logger.run_id)["lightning_air.metric_steps"]) <= cap
    assert store.steps(logger.run_id, "test_loss") == [100]


def test_several_aggregates_of_each_step(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    logger = make_logger(store, aggregate=["mean", "max"])
    many(logger, At(4, lambda trainer: trainer.logger.session.flush(5)), steps=8)
    assert "is damaged" not in caplog.text
    assert store.steps(logger.run_id, "loss") == store.steps(logger.run_id, "loss/max") == list(range(8))


def test_the_plan_is_for_the_length_that_the_trainer_knows(store: Store) -> None:
    logger = make_logger(store, max_metric_steps=1_000)
    asked: list[str] = []

    class Asks(Callback):
        def on_train_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.logger.session.flush(5)
            asked.append(trainer.logger.session.tracker.plan())

    many(logger, Asks(), steps=30)
    assert "to step 30" in asked[0]


def test_logged_without_a_step_or_by_several_calls_at_one_step(store: Store) -> None:
    class LogsByHand(Logs):
        def on_train_batch_end(self, *_: Any) -> None:
            self.logger.log_metrics({"by_hand": 1.0}, step=self.global_step)
            more: dict[str, Any] = {"int": 2, "tensor": torch.tensor(3.0)}
            self.logger.log_metrics(more, step=self.global_step)

    logger = make_logger(store)
    many(logger, steps=2, module=LogsByHand())
    for key, value in {"by_hand": 1.0, "int": 2.0, "tensor": 3.0}.items():
        assert store.curve(logger.run_id, key) == [(1, value), (2, value)]


def test_a_prefix(store: Store) -> None:
    logger = make_logger(store, prefix="a/b", step=100)
    many(logger, steps=4, limit_val_batches=1, val_check_interval=2)
    assert store.steps(logger.run_id, "a/b-loss") == [3]
    assert store.steps(logger.run_id, "a/b-val_loss") == [1, 3]  # patterns are of the names as they are logged


class Counting(Tensor):
    """A tensor that notes who asks for its value."""

    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in {"item", "__float__", "tolist", "numpy", "cpu"}:
            import traceback

            cls.asked.append("".join(traceback.format_stack(limit=8)))
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_no_synchronisation_beyond_lightnings(store: Store) -> None:
    class LogsTensors(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("tensor", torch.tensor(1.0).as_subclass(Counting))
            return loss

    Counting.asked.clear()
    logger = make_logger(store)
    many(logger, steps=5, module=LogsTensors())
    assert len(store.steps(logger.run_id, "tensor")) == 5
    assert [stack for stack in Counting.asked if "lightning_air" in stack] == []


# ---- beside others ---------------------------------------------------------------------------------------------------


def test_beside_a_csv_logger(store: Store) -> None:
    logger = make_logger(store)
    csv = CSVLogger("csv")
    many([csv, logger], ModelCheckpoint(), steps=8, enable_checkpointing=True)
    assert store.steps(logger.run_id, "loss") == list(range(8))
    assert Path(csv.log_dir, "metrics.csv").read_text().count("\n") == 9
    assert [str(path) for path in Path().rglob("*.ckpt")] == [str(Path(csv.log_dir, "checkpoints/epoch=0-step=8.ckpt"))]
    assert json.loads(store.artifact(logger.run_id, "manifest"))["best"].endswith("epoch=0-step=8.ckpt")


def test_two_of_ours_in_one_trainer(store: Store) -> None:
    before = sys.stdout, sys.stderr
    first, second = (
        make_logger(store, "first", log_console=True),
        make_logger(store, "second", step=4, log_console=True),
    )
    callback = ModelCheckpoint("ckpt")
    says = At(2, lambda _: print("to both"))  # noqa: T201
    many([first, second], callback, says, steps=8, enable_checkpointing=True)
    assert first.run_id != second.run_id
    assert store.steps(first.run_id, "loss") == list(range(8))
    assert store.steps(second.run_id, "loss") == [3, 7]
    assert {store.status(first.run_id), store.status(second.run_id)} == {"FINISHED"}
    assert (sys.stdout, sys.stderr) == before
    for logger in (first, second):
        assert store.artifact(logger.run_id, "stdout.log") == "to both\n"
    # Each goes on with its own.
    best = callback.best_model_path
    third, fourth = (make_logger(store, name, resume_run="continue") for name in ("first", "second"))
    with warned():  # the folder is not empty
        many([third, fourth], ModelCheckpoint("ckpt"), steps=12, ckpt_path=best, enable_checkpointing=True)
    assert (third.run_id, fourth.run_id) == (first.run_id, second.run_id)
    assert store.steps(first.run_id, "loss") == list(range(12))


def test_two_of_ours_for_two_servers(store: Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Store.new(tmp_path_factory)
    first, second = make_logger(store), make_logger(other)
    callback = ModelCheckpoint("ckpt")
    many([first, second], callback, steps=4, enable_checkpointing=True)
    third, fourth = make_logger(other, resume_run="continue"), make_logger(store, resume_run="continue")
    best = callback.best_model_path
    with warned():  # the folder is not empty
        many([third, fourth], ModelCheckpoint("ckpt"), steps=8, ckpt_path=best, enable_checkpointing=True)
    assert (third.run_id, fourth.run_id) == (second.run_id, first.run_id)
    assert store.steps(first.run_id, "loss") == other.steps(second.run_id, "loss") == list(range(8))


def test_two_of_ours_in_one_run_is_an_error_that_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", store.client.create_run("0").info.run_id)
    with pytest.raises(
        Exception, match=r"Another AirMLflowLogger logs into the run \w{32}, and a run takes one at a time"
    ):
        many([make_logger(store), make_logger(store)], steps=1)


# ---- parameters and configuration ------------------------------------------------------------------------------------


class WithParams(Logs):
    def __init__(self, lr: float = 0.1, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_parameters(store: Store) -> None:
    logger = make_logger(store)
    module = WithParams(lr=0.5, nested={"a": {"b": 1}}, text="x" * 5_000, empty={})
    fit(logger, module=module, max_steps=1)
    params = store.run(logger.run_id).data.params
    assert params == {"lr": "0.5", "nested/a/b": "1", "text": "x" * 5_000, "empty": "{}"}
    whole = yaml.safe_load(store.artifact(logger.run_id, r"^config/.*/hyperparameters\.yaml$"))
    assert whole == {"lr": 0.5, "nested": {"a": {"b": 1}}, "text": "x" * 5_000, "empty": {}}


def test_too_many_parameters(store: Store) -> None:
    logger = make_logger(store)
    with warned() as found:
        fit(logger, module=WithParams(**{f"p{index}": index for index in range(1_700)}), max_steps=1)
    assert len(store.run(logger.run_id).data.params) == 1_600
    assert "101 stand only in the configuration" in found.text
    whole = yaml.safe_load(store.artifact(logger.run_id, r"hyperparameters\.yaml$"))
    assert whole["p1699"] == 1_699


def test_parameters_by_hand_and_in_a_later_stage(store: Store) -> None:
    logger = make_logger(store)
    logger.log_hyperparams({"by_hand": "y" * 7_000})
    module = WithParams()
    trainer = fit(logger, module=module, max_steps=1)
    trainer.test(module, loader(), verbose=False)
    params = store.run(logger.run_id).data.params
    assert params["lr"] == "0.1"
    assert len(params["by_hand"]) <= 6_000
    # The file has all, also after the later stage has written it again.
    assert "y" * 7_000 in store.artifact(logger.run_id, r"hyperparameters\.yaml$")


def test_a_changed_parameter_is_a_tag_and_no_error(store: Store) -> None:
    first = make_logger(store)
    fit(first, module=WithParams(lr=0.1), max_steps=1)
    fit(make_logger(store, run_id=first.run_id), module=WithParams(lr=0.2), max_steps=1)
    run = store.run(first.run_id)
    assert run.data.params["lr"] == "0.1"
    assert run.data.tags["param_changed/lr"] == "0.1 -> 0.2"


def test_what_is_no_parameter_at_all(store: Store) -> None:
    with pytest.raises(TypeError, match="must be a mapping"):
        make_logger(store).log_hyperparams(["lr", 1])  # type: ignore[arg-type]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Scores(Logs):
    """Its validation gets better and better."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.global_step))


def scored(**options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        "ckpt",
        filename="{step}",
        monitor="score",
        mode="max",
        every_n_train_steps=2,
        save_on_train_epoch_end=False,
        **options,
    )


SCORED = {"limit_val_batches": 1, "val_check_interval": 2, "enable_checkpointing": True, "steps": 8}


def test_a_list_of_the_checkpoints(store: Store) -> None:
    logger = make_logger(store)
    many(logger, scored(save_top_k=2), module=Scores(), **SCORED)
    manifest = json.loads(store.artifact(logger.run_id, "^checkpoints/manifest.json$"))
    assert [entry["step"] for entry in manifest["checkpoints"]] == [2, 4, 6, 8]
    by_score = max(manifest["checkpoints"], key=lambda entry: entry["score"])
    assert manifest["best"] == by_score["path"] == str(Path("ckpt/step=8.ckpt").absolute())
    assert [entry["is_best"] for entry in manifest["checkpoints"]] == [False, False, False, True]
    assert all(entry["num_bytes"] > 1_000 for entry in manifest["checkpoints"][-2:])
    tags = store.tags(logger.run_id)
    assert tags["lightning_air.best_checkpoint"] == manifest["best"]
    assert tags["lightning_air.last_checkpoint"].endswith("step=8.ckpt")
    assert [path for path in store.artifacts(logger.run_id) if "ckpt" in path] == []


def test_the_list_after_a_later_stage(store: Store) -> None:
    logger = make_logger(store)
    trainer = many(logger, scored(save_top_k=-1), module=Scores(), **{**SCORED, "steps": 4})
    trainer.test(trainer.lightning_module, loader(), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 8
    with warned():  # the checkpoints' folder is not empty
        trainer.fit(trainer.lightning_module, loader(), loader())
    manifest = json.loads(store.artifact(logger.run_id, "manifest"))
    assert [entry["step"] for entry in manifest["checkpoints"]] == [2, 4, 6, 8]


def test_a_list_of_our_checkpoints(store: Store) -> None:
    logger = make_logger(store)
    many(
        logger,
        AirCheckpoint("ckpt", every="2steps", keep_last=2),
        module=Scores(),
        steps=6,
        enable_checkpointing=True,
        plugins=[AsyncUCCheckpointIO()],
    )
    manifest = json.loads(store.artifact(logger.run_id, "manifest"))
    entries = {entry["step"]: entry for entry in manifest["checkpoints"]}
    assert {2, 4, 6} <= entries.keys()
    assert entries[6]["digest"]
    assert entries[6]["num_bytes"] > 1_000
    assert store.tags(logger.run_id)["lightning_air.last_checkpoint"].endswith("step=6.ckpt")


def _artifacts_of_stock(store: Store, log_model: Any, **options: Any) -> list[str]:
    stock = MLFlowLogger("stock", tracking_uri=store.uri, log_model=log_model)
    many(stock, scored(**options), module=Scores(), **SCORED)
    run_id = str(stock.run_id)
    return sorted(store.artifacts(run_id))


@pytest.mark.parametrize(
    ("log_model", "options"),
    [(True, {"save_top_k": 2, "save_last": True}), (True, {"save_top_k": -1}), ("all", {"save_top_k": 4})],
    ids=str,
)
def test_checkpoints_are_uploaded_as_lightnings_logger_does(
    store: Store, log_model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)  # Lightning's sets it
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _artifacts_of_stock(store, log_model, **options)
    before = sorted(path.name for path in Path("ckpt").iterdir())
    for path in Path("ckpt").iterdir():
        path.unlink()
    logger = make_logger(store, log_model=log_model)
    many(logger, scored(**options), module=Scores(), **SCORED)
    assert sorted(path.name for path in Path("ckpt").iterdir()) == before
    ours = [path for path in store.artifacts(logger.run_id) if not re.match("checkpoints/|config/", path)]
    assert ours == expected
    assert any(path.endswith(".ckpt") for path in ours)
    for name in ("aliases.txt", "metadata.yaml"):
        stock_run = str(store.only_run("stock").info.run_id)
        for found in (found for found in expected if found.endswith(name)):
            theirs = yaml.unsafe_load(store.artifact(stock_run, re.escape(found)))
            assert yaml.safe_load(store.artifact(logger.run_id, re.escape(found))) == theirs


def test_our_checkpoints_are_uploaded_with_all_their_files(store: Store) -> None:
    logger = make_logger(store, log_model=True)
    many(
        logger,
        AirCheckpoint("ckpt", every="2steps", keep_last=1),
        steps=4,
        enable_checkpointing=True,
        plugins=[AsyncUCCheckpointIO()],
    )
    [name] = {path.split("/")[1] for path in store.artifacts(logger.run_id) if ".ckpt/" in path}
    files = {path.split(f"{name}/")[1] for path in store.artifacts(logger.run_id) if f"{name}/" in path}
    assert files == {path.relative_to(f"ckpt/{name}").as_posix() for path in Path("ckpt", name).rglob("*")}
    assert ".metadata" in files


@pytest.mark.parametrize("ours", [True, False], ids=["AirCheckpoint", "ModelCheckpoint"])
def test_each_checkpoint_is_uploaded_though_only_the_last_is_kept(
    ours: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_artifact, may_go = MlflowClient.log_artifact, threading.Event()

    def waits(self: MlflowClient, *args: Any, **kwargs: Any) -> None:
        may_go.wait(20)
        log_artifact(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_artifact", waits)  # each is deleted before its turn
    logger = make_logger(store, log_model="all")
    at_end = At(7, lambda _: may_go.set())
    checkpoint: Any = AirCheckpoint("ckpt", every="2steps", keep_last=1) if ours else None
    checkpoint = checkpoint or ModelCheckpoint("ckpt", every_n_train_steps=2, enable_version_counter=False)
    fit(logger, checkpoint, at_end, plugins=[AsyncUCCheckpointIO()] if ours else None, enable_checkpointing=True)
    folders = {path.split("/")[0] for path in store.artifacts(logger.run_id) if "step=" in path}
    assert {int(folder.split("step=")[1]) for folder in folders} == {2, 4, 6, 8}
    assert [path.name.split("step=")[1] for path in Path("ckpt").iterdir()] == ["8.ckpt"]


def test_where_checkpoints_lie_by_default(store: Store) -> None:
    logger = make_logger(store)
    callback = ModelCheckpoint()
    many(logger, callback, steps=2, enable_checkpointing=True)
    run = store.run(logger.run_id).info
    assert callback.dirpath == str(Path(run.experiment_id, run.run_id, "checkpoints").absolute())


# ---- the output ------------------------------------------------------------------------------------------------------


def test_the_output_is_with_the_run(store: Store) -> None:
    class Prints(Logs):
        def on_train_start(self) -> None:
            print("trained on the moon")  # noqa: T201

        def test_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                print("tested on mars")  # noqa: T201

    logger, module = make_logger(store, log_console=True), Prints()
    trainer = fit(logger, module=module, max_steps=1)
    text = store.artifact(logger.run_id, r"^logs/node_0/attempt_1-\w+/stdout\.log$")
    assert "trained on the moon\n" in text
    trainer.test(module, loader(), verbose=False)
    text = store.artifact(logger.run_id, r"^logs/node_0/attempt_1-\w+/stdout\.log$")
    assert "trained on the moon\n" in text  # what a later stage says comes behind it
    assert "tested on mars\n" in text


def test_the_output_of_a_training_that_fails(store: Store) -> None:
    class Fails(Logs):
        def on_train_batch_end(self, *_: Any) -> None:
            print("the last words")  # noqa: T201
            raise OSError("too hot")

    with pytest.raises(OSError, match="too hot"):
        fit(make_logger(store, log_console=True), module=Fails())
    run_id = store.only_run("runs").info.run_id
    assert "the last words\n" in store.artifact(run_id, r"^logs/node_0/.*/stdout\.log$")


def test_what_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    logger = make_logger(store, run_name="mine")
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer = fit(logger, ModelCheckpoint("ckpt"), max_steps=2, enable_checkpointing=True)
        trainer.test(trainer.lightning_module, loader(), verbose=False)
    text = caplog.text
    assert text.count("Logging into a new run") == 1
    assert text.count("Experiment runs:") == 1
    assert len(re.findall(r"Run mine: .*/#/experiments/1/runs/\w{32}", text)) == 1
    assert text.count("Run mine: FINISHED") == 2
    assert "0 of 10M metric steps used" in text
    assert "All of it is on the server." in text
    assert re.search(r"Best checkpoint: .*step=2\.ckpt", text)


# ---- nothing is left -------------------------------------------------------------------------------------------------


def test_nothing_is_left_on_the_disk(store: Store, exit_: Exit) -> None:
    logger = make_logger(store, log_console=True)
    trainer = fit(logger, max_steps=2)
    assert list(Path("spool").iterdir()) == []
    exit_.clear()  # or the end of the process
    del logger, trainer
    gc.collect()
    assert [path for path in Path(os.environ["TMPDIR"]).iterdir() if "air" in path.name] == []


def test_where_the_spool_is_by_default(store: Store) -> None:
    seen: list[list[str]] = []
    fit(
        make_logger(store, spool_dir=None),
        At(1, lambda _: seen.append([path.name for path in Path(os.environ["TMPDIR"]).iterdir()])),
        max_steps=2,
    )
    assert seen == [[f"lightning_air_spool-{os.getuid()}"]]


def test_differences_to_lightnings(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those in the docstring, what has no test of its own: each of Lightning's, and each of ours."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)  # Lightning's sets it
    stock, ours = MLFlowLogger("stock", tracking_uri=store.uri), make_logger(store)
    with warned():
        for logger in (stock, ours):
            logger.log_metrics({"a": 1.0}, step=5)
            logger.log_metrics({"a": 2.0})
            logger.log_metrics({"b@": 3.0, "b": 4.0}, step=6)
            logger.finalize("success")
    assert store.steps(str(stock.run_id), "a") == [0, 5]
    assert store.curve(str(ours.run_id), "a") == [(5, 1.5)]
    assert {point.value for point in store.points(str(ours.run_id)) if point.key.startswith("b")} == {3.0, 4.0}
    assert len({point.key for point in store.points(str(ours.run_id))}) == 3
    assert {point.key for point in store.points(str(stock.run_id))} == {"a", "b"}
