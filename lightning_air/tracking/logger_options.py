"""What the user asks of the logger, checked before anything is opened."""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_air.runtime import Launch, Platform, detect_launch, staging_area
from lightning_air.tracking.artifact_location import checked_artifact_location
from lightning_air.tracking.experiment import (
    absolute_experiment_name,
    choose_tracking_uri,
    is_databricks_uri,
    known_user,
    script_name,
)
from lightning_air.tracking.run_identity import ResumeRun
from lightning_air.tracking.run_tags import checked_user_tags
from lightning_air.tracking.run_thinner import RunThinner
from lightning_air.tracking.thinning import Thinner
from lightning_air.tracking.window import Aggregate

# Not "lightning-air-…": that is what checkpoints' scratch folders are called, which are swept.
# Each user has his own: on a machine that several share, the folder of the first one is closed to the others.
_SPOOLS = f"lightning_air_spool-{os.getuid()}"

_UNITY_CATALOG_LEVELS = 3


@dataclass(frozen=True, kw_only=True)
class LoggerOptions:
    """The options of an `AirMLflowLogger`, as it documents them, in the form in which they are used."""

    platform: Platform
    launch: Launch
    experiment_name: str | None
    run_name: str | None
    step: Literal["auto"] | int
    max_metric_steps: int
    reserve: int | None
    aggregate: tuple[Aggregate, ...]
    exempt: tuple[str, ...]
    tracking_uri: str
    artifact_location: str | None
    run_id: str | None
    tags: Mapping[str, str]
    log_model: bool | Literal["all"]
    register_model: str | None
    prefix: str
    resume_run: ResumeRun
    adopt_active: bool
    flush_seconds: float
    close_timeout: float
    spool_dir: Path
    log_console: bool
    full_record: bool

    @classmethod
    def checked(
        cls,
        platform: Platform,
        *,
        experiment_name: str | None,
        tracking_uri: str | None,
        artifact_location: str | None,
        aggregate: Sequence[Aggregate],
        exempt: Sequence[str],
        tags: Mapping[str, Any] | None,
        spool_dir: str | Path | None,
        **others: Any,
    ) -> "LoggerOptions":
        """Return the options.

        Raises:
            ValueError: If one is wrong, saying which and what it must be.
        """
        texts = {
            "experiment_name": experiment_name,
            "tracking_uri": tracking_uri,
            "artifact_location": artifact_location,
            "run_name": others["run_name"],
            "run_id": others["run_id"],
            "register_model": others["register_model"],
        }
        for name, value in texts.items():
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ValueError(f"{name} must be text, got {value!r}. Leave it out for the default.")
        if not isinstance(others["prefix"], str):
            raise ValueError(f"prefix must be text, got {others['prefix']!r}.")  # noqa: TRY004 - as all others
        if tags is not None and not isinstance(tags, Mapping):
            raise ValueError(f"tags must be names with values, got {tags!r}.")
        _one_of("resume_run", others["resume_run"], ("new", "continue"))
        _one_of("log_model", others["log_model"], (True, False, "all"))
        _one_of("adopt_active", others["adopt_active"], (True, False))
        _one_of("log_console", others["log_console"], (True, False))
        _one_of("full_record", others["full_record"], (True, False))
        for name in ("flush_seconds", "close_timeout"):
            value = others[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, got {value!r}.")
        uri = choose_tracking_uri(tracking_uri, platform)
        _check_model_name(others["register_model"], in_unity_catalog=is_databricks_uri(uri))
        if experiment_name is not None and is_databricks_uri(uri):
            experiment_name = absolute_experiment_name(experiment_name, user=known_user(platform))
        options = cls(
            platform=platform,
            launch=_launch(),
            experiment_name=experiment_name,
            tracking_uri=uri,
            artifact_location=checked_artifact_location(artifact_location, on_databricks=is_databricks_uri(uri)),
            aggregate=_as_tuple(aggregate),
            exempt=_as_tuple(exempt),
            tags=checked_user_tags(tags),
            spool_dir=default_spool_dir() if spool_dir is None else _local_folder(spool_dir, platform),
            **others,
        )
        options.new_thinner(0)  # it checks the rest
        return options

    def new_thinner(self, spent: int, *, system: int = 0) -> RunThinner:
        """Return the thinner of a run.

        Args:
            spent: Points that the run has already.
            system: Points that system metrics will take.
        """
        thinner = Thinner(
            step=self.step,
            max_metric_steps=self.max_metric_steps,
            reserve=self.reserve,
            aggregate=self.aggregate,
            exempt=self.exempt,
            spent=spent,
            system=system,
        )
        return RunThinner(thinner, prefix=self.prefix)

    def check_spool_dir(self) -> None:
        """Make the folder for what is not sent yet, before a run is made that would have none.

        Raises:
            OSError: It cannot be made or written. A full disk is none: it may have room later.
        """
        try:
            self.spool_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.spool_dir, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "you may not write into it")
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return
            raise type(error)(
                error.errno,
                f"spool_dir={str(self.spool_dir)!r} cannot keep what is not sent yet ({error.strerror}). Pass a folder "
                "on a local disk that you may write into.",
            ) from error

    @property
    def script(self) -> str:
        """What is being run, for default names."""
        return script_name(sys.argv[0], self.platform.notebook_path)


def _check_model_name(name: str | None, *, in_unity_catalog: bool) -> None:
    """Accept the name of a registered model that MLflow would take; it says so only when training has ended."""
    if name is None:
        return
    if forbidden := set(name) & set("/:'\""):
        shown = " ".join(sorted(forbidden))
        raise ValueError(f"register_model must be a model's name without {shown}, got {name!r}.")
    if in_unity_catalog and len([part for part in name.split(".") if part.strip()]) != _UNITY_CATALOG_LEVELS:
        raise ValueError(
            f"register_model must be 'catalog.schema.model' in Unity Catalog, got {name!r}. Write "
            f"'main.default.{name}'."
        )


def default_spool_dir() -> Path:
    """Return where runs have their spools if nobody says."""
    return staging_area().path / _SPOOLS


def _launch() -> Launch:
    try:
        return detect_launch()
    except ValueError:
        # Lightning's own strategies delete WORLD_SIZE when they have trained. What is truly wrong with a launch is for
        # a strategy to refuse.
        return detect_launch({})


def _as_tuple(value: Any) -> Any:
    """Return a sequence that nobody can change; what is none is refused by the thinner."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _local_folder(spool_dir: object, platform: Platform) -> Path:
    text = str(spool_dir) if isinstance(spool_dir, str | Path) else ""
    is_mount = platform.is_databricks and text.startswith(("/Volumes/", "/dbfs/"))  # on macOS disks are in /Volumes
    if not text.strip() or "://" in text or text.startswith("dbfs:") or is_mount:
        raise ValueError(
            f"spool_dir must be a folder on a local disk, which files can be mapped into memory from, got "
            f"{spool_dir!r}. Leave it out for the system's temporary folder."
        )
    return Path(text)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
