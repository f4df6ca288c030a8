"""What we take for granted about Lightning, checked against the one that is installed.

`make test` runs this with the newest Lightning, `make contract` with the oldest that we claim. A failure names what
has moved; the cases of `PRIVATE` say what would break.
"""

import ast
import functools
import importlib
import inspect
import os
import pkgutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from torch import nn

import lightning_air
from lightning_air import AirCheckpoint, AirStrategy, _lightning
from lightning_air.strategy import AirDDP, AirFSDP
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import Regression, loader, train

PACKAGE = Path(lightning_air.__file__).parent
SEAM = PACKAGE / "_lightning.py"
HOSTS = {"lightning", "lightning_fabric", "pytorch_lightning"}

# ---- the seam --------------------------------------------------------------------------------------------------------


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name, name here) of every import; the names of `import module` are empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in {
            "import_module",
            "__import__",
        }:
            yield from ((str(arg.value), "", "") for arg in node.args if isinstance(arg, ast.Constant))


def _is_host(module: str) -> bool:
    return module.partition(".")[0] in HOSTS


def test_only_the_seam_imports_lightning() -> None:
    files = sorted(set(PACKAGE.rglob("*.py")) - {SEAM})
    assert len(files) > 10
    found = {
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in files
        for module, _, _ in _imports(_tree(path))
        if _is_host(module)
    }
    assert found == set()


def test_the_seam_speaks_lightning_only() -> None:
    modules = {module for module, _, _ in _imports(_tree(SEAM)) if _is_host(module)}
    assert {module.partition(".")[0] for module in modules} == {"lightning"}


def test_the_seam_lists_all_that_it_offers_in_order() -> None:
    body = _tree(SEAM).body
    body += [inner for node in body if isinstance(node, ast.If) for inner in node.body]  # if TYPE_CHECKING
    imports = [found for node in body if isinstance(node, ast.ImportFrom) for found in _imports(node)]
    imported = {here for module, _, here in imports if _is_host(module)}
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)} - {"__getattr__"}
    assert _lightning.__all__ == sorted(imported | defined)


@pytest.mark.parametrize("name", _lightning.__all__)
def test_the_seam_has_what_it_lists(name: str) -> None:
    assert getattr(_lightning, name) is not None


def test_the_seam_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match=r"lightning_air\._lightning.*'LightningCIL'"):
        _lightning.LightningCIL  # type: ignore[attr-defined] # noqa: B018 - that is the test


# ---- what we override ------------------------------------------------------------------------------------------------


def _our_classes() -> list[type]:
    """Return every class of the package that has one of Lightning's among its bases."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages([str(PACKAGE)], "lightning_air."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and _is_ours(value) and any(_is_host(base.__module__) for base in value.__mro__):
                found[value.__name__] = value
    return [found[name] for name in sorted(found)]


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "lightning_air"


@dataclass(frozen=True)
class Override:
    """A name that our class `owner` defines, seen from its subclass `cls`, which may have more of Lightning's bases."""

    cls: type
    owner: type
    name: str

    def __str__(self) -> str:
        return f"{self.cls.__name__}.{self.name}"

    @property
    def ours(self) -> Any:
        return vars(self.owner)[self.name]

    @property
    def host(self) -> Any | None:
        """What it stands in front of, in the order in which Python looks."""
        hosts = (base for base in self.cls.__mro__ if _is_host(base.__module__))
        return next((vars(base)[self.name] for base in hosts if self.name in vars(base)), None)

    @property
    def can_be_marked(self) -> bool:
        return any(self.name in vars(base) for base in self.owner.__mro__[1:])


def _overrides() -> list[Override]:
    return [
        Override(cls, owner, name)
        for cls in _our_classes()
        for owner in cls.__mro__
        if _is_ours(owner)
        for name, value in vars(owner).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, property | staticmethod | classmethod))
    ]


OVERRIDES = _overrides()
IN_FRONT_OF_A_HOST = [override for override in OVERRIDES if override.host is not None]


def _functions(attribute: Any) -> dict[str, Callable[..., Any]]:
    """Return the plain functions behind a method, a property, a static method or a class method."""
    if isinstance(attribute, property):
        both = {"getter": attribute.fget, "setter": attribute.fset}
        return {kind: function for kind, function in both.items() if function is not None}
    return {"method": getattr(attribute, "__func__", attribute)}


def _is_marked(attribute: Any) -> bool:
    return any(getattr(function, "__override__", False) for function in _functions(attribute).values())


def test_our_classes_are_found() -> None:
    names = {cls.__name__ for cls in _our_classes()}
    assert {"AirCLI", "AirCheckpoint", "AirDDP", "AirEnvironment", "AirFSDP", "AirStrategy"} <= names
    assert len(IN_FRONT_OF_A_HOST) > 50


# What AirStrategy cannot mark, since only the classes beside which its leaves place it have it. Lightning looks these
# names up: without them it would number the ranks itself, and make a process group of its own choice.
WITHOUT_MARK = {"num_processes", "process_group_backend", "set_world_ranks"}


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
def test_what_is_marked_overrides_and_what_overrides_is_marked(override: Override) -> None:
    if override.host is not None and override.name not in WITHOUT_MARK:
        assert _is_marked(override.ours), "Lightning has this name too: rename ours, or mark it with @override"
    if _is_marked(override.ours):
        assert override.can_be_marked, "no base has this name: Lightning has renamed or removed it"


@pytest.mark.parametrize("leaf", [AirDDP, AirFSDP])
@pytest.mark.parametrize("name", sorted(WITHOUT_MARK))
def test_what_cannot_be_marked_is_still_there(leaf: type, name: str) -> None:
    assert any(override.cls is leaf and override.name == name for override in IN_FRONT_OF_A_HOST)


# From (class, name) to the one difference that is meant, and why it does no harm.
MEANT = {
    ("AirDDP", "barrier"): "takes no *args",  # Lightning passes the name only, and by position or by name
}


@pytest.mark.parametrize("override", IN_FRONT_OF_A_HOST, ids=str)
def test_an_override_accepts_what_lightning_passes(override: Override) -> None:
    host, ours = override.host, override.ours
    if isinstance(host, functools.cached_property):
        host = property(host.func)
    assert isinstance(ours, property) == isinstance(host, property)
    mine = _functions(ours)
    problems = [f"has no {kind}" for kind in _functions(host) if kind not in mine]
    for kind, function in _functions(host).items():
        if kind in mine:
            problems += _differences(inspect.signature(mine[kind]), inspect.signature(function))
    meant = MEANT.get((override.cls.__name__, override.name))
    assert problems == ([meant] if meant else [])


def _differences(ours: inspect.Signature, host: inspect.Signature) -> list[str]:
    """Say which calls of the host's signature ours would refuse, or understand otherwise."""
    positional = [p for p in ours.parameters.values() if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    kinds = {p.kind for p in ours.parameters.values()}
    takes_args, takes_kwargs = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    found = []
    for index, theirs in enumerate(host.parameters.values()):
        own = ours.parameters.get(theirs.name)
        if theirs.kind is theirs.VAR_POSITIONAL:
            found += [] if takes_args else [f"takes no *{theirs.name}"]
        elif theirs.kind is theirs.VAR_KEYWORD:
            found += [] if takes_kwargs else [f"takes no **{theirs.name}"]
        elif own is None or own.kind in {own.VAR_POSITIONAL, own.VAR_KEYWORD}:
            absorbed = takes_kwargs and (takes_args or theirs.kind is theirs.KEYWORD_ONLY)
            found += [] if absorbed else [f"does not take {theirs.name}"]
        else:
            if theirs.kind is not theirs.KEYWORD_ONLY and positional[index : index + 1] != [own]:
                found.append(f"has {theirs.name} at another position")
            if own.default != theirs.default:
                found.append(f"has {theirs.name}={own.default!r} instead of {theirs.default!r}")
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return found + [
        f"requires {own.name}"
        for own in ours.parameters.values()
        if own.name not in host.parameters and own.default is own.empty and own.kind not in variable
    ]


@pytest.mark.parametrize(
    ("ours", "host", "expected"),
    [
        (lambda self, a, b=1: 0, lambda self, a, b=1: 0, []),
        (lambda self, *args, **kwargs: 0, lambda self, a, *, b=1: 0, []),
        (lambda self, a, **kwargs: 0, lambda self, a, *, b=1: 0, []),
        (lambda self, a, extra=None: 0, lambda self, a: 0, []),
        (lambda self, a, b=2: 0, lambda self, a, b=1: 0, ["has b=2 instead of 1"]),
        (lambda self, a: 0, lambda self, a, b=1: 0, ["does not take b"]),
        (lambda self, a, **kwargs: 0, lambda self, a, b=1: 0, ["does not take b"]),
        (lambda self, *, a: 0, lambda self, a: 0, ["has a at another position"]),
        (
            lambda self, b, a: 0,
            lambda self, a, b: 0,
            ["has a at another position", "has b at another position"],
        ),
        (lambda self, a, extra: 0, lambda self, a: 0, ["requires extra"]),
        (lambda self: 0, lambda self, *args, **kwargs: 0, ["takes no *args", "takes no **kwargs"]),
    ],
)
def test_the_comparison_of_signatures(ours: Any, host: Any, expected: list[str]) -> None:
    assert _differences(inspect.signature(ours), inspect.signature(host)) == expected


# ---- attributes that we share with the stock strategies --------------------------------------------------------------

STOCK = (DDPStrategy, ModelParallelStrategy)
# Attributes of theirs that we set. All others of ours must have names that they have not.
SET_BY_US = {
    "_data_parallel_size",
    "_device_mesh",
    "_launcher",
    "_tensor_parallel_size",
    "cluster_environment",
    "model",
    "num_nodes",
    "parallel_devices",
}


def _own_attributes(cls: type, *, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a class' code reads or sets on `self`."""
    tree = ast.parse(inspect.getsource(cls))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) and ast.unparse(node.value) == "self"
    }


def test_our_attributes_are_none_of_theirs() -> None:
    ours = {name for cls in (AirStrategy, AirDDP, AirFSDP) for name in _own_attributes(cls, context=ast.Store)}
    theirs = {name for stock in STOCK for name in dir(stock())}
    assert ours & theirs == SET_BY_US


# ModelCheckpoint's record, which AirCheckpoint keeps for it.
KEPT_FOR_MODEL_CHECKPOINT = {
    "_last_checkpoint_saved",
    "_last_global_step_saved",
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "dirpath",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
}


def test_our_attributes_of_a_checkpoint_callback_are_none_of_theirs() -> None:
    ours = _own_attributes(AirCheckpoint, context=ast.Store)
    assert len(ours) > 20
    assert ours & set(dir(ModelCheckpoint())) == KEPT_FOR_MODEL_CHECKPOINT


# ---- private names that we rely on -----------------------------------------------------------------------------------


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _trainer() -> Trainer:
    return Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy()))


def _configure_launcher() -> None:
    for stock in (Strategy, *STOCK):
        assert _parameters(stock._configure_launcher) == ["self"]
    assert _trainer().strategy.launcher is None  # and Lightning has not set one afterwards


def _launcher() -> None:
    strategy = DDPStrategy()
    strategy._launcher = marker = object()  # type: ignore[assignment]
    assert strategy.launcher is marker


def _lightning_module() -> None:
    module = LightningModule()
    for stock in STOCK:
        strategy = stock()
        assert strategy._lightning_module is None
        strategy._lightning_module = module
        assert strategy.lightning_module is strategy.model is module


def _forward_redirection() -> None:
    for stock in STOCK:
        names = _parameters(stock()._forward_redirection)
        assert names == ["wrapper_module", "original_module", "method_name", "args", "kwargs"]


def _mesh_sizes() -> None:
    strategy = ModelParallelStrategy(data_parallel_size=3, tensor_parallel_size=5)
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (3, 5)


def _device_mesh() -> None:
    strategy, module = ModelParallelStrategy(), LightningModule()
    strategy._device_mesh = module._device_mesh = mesh = object()  # type: ignore[assignment]
    assert strategy.device_mesh is module.device_mesh is mesh


def _compiler_ctx() -> None:
    module = LightningModule()
    assert module._compiler_ctx is None
    compiled = from_compiled(torch.compile(module, backend="eager"))  # type: ignore[arg-type]
    assert compiled is module
    assert compiled._compiler_ctx is not None
    assert callable(compiled._compiler_ctx["dynamo_ctx"])
    assert to_uncompiled(module)._compiler_ctx is None


def _signal_connector() -> None:
    trainer = _trainer()
    assert trainer._signal_connector.received_sigterm is False
    trainer._signal_connector.received_sigterm = True
    assert trainer.received_sigterm is True


def _sigterm_notifier() -> None:
    connector, heard = _trainer()._signal_connector, []
    assert len(_parameters(connector._sigterm_notifier_fn)) == 2
    connector._sigterm_notifier_fn = lambda signum, _: heard.append(signum)  # type: ignore[method-assign]
    connector.register_signal_handlers()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        connector.teardown()
    assert heard == [signal.SIGTERM]


def _sigterm_broadcast() -> None:
    # That the loop calls it before each batch: `test_a_stop_ends_all_ranks_at_one_step`.
    assert _parameters(_trainer().fit_loop.epoch_loop._broadcast_sigterm_tensor) == []


def _average_model() -> None:
    callback: Any = WeightAveraging()
    assert callback._average_model is None
    module = Regression()
    callback.setup(_trainer(), module, "fit")
    assert isinstance(callback._average_model.module, Regression)
    assert callback._average_model.module is not module


def _layer_sync() -> None:
    plain, synced = (
        Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy("fsdp"), sync_batchnorm=wanted)).strategy
        for wanted in (False, True)
    )
    assert isinstance(plain, ParallelStrategy)
    assert plain._layer_sync is None
    assert isinstance(synced, ParallelStrategy)
    assert synced._layer_sync is not None
    module = nn.Sequential(nn.BatchNorm1d(2))
    synced._layer_sync.apply(module)
    assert isinstance(module[0], nn.SyncBatchNorm)


def _optimizers_to_device() -> None:
    assert _parameters(_lightning.optimizers_to_device) == ["optimizers", "device"]


def _multiprocessing_launcher() -> None:
    assert _parameters(_lightning.MultiProcessingLauncher) == ["strategy", "start_method"]
    two_ranks = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(), devices=2)).strategy
    for launcher in (_lightning.MultiProcessingLauncher(two_ranks, start_method="fork"), two_ranks.launcher):
        assert _parameters(launcher.kill) == ["signum"]


def _path() -> None:
    assert str in _lightning.PathLike.__args__
    assert Path in _lightning.PathLike.__args__


def _default_store() -> None:
    assert _parameters(torch.distributed.distributed_c10d._get_default_store) == []


def _abort() -> None:
    assert callable(torch.distributed.distributed_c10d._abort_process_group)


def _pytree() -> None:
    assert torch.utils._pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2]


def _orig_mod() -> None:
    module = nn.Linear(2, 2)
    assert torch.compile(module, backend="eager")._orig_mod is module


def _checkpoint_saved() -> None:
    callback = ModelCheckpoint()
    assert (callback._last_global_step_saved, callback._last_checkpoint_saved) == (0, "")
    trainer = _trainer()
    trainer.state.fn = TrainerFn.FITTING
    assert callback._should_skip_saving_checkpoint(trainer)  # nothing to save before the first step
    callback._last_global_step_saved = -1
    assert not callback._should_skip_saving_checkpoint(trainer)


def _checkpoint_hooks() -> None:
    # That Lightning calls ours: `test_the_newest_and_the_best_are_kept_and_each_step_is_saved_once`.
    assert _parameters(ModelCheckpoint._save_checkpoint) == ["self", "trainer", "filepath"]
    assert _parameters(ModelCheckpoint._should_remove_checkpoint) == ["self", "trainer", "previous", "current"]


def _monitor_candidates() -> None:
    candidates = ModelCheckpoint()._monitor_candidates(_trainer())
    assert {name: int(value) for name, value in candidates.items()} == {"epoch": 0, "step": 0}


def _find_last_checkpoints() -> None:
    assert ModelCheckpoint(Path.cwd())._find_last_checkpoints(_trainer()) == set()


def _default_folder() -> None:
    folder = ModelCheckpoint()._ModelCheckpoint__resolve_ckpt_dir(_trainer())  # type: ignore[attr-defined]
    assert folder == str(Path.cwd() / "checkpoints")


def _state_key() -> None:
    assert ModelCheckpoint()._generate_state_key(dirpath="/a") == "ModelCheckpoint{'dirpath': '/a'}"


def _loaded_checkpoint() -> None:
    assert _trainer()._checkpoint_connector._loaded_checkpoint == {}


def _data_source() -> None:
    source = _trainer().fit_loop._data_source
    source.instance = ["loaders"]
    assert type(source).dataloader(source) == ["loaders"]
    source.dataloader = list  # type: ignore[method-assign] # as an attribute of its own, which is found first
    assert source.dataloader() == []


def _data_fetcher() -> None:
    # That it is there once loaders are: `tests/data`.
    assert _trainer().fit_loop._data_fetcher is None


def _loader_iterator_fetcher() -> None:
    # That a step which takes `dataloader_iter` is fed by one: `tests/data`.
    from lightning.pytorch.loops import fetchers

    assert issubclass(fetchers._DataLoaderIterDataFetcher, fetchers._DataFetcher)


def _worker_iterator() -> None:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    assert callable(_MultiProcessingDataLoaderIter._shutdown_workers)


def _num_stepped() -> None:
    assert _trainer().fit_loop.epoch_loop._batches_that_stepped == 0


def _tracking_store() -> None:
    from mlflow.tracking._tracking_service import utils

    assert callable(utils._get_store("http://127.0.0.1:1").get_host_creds)  # type: ignore[no-untyped-call]


# The name, how it is checked, and what would break without it.
PRIVATE = [
    ("_configure_launcher", _configure_launcher, "a notebook, and a single rank, would start subprocesses"),
    ("_launcher", _launcher, "the launcher that we choose would not be used"),
    ("_lightning_module", _lightning_module, "a compiled module would be refused under fsdp"),
    ("_forward_redirection", _forward_redirection, "a step would not gather the root's parameters under fsdp"),
    ("_data_parallel_size", _mesh_sizes, "fsdp would shard over the nodes instead of over all ranks"),
    ("_tensor_parallel_size", _mesh_sizes, "fsdp would make a tensor-parallel mesh of each node"),
    ("_device_mesh", _device_mesh, "hsdp would show the mesh of fsdp"),
    ("_compiler_ctx", _compiler_ctx, "a compiled module would be refused, or stay uncompiled, under fsdp"),
    ("_signal_connector", _signal_connector, "an agreed stop would look like an error to Lightning"),
    ("_sigterm_notifier_fn", _sigterm_notifier, "SIGTERM would start a collective inside the signal handler"),
    ("_broadcast_sigterm_tensor", _sigterm_broadcast, "ranks would not stop together; every batch would wait for GPUs"),
    ("_average_model", _average_model, "weight averaging under fsdp would mix whole and sharded weights"),
    ("_layer_sync", _layer_sync, "Trainer(sync_batchnorm=True) would do nothing under fsdp"),
    ("_optimizers_to_device", _optimizers_to_device, "optimizer state would stay on the host"),
    (
        "_MultiProcessingLauncher",
        _multiprocessing_launcher,
        "a notebook could start no ranks; SIGTERM would not spread",
    ),
    ("_PATH", _path, "type checking only"),
    ("_get_default_store", _default_store, "ranks would not learn of each other's failures"),
    ("_abort_process_group", _abort, "a rank in a NCCL collective whose peer is gone would hang"),
    ("_pytree", _pytree, "sharded tensors in callbacks' state would be saved as rank 0's shard"),
    ("_orig_mod", _orig_mod, "compiled blocks would not be found by the name of their class"),
    ("_last_checkpoint_saved", _checkpoint_saved, "a step would be saved twice, for its cadence and for its metric"),
    ("_last_global_step_saved", _checkpoint_saved, "a step would be saved twice, or not again after a failure"),
    ("_should_skip_saving_checkpoint", _checkpoint_saved, "a step that the cadence saved would not be rated"),
    ("_save_checkpoint", _checkpoint_hooks, "loggers would be told of checkpoints to come"),
    ("_should_remove_checkpoint", _checkpoint_hooks, "a checkpoint would be deleted before its replacement is there"),
    ("_monitor_candidates", _monitor_candidates, "checkpoints would have no names"),
    ("_find_last_checkpoints", _find_last_checkpoints, 'ckpt_path="last" would look at names, on local disks'),
    ("_ModelCheckpoint__resolve_ckpt_dir", _default_folder, 'ckpt_path="last" would not work without a dirpath'),
    ("_checkpoint_connector", _loaded_checkpoint, "a run would not be continued, nor linked to what it resumed from"),
    ("_loaded_checkpoint", _loaded_checkpoint, "a run would not be continued, nor linked to what it resumed from"),
    ("_get_store", _tracking_store, "metrics would wait for MLflow's own retries, and Retry-After be hidden"),
    ("_data_source", _data_source, "DataPosition would not see the training loader"),
    ("_data_fetcher", _data_fetcher, "an epoch that goes on, and those after it, would end too early or too late"),
    ("_MultiProcessingDataLoaderIter", _worker_iterator, "workers of a stream would outlive a run that has failed"),
    ("_shutdown_workers", _worker_iterator, "workers of a stream would outlive a run that has failed"),
    (
        "_DataLoaderIterDataFetcher",
        _loader_iterator_fetcher,
        "DataPosition would count the batches of a step that reads them itself",
    ),
    ("_batches_that_stepped", _num_stepped, "loggers would count steps otherwise after a resume"),
    ("_generate_state_key", _state_key, "two AirCheckpoints would overwrite each other's state"),
]


@pytest.mark.parametrize(("check", "breaks"), [pytest.param(check, breaks, id=name) for name, check, breaks in PRIVATE])
def test_a_private_name_is_as_we_know_it(check: Callable[[], None], breaks: str) -> None:
    try:
        check()
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise AssertionError(f"Without it {breaks}: {error}") from error


# Private names that are nobody's to move: `os._exit`, `NamedTuple._replace`, and marks of our own on others' objects.
NO_HOSTS = {
    "_MEM_FORMAT_ENCODING",
    "_C",
    "_StorageInfo",
    "_SubParsersAction",
    "_air_checkpointed",
    "_air_compiled",
    "_asdict",
    "_current_frames",
    "_distributed_c10d",
    "_exit",
    "_get",
    "_replace",
}


def test_the_private_names_above_are_those_that_we_use() -> None:
    theirs = {name for stock in (*STOCK, ModelCheckpoint) for name in dir(stock())}
    theirs |= set(dir(LightningCLI)) | set(dir(ClusterEnvironment))
    used = {override.name for override in OVERRIDES if override.host is not None or override.name in theirs}
    ours = {name for path in PACKAGE.rglob("*.py") for name in _defined(_tree(path))} - theirs
    for path in PACKAGE.rglob("*.py"):
        tree = _tree(path)
        used |= {name for module, name, _ in _imports(tree) if not module.startswith("lightning_air")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                is_own = ast.unparse(node.value) in {"self", "super()"} and node.attr not in theirs
                used |= set() if is_own else {node.attr}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private - ours - NO_HOSTS == {name for name, _, _ in PRIVATE}


def _defined(tree: ast.AST) -> Iterator[str]:
    """Give the names that a module of ours defines: functions, classes, and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


# ---- public places that we reach into, with no promise that they stay ------------------------------------------------


@pytest.mark.parametrize("name", ["validate_loop", "test_loop", "predict_loop", "fit_loop.epoch_loop.val_loop"])
def test_a_loop_says_whether_it_uses_inference_mode(name: str) -> None:
    loop = functools.reduce(getattr, name.split("."), _trainer())
    assert isinstance(loop.inference_mode, bool)


def test_the_trainer_shows_its_parts() -> None:
    trainer = _trainer()
    assert isinstance(trainer.callbacks, list)  # type: ignore[attr-defined] # set by a connector
    assert trainer.loggers == []
    assert trainer.num_val_batches == []
    assert trainer.sanity_checking is False


# ---- it trains: with this Lightning, in real ranks -------------------------------------------------------------------


def _host_version() -> tuple[str, str]:
    return lightning.__version__, lightning.__file__


def test_ranks_run_the_lightning_that_is_tested() -> None:
    assert values(run_ranks(_host_version, 1)) == [_host_version()]


@functools.cache
def _expected_losses() -> list[float]:
    return train(None).losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_it_trains(sharding: str, world_size: int) -> None:
    for outcome in values(run_ranks(train, world_size, args=({"sharding": sharding},))):
        assert outcome.losses == pytest.approx(_expected_losses(), rel=1e-4)
        assert outcome.losses[-1] < outcome.losses[0] * 0.8


def _save_and_resume(sharding: str) -> list[int]:
    steps = []
    for max_steps, ckpt_path in ((2, None), (4, "first.ckpt")):
        trainer = Trainer(
            **fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(sharding), max_epochs=-1, max_steps=max_steps)
        )
        data = loader(trainer.world_size, trainer.global_rank)
        if ckpt_path is None:
            trainer.fit(Regression(), data, data)
            trainer.save_checkpoint("first.ckpt")
        else:
            watch = _FirstStep()
            trainer.callbacks.append(watch)  # type: ignore[attr-defined] # set by a connector
            trainer.fit(Regression(), data, data, ckpt_path=ckpt_path)
            steps.append(watch.first_step)
        steps.append(trainer.global_step)
    return steps


class _FirstStep(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_step = trainer.global_step


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_it_saves_and_resumes(sharding: str, tmp_path: Path) -> None:
    # Lightning warns that a plain DataLoader does not resume in the middle of an epoch.
    results = run_ranks(_save_and_resume, 2, args=(sharding,), cwd=tmp_path, warnings_as_errors=False)
    assert values(results) == [[2, 2, 4]] * 2


class _AskRank1ToStop(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            assert isinstance(trainer.strategy, AirStrategy)
            trainer.strategy.request_stop("enough")


def _train_until_stopped() -> tuple[int, str, int]:
    strategy = AirStrategy()
    # No validation: the strategy itself exchanges stops there.
    options = fast_trainer_kwargs(Path.cwd(), strategy=strategy, max_epochs=-1, max_steps=5000, limit_val_batches=0)
    trainer = Trainer(**options, callbacks=[_AskRank1ToStop()])
    try:
        trainer.fit(Regression(), *[loader(2, trainer.global_rank)] * 2)
    except SystemExit as error:  # Lightning's SIGTERMException is one
        assert strategy.stop is not None
        return trainer.global_step, f"{strategy.stop.global_rank}: {strategy.stop.reason}", int(error.code or 0)
    raise AssertionError("nothing stopped it")


def test_a_stop_ends_all_ranks_at_one_step() -> None:
    first, second = values(run_ranks(_train_until_stopped, 2))
    assert first == second
    assert first[1:] == ("1: enough", 128 + signal.SIGTERM)


def _fit_compiled() -> dict[str, Any]:
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    strategy = AirStrategy("fsdp")
    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=strategy, max_steps=2))
    module = Regression()
    trainer.fit(torch.compile(module, backend=backend), loader(), loader())  # type: ignore[arg-type]
    return {"steps": trainer.global_step, "graphs": len(seen), "module": trainer.lightning_module is module}


def test_fit_gives_the_module_to_the_strategy_before_it_refuses_a_compiled_one() -> None:
    (facts,) = values(run_ranks(_fit_compiled, 1, warnings_as_errors=False))  # torch warns while it traces
    assert facts["steps"] == 2
    assert facts["graphs"] > 0
    assert facts["module"]


# ---- the other package -----------------------------------------------------------------------------------------------

# Each runs in a process of its own: `pytorch_lightning` must not be imported into that of the other tests.


def _message_of(mixed: Callable[[], object]) -> tuple[str, str]:
    try:
        mixed()
    except Exception as error:  # noqa: BLE001 - which one it is, is the answer
        return type(error).__name__, str(error)
    return "", ""


def _foreign_trainer() -> tuple[str, str]:
    import pytorch_lightning

    return _message_of(lambda: pytorch_lightning.Trainer(accelerator="cpu", strategy=AirStrategy()))


def _foreign_callback() -> tuple[str, str]:
    import pytorch_lightning

    trainer = Trainer(
        **fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(), callbacks=[pytorch_lightning.Callback()])
    )
    return _message_of(lambda: trainer.fit(Regression(), loader()))


def _foreign_logger() -> tuple[str, str]:
    from pytorch_lightning.loggers import CSVLogger

    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy(), logger=CSVLogger("logs")))
    return _message_of(lambda: trainer.fit(Regression(), loader()))


def _foreign_module() -> tuple[str, str]:
    from pytorch_lightning.demos.boring_classes import BoringModel

    trainer = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=AirStrategy()))
    return _message_of(lambda: trainer.fit(BoringModel()))


@pytest.mark.parametrize(
    ("mix", "expected_type", "culprit"),
    [
        (_foreign_trainer, None, "AirStrategy(sharding='ddp')"),
        (_foreign_callback, "TypeError", "Callback comes from"),
        (_foreign_logger, "TypeError", "CSVLogger comes from"),
        (_foreign_module, None, "BoringModel"),
    ],
)
def test_a_mix_of_the_packages_is_refused_by_name(
    mix: Callable[[], tuple[str, str]], expected_type: str | None, culprit: str
) -> None:
    ((error, message),) = values(run_ranks(mix, 1, warnings_as_errors=False))
    assert error, "the mix was taken"
    assert expected_type in {None, error}
    assert culprit in message
    assert "pytorch_lightning" in message
    assert "`lightning`" in message or "`lightning." in message
