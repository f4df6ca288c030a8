"""Let the training loop of one Trainer leave together: what hears SIGTERM, and where the ranks exchange it.

Two private names of Lightning's are replaced on the Trainer's own objects, for want of public ones: the SIGTERM handler
that its signal connector registers after `setup` (it starts a collective inside of a signal handler), and the broadcast
through the device that its training loop makes before each batch.
"""

from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_air._lightning import SIGTERMException, Trainer, TrainerFn, rank_zero_info
from lightning_air.strategy.stop import Stop, StopExchange

SIGTERM_EXIT_CODE = 128 + 15


class LoopStop:
    """The stop of one run of a Trainer. Made on every rank at the same point.

    Args:
        trainer: Whose loop it is.
        launcher: What started other ranks of this node from this process, or None.
        group: A gloo group of all ranks that nothing else uses, or None for a single rank.
        global_rank: This rank.
    """

    def __init__(
        self, trainer: Trainer, launcher: Any | None, group: dist.ProcessGroup | None, global_rank: int
    ) -> None:
        self.agreed: Stop | None = None
        self._trainer = trainer
        self._launcher = launcher
        self._group = group
        self._global_rank = global_rank
        self._exchanges_left_in_validation = 0
        self._exchange: StopExchange | None = None
        self._was_asked = False
        self._has_left = False
        # Private: the public Trainer.received_sigterm can only be read.
        self._connector = trainer._signal_connector  # noqa: SLF001
        self._connector.received_sigterm = False  # as Lightning does it a little later: it is the run before's
        self._connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[method-assign] # noqa: SLF001
        if trainer.state.fn == TrainerFn.FITTING:
            self._exchange = StopExchange(group, global_rank)
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.leave_if_agreed  # type: ignore[method-assign] # noqa: SLF001

    def request(self, reason: str) -> None:
        """Ask all ranks to stop; safe in a signal handler and on any thread.

        Raises:
            RuntimeError: If no fit is running.
        """
        exchange = self._exchange  # another thread may end the loop in between
        if exchange is None:
            raise RuntimeError(f"No fit is running that could be stopped ({reason!r}).")
        exchange.request(reason)
        if self._group is None:  # one rank: nobody to agree with, and Lightning looks after this batch
            self._connector.received_sigterm = True

    def leave_if_agreed(self) -> None:
        """Leave the loop if all ranks have agreed to. Collective: every rank calls this, before the same batch.

        Raises:
            SIGTERMException: On every rank at once.
        """
        stop = self._exchange.step() if self._exchange is not None else None
        if stop is not None:
            self._leave(stop)

    def start_validation(self) -> None:
        """Find out in how many batches of this validation the ranks can exchange. Collective: every rank calls this."""
        self._exchanges_left_in_validation = 0
        if self._exchange is None or self._trainer.sanity_checking:
            return
        num_batches = sum(self._trainer.num_val_batches)
        common = torch.tensor(int(num_batches) if num_batches != float("inf") else 0)
        if self._group is not None:
            # The ranks may have different numbers of batches, and must exchange equally often.
            dist.all_reduce(common, op=dist.ReduceOp.MIN, group=self._group)
        self._exchanges_left_in_validation = int(common)

    def leave_if_agreed_in_validation(self) -> None:
        """Like `leave_if_agreed`, for as many batches of a validation as every rank has."""
        if self._exchanges_left_in_validation > 0:
            self._exchanges_left_in_validation -= 1
            self.leave_if_agreed()

    def end_validation(self) -> None:
        """Make the exchanges that this rank's batches left over, so that all ranks have made equally many.

        A rank may run fewer batches than its loaders announce.
        """
        while self._exchanges_left_in_validation > 0:
            self.leave_if_agreed_in_validation()

    def leave_prediction(self) -> None:
        """Leave a prediction if this rank has received SIGTERM; Lightning's own loop never looks."""
        if self._connector.received_sigterm:
            raise SIGTERMException(SIGTERM_EXIT_CODE)

    @property
    def is_unheeded(self) -> bool:
        """Whether this rank was told to stop and the run came to its end all the same; also while it is torn down."""
        has_left = self._has_left or self.agreed is not None
        return not has_left and (self._was_asked or self._connector.received_sigterm)

    def end(self, exception: BaseException | None = None) -> None:
        """Stop exchanging. Idempotent.

        Args:
            exception: What ended the run. Then the last exchange is dropped: it may wait for a rank that is gone.
        """
        exchange, self._exchange = self._exchange, None
        self._has_left |= isinstance(exception, SIGTERMException)
        if exchange is None:
            return
        self._was_asked = exchange.is_requested
        if exception is None:
            exchange.drain()
        if self._group is None and self._has_left:
            self.agreed = exchange.step()
        if self.agreed is not None:
            rank_zero_info(
                f"Training stops after step {self._trainer.global_step}: {self.agreed.reason} on rank "
                f"{self.agreed.global_rank}."
            )

    def _on_sigterm(self, signum: int, _: FrameType | None) -> None:
        """The signal handler, on the main thread. It only sets flags: no collective, no lock."""
        if self._launcher is not None and self.agreed is None and not self._connector.received_sigterm:
            self._launcher.kill(signum)  # the ranks that this process started hear it too
        if self._exchange is not None:
            self.request("SIGTERM")
        else:  # evaluation: this rank ends after its batch, and the others with it, by `FailureWatch`
            self._connector.received_sigterm = True

    def _leave(self, stop: Stop) -> NoReturn:
        self.agreed = stop
        self._connector.received_sigterm = True
        raise SIGTERMException(SIGTERM_EXIT_CODE)
