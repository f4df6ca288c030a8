"""The quickstart runs as it is, however it is launched, and leaves what it promises."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from torch import Tensor

import lightning_air.cli
from recipes.quickstart import ByteGPT, ByteWindows, StdlibBytes
from tests.kit.environment import current_environment, reserved_port
from tests.kit.node_commands import run_node_commands
from tests.kit.ranks import run_ranks, values

RECIPES = Path(__file__).parents[2] / "recipes"
# MLflow 3.17 on a newer SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

TIMEOUT_SECONDS = 240  # for machines that are busy: alone on two cores, each run takes about 25
# Each rank has a core to itself; a GPU, where there is one, is left alone.
TWO_CPUS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def text() -> Tensor:
    return torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))


def run(*command: str | Path) -> str:
    """Run the command as a newcomer would, and return what it printed."""
    environment = current_environment() | TWO_CPUS
    completed = subprocess.run(
        [str(part) for part in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def metric_steps(output: Path, key: str) -> list[list[int]]:
    """Return the steps at which each finished run has logged the metric, the first run first."""
    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    assert Path(experiment.artifact_location) == output / "artifacts"
    runs = client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'", order_by=["start_time"])
    return [[metric.step for metric in client.get_metric_history(run.info.run_id, key)] for run in runs]


def test_validation_files_are_held_out_and_always_the_same() -> None:
    train_paths, val_paths = StdlibBytes.files()
    assert (train_paths, val_paths) == StdlibBytes.files()
    assert not set(train_paths) & set(val_paths)
    assert 8 * len(val_paths) < len(train_paths) < 10 * len(val_paths)
    assert not [path for path in train_paths + val_paths if "site-packages" in path.parts]


def test_windows_overlap_in_the_byte_to_predict_and_lose_only_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_bytes(bytes(range(14)))
    windows = ByteWindows([path], context_bytes=4)
    assert [windows[index].tolist() for index in range(len(windows))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
    ]


def test_loss_starts_at_that_of_the_uniform_model(text: Tensor) -> None:
    torch.manual_seed(0)
    assert ByteGPT().loss(text).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_byte_changes_no_logits_before_it(text: Tensor) -> None:
    model = ByteGPT()
    changed = text.clone()
    changed[:, 20] ^= 1
    before, after = model(text), model(changed)
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=0)
    assert (after[:, 20:] != before[:, 20:]).any(dim=-1).all()


def test_learning_rate_rises_falls_and_stays() -> None:
    model = ByteGPT(learning_rate=1.0, decay_steps=200)
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(220):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:10] == sorted(rates[:10])
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[200:] == pytest.approx([0.1] * 20)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the printed text of a run of four steps on two processes."""
    output = tmp_path_factory.mktemp("quickstart") / "output"
    printed = run(sys.executable, RECIPES / "quickstart.py", "--max-steps=4", f"--output={output}")
    return output, printed


def test_python_starts_two_processes(finished: tuple[Path, str]) -> None:
    output, printed = finished
    assert "world size 2" in printed
    assert printed.count("\ndef ") == 1  # rank 0 alone prints what the model wrote
    assert "arning" not in printed
    [folder] = output.glob("run-*")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "loss.png"]
    [checkpoint] = (folder / "checkpoints").glob("*.ckpt")  # of the last step, which is also the best
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "meta.pt",
    ]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert metric_steps(output, "train/loss") == [[0, 1, 2, 3]]
    assert metric_steps(output, "val/loss") == [[3]]


def test_resumes_as_a_command_on_each_node_of_ai_runtime(finished: tuple[Path, str]) -> None:
    output, _ = finished
    command = [sys.executable, str(RECIPES / "quickstart.py"), "--resume", "--max-steps=6", f"--output={output}"]
    nodes = run_node_commands(command, nodes=2, ranks_per_node=1, env=TWO_CPUS, timeout_seconds=TIMEOUT_SECONDS)
    assert [node.returncode for node in nodes] == [0, 0], [node.output for node in nodes]
    assert "world size 2" in nodes[0].output
    assert [node.output.count("\ndef ") for node in nodes] == [1, 0]
    assert "step 6: " in nodes[0].output
    assert [len(steps) for steps in metric_steps(output, "train/loss")] == [4, 2]


def test_torchrun_shards_the_model(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    with reserved_port() as port:
        printed = run(*torchrun, f"--master-port={port}", RECIPES / "quickstart.py", "--sharding=fsdp", "--max-steps=2")
    output = tmp_path / "quickstart_output"
    assert "world size 2" in printed
    assert printed.count("\ndef ") == 1
    assert len(list(output.glob("run-*/loss.png"))) == 1
    assert len(list(output.glob("run-*/checkpoints/*/*.distcp"))) == 2  # a shard from each rank
    assert metric_steps(output, "train/loss") == [[0, 1]]


def fit_yaml() -> int:
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # LightningCLI calls what jsonargparse deprecates
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    return lightning_air.cli.main(["fit", f"--config={RECIPES / 'quickstart.yaml'}", *steps])


def test_yaml_is_the_same_job(tmp_path: Path) -> None:
    output = tmp_path / "quickstart_output"
    ranks = run_ranks(fit_yaml, 2, cwd=tmp_path, timeout_seconds=TIMEOUT_SECONDS, warnings_as_errors=False)
    assert values(ranks) == [0, 0]
    assert ["step 2: " in rank.output for rank in ranks] == [True, False]
    assert metric_steps(output, "train/loss") == [[0, 1]]
    assert metric_steps(output, "val/loss") == [[1]]
    assert len(list(output.glob("*/*/checkpoints/*/.metadata"))) == 1
