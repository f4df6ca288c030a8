"""What `lightning-air` does before a subcommand takes over: names, help, versions, and what is missing."""

import importlib
import importlib.metadata
import inspect
import sys

import pytest

import lightning_air
from lightning_air.cli import SUBCOMMANDS, main


def _run(*arguments: str) -> int | str | None:
    """Return the exit code, however `main` gives it."""
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


@pytest.fixture
def _without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in {module for subcommand in SUBCOMMANDS.values() for module in subcommand.needs}:
        monkeypatch.setitem(sys.modules, module, None)


def test_the_console_script_is_main() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="lightning-air")
    assert script.load() is main


@pytest.mark.usefixtures("_without_the_extra")
def test_version_names_us_and_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--version") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"lightning-air {lightning_air.__version__} (")
    assert f"lightning {importlib.metadata.version('lightning')}" in shown
    assert f"torch {importlib.metadata.version('torch')}" in shown
    assert shown.count("\n") == 1


@pytest.mark.usefixtures("_without_the_extra")
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_has_a_line_for_each_subcommand(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(option) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, subcommand in SUBCOMMANDS.items():
        assert [name, subcommand.help] in lines


@pytest.mark.parametrize("arguments", [["tarin"], ["tarin", "--config", "x.yaml"]])
def test_an_unknown_subcommand_is_named_with_the_choices(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*arguments) == 2
    error = capsys.readouterr().err
    assert "'tarin'" in error
    for name in SUBCOMMANDS:
        assert name in error


def test_no_subcommand_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 2
    assert "SUBCOMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["jsonargparse", "docstring_parser", "typeshed_client"])
@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_a_missing_extra_is_one_line_with_the_remedy(
    name: str, missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert _run(name, "--config", "x.yaml") == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert f"lightning-air {name} " in captured.err
    assert "pip install 'lightning-air[cli]'" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_subcommand_keeps_the_protocol(name: str) -> None:
    subcommand = SUBCOMMANDS[name]
    assert list(inspect.signature(importlib.import_module(subcommand.module).run).parameters) == ["arguments"]
    assert subcommand.help
    assert "\n" not in subcommand.help
    extras = importlib.metadata.metadata("lightning-air").get_all("Provides-Extra") or []
    assert bool(subcommand.needs) == bool(subcommand.extra)
    assert not subcommand.extra or subcommand.extra in extras
