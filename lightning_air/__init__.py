"""Five parts for training Lightning models on Databricks AI Runtime, a laptop, torchrun or SLURM."""

from lightning_air._version import __version__

__all__ = ["__version__"]
