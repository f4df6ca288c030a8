"""`AirCheckpoint` and `AsyncUCCheckpointIO` from YAML: a run trains, keeps, resumes; every option has a help text."""

import contextlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_air import AirCheckpoint, AsyncUCCheckpointIO
from lightning_air.cli import main
from lightning_air.cli.training import AirCLI
from tests.checkpoint.runs import steps
from tests.kit.ranks import run_ranks, values
from tests.strategy.training import Regression, loader

YAML = """
seed_everything: 7
model:
  class_path: tests.cli.test_checkpointing.WithData
trainer:
  accelerator: cpu
  max_steps: 7
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  limit_val_batches: 0
  strategy:
    class_path: lightning_air.AirStrategy
  plugins:
    - class_path: lightning_air.AsyncUCCheckpointIO
  callbacks:
    - class_path: lightning_air.AirCheckpoint
      init_args:
        dirpath: run
        every: 3steps
        keep_last: 2
        save_last: link
"""


class WithData(Regression):
    def train_dataloader(self) -> Any:
        return loader()


def fit_by_cli(*arguments: str) -> int | str | None:
    try:
        return main(["fit", "--config", "run.yaml", *arguments])
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_yaml_trains_keeps_and_resumes(num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    for arguments, left in (((), [6, 7]), (("--ckpt_path=last", "--trainer.max_steps=8"), [7, 8])):
        # The first, "last" or not, warns of nothing; a plain DataLoader does not resume within an epoch.
        results = run_ranks(fit_by_cli, num_ranks, args=arguments, cwd=tmp_path, warnings_as_errors=False)
        assert values(results) == [0] * num_ranks
        assert steps(tmp_path / "run") == left
    assert (tmp_path / "run/last.ckpt").resolve().name.endswith("-step=8.ckpt")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("every=30", "'every': 30"),
        ("every=sometimes", "every must be a duration"),
        ("keep_last=0", "keep_last must be a whole number of at least 1, got 0"),
        ("dirpath=dbfs:/run", "Of DBFS only volumes can be used"),
        ("save_lasts=true", "save_lasts"),
    ],
)
def test_a_wrong_option_in_yaml_is_a_message_and_exit_code_2(option: str, message: str, tmp_path: Path) -> None:
    name, _, value = option.partition("=")
    lines = [line for line in YAML.splitlines() if not line.strip().startswith(f"{name}:")]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, f"        {name}: {value}"]))
    (result,) = run_ranks(fit_by_cli, 1, cwd=tmp_path)
    assert result.value == 2, result.error
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("every", "expected"),
    [("30min", "30min"), ("auto", "auto"), ("1epoch", "1epoch"), ("'500 steps'", "500steps")],
)
def test_yaml_can_say_a_cadence(every: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML.replace("3steps", every))
    (parsed,) = values(run_ranks(parsed_cadence, 1, cwd=tmp_path))
    assert parsed == expected


def parsed_cadence() -> str:
    cli = AirCLI(args=["--config", "run.yaml"], run=False)
    (checkpoint,) = [each for each in cli.trainer.callbacks if isinstance(each, AirCheckpoint)]
    return str(checkpoint._every)


def help_of(option: str, class_path: str) -> str:
    os.environ["COLUMNS"] = "1000"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        main(["fit", f"{option}.help", class_path])
    return shown.getvalue()


@pytest.mark.parametrize(
    ("option", "part"), [("--trainer.callbacks", AirCheckpoint), ("--trainer.plugins", AsyncUCCheckpointIO)]
)
def test_help_explains_every_option(option: str, part: type) -> None:
    (shown,) = values(run_ranks(help_of, 1, args=(option, f"lightning_air.{part.__name__}")))
    own = [name for name in inspect.signature(part).parameters if name != "kwargs"]
    listed = re.findall(rf"^  {option}\.(\w+) ", shown, re.MULTILINE)
    assert set(own) <= set(listed)
    for name in listed:
        text = re.search(rf"^  {option}\.{name} \S+(.*?)\(type:", shown, re.MULTILINE | re.DOTALL)
        assert text is not None, name
        assert len(text[1].strip()) > 20, f"{name} has no help: {text[0]!r}"
