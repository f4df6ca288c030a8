"""What `import lightning_air` offers, and what it leaves alone."""

import ast
import fnmatch
import importlib
import importlib.resources
import os
import pkgutil
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_air
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs

ROOT = Path(__file__).parents[1]
SHARDINGS = ("ddp", "fsdp", "hsdp")


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# ---- names -----------------------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_there() -> None:
    assert lightning_air.__all__ == sorted(lightning_air.__all__)
    for name in lightning_air.__all__:
        assert getattr(lightning_air, name) is not None


def test_nothing_else_is_public() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(lightning_air.__path__)}
    public = {name for name in vars(lightning_air) if not name.startswith("_")} - rooms
    lazy = {"AirMLflowLogger"}  # imported when it is asked for
    assert public | lazy == set(lightning_air.__all__) - {"__version__"}


@pytest.mark.parametrize("name", sorted(set(lightning_air.__all__) - {"__version__"}))
def test_a_public_name_is_documented(name: str) -> None:
    documentation = getattr(lightning_air, name).__doc__ or ""
    assert len(documentation.splitlines()) > 1
    assert documentation.splitlines()[0].endswith(".")


def test_the_readme_lists_what_is_here() -> None:
    rows = re.findall(r"^\| (`.+`) \|.*\| here \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted([*listed, "__version__"]) == lightning_air.__all__


def _documented_imports() -> Iterator[tuple[str, str]]:
    """Yield (file, name) of every name that the README or a recipe imports from the package itself."""
    for path in [ROOT / "README.md", *sorted((ROOT / "recipes").glob("**/*.py"))]:
        text = path.read_text()
        code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if path.suffix == ".md" else [text]
        for node in (node for block in code for node in ast.walk(ast.parse(block))):
            if isinstance(node, ast.ImportFrom) and node.module == "lightning_air":
                yield from ((path.name, alias.name) for alias in node.names)


def test_what_the_documents_import_is_public() -> None:
    documented = set(_documented_imports())
    assert documented
    assert {(file, name) for file, name in documented if name not in lightning_air.__all__} == set()


@pytest.mark.parametrize(
    "module", [module.name for module in pkgutil.walk_packages(lightning_air.__path__, "lightning_air.")]
)
def test_every_room_says_what_it_is_for(module: str) -> None:
    assert importlib.import_module(module).__doc__
    offered = getattr(importlib.import_module(module), "__all__", [])
    assert list(offered) == sorted(offered)


# ---- what is shipped -------------------------------------------------------------------------------------------------


def test_the_version_is_written_once() -> None:
    pyproject = _pyproject()
    assert pyproject["project"]["dynamic"] == ["version"]
    assert "version" not in pyproject["project"]
    written = (ROOT / pyproject["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', written, re.MULTILINE) == [lightning_air.__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev|\.post)\d+)?", lightning_air.__version__)


def test_types_are_shipped_with_the_wheel() -> None:
    assert importlib.resources.files(lightning_air).joinpath("py.typed").is_file()
    pyproject = _pyproject()
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["lightning_air"]}  # all of the folder, except what git ignores
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not any(fnmatch.fnmatch("py.typed", pattern.strip("/")) for pattern in ignored)
    assert "Typing :: Typed" in pyproject["project"]["classifiers"]


# ---- importing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_importing_registers_the_strategies_names(sharding: str) -> None:
    assert f"air_{sharding}" in StrategyRegistry.available_strategies()
    strategy = Trainer(**fast_trainer_kwargs(Path.cwd(), strategy=f"air_{sharding}")).strategy
    assert isinstance(strategy, lightning_air.AirStrategy)
    assert strategy.sharding == sharding


def _import_again(*missing: str) -> dict[str, Any]:
    """Import the package as if for the first time, and return what that did; in a process of its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_air"]:
        del sys.modules[name]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment] # what makes Python raise ModuleNotFoundError
    readers: set[str] = set()
    read = type(os.environ).__getitem__

    def spy(environ: Any, name: str) -> str:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"] in {"os", "collections.abc", __name__}:
            frame = frame.f_back
        readers.add(frame.f_globals["__name__"])
        return read(environ, name)

    before = (dict(os.environ), set(threading.enumerate()), set(Path.cwd().iterdir()))
    type(os.environ).__getitem__ = spy  # type: ignore[method-assign]
    try:
        fresh = importlib.import_module("lightning_air")
    finally:
        type(os.environ).__getitem__ = read  # type: ignore[method-assign]
    after = (dict(os.environ), set(threading.enumerate()), set(Path.cwd().iterdir()))

    import torch

    return {
        "is new": fresh is not lightning_air,
        "readers": {name for name in readers if name.partition(".")[0] == "lightning_air"},
        "left": [
            place for place, a, b in zip(("environment", "threads", "files"), before, after, strict=True) if a != b
        ],
        "process group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    }


def test_importing_does_nothing_but_look() -> None:
    (facts,) = values(run_ranks(_import_again, 1))
    assert facts == {
        "is new": True,
        "readers": {"lightning_air.runtime"},
        "left": [],
        "process group": False,
        "cuda": False,
    }


# The modules that each extra brings: without them the package must import.
EXTRAS = {"cli": ("jsonargparse", "docstring_parser", "typeshed_client"), "databricks": ("databricks.sdk",)}


@pytest.mark.parametrize("extra", EXTRAS)
def test_importing_needs_no_extra(extra: str) -> None:
    assert extra in _pyproject()["project"]["optional-dependencies"]
    (facts,) = values(run_ranks(_import_again, 1, args=EXTRAS[extra]))
    assert facts["is new"]
