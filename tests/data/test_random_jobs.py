"""Random jobs through real Trainers: each attempt with other batches, accumulation and limits, saved in a random hook.

An attempt's steps after its last checkpoint are made again by the next one; what counts is the last time that each step
was made.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air import DataPosition
from tests.data.training import DieAfter, Learner, SaveAt, fit, loader, order

NUM_EPOCHS = 2
HOOKS = [
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_epoch_start",
]


@dataclass(frozen=True)
class Attempt:
    batch_size: int
    accumulate: int
    hook: str
    is_saved_first: bool  # by a callback that stands before ours
    max_steps: int  # -1 for none; more than there are, which has Lightning count otherwise
    val_check_interval: float
    dies_after: int  # batches of its own


class Steps(Learner):
    """Notes each batch under the optimizer's step that it is for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.setdefault(self.global_step, []).append((self.current_epoch, batch.tolist()))
        return super().training_step(batch, batch_idx)

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.steps: dict[int, list[tuple[int, list[int]]]] = {}


attempts = st.builds(
    Attempt,
    batch_size=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    hook=st.sampled_from(HOOKS),
    is_saved_first=st.booleans(),
    max_steps=st.sampled_from([-1, 10_000]),
    val_check_interval=st.sampled_from([1.0, 0.5, 0.3]),
    dies_after=st.integers(1, 25),
)


def run(n: int, tail: Any, attempt: Attempt, folder: Path, ckpt_path: str | None) -> tuple[Steps, Any]:
    module, saves = Steps(n), SaveAt(attempt.hook, folder=folder)
    start = 0
    if ckpt_path is not None:
        state = torch.load(ckpt_path, weights_only=True)["callbacks"].get("DataPosition")
        start = state["counts"]["num_batches"] if state else 0
    callbacks = [DataPosition(tail=tail), saves, DieAfter(start + attempt.dies_after)]
    if attempt.is_saved_first:
        callbacks[:2] = callbacks[1::-1]
    options: dict[str, Any] = {
        "accumulate_grad_batches": attempt.accumulate,
        "val_check_interval": attempt.val_check_interval,
    }
    options |= {"max_steps": attempt.max_steps, "max_epochs": NUM_EPOCHS, "default_root_dir": folder}
    data = loader(n, attempt.batch_size)
    trainer = fit(module, data, *callbacks, ckpt_path=ckpt_path, val=loader(8, shuffle=False), **options)
    return module, (saves.paths[-1] if saves.paths else ckpt_path, trainer.current_epoch == NUM_EPOCHS)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(36, 60),
    tail=st.sampled_from(["drop", "pad", "exact"]),
    job=st.lists(attempts, min_size=1, max_size=4),
)
def test_every_sample_counts_once(n: int, tail: str, job: list[Attempt]) -> None:
    job = [*job, Attempt(4, 2, "on_train_end", False, -1, 1.0, 10**6)]
    steps: dict[int, list[tuple[int, list[int]]]] = {}
    path, is_done = None, False
    with tempfile.TemporaryDirectory() as folder:
        for number, attempt in enumerate(job):
            Path(folder, str(number)).mkdir()
            module, (path, is_done) = run(n, tail, attempt, Path(folder, str(number)), path)
            steps |= module.steps
            steps = {step: given for step, given in steps.items() if step <= max(module.steps, default=10**6)}
            if is_done:
                break
    assert is_done
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for _, batches in sorted(steps.items()):
        for epoch, samples in batches:
            epochs[epoch] += samples
    globals_ = {each.batch_size * each.accumulate for each in job}
    for epoch, samples in epochs.items():
        assert samples == (order(epoch, n) * 2)[: len(samples)], epoch
        lengths = {"drop": {n // size * size for size in globals_}, "exact": {n}}
        assert len(samples) in lengths[tail] if tail in lengths else n <= len(samples) < n + max(globals_)
