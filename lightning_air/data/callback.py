"""`DataPosition`: a training run resumes at the exact sample, on whatever ranks and batches it finds.

The order of samples is a function of (seed, epoch, position); the checkpoint holds one position, which moves when the
optimizer has stepped. This callback hands Lightning loaders that read from there, and puts Lightning's counters there.
"""

from dataclasses import asdict, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from lightning_air._lightning import (
    Callback,
    CombinedLoader,
    LightningModule,
    Trainer,
    TrainerFn,
    end_restart,
    num_stepped,
    rank_zero_info,
    rank_zero_warn,
    refuse_other_package,
    set_num_batches,
    unwrap_train_dataloaders,
    wrap_train_dataloaders,
)
from lightning_air.data.loader import CountedBatches, Waiting, positioned, resumable_sampler_of, shuffles
from lightning_air.data.loops import Counts, rewind, set_batches_before, stand
from lightning_air.data.permutation import whole_number
from lightning_air.data.record import DataChangedError, PositionRecord, checked_tail
from lightning_air.data.samplers import ResumableSampler
from lightning_air.data.speed import DataSpeed
from lightning_air.data.splitting import Split, Tail
from lightning_air.runtime import detect_seed

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
    may be smaller then. Where ranks have not the same number of samples in a step, their losses are weighted so that
    every sample counts the same (losses must be means over the batch); a rank that has none runs one of another's, with
    weight 0.

    Every `log_every_n_steps` the loggers, and `callback_metrics`, get `data/epoch`, `data/position` (samples of the
    epoch trained on), `data/samples_per_second` (all ranks), and `data/wait_seconds` (what an optimizer step waited for
    data, on average, on rank 0).

    Args:
        seed: Of the order. Default: that of the checkpoint, or that of `seed_everything`, or 0.
        shuffle: False keeps the dataset's order even where the loader says `shuffle=True`.
        tail: "drop": whole global batches only, which are the same samples for every topology of one global batch.
            "pad": the last one is filled up with the epoch's first samples. "exact": each sample once, a smaller last
            step.
        on_inexact: "refuse": raise before the first step where the promise cannot be kept. "warn": say by how many
            samples at most, also as the metric `data/inexact_samples`, and train.
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
        fingerprint: str = "",
    ) -> None:
        if seed is not None:
            seed = whole_number("seed", seed, 0, 2**64 - 1)
        if on_inexact not in get_args(OnInexact):
            raise ValueError(f"on_inexact must be 'refuse' or 'warn', got {on_inexact!r}.")
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, got {shuffle!r}.")
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be text, got {fingerprint!r}.")
        self._seed = seed
        self._shuffle = shuffle
        self._tail = checked_tail(tail)
        self._on_inexact = on_inexact
        self._fingerprint = fingerprint
        self._trainer: Trainer | None = None  # while fitting
        self._batches: CountedBatches | None = None
        self._waiting = Waiting()
        self._loaded: tuple[PositionRecord, Counts] | None = None  # from a checkpoint, until training begins
        self._committed: Counts | None = None  # as of the sampler's position
        self._committed_step = 0
        self._takes_seed = False
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
        self._trainer = trainer
        self._batches = self._loaded = self._committed = None
        wrap_train_dataloaders(trainer, self._positioned)

    def _positioned(self, loaders: Any) -> Any:
        """Return what the user gave to train on, with our sampler in it.

        Raises:
            ValueError: If its position cannot be known.
        """
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        if len(combined.flattened) != 1:
            raise ValueError(
                f"DataPosition needs one training loader, got {len(combined.flattened)}. Combine their datasets into "
                "one, or leave DataPosition out."
            )
        (loader,) = combined.flattened
        self._batches = CountedBatches(self._sampler_for(loader, does_shuffle=shuffles(loader) and self._shuffle))
        own = CombinedLoader(combined.iterables, "max_size_cycle")
        own.flattened = [positioned(loader, self._batches, self._waiting)]
        return own.flattened[0] if loaders is loader else own

    def _sampler_for(self, loader: Any, *, does_shuffle: bool) -> ResumableSampler:
        trainer = self._trainer
        assert trainer is not None
        users = resumable_sampler_of(loader)
        self._takes_seed = users is None and self._seed is None
        size = users.batch_size if users is not None and loader.batch_size is None else loader.batch_size
        made = ResumableSampler(
            loader.dataset,
            batch_size=size or loader.batch_sampler.batch_size,
            accumulate=trainer.accumulate_grad_batches,
            seed=users.seed if users is not None else self._initial_seed(),
            shuffle=does_shuffle,
            tail=users.tail if users is not None else self._tail,
            fingerprint=self._fingerprint or (users.fingerprint if users is not None else ""),
            **(trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}),
        )
        if users is not None and users.n != made.n:
            raise ValueError(
                f"The loader's sampler is of {users.n} samples, and its dataset has {made.n}. Make them one."
            )
        return made

    def _initial_seed(self) -> int:
        return (detect_seed() or 0) if self._seed is None else self._seed

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
        if state is not None:
            record = PositionRecord.from_state_dict(state.get("record")).begun()
            counts = Counts(**state["counts"])
            self._loaded = record, counts
            rewind(loops, record.epoch, counts, is_mid_epoch=record.position > 0)
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

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to the position. Collective: every rank calls this.

        Raises:
            DataChangedError: If what is read now is not what the position is in.
            RuntimeError: If the ranks have not the same data.
        """
        batches = self._batches
        assert batches is not None  # made by the loader that Lightning has just set up
        sampler = batches.sampler
        if self._loaded is not None and self._takes_seed:
            sampler.seed = self._loaded[0].seed
        self._check_ranks(trainer, (asdict(sampler.record), sampler.batch_size, self._loaded), "data")
        self._committed_step = trainer.global_step
        self._num_inexact = 0
        self._speed.start()
        self._waiting.take()
        loaded, self._loaded = self._loaded, None
        if loaded is None or not loaded[0].position:
            if trainer.ckpt_path is not None:
                end_restart(trainer)
            if loaded is not None:
                self._check(loaded[0], sampler)
            return  # on_train_epoch_start follows
        record = self._check(loaded[0], sampler)
        self._go_on(trainer, batches, record, loaded[1])

    def _check(self, record: PositionRecord, sampler: ResumableSampler) -> PositionRecord:
        """Return the record as it stands in today's data, which is itself where these are the same."""
        differences = record.differences(sampler.record)
        if not differences:
            return record
        self._num_inexact = record.position
        bound = f"Up to {record.position} samples of epoch {record.epoch} are repeated, and as many skipped."
        self._inexact(" ".join(differences), bound)
        length = sampler.whole_epoch().end
        position = min(record.position, max(length - sampler.global_batch, 0))  # Lightning counts on one step at least
        return replace(sampler.record, epoch=record.epoch, position=position, epoch_length=length)

    def _go_on(self, trainer: Trainer, batches: CountedBatches, record: PositionRecord, counts: Counts) -> None:
        """Begin in the middle of an epoch."""
        sampler = batches.sampler
        split = record.rest(sampler.num_replicas, sampler.batch_size, sampler.accumulate)
        # As many batches are said to have been as a whole epoch of today has more than are to come, in whole windows
        # of accumulation: so that the epoch has its usual length, and its windows begin where the position is.
        whole = int(trainer.fit_loop.max_batches)
        steps_to_come = -(-split.num_batches // sampler.accumulate)
        num_before = max(0, -(-whole // sampler.accumulate) - steps_to_come) * sampler.accumulate
        sampler.begin(record.epoch, split)
        batches.num_before = num_before
        set_num_batches(trainer, num_before + split.num_batches)
        set_batches_before(trainer.fit_loop.epoch_loop.batch_progress, num_before)
        self._committed = counts
        self._shows_epoch = True
        rank_zero_info(
            f"Epoch {record.epoch} goes on behind {record.position} of {split.end} samples: {split.num_batches} "
            f"batches of {sampler.num_replicas} x {sampler.batch_size} are to come."
        )

    def _inexact(self, reason: str, bound: str | None) -> None:
        if self._on_inexact == "refuse":
            raise DataChangedError(f"{reason} To train nevertheless: DataPosition(on_inexact='warn').")
        rank_zero_warn(f"{reason} {bound or ''}".rstrip())

    # ---- training ----------------------------------------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = self._batches
        assert batches is not None
        sampler = batches.sampler
        sampler.accumulate = trainer.accumulate_grad_batches
        split = sampler.whole_epoch()
        num_batches = _limited(split.num_batches, trainer.limit_train_batches)
        end = split.position_after(num_batches)
        sampler.begin(trainer.current_epoch, Split(0, end, split.num_replicas, split.batch_size))
        batches.num_before = 0
        if num_batches != trainer.fit_loop.max_batches:
            set_num_batches(trainer, num_batches)
        self._committed = self._counts(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._shows_epoch:
            self._shows_epoch = False
            bar = trainer.progress_bar_callback
            if bar is not None:  # Lightning tells it nothing of an epoch that goes on: it would show no length
                bar.on_train_epoch_start(trainer, pl_module)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Let every sample count the same where ranks have not as many as each other."""
        batches = self._batches
        assert batches is not None
        weight = batches.sampler.loss_weight(trainer.fit_loop.batch_idx - batches.num_before)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._commit(trainer)
        step = num_stepped(trainer)
        assert self._committed is not None
        has_stepped = trainer.fit_loop.epoch_loop.batch_progress.total.ready == self._committed.num_batches
        if has_stepped and (step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined] # set by a connector
            self._log(trainer, step)

    def _commit(self, trainer: Trainer) -> None:
        """Move the position behind the current batch if the optimizer has stepped with it."""
        if trainer.global_step == self._committed_step or self._batches is None:
            return
        self._committed_step = trainer.global_step
        sampler = self._batches.sampler
        before = sampler.position
        sampler.commit(trainer.fit_loop.batch_idx + 1 - self._batches.num_before - sampler.num_committed)
        self._speed.count(sampler.position - before)
        self._committed = self._counts(trainer, has_stepped=True)

    def _counts(self, trainer: Trainer, *, has_stepped: bool = False) -> Counts:
        return Counts(trainer.fit_loop.epoch_loop.batch_progress.total.ready, num_stepped(trainer) + has_stepped)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take an epoch that the user has cut short, by -1 from `on_train_batch_start`, for a whole one."""
        batches = self._batches
        assert batches is not None
        left = batches.sampler.split.num_batches - batches.sampler.num_committed
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and left:
            batches.sampler.commit(left)
            self._committed = self._counts(trainer)

    def _log(self, trainer: Trainer, step: int) -> None:
        assert self._batches is not None
        metrics = {
            "data/epoch": float(self._batches.sampler.epoch),
            "data/position": float(self._batches.sampler.position),
            **self._speed.take(self._waiting.take()),
        }
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
        if self._loaded is not None:  # training has not begun
            record, counts = self._loaded
        elif self._batches is not None and self._committed is not None:
            record, counts = self._batches.sampler.record, self._committed
        else:
            return {}
        return {"record": record.state_dict(), "counts": asdict(counts)}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See that all ranks save the same position. Collective: every rank calls this.

        Raises:
            RuntimeError: On every rank, if they do not.
        """
        # Ours is in the callback's state, and stock Lightning would refuse a loader's state without such a loader.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_ranks(trainer, self.state_dict(), "position in the data")

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
        self._let_go(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # What is committed stays: a checkpoint may be written after this.
        unwrap_train_dataloaders(trainer)

    def _let_go(self, trainer: Trainer) -> None:
        unwrap_train_dataloaders(trainer)
        self._trainer = None


def _limited(num_batches: int, limit: float) -> int:
    """Return how many batches `limit_train_batches` leaves of an epoch."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
