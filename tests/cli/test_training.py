"""`lightning-air fit` and its siblings: what a YAML can say, what an error looks like, and that real commands train."""

import inspect
import shutil
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_air import AirStrategy
from lightning_air._lightning import Trainer
from lightning_air.cli import main
from lightning_air.cli.training import AirCLI
from tests.kit.environment import current_environment
from tests.kit.ranks import run_ranks, values

OPTIONS = [name for name in inspect.signature(AirStrategy.__init__).parameters if name != "self"]

TRAINER = """
  accelerator: cpu
  logger: false
  max_steps: 2
  enable_checkpointing: false
  enable_model_summary: false
  enable_progress_bar: false
"""

# No optimizer: the tests that need one either subclass this or have the YAML say it.
MODEL = """
import sys

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


class WithoutOptimizer(LightningModule):
    def __init__(self, learning_rate: float = 0.1):
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.ModuleList([Block(), Block()])

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def train_dataloader(self):
        return DataLoader(torch.ones(16, 4), batch_size=2)


class Model(WithoutOptimizer):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def on_train_end(self):
        trainer = self.trainer
        place = f"on rank {trainer.global_rank} of {trainer.world_size}"
        # In one piece: the ranks share the terminal.
        sys.stdout.write(f"trained {trainer.global_step} steps with {trainer.strategy} {place}\\n")
        sys.stdout.flush()


class Broken(Model):
    def __init__(self, width: int = 4):
        super().__init__()
        raise ValueError(f"cannot be {width} wide")
"""


def _write(directory: Path, *, strategy: str, model: str = "my_models.Model", name: str = "run.yaml") -> Path:
    """Write a module with models, and a YAML file that trains one of them."""
    (directory / "my_models.py").write_text(MODEL)
    path = directory / name
    strategy = textwrap.indent(textwrap.dedent(strategy).strip(), " " * 4)
    separator = "\n" if ":" in strategy else " "
    path.write_text(f"trainer:{TRAINER}  strategy:{separator}{strategy}\nmodel:\n  class_path: {model}\n")
    return path


# ---- what a YAML can say ---------------------------------------------------------------------------------------------


def _strategy_of(tmp_path: Path, strategy: str) -> Any:
    """Return the strategy of the Trainer that LightningCLI makes from this YAML."""
    path = _write(tmp_path, strategy=strategy, model="lightning.pytorch.demos.boring_classes.BoringModel")
    return AirCLI(args=["--config", str(path), "--seed_everything", "false"], run=False).trainer.strategy


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("sharding: ddp", {"sharding": "ddp"}),
        ("sharding: fsdp", {"sharding": "fsdp"}),
        ("sharding: hsdp", {"sharding": "hsdp"}),
        ("process_group_backend: cpu:gloo", {"process_group_backend": "cpu:gloo"}),
        ("timeout: 0:40:00", {"timeout": timedelta(minutes=40)}),
        ("timeout: 1:00:00", {"timeout": timedelta(hours=1)}),
        ("timeout: 600", {"timeout": timedelta(minutes=10)}),
        ("timeout: 0.5", {"timeout": timedelta(seconds=0.5)}),
        ("join_timeout: 0:01:00", {"join_timeout": timedelta(minutes=1)}),
        ("join_timeout: 60", {"join_timeout": timedelta(minutes=1)}),
        ("{sharding: fsdp, wrap: [Block]}", {"wrap": ("Block",)}),
        ("{sharding: fsdp, wrap: [my.module.Block, Head]}", {"wrap": ("my.module.Block", "Head")}),
        ("{sharding: fsdp, wrap: 100000}", {"wrap": 100_000}),
        ("activation_checkpointing: [Block]", {"activation_checkpointing": ("Block",)}),
        ("{sharding: hsdp, reshard_after_forward: false}", {"reshard_after_forward": False}),
        ("{sharding: fsdp, reshard_after_forward: true}", {"reshard_after_forward": True}),
        ("{sharding: fsdp, reshard_after_forward: 4}", {"reshard_after_forward": 4}),
        ("{sharding: fsdp, cpu_offload: true}", {"cpu_offload": True}),
        (
            "{find_unused_parameters: true, static_graph: false, gradient_as_bucket_view: true}",
            {"ddp": {"find_unused_parameters": True, "static_graph": False, "gradient_as_bucket_view": True}},
        ),
        (
            "{bucket_cap_mb: 12.5, broadcast_buffers: false}",
            {"ddp": {"bucket_cap_mb": 12.5, "broadcast_buffers": False}},
        ),
    ],
)
def test_yaml_can_say_every_option(written: str, expected: dict[str, Any], tmp_path: Path) -> None:
    indented = written if written.startswith("{") else "{" + written + "}"
    strategy = _strategy_of(tmp_path, f"class_path: lightning_air.AirStrategy\ninit_args: {indented}")
    assert isinstance(strategy, AirStrategy)
    for name, value in expected.items():
        assert getattr(strategy.options, name) == value
        assert type(getattr(strategy.options, name)) is type(value)


def test_no_option_is_left_out_above() -> None:
    (mark,) = test_yaml_can_say_every_option.pytestmark  # type: ignore[attr-defined] # where pytest keeps the cases
    written = " ".join(case[0] for case in mark.args[1])
    assert [name for name in OPTIONS if f"{name}:" not in written] == []


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_yaml_can_say_the_registered_name(sharding: str, tmp_path: Path) -> None:
    strategy = _strategy_of(tmp_path, f"air_{sharding}")
    assert isinstance(strategy, AirStrategy)
    assert strategy.sharding == sharding


def test_yaml_can_say_the_short_class_name(tmp_path: Path) -> None:
    strategy = _strategy_of(tmp_path, "class_path: AirStrategy\ninit_args: {sharding: fsdp, timeout: 600}")
    assert isinstance(strategy, AirStrategy)
    assert strategy.options.timeout == timedelta(minutes=10)


def test_the_command_line_overrides_the_yaml(tmp_path: Path) -> None:
    path = _write(tmp_path, strategy="air_ddp", model="lightning.pytorch.demos.boring_classes.BoringModel")
    options = ["--trainer.strategy", "AirStrategy", "--trainer.strategy.sharding", "fsdp"]
    cli = AirCLI(args=["--config", str(path), *options, "--seed_everything", "false"], run=False)
    assert cli.trainer.strategy.sharding == "fsdp"


@pytest.mark.parametrize("class_path", ["AirStrategy", "lightning_air.AirStrategy"])
def test_help_explains_every_option_of_the_strategy(
    class_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ending:
        main(["fit", "--trainer.strategy.help", class_path])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert "AirStrategy" in shown
    for name in OPTIONS:
        (line,) = [line for line in shown.splitlines() if line.lstrip().startswith(f"--trainer.strategy.{name} ")]
        explained = shown[shown.index(line) + len(line) :].lstrip()
        text = line if "(type:" in line else explained
        explanation = text.partition("(type:")[0].removeprefix(line.strip().split("  ")[0])
        assert len(explanation.strip()) > 20, f"{name} has no help: {text[:200]!r}"


# ---- errors ----------------------------------------------------------------------------------------------------------


def _fit(*arguments: str) -> int | str | None:
    """Return the exit code of `lightning-air fit`; to be called in a process of its own."""
    try:
        return main(["fit", "--seed_everything", "7", *arguments])
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            "class_path: AirStrategy\ninit_args: {sharding: ddp, wrap: [Block]}",
            [],
            "wrap=['Block']: has no meaning under sharding='ddp', only under 'fsdp' and 'hsdp'.",
        ),
        (
            "class_path: AirStrategy\ninit_args: {sharding: hsdp, static_graph: true}",
            [],
            "static_graph=True: has no meaning under sharding='hsdp', only under 'ddp'.",
        ),
        ("class_path: AirStrategy\ninit_args: {timeout: -1}", [], "timeout must be longer than zero"),
        ("class_path: AirStrategy\ninit_args: {sharding: zero3}", [], "zero3"),
        ("class_path: AirStrategy\ninit_args: {shards: 2}", [], "shards"),
        ("air_ddp", ["--trainer.max_steps", "many"], "trainer.max_steps"),
        ("air_ddp", ["--trainer.devices", "3"], "Trainer(devices=3) contradicts the launch (air-process)"),
        ("air_ddp", ["--trainer.accelerator", "abacus"], "accelerator='abacus'"),
        ("air_fdsp", [], "air_fdsp"),
        ("air_ddp", ["--model", "my_models.Modle"], "my_models.Modle"),
    ],
)
def test_a_wrong_value_is_a_message_and_exit_code_2(
    strategy: str, options: list[str], message: str, tmp_path: Path
) -> None:
    path = _write(tmp_path, strategy=strategy)
    (result,) = run_ranks(_fit, 1, args=("--config", str(path), *options), cwd=tmp_path)
    assert result.error is None, result.error
    assert result.value == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_an_error_of_the_users_model_keeps_its_traceback(tmp_path: Path) -> None:
    path = _write(tmp_path, strategy="air_ddp", model="my_models.Broken")
    (result,) = run_ranks(_fit, 1, args=("--config", str(path)), cwd=tmp_path)
    assert result.error is not None
    assert "cannot be 4 wide" in result.error
    assert f'File "{tmp_path / "my_models.py"}"' in result.error


# ---- training, in ranks that the kit starts --------------------------------------------------------------------------


def _fit_and_compare(path: str) -> list[bool]:
    """Train a model whose optimizer is an option, and return which of its weights have changed."""
    changed: list[bool] = []

    def remember(trainer: Trainer, module: Any) -> None:
        module.weights_before = [_whole(parameter) for parameter in module.parameters()]

    def compare(trainer: Trainer, module: Any) -> None:
        after = [_whole(parameter) for parameter in module.parameters()]
        changed.extend(bool((a != b).any()) for a, b in zip(after, module.weights_before, strict=True))
        (optimizer,) = trainer.optimizers
        (group,) = optimizer.param_groups
        assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in module.parameters()}
        (schedule,) = trainer.lr_scheduler_configs
        assert schedule.scheduler.optimizer is optimizer

    from lightning.pytorch.callbacks import LambdaCallback

    class WithCallback(AirCLI):
        def before_instantiate_classes(self) -> None:
            self.trainer_defaults["callbacks"] = LambdaCallback(on_train_start=remember, on_train_end=compare)

    sys.path.insert(0, str(Path.cwd()))
    optimizer = [
        "--optimizer",
        "AdamW",
        "--optimizer.lr",
        "0.1",
        "--lr_scheduler",
        "StepLR",
        "--lr_scheduler.step_size=1",
    ]
    WithCallback(
        args=["fit", "--config", path, *optimizer, "--seed_everything", "7"],
        save_config_callback=None,
    )
    return changed


def _whole(parameter: Any) -> Any:
    full_tensor = getattr(parameter, "full_tensor", None)
    return (full_tensor() if full_tensor else parameter).detach().clone()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_optimizer_of_a_yaml_trains_the_sharded_weights(sharding: str, tmp_path: Path) -> None:
    path = _write(tmp_path, strategy=f"air_{sharding}", model="my_models.WithoutOptimizer")
    for changed in values(run_ranks(_fit_and_compare, 2, args=(str(path),), cwd=tmp_path)):
        assert changed == [True] * 4


def test_a_retry_in_the_same_directory_goes_on(tmp_path: Path) -> None:
    path = _write(tmp_path, strategy="air_ddp", name="config.yaml")  # the name that Lightning would write to
    written = path.read_text()
    for _ in range(2):
        assert values(run_ranks(_fit, 1, args=("--config", str(path)), cwd=tmp_path)) == [0]
    assert path.read_text() == written
    resolved = tmp_path / "resolved_fit_config.yaml"
    assert "strategy: air_ddp" in resolved.read_text()
    assert values(run_ranks(_fit, 1, args=("--config", str(resolved)), cwd=tmp_path)) == [0]


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        # Like MLflow's, it has no folder.
        (
            ["--trainer.logger", "lightning.pytorch.loggers.logger.DummyLogger", "--trainer.default_root_dir", "out"],
            "out",
        ),
        (["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs"], "logs/lightning_logs/version_0"),
        (["--trainer.default_root_dir", "a/new/one"], "a/new/one"),
    ],
)
def test_the_resolved_config_is_in_the_folder_of_the_run(options: list[str], folder: str, tmp_path: Path) -> None:
    path = _write(tmp_path, strategy="air_ddp")
    assert values(run_ranks(_fit, 2, args=("--config", str(path), *options), cwd=tmp_path)) == [0, 0]
    assert list(tmp_path.rglob("resolved_*.yaml")) == [tmp_path / folder / "resolved_fit_config.yaml"]


def test_a_config_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    path = _write(tmp_path, strategy="air_ddp")
    (tmp_path / "taken").write_text("a file where a folder should be")
    arguments = ("--config", str(path), "--trainer.default_root_dir", "taken")
    (result,) = run_ranks(_fit, 1, args=arguments, cwd=tmp_path, warnings_as_errors=False)
    assert result.value == 0, result.error
    assert "could not be written to" in result.output


def _run_on_a_stock_model(name: str) -> int | str | None:
    options = ["logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "strategy=air_fsdp"]
    model = "lightning.pytorch.demos.boring_classes.BoringModel"
    arguments = [f"--trainer.{option}" for option in [*options, "accelerator=cpu", "use_distributed_sampler=false"]]
    return main([name, "--model", model, "--seed_everything", "7", *arguments])


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_the_other_loops_run(name: str, tmp_path: Path) -> None:
    assert values(run_ranks(_run_on_a_stock_model, 2, args=(name,), cwd=tmp_path)) == [0, 0]
    assert (tmp_path / f"resolved_{name}_config.yaml").is_file()


# ---- training, as a user starts it: the launcher repeats the command for the other rank ------------------------------


def _assert_two_ranks_trained(command: list[str], *, sharding: str, cwd: Path) -> None:
    environment = current_environment() | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        expected = f"trained 2 steps with AirStrategy(sharding={sharding!r}) on rank {rank} of 2"
        assert ended.stdout.count(expected) == 1, ended.stdout + ended.stderr


def test_the_console_script_trains_on_two_processes(tmp_path: Path) -> None:
    script = shutil.which("lightning-air", path=str(Path(sys.executable).parent))
    assert script is not None, "install the package: make venv"
    path = _write(tmp_path, strategy="air_ddp")
    command = [script, "fit", "--config", path.name, "--trainer.devices", "2"]
    _assert_two_ranks_trained(command, sharding="ddp", cwd=tmp_path)


def test_python_m_trains_on_two_processes(tmp_path: Path) -> None:
    path = _write(tmp_path, strategy="class_path: AirStrategy\ninit_args: {sharding: fsdp, wrap: [Block]}")
    command = [sys.executable, "-m", "lightning_air", "fit", "--config", path.name, "--trainer.devices", "2"]
    _assert_two_ranks_trained(command, sharding="fsdp", cwd=tmp_path)
