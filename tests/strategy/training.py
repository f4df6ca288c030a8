"""A small model, a fixed order of samples, and one function that trains with them: what the training tests compare."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_air import AirStrategy
from tests.kit.trainers import fast_trainer_kwargs

NUM_FEATURES = 8
NUM_SAMPLES = 64
GLOBAL_BATCH = 8


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(NUM_FEATURES, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Regression(LightningModule):
    """Reads its own parameters' values nowhere, so that it is an ordinary module under any sharding."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = Net()
        self.scale = nn.Parameter(torch.ones(1))  # a parameter of the root itself
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale + self.shift

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)))


def loader(num_replicas: int = 1, rank: int = 0, *, batch_size: int | None = None) -> DataLoader:
    """Samples in order; each global batch of GLOBAL_BATCH is the same set whatever the number of ranks."""
    sampler = DistributedSampler(dataset(), num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(dataset(), batch_size=batch_size or GLOBAL_BATCH // num_replicas, sampler=sampler)


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class RecordLosses(Callback):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.outcome.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone().float())))


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every rank's copy of the whole weights. Collective under FSDP."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone().float() for name, value in state.items()}


def train(
    strategy_options: dict[str, Any] | None,
    trainer_options: dict[str, Any] | None = None,
    *,
    module: LightningModule | None = None,
    callbacks: tuple[Callback, ...] = (),
    seed_by_rank: bool = False,
) -> Outcome:
    """Train `Regression`; `strategy_options` None is a plain single-process Trainer, the reference."""
    outcome = Outcome()
    trainer_options = dict(trainer_options or {})
    strategy = AirStrategy(**strategy_options) if strategy_options is not None else "auto"
    trainer = Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=strategy,
            use_distributed_sampler=False,
            max_epochs=2,
            callbacks=[*callbacks, RecordLosses(outcome)],
            num_sanity_val_steps=0,
            **trainer_options,
        )
    )
    replicas = trainer.world_size
    # The ranks must start from rank 0's weights even when each has drawn its own.
    torch.manual_seed(1 + (trainer.global_rank if seed_by_rank else 0))
    module = Regression() if module is None else module
    trainer.fit(module, loader(replicas, trainer.global_rank), loader(replicas, trainer.global_rank))
    outcome.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outcome.weights = full_weights(module)
    return outcome
