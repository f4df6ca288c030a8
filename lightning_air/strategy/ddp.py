"""The leaf for sharding="ddp": each rank holds the whole model, and gradients are averaged."""

from typing_extensions import override

from lightning_air._lightning import DDPStrategy, Trainer
from lightning_air.strategy.air import AirStrategy
from lightning_air.strategy.blocks import checkpoint_activations
from lightning_air.strategy.options import StrategyOptions

_ADVICE = "`strategy=AirStrategy(find_unused_parameters=True)`"


class AirDDP(AirStrategy, DDPStrategy, shardings=("ddp",)):
    """What `AirStrategy(sharding="ddp")` makes."""

    @override
    def _init_stock(self, options: StrategyOptions) -> None:
        DDPStrategy.__init__(self, timeout=options.timeout, **options.ddp)

    @override
    def setup(self, trainer: Trainer) -> None:
        checkpoint_activations(self._module, self.options.activation_checkpointing)
        super().setup(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if exception.args and isinstance(exception.args[0], str):  # Lightning's advice leads to another strategy
            message = exception.args[0].replace("`strategy='ddp_find_unused_parameters_true'`", _ADVICE)
            message = message.replace("`strategy=DDPStrategy(find_unused_parameters=True)`", _ADVICE)
            exception.args = (message, *exception.args[1:])
