"""Real launches from nothing: one command per node, as Databricks AIR starts it, and torchrun with its own store."""

import os
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

from tests.kit.node_commands import run_node_commands
from tests.kit.nodes import namespaces_unavailable, network_namespaces

SCRIPT = """
    import os, sys
    sys.path.insert(0, os.environ["PROJECT"])
    from lightning.pytorch import Trainer
    from lightning_air import AirStrategy
    from tests.kit.trainers import fast_trainer_kwargs
    from tests.strategy.training import Regression, loader

    kwargs = fast_trainer_kwargs(".", strategy=AirStrategy("hsdp"), max_steps=2)
    del kwargs["devices"]  # left alone, as the README says
    trainer = Trainer(**kwargs)
    trainer.fit(Regression(), loader(), loader())
    mesh = tuple(trainer.strategy.device_mesh.shape)
    line = f"rank {trainer.global_rank} of {trainer.world_size} on node {trainer.node_rank}: {mesh}"
    print(line + "\\n", end="", flush=True)  # one write, so that ranks do not mix their lines
"""


def write_script(tmp_path: Path) -> str:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return str(script)


def environment() -> dict[str, str]:
    return {"PROJECT": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def test_one_command_per_node(tmp_path: Path) -> None:
    command = [sys.executable, write_script(tmp_path)]
    # Nodes with addresses of their own where this machine allows them; without, all of them share its loopback.
    with network_namespaces(2) if namespaces_unavailable() is None else nullcontext() as namespaces:
        results = run_node_commands(
            command, nodes=2, ranks_per_node=2, namespaces=namespaces, timeout_seconds=180, env=environment()
        )
    assert [result.returncode for result in results] == [0, 0], "\n".join(result.output for result in results)
    for node, result in enumerate(results):
        for rank in (2 * node, 2 * node + 1):
            assert f"rank {rank} of 4 on node {node}: (2, 2)" in result.output


def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, write_script(tmp_path)],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 on node 0: (1, 2)" in done.stdout
