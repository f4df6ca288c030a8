"""The leaf for sharding="ddp": each rank holds the whole model, and gradients are averaged."""

from typing_extensions import override

from lightning_air._lightning import DDPStrategy, Trainer
from lightning_air.strategy.air import AirStrategy
from lightning_air.strategy.blocks import checkpoint_activations
from lightning_air.strategy.options import StrategyOptions


class AirDDP(AirStrategy, DDPStrategy, shardings=("ddp",)):
    """What `AirStrategy(sharding="ddp")` makes."""

    @override
    def _init_stock(self, options: StrategyOptions) -> None:
        DDPStrategy.__init__(self, timeout=options.timeout, **options.ddp)

    @override
    def setup(self, trainer: Trainer) -> None:
        checkpoint_activations(self._module, self.options.activation_checkpointing)
        super().setup(trainer)
