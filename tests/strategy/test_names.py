"""A checkpoint names the model's weights as its code does, and what is loaded gets the module's own names back."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_air.strategy.names import checkpoint_name, noted, with_own_names


class Model(nn.Module):
    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        first = nn.Linear(2, 2)
        self.first = torch.compile(first, backend="eager") if compiled else first
        self.second = nn.BatchNorm1d(2)  # has buffers


NAMES = list(Model(compiled=False).state_dict())


def checkpoint_of(model: nn.Module) -> dict[str, Any]:
    """As a callback such as weight averaging leaves it: two sets of weights, and what only looks like one."""
    some = {name: value + 1 for name, value in model.state_dict().items() if "first" in name}
    return {
        "state_dict": model.state_dict(),
        "current_model_state": {name: value + 1 for name, value in model.state_dict().items()},
        "some_of_the_weights": some,
        "callbacks": {"Some": {"first.weight": 1}},
        "hyper_parameters": {"first.weight": 1, "learning_rate": 2},
        "loops": {},
        "epoch": 3,
    }


def test_what_a_checkpoint_calls_a_parameter() -> None:
    assert checkpoint_name("net._orig_mod.layers.0._orig_mod.weight") == "net.layers.0.weight"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_holds_no_trace_of_compilation(compiled: bool) -> None:
    model = Model(compiled=compiled)
    given = checkpoint_of(model)
    kept = noted(given, model, [torch.optim.SGD(model.parameters())])
    assert list(kept["state_dict"]) == list(kept["current_model_state"]) == NAMES
    assert list(kept["some_of_the_weights"]) == ["first.weight", "first.bias"]
    assert kept["state_dict"]["first.weight"].data_ptr() == next(model.parameters()).data_ptr()
    parameters = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert kept["lightning_air"] == {"parameter_names": [[parameters]]}
    unchanged = given.keys() - {"state_dict", "current_model_state", "some_of_the_weights"}
    assert all(kept[key] is given[key] for key in unchanged)


def test_parameters_that_are_not_the_models_have_names_and_notes_are_kept() -> None:
    model, own = Model(compiled=False), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [own]}, {"params": [model.second.weight, own][:1]}], lr=0.1)
    kept = noted({"lightning_air": {"version": 1}}, model, [optimizer])
    assert kept == {"lightning_air": {"version": 1, "parameter_names": [[["unnamed.0.0"], ["second.weight"]]]}}


@pytest.mark.parametrize("saved_compiled", [False, True])
@pytest.mark.parametrize("loaded_compiled", [False, True])
@pytest.mark.parametrize("noted_before", [False, True])
def test_a_checkpoint_loads_into_the_model_compiled_or_not(
    saved_compiled: bool, loaded_compiled: bool, noted_before: bool
) -> None:
    saving, loading = Model(compiled=saved_compiled), Model(compiled=loaded_compiled)
    given = checkpoint_of(saving)
    loaded = with_own_names(noted(given, saving, []) if noted_before else given, loading)
    loading.load_state_dict(loaded["current_model_state"])
    assert loaded["some_of_the_weights"].keys() < loading.state_dict().keys()
    loading.load_state_dict(loaded["state_dict"])
    for mine, theirs in zip(loading.parameters(), saving.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert loaded["hyper_parameters"] is given["hyper_parameters"]
    assert loaded["callbacks"] is given["callbacks"]
    assert loaded["epoch"] == 3


def test_weights_that_the_model_lacks_keep_their_names() -> None:
    loaded = with_own_names({"state_dict": {"first.weight": 1, "third.weight": 2}}, Model(compiled=True))
    assert loaded == {"state_dict": {"first._orig_mod.weight": 1, "third.weight": 2}}
