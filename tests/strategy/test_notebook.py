"""In a notebook: one rank in its own process, several by forking, and a clear word where that cannot be."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import os, sys
    sys.ps1 = ">>> "  # what Lightning and we take for a prompt; set before Lightning is imported
    sys.path.insert(0, os.environ["PROJECT"])
    from lightning.pytorch import Trainer
    from lightning_air import AirStrategy
    from tests.kit.trainers import fast_trainer_kwargs
    from tests.strategy.training import Regression, loader

    sharding, devices = sys.argv[1], int(sys.argv[2])
    trainer = Trainer(**fast_trainer_kwargs(".", strategy=AirStrategy(sharding), devices=devices, max_steps=4))
    module = Regression()
    before = module.scale.item()
    trainer.fit(module, loader(), loader())
    print("world", trainer.world_size, "changed", module.scale.item() != before)
"""


def run(tmp_path: Path, sharding: str, devices: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "cell.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.run(
        [sys.executable, str(script), sharding, str(devices)],
        env=os.environ | {"PROJECT": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("sharding", "devices"), [("fsdp", 1), ("ddp", 2)])
def test_a_fit_in_a_cell(tmp_path: Path, sharding: str, devices: int) -> None:
    done = run(tmp_path, sharding, devices)
    assert done.returncode == 0, done.stderr
    assert f"world {devices} changed" in done.stdout


def test_several_sharded_ranks_need_a_script_or_a_launcher(tmp_path: Path) -> None:
    done = run(tmp_path, "fsdp", 2)
    assert done.returncode == 1
    assert "RuntimeError: sharding='fsdp' cannot start 2 ranks inside a notebook. Run a script" in done.stderr
