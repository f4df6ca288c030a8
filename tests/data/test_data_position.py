"""What `DataPosition` does around an epoch: lengths, validation, metrics, other loaders; and what it refuses."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from lightning_air import DataPosition
from lightning_air.data import DataChangedError
from tests.data.training import NUM_SAMPLES, DieAfter, Learner, Numbers, SaveAt, fit, loader, order
from tests.kit.trainers import fast_trainer_kwargs


def all_samples(module: Learner) -> list[int]:
    return [sample for _, _, samples in module.batches for sample in samples]


# ---- lengths ---------------------------------------------------------------------------------------------------------


class Lengths(Callback):
    """Notes what Lightning takes an epoch's length for, and how long a whole training."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        told = (trainer.current_epoch, int(trainer.num_training_batches), int(trainer.estimated_stepping_batches))
        if told not in self.seen:
            self.seen.append(told)


def test_an_epoch_that_goes_on_has_its_usual_length_and_so_have_those_after_it() -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), loader(), DataPosition(), saves)
    lengths, module = Lengths(), Learner()
    fit(
        module,
        loader(batch_size=2),
        DataPosition(),
        lengths,
        ckpt_path=saves.paths[2],
        max_epochs=3,
        accumulate_grad_batches=2,
    )
    assert lengths.seen == [(0, 20, 30), (1, 20, 30), (2, 20, 30)]
    # 28 samples are left at 3 x 3 per step: the fourth step has one sample, and whole epochs have four steps.
    lengths, module = Lengths(), Learner()
    fit(
        module,
        loader(batch_size=3),
        DataPosition(),
        lengths,
        ckpt_path=saves.paths[2],
        max_epochs=2,
        accumulate_grad_batches=3,
    )
    assert all_samples(module) == order(0)[12:] + order(1)[:36]
    assert lengths.seen == [(0, 10, 8), (1, 12, 8)]


@pytest.mark.parametrize(("limit", "length"), [(7, 28), (0.5, 20)])
def test_limit_train_batches_ends_each_epoch_there_also_after_a_resume(limit: float, length: int) -> None:
    saves, first = SaveAt("on_train_batch_end"), Learner()
    fit(first, loader(), DataPosition(), saves, limit_train_batches=limit, max_epochs=2)
    assert all_samples(first) == order(0)[:length] + order(1)[:length]
    for which in (2, -1):
        module = Learner()
        fit(module, loader(), DataPosition(), limit_train_batches=limit, max_epochs=3, ckpt_path=saves.paths[which])
        whole = [sample for epoch in range(3) for sample in order(epoch)[:length]]
        assert all_samples(module) == whole[12 if which == 2 else 2 * length :]


@pytest.mark.parametrize(
    ("interval", "every_epoch", "expected"),
    [
        (0.5, 1, [(0, 5), (0, 10), (1, 5), (1, 10)]),
        (1.0, 1, [(0, 10), (1, 10)]),
        (3, 1, [(0, 3), (0, 6), (0, 9), (1, 3), (1, 6), (1, 9)]),
        (7, None, [(0, 7), (1, 4)]),
    ],
)
def test_validation_comes_when_it_would_have_come(
    interval: float, every_epoch: int | None, expected: list[tuple[int, int]]
) -> None:
    options: dict[str, Any] = {"val_check_interval": interval, "check_val_every_n_epoch": every_epoch, "max_epochs": 2}
    saves, whole = SaveAt("on_train_batch_end"), Learner()
    fit(whole, loader(), DataPosition(), saves, val=loader(shuffle=False), **options)
    assert whole.validated == expected
    for which in (1, 6, 13):
        module = Learner()
        fit(module, loader(), DataPosition(), val=loader(shuffle=False), ckpt_path=saves.paths[which], **options)
        epoch, done = divmod(which + 1, 10)
        assert module.validated == [each for each in expected if each > (epoch, done)], which


def test_a_smaller_last_step_of_a_resumed_epoch_is_followed_by_its_validation() -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), loader(), DataPosition(), saves)
    options = {"val": loader(shuffle=False), "max_epochs": 2, "accumulate_grad_batches": 3}
    fit(module, loader(batch_size=3), DataPosition(), ckpt_path=saves.paths[2], **options)
    assert module.validated == [(0, 10), (1, 12)]


def test_a_second_fit_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    module, position = Learner(), DataPosition()
    trainer = fit(module, loader(), position)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(shuffle=False))
    assert all_samples(module) == order(0) + order(1)


class StopAfter(Callback):
    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.num_batches:
            trainer.should_stop = True


@pytest.mark.parametrize("ended_by", ["max_steps", "a stop", "an exception"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_second_fit_goes_on_where_the_first_was_ended(ended_by: str, accumulate: int) -> None:
    module, options = Learner(), {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    num_batches = 13 * accumulate
    ends: dict[str, Any] = {
        "max_steps": ([], {"max_steps": 13}),
        "a stop": ([StopAfter(num_batches)], {}),
        "an exception": ([DieAfter(num_batches)], {}),
    }
    callbacks, limits = ends[ended_by]
    data = loader(batch_size=4 // accumulate)
    trainer = fit(module, data, DataPosition(), *callbacks, **options, **limits)
    assert trainer.global_step == 13
    assert all_samples(module) == order(0) + order(1)[:12]
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.should_stop = False
    trainer.fit(module, data, loader(shuffle=False))
    assert all_samples(module) == order(0) + order(1) + order(2)
    assert trainer.global_step == 30
    assert trainer.current_epoch == 3


def test_a_second_fit_on_other_data_begins_its_epoch_with_them() -> None:
    module = Learner(60)
    trainer = fit(module, loader(), DataPosition(), max_epochs=2, max_steps=7)
    trainer.fit_loop.epoch_loop.max_steps = -1
    with pytest.warns(UserWarning, match="others than in the training before, which has ended within epoch 0"):
        trainer.fit(module, loader(60), loader(shuffle=False))
    assert all_samples(module) == order(0)[:28] + order(0, 60) + order(1, 60)


def test_a_search_for_a_learning_rate_leaves_the_position_at_the_start() -> None:
    module = Learner()
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "callbacks": [DataPosition()], "max_epochs": 2}
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), **options))
    module.lr = 0.1  # type: ignore[assignment] # what the search looks for
    Tuner(trainer).lr_find(module, loader(), loader(shuffle=False), num_training=7, update_attr=False)
    assert len(module.batches) >= 7
    module.batches.clear()
    trainer.fit(module, loader(), loader(shuffle=False))
    assert all_samples(module) == order(0) + order(1)


class SkipsTheRest(Learner):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


def test_an_epoch_that_the_user_cuts_short_is_over() -> None:
    saves, module = SaveAt("on_train_epoch_end"), Learner()
    fit(SkipsTheRest(), loader(), DataPosition(), saves)
    fit(module, loader(), DataPosition(), max_epochs=2, ckpt_path=saves.paths[0])
    assert all_samples(module) == order(1)


class SavesBehindItsStep(Learner):
    """Saves between the optimizer's step and the end of its batch."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        self.trainer.save_checkpoint(f"{self.global_step}.ckpt")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_save_between_the_step_and_the_end_of_its_batch_counts_the_batch() -> None:
    fit(SavesBehindItsStep(), loader(batch_size=2), DataPosition(), accumulate_grad_batches=2)
    for step in (1, 4, 10):
        module = SavesBehindItsStep()
        fit(module, loader(), DataPosition(), max_epochs=2, ckpt_path=f"{step}.ckpt")
        assert all_samples(module) == (order(0) + order(1))[4 * step :]


class ByHand(Learner):
    """Steps an optimizer of its own in every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def test_optimization_by_hand_commits_when_it_steps() -> None:
    saves, module = SaveAt("on_train_batch_end"), ByHand()
    fit(ByHand(), loader(), DataPosition(), saves)
    fit(module, loader(), DataPosition(), ckpt_path=saves.paths[7])  # the eighth batch; the sixth has stepped
    assert all_samples(module) == order(0)[24:]


def test_the_progress_bar_shows_how_far_an_epoch_is_that_goes_on() -> None:
    saves, bar, seen = SaveAt("on_train_batch_end"), TQDMProgressBar(), []

    class Look(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            seen.append((bar.train_progress_bar.n, bar.train_progress_bar.total, bar.train_progress_bar.desc))

    fit(Learner(), loader(), DataPosition(), saves)
    options = {"enable_progress_bar": True, "max_epochs": 2, "ckpt_path": saves.paths[3]}
    fit(Learner(), loader(batch_size=2), DataPosition(), bar, Look(), **options)
    assert seen == [(20, 20, "Epoch 0: "), (20, 20, "Epoch 1: ")]


# ---- other loaders ---------------------------------------------------------------------------------------------------


class Module(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader()

    def val_dataloader(self) -> DataLoader:
        return loader(shuffle=False)


class ImperativeLoader(DataLoader):
    """Cannot be made again from its attributes, as Lightning does with a loader whose sampler it replaces."""

    def __init__(self, secret: int) -> None:
        super().__init__(Numbers(), batch_size=secret, shuffle=True)


@pytest.mark.parametrize("kind", ["module", "datamodule", "imperative", "dict", "combined"])
def test_wherever_the_loader_comes_from(kind: str) -> None:
    made: dict[str, Any] = {
        "module": lambda: None,
        "datamodule": Module,
        "imperative": lambda: ImperativeLoader(4),
        "dict": lambda: {"a": loader()},
        "combined": lambda: CombinedLoader([loader()], "max_size"),
    }

    class Unpacks(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch = batch["a"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
            return super().training_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return loader(shuffle=False)

    saves, module = SaveAt("on_train_batch_end"), Unpacks(loader=loader())
    for ckpt_path in (None, "on_train_batch_end-3.ckpt"):
        module = Unpacks(loader=loader())
        options = {"max_epochs": 1 + bool(ckpt_path), "limit_val_batches": 0, "callbacks": [DataPosition(), saves]}
        trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), **options))
        data = made[kind]()
        if kind == "datamodule":
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        else:
            trainer.fit(module, data, ckpt_path=ckpt_path)
    assert all_samples(module) == (order(0) + order(1))[12:]


def test_the_user_s_loader_and_those_of_validation_and_test_stay_as_they_are() -> None:
    data = loader(shuffle=False)
    before = dict(vars(data))
    saves, module = SaveAt("on_train_epoch_end"), Learner()
    trainer = fit(module, data, DataPosition(shuffle=True), saves, val=data)
    assert vars(data) == before
    assert type(data) is DataLoader
    assert isinstance(trainer.train_dataloader, DataLoader)
    assert trainer.train_dataloader.dataset is data.dataset
    assert trainer.val_dataloaders is data
    assert all_samples(module) == list(range(NUM_SAMPLES))  # as the loader says
    module = Learner()
    fit(module, loader(shuffle=True), DataPosition(shuffle=False))
    assert all_samples(module) == list(range(NUM_SAMPLES))


def test_the_seed_is_the_checkpoint_s_or_the_user_s_or_that_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(module, loader(), DataPosition(), saves)
    assert all_samples(module) == order(0, seed=11)
    monkeypatch.setenv("PL_GLOBAL_SEED", "12")
    module = Learner()
    fit(module, loader(), DataPosition(), max_epochs=2, ckpt_path=saves.paths[3])
    assert all_samples(module) == (order(0, seed=11) + order(1, seed=11))[16:]
    module = Learner()
    fit(module, loader(), DataPosition(seed=13))
    assert all_samples(module) == order(0, seed=13)


@pytest.mark.parametrize(("tail", "expected"), [("drop", 40), ("pad", 48), ("exact", 42)])
def test_tails(tail: Any, expected: int) -> None:
    module = Learner(42)
    fit(module, loader(42), DataPosition(tail=tail), accumulate_grad_batches=2)
    assert all_samples(module) == (order(0, 42) * 2)[:expected]


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Logged(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "logged"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("data/") for name in metrics):
            self.metrics.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class SlowNumbers(Numbers):
    def __getitem__(self, index: int) -> int:
        torch.rand(1)
        import time

        time.sleep(0.002)
        return index


def test_metrics_go_to_the_loggers_as_often_as_others() -> None:
    logged = Logged()
    data = DataLoader(SlowNumbers(), batch_size=2, shuffle=True)
    trainer = fit(
        Learner(), data, DataPosition(), logger=logged, log_every_n_steps=4, accumulate_grad_batches=2, max_epochs=2
    )
    assert [step for step, _ in logged.metrics] == [3, 7, 11, 15, 19]
    assert [(m["data/epoch"], m["data/position"]) for _, m in logged.metrics] == [
        (0, 16),
        (0, 32),
        (1, 8),
        (1, 24),
        (1, 40),
    ]
    for _, metrics in logged.metrics:
        assert 0.008 <= metrics["data/wait_seconds"] < 1  # four samples per step
        assert 1 < metrics["data/samples_per_second"] < 500
    assert trainer.callback_metrics["data/position"] == 40


def test_repeats_for_padding_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    logged, saves = Logged(), SaveAt("on_train_batch_end")
    options = {"logger": logged, "log_every_n_steps": 1, "max_epochs": 1}
    with caplog.at_level("INFO"):
        fit(Learner(42), loader(42), DataPosition(tail="pad"), saves, accumulate_grad_batches=2, **options)
    assert {metrics["data/padded_samples"] for _, metrics in logged.metrics} == {6}
    told = "Epoch 0 is padded: 6 of its 48 samples are repeated, so that its 42 samples make whole global batches of 8"
    assert told in caplog.text
    logged.metrics.clear()
    fit(Learner(42), loader(42), DataPosition(tail="pad"), ckpt_path=saves.paths[1], **options)  # behind 8 of them
    assert {metrics["data/padded_samples"] for _, metrics in logged.metrics} == {2}  # 34 are nine times 4
    logged.metrics.clear()
    fit(Learner(42), loader(42), DataPosition(), **options)
    assert "data/padded_samples" not in logged.metrics[0][1]


# ---- the record in the checkpoint ------------------------------------------------------------------------------------


def test_the_checkpoint_holds_a_small_plain_record() -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), loader(), DataPosition(seed=2**64 - 1, fingerprint="v7"), saves)
    checkpoint = torch.load(saves.paths[4], weights_only=True)
    state = checkpoint["callbacks"]["DataPosition"]
    assert len(json.dumps(state)) < 1000
    assert state["record"] | {"version": 1} == {
        "epoch": 0,
        "position": 20,
        "epoch_length": 40,
        "n": 40,
        "seed": 2**64 - 1,
        "shuffle": True,
        "tail": "drop",
        "dataset": "tests.data.training.Numbers v7",
        "order_version": 1,
        "version": 1,
    }
    assert "combined_loader" not in checkpoint["loops"]["fit_loop"]["state_dict"]


# ---- refusals --------------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(itertools.count())


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class OwnSampler(RandomSampler):
    pass


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: DataLoader(Endless(), batch_size=4), {}, r"cannot resume .*\.Endless: a stream needs"),
        (lambda: DataLoader(Unsized(), batch_size=4, sampler=range(9)), {}, r"__len__ and __getitem__, got .*Unsized"),
        (lambda: [torch.zeros(2)] * 3, {}, "one training loader, got 3"),
        (lambda: [loader(), loader()], {}, r"one training loader, got 2 \(of Numbers, Numbers\). Combine their"),
        (lambda: CombinedLoader({"a": loader(), "b": [1]}, "min_size"), {}, r"got 2 \(of Numbers, list\)"),
        (lambda: DataLoader(Numbers(), batch_size=None), {}, "got batch_size=None. Pass a batch_size"),
        (lambda: loader(num_workers=1, in_order=False), {}, "got in_order=False. Leave it out"),
        (
            lambda: loader(shuffle=False, sampler=OwnSampler(Numbers())),
            {},
            r"sampler of the user's own, got .*OwnSampler",
        ),
        (lambda: loader(shuffle=False, sampler=SubsetRandomSampler([1, 2])), {}, "got .*SubsetRandomSampler"),
        (lambda: loader(shuffle=False, sampler=RandomSampler(Numbers(), replacement=True)), {}, "got .*RandomSampler"),
        (lambda: loader(shuffle=False, sampler=RandomSampler(Numbers(), num_samples=9)), {}, "got .*RandomSampler"),
        (lambda: DataLoader(Numbers(), batch_sampler=OwnBatches(range(9), 2, False)), {}, "got .*OwnBatches"),
        (loader, {"overfit_batches": 2}, "got overfit_batches=2. Remove one of the two"),
        (loader, {"reload_dataloaders_every_n_epochs": 3}, "got reload_dataloaders_every_n_epochs=3"),
        (lambda: loader(batch_size=64), {}, "tail='drop' leaves nothing of 40 samples: a global batch is 64"),
    ],
)
def test_what_cannot_be_resumed_is_refused_before_the_first_step(
    data: Any, options: dict[str, Any], message: str
) -> None:
    module = Learner()
    with pytest.raises(ValueError, match=message):
        fit(module, data(), DataPosition(), **options)
    assert module.batches == []


class ReadsItself(Learner):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_step_that_reads_its_batches_itself_is_refused() -> None:
    module = ReadsItself()
    with pytest.raises(ValueError, match=r"training_step\(dataloader_iter\) reads them itself. Take `batch` instead"):
        fit(module, loader(), DataPosition())
    assert module.batches == []


def test_a_loader_that_is_made_anew_on_request_keeps_the_order() -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), loader(), DataPosition(seed=5), saves)
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "ckpt_path": saves.paths[3]}
    with pytest.warns(UserWarning, match="got reload_dataloaders_every_n_epochs=1. Remove it"):
        fit(module, loader(), DataPosition(on_inexact="warn"), **options)
    assert all_samples(module) == [sample for epoch in range(3) for sample in order(epoch, seed=5)][16:]


CHANGES = [
    ({"data": lambda: loader(44)}, "has 40 samples; now it has 44 samples"),
    (
        {"data": lambda: DataLoader(SlowNumbers(), batch_size=4, shuffle=True)},
        "training.Numbers'; now it is .*SlowNumbers'",
    ),
    ({"data": lambda: loader(shuffle=False)}, "has shuffle=True; now it has shuffle=False"),
    ({"seed": 9}, "shuffled by the seed 0; now it is shuffled by the seed 9. Pass that seed, or none"),
    ({"tail": "exact"}, "has tail='drop'; now it has tail='exact'"),
    ({"fingerprint": "v2"}, "now it is 'tests.data.training.Numbers v2'"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize("which", [3, 9])
def test_changed_data_are_refused_before_the_first_step(change: dict[str, Any], message: str, which: int) -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner(44)
    fit(Learner(44), loader(), DataPosition(), saves)
    options = dict(change)
    data = options.pop("data", loader)
    with pytest.raises(DataChangedError, match=message):
        fit(module, data(), DataPosition(**options), max_epochs=2, ckpt_path=saves.paths[which])
    assert module.batches == []


def test_changed_data_are_taken_on_request_and_the_loss_is_told() -> None:
    saves, module, logged = SaveAt("on_train_batch_end"), Learner(44), Logged()
    fit(Learner(44), loader(), DataPosition(), saves)
    options = {"ckpt_path": saves.paths[3], "max_epochs": 2, "logger": logged, "log_every_n_steps": 1}
    with pytest.warns(
        UserWarning, match="now it has 44 samples.*Up to 16 samples of epoch 0 are repeated, and as many skip"
    ):
        fit(module, loader(44), DataPosition(on_inexact="warn"), **options)
    assert all_samples(module) == order(0, 44)[16:] + order(1, 44)
    assert {metrics["data/inexact_samples"] for _, metrics in logged.metrics} == {16}


def test_a_dataset_that_has_become_shorter_than_the_position_has_one_step_left() -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), loader(), DataPosition(), saves)
    with pytest.warns(UserWarning, match="now it has 20 samples"):
        fit(module, loader(20), DataPosition(on_inexact="warn"), ckpt_path=saves.paths[7], max_epochs=2)
    assert all_samples(module) == order(0, 20)[16:] + order(1, 20)


def test_a_checkpoint_without_a_position_within_an_epoch_is_refused_or_its_epoch_begun_anew() -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), loader(), saves)
    with pytest.raises(DataChangedError, match="written after 4 batches of epoch 0, without DataPosition"):
        fit(Learner(), loader(), DataPosition(), ckpt_path=saves.paths[3])
    module = Learner()
    with pytest.warns(UserWarning, match="The epoch is begun anew: its samples up to there are repeated"):
        fit(module, loader(), DataPosition(on_inexact="warn"), ckpt_path=saves.paths[3])
    assert all_samples(module) == order(0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed must be from 0 to"),
        ({"shuffle": "yes"}, TypeError, "shuffle must be True or False, got 'yes'"),
        ({"tail": "cut"}, ValueError, "tail must be one of 'drop', 'pad', 'exact', got 'cut'"),
        ({"on_inexact": "ignore"}, ValueError, "on_inexact must be 'refuse' or 'warn', got 'ignore'"),
        ({"fingerprint": 7}, TypeError, "fingerprint must be text, got 7"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataPosition(**options)


def test_a_refusal_leaves_torch_s_loaders_as_they_were() -> None:
    before = DataLoader.__init__, DataLoader.__setattr__
    with pytest.raises(ValueError, match="one training loader, got 2"):
        fit(Learner(), [loader(), loader()], DataPosition())
    assert (DataLoader.__init__, DataLoader.__setattr__) == before


def test_a_run_that_dies_leaves_the_trainer_as_it_was() -> None:
    trainer = fit(Learner(), loader(), DataPosition(), DieAfter(3))
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
