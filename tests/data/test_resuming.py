"""Whichever hook wrote the checkpoint, and whatever has changed since, no sample is trained on twice or never.

What the weights have seen is told by the checkpoint's `global_step`, which is none of ours.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_air import DataPosition, ResumableBatchSampler, ResumableSampler
from lightning_air.data import DataChangedError
from tests.data.training import NUM_SAMPLES, DieAfter, Learner, Numbers, SaveAt, fit, loader, order

GLOBAL_BATCH = 8  # of the runs that save
STEPS_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH


def seen_by(path: str) -> tuple[int, int]:
    """Return the epoch and the position that a checkpoint's weights have come to."""
    return divmod(torch.load(path, weights_only=True)["global_step"] * GLOBAL_BATCH, NUM_SAMPLES)


def rest(path: str, num_epochs: int) -> list[int]:
    epoch, position = seen_by(path)
    return [sample for each in range(num_epochs) for sample in order(each)][epoch * NUM_SAMPLES + position :]


def all_samples(module: Learner) -> list[int]:
    return [sample for _, _, samples in module.batches for sample in samples]


EVERYWHERE = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",  # at the start of each window
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


@pytest.fixture(scope="module", params=["saved-before-us", "saved-after-us"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All that two epochs of a run write that saves wherever it can; batches of 2, 4 to a step, 5 steps to an epoch."""
    folder = tmp_path_factory.mktemp("saved")
    saves = SaveAt(*EVERYWHERE, folder=folder)
    module = Learner()
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 0.5}
    callbacks = [saves, DataPosition()] if request.param == "saved-before-us" else [DataPosition(), saves]
    fit(
        module,
        loader(batch_size=2),
        *callbacks,
        val=loader(shuffle=False),
        default_root_dir=folder,
        **options,
    )
    assert all_samples(module) == order(0) + order(1)
    assert len(saves.paths) > 100
    return saves.paths


def chosen(checkpoints: list[str], hook: str) -> list[str]:
    """Some of a hook's checkpoints: the first and the last ones, and some in between."""
    paths = [path for path in checkpoints if Path(path).name.startswith(f"{hook}-")]
    picked = {0, 1, 2, len(paths) // 2 - 1, len(paths) // 2, len(paths) // 2 + 3, len(paths) - 2, len(paths) - 1}
    return [paths[index] for index in sorted(picked) if 0 <= index < len(paths)]


@pytest.mark.parametrize("hook", EVERYWHERE)
def test_a_run_goes_on_behind_what_the_weights_have_seen(checkpoints: list[str], hook: str) -> None:
    paths = chosen(checkpoints, hook)
    assert paths
    for path, batch_size in zip(paths, itertools.cycle([2, 4, 8, 1])):
        module = Learner()
        accumulate = GLOBAL_BATCH // batch_size
        trainer = fit(
            module,
            loader(batch_size=batch_size),
            DataPosition(),
            max_epochs=3,
            accumulate_grad_batches=accumulate,
            ckpt_path=path,
        )
        assert all_samples(module) == rest(path, 3), path
        assert trainer.global_step == 3 * STEPS_PER_EPOCH, path
        assert trainer.fit_loop.epoch_loop._batches_that_stepped == 3 * STEPS_PER_EPOCH, path
        epoch, position = seen_by(path)
        numbers = [(epoch_of, index) for epoch_of, index, _ in module.batches]
        whole = [(epoch_of, index) for epoch_of in range(3) for index in range(NUM_SAMPLES // batch_size)]
        assert numbers == whole[(epoch * NUM_SAMPLES + position) // batch_size :], path
        assert trainer.current_epoch == 3


@pytest.mark.parametrize("is_iteration_based", [False, True])
def test_resumes_of_resumes_with_other_global_batches(tmp_path: Path, is_iteration_based: bool) -> None:
    """Six attempts, each of which dies; the model's weights are those of the checkpoint it starts from."""
    trained: dict[int, list[int]] = {0: [], 1: [], 2: []}
    path = None
    limits: dict[str, Any] = {"max_steps": 1000, "max_epochs": 3} if is_iteration_based else {"max_epochs": 3}
    attempts = [(4, 2, 2), (3, 1, 4), (5, 2, 3), (7, 1, 4), (2, 3, 20), (1, 4, 10**6)]
    for number, (batch_size, accumulate, num_batches) in enumerate(attempts):
        module, before = Learner(), torch.load(path, weights_only=True) if path else None
        start = before["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] if before else 0
        options = {"accumulate_grad_batches": accumulate, "ckpt_path": path, **limits}
        saves = SaveAt("on_train_batch_end", folder=tmp_path)
        fit(module, loader(batch_size=batch_size), DataPosition(), saves, DieAfter(start + num_batches), **options)
        path = str(tmp_path / f"{number}.ckpt")
        Path(saves.paths[-1]).rename(path)
        steps = torch.load(path, weights_only=True)["callbacks"]["DataPosition"]["record"]
        for epoch in trained:
            given = module.samples(epoch)
            if epoch == steps["epoch"]:
                given = given[: steps["position"] - len(trained[epoch])]
            trained[epoch] += given
    ends = {epoch: len(samples) for epoch, samples in trained.items()}
    assert trained == {epoch: order(epoch)[:end] for epoch, end in ends.items()}
    # Each epoch ends where it would have under the attempt that began it: with global batches of 8, 7 and 6.
    assert ends == {0: 40, 1: 35, 2: 36}


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end", "on_train_batch_end"])
def test_with_max_steps_an_epoch_begins_as_any_other(hook: str) -> None:
    """Lightning takes every resume of such a run for one within an epoch."""
    options: dict[str, Any] = {"max_steps": 20, "max_epochs": 3, "val": loader(shuffle=False)}
    saves, whole, module = SaveAt(hook), Learner(), Learner()
    fit(whole, loader(), DataPosition(), saves, **options)
    path = saves.paths[0 if hook != "on_train_batch_end" else 9]
    trainer = fit(module, loader(), DataPosition(), ckpt_path=path, **options)
    assert all_samples(module) == order(1)
    assert module.validated == whole.validated[1:]
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 20


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 5}])
def test_workers_may_have_read_ahead(options: dict[str, Any]) -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), loader(num_workers=2, **options), DataPosition(), saves, DieAfter(13))
    for path, num_workers in ((saves.paths[2], 1), (saves.paths[9], 2)):
        module = Learner()
        again = loader(batch_size=5, num_workers=num_workers, **options)
        fit(module, again, DataPosition(), max_epochs=2, ckpt_path=path)
        position = 4 * (int(path.split("-")[-1].split(".")[0]))
        assert all_samples(module) == (order(0) + order(1))[position:]


# ---- what stock Lightning gets wrong ---------------------------------------------------------------------------------

OURS_AND_STOCK = pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param([DataPosition], id="ours"),
        pytest.param([], id="stock", marks=pytest.mark.xfail(reason="what is repaired", raises=AssertionError)),
    ],
)
STOCK_WARNING = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


def resumed(callbacks: list[type[Callback]], saved_in: str, which: int, **options: Any) -> tuple[list[int], list[int]]:
    """Return the samples of epochs 0 to 2, in the dataset's own order, of a run that saves, dies and is resumed."""
    saves = SaveAt(saved_in)
    first, second = Learner(), Learner()
    rest_of_options = {name: value for name, value in options.items() if name != "max_steps"}
    data = {"val": loader(shuffle=False)} if "validation" in saved_in else {}
    fit(first, loader(shuffle=False), *(each() for each in callbacks), saves, **{"max_epochs": 3, **data, **options})
    path = saves.paths[which]
    num_before = torch.load(path, weights_only=True)["global_step"] * 4
    fit(
        second,
        loader(shuffle=False),
        *(each() for each in callbacks),
        **{"max_epochs": 3, "ckpt_path": path, **data, **rest_of_options},
    )
    return all_samples(second), [*range(NUM_SAMPLES)] * 3, num_before  # type: ignore[return-value]


PLACES = {
    "within-an-epoch": ("on_train_batch_end", 3, {}),
    "at-validation-within-an-epoch": ("on_validation_end", 0, {"val_check_interval": 4}),
    "at-an-epoch-s-end-with-max-steps": ("on_train_epoch_end", 0, {"max_steps": 30}),
    "where-max-steps-ended-it": ("on_train_end", 0, {"max_steps": (13, 30)}),
    # These stock Lightning 2.6 gets right, with a plain loader, the first time that a run is resumed.
    "at-the-last-batch": ("on_train_batch_end", 9, {}),
    "at-the-last-batch-with-max-steps": ("on_train_batch_end", 9, {"max_steps": 30}),
    "at-validation-at-the-end": ("on_validation_end", 0, {"val_check_interval": 1.0}),
}


def goes_on(callbacks: list[type[Callback]], saved_in: str, which: int, options: dict[str, Any]) -> bool:
    """Whether a run, in the dataset's own order, goes on where the run that it is resumed from has saved."""
    options = dict(options)
    limits = options.pop("max_steps", None)
    first_limit, second_limit = limits if isinstance(limits, tuple) else (limits, limits)
    saves, module = SaveAt(saved_in), Learner()
    options |= {"max_epochs": 3, "val": loader(shuffle=False) if "validation" in saved_in else None}
    first = options if first_limit is None else {**options, "max_steps": first_limit}
    second = options if second_limit is None else {**options, "max_steps": second_limit}
    fit(Learner(), loader(shuffle=False), *(each() for each in callbacks), saves, **first)
    path = saves.paths[which]
    num_before = torch.load(path, weights_only=True)["global_step"] * 4
    fit(module, loader(shuffle=False), *(each() for each in callbacks), ckpt_path=path, **second)
    return all_samples(module) == ([*range(NUM_SAMPLES)] * 3)[num_before:]


@pytest.mark.parametrize("place", PLACES)
def test_no_sample_is_repeated_or_lost(place: str) -> None:
    assert goes_on([DataPosition], *PLACES[place])


@STOCK_WARNING
@pytest.mark.xfail(reason="what is repaired", raises=AssertionError)
@pytest.mark.parametrize("place", list(PLACES)[:4])
def test_stock_lightning_repeats_or_loses_none(place: str) -> None:
    assert goes_on([], *PLACES[place])


class OneCycle(Learner):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=self.total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_one_cycle_resumes_at_the_sample_and_at_the_rate() -> None:
    whole, saves = OneCycle(), SaveAt("on_train_batch_end")
    trainer = fit(whole, loader(), DataPosition(), saves, max_epochs=2)
    again = OneCycle()
    second = fit(
        again, loader(batch_size=2), DataPosition(), max_epochs=2, accumulate_grad_batches=2, ckpt_path=saves.paths[6]
    )
    assert all_samples(again) == (order(0) + order(1))[28:]
    assert again.total_steps == whole.total_steps == 20
    assert second.estimated_stepping_batches == trainer.estimated_stepping_batches == 20
    assert torch.equal(again.seen, whole.seen)


@OURS_AND_STOCK
def test_workers_of_a_resumed_run_read_the_new_epoch_s_order(callbacks: list[type[Callback]]) -> None:
    def data() -> DataLoader:
        sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=0)
        return DataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=2)

    saves, first, second = SaveAt("on_train_epoch_end"), Learner(), Learner()
    fit(first, data(), *(each() for each in callbacks), saves, max_epochs=2)
    fit(second, data(), *(each() for each in callbacks), max_epochs=2, ckpt_path=saves.paths[0])
    assert second.samples(1) == first.samples(1)


def test_a_run_of_stock_lightning_goes_on_at_its_next_epoch(tmp_path: Path) -> None:
    saves = SaveAt("on_train_batch_end", "on_train_epoch_end")
    fit(Learner(), loader(), saves)
    for path in ("on_train_batch_end-10.ckpt", "on_train_epoch_end-1.ckpt"):
        module = Learner()
        fit(module, loader(), DataPosition(), max_epochs=3, ckpt_path=path)
        assert all_samples(module) == order(1) + order(2)


def test_stock_lightning_goes_on_with_ours() -> None:
    saves, module = SaveAt("on_train_epoch_end"), Learner()
    fit(Learner(), loader(), DataPosition(), saves)
    fit(module, loader(), max_epochs=2, ckpt_path=saves.paths[0])
    assert sorted(module.samples(1)) == list(range(NUM_SAMPLES))


def test_the_user_s_own_resumable_samplers_are_taken_up() -> None:
    for options in (
        {"sampler": ResumableSampler(Numbers(), batch_size=4, seed=5, fingerprint="v1"), "batch_size": 4},
        {"batch_sampler": ResumableBatchSampler(Numbers(), batch_size=4, seed=5, fingerprint="v1")},
    ):
        saves, module = SaveAt("on_train_batch_end"), Learner()
        fit(Learner(), DataLoader(Numbers(), **options), DataPosition(), saves)
        fit(module, DataLoader(Numbers(), **options), DataPosition(), ckpt_path=saves.paths[3], max_epochs=2)
        assert all_samples(module) == (order(0, seed=5) + order(1, seed=5))[16:]
        data = DataLoader(Numbers(), **options)
        with pytest.raises(DataChangedError, match=r"Numbers v1'; now it is .*Numbers v2'"):
            fit(module, data, DataPosition(fingerprint="v2"), ckpt_path=saves.paths[3], max_epochs=2)
