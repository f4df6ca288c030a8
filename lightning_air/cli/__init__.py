"""The command `lightning-air`, also `python -m lightning_air`: a name in front, and each name is one file's business.

A subcommand is an entry of `SUBCOMMANDS` and a module with one function:

    def run(arguments: Sequence[str]) -> int:

`arguments` is what stood after `lightning-air`, the name first. The module parses it (its parser's `prog` begins with
`lightning-air`, so that help and errors say what the user typed), does the work, and returns the exit code: 0, or 2 for
wrong arguments, as argparse has it. It is imported when its name is given and not before, so it may need an extra.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NamedTuple

from lightning_air._version import __version__

__all__ = ["main"]

WRONG_USAGE = 2


class Subcommand(NamedTuple):
    """One name after `lightning-air`.

    Attributes:
        help: One line for `lightning-air --help`.
        module: Where its `run` is.
        extra: The extra of this package that it needs, or "".
        needs: The modules that this extra installs.
    """

    help: str
    module: str
    extra: str = ""
    needs: tuple[str, ...] = ()


def _training(help_line: str) -> Subcommand:
    # LightningCLI needs all three; with jsonargparse alone it would find no help texts and no types.
    return Subcommand(
        help_line, "lightning_air.cli.training", "cli", ("jsonargparse", "docstring_parser", "typeshed_client")
    )


SUBCOMMANDS = {
    "fit": _training("train a model, as a YAML file and options say"),
    "validate": _training("evaluate a model on the validation data"),
    "test": _training("evaluate a model on the test data"),
    "predict": _training("let a model predict"),
    "replay": Subcommand("send the metrics that a killed run has left to MLflow", "lightning_air.cli.replay"),
    "checkpoints": Subcommand(
        "list, show, verify, consolidate or prune checkpoints, wherever they lie", "lightning_air.cli.checkpoints"
    ),
    "gpus": Subcommand("show what the GPUs of this machine say, once or again and again", "lightning_air.cli.gpus"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code.

    Args:
        arguments: By default those of the command line. A run on several devices needs them to be: Lightning repeats
            the command line to start the other ranks.

    Raises:
        SystemExit: After printing help, the version or an error.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = _parser().parse_args(given[:1]).name  # what follows it is the subcommand's own to parse
    subcommand = SUBCOMMANDS[name]
    if not all(map(_is_importable, subcommand.needs)):
        remedy = f"pip install 'lightning-air[{subcommand.extra}]'"
        sys.stderr.write(f"lightning-air {name} needs the extra {subcommand.extra!r}: {remedy}\n")
        return WRONG_USAGE
    exit_code: int = importlib.import_module(subcommand.module).run(given)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUBCOMMANDS))
    names = "\n".join(f"  {name:{width}}  {subcommand.help}" for name, subcommand in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lightning-air",
        usage="%(prog)s [-h | --version | SUBCOMMAND ...]",
        description="Train Lightning models on Databricks AI Runtime, a laptop, torchrun or SLURM.",
        epilog=f"subcommands:\n{names}\n\nlightning-air SUBCOMMAND --help shows the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersions)
    parser.add_argument("name", metavar="SUBCOMMAND", choices=SUBCOMMANDS, help="one of those below")
    return parser


class _ShowVersions(argparse.Action):
    """Look the versions up when they are asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        hosts = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("lightning", "torch"))
        python = ".".join(map(str, sys.version_info[:3]))
        sys.stdout.write(f"lightning-air {__version__} ({hosts}, Python {python})\n")
        parser.exit()


def _is_importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
