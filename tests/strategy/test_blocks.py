"""Which modules become blocks, for the shapes that models have; and what is done to their forward changes no result."""

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_air.strategy.blocks import (
    CONTAINERS,
    checkpoint_activations,
    choose_blocks,
    compile_forwards,
    find_modules,
    outermost_modules,
)
from tests.strategy.training import Block, Net, Regression

BLOCK_PARAMS = sum(param.numel() for param in Block(4).parameters())  # 76


class Model(nn.Module):
    """Holds whatever a test gives it; the root of most trees here."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Mixture(nn.Module):
    """A block that has a list inside."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(4, num_experts)
        self.experts = nn.ModuleList(Block(4) for _ in range(num_experts))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block(4) for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


class PretrainedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Block(4)


class PretrainedModel(nn.Module):
    """As Hugging Face does: the model names the classes that must stay whole."""

    def __init__(self, names: Any = ("PretrainedLayer",)) -> None:
        super().__init__()
        self._no_split_modules = names
        self.stem = nn.ModuleList(Block(4) for _ in range(2))
        self.first = PretrainedLayer()
        self.second = PretrainedLayer()


def blocks(*, num: int = 2) -> list[nn.Module]:
    return [Block(4) for _ in range(num)]


def compiled(module: nn.Module) -> nn.Module:
    result = torch.compile(module, backend="eager")
    assert isinstance(result, nn.Module)
    return result


def names(root: nn.Module, chosen: Sequence[nn.Module]) -> list[str]:
    name_of = {id(module): name for name, module in root.named_modules()}
    return [name_of[id(module)] for module in chosen]


# ---- the default policy ----------------------------------------------------------------------------------------------

DEFAULTS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a stack": (lambda: Net(num_blocks=3, width=4), ["layers.0", "layers.1", "layers.2"]),
    "a stack below the root": (Regression, ["net.layers.0", "net.layers.1", "net.layers.2"]),
    "two stacks": (
        lambda: Model(encoder=nn.ModuleList(blocks()), decoder=nn.ModuleList(blocks())),
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
    "a stack of two classes": (
        lambda: Model(layers=nn.ModuleList([Block(4), Mixture(), Block(4)])),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "experts inside of blocks": (
        lambda: Model(layers=nn.ModuleList([Mixture(), Mixture()])),
        ["layers.0", "layers.1"],
    ),
    "a Sequential of composites": (lambda: Model(net=nn.Sequential(*blocks(num=3))), ["net.0", "net.1", "net.2"]),
    "a Sequential of composites between plain layers": (
        lambda: Model(net=nn.Sequential(nn.Linear(2, 4), *blocks(), nn.Linear(4, 1))),
        ["net.1", "net.2"],
    ),
    "stages": (
        lambda: Model(stages=nn.ModuleList([nn.Sequential(*blocks()), nn.Sequential(*blocks())])),
        ["stages.0", "stages.1"],
    ),
    "lists in a list have no forward: their modules": (
        lambda: Model(down=nn.ModuleList([nn.ModuleList(blocks()), nn.ModuleList(blocks())])),
        ["down.0.0", "down.0.1", "down.1.0", "down.1.1"],
    ),
    "dicts in a list": (
        lambda: Model(
            layers=nn.ModuleList([nn.ModuleDict({"a": Block(4), "act": nn.ReLU(), "b": Mixture()}) for _ in range(2)])
        ),
        ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"],
    ),
    "a plain MLP": (lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), []),
    "a plain MLP below the root": (
        lambda: Model(mlp=nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1), nn.ReLU())),
        [],
    ),
    "one layer is no stack": (lambda: Model(layers=nn.ModuleList(blocks(num=1))), []),
    "layers of different classes are no stack": (lambda: Model(layers=nn.ModuleList([Block(4), nn.Linear(4, 1)])), []),
    "a stack without parameters": (lambda: Model(layers=nn.ModuleList([nn.ReLU(), nn.ReLU()])), []),
    "no parameters at all": (lambda: Model(act=nn.ReLU()), []),
    "no children": (lambda: nn.Linear(2, 2), []),
    "compiled layers stand for what is inside": (
        lambda: Model(layers=nn.ModuleList([compiled(Block(4)), compiled(Block(4)), Block(4)])),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "inside of a compiled model": (
        lambda: Model(net=compiled(Net(num_blocks=2, width=4))),
        ["net._orig_mod.layers.0", "net._orig_mod.layers.1"],
    ),
    "the model names classes": (PretrainedModel, ["first", "second"]),
    "a part of the model names classes": (lambda: Model(bert=PretrainedModel()), ["bert.first", "bert.second"]),
    "the model names none": (lambda: PretrainedModel(None), ["stem.0", "stem.1"]),
    "the model names classes that it lacks": (lambda: PretrainedModel(["Gone"]), ["stem.0", "stem.1"]),
    "the model names classes, compiled": (
        lambda: Model(bert=PretrainedModel(), more=compiled(PretrainedLayer())),
        ["bert.first", "bert.second", "more"],
    ),
    "tied embeddings": (lambda: Model(lm=Tied()), ["lm.layers.0", "lm.layers.1"]),
}


@pytest.mark.parametrize(("build", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_default_blocks(build: Callable[[], nn.Module], expected: list[str]) -> None:
    model = build()
    assert names(model, choose_blocks(model)) == expected


# ---- shared parameters -----------------------------------------------------------------------------------------------


def test_a_block_that_shares_a_parameter_is_left_to_its_parent() -> None:
    model = Model(lm=Tied())
    assert names(model, choose_blocks(model, ["Embedding", "Block"])) == ["lm.layers.0", "lm.layers.1"]
    first, second, third = Block(4), Block(4), Block(4)
    first.up.weight = third.up.weight
    model = Model(layers=nn.ModuleList([first, second, third]))
    assert choose_blocks(model) == [second]


def test_a_block_that_holds_all_uses_of_a_shared_parameter_is_one() -> None:
    model = Model(lm=Tied(), out=nn.Linear(4, 1))
    assert names(model, choose_blocks(model, [Tied])) == ["lm"]


def test_blocks_that_share_a_submodule_are_left_to_their_parent() -> None:
    # T5's encoder and decoder hold one embedding; FSDP2 dies of a parameter that two blocks want to gather.
    class Reader(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared
            self.own = nn.Linear(4, 4)

    shared = nn.Linear(4, 4)
    model = Model(layers=nn.ModuleList([Reader(shared), Reader(shared), Reader(nn.Linear(4, 4))]))
    assert names(model, choose_blocks(model)) == ["layers.2"]
    assert names(model, choose_blocks(model, [nn.Linear])) == [
        "layers.0.shared",  # itself it is in one place only
        "layers.0.own",
        "layers.1.own",
        "layers.2.shared",
        "layers.2.own",
    ]


def test_an_alias_of_a_block_does_not_share_it() -> None:
    layers = nn.ModuleList(blocks())
    assert choose_blocks(Model(first=layers[0], layers=layers)) == list(layers)


# ---- by class --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [[Block], ["Block"], [f"{Block.__module__}.Block"], [Block, "Block"]],
    ids=["type", "name", "dotted name", "twice"],
)
def test_wrap_by_class(wrap: list[Any]) -> None:
    model = Net(num_blocks=2)
    assert names(model, choose_blocks(model, wrap)) == ["layers.0", "layers.1"]


def test_wrap_by_type_takes_subclasses_and_by_name_does_not() -> None:
    class Wide(Block):
        pass

    model = Model(a=Wide(4), b=Block(4))
    assert names(model, choose_blocks(model, [Block])) == ["a", "b"]
    assert names(model, choose_blocks(model, ["Block"])) == ["b"]


def test_inner_blocks_come_before_outer_ones() -> None:
    model = Net(num_blocks=1)
    expected = ["layers.0.up", "layers.0.down", "layers.0"]
    assert names(model, choose_blocks(model, ["Block", f"{nn.Linear.__module__}.Linear"])) == ["inp", *expected, "out"]


def test_wrap_of_a_compiled_class_takes_the_shell() -> None:
    # Its hooks must stay outside of the graph.
    model = Model(layers=nn.ModuleList([compiled(Block(4)), Block(4)]))
    for wrap in (["Block"], [Block]):
        assert names(model, choose_blocks(model, wrap)) == ["layers.0", "layers.1"]


@pytest.mark.parametrize("name", ["Blok", "tests.strategy.training.Blok", nn.LSTM])
def test_wrap_that_matches_nothing_lists_what_is_there(name: Any) -> None:
    model = Model(layers=nn.ModuleList([compiled(Block(4))]))
    shown = "LSTM" if name is nn.LSTM else name
    with pytest.raises(ValueError, match="no module of that class") as error:
        choose_blocks(model, ["Block", name])
    assert str(error.value) == (
        f"wrap names {shown!r}, but the model has no module of that class. It has: Block, Linear, Model, ModuleList."
    )


@pytest.mark.parametrize("name", ["Model", "ModuleList", "ReLU"], ids=["the root", "a container", "no parameters"])
def test_wrap_that_can_have_no_effect_is_refused(name: str) -> None:
    model = Model(layers=nn.ModuleList(blocks()), act=nn.ReLU())
    with pytest.raises(ValueError, match=f"wrap names {name}, but nothing that can be a block: .* Name the classes"):
        choose_blocks(model, [name])


# ---- by size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_num_params", "expected"),
    [
        (1, ["inp", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "out"]),
        (5, ["inp", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "out"]),
        (37, ["layers.0.up", "layers.1.up"]),  # the remainder of each layer, 36, is too small
        (BLOCK_PARAMS, ["layers.0", "layers.1"]),
        (BLOCK_PARAMS + 1, []),  # together they are enough, and the root is that block
    ],
)
def test_wrap_by_size(min_num_params: int, expected: list[str]) -> None:
    model = Net(num_blocks=2, width=4)
    assert names(model, choose_blocks(model, min_num_params)) == expected


def test_a_remainder_that_is_large_enough_is_a_block() -> None:
    layer = Block(4)
    model = Model(layer=layer, other=nn.Linear(4, 4))
    assert names(model, choose_blocks(model, 36)) == ["layer.up", "layer.down"]
    layer.extra = nn.Parameter(torch.zeros(36))
    assert names(model, choose_blocks(model, 36)) == ["layer.up", "layer.down", "layer"]


def test_by_size_a_compiled_module_is_taken_by_its_shell() -> None:
    model = Model(layers=nn.ModuleList([compiled(Block(4)), Block(4)]), out=nn.Linear(4, 1))
    assert names(model, choose_blocks(model, BLOCK_PARAMS)) == ["layers.0", "layers.1"]


def test_by_size_a_shared_parameter_counts_once_and_goes_to_the_module_that_holds_all_uses() -> None:
    # Given embedding and head of the same 40 parameters, beside two layers of 40 + 36 each.
    model = Model(lm=Tied(), out=nn.Linear(4, 1))
    # Then neither of the two is a block, and what they share is part of the first module that holds both.
    assert names(model, choose_blocks(model, 40)) == ["lm.layers.0.up", "lm.layers.1.up", "lm"]
    assert names(model, choose_blocks(model, 40 + 2 * BLOCK_PARAMS)) == ["lm"]
    assert choose_blocks(model, 40 + 2 * BLOCK_PARAMS + 1) == []


def test_wrap_larger_than_the_model() -> None:
    model = Net(num_blocks=2, width=4)
    total = sum(param.numel() for param in model.parameters())
    assert choose_blocks(model, total) == []
    with pytest.raises(ValueError, match="the whole model has") as error:
        choose_blocks(model, total + 1)
    assert f"wrap={total + 1} " in str(error.value)
    assert f"the whole model has {total}. Give a smaller number" in str(error.value)


# ---- laws ------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A module with a parameter of its own, a forward, and any children."""

    def __init__(self, own: int, children: Sequence[nn.Module]) -> None:
        super().__init__()
        if own:
            self.own = nn.Parameter(torch.zeros(own))
        for index, child in enumerate(children):
            self.add_module(f"part{index}", child)


class Even(Odd):
    pass


def _composites(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    some = st.lists(children, max_size=3)
    return st.one_of(
        st.builds(Odd, st.integers(0, 9), some),
        st.builds(Even, st.integers(0, 9), some),
        some.map(nn.ModuleList),
        some.map(lambda parts: nn.ModuleDict({f"k{index}": part for index, part in enumerate(parts)})),
        some.map(lambda parts: nn.Sequential(*parts)),
    )


LEAVES = st.one_of(st.integers(1, 9).map(lambda size: nn.Linear(size, 1, bias=False)), st.builds(nn.ReLU))
TREES = st.recursive(LEAVES, _composites, max_leaves=12)
ROOTS = st.builds(Odd, st.integers(0, 9), st.lists(TREES, min_size=1, max_size=3))


@st.composite
def roots_that_share(draw: st.DrawFn) -> nn.Module:
    """A tree in which some modules and some parameters are in two places."""
    root = draw(ROOTS)
    for index in range(draw(st.integers(0, 2))):
        modules = [module for module in root.modules() if not isinstance(module, CONTAINERS)]
        receiver = draw(st.sampled_from(modules))
        given = draw(st.sampled_from(list(root.modules())))
        params = list(root.parameters())
        if receiver not in set(given.modules()):
            receiver.add_module(f"shared{index}", given)
        elif params:
            receiver.register_parameter(f"tied{index}", draw(st.sampled_from(params)))
    return root


def assert_is_an_order(root: nn.Module, chosen: list[nn.Module]) -> None:
    """Inner before outer, each once, never the root, and each can be gathered by its own forward."""
    assert root not in chosen
    assert len({id(block) for block in chosen}) == len(chosen)
    place = {id(block): index for index, block in enumerate(chosen)}
    for block in chosen:
        assert not isinstance(block, CONTAINERS)
        assert any(True for _ in block.parameters())
        for inner in block.modules():
            assert inner is block or place.get(id(inner), -1) < place[id(block)]


def assert_no_parameter_is_in_and_outside_of_a_block(root: nn.Module, chosen: list[nn.Module]) -> None:
    for block in chosen:
        inside = {id(param) for param in block.parameters()}
        outside: set[int] = set()

        def visit(module: nn.Module, block: nn.Module = block, outside: set[int] = outside) -> None:
            if module is not block:
                outside.update(id(param) for param in module.parameters(recurse=False))
                for child in module.children():
                    visit(child)

        visit(root)
        assert not inside & outside


WRAPS = st.one_of(
    st.none(),
    st.integers(1, 30),
    st.lists(st.sampled_from(["Linear", "Odd", "Even", "Sequential", nn.Linear, Even]), min_size=1, max_size=3),
)


@given(root=roots_that_share(), wrap=WRAPS)
def test_blocks_are_an_order_of_whole_parameters(root: nn.Module, wrap: Any) -> None:
    try:
        chosen = choose_blocks(root, wrap)
    except ValueError:
        assert wrap is not None
        return
    assert_is_an_order(root, chosen)
    assert_no_parameter_is_in_and_outside_of_a_block(root, chosen)
    assert choose_blocks(root, wrap) == chosen


@given(root=ROOTS, min_num_params=st.integers(1, 30))
def test_blocks_by_size_are_large_enough_and_the_rest_is_too_small(root: nn.Module, min_num_params: int) -> None:
    total = sum(param.numel() for param in root.parameters())
    if total < min_num_params and total > 0:
        with pytest.raises(ValueError, match="asks for blocks of at least that many parameters"):
            choose_blocks(root, min_num_params)
        return
    chosen = choose_blocks(root, min_num_params)
    taken: set[int] = set()
    for block in chosen:
        new = {id(param): param.numel() for param in block.parameters() if id(param) not in taken}
        assert sum(new.values()) >= min_num_params
        taken |= set(new)
    for module in root.modules():
        if module is not root and not isinstance(module, CONTAINERS):
            assert sum(param.numel() for param in module.parameters() if id(param) not in taken) < min_num_params


@given(root=ROOTS)
def test_default_blocks_do_not_nest(root: nn.Module) -> None:
    chosen = choose_blocks(root)
    inside = {id(inner) for block in chosen for inner in block.modules() if inner is not block}
    assert not inside & {id(block) for block in chosen}


@given(root=ROOTS)
def test_outermost_modules_hold_every_parameter_but_the_roots_own(root: nn.Module) -> None:
    outermost = outermost_modules(root)
    own = {id(param) for param in root.parameters(recurse=False)}
    held = [id(param) for module in outermost for param in module.parameters()]
    assert not any(isinstance(module, CONTAINERS) for module in outermost)
    assert sorted(held) == sorted({id(param) for param in root.parameters()} - own)


# ---- find_modules ----------------------------------------------------------------------------------------------------


def test_find_modules_includes_the_root() -> None:
    model = Net(num_blocks=1)
    assert find_modules(model, ["Net"], option="wrap") == [model]


def test_find_modules_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"^activation_checkpointing names 'Gone'"):
        checkpoint_activations(Net(), ["Gone"])


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Counts how often its forward runs, recomputation included."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.block = Block(width)
        self.num_calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.num_calls += 1
        result: Tensor = self.block(x) * scale
        return result


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Counted()
        self.second = Counted()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x, scale=0.5)))
        return result


def pair() -> tuple[Pair, Tensor]:
    torch.manual_seed(3)
    return Pair(), torch.randn(5, 4)


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    module(x).square().sum().backward()
    return {name: param.grad.clone() for name, param in module.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("names", [["Counted"], [Counted, "Block"], [f"{__name__}.Counted", "Linear"]])
def test_gradients_are_identical(names: list[Any]) -> None:
    module, x = pair()
    expected = gradients(module, x)
    checkpoint_activations(module, names)
    found = gradients(module, x)
    assert found.keys() == expected.keys() == dict(module.named_parameters()).keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("num_times", [0, 1, 2])
def test_activations_are_recomputed_once_however_often_it_was_asked_for(num_times: int) -> None:
    module, x = pair()
    for _ in range(num_times):
        checkpoint_activations(module, ["Counted"])
    gradients(module, x)
    assert (module.first.num_calls, module.second.num_calls) == ((1, 1) if num_times == 0 else (2, 2))


def test_activations_are_not_kept() -> None:
    def kept_bytes(module: nn.Module, x: Tensor) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x).sum()
        return sum(sizes.values())

    module, _ = pair()
    x = torch.randn(1000, 4)
    before = kept_bytes(module, x)
    checkpoint_activations(module, ["Counted"])
    assert kept_bytes(module, x) < before / 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_not_recomputed(context: Callable[[], Any]) -> None:
    module, x = pair()
    expected = module(x)
    checkpoint_activations(module, ["Counted"])
    module.first.num_calls = 0
    with context():
        assert torch.equal(module(x), expected)
    assert module.first.num_calls == 1


def test_checkpoints_of_the_model_stay_as_they_are() -> None:
    module, x = pair()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    checkpoint_activations(module, ["Counted", "Block"])
    state = module.state_dict()
    assert list(state) == list(expected)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert all(torch.equal(copied[name], tensor) for name, tensor in expected.items())
    plain, _ = pair()
    plain.load_state_dict(state)
    assert torch.equal(plain(x), module(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_model_runs_on_its_own_weights(duplicate: Callable[[Pair], Pair]) -> None:
    # Weight averaging copies the model; a forward that stayed bound to the first one would train silently wrong.
    module, x = pair()
    checkpoint_activations(module, ["Counted"])
    twin = duplicate(module)
    assert torch.equal(twin(x), module(x))
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert torch.equal(twin(x), torch.tanh(x * 0.5))  # what the residual connections let through
    assert not torch.equal(module(x), twin(x))
    twin.first.num_calls = twin.second.num_calls = 0
    checkpoint_activations(twin, ["Counted"])
    gradients(twin, x)
    assert (twin.first.num_calls, twin.second.num_calls) == (2, 2)


def test_dropout_draws_the_same_numbers_again() -> None:
    linear = nn.Linear(4, 64)
    layer = nn.Sequential(linear, nn.Dropout(0.5))
    checkpoint_activations(Model(layer=layer), ["Sequential"])
    out = layer(torch.ones(1, 4))
    out.sum().backward()
    assert linear.weight.grad is not None
    assert torch.equal(linear.weight.grad.ne(0).any(dim=1), out[0].ne(0))


def test_the_inside_of_a_compiled_module_is_checkpointed() -> None:
    inner = Counted()
    shell = compiled(inner)
    checkpoint_activations(Model(block=shell), ["Counted"])
    x = torch.randn(5, 4)
    assert torch.allclose(shell(x), inner(x))
    inner.num_calls = 0
    gradients(inner, x)
    assert inner.num_calls == 2


# ---- compilation -----------------------------------------------------------------------------------------------------


def test_forwards_are_compiled_once() -> None:
    module, x = pair()
    expected = module(x)
    seen: list[Any] = []

    def compiler(forward: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(forward)
        return functools.partial(forward)

    compile_forwards([module.first], compiler)
    compile_forwards([module.first, module.second], compiler)
    assert [forward.__self__ for forward in seen] == [module.first, module.second]
    assert torch.equal(module(x), expected)
    assert list(module.state_dict()) == list(Pair().state_dict())


def test_a_compiled_forward_is_not_checkpointed_again() -> None:
    # Given a fit that checkpoints and compiles; when trainer.test sets up again, nothing is put around it.
    module, _ = pair()
    checkpoint_activations(module, ["Counted"])
    compile_forwards([module.first], lambda forward: torch.compile(forward, backend="eager"))
    forwards = [module.first.forward, module.second.forward]
    checkpoint_activations(module, ["Counted"])
    assert [module.first.forward, module.second.forward] == forwards


# Dynamo looks at the gradient of the second block's input, which torch warns about.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_and_checkpointed_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # torch.fx makes a progress bar, and it a thread for ever
    module, x = pair()
    expected = gradients(module, x)
    checkpoint_activations(module, ["Block"])
    compile_forwards([module.first.block, module.second.block], lambda f: torch.compile(f, backend="eager"))
    found = gradients(module, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
