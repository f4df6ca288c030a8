"""Two nodes of two ranks each: every sharding saves and resumes, on a shared folder and on a volume.

From a volume each node downloads each file that it needs once, whatever number of its ranks need it, into a folder of
its own that is empty again afterwards.
"""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_air.checkpoint import AsyncUCCheckpointIO, verify_checkpoint
from lightning_air.checkpoint.places import open_store
from lightning_air.checkpoint.volume_store import MountedVolumeStore
from tests.checkpoint.test_hostile import volumes_at
from tests.kit.node_commands import run_node_commands
from tests.kit.nodes import Namespace
from tests.kit.ranks import run_ranks, values
from tests.strategy.test_checkpoints import assert_resumed_as_if_never_stopped, fit, fit_plain
from tests.strategy.training import Outcome

SHARDINGS = ["ddp", "fsdp", "hsdp"]
VOLUME = "/Volumes/main/default/ckpt"


def fit_on_node(sharding: str, max_epochs: int, save: str | None, resume: str | None, *folders: str) -> Outcome:
    """Train as one of a node's ranks, and note which files this rank has downloaded."""
    volumes, staging = folders
    volumes_at(Path(volumes))
    node_rank = os.environ["NODE_RANK"]
    downloads: Counter[str] = Counter()
    get = MountedVolumeStore.get

    def counting(store: MountedVolumeStore, name: str, target: Path) -> None:
        assert target.is_relative_to(Path(staging, f"node-{node_rank}"))
        downloads[name] += 1
        get(store, name, target)

    MountedVolumeStore.get = counting  # type: ignore[method-assign, assignment]
    io = AsyncUCCheckpointIO(staging_dir=Path(staging, f"node-{node_rank}"))
    outcome = fit(sharding, max_epochs, save=save, resume=resume, plugins=[io])
    outcome.extra |= {"node_rank": node_rank, "downloads": downloads}
    return outcome


class Cluster:
    """Two nodes that see the same folder and the same volumes."""

    def __init__(self, folder: Path, namespaces: Sequence[Namespace] | None = None) -> None:
        self.volume = folder / "Volumes" / "main" / "default" / "ckpt"
        self.volume.mkdir(parents=True)
        self.staging = folder / "staging"
        self._volumes = folder / "Volumes"
        self._namespaces = namespaces

    def fit(self, sharding: str, max_epochs: int, *, save: str | None = None, resume: str | None = None) -> list[Any]:
        args = (sharding, max_epochs, save, resume, str(self._volumes), str(self.staging))
        return values(run_ranks(fit_on_node, 4, nodes=2, args=args, namespaces=self._namespaces))

    def staged(self) -> list[Path]:
        return [path for path in self.staging.rglob("*") if path.parent != self.staging]


@pytest.fixture(scope="module")
def whole() -> Outcome:
    """A run in one process that never stopped."""
    return values(run_ranks(fit_plain, 1, args=(None, 3, None, None)))[0]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_on_a_shared_folder(sharding: str, whole: Outcome, tmp_path: Path) -> None:
    cluster, path = Cluster(tmp_path), str(tmp_path / "run" / "step=8.ckpt")
    cluster.fit(sharding, 1, save=path)
    report = verify_checkpoint(path, level="digest")
    assert report.valid, report
    assert report.manifest is not None
    assert (report.manifest.world_size, report.manifest.sharding, report.step) == (4, sharding, 8)
    for resumed in cluster.fit(sharding, 3, resume=path):
        assert_resumed_as_if_never_stopped(resumed, whole)
    assert cluster.staged() == []


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_node_downloads_each_file_once_from_a_volume(
    sharding: str, whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, path = Cluster(tmp_path), f"{VOLUME}/run/step=8.ckpt"
    cluster.fit(sharding, 1, save=path)
    assert cluster.staged() == []
    monkeypatch.setitem(open_store.__kwdefaults__, "volumes_root", tmp_path / "Volumes")
    assert verify_checkpoint(path, level="digest").valid
    resumed = cluster.fit(sharding, 3, resume=path)
    for outcome in resumed:
        assert_resumed_as_if_never_stopped(outcome, whole)
    shards = {file.name for file in (cluster.volume / "run" / "step=8.ckpt").glob("*.distcp")}
    assert len(shards) == 4
    by_node: dict[str, Counter[str]] = {"0": Counter(), "1": Counter()}
    for outcome in resumed:
        by_node[outcome.extra["node_rank"]] += outcome.extra["downloads"]
    for node_rank, downloads in by_node.items():
        assert set(downloads.values()) == {1}, (node_rank, downloads)
        assert downloads.keys() == shards or sharding != "ddp", (node_rank, downloads)
    assert all(outcome.extra["downloads"] for outcome in resumed) or sharding != "ddp"  # the ranks share the work
    assert cluster.staged() == []  # the caches are gone


def test_on_two_networks_from_one_sharding_to_another(
    whole: Outcome, tmp_path: Path, two_networks: list[Namespace]
) -> None:
    cluster, path = Cluster(tmp_path, two_networks), f"{VOLUME}/run/step=8.ckpt"
    cluster.fit("hsdp", 1, save=path)
    for resumed in cluster.fit("fsdp", 3, resume=path):
        assert_resumed_as_if_never_stopped(resumed, whole)
    assert cluster.staged() == []


SCRIPT = """
    import sys
    import lightning.pytorch as L
    from lightning_air import AirCheckpoint, AirStrategy, AsyncUCCheckpointIO
    from tests.strategy.training import Regression, loader

    if __name__ == "__main__":
        folder, max_steps = sys.argv[1], int(sys.argv[2])
        trainer = L.Trainer(
            accelerator="cpu", strategy=AirStrategy("hsdp"), plugins=[AsyncUCCheckpointIO()], max_steps=max_steps,
            callbacks=[AirCheckpoint(folder, every="3steps", keep_last=2)], logger=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )
        class Note(L.Callback):
            def on_train_start(self, trainer, module):
                print(f"rank {trainer.global_rank} starts at {trainer.global_step}", flush=True)
        trainer.callbacks.append(Note())
        trainer.fit(Regression(), loader(trainer.world_size, trainer.global_rank), ckpt_path="last")
"""


@pytest.mark.soak
def test_one_command_per_node_finds_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for max_steps, start in ((4, 0), (8, 4)):
        argv = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run"), str(max_steps)]
        for node in run_node_commands(argv, nodes=2, ranks_per_node=2, env=environment, timeout_seconds=180):
            assert node.returncode == 0, node.output
            for rank in (2 * node.node_rank, 2 * node.node_rank + 1):
                assert f"rank {rank} starts at {start}" in node.output
    published = sorted(path.parent.name.rpartition("=")[2] for path in (tmp_path / "run").glob("*/.metadata"))
    assert published == ["4.ckpt", "6.ckpt", "8.ckpt"]  # what it has resumed from, and the newest two
