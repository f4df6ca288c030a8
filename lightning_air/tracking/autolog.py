"""One run and every point once where `mlflow.pytorch.autolog()` is on, in whichever order it and the logger came.

Autologging wraps `Trainer.fit`: before Lightning does anything, it takes the active run or starts one, and adds a
callback that logs each epoch's metrics again, with the epoch as their step. So there is a run when the logger needs
one: the logger takes it, unless the user named another, and keeps autologging from logging metrics. Its parameters,
model and checkpoints stay. Nothing here imports `mlflow.pytorch`, which imports `pytorch_lightning`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run

from lightning_air._lightning import FSDPStrategy, ModelParallelStrategy, MultiProcessingLauncher, Trainer, all_parts
from lightning_air.tracking.run_identity import RunFacts, look_up_run

# MLflow puts it on each run that autologging starts; the value is the library that it is for.
_AUTOLOG_TAG = "mlflow.autologging"
_ASIDE = "autolog/"


@dataclass(frozen=True, kw_only=True)
class Autolog:
    """Autologging, as it is in one `Trainer.fit`.

    Attributes:
        run_id: The run that it logs into.
        run: That run, as the logger's server knows it; None where it is on another.
        is_own: Autologging has opened the run for this fit (a new one, or MLFLOW_RUN_ID's) and ends it with the fit, or
            the run has ended before; otherwise it is the user's active run, and the user ends it.
        is_inherited: The Trainer started this process inside of `fit`, so that MLflow's fluent interface, through which
            autologging logs checkpoints, knows of no active run here.
    """

    run_id: str
    run: RunFacts | None
    is_own: bool
    is_inherited: bool


class AutologNote(NamedTuple):
    """Who logs what, for the user; a warning where there may be more runs or points than the user expects."""

    text: str
    is_warning: bool


def find_autolog(trainer: Trainer, client: MlflowClient) -> Autolog | None:
    """Return what autologging does in the fit that is under way; None where it is off, or leaves this fit alone.

    Rank 0's, from `log_graph` on, before the logger chooses a run. Asks the server only where autologging is on.

    Args:
        trainer: Fitting, or past it: after `fit`, autologging leaves a run of its own alone.
        client: Of the logger's server.

    Raises:
        MlflowException: The server cannot be asked.
    """
    found = _run_id(trainer)
    if found is None:
        return None
    facts = look_up_run(client, found)
    run = mlflow.active_run() if facts is None else client.get_run(found)
    return Autolog(
        run_id=found,
        run=facts,
        is_own=_is_own(run) or (run is not None and run.info.status != "RUNNING"),
        is_inherited=_is_inherited(trainer),
    )


def settle_autolog(trainer: Trainer, autolog: Autolog, client: MlflowClient, run_id: str) -> AutologNote:
    """Share the work with autologging, and return what to tell the user. Rank 0's, once its run is open.

    Where both log into one run, autologging's metrics are left out, and those of its parameters that the run has with
    another value are kept under `autolog/`. Two runs stay as they are.

    Args:
        trainer: The fitting Trainer.
        autolog: From `find_autolog`.
        client: Of the logger's server.
        run_id: The logger's run.
    """
    hitches = [*_join(autolog), *_drop_sharded_checkpoints(trainer)]
    callback = _callback(trainer)
    # Of a Trainer's second fit, the callback still logs into the run of the first.
    is_muted = mute_autolog_metrics(trainer) if callback is not None and callback.run_id == run_id else False
    if is_muted:
        _keep_params_aside(callback, client)
    if autolog.run_id == run_id and is_muted:
        text = (
            f"mlflow.pytorch.autolog() and AirMLflowLogger share the run {run_id}: autolog logs "
            f"{_work_of(trainer, callback)}; AirMLflowLogger logs all metrics, of which autolog would log each epoch's "
            "again."
        )
    elif autolog.run_id == run_id:
        text = ""
        hitches.append(
            f"mlflow.pytorch.autolog() and AirMLflowLogger share the run {run_id}, and the autologging of MLflow "
            f"{mlflow.__version__} cannot be kept from logging metrics: each epoch's stand there twice, autolog's with "
            "the epoch as their step. mlflow.pytorch.autolog(disable=True) leaves them to AirMLflowLogger."
        )
    elif autolog.run is None:
        text = (
            f"mlflow.pytorch.autolog() logs into the run {autolog.run_id} on another tracking server than "
            f"AirMLflowLogger, which logs into the run {run_id}: each logs all that it logs. For one run, give the "
            "logger's tracking_uri to mlflow.set_tracking_uri() before training."
        )
    else:
        text = ""
        hitches.append(
            f"There are two runs: mlflow.pytorch.autolog() logs into {autolog.run_id}, which it had before "
            f"AirMLflowLogger was asked, and AirMLflowLogger into {run_id}. For one, train inside of "
            f"`with mlflow.start_run(run_id={run_id!r}):`."
        )
    return AutologNote(" ".join([text, *hitches]).strip(), is_warning=bool(hitches))


def stray_run_warning(trainer: Trainer, run_id: str) -> str | None:
    """Return what to warn of on a rank other than 0, where autologging has started a run that nobody will look into.

    Every rank that calls `mlflow.pytorch.autolog()` by itself has one. Asks no server.

    Args:
        trainer: The fitting Trainer.
        run_id: Rank 0's run.
    """
    active = mlflow.active_run()
    if active is None or active.info.run_id == run_id or not _is_own(active):
        return None
    return (
        f"mlflow.pytorch.autolog() has started the run {active.info.run_id} for rank {trainer.global_rank}, beside the "
        f"one of rank 0 ({run_id}), and so on every rank that calls it. Call it on rank 0 only, as MLflow advises."
    )


def end_autolog_run(run_id: str, status: str) -> None:
    """End autologging's run where it does not: for Ctrl-C and SIGTERM, which are a SystemExit by then.

    MLflow would leave it active, and call it FINISHED when the process ends. Rank 0's, when training was interrupted.
    Changes nothing about a run of the user's. Waits for the server as MLflow does, which is long if it is gone.

    Args:
        run_id: The logger's run; another one stays as it is.
        status: As "KILLED".

    Raises:
        MlflowException: The server cannot be asked.
    """
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id and _is_own(active):
        mlflow.end_run(status)


def mute_autolog_metrics(trainer: Trainer) -> bool:
    """Keep autologging from logging metrics with this Trainer, from now on; return whether it is.

    False, and all is as it was, if this version of MLflow does it in a way that we do not know.
    """
    callback = _callback(trainer)
    metrics_logger = getattr(callback, "metrics_logger", None)
    if isinstance(metrics_logger, _NoMetrics):
        return True
    if not callable(getattr(metrics_logger, "record_metrics", None)):
        return False
    callback.metrics_logger = _NoMetrics(metrics_logger)
    if hasattr(callback, "log_every_n_step"):
        callback.log_every_n_step = None  # it would wait for the device at those steps, for nothing
    return True


# ---- what autologging has put into the Trainer -----------------------------------------------------------------------


def _callback(trainer: Trainer) -> Any:
    """Return autologging's callback: its class is private, so it is known by what it has; None where there is none."""
    for part in all_parts(trainer):
        if type(part).__module__.split(".")[0] == "mlflow" and isinstance(getattr(part, "run_id", None), str):
            return part
    return None


def _checkpoint_callbacks(trainer: Trainer) -> list[Any]:
    kind = getattr(sys.modules.get("mlflow.pytorch"), "MlflowModelCheckpointCallback", None)
    return [part for part in all_parts(trainer) if kind is not None and isinstance(part, kind)]


def _is_inherited(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy.launcher, MultiProcessingLauncher)


def _is_own(run: Run | None) -> bool:
    return run is not None and run.data.tags.get(_AUTOLOG_TAG) == "pytorch"


def _run_id(trainer: Trainer) -> str | None:
    """Return the run that autologging logs into, as far as this process knows."""
    of_callback: str | None = getattr(_callback(trainer), "run_id", None)
    if _is_inherited(trainer):
        return of_callback
    active = mlflow.active_run()
    # The callback stays in the Trainer when autologging is turned off, and keeps the run of the Trainer's first fit.
    is_its = active is not None and (active.info.run_id == of_callback or _is_own(active))
    return str(active.info.run_id) if active is not None and is_its else None


def _work_of(trainer: Trainer, callback: Any) -> str:
    model = ["the model"] if getattr(callback, "log_models", False) else []
    checkpoints = ["its checkpoints"] if _checkpoint_callbacks(trainer) else []
    parts = ["its parameters", "the model's summary", *model, *checkpoints]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


# ---- what is changed -------------------------------------------------------------------------------------------------


def _join(autolog: Autolog) -> list[str]:
    """Make its run the active one of this process; without it, autologging's checkpoints start a run of their own."""
    if not autolog.is_inherited or mlflow.active_run() is not None:
        return []
    try:
        mlflow.start_run(run_id=autolog.run_id, log_system_metrics=False)  # the launching process has its monitor
    except Exception as error:  # noqa: BLE001 - training matters more
        return [f"The checkpoints of mlflow.pytorch.autolog() may be in a run of their own: {error}"]
    return []


def _drop_sharded_checkpoints(trainer: Trainer) -> list[str]:
    """Remove the callback that saves on rank 0 alone: gathering the shards, it waits for the others for ever."""
    callbacks = _checkpoint_callbacks(trainer)
    if (
        not callbacks
        or trainer.world_size == 1
        or not isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
    ):
        return []
    # A new list, since Lightning may be on its way through this one.
    trainer.callbacks = [part for part in trainer.callbacks if part not in callbacks]  # type: ignore[attr-defined]
    text = (
        "The checkpoints of mlflow.pytorch.autolog() are turned off: it saves them on rank 0 alone, which would wait "
        "for the other ranks' shards for ever. mlflow.pytorch.autolog(checkpoint=False) turns them off in advance."
    )
    return [text]


def _keep_params_aside(callback: Any, client: MlflowClient) -> None:
    """Have the callback's parameters give way: one that the run has with another value would lose all of them."""
    is_known = callable(getattr(getattr(callback, "client", None), "log_params", None))
    if is_known and not isinstance(callback.client, _ParamsAside):
        callback.client = _ParamsAside(callback.client, client)


class _NoMetrics:
    """Stands in for the part of autologging that collects metrics."""

    def __init__(self, metrics_logger: Any) -> None:
        self._metrics_logger = metrics_logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics_logger, name)

    def record_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Leave them to the logger."""

    def flush(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing."""


class _ParamsAside:
    """Stands in for autologging's client."""

    def __init__(self, autologs: Any, client: MlflowClient) -> None:
        self._autologs = autologs
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._autologs, name)

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Log them, aside where the run has another value; not at all where it has another one there, too."""
        has = self._client.get_run(run_id).data.params

        def is_free(key: str, value: Any) -> bool:
            return has.get(key, str(value)) == str(value)

        kept = {key if is_free(key, value) else _ASIDE + key: value for key, value in params.items()}
        self._autologs.log_params(run_id, {key: value for key, value in kept.items() if is_free(key, value)})
