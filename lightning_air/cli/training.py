"""`lightning-air fit`, `validate`, `test`, `predict`: Lightning's LightningCLI, with our parts within its reach.

Importing this package has registered `strategy: air_ddp`, `air_fsdp` and `air_hsdp` and made the short class names of
our parts known (`class_path: AirStrategy`). Models and data are the user's, from any module that can be imported, those
in the current directory included.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_air._lightning import (
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    SaveConfigCallback,
    Trainer,
    rank_zero_warn,
)

_CONFIG_READERS = {"jsonargparse", "lightning", "lightning_air"}


class AirCLI(LightningCLI):
    """LightningCLI, except where it would refuse a retry or greet a wrong option with a traceback."""

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        # The base warns that `args` and a command line are two sources; here the one is the other.
        self.config = parser.parse_args(args)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (MisconfigurationException, ValueError) as error:
            if not _is_about_the_config(error):
                raise
            self.parser.error(str(error), error)


class ResolvedConfig(SaveConfigCallback):
    """Writes down what the run was told, options and defaults included, in the logger's folder or the Trainer's.

    The base fails on a logger without a folder (MLflow's), and on the file of an earlier attempt of the same run. Here
    it is overwritten, so its name must be none that users give to a file: the folder may be the current directory.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file, once. Collective: every rank calls this."""
        place = trainer.log_dir or trainer.default_root_dir  # a broadcast, so before any rank leaves
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        try:
            files, folder = fsspec.url_to_fs(place)
            files.makedirs(folder, exist_ok=True)
            with files.open(f"{folder}/{self.config_filename}", "w") as file:
                file.write(self.parser.dump(self.config, skip_none=False))
        except OSError as error:
            rank_zero_warn(f"The configuration of this run could not be written to {place}: {error}")


def run(arguments: Sequence[str]) -> int:
    """Run one of Lightning's four loops."""
    _make_current_directory_importable()
    AirCLI(
        args=list(arguments),
        parser_kwargs={"prog": "lightning-air"},
        save_config_callback=ResolvedConfig,
        save_config_kwargs={"config_filename": f"resolved_{arguments[0]}_config.yaml"},
    )
    return 0


def _make_current_directory_importable() -> None:
    """Do what `python -m` does, and the script that pip made from our entry point does not."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _is_about_the_config(error: BaseException | None) -> bool:
    """Return whether only the host and we had a part in it: what a user's own code raises keeps its traceback."""
    while error is not None:
        modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
        if any(module.partition(".")[0] not in _CONFIG_READERS for module in modules):
            return False
        error = error.__cause__ or error.__context__
    return True
