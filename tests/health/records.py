"""A logger that keeps what it is given."""

from typing import Any

from lightning.pytorch.loggers import Logger
from typing_extensions import override


class KeepRecords(Logger):
    """Keeps (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int | None, dict[str, float]]] = []

    @property
    @override
    def name(self) -> str:
        return "records"

    @property
    @override
    def version(self) -> str:
        return "0"

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.append((step, dict(metrics)))

    def health(self) -> list[dict[str, float]]:
        """The records of GPUHealth."""
        return [record for _, record in self.records if any(name.startswith("gpu_health/") for name in record)]
