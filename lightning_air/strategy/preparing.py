"""What stands before every sharding's own setup of a run."""

import torch

from lightning_air._lightning import LightningModule, Trainer
from lightning_air.strategy.options import Sharding


def refuse_frozen_model(module: LightningModule) -> None:
    """Raise `ValueError` if a fit has nothing to train."""
    if not any(param.requires_grad for param in module.parameters()):
        num_params = sum(1 for _ in module.parameters())
        raise ValueError(
            f"{type(module).__name__} has nothing to train: none of its {num_params} parameters requires a gradient. "
            "Unfreeze some, or call trainer.validate, test or predict."
        )


def choose_grad_mode(trainer: Trainer, device: torch.device, sharding: Sharding) -> None:
    """Evaluate under `no_grad` where `inference_mode` does not work.

    Gloo's collectives do not (Lightning asks for the name "gloo" and misses "cpu:gloo"), nor do parameters that FSDP
    gathered under it and keeps for training.
    """
    if device.type == "cpu" or sharding != "ddp":
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        for loop in (*loops, trainer.predict_loop):
            loop.inference_mode = False
