"""What one strategy saved, every other loads: model, buffers and optimizers are the same to the last bit.

Compared is what a run has when it starts to train again, gathered whole, with what the run that saved had in that
moment. Whoever saves or loads: stock Lightning with our CheckpointIO, AirStrategy under every sharding and on other
numbers of ranks, and, without our CheckpointIO, stock Lightning's own checkpoints into ours and ours into stock
Lightning, its consolidation utility and plain `dcp.load`.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_air import AirStrategy, AsyncUCCheckpointIO
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

Way = tuple[str, int]  # a kind of strategy, and how many ranks

SAVERS: list[Way] = [
    ("single", 1),
    ("stock_ddp", 2),
    ("ddp", 1),
    ("ddp", 2),
    ("fsdp", 2),
    ("fsdp", 3),
    ("hsdp", 4),
]
LOADERS: list[Way] = [
    ("single", 1),
    ("stock_ddp", 2),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 4),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("hsdp", 4),
]
VARIANTS = ["sgd", "momentum", "several", "unused"]


def label(way: Way) -> str:
    return f"{way[0]}{way[1]}"


# ---- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Odd(LightningModule):
    """Nothing divides evenly: some ranks' shards are empty. One part is frozen, and there are two parameter groups."""

    def __init__(self, variant: str = "adam") -> None:
        super().__init__()
        self.variant = variant
        self.automatic_optimization = variant != "several"
        self.inp = nn.Linear(3, 7)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.out: Any = nn.Linear(7, 1)
        self.has_scale = variant not in ("several", "stock")  # there the root may hold no parameter itself
        if self.has_scale:
            self.scale = nn.Parameter(torch.ones(1))
        if variant == "unused":
            self.extra = nn.Linear(2, 2)
        if variant == "compiled":
            self.out = torch.compile(self.out, backend="eager")  # for its names; `fit` has it run as it is

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        x = self.out(self.frozen(x))
        return x * self.scale if self.has_scale else x

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self(batch[0]).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self(batch[0]).square().mean())
            optimizer.step()
        return None

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        late = [*self.out.parameters()]
        early = [param for param in self.parameters() if not any(param is other for other in late)]
        groups = [{"params": early, "lr": 0.01}, {"params": late, "lr": 0.02}]
        if self.variant in ("sgd", "momentum"):
            return torch.optim.SGD(groups, momentum=0.9 if self.variant == "momentum" else 0.0)
        if self.variant == "several":
            return [torch.optim.Adam(early, lr=0.01, amsgrad=True), torch.optim.SGD(late, lr=0.02, momentum=0.5)]
        optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Wrapped(Odd):
    """As a user of stock ModelParallelStrategy writes it, which does not go through the root's forward."""

    def configure_model(self) -> None:
        if not isinstance(self.inp.weight, DTensor):
            for block in (self.inp, *self.layers, self.frozen, self.out):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


# ---- what a run has, whole -------------------------------------------------------------------------------------------


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def begun(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state without parameters that were never stepped: some strategies begin them with zeros, some when needed."""
    return {
        param: fields
        for param, fields in optimizer.state.items()
        if any(isinstance(value, Tensor) and whole(value).any() for value in fields.values())
    }


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Everything by name. Collective."""
    names = {id(param): name.replace("_orig_mod.", "") for name, param in module.named_parameters()}
    return {
        "model": {name.replace("_orig_mod.", ""): whole(value) for name, value in module.state_dict().items()},
        "optimizers": [
            {names[id(param)]: {key: whole(value) for key, value in fields.items()} for param, fields in states.items()}
            for states in (begun(optimizer) for optimizer in trainer.optimizers)
        ],
        "groups": [
            [{**group, "params": [names[id(param)] for param in group["params"]]} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
    }


def difference(left: Any, right: Any, path: str = "") -> str | None:
    """The first place where two states are not the same to the last bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        is_same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    elif isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next((found for key in left if (found := difference(left[key], right[key], f"{path}.{key}"))), None)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for at, pair in pairs if (found := difference(*pair, f"{path}.{at}"))), None)
    else:
        is_same = type(left) is type(right) and left == right
    return None if is_same else f"{path}: {left} and {right}"


class SaveAfterAnEpoch(Callback):
    def __init__(self, path: str, **options: Any) -> None:
        self.path = path
        self.options = options
        self.state: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = state_of(trainer, pl_module)
        trainer.save_checkpoint(self.path, **self.options)


class NoteAtTheStart(Callback):
    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = state_of(trainer, pl_module)


def trainer_for(
    kind: str, num_ranks: int, callback: Callback, variant: str, max_epochs: int, **options: Any
) -> Trainer:
    strategies: dict[str, Callable[[], Any]] = {
        "single": lambda: "auto",
        "stock_ddp": lambda: DDPStrategy(process_group_backend="gloo", find_unused_parameters=variant == "unused"),
        "stock_fsdp": partial(
            ModelParallelStrategy, data_parallel_size=num_ranks, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        "ddp": lambda: AirStrategy("ddp", find_unused_parameters=variant in ("unused", "several") or None),
        "fsdp": lambda: AirStrategy("fsdp"),
        "hsdp": lambda: AirStrategy("hsdp"),
    }
    stock = {"devices": num_ranks} if kind.startswith("stock") else {}
    if kind == "stock_fsdp":
        stock["limit_val_batches"] = 0  # a forward without a backward leaves its root gathered
    return Trainer(
        **fast_trainer_kwargs(
            Path.cwd(),
            strategy=strategies[kind](),
            callbacks=[callback],
            max_epochs=max_epochs,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            **{"plugins": [AsyncUCCheckpointIO()], **stock, **options},
        )
    )


def batches(trainer: Trainer) -> DataLoader:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(trainer.global_rank))
    return DataLoader(TensorDataset(x), batch_size=4)


def fit(trainer: Trainer, module: LightningModule, seed: int, **options: Any) -> None:
    torch.manual_seed(seed)
    torch.compiler.set_stance("force_eager")
    trainer.fit(module, batches(trainer), batches(trainer), **options)


def save(way: Way, folder: str, variants: list[str]) -> dict[str, Any]:
    states = {}
    for variant in variants:
        note = SaveAfterAnEpoch(f"{folder}/{label(way)}-{variant}.ckpt")
        torch.manual_seed(1)
        trainer = trainer_for(*way, note, variant, 1)
        fit(trainer, Odd(variant), 1)
        states[f"{label(way)}-{variant}"] = note.state
    return states


def load(way: Way, folder: str, names: list[str]) -> dict[str, Any]:
    states = {}
    for name in names:
        note = NoteAtTheStart()
        variant = name.partition("-")[2]
        torch.manual_seed(2)
        module = Odd(variant)
        try:
            fit(trainer_for(*way, note, variant, 2), module, 2, ckpt_path=f"{folder}/{name}.ckpt")
        except Exception as error:
            raise RuntimeError(f"{label(way)} cannot load {name}") from error
        states[name] = note.state
    return states


def in_ranks(call: Callable[..., Any], way: Way, *args: Any) -> Any:
    """Return what each rank returns."""
    nodes = 2 if way[0] == "hsdp" else 1
    return values(run_ranks(call, way[1], args=(way, *args), nodes=nodes, timeout_seconds=120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


_saved: dict[tuple[Way, str], Any] = {}


def saved_by(way: Way, folder: Path, variants: list[str]) -> dict[str, Any]:
    """Save once, and return what rank 0 had."""
    lacking = [variant for variant in variants if (way, variant) not in _saved]
    if lacking:
        states = in_ranks(save, way, str(folder), lacking)[0]
        _saved.update({(way, variant): states[f"{label(way)}-{variant}"] for variant in lacking})
    return {f"{label(way)}-{variant}": _saved[way, variant] for variant in variants}


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for global_rank, states in enumerate(found):
        assert states.keys() == expected.keys()
        for name, state in states.items():
            assert expected[name]["model"]
            assert difference(state, expected[name], name) is None, f"rank {global_rank}"


# ---- the matrix ------------------------------------------------------------------------------------------------------


def check_loading(loader: Way, savers: list[Way], folder: Path, variants: list[str]) -> None:
    expected: dict[str, Any] = {}
    for saver in savers:
        expected |= saved_by(saver, folder, variants)
    assert_same(in_ranks(load, loader, str(folder), list(expected)), expected)


@pytest.mark.parametrize(("index", "loader"), list(enumerate(LOADERS)), ids=map(label, LOADERS))
def test_every_strategy_loads_and_what_every_strategy_saved_is_loaded(index: int, loader: Way, folder: Path) -> None:
    # Of each loader's row two cells, so that each column has two or three.
    check_loading(loader, [SAVERS[index % 7], SAVERS[(index + 4) % 7]], folder, ["adam"])


@pytest.mark.soak
@pytest.mark.parametrize("loader", LOADERS, ids=label)
def test_every_strategy_loads_what_every_other_saved(loader: Way, folder: Path) -> None:
    check_loading(loader, SAVERS, folder, ["adam"])


@pytest.mark.parametrize("loader", [("single", 1), ("ddp", 2), ("fsdp", 3)], ids=label)
def test_optimizers_and_models_of_other_kinds(loader: Way, folder: Path) -> None:
    check_loading(loader, [("single", 1), ("ddp", 2), ("fsdp", 2)], folder, VARIANTS)


@pytest.mark.parametrize(
    ("loader", "savers"),
    [
        (("single", 1), [("single", 1)]),
        # Stock Lightning names parameters as `torch.compile` does, AirStrategy as the model does, and reads both.
        (("ddp", 2), [("single", 1), ("ddp", 2), ("fsdp", 2)]),
        (("fsdp", 3), [("single", 1), ("ddp", 2), ("fsdp", 2)]),
    ],
    ids=str,
)
def test_a_compiled_submodule(loader: Way, savers: list[Way], folder: Path) -> None:
    check_loading(loader, savers, folder, ["compiled"])


class OtherGroups(Odd):
    """The same parameters, in groups of other sizes."""

    def configure_optimizers(self) -> Any:
        params = [*self.parameters()]
        return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}])


def load_into_other_groups(way: Way, path: str) -> str:
    with pytest.raises(ValueError, match="in its groups") as caught:
        fit(trainer_for(*way, NoteAtTheStart(), "adam", 2), OtherGroups(), 2, ckpt_path=path)
    return str(caught.value)


def test_numbered_parameters_of_other_groups_are_refused_with_the_counts(folder: Path) -> None:
    saved_by(("single", 1), folder, ["adam"])
    messages = in_ranks(load_into_other_groups, ("fsdp", 2), f"{folder}/single1-adam.ckpt")
    assert messages[0] == messages[1]
    assert "[17, 2]" in messages[0]
    assert "[3, 16]" in messages[0]


# ---- weights only ----------------------------------------------------------------------------------------------------


def save_weights(way: Way, path: str) -> dict[str, Any]:
    note = SaveAfterAnEpoch(path, weights_only=True)
    torch.manual_seed(1)
    fit(trainer_for(*way, note, "adam", 1), Odd(), 1)
    return note.state["model"]


def load_weights(way: Way, path: str) -> tuple[dict[str, Any], str]:
    class Note(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.state = state_of(trainer, pl_module)["model"]

    note = Note()
    trainer = trainer_for(*way, note, "adam", 1)
    trainer.validate(Odd(), batches(trainer), ckpt_path=path, verbose=False)
    with pytest.raises((KeyError, ValueError)) as caught:
        fit(trainer_for(*way, NoteAtTheStart(), "adam", 2), Odd(), 2, ckpt_path=path)
    return note.state, str(caught.value)


@pytest.mark.parametrize("saver", [("ddp", 2), ("fsdp", 2)], ids=label)
def test_weights_alone_can_be_validated_with_and_not_resumed_from(saver: Way, tmp_path: Path) -> None:
    path = str(tmp_path / "weights.ckpt")
    expected = in_ranks(save_weights, saver, path)[0]
    for loader in (("single", 1), ("fsdp", 2)):
        for state, message in in_ranks(load_weights, loader, path):
            assert difference(state, expected) is None
            assert "optimizer" in message


# ---- checkpoints of stock Lightning ----------------------------------------------------------------------------------


def save_stock(way: Way, folder: str, variants: list[str]) -> dict[str, Any]:
    states = {}
    for variant in variants:
        note = SaveAfterAnEpoch(f"{folder}/{label(way)}-{variant}.ckpt")
        torch.manual_seed(1)
        module = Wrapped(variant) if way[0] == "stock_fsdp" else Odd(variant)
        fit(trainer_for(*way, note, variant, 1, plugins=None), module, 1)
        states[f"{label(way)}-{variant}"] = note.state
    return states


def test_single_files_of_stock_lightning(tmp_path: Path) -> None:
    variants = ["adam", "sgd", "several", "compiled", "unused"]
    expected = in_ranks(save_stock, ("single", 1), str(tmp_path), variants)[0]
    assert all((tmp_path / f"{name}.ckpt").is_file() for name in expected)
    for loader in (("fsdp", 2), ("ddp", 2)):
        assert_same(in_ranks(load, loader, str(tmp_path), list(expected)), expected)


def test_a_single_file_of_an_older_torch_lacks_options_of_the_optimizer(tmp_path: Path) -> None:
    expected = in_ranks(save_stock, ("single", 1), str(tmp_path), ["adam"])[0]
    path = tmp_path / "single1-adam.ckpt"
    content = torch.load(path, weights_only=False)
    for group in content["optimizer_states"][0]["param_groups"]:
        del group["decoupled_weight_decay"]  # new in torch 2.7
    torch.save(content, path)
    assert_same(in_ranks(load, ("fsdp", 2), str(tmp_path), list(expected)), expected)


@pytest.mark.parametrize("loader", [("fsdp", 3), ("ddp", 2), ("single", 1)], ids=label)
def test_a_sharded_folder_of_stock_lightning(loader: Way, folder: Path) -> None:
    way, name = ("stock_fsdp", 2), "stock_fsdp2-stock"
    if (way, "stock") not in _saved:
        _saved[way, "stock"] = in_ranks(save_stock, way, str(folder), ["stock"])[0][name]
    expected = {name: _saved[way, "stock"]}
    found = in_ranks(load, loader, str(folder), list(expected))
    for states in (expected, *found):
        # Each rank has its own, and stock Lightning stores whichever it likes.
        states[name]["model"] = {key: value for key, value in states[name]["model"].items() if ".running_" not in key}
    assert_same(found, expected)


def load_in_stock(way: Way, path: str) -> dict[str, Any]:
    note = NoteAtTheStart()
    torch.manual_seed(2)
    fit(trainer_for(*way, note, "stock", 2, plugins=None), Wrapped("stock"), 2, ckpt_path=path, weights_only=False)
    return note.state


@pytest.mark.parametrize("saver", [("ddp", 2), ("fsdp", 3)], ids=label)
def test_stock_model_parallel_strategy_opens_ours(saver: Way, folder: Path) -> None:
    (expected,) = saved_by(saver, folder, ["stock"]).values()
    for state in in_ranks(load_in_stock, ("stock_fsdp", 2), f"{folder}/{label(saver)}-stock.ckpt"):
        assert difference(state, expected) is None


def test_stock_lightnings_consolidation_opens_ours(folder: Path, tmp_path: Path) -> None:
    (expected,) = saved_by(("fsdp", 2), folder, ["adam"]).values()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint"),
            *(f"{folder}/fsdp2-adam.ckpt", "--output_file", str(tmp_path / "whole.ckpt")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert difference(dict(found["state_dict"]), expected["model"]) is None
    states = found["optimizer_0"]["state"]
    assert difference(states, {str(name): state for name, state in expected["optimizers"][0].items()}) is None
    assert found["epoch"] == 0
    assert found["global_step"] == 2
    assert found["pytorch-lightning_version"]


def test_plain_dcp_opens_ours(folder: Path) -> None:
    (expected,) = saved_by(("fsdp", 3), folder, ["adam"]).values()
    weights = {name: torch.zeros_like(value) for name, value in expected["model"].items()}
    moments = {name: {"exp_avg": torch.zeros_like(s["exp_avg"])} for name, s in expected["optimizers"][0].items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process", UserWarning)
        dcp.load({"state_dict": weights, "optimizer_0": {"state": moments}}, checkpoint_id=f"{folder}/fsdp3-adam.ckpt")
    assert difference(weights, expected["model"]) is None
    for name, state in expected["optimizers"][0].items():
        assert torch.equal(moments[name]["exp_avg"], state["exp_avg"])
