"""Taking a checkpoint apart and putting it together gives it back, and the flat keys are torch's own.

Between: numbers and names of the optimizers' parameters, and tensors that lie elsewhere than in the model.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from lightning_air import AirStrategy, AsyncUCCheckpointIO
from lightning_air.checkpoint.lightning_form import (
    MIN_EXTRA_BYTES,
    flatten,
    is_marker,
    names_to_numbers,
    numbers_to_names,
    put_together,
    take_apart,
)
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader


def same(left: Any, right: Any) -> bool:
    """Whether two nested values are equal, bit by bit, with the same types and the same order of keys."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# ---- flat keys -------------------------------------------------------------------------------------------------------

tensors = st.builds(torch.full, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.integers(-9, 9))
scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3)
nested = st.recursive(
    tensors | scalars,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b", "0", 0, 1]), inside, max_size=3)
    ),
    max_leaves=12,
)
states = st.dictionaries(st.sampled_from(["state_dict", "optimizer_0", "a", "a.b", "x"]), nested, max_size=3)


@given(states)
@example({"a": {"b": 1}, "a.b": 2})
@example({"a": [[], [torch.ones(1)]], "x": [{}, []]})
def test_flat_keys_are_those_of_torch(state: dict[str, Any]) -> None:
    try:
        expected = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(ValueError, match="Two entries of the checkpoint have the key"):
            flatten(state)
        return
    leaves, paths = flatten(state)
    assert list(leaves) == list(expected[0])
    assert all(leaves[key] is value for key, value in expected[0].items())
    assert paths == expected[1]


# ---- the round trip --------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-c](\.[a-c0-9]){0,2}", fullmatch=True)
meta_values = st.recursive(
    tensors | scalars,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inside, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def optimizer_states(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[str]]]:
    """What `Optimizer.state_dict` returns, and the names of the parameters."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    fields = draw(st.sets(st.sampled_from(["step", "exp_avg", "momentum_buffer"])))
    numbers = list(range(sum(sizes)))
    stepped = draw(st.sets(st.sampled_from(numbers))) if numbers else set()  # the others are frozen
    groups, by_group = [], []
    for size in sizes:
        groups.append({"lr": draw(st.floats(0, 1)), "betas": (0.9, draw(st.floats(0, 1))), "fused": None})
        groups[-1]["params"], numbers = numbers[:size], numbers[size:]
        by_group.append([f"layer.{number}.weight" for number in groups[-1]["params"]])
    state = {number: {field: draw(tensors) for field in sorted(fields)} for number in sorted(stepped)}
    # Fields of which there are none, as plain SGD has it, are not told from a parameter without a state.
    return {"state": {k: v for k, v in state.items() if v}, "param_groups": groups}, by_group


@given(
    st.dictionaries(names, tensors, max_size=4),
    st.lists(optimizer_states(), max_size=2),
    st.dictionaries(st.sampled_from(["callbacks", "loops", "hyper_parameters", "epoch", "mine"]), meta_values),
    st.booleans(),
)
@example({"a": torch.ones(1)}, [({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, [["a"]])], {}, False)
@example({"a": torch.ones(1)}, [({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, [["a"]])], {}, True)
@example({}, [({"state": {}, "param_groups": [{"lr": 0.1, "params": []}]}, [[]])], {}, False)
def test_a_checkpoint_comes_back_as_it_was(
    weights: dict[str, Tensor],
    optimizers: list[tuple[dict[str, Any], list[list[str]]]],
    meta: dict[str, Any],
    knows_names: bool,
) -> None:
    checkpoint = {**meta, "state_dict": weights, "optimizer_states": [state for state, _ in optimizers]}
    notes = {"lightning_air": {"parameter_names": [by_group for _, by_group in optimizers]}} if knows_names else {}
    form = take_apart({**checkpoint, **notes})
    assert not any(key in form.meta for key in ("state_dict", "optimizer_states"))
    if knows_names:
        numbers = [path for path in form.paths.values() if path[1:2] == ("state",) and path[2].isdecimal()]
        assert not numbers
    back = put_together(form.leaves, form.paths, form.meta)
    assert back.keys() == checkpoint.keys()
    for key in checkpoint.keys() - {"optimizer_states"}:
        assert same(back[key], checkpoint[key]), key
    for (state, _), found in zip(optimizers, back["optimizer_states"], strict=True):
        assert found["param_groups"] == state["param_groups"]
        assert same(dict(sorted(found["state"].items())), state["state"])


@pytest.mark.parametrize("weights_only", [False, True])
def test_no_optimizers_are_told_from_weights_only(weights_only: bool) -> None:
    # Lightning refuses to resume where the key is missing, and a model without an optimizer may be resumed.
    checkpoint = {"state_dict": {"w": torch.ones(1)}, **({} if weights_only else {"optimizer_states": []})}
    form = take_apart(checkpoint)
    assert put_together(form.leaves, form.paths, form.meta) == checkpoint


def test_an_extra_state_that_is_empty_comes_back() -> None:
    # `Module.load_state_dict` misses the key otherwise.
    weights = OrderedDict({"w": torch.ones(2), "_extra_state": {}, "sub._extra_state": [], "x._extra_state": None})
    form = take_apart({"state_dict": weights})
    back = put_together(form.leaves, form.paths, form.meta)
    assert back["state_dict"].keys() == weights.keys()
    assert all(same(back["state_dict"][key], value) for key, value in weights.items())


@given(optimizer_states())
def test_numbers_become_names_and_numbers_again(optimizer: tuple[dict[str, Any], list[list[str]]]) -> None:
    state, by_group = optimizer
    assume(any(by_group))
    named = numbers_to_names(state, by_group)
    assert [group["params"] for group in named["param_groups"]] == by_group
    assert all(same(named["state"][f"layer.{number}.weight"], fields) for number, fields in state["state"].items())
    assert same(names_to_numbers(named), state)


def test_state_of_another_optimizer_is_refused_with_both_counts() -> None:
    model = torch.nn.Linear(2, 2)
    state = torch.optim.SGD(model.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"has \[2\] parameters in its groups and the optimizer \[1, 1\]"):
        numbers_to_names(state, [["weight"], ["bias"]])


# ---- tensors elsewhere -----------------------------------------------------------------------------------------------


def test_large_tensors_anywhere_are_stored_beside_the_models_and_small_ones_are_not() -> None:
    large = torch.arange(MIN_EXTRA_BYTES // 4, dtype=torch.float32)
    small = torch.ones(3)
    other = torch.zeros(MIN_EXTRA_BYTES, dtype=torch.uint8)
    callbacks = {"Average": {"weights": [large, (small, OrderedDict(deep=other))], "n": 3}}
    form = take_apart({"state_dict": {"w": small}, "callbacks": callbacks, "lightning_air": {"step": 1}})
    assert {key: value for key, value in form.leaves.items() if key.startswith("lightning_air.")} == {
        "lightning_air.0": large,
        "lightning_air.1": other,
    }
    stored = form.meta["callbacks"]["Average"]["weights"]
    assert is_marker(stored[0])
    assert stored[1][0] is small
    assert callbacks["Average"]["weights"][0] is large  # the caller's own is left alone
    back = put_together(form.leaves, form.paths, form.meta)
    assert same(back["callbacks"], callbacks)
    assert back.keys() == {"state_dict", "callbacks"}


class Average(EMAWeightAveraging):
    """Shows its averages where the run is saved, and where it is resumed."""

    def __init__(self) -> None:
        super().__init__(decay=0.8)
        self.at_start: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.at_start = self.values()

    def values(self) -> dict[str, Tensor]:
        assert self._average_model is not None
        return {name: whole(value) for name, value in self._average_model.module.state_dict().items()}


class Collection(Callback):
    """A callback with state of its own: large and small, plain and sharded."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weight = pl_module.state_dict()["net.layers.0.up.weight"]
        self.state = {"shards": [{"of": weight * 3}], "large": torch.arange(MIN_EXTRA_BYTES), "small": torch.ones(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def trainer_with(sharding: str, callback: Callback, max_epochs: int) -> Trainer:
    return Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=AirStrategy(sharding),
            plugins=[AsyncUCCheckpointIO()],
            callbacks=[callback],
            max_epochs=max_epochs,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
    )


def batches(trainer: Trainer) -> Any:
    return loader(trainer.world_size, trainer.global_rank)


def save_averages(sharding: str, path: str) -> dict[str, Tensor]:
    average = Average()
    saved: dict[str, Tensor] = {}

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            saved.update(average.values())
            trainer.save_checkpoint(path)

    trainer = trainer_with(sharding, average, 1)
    trainer.callbacks.append(Save())
    torch.manual_seed(1)
    trainer.fit(Regression(), batches(trainer), batches(trainer))
    return saved


def resume_averages(sharding: str, path: str) -> dict[str, Tensor]:
    average = Average()
    trainer = trainer_with(sharding, average, 2)
    torch.manual_seed(2)
    trainer.fit(Regression(), batches(trainer), batches(trainer), ckpt_path=path)
    return average.at_start


@pytest.mark.parametrize("way", [("ddp", 2, "ddp", 1), ("fsdp", 2, "fsdp", 3), ("fsdp", 2, "ddp", 2)], ids=str)
def test_weight_averages_are_the_same_after_resuming(way: tuple[str, int, str, int], tmp_path: Path) -> None:
    saved_by, num_savers, loaded_by, num_loaders = way
    path = str(tmp_path / "averages.ckpt")
    saved = values(run_ranks(save_averages, num_savers, args=(saved_by, path)))[0]
    assert saved
    for found in values(run_ranks(resume_averages, num_loaders, args=(loaded_by, path))):
        assert same(found, saved)


def save_collection(sharding: str, path: str) -> Any:
    collection = Collection()
    trainer = trainer_with(sharding, collection, 1)
    torch.manual_seed(1)
    trainer.fit(Regression(), batches(trainer), batches(trainer))
    shards = whole(collection.state["shards"][0]["of"])
    trainer.save_checkpoint(path)
    trainer.strategy.checkpoint_io.teardown()
    return shards


def load_collection(sharding: str, path: str) -> Any:
    collection = Collection()
    trainer = trainer_with(sharding, collection, 2)
    found: dict[str, Any] = {}
    trainer.callbacks.append(OnSetup(lambda: found.update(collection.state)))
    trainer.fit(Regression(), batches(trainer), batches(trainer), ckpt_path=path)
    found["shards"] = whole(found["shards"][0]["of"])
    return found


class OnSetup(Callback):
    def __init__(self, call: Any) -> None:
        self.call = call

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.call()


@pytest.mark.parametrize("loaded_by", ["fsdp", "ddp"])
def test_what_a_callback_keeps_comes_back_whole_or_sharded(loaded_by: str, tmp_path: Path) -> None:
    path = str(tmp_path / "collection.ckpt")
    shards = values(run_ranks(save_collection, 2, args=("fsdp", path)))[0]
    for found in values(run_ranks(load_collection, 2, args=(loaded_by, path))):
        assert torch.equal(found["shards"], shards)
        assert torch.equal(found["large"], torch.arange(MIN_EXTRA_BYTES))
        assert torch.equal(found["small"], torch.ones(2))
