"""`DataPosition`: a training run resumes at the exact sample, on whatever ranks and batches it finds.

The order of samples is a function of (seed, epoch, position); the checkpoint holds one position, which moves when the
optimizer has stepped. This callback hands Lightning loaders that read from there, and puts Lightning's counters there.
"""

from dataclasses import asdict
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_air._lightning import (
    Callback,
    CombinedLoader,
    LightningModule,
    Trainer,
    TrainerFn,
    batches_that_stepped,
    change_counters,
    end_restart,
    hands_out_its_iterator,
    rank_zero_warn,
    refuse_other_package,
    unwrap_train_dataloaders,
    wrap_train_dataloaders,
)
from lightning_air.data.entry import Feed
from lightning_air.data.loader import Refused, Waiting
from lightning_air.data.loops import Counts, rewind, stand
from lightning_air.data.map_feed import MapFeed, MapOptions
from lightning_air.data.permutation import whole_number
from lightning_air.data.record import DataChangedError, PositionRecord, checked_tail
from lightning_air.data.speed import DataSpeed
from lightning_air.data.splitting import Tail
from lightning_air.data.stream_feed import Iterable, StreamFeed, is_stream
from lightning_air.data.stream_record import StreamRecord
from lightning_air.runtime import global_seed

OnInexact = Literal["refuse", "warn"]


class DataPosition(Callback):
    """Train on every sample of an epoch once, across crashes and resumes, whatever the job then runs on.

    Add it to the Trainer's callbacks; the user's `DataLoader(dataset, batch_size=…, shuffle=True, num_workers=…)` and
    `fit(model, loader, ckpt_path=…)` stay as they are. From a checkpoint in the middle of an epoch, the rest of the
    epoch are exactly the samples that no optimizer step has used, in the same order, in a time that does not depend on
    where that is. The number of ranks, of nodes, the batch size, accumulation, workers, and sharding may have changed.

    Lightning asks for the training loader, and gets a copy that has a `ResumableSampler`. That is a
    `DistributedSampler`, which Lightning leaves alone: so it is the same under `use_distributed_sampler=True` and
    `False`, and no loader has to be made again from arguments that Lightning may not know. It shuffles if the user's
    loader does. `drop_last` plays no part: `tail` says what becomes of the samples that make no whole global batch
    (ranks x batch size x accumulation). An epoch that goes on with others ends where it would have ended; its last step
    may be smaller then. In such a step losses are weighted so that every sample counts the same, whatever the ranks and
    accumulation (losses must be means over the batch); a rank that has no sample runs one of another's, with weight 0.

    Where `max_steps` or a stop has ended a `fit()` within an epoch, the next one of the same Trainer goes on there.

    Every `log_every_n_steps` the loggers, and `callback_metrics`, get `data/epoch`, `data/position` (samples of the
    epoch trained on), `data/samples_per_second` (all ranks), and `data/wait_seconds` (what an optimizer step waited for
    data, on average, on rank 0); with `tail="pad"` also `data/padded_samples` (repeats in the epoch).

    Args:
        seed: Of the order. Default: that of the checkpoint, or that of `seed_everything`, or 0.
        shuffle: False keeps the dataset's order even where the loader says `shuffle=True`.
        tail: "drop": whole global batches only, which are the same samples for every topology of one global batch.
            "pad": the last one is filled up with the epoch's first samples. "exact": each sample once, a smaller last
            step.
        on_inexact: "refuse": raise before the first step where the promise cannot be kept. "warn": say by how many
            samples at most, also as the metric `data/inexact_samples`, and train.
        iterable: For a loader that can only be gone through. "stateful": it, or its dataset, has `state_dict` and
            `load_state_dict`, or the cursors of a `ShardedDataset`, which alone move to other ranks and workers;
            refused otherwise. "skip": on resuming all is read again up to the position. "restart_epoch": the epoch
            begins again.
        fingerprint: Text that stands for the dataset's content, such as its version. When it changes, or the length or
            type of the dataset, resuming is inexact.

    Raises:
        TypeError, ValueError: If an option is wrong.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        shuffle: bool = True,
        tail: Tail = "drop",
        on_inexact: OnInexact = "refuse",
        iterable: Iterable = "stateful",
        fingerprint: str = "",
    ) -> None:
        if seed is not None:
            seed = whole_number("seed", seed, 0, 2**64 - 1)
        if on_inexact not in get_args(OnInexact):
            raise ValueError(f"on_inexact must be 'refuse' or 'warn', got {on_inexact!r}.")
        if iterable not in get_args(Iterable):
            names = ", ".join(map(repr, get_args(Iterable)))
            raise ValueError(f"iterable must be one of {names}, got {iterable!r}.")
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, got {shuffle!r}.")
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be text, got {fingerprint!r}.")
        self._seed = seed
        self._shuffle = shuffle
        self._tail = checked_tail(tail)
        self._on_inexact = on_inexact
        self._iterable: Iterable = iterable
        self._fingerprint = fingerprint
        self._trainer: Trainer | None = None  # while fitting
        self._last_trainer: Trainer | None = None
        self._feed: Feed | None = None
        self._refusal: Exception | None = None
        self._waiting = Waiting()
        self._loaded: tuple[Any, Counts] | None = None  # to go on from, until training begins
        self._is_loaded_from_memory = False
        self._committed: Counts | None = None  # as of the feed's position
        self._committed_step = 0
        self._shows_epoch = False
        self._num_inexact = 0
        self._speed = DataSpeed()

    # ---- before training ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the place of the training loader.

        Raises:
            ValueError: If the Trainer is set up to train on other samples than an epoch's.
        """
        refuse_other_package(trainer)
        if stage != "fit":
            return
        if trainer.overfit_batches:  # type: ignore[attr-defined] # set by a connector
            raise ValueError(
                f"DataPosition gives each epoch all of its samples, got overfit_batches={trainer.overfit_batches}. "  # type: ignore[attr-defined]
                "Remove one of the two."
            )
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined] # set by a connector
            self._inexact(
                "A loader that is made anew every few epochs may have other samples each time, got "
                f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}. Remove it.",  # type: ignore[attr-defined]
                None,
            )
        self._loaded = self._unfinished(trainer)
        self._is_loaded_from_memory = self._loaded is not None
        self._trainer = self._last_trainer = trainer
        self._feed = self._committed = None
        wrap_train_dataloaders(trainer, self._positioned)

    def _unfinished(self, trainer: Trainer) -> tuple[Any, Counts] | None:
        """Return where the Trainer's last training has ended within an epoch, and have it go on there.

        Lightning counts an epoch that `max_steps`, or a stop, has ended for a whole one.
        """
        ended = self._stand()
        is_its_end = trainer is self._last_trainer and trainer.global_step == self._committed_step
        if ended is None or not is_its_end or not ended[0].is_mid_epoch:
            return None
        record, counts = ended
        change_counters(trainer, lambda loops: rewind(loops, record.epoch, counts, is_mid_epoch=True))
        return ended if ended is self._loaded or self._feed is None else (self._feed.saved(), counts)

    def _positioned(self, loaders: Any) -> Any:
        """Return what the user gave to train on, with its position known; where it cannot be, training is refused.

        Collective: every rank calls this.
        """
        # Raised when training begins: around this call Lightning patches torch's loaders, and does not undo that if it
        # raises. What it does with a loader next depends on the loader, so until then all ranks have the same.
        self._refusal, positioned = None, None
        try:
            positioned = self._with_position(loaders)
        except (TypeError, ValueError) as refusal:
            self._refusal = refusal
        self._agree_on_refusal()
        return positioned if self._refusal is None else Refused()

    def _agree_on_refusal(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        if trainer.world_size == 1:
            return
        kind = "" if self._feed is None or self._refusal is not None else self._feed.kind
        told: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(told, (self._refusal and str(self._refusal), kind))
        for rank, (reason, _) in enumerate(told):
            if reason is not None:
                self._refusal = self._refusal or ValueError(f"On rank {rank}: {reason}")
                return
        kinds = [kind for _, kind in told]
        if len(set(kinds)) > 1:
            self._refusal = ValueError(
                f"The ranks have not the same kind of data: {'; '.join(kinds)}. Give every rank the same dataset."
            )

    def _with_position(self, loaders: Any) -> Any:
        """Return what the user gave to train on, with its position known.

        Raises:
            TypeError, ValueError: If it cannot be known.
        """
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        if len(combined.flattened) != 1:
            kinds = ", ".join(type(getattr(each, "dataset", each)).__qualname__ for each in combined.flattened)
            raise ValueError(
                f"DataPosition needs one training loader, got {len(combined.flattened)} (of {kinds}). Combine their "
                "datasets into one, or leave DataPosition out."
            )
        (loader,) = combined.flattened
        self._feed = self._feed_of(loader)
        if self._loaded is not None:
            self._feed.adopt(self._loaded[0])
        own = CombinedLoader(combined.iterables, "max_size_cycle")
        own.flattened = [self._feed.loader]
        return self._feed.loader if loaders is loader else own

    def _feed_of(self, loader: Any) -> Feed:
        assert self._trainer is not None
        if is_stream(loader):
            return StreamFeed(loader, self._trainer, self._iterable, self._fingerprint, self._waiting)
        adopted = self._feed.record if isinstance(self._feed, MapFeed) else None
        options = MapOptions(
            seed=self._seed,
            default_seed=adopted.seed if adopted is not None else global_seed() or 0,  # when it is made anew
            shuffle=self._shuffle,
            tail=self._tail,
            fingerprint=self._fingerprint,
        )
        return MapFeed(loader, self._trainer, options, self._waiting)

    # ---- resuming ----------------------------------------------------------------------------------------------------

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the position, and put Lightning's counters there before Lightning reads them.

        Raises:
            DataChangedError: If the checkpoint has no position and lies within an epoch.
            ValueError: If its position is damaged, or a later lightning_air's.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        loops = checkpoint["loops"]["fit_loop"]
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        self._is_loaded_from_memory = False
        if state is not None:
            kind = StreamRecord if "stream" in state else PositionRecord
            record = kind.from_state_dict(state.get("stream" if kind is StreamRecord else "record")).begun()
            counts = Counts(**state["counts"])
            self._loaded = record, counts
            rewind(loops, record.epoch, counts, is_mid_epoch=self._goes_on_in(record))
            return
        self._loaded = None
        before = stand(loops)
        if before.num_batches_of_epoch:
            self._inexact(
                f"The checkpoint was written after {before.num_batches_of_epoch} batches of epoch {before.epoch}, "
                "without DataPosition, so which samples these were is not known. Resume from one of an epoch's end.",
                "The epoch is begun anew: its samples up to there are repeated.",
            )
        rewind(loops, before.epoch, before.counts, is_mid_epoch=False)

    def _goes_on_in(self, record: Any) -> bool:
        """Say whether training goes on in the middle of an epoch."""
        restarts = isinstance(record, StreamRecord) and self._iterable == "restart_epoch"
        return record.position > 0 and not restarts

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to the position. Collective: every rank calls this.

        Raises:
            DataChangedError: If what is read now is not what the position is in.
            RuntimeError: If the ranks have not the same data.
            TypeError, ValueError: If the position in the loader cannot be known.
        """
        if self._refusal is not None:
            raise self._refusal
        feed = self._feed
        assert feed is not None  # made for the loader that Lightning has just set up
        if hands_out_its_iterator(trainer):
            raise ValueError(
                "DataPosition must know which batches a step has used, and training_step(dataloader_iter) reads them "
                "itself. Take `batch` instead, or leave DataPosition out."
            )
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            feed.adopt(loaded[0])
        self._check_ranks(trainer, (feed.identity, loaded and (loaded[0].shared(), loaded[1])), "data")
        self._committed_step = trainer.global_step
        self._num_inexact = 0
        self._speed.start()
        self._waiting.take()
        if loaded is None or not (self._goes_on_in(loaded[0]) or self._is_loaded_from_memory):
            if trainer.ckpt_path is not None:
                end_restart(trainer)
            if loaded is not None:
                self._enter(loaded[0])
            return  # on_train_epoch_start follows
        feed.go_on(trainer, self._enter(loaded[0]))
        self._committed = loaded[1]
        self._shows_epoch = True

    def _enter(self, record: Any) -> Any:
        """Return where to go on, or raise where that is not exact and the user has not asked for it."""
        assert self._feed is not None
        entry = self._feed.entry(record)
        if not entry.problem:
            return entry.record
        if self._is_loaded_from_memory:
            rank_zero_warn(
                f"The data are others than in the training before, which has ended within epoch {record.epoch}: the "
                "epoch is begun anew with them."
            )
            return entry.record.at_start(record.epoch)
        self._num_inexact = entry.num_inexact
        if entry.is_chosen:
            rank_zero_warn(f"{entry.problem} {entry.bound}")
        else:
            self._inexact(entry.problem, entry.bound)
        return entry.record

    def _inexact(self, reason: str, bound: str | None) -> None:
        if self._on_inexact == "refuse":
            raise DataChangedError(f"{reason} To train nevertheless: DataPosition(on_inexact='warn').")
        rank_zero_warn(f"{reason} {bound or ''}".rstrip())

    # ---- training ----------------------------------------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._feed is not None
        self._feed.begin_epoch(trainer)
        self._committed = self._counts(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._feed is not None
        self._feed.begin_batch(trainer.fit_loop.batch_idx)
        if self._shows_epoch:
            self._shows_epoch = False
            bar = trainer.progress_bar_callback
            if bar is not None:  # Lightning tells it nothing of an epoch that goes on: it would show no length
                bar.on_train_epoch_start(trainer, pl_module)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Let every sample of a step count the same where its batches are not whole."""
        assert self._feed is not None
        weight = self._feed.loss_weight(trainer.fit_loop.batch_idx)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._commit(trainer)
        step = batches_that_stepped(trainer)
        assert self._committed is not None
        has_stepped = trainer.fit_loop.epoch_loop.batch_progress.total.ready == self._committed.num_batches
        if has_stepped and (step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined] # set by a connector
            self._log(trainer, step)

    def _commit(self, trainer: Trainer) -> None:
        """Move the position behind the current batch if the optimizer has stepped with it."""
        if trainer.global_step == self._committed_step or self._feed is None:
            return
        self._committed_step = trainer.global_step
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._speed.count(self._feed.commit(trainer.fit_loop.batch_idx + 1, is_last=is_last))
        self._committed = self._counts(trainer, has_stepped=True)

    def _counts(self, trainer: Trainer, *, has_stepped: bool = False) -> Counts:
        num_batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return Counts(num_batches, batches_that_stepped(trainer) + has_stepped)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take an epoch that the user has cut short, by -1 from `on_train_batch_start`, for a whole one."""
        assert self._feed is not None
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and self._feed.finish_epoch():
            self._committed = self._counts(trainer)

    def _log(self, trainer: Trainer, step: int) -> None:
        assert self._feed is not None
        metrics = {**self._feed.metrics(), **self._speed.take(self._waiting.take())}
        if self._num_inexact:
            metrics["data/inexact_samples"] = float(self._num_inexact)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    # ---- saving ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._trainer is not None and self._committed is not None:
            self._commit(self._trainer)  # saved in a hook between the optimizer's step and the batch's end
        stand_now = self._stand()
        return {} if stand_now is None else _as_state(*stand_now)

    def _stand(self) -> tuple[Any, Counts] | None:
        """Return where training would go on; None where it has not been anywhere."""
        if self._loaded is not None:  # training has not begun
            return self._loaded
        if self._feed is None or self._committed is None:
            return None
        return self._feed.record, self._committed

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See that all ranks save the same position. Collective: every rank calls this.

        Raises:
            RuntimeError: On every rank, if they do not.
        """
        # Ours is in the callback's state, and stock Lightning would refuse a loader's state without such a loader.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        stand_now = self._stand()
        if trainer.state.fn == TrainerFn.FITTING:
            shared = stand_now and (stand_now[0].shared(), stand_now[1])
            self._check_ranks(trainer, shared, "position in the data")
        if stand_now is not None and stand_now is not self._loaded and isinstance(self._feed, StreamFeed):
            checkpoint["callbacks"][self.state_key] = _as_state(self._feed.saved(), stand_now[1])

    def _check_ranks(self, trainer: Trainer, own: Any, what: str) -> None:
        if trainer.world_size == 1:
            return
        first = trainer.strategy.broadcast(own)
        if not trainer.strategy.reduce_boolean_decision(own == first, all=True):
            raise RuntimeError(
                f"The ranks have not the same {what}: rank 0 has {first}, and rank {trainer.global_rank} has {own}. "
                "Give every rank the same dataset, batch size and checkpoint."
            )

    # ---- the end -----------------------------------------------------------------------------------------------------

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_reading(trainer)
        self._trainer = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # What is committed stays: a checkpoint may be written after this.
        self._stop_reading(trainer)

    def _stop_reading(self, trainer: Trainer) -> None:
        unwrap_train_dataloaders(trainer)
        if self._feed is not None:
            self._feed.close()


def _as_state(record: Any, counts: Counts) -> dict[str, Any]:
    name = "stream" if isinstance(record, StreamRecord) else "record"
    return {name: record.state_dict(), "counts": asdict(counts)}
