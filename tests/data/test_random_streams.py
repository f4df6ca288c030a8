"""Random jobs over streams, each attempt with other batches and accumulation, saved in a random hook.

As `test_random_jobs`: an attempt's steps after its last checkpoint are made again by the next one.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_air import DataPosition
from tests.data.streams import Plain, Sized, StandsInForHuggingFace, Stateful, all_of, shards
from tests.data.test_random_jobs import NUM_EPOCHS, Attempt, Steps, attempts
from tests.data.training import DieAfter, SaveAt, fit

NUM_SHARDS = 8
N = len(all_of(NUM_SHARDS))
DATASETS: dict[str, Any] = {
    "stateful": lambda: Stateful(N),
    "sized": lambda: Sized(N),
    "hugging face": lambda: StandsInForHuggingFace(N),
    "shards": lambda: shards(NUM_SHARDS),
}


def run(kind: str, attempt: Attempt, folder: Path, ckpt_path: str | None) -> tuple[Steps, str | None, bool]:
    module, saves = Steps(max(all_of(NUM_SHARDS)) + 1), SaveAt(attempt.hook, folder=folder)
    start = 0
    if ckpt_path is not None:
        state = torch.load(ckpt_path, weights_only=True)["callbacks"].get("DataPosition")
        start = state["counts"]["num_batches"] if state else 0
    callbacks = [DataPosition(), saves, DieAfter(start + attempt.dies_after)]
    if attempt.is_saved_first:
        callbacks[:2] = callbacks[1::-1]
    options: dict[str, Any] = {"accumulate_grad_batches": attempt.accumulate, "val_check_interval": 5}
    options |= {"max_steps": attempt.max_steps, "max_epochs": NUM_EPOCHS, "check_val_every_n_epoch": None}
    data = DataLoader(DATASETS[kind](), batch_size=attempt.batch_size)
    val = DataLoader(Plain(8), batch_size=4)
    trainer = fit(module, data, *callbacks, ckpt_path=ckpt_path, val=val, default_root_dir=folder, **options)
    return module, saves.paths[-1] if saves.paths else ckpt_path, trainer.current_epoch == NUM_EPOCHS


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("kind", DATASETS)
@settings(max_examples=10, deadline=None)
@given(job=st.lists(attempts, min_size=1, max_size=4))
def test_every_sample_counts_once(kind: str, job: list[Attempt]) -> None:
    job = [*job, Attempt(4, 2, "on_train_end", False, -1, 1.0, 10**6)]
    steps: dict[int, list[tuple[int, list[int]]]] = {}
    path, is_done = None, False
    with tempfile.TemporaryDirectory() as folder:
        for number, attempt in enumerate(job):
            Path(folder, str(number)).mkdir()
            module, path, is_done = run(kind, attempt, Path(folder, str(number)), path)
            steps |= module.steps
            steps = {step: given for step, given in steps.items() if step <= max(module.steps, default=10**6)}
            if is_done:
                break
    assert is_done
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for _, batches in sorted(steps.items()):
        for epoch, samples in batches:
            epochs[epoch] += samples
    expected = Counter(all_of(NUM_SHARDS) if kind == "shards" else range(N))
    assert {epoch: Counter(samples) for epoch, samples in epochs.items()} == {0: expected, 1: expected}
    if kind in ("stateful", "sized"):
        assert epochs == {0: list(range(N)), 1: list(range(N))}
