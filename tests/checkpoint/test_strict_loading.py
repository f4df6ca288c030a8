"""`strict_loading` means under every sharding what it means in Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_air import AirStrategy, AsyncUCCheckpointIO
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs


class Growing(LightningModule):
    """Has as many layers as it is told."""

    def __init__(self, names: str, fill: float, *, is_strict: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        for parameter in self.layers.parameters():
            nn.init.constant_(parameter, fill)
        self.strict_loading = is_strict

    def training_step(self, batch: Any) -> Tensor:
        return sum(layer(batch[0]).sum() for layer in self.layers.values())

    def validation_step(self, batch: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def weights(self) -> dict[str, float]:
        """Return each layer's bias, which has one value."""
        return {name: _whole(layer.bias).mean().item() for name, layer in self.layers.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trainer(sharding: str, path: str) -> Trainer:
    settings = fast_trainer_kwargs(
        Path(path).parent,
        strategy=AirStrategy(sharding),
        devices=2,
        max_steps=1,
        use_distributed_sampler=False,
        plugins=[AsyncUCCheckpointIO()],
    )
    return Trainer(**settings)


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


def save(sharding: str, path: str) -> None:
    run = trainer(sharding, path)
    run.fit(Growing("ab", 1.0), data(), data())
    run.save_checkpoint(path)
    run.strategy.teardown()


def load(sharding: str, path: str, names: str, is_strict: bool) -> dict[str, float] | str:
    model = Growing(names, 2.0, is_strict=is_strict)
    try:
        trainer(sharding, path).validate(model, data(), ckpt_path=path, verbose=False)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return model.weights()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_weights_of_one_side_only(sharding: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    values(run_ranks(save, 2, args=(sharding, path)))

    def loaded(names: str, *, is_strict: bool) -> list[Any]:
        return values(run_ranks(load, 2, args=(sharding, path, names, is_strict)))

    assert loaded("ab", is_strict=True) == [{"a": 1.0, "b": 1.0}] * 2
    assert loaded("abc", is_strict=False) == [{"a": 1.0, "b": 1.0, "c": 2.0}] * 2
    assert loaded("ac", is_strict=False) == [{"a": 1.0, "c": 2.0}] * 2
    assert all("layers.c.bias" in told for told in loaded("abc", is_strict=True))
    assert all("layers.b.bias" in told for told in loaded("a", is_strict=True))
