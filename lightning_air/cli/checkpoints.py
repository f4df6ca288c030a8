"""`lightning-air checkpoints list | show | verify | consolidate | prune`: what lies on a disk, a volume or a store.

PATH is one checkpoint (a folder, a single file, a pointer such as `last.ckpt`) or a folder of them, on any place that
checkpoints can be saved to. Nothing here runs code that a checkpoint holds, and nothing but `prune --yes` deletes.
Exit codes: 0; 1 if a checkpoint is not valid, or could not be deleted; 2 for what is wrong with the command or the
place, with one line that says what to do.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - its only name

_PLACES = "a local path, /Volumes/<catalog>/<schema>/<volume>/…, dbfs:/Volumes/… or a URL"
_ONE_OR_MANY = f"a checkpoint, or a folder of them: {_PLACES}"
_NEWEST = f"a checkpoint, or a folder of them, of which the newest valid one is taken: {_PLACES}"

WRONG_USAGE = 2


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say; see the module for the exit codes."""
    options = _parser().parse_args(arguments[1:])
    # Torch and all that reads checkpoints: not for help and wrong arguments.
    module = importlib.import_module(f"lightning_air.cli.checkpoint_{options.module}")
    try:
        exit_code: int = getattr(module, f"{options.action}_checkpoints")(options)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        # A file's name, or what it holds, may be in the message.
        line = "".join(each if each.isprintable() else " " for each in " ".join(str(error).split()))
        sys.stderr.write(f"lightning-air checkpoints {options.action}: {line}\n")
        return WRONG_USAGE
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-air checkpoints",
        description="Look at checkpoints, verify them, export one to a single file, delete old ones.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    action = _add(actions, "list", "listing", "list checkpoints, the newest first; sizes are checked, contents are not")
    action.add_argument("path", metavar="PATH", help=_ONE_OR_MANY)
    action.add_argument("--json", action="store_true", help="write JSON instead of a table")

    action = _add(actions, "show", "listing", "show the files and tensors of one checkpoint")
    action.add_argument("path", metavar="PATH", help=_NEWEST)
    action.add_argument("--top", type=_count(0), metavar="N", help="show the N largest tensors; default: 20, JSON all")
    action.add_argument("--json", action="store_true", help="write JSON")

    action = _add(
        actions, "verify", "reading", "read every byte and compare it with the manifest; exit code 1 if wrong"
    )
    action.add_argument("path", metavar="PATH", help=f"{_ONE_OR_MANY}; of a folder, all are verified")

    action = _add(actions, "consolidate", "reading", "write one checkpoint as a single file for stock Lightning")
    action.add_argument("source", metavar="SOURCE", help=_NEWEST)
    action.add_argument("target", metavar="TARGET", help="the file to write, on any of these places")
    action.add_argument("--force", action="store_true", help="replace TARGET if it is there")

    action = _add(
        actions,
        "prune",
        "pruning",
        "delete old checkpoints, or only say which",
        more="Never deleted: the newest valid one, what last.ckpt or another pointer leads to, what the newest one "
        "notes as the best, and what is damaged. Without --yes nothing is deleted.",
    )
    action.add_argument("path", metavar="PATH", help=f"a folder of checkpoints: {_PLACES}")
    action.add_argument("--keep-last", type=_count(1), metavar="N", help="delete valid ones but the newest N")
    action.add_argument(
        "--orphans",
        type=_age,
        metavar="AGE",
        help="delete what killed saves have left and nobody has written to for so long, such as 6h or 2d: longer than "
        "any save takes, since a save under way looks the same",
    )
    action.add_argument("--yes", action="store_true", help="do delete")
    return parser


def _add(actions: "Actions", name: str, module: str, help_line: str, more: str = "") -> argparse.ArgumentParser:
    description = f"{help_line[0].upper()}{help_line[1:]}. {more}".rstrip()
    parser = actions.add_parser(name, help=help_line, description=description)
    parser.set_defaults(module=module)
    return parser


def _count(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return parse


def _age(text: str) -> float:
    """Return seconds."""
    from lightning_air.checkpoint.cadence import parse_every  # noqa: PLC0415 - as in `run`

    try:
        every = parse_every(text)
    except ValueError:
        every = None
    if every is None or every.unit != "seconds":
        raise argparse.ArgumentTypeError(f"must be an age such as '6h', '90min' or '2d', got {text!r}")
    return every.count
