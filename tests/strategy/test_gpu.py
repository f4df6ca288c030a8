"""What only an NVIDIA GPU can show: the compound group with NCCL, and training on the device. One GPU is enough."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_air import AirStrategy
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Outcome, RecordLosses, Regression, full_weights, loader

pytestmark = pytest.mark.gpu


class Inspect(Callback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        device = trainer.strategy.root_device
        whole = torch.tensor(3, device=device)
        self.seen = {
            "backend": dist.get_backend(),
            "mean of integers": int(trainer.strategy.reduce(whole)),
            "mean of floats": float(trainer.strategy.reduce(torch.tensor(0.5, device=device))),
            "mean in host memory": float(trainer.strategy.reduce(torch.tensor(0.25))),
            "decision": trainer.strategy.reduce_boolean_decision(True),
        }
        trainer.strategy.barrier()


def train_on_gpu(options: dict[str, Any] | None, precision: str) -> Outcome:
    outcome, inspect = Outcome(), Inspect()
    callbacks: list[Callback] = [RecordLosses(outcome)]
    strategy: Any = "auto"
    if options is not None:
        strategy = AirStrategy(**options)
        callbacks.append(inspect)
    kwargs = fast_trainer_kwargs(Path.cwd(), strategy=strategy, precision=precision, callbacks=callbacks, max_epochs=2)
    trainer = Trainer(**{**kwargs, "accelerator": "gpu", "devices": 1}, num_sanity_val_steps=0)
    torch.manual_seed(1)
    module = Regression()
    trainer.fit(module, loader(), loader())
    outcome.weights = {name: weight.cpu() for name, weight in full_weights(module).items()}
    outcome.extra = inspect.seen
    return outcome


@pytest.mark.parametrize(
    "options",
    [{"sharding": "ddp"}, {"sharding": "fsdp"}, {"sharding": "hsdp"}, {"sharding": "fsdp", "cpu_offload": True}],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_gpu_trains_as_without_the_strategy(options: dict[str, Any], precision: str) -> None:
    (outcome,) = values(run_ranks(train_on_gpu, 1, args=(options, precision), timeout_seconds=180))
    (expected,) = values(run_ranks(train_on_gpu, 1, args=(None, precision), timeout_seconds=180))
    tolerance = 1e-4 if precision == "32-true" else 5e-2
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    assert outcome.extra == {
        "backend": "cpu:gloo,cuda:nccl",
        "mean of integers": 3,
        "mean of floats": 0.5,
        "mean in host memory": 0.25,
        "decision": True,
    }


def synchronizations(own: bool) -> int:
    from benchmarks.synchronizations import Count

    torch.cuda.init()  # type: ignore[no-untyped-call]
    counter = Count()
    strategy: Any = AirStrategy() if own else "auto"
    kwargs = fast_trainer_kwargs(Path.cwd(), strategy=strategy, callbacks=[counter], limit_val_batches=0)
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**{**kwargs, "accelerator": "gpu", "devices": 1}).fit(Regression(), loader(), loader())
    return sum("synchronizing" in str(warning.message) for warning in caught)


def test_the_strategy_adds_no_synchronization_to_a_step() -> None:
    (plain,) = values(run_ranks(synchronizations, 1, args=(False,), warnings_as_errors=False, timeout_seconds=180))
    (ours,) = values(run_ranks(synchronizations, 1, args=(True,), warnings_as_errors=False, timeout_seconds=180))
    assert ours <= plain
