"""Five parts for training Lightning models on Databricks AI Runtime, a laptop, torchrun or SLURM."""

from lightning_air._version import __version__
from lightning_air.strategy import AirStrategy

__all__ = ["AirStrategy", "__version__"]
