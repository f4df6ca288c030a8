"""Streams go on behind what the optimizer has used, whoever has read ahead; where they cannot, the run is refused."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from lightning_air import DataPosition
from lightning_air.data import DataChangedError, ResumableShards
from tests.data.streams import (
    NUM_SAMPLES,
    Plain,
    Sized,
    StandsInForHuggingFace,
    StandsInForStatefulDataLoader,
    Stateful,
    all_of,
    shards,
)
from tests.data.test_data_position import Logged
from tests.data.training import DieAfter, Learner, SaveAt, fit

SIZED = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
EVERYWHERE = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


def samples_of(module: Learner) -> list[int]:
    return [sample for _, _, samples in module.batches for sample in samples]


def num_trained(path: str) -> int:
    """How many samples a checkpoint's weights have seen, of batches of 4."""
    return 4 * torch.load(path, weights_only=True)["global_step"]


def stream(dataset: Any, batch_size: int | None = 4, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "no workers": lambda: stream(Stateful()),
    "sized": lambda: stream(Sized()),
    "2 workers": lambda: stream(Stateful(), num_workers=2, prefetch_factor=3),
    "3 workers that live on": lambda: stream(Stateful(), num_workers=3, persistent_workers=True),
    "hugging face": lambda: stream(StandsInForHuggingFace(), num_workers=1),
    "stateful loader": StandsInForStatefulDataLoader,
    "shards": lambda: stream(shards()),
}


@SIZED
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_goes_on_behind_what_the_weights_have_seen(kind: str, accumulate: int) -> None:
    whole, saves = Learner(42), SaveAt(*EVERYWHERE)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    data = LOADERS[kind]()
    reference = fit(whole, data, DataPosition(), saves, val=stream(Plain()), val_check_interval=4, **options)
    num_steps = -(-len([each for each in whole.batches if each[0] == 0]) // accumulate)  # of epoch 0
    assert 1 < num_steps < reference.global_step
    for path in saves.paths[2 :: max(1, len(saves.paths) // 4)]:
        step = torch.load(path, weights_only=True)["global_step"]
        is_over = step in (num_steps, reference.global_step)
        epoch = (step >= num_steps) + (step == reference.global_step)
        steps_in_epoch = 0 if is_over else step - epoch * num_steps
        module = Learner(42)
        trainer = fit(
            module,
            LOADERS[kind](),
            DataPosition(),
            val=stream(Plain()),
            val_check_interval=4,
            ckpt_path=path,
            **options,
        )
        expected = [
            each
            for each in whole.batches
            if each[0] > epoch or (each[0], each[1]) >= (epoch, steps_in_epoch * accumulate)
        ]
        assert module.batches == expected, path
        assert trainer.global_step == reference.global_step
        assert trainer.current_epoch == 2


@SIZED
@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("kind", [Stateful, Sized])
def test_batches_and_accumulation_may_change(kind: type[Stateful], batch_size: int) -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), stream(kind()), DataPosition(), saves)
    for accumulate in (1, 3):
        module = Learner()
        options = {"ckpt_path": saves.paths[4], "max_epochs": 2, "accumulate_grad_batches": accumulate}
        fit(module, stream(kind(), batch_size), DataPosition(), **options)
        assert samples_of(module) == [*range(20, NUM_SAMPLES), *range(NUM_SAMPLES)]


def test_samples_need_no_batches() -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), stream(Stateful(), None, collate_fn=lambda sample: torch.tensor([sample])), DataPosition(), saves)
    data = stream(Stateful(), None, collate_fn=lambda sample: torch.tensor([sample]), num_workers=1)
    fit(module, data, DataPosition(), ckpt_path=saves.paths[6])
    assert samples_of(module) == list(range(7, NUM_SAMPLES))


@pytest.mark.parametrize(("num_workers", "again"), [(0, 2), (2, 0), (3, 1), (1, 4), (2, 2)])
def test_shards_move_to_other_workers(num_workers: int, again: int) -> None:
    whole, saves, module = Learner(60), SaveAt("on_train_batch_end"), Learner(60)
    fit(whole, stream(shards(8), num_workers=num_workers), DataPosition(), saves)
    assert Counter(samples_of(whole)) == Counter(all_of(8))
    before = [sample for _, _, samples in whole.batches[:5] for sample in samples]
    data = stream(shards(8), num_workers=again, persistent_workers=again > 1)
    fit(module, data, DataPosition(), max_epochs=2, ckpt_path=saves.paths[4])
    assert Counter(before + module.samples(0)) == Counter(all_of(8))
    assert Counter(module.samples(1)) == Counter(all_of(8))
    assert len(set(before)) == 20


def test_shards_of_a_resume_are_resumed() -> None:
    first, second, third = Learner(60), Learner(60), Learner(60)
    saves, again = SaveAt("on_train_batch_end"), SaveAt("on_train_batch_end", folder=Path("again"))
    fit(first, stream(shards(8), num_workers=2), DataPosition(), saves, DieAfter(6))
    fit(second, stream(shards(8), num_workers=3), DataPosition(), again, DieAfter(5 + 4), ckpt_path=saves.paths[4])
    fit(third, stream(shards(8)), DataPosition(), ckpt_path=again.paths[3])
    had = [sample for _, _, samples in [*first.batches[:5], *second.batches[:4], *third.batches] for sample in samples]
    assert Counter(had) == Counter(all_of(8))


class Tells(IterableDataset):
    """Each worker begins where the user's `worker_init_fn` says, which it does by the documented way."""

    start = 0

    def __iter__(self) -> Any:
        return iter(range(self.start, self.start + 8))

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


def begin_at_hundreds(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.start = 10 * worker  # type: ignore[union-attr]


def test_the_user_s_own_worker_init_fn_finds_the_user_s_dataset() -> None:
    module = Learner()
    fit(module, stream(Tells(), num_workers=2, worker_init_fn=begin_at_hundreds), DataPosition())
    assert samples_of(module) == [*range(4), *range(10, 14), *range(4, 8), *range(14, 18)]


def test_workers_are_seeded_as_lightning_seeds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")

    class Draws(Stateful):
        def __iter__(self) -> Any:
            for _ in super().__iter__():
                yield random.randrange(40)

    draws = []
    for callbacks in ([DataPosition()], []):
        torch.manual_seed(5)  # of which the workers' base seed is drawn
        module = Learner()
        fit(module, stream(Draws(8), num_workers=2), *callbacks)
        draws.append(samples_of(module))
    assert draws[0] == draws[1]


# ---- without a state -------------------------------------------------------------------------------------------------


@SIZED
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_skip_reads_all_again_up_to_the_position(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    saves, module, whole = SaveAt("on_train_batch_end"), Learner(), Learner()
    fit(whole, stream(Plain(), **options), DataPosition(iterable="skip"), saves)
    with caplog.at_level("INFO"):
        data = stream(Plain(), **options)
        fit(module, data, DataPosition(iterable="skip"), ckpt_path=saves.paths[4], max_epochs=2)
    assert samples_of(module) == samples_of(whole)[20:] + samples_of(whole)
    assert "Skipping 5 batches of epoch 0" in caplog.text
    assert "Skipped 5 batches" in caplog.text


def test_skip_shows_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), stream(Plain()), DataPosition(iterable="skip"), saves)
    options = {"ckpt_path": saves.paths[4], "enable_progress_bar": True}
    fit(Learner(), stream(Plain()), DataPosition(iterable="skip"), **options)
    captured = capsys.readouterr()
    assert "Skipping" in captured.out + captured.err


def test_skip_takes_anything_that_can_be_iterated() -> None:
    batches = [torch.arange(4 * number, 4 * number + 4) for number in range(10)]

    class Batches:
        def __iter__(self) -> Any:
            return iter(batches)

    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), Batches(), DataPosition(iterable="skip"), saves)
    fit(module, Batches(), DataPosition(iterable="skip"), ckpt_path=saves.paths[6])
    assert samples_of(module) == list(range(28, 40))


def test_skip_refuses_a_stream_that_has_become_shorter() -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), stream(Plain()), DataPosition(iterable="skip"), saves)
    with pytest.raises(ValueError, match="Epoch 0 has 3 batches, and 5 are to be skipped"):
        fit(module, stream(Plain(12)), DataPosition(iterable="skip"), ckpt_path=saves.paths[4])
    assert module.batches == []


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"num_workers": 2}])
def test_skip_refuses_to_guess(change: dict[str, Any]) -> None:
    saves, logged, module = SaveAt("on_train_batch_end"), Logged(), Learner()
    fit(Learner(), stream(Plain()), DataPosition(iterable="skip"), saves)
    with pytest.raises(DataChangedError, match="Skipping gets to the same samples only where they are read alike"):
        fit(module, stream(Plain(), **change), DataPosition(iterable="skip"), ckpt_path=saves.paths[4])
    assert module.batches == []
    options = {"ckpt_path": saves.paths[4], "logger": logged, "log_every_n_steps": 1}
    with pytest.warns(UserWarning, match="Up to 20 samples of epoch 0 are repeated, and as many skipped"):
        fit(module, stream(Plain(), **change), DataPosition(iterable="skip", on_inexact="warn"), **options)
    assert len(samples_of(module)) == 20
    assert {metrics["data/inexact_samples"] for _, metrics in logged.metrics} == {20}


def test_restart_epoch_begins_the_epoch_anew_and_says_what_is_repeated() -> None:
    saves, module, logged = SaveAt("on_train_batch_end"), Learner(), Logged()
    epochs: list[int] = []

    class Notes(Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            epochs.append(trainer.current_epoch)

    fit(Learner(), stream(Plain()), DataPosition(iterable="restart_epoch"), saves, max_epochs=2)
    options = {"ckpt_path": saves.paths[13], "max_epochs": 3, "logger": logged, "log_every_n_steps": 1}
    with pytest.warns(UserWarning, match="Epoch 1 is begun anew, as iterable='restart_epoch' says. Its 16 samples up"):
        trainer = fit(module, stream(Plain()), DataPosition(iterable="restart_epoch"), Notes(), **options)
    assert samples_of(module) == [*range(NUM_SAMPLES)] * 2
    assert epochs == [1, 2]
    assert trainer.global_step == 14 + 20
    assert {metrics["data/inexact_samples"] for _, metrics in logged.metrics} == {16}


# ---- refusals --------------------------------------------------------------------------------------------------------


class OwnIteration(DataLoader):
    def __iter__(self) -> Any:
        return map(torch.flip, super().__iter__(), itertools.repeat([0]))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            lambda: stream(Plain()),
            {},
            r"cannot resume tests.data.streams.Plain: a stream needs state_dict and load_sta",
        ),
        (lambda: stream(Plain()), {}, r"choose DataPosition\(iterable='skip'\).* or iterable='restart_epoch'"),
        (lambda: iter([torch.zeros(2)]), {}, "cannot resume builtins.list_iterator: a stream needs"),
        (lambda: stream(Stateful(), num_workers=1, in_order=False), {}, "got in_order=False. Leave it out"),
        (lambda: stream(Plain(), num_workers=1, in_order=False), {"iterable": "skip"}, "got in_order=False"),
        (lambda: OwnIteration(Stateful(), batch_size=4), {}, r"OwnIteration, which has an __iter__ of its own"),
        (lambda: stream(shards(2), num_workers=3), {}, "2 shards cannot be dealt out to 3 workers of all ranks"),
    ],
)
def test_what_cannot_be_resumed_is_refused_before_the_first_step(
    data: Any, options: dict[str, Any], message: str
) -> None:
    module = Learner()
    with pytest.raises(ValueError, match=message):
        fit(module, data(), DataPosition(**options))
    assert module.batches == []


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            lambda: stream(Stateful(), num_workers=2),
            {},
            "is that of 1 ranks with 1 workers each, and now there are 1 wit",
        ),
        (lambda: stream(StandsInForHuggingFace()), {}, "In the checkpoint the data are 'tests.data.streams.Stateful'"),
        (lambda: stream(Stateful()), {"fingerprint": "v2"}, "now they are 'tests.data.streams.Stateful v2'"),
        (lambda: DataLoader(range(40), batch_size=4), {}, "In the checkpoint the data are read as a stream"),
    ],
)
def test_what_has_changed_is_refused_or_its_epoch_begun_anew(data: Any, options: dict[str, Any], message: str) -> None:
    saves, module, logged = SaveAt("on_train_batch_end"), Learner(), Logged()
    fit(Learner(), stream(Stateful()), DataPosition(), saves)
    with pytest.raises(DataChangedError, match=message):
        fit(module, data(), DataPosition(**options), ckpt_path=saves.paths[4])
    assert module.batches == []
    inexact = DataPosition(on_inexact="warn", **options)
    with pytest.warns(UserWarning, match="Up to 20 samples of epoch 0 are repeated"):
        fit(module, data(), inexact, ckpt_path=saves.paths[4], max_epochs=2, logger=logged, log_every_n_steps=1)
    assert Counter(module.samples(0)) == Counter(module.samples(1)) == Counter(range(NUM_SAMPLES))
    assert {metrics["data/inexact_samples"] for _, metrics in logged.metrics} == {20}


def test_an_index_in_the_place_of_a_stream_is_refused() -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), DataLoader(range(40), batch_size=4), DataPosition(), saves)
    with pytest.raises(DataChangedError, match="In the checkpoint the data have an index; now they are a stream"):
        fit(module, stream(Stateful()), DataPosition(), ckpt_path=saves.paths[4])
    assert module.batches == []


class Keeps(Stateful):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kept": self.kept}


def test_a_state_that_could_not_be_read_safely_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"The state of tests.data.test_streams.Keeps must be made of numbers.*tolist"):
        fit(Learner(), stream(Keeps(np.arange(3))), DataPosition(), SaveAt("on_train_batch_end"))


def test_a_state_that_is_too_large_is_refused_in_the_first_step() -> None:
    module = Learner()
    with pytest.raises(ValueError, match=r"Keeps has 5.* bytes on one rank, and at most 4194304 are kept"):
        fit(module, stream(Keeps(b"x" * 5_000_000)), DataPosition())
    assert len(module.batches) == 1


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="iterable must be one of 'stateful', 'skip', 'restart_epoch', got 'twice'"):
        DataPosition(iterable="twice")
    with pytest.raises(ValueError, match="shards must be names, at least one, each once"):
        ResumableShards(["a", "a"], list)
    with pytest.raises(TypeError, match="read must be a function of a shard's name, got 'a'"):
        ResumableShards(["a"], "a")
    with pytest.raises(ValueError, match="seed must be from 0"):
        ResumableShards(["a"], list, seed=-1)


# ---- around it -------------------------------------------------------------------------------------------------------


@SIZED
@pytest.mark.parametrize("limit", [7, 0.5])
def test_limit_train_batches_ends_each_epoch(limit: float) -> None:
    saves, module = SaveAt("on_train_batch_end"), Learner()
    options: dict[str, Any] = {"limit_train_batches": limit, "max_epochs": 2}
    num_batches = 7 if limit == 7 else 5
    data = (lambda: stream(Stateful())) if limit == 7 else StandsInForStatefulDataLoaderWithLength
    fit(Learner(), data(), DataPosition(), saves, **options)
    for which in (2, num_batches - 1):
        module = Learner()
        fit(module, data(), DataPosition(), ckpt_path=saves.paths[which], **options)
        epoch = list(range(4 * num_batches))
        assert samples_of(module) == (epoch + epoch)[4 * (which + 1) :]


class StandsInForStatefulDataLoaderWithLength(StandsInForStatefulDataLoader):
    def __len__(self) -> int:
        return self.n // self.batch_size


def test_a_second_fit_goes_on_in_the_stream() -> None:
    module = Learner()
    trainer = fit(module, stream(Stateful(), num_workers=2), DataPosition(), max_epochs=2, max_steps=7)
    assert len(samples_of(module)) == 28
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(module, stream(Stateful(), num_workers=2), stream(Plain()))
    assert Counter(samples_of(module)) == Counter([*range(NUM_SAMPLES)] * 2)
    assert module.samples(1) == module.samples(0)


def test_metrics_tell_the_position() -> None:
    logged, saves = Logged(), SaveAt("on_train_batch_end")
    fit(Learner(), stream(Stateful()), DataPosition(), saves, max_epochs=1)
    options = {"logger": logged, "log_every_n_steps": 5, "max_epochs": 2, "ckpt_path": saves.paths[6]}
    fit(Learner(), stream(Stateful(), 2), DataPosition(), **options)
    assert [(metrics["data/epoch"], metrics["data/position"]) for _, metrics in logged.metrics][:3] == [
        (0, 34),
        (1, 4),
        (1, 14),
    ]
    assert all(metrics["data/samples_per_second"] > 0 for _, metrics in logged.metrics)


def test_the_checkpoint_is_read_without_running_code() -> None:
    saves = SaveAt("on_train_batch_end")
    fit(Learner(), stream(Stateful(), num_workers=2), DataPosition(), saves)
    state = torch.load(saves.paths[2], weights_only=True)["callbacks"]["DataPosition"]
    assert state["stream"] | {"ranks": {}} == {
        "epoch": 0,
        "num_batches": 3,
        "num_samples": 12,
        "is_over": False,
        "how": "state",
        "num_ranks": 1,
        "num_workers": 2,
        "batch_size": 4,
        "dataset": "tests.data.streams.Stateful",
        "version": 1,
        "ranks": {},
        "cursors": {},
    }
    assert set(state["stream"]["ranks"]) == {0}


# ---- what stock Lightning gets wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param([DataPosition], id="ours"),
        pytest.param([], id="stock", marks=pytest.mark.xfail(reason="what is repaired", raises=AssertionError)),
    ],
)
def test_the_batch_that_lightning_has_read_ahead_is_not_lost(callbacks: list[type[Callback]]) -> None:
    """Stock Lightning saves the state of a stateful loader as it is, one batch further than training."""
    saves, module = SaveAt("on_train_batch_end"), Learner()
    fit(Learner(), StandsInForStatefulDataLoader(), *(each() for each in callbacks), saves)
    fit(module, StandsInForStatefulDataLoader(), *(each() for each in callbacks), ckpt_path=saves.paths[4])
    assert samples_of(module) == list(range(20, NUM_SAMPLES))
