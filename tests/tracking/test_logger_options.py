"""The constructor: it opens nothing, anywhere, and refuses what is wrong by name. And the ways to write it down."""

import inspect
import os
import pickle
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

import lightning_air
from lightning_air import AirMLflowLogger
from lightning_air.cli import main
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import loader
from tests.tracking.local_store import MLFLOW_WARNING
from tests.tracking.runs import Exit, Logs, Store, fit, make_logger, warned

pytestmark = pytest.mark.filterwarnings(f"ignore:{MLFLOW_WARNING}")


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.new(tmp_path_factory)


@pytest.fixture(autouse=True)
def exit_(monkeypatch: pytest.MonkeyPatch) -> Exit:
    return Exit(monkeypatch)


# ---- nothing is opened -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["0", "1"])
def test_making_one_opens_nothing(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_: Exit, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MLFLOW_RUN_ID": "there-is-none"}.items():
        monkeypatch.setenv(name, value)
    threads, variables = threading.enumerate(), dict(os.environ)
    opened: list[Any] = []
    sys.addaudithook(lambda event, args: opened.append(args) if event in _OPENINGS and _is_watched[0] else None)
    _is_watched[0] = True
    try:
        AirMLflowLogger(
            "some experiment",
            "some run",
            tracking_uri="http://127.0.0.1:9",
            spool_dir=tmp_path / "spool",
            tags={"a": 1},
            log_model="all",
            resume_run="continue",
        )
        AirMLflowLogger()
    finally:
        _is_watched[0] = False
    assert opened == []
    assert threading.enumerate() == threads
    assert dict(os.environ) == variables
    assert list(tmp_path.iterdir()) == []
    assert exit_ == []
    assert capfd.readouterr() == ("", "")


_OPENINGS = {"open", "socket.connect", "socket.bind", "subprocess.Popen", "os.mkdir", "sqlite3.connect"}
_is_watched = [False]  # an audit hook stays for ever


def test_one_that_is_not_used_says_and_keeps_nothing(store: Store, exit_: Exit) -> None:
    logger = make_logger(store)
    logger.save()
    logger.finalize()
    logger.finalize("failed")
    assert list(Path().iterdir()) == []
    assert exit_ == []
    assert store.client.get_experiment_by_name("runs") is None


def test_it_can_be_sent_to_another_process(store: Store) -> None:
    # As for strategy="ddp_spawn", before anything is opened.
    logger = make_logger(store, tags={"a": 1}, aggregate=["mean", "max"])
    logger.log_hyperparams({"lr": 1})
    copy = pickle.loads(pickle.dumps(logger))
    fit(copy)
    assert store.run(copy.run_id).data.params == {"lr": "1"}


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experiment_name": ""}, r"experiment_name must be text, got ''"),
        ({"experiment_name": 3}, r"experiment_name must be text, got 3"),
        ({"run_name": "  "}, r"run_name must be text"),
        ({"tracking_uri": Path("mlruns")}, r"tracking_uri must be text"),
        ({"run_id": ""}, r"run_id must be text"),
        ({"prefix": None}, r"prefix must be text, got None"),
        ({"step": 0}, r"step must be a whole number, at least 1, got 0\. Or write \"auto\""),
        ({"step": "often"}, r"step must be .*'often'"),
        ({"step": 2.0}, r"step must be .*2\.0"),
        ({"step": True}, r"step must be .*True"),
        ({"max_metric_steps": 0}, r"max_metric_steps must be a whole number, at least 1, got 0"),
        ({"max_metric_steps": 1e7}, r"max_metric_steps must be a whole number, .* got 10000000\.0"),
        ({"reserve": -1}, r"reserve must be a whole number, at least 0, got -1"),
        ({"reserve": 10, "max_metric_steps": 10}, r"reserve must be less than max_metric_steps, 10, got 10"),
        ({"aggregate": "mean"}, r"aggregate must be a list .*'mean'"),
        ({"aggregate": ["median"]}, r"aggregate must be a list .*median"),
        ({"aggregate": []}, r"aggregate must be a list"),
        ({"aggregate": ["mean", "mean"]}, r"aggregate must be a list .* each once"),
        ({"aggregate": None}, r"aggregate must be a list .*None"),
        ({"exempt": "val*"}, r"exempt must be a list of patterns, got 'val\*'"),
        ({"exempt": [1]}, r"exempt must be a list of patterns"),
        ({"exempt": None}, r"exempt must be a list of patterns, got None"),
        ({"exempt": 3}, r"exempt must be a list of patterns, got 3"),
        ({"log_model": "best"}, r"log_model must be one of True, False, 'all', got 'best'"),
        ({"log_model": 1}, r"log_model must be one of"),
        ({"resume_run": "yes"}, r"resume_run must be one of 'new', 'continue', got 'yes'"),
        ({"adopt_active": "no"}, r"adopt_active must be one of True, False, got 'no'"),
        ({"log_console": None}, r"log_console must be one of True, False, got None"),
        ({"flush_seconds": 0}, r"flush_seconds must be a positive number of seconds, got 0"),
        ({"flush_seconds": float("nan")}, r"flush_seconds must be a positive number of seconds, got nan"),
        ({"close_timeout": -1}, r"close_timeout must be a positive number of seconds, got -1"),
        ({"close_timeout": "1min"}, r"close_timeout must be a positive number of seconds, got '1min'"),
        ({"close_timeout": True}, r"close_timeout must be a positive number of seconds, got True"),
        ({"tags": {"a:b\n": 1}}, r"tags has a name that MLflow does not take: 'a:b\\n'"),
        ({"tags": {"lightning_air.attempt": 1}}, r"tags must not start with 'lightning_air\.'"),
        ({"tags": ["a"]}, r"tags must be"),
        ({"spool_dir": 3}, r"spool_dir must be"),
        ({"spool_dir": ""}, r"spool_dir must be"),
        ({"experiment_name": "llama", "tracking_uri": "databricks"}, r"experiment_name must be the absolute path"),
        ({"artifact_location": 3}, r"artifact_location must be"),
        ({"tracking_uri": "localhost:5000"}, r"tracking_uri must say how .*Write 'http://localhost:5000'"),
        ({"register_model": "a/b:c"}, r"register_model must be a model's name without / :, got 'a/b:c'"),
        (
            {"register_model": "digits", "tracking_uri": "databricks", "experiment_name": "/Users/me/a"},
            r"register_model must be 'catalog\.schema\.model' .*Write 'main\.default\.digits'",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AirMLflowLogger(**options)


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="synchronous"):
        AirMLflowLogger(synchronous=False)  # type: ignore[call-arg]


# ---- where Lightning's logger was ------------------------------------------------------------------------------------


def test_it_is_one_of_lightnings() -> None:
    assert issubclass(AirMLflowLogger, MLFlowLogger)
    assert "AirMLflowLogger" in lightning_air.__all__
    own = {name for name, value in vars(AirMLflowLogger).items() if not name.startswith("_") and callable(value)}
    stock = {name for name in dir(MLFlowLogger) if not name.startswith("_")}
    assert own - stock == {"note_exception", "open_together"}  # which its companion calls


def test_nothing_of_lightnings_is_left_that_needs_its_constructor() -> None:
    public = {name for name in vars(MLFlowLogger) if not name.startswith("_")}
    assert public - vars(AirMLflowLogger).keys() == {"LOGGER_JOIN_CHAR"}
    assert AirMLflowLogger.LOGGER_JOIN_CHAR == "-"


def test_options_that_it_shares_with_lightnings_mean_the_same() -> None:
    ours = inspect.signature(AirMLflowLogger.__init__).parameters
    stock = inspect.signature(MLFlowLogger.__init__).parameters
    assert stock.keys() - ours.keys() == {"save_dir", "synchronous"}
    same = ("run_name", "tags", "log_model", "prefix", "artifact_location", "run_id")
    assert {name: ours[name].default for name in same} == {name: stock[name].default for name in same}
    assert [name for name, each in ours.items() if each.kind is not each.KEYWORD_ONLY] == [
        "self",
        "experiment_name",
        "run_name",
    ]


class WithData(Logs):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader()


YAML = """
seed_everything: 7
model:
  class_path: tests.tracking.test_logger_options.WithData
trainer:
  accelerator: cpu
  max_steps: 3
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  limit_val_batches: 0
  logger:
    class_path: {class_path}
    init_args:
      experiment_name: from yaml
      run_name: first
      tracking_uri: {uri}
{more}
"""
OURS = """      spool_dir: spool
      step: 2
      aggregate: [mean, max]
      exempt: ["val*"]
      max_metric_steps: 1000
      reserve: 10
      tags: {team: vision}
      close_timeout: 30
      log_console: false
"""


def fit_by_yaml(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    Path("run.yaml").write_text(text)
    assert main(["fit", "--config", "run.yaml"]) == 0


def test_yaml_in_place_of_lightnings(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    text = YAML.format(class_path="lightning_air.AirMLflowLogger", uri=store.uri, more=OURS)
    fit_by_yaml(text, monkeypatch)
    run = store.only_run("from yaml")
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first", "FINISHED", "vision")
    assert {key for key in run.data.metrics if "loss" in key} == {"loss", "loss/max"}
    # The configuration of the whole run is with it, with what was left at its default.
    config = store.artifact(run.info.run_id, r"^config/.*/config\.yaml$")
    assert "class_path: lightning_air.AirMLflowLogger" in config
    assert "max_steps: 3" in config
    assert "gradient_clip_val: null" in config


def test_yaml_of_lightnings_needs_another_class_path_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    text = YAML.format(class_path="lightning.pytorch.loggers.MLFlowLogger", uri=store.uri, more="      prefix: p\n")
    fit_by_yaml(text.replace("lightning.pytorch.loggers.MLFlowLogger", "lightning_air.AirMLflowLogger"), monkeypatch)
    assert "p-loss" in store.only_run("from yaml").data.metrics


def test_code_in_place_of_lightnings(store: Store) -> None:
    """A module written for Lightning's logger finds what it needs."""
    seen: dict[str, Any] = {}

    class Uses(Logs):
        def on_train_start(self) -> None:
            logger = self.logger
            assert isinstance(logger, MLFlowLogger)
            assert isinstance(logger.experiment, MlflowClient)
            logger.experiment.log_text(logger.run_id, "hello", "notes/hello.txt")
            logger.experiment.set_tag(logger.run_id, "mine", "yes")
            seen.update(name=logger.name, version=logger.version, save_dir=logger.save_dir, ids=logger.experiment_id)

    logger = make_logger(store)
    fit(logger, module=Uses())
    run = store.only_run("runs")
    experiment = run.info.experiment_id
    assert seen == {"name": experiment, "version": run.info.run_id, "save_dir": None, "ids": experiment}
    assert run.data.tags["mine"] == "yes"
    assert store.artifact(run.info.run_id, "notes/hello.txt") == "hello"


def test_figures_go_through_the_client(store: Store) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    class Draws(Logs):
        def on_train_start(self) -> None:
            self.logger.experiment.log_figure(self.logger.run_id, Figure(figsize=(1, 1)), "figures/empty.png")

    logger = make_logger(store)
    fit(logger, module=Draws())
    assert "figures/empty.png" in store.artifacts(str(logger.run_id))


def test_by_hand_without_a_trainer(store: Store, exit_: Exit) -> None:
    logger = make_logger(store)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"a": 1.0}, step=3)
    logger.log_metrics({"a": 2.0})  # at the last step, where Lightning's would say 0
    logger.log_metrics({"a": 4.0}, step=4)
    run_id = logger.run_id
    logger.finalize("success")
    run = store.only_run("runs")
    assert (run.info.run_id, run.info.status, run.data.params) == (run_id, "FINISHED", {"lr": "0.1"})
    assert store.curve(run_id, "a") == [(3, 1.5), (4, 4.0)]
    exit_.run()
    assert store.status(run_id) == "FINISHED"


def test_what_is_logged_after_training_is_kept(store: Store, exit_: Exit) -> None:
    logger = make_logger(store)
    fit(logger, max_steps=1)
    logger.log_metrics({"after": 1.0}, step=1)
    logger.log_hyperparams({"best": 7})
    exit_.run()
    run = store.only_run("runs")
    assert (run.info.status, run.data.params) == ("FINISHED", {"best": "7"})
    assert store.curve(run.info.run_id, "after") == [(1, 1.0)]


@pytest.mark.parametrize("when", ["never trained", "after training"])
def test_parameters_alone_are_kept(store: Store, exit_: Exit, when: str) -> None:
    logger = make_logger(store)
    if when == "after training":
        fit(logger, max_steps=1)
    logger.log_hyperparams({"best": 7})
    exit_.run()
    assert store.only_run("runs").data.params == {"best": "7"}


def test_where_lightning_does_not_introduce_us(store: Store) -> None:
    # enable_autolog_hparams=False: no log_graph, so the Trainer is never met.
    logger = make_logger(store)
    fit(logger, enable_autolog_hparams=False)
    run = store.only_run("runs")
    assert (run.info.status, len(store.curve(run.info.run_id, "loss"))) == ("FINISHED", 8)


# ---- defaults --------------------------------------------------------------------------------------------------------


def test_without_options_it_is_the_local_database_that_mlflow_shows(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mlflow.db").write_bytes(Path(Store.new(tmp_path_factory).uri.removeprefix("sqlite:///")).read_bytes())
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_it.py"])
    logger = AirMLflowLogger()
    fit(logger)
    store = Store(f"sqlite:///{tmp_path}/mlflow.db")
    run = store.only_run("train_it")
    assert run.info.status == "FINISHED"
    assert run.info.run_id == logger.run_id
    assert store.steps(run.info.run_id, "loss") == list(range(8))


def test_the_tracking_uri_of_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    fit(make_logger(store, None, tracking_uri=None))
    assert store.only_run("from the environment").info.status == "FINISHED"


def test_an_experiment_that_is_passed_goes_before_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    fit(make_logger(store, "passed"))
    assert store.only_run("passed").info.status == "FINISHED"
    assert store.client.get_experiment_by_name("from the environment") is None


def test_an_experiment_that_was_deleted_is_an_error_that_says_what_to_do(store: Store) -> None:
    store.client.delete_experiment(store.client.create_experiment("gone"))
    with pytest.raises(RuntimeError, match=r"'gone' was deleted.*restore_experiment"):
        fit(make_logger(store, "gone"))


def test_artifact_location_of_a_new_experiment(store: Store, tmp_path: Path) -> None:
    where = str(tmp_path / "artifacts")
    logger = make_logger(store, artifact_location=where)
    fit(logger, max_steps=1)
    assert store.run(str(logger.run_id)).info.artifact_uri.startswith(where)
    with warned() as found:
        fit(make_logger(store, artifact_location=str(tmp_path / "elsewhere")), max_steps=1)
    assert "artifact_location" in found.text
    assert "has no effect" in found.text


def test_run_name_and_tags(store: Store) -> None:
    logger = make_logger(store, run_name="7b", tags={"team": "vision", "size": 7})
    fit(logger, max_steps=1)
    tags = store.tags(str(logger.run_id))
    assert (tags["mlflow.runName"], tags["team"], tags["size"]) == ("7b", "vision", "7")
    assert (tags["lightning_air.num_nodes"], tags["lightning_air.world_size"]) == ("1", "1")
    assert tags["lightning_air.sharding"] == "SingleDeviceStrategy"


def test_the_fluent_interface_is_left_alone(store: Store) -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    fit(make_logger(store), max_steps=1)
    assert mlflow.get_tracking_uri() == before
    assert mlflow.active_run() is None


def test_a_trainer_that_does_not_log_opens_nothing(store: Store, tmp_path: Path) -> None:
    logger = make_logger(store)
    trainer = Trainer(**fast_trainer_kwargs(tmp_path, logger=logger, fast_dev_run=True))
    with mock.patch.object(socket, "socket", side_effect=AssertionError):
        trainer.fit(Logs(), loader(), loader())
    assert store.client.get_experiment_by_name("runs") is None


def test_a_module_from_the_other_package_is_none_of_our_business(store: Store) -> None:
    # Lightning passes whatever module it trains; `log_graph` of something else is ignored.
    logger = make_logger(store)
    logger.log_graph(LightningModule())
    logger.log_graph(object())  # type: ignore[arg-type]
    assert list(Path().iterdir()) == []


def test_a_spool_dir_that_cannot_be_is_an_error_before_a_run_is_made(store: Store) -> None:
    Path("taken").write_text("a file")
    logger = make_logger(store, spool_dir="taken/spool")
    with pytest.raises(OSError, match=r"spool_dir='taken/spool' cannot keep what is not sent yet .*Pass a folder"):
        fit(logger, max_steps=1)
    assert store.client.get_experiment_by_name("runs") is None
