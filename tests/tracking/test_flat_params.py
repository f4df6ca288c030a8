"""Nested hyperparameters become one text per path, as in Lightning's loggers, and nothing gets lost or raises."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict

from lightning_air.tracking.flat_params import flatten_params

law = settings(derandomize=True, deadline=None, database=None)


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class Model:
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: list[Optimizer] = field(default_factory=lambda: [Optimizer(1), Optimizer(2)])


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class MissingValue(Mapping[str, Any]):
    """As an OmegaConf mapping with a mandatory value that is missing."""

    def __getitem__(self, key: str) -> Any:
        if key == "missing":
            raise LookupError(key)
        return {"here": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["here", "missing"])

    def __len__(self) -> int:
        return 2


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), min_size=1)
trees = st.recursive(
    leaves,
    lambda part: (
        st.dictionaries(st.text("abc", min_size=1, max_size=3) | st.integers(), part, min_size=1, max_size=3)
        | st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=2), part, min_size=1), min_size=1, max_size=2)
    ),
    max_leaves=8,
)


@law
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), trees, max_size=4))
def test_same_as_lightning(params: dict[str, Any]) -> None:
    # Lightning calls an attribute or number of the same spelling by one name; ours are told apart.
    expected = {name: str(value) for name, value in _flatten_dict(_convert_params(params)).items()}
    flat = flatten_params(params)
    assert expected.keys() <= flat.keys()
    if len(flat) == len(expected):
        assert flat == expected


def test_namespaces_and_dataclasses_are_taken_apart() -> None:
    expected = {
        "model/optimizer/lr": "0.1",
        "model/optimizer/betas": "(0.9, 0.99)",
        "model/layers/0/lr": "1",
        "model/layers/0/betas": "(0.9, 0.99)",
        "model/layers/1/lr": "2",
        "model/layers/1/betas": "(0.9, 0.99)",
    }
    assert flatten_params({"model": Model()}) == expected
    assert flatten_params(Namespace(model=Model())) == expected
    assert flatten_params(Model()) == {name.removeprefix("model/"): text for name, text in expected.items()}
    assert flatten_params(MappingProxyType({"model": MappingProxyType(vars(Model()))})) == expected


def test_empty_ones_are_kept() -> None:
    assert flatten_params({"callbacks": [], "extra": {}, "deep": {"none": None}}) == {
        "callbacks": "[]",
        "extra": "{}",
        "deep/none": "None",
    }
    assert flatten_params({}) == flatten_params(None) == {}


def test_two_paths_of_one_spelling_are_both_kept() -> None:
    assert flatten_params({"a": {"b": 1}, "a/b": 2, 5: "x", "5": "y"}) == {
        "a/b": "1",
        "a/b'": "2",
        "5": "x",
        "5'": "y",
    }


def test_nothing_raises() -> None:
    cycle: dict[str, Any] = {"x": 1}
    cycle["self"] = cycle
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"d": deep}
    flat = flatten_params({"broken": Broken(), "config": MissingValue(), "cycle": cycle, "deep": deep})
    assert flat["broken"] == "<Broken: RuntimeError in its __str__>"
    assert flat["config/missing"] == "<LookupError>"
    assert flat["config/here"] == flat["cycle/x"] == "1"
    assert flat["cycle/self"] == "{'x': 1, 'self': {...}}"
    assert next(text for name, text in flat.items() if name.startswith("deep/")) == (
        "<dict: RecursionError in its __str__>"
    )


def test_tensor_is_not_copied_and_a_class_is_a_value() -> None:
    flat = flatten_params({"weight": torch.ones(2), "model": Optimizer})
    assert flat["weight"] == "tensor([1., 1.])"
    assert flat["model"].startswith("<class ")


@pytest.mark.parametrize("params", [[1], "lr=1", 3])
def test_what_has_no_names_is_refused(params: object) -> None:
    with pytest.raises(TypeError, match=r"must be a mapping, a namespace or a dataclass, got \w+. Pass a dict"):
        flatten_params(params)
