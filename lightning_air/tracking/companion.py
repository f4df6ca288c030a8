"""The callback that goes with the logger: what Lightning tells callbacks and not loggers.

The logger adds it to the Trainer. It has no state of its own in checkpoints (a Trainer without the logger would ask for
it); what a later attempt needs to know lies beside, under a key of our own.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_air._lightning import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from lightning_air.tracking.logger import AirMLflowLogger

CHECKPOINT_KEY = "lightning_air_tracking"


def state_of(checkpoint: Mapping[str, Any], trainer: Trainer, logger: "AirMLflowLogger") -> Mapping[str, Any] | None:
    """Return what this logger, or the one in its place, has left in a checkpoint; None if there is nothing."""
    states = checkpoint.get(CHECKPOINT_KEY)
    found = states.get(_name_of(trainer, logger)) if isinstance(states, dict) else None
    return found if isinstance(found, dict) else None


def _name_of(trainer: Trainer, logger: "AirMLflowLogger") -> str:
    """Return what tells a Trainer's loggers apart, in every attempt: the server, and which of several it is there."""
    uri = logger.tracking_uri
    same = [each for each in trainer.loggers if isinstance(each, type(logger)) and each.tracking_uri == uri]
    number = next((index for index, each in enumerate(same) if each is logger), 0)
    return uri if number == 0 else f"{uri} ({number + 1})"


class RunCompanion(Callback):
    """Tells a logger what happens to its Trainer.

    Args:
        logger: On every rank; only rank 0's has an open run.
    """

    def __init__(self, logger: "AirMLflowLogger") -> None:
        self.logger = logger

    @classmethod
    def join(cls, trainer: Trainer, logger: "AirMLflowLogger") -> None:
        """Add the logger's companion to a Trainer, unless it is there."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by Trainer's callback connector
        if not any(isinstance(each, cls) and each.logger is logger for each in callbacks):
            callbacks.insert(0, cls(logger))  # before checkpoints: they must stay last

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{id(self.logger)}"  # there may be two loggers, and nothing is stored by it

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """In a later stage, open the run again before somebody on rank 0 alone asks for it. Every rank calls this."""
        if self._is_at_work(trainer):
            self.logger.open_together(trainer, None)

    def _is_at_work(self, trainer: Trainer) -> bool:
        # A tuner takes the loggers away for a while, and users exchange them.
        return any(each is self.logger for each in trainer.loggers)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Open the run where the strategy loads only after the logger has met the Trainer. Every rank calls this."""
        if self._is_at_work(trainer) and not self.logger.has_met:
            self.logger.open_together(trainer, checkpoint)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ensure_open(trainer)
        if self.logger.session is not None and self._is_at_work(trainer):
            self.logger.session.begin_training(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._ensure_open(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ensure_open(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ensure_open(trainer)

    def _ensure_open(self, trainer: Trainer) -> None:
        """Open the run if no checkpoint did. Every rank comes here at the same point."""
        if self._is_at_work(trainer) and not self.logger.has_met:
            self.logger.open_together(trainer, {})

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.logger.session is not None and not trainer.sanity_checking:
            self.logger.session.flush(0)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leave what a later attempt needs: the run, its budget, and what the server has not taken yet."""
        session = self.logger.latest_session  # also when training has ended
        if session is not None and self._is_at_work(trainer):
            states = checkpoint.setdefault(CHECKPOINT_KEY, {})
            states[_name_of(trainer, self.logger)] = session.state(trainer.global_step)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.logger.note_exception(exception)
