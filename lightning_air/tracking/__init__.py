"""MLflow tracking that never blocks and never overflows."""

from lightning_air.tracking.logger import AirMLflowLogger

__all__ = ["AirMLflowLogger"]
