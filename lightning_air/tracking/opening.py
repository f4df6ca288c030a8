"""Open the run of a training: choose it, find out which attempt this is, and make or adopt it. Rank 0's."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import mlflow
import requests
from mlflow import MlflowClient

from lightning_air._lightning import Trainer
from lightning_air.runtime import JobRun, Launch
from lightning_air.tracking import attempts
from lightning_air.tracking.autolog import Autolog
from lightning_air.tracking.experiment import choose_experiment
from lightning_air.tracking.experiment_opening import OpenExperiment, get_or_create_experiment
from lightning_air.tracking.logger_options import LoggerOptions
from lightning_air.tracking.run_identity import RunChoice, RunFacts, choose_run, look_up_run
from lightning_air.tracking.run_opening import OpenRun, open_run
from lightning_air.tracking.run_tags import World, run_tags
from lightning_air.tracking.warn_once import Warn
from lightning_air.tracking.workspace_user import ask_workspace_user

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long a server that does not answer at the start is waited for."""

_KNOCK_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
_SQLITE = "sqlite:///"
_USER_INFO = re.compile(r"(?<=//)[^/@\s]+@")

# On each run that autologging starts. Where the run is opened before the logger meets the Trainer, nothing else tells.
_AUTOLOG_TAG = "mlflow.autologging"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run that is open.

    Attributes:
        run: The run.
        choice: How it came to be; to open it again.
        ordinal: Which attempt of its job this is; 1 outside of a job.
        experiment_name: If it had to be looked up.
    """

    run: OpenRun
    choice: RunChoice
    ordinal: int
    experiment_name: str | None = None


class Opening:
    """Opens runs for a logger.

    Args:
        options: The logger's.
        client: To the server.
        launch: Of this process.
        job: What it belongs to, if something starts it again.
        warn: Told what the user may not have expected.
    """

    def __init__(
        self, options: LoggerOptions, client: MlflowClient, launch: Launch, job: JobRun | None, *, warn: Warn
    ) -> None:
        self._options = options
        self._client = client
        self._launch = launch
        self._job = job
        self._warn = warn
        self._experiment: OpenExperiment | None = None

    def first(self, state: Mapping[str, Any] | None, autolog: Autolog | None) -> Opened:
        """Open the run that this training is to log into.

        Args:
            state: What the checkpoint that is resumed from says.
            autolog: What autologging does in this fit.

        Raises:
            ConnectionError: The server does not answer.
            MlflowException: The server cannot be asked, or refuses.
            ValueError, RuntimeError: What was asked for cannot be; says what to do.
        """
        self._wait_for_server()
        choice = self._choose(state, autolog)
        experiment_id = choice.experiment_id
        if choice.run_id is None and experiment_id is None:
            experiment_id = self._named_experiment().experiment_id
        ordinal = 1
        if self._job is not None and choice.run_id is None and experiment_id is not None:
            ordinal = attempts.attempt_ordinal(attempts.find_attempts(self._client, experiment_id, self._job))
        tags = run_tags(self._options.tags, world_of(self._launch)) | attempts.attempt_tags(self._job, ordinal)
        run = open_run(self._client, choice, experiment_id=experiment_id, run_name=self._options.run_name, tags=tags)
        for text in (*choice.warnings, *run.warnings):
            self._warn(text, text)
        choice = replace(choice, run_id=run.run_id, experiment_id=run.experiment_id, parent_run_id=None)
        return Opened(run=run, choice=choice, ordinal=ordinal, experiment_name=self._name_of_experiment(run))

    def _name_of_experiment(self, run: OpenRun) -> str | None:
        """Return where the run is, and warn if the user has named another experiment; None if it cannot be known."""
        named = self._experiment
        if named is not None and named.experiment_id == run.experiment_id:
            return named.name
        try:
            name = str(self._client.get_experiment(run.experiment_id).name)
        except Exception as error:  # noqa: BLE001 - it may be closed to the user, and is only shown
            logger.debug("The experiment %s cannot be asked for: %s", run.experiment_id, error)
            return None
        wanted = self._options.experiment_name
        if wanted not in {None, name}:
            self._warn(
                "other experiment",
                f"experiment_name={wanted!r} is not used: the run {run.run_id} is in the experiment {name!r}, and a "
                "run cannot move.",
            )
        return name

    def reconsidered(self, reserved: Opened, state: Mapping[str, Any] | None, autolog: Autolog | None) -> Opened:
        """Return the run to log into, now that the checkpoint and the Trainer are known; nothing is logged yet.

        Somebody has asked for the run's id before, as ModelCheckpoint does for its folder.

        Args:
            reserved: What was opened then.
            state: As for `first`.
            autolog: As for `first`.

        Raises:
            MlflowException, ValueError, RuntimeError: As `first`.
        """
        choice = self._choose(state, autolog)
        if choice.run_id in {None, reserved.run.run_id}:
            for text in choice.warnings:
                self._warn(text, text)
            return self.again(reserved)
        self._give_back(reserved)
        return self.first(state, autolog)

    def _give_back(self, reserved: Opened) -> None:
        """Delete a run that we made, unless somebody has put something into it: then it ends here."""
        run = reserved.run
        if not run.is_new:
            return
        data = self._client.get_run(run.run_id).data
        is_empty = not (data.metrics or data.params or data.tags.keys() - run.tags.keys())
        if is_empty and not self._client.list_artifacts(run.run_id):
            self._client.delete_run(run.run_id)
            return
        self._client.set_terminated(run.run_id)
        self._warn(
            "given back",
            f"The run {run.run_id} was made when its id was asked for, and another is logged into now. What was put "
            "into it stays there.",
        )

    def again(self, earlier: Opened) -> Opened:
        """Open the run of an earlier stage again; if the server cannot be asked, with what was known of it then."""
        trouble = trouble_reaching(self._options.tracking_uri)
        if trouble is None:
            try:
                run = open_run(self._client, earlier.choice, experiment_id=earlier.choice.experiment_id, tags={})
                return replace(earlier, run=run)
            except Exception as error:  # noqa: BLE001 - training, which has begun long ago, must not end because of it
                trouble = f"{type(error).__name__}: {error}"
        self._warn("again", f"The tracking server cannot be asked for the run {earlier.run.run_id}: {trouble}")
        return earlier

    def _wait_for_server(self) -> None:
        """Wait for a server that does not answer, not as long as MLflow would, and not in silence."""
        uri = self._options.tracking_uri
        shown = f"The tracking server {_USER_INFO.sub('', uri)} does not answer"
        until_seconds = time.monotonic() + PATIENCE_SECONDS
        while (trouble := trouble_reaching(uri)) is not None:
            if time.monotonic() > until_seconds:
                raise ConnectionError(f"{shown}. Start it, or pass another tracking_uri. {trouble}")
            self._warn("knock", f"{shown}. It is tried for {PATIENCE_SECONDS:.0f} s.")
            time.sleep(_PAUSE_SECONDS)

    def _choose(self, state: Mapping[str, Any] | None, autolog: Autolog | None) -> RunChoice:
        options = self._options
        active = mlflow.active_run()
        facts = None
        if active is not None and _same_server(mlflow.get_tracking_uri(), options.tracking_uri):
            facts = RunFacts(active.info.run_id, active.info.experiment_id)
        is_autologs = facts is not None and active is not None and _AUTOLOG_TAG in active.data.tags
        if autolog is not None and autolog.run is not None:
            facts, is_autologs = autolog.run, autolog.is_own
        is_named = (options.experiment_name or options.platform.mlflow_experiment_name) is not None
        is_given = (options.run_id or options.platform.mlflow_run_id) is not None
        choice = choose_run(
            look_up=lambda run_id: look_up_run(self._client, run_id),
            run_id=options.run_id,
            environment_run_id=options.platform.mlflow_run_id,
            checkpoint_run_id=None if state is None else state.get("run_id"),
            resume_run=options.resume_run,
            active=facts,
            adopt_active=options.adopt_active or is_autologs or (autolog is not None and autolog.run is not None),
            experiment_id=self._named_experiment().experiment_id if is_named and not is_given else None,
        )
        if choice.kind == "active" and is_autologs:  # which ends it with the fit; a later stage is ours
            choice = replace(choice, ends="when_done")
        return choice

    def _named_experiment(self) -> OpenExperiment:
        if self._experiment is None:
            options = self._options
            choice = choose_experiment(
                options.experiment_name,
                options.platform,
                tracking_uri=options.tracking_uri,
                script=options.script,
                ask_user=lambda: ask_workspace_user(options.tracking_uri),
            )
            self._experiment = get_or_create_experiment(
                self._client, choice, artifact_location=options.artifact_location
            )
            if self._experiment.warning is not None:
                self._warn(self._experiment.warning, self._experiment.warning)
        return self._experiment


def trouble_reaching(tracking_uri: str) -> str | None:
    """Ask once whether a server is there, which MLflow's client would try for four minutes.

    Returns:
        Why it is not; None if it is, or if it is none that is asked by plain HTTP.
    """
    if not tracking_uri.startswith(("http://", "https://")):
        return None
    try:
        requests.head(tracking_uri, timeout=_KNOCK_SECONDS).close()
    except requests.exceptions.SSLError:  # it is there; MLflow knows whom to trust
        return None
    except (requests.ConnectionError, requests.Timeout) as error:
        return f"{type(error).__name__}: {error}"
    except requests.RequestException:  # MLflow says it better
        return None
    return None


def _same_server(one: str, other: str) -> bool:
    return _normal(one) == _normal(other)


def _normal(tracking_uri: str) -> str:
    if tracking_uri.startswith(_SQLITE):
        return f"{_SQLITE}{Path(unquote(tracking_uri.removeprefix(_SQLITE))).absolute()}"
    return tracking_uri.rstrip("/")


def world_of(launch: Launch, trainer: Trainer | None = None) -> World:
    """Return the machines of a training: as the launch knows them, or better, as the Trainer does."""
    if trainer is None:
        return World(launch=launch.kind, num_nodes=launch.num_nodes or 1, world_size=launch.world_size or 1)
    sharding = getattr(trainer.strategy, "sharding", None)
    return World(
        launch=launch.kind,
        num_nodes=trainer.num_nodes,
        world_size=trainer.world_size,
        sharding=sharding if isinstance(sharding, str) else type(trainer.strategy).__name__,
    )
