"""How the ranks find each other, share the model, stop together and fail together.

`AirStrategy` is the front door; `Stop` is what it tells callbacks when all ranks leave the loop.
"""

from lightning_air.strategy.air import AirStrategy, register_names
from lightning_air.strategy.checkpoint_io import CollectiveCheckpointIO
from lightning_air.strategy.ddp import AirDDP as AirDDP
from lightning_air.strategy.fsdp import AirFSDP as AirFSDP
from lightning_air.strategy.stop import Stop

__all__ = ["AirStrategy", "CollectiveCheckpointIO", "Stop"]

register_names()
