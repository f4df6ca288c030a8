"""`AirMLflowLogger`: Lightning's MLflow logger, for runs of any length and servers of any mood."""

import atexit
import os
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from torch import Tensor, nn
from typing_extensions import override

from lightning_air._lightning import (
    LightningModule,
    Logger,
    MLFlowLogger,
    ModelCheckpoint,
    SIGTERMException,
    Trainer,
    loaded_checkpoint,
    rank_zero_experiment,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from lightning_air.runtime import detect_job_run, detect_platform
from lightning_air.tracking.autolog import Autolog, end_autolog_run, find_autolog, stray_run_warning
from lightning_air.tracking.companion import RunCompanion, state_of
from lightning_air.tracking.ending import end_reserved
from lightning_air.tracking.flat_params import flatten_params
from lightning_air.tracking.logger_options import LoggerOptions
from lightning_air.tracking.node_output import NodeOutput
from lightning_air.tracking.opening import Opened, Opening
from lightning_air.tracking.run_session import RunSession
from lightning_air.tracking.thinning import DEFAULT_EXEMPT
from lightning_air.tracking.warn_once import WarnOnce
from lightning_air.tracking.window import Aggregate

Status = Literal["FINISHED", "FAILED", "KILLED"]


@final
class AirMLflowLogger(MLFlowLogger):
    """Log to MLflow without waiting for it, within the platform's cap of metric steps, and without losing anything.

    To be used in place of Lightning's `MLFlowLogger`, under any strategy, beside other loggers. `log_metrics` writes
    into a memory-mapped file and returns; one thread thins, batches and sends. What the server has not taken is kept,
    also through a `kill -9`, and sent by the next attempt or by `lightning-air replay`.

    Differences from Lightning's: nothing is opened by the constructor; the default experiment and tracking URI are the
    platform's (or a local SQLite file), and there is no `save_dir` or `synchronous`; MLFLOW_RUN_ID,
    MLFLOW_EXPERIMENT_NAME and an active run are honoured, and a run that was there before ends with the process, not
    with each stage; names that MLflow does not take are mapped instead of cut; a changed parameter becomes a tag
    instead of an error; parameters are kept up to 6,000 characters instead of 250; values that are not finite become
    `nonfinite/<name>`; metrics without a step are of the last one instead of step 0; Ctrl-C and SIGTERM end the run as
    KILLED; the fluent interface's tracking URI is left alone.

    Two limits. With `Trainer(enable_autolog_hparams=False)` Lightning doesn't introduce the Trainer: metrics arrive all
    the same, without attempts, links, the plan for the known length, and what checkpoints carry. Ranks that are forked
    or spawned for each call (`ddp_notebook`, `ddp_spawn`) make a run for each call, unless `logger.run_id` was asked
    for before.

    Args:
        experiment_name: Default: MLFLOW_EXPERIMENT_NAME, else the script's name, on Databricks below the user's folder.
        run_name: Of a new run; default: the server's choice.
        step: How many steps one point of a curve stands for: "auto" is as few as the budget allows for a run of any
            length, a number is so many until the budget would not last.
        max_metric_steps: The most points that the run may have in all; a curve's point is one metric step.
        reserve: Points of these that are kept for exempt metrics; default: a tenth.
        aggregate: What the values between two points become: "mean", "min", "max", "last"; several make several curves.
        exempt: Patterns (as for `fnmatch`) of metrics that are not thinned.
        tracking_uri: Default: MLFLOW_TRACKING_URI, else "databricks" on the platform, else `mlflow.db` in the current
            folder.
        artifact_location: Of a new experiment; on Databricks also a volume, `/Volumes/…`.
        run_id: A run to go on with.
        tags: Of the run.
        log_model: As in Lightning: True uploads the checkpoints at the end, "all" each as it comes.
        register_model: A registered model's name (in Unity Catalog `catalog.schema.model`): when a fit has ended well,
            its best checkpoint becomes a new version of it. Raise `close_timeout` for a large one.
        prefix: Put before each metric's name, with a "-".
        resume_run: "new" makes a run per attempt, linked to the one resumed from; "continue" goes on in the run that
            the checkpoint was saved in.
        adopt_active: Log into the active run of MLflow's fluent interface instead of into a child of it.
        flush_seconds: Points are sent at least so often.
        close_timeout: How long the end of training may wait for the server, in seconds; a third of it after a failure.
        spool_dir: A local folder for what is not sent yet. Default: in the system's temporary folder.
        log_console: Keep each node's output as artifacts `logs/node_<i>/…`, updated while it runs.
        full_record: Keep every value as it was logged too: artifacts `metrics/….jsonl.gz`, uploaded as they fill.

    Raises:
        ValueError: If an option is wrong.
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        *,
        step: Literal["auto"] | int = "auto",
        max_metric_steps: int = 10_000_000,
        reserve: int | None = None,
        aggregate: Sequence[Aggregate] = ("mean",),
        exempt: Sequence[str] = DEFAULT_EXEMPT,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
        log_model: bool | Literal["all"] = False,
        register_model: str | None = None,
        prefix: str = "",
        resume_run: Literal["new", "continue"] = "new",
        adopt_active: bool = False,
        flush_seconds: float = 5.0,
        close_timeout: float = 60.0,
        spool_dir: str | Path | None = None,
        log_console: bool = True,
        full_record: bool = False,
    ) -> None:
        Logger.__init__(self)  # the base's own opens the server, on every rank
        platform = detect_platform()
        self._options = LoggerOptions.checked(
            platform,
            experiment_name=experiment_name,
            run_name=run_name,
            step=step,
            max_metric_steps=max_metric_steps,
            reserve=reserve,
            aggregate=aggregate,
            exempt=exempt,
            tracking_uri=tracking_uri,
            artifact_location=artifact_location,
            run_id=run_id,
            tags=tags,
            log_model=log_model,
            register_model=register_model,
            prefix=prefix,
            resume_run=resume_run,
            adopt_active=adopt_active,
            flush_seconds=flush_seconds,
            close_timeout=close_timeout,
            spool_dir=spool_dir,
            log_console=log_console,
            full_record=full_record,
        )
        self._warn = WarnOnce(rank_zero_warn)
        self._client: MlflowClient | None = None
        self._opened: Opened | None = None  # the run; there may be no session of it yet
        self._session: RunSession | None = None
        self._earlier: RunSession | None = None  # of an earlier stage of training
        self._params: list[dict[str, Any] | Namespace] = []  # until the run is open
        self.has_met = False
        self._run_id = run_id or platform.mlflow_run_id
        self._experiment_id: str | None = None
        self._last_step = 0
        self._status: Status | None = None
        self._ended: Status = "FINISHED"
        self._output: NodeOutput | None = None
        self._is_registered = False
        self._old_crash: object = None  # what has ended an earlier cell of a notebook

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to log into the same run."""
        kept = dict.fromkeys(("_client", "_session", "_earlier", "_output"))
        return {**self.__dict__, **kept, "has_met": False, "_is_registered": False, "_old_crash": None}

    # ---- what Lightning asks for -----------------------------------------------------------------------------------

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> MlflowClient:
        """The MLflow client, for figures, text, images and what else it can log; with `run_id`. On rank 0."""
        if self._client is None:
            self._client = MlflowClient(self._options.tracking_uri)
        return self._client

    @property
    def tracking_uri(self) -> str:
        """Where the server or the database is."""
        return self._options.tracking_uri

    @property
    @override
    def run_id(self) -> str | None:
        """The run's id, the same on every rank once training has begun; asking for it on rank 0 opens the run."""
        if self._opened is None and self._is_first:
            self._reserve()
        return self._run_id

    @property
    @override
    def experiment_id(self) -> str | None:
        """The experiment's id, as `run_id`."""
        if self._experiment_id is None and self._is_first:
            self._reserve()
        return self._experiment_id

    @property
    @override
    def name(self) -> str | None:
        """The experiment's id, as in Lightning."""
        return self.experiment_id

    @property
    @override
    def version(self) -> str | None:
        """The run's id, as in Lightning."""
        return self.run_id

    @property
    @override
    def save_dir(self) -> str | None:
        """None: files go below the Trainer's `default_root_dir`."""
        return None

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the values and return; they arrive when the server takes them. Rank 0's.

        Args:
            metrics: By name. What is no number is left out, with a warning.
            step: On the horizontal axis; None is the last one.
        """
        if self._session is None and not self._is_first:
            return
        self._last_step = self._last_step if step is None else step
        self._open().log_metrics(self._last_step, metrics)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Record parameters: the first time as such, later differences as tags, and all of them as an artifact.

        Raises:
            TypeError: If they are neither names with values nor a namespace or dataclass.
        """
        flatten_params(params)  # what is wrong with them is an error here, and not when the run is opened
        if not self._is_first:
            return
        self._params.append(params)
        if self._opened is not None and self._earlier is not None:
            self._open()
        self._end_with_process()
        self._send_params()

    def _send_params(self) -> None:
        if self._session is not None:
            params, self._params = self._params, []
            self._session.records.log_params(params)

    @override
    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Meet the Trainer, once. Collective: Lightning calls this on every rank, when it has set up."""
        del input_array
        trainer = getattr(model, "_trainer", None) if isinstance(model, LightningModule) else None
        if not isinstance(trainer, Trainer) or self.has_met:
            return
        RunCompanion.join(trainer, self)
        checkpoint = loaded_checkpoint(trainer)
        if checkpoint or not trainer.strategy.restore_checkpoint_after_setup:  # else the companion does, later
            self.open_together(trainer, checkpoint)

    @override
    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Note the checkpoints in the run, and upload them if `log_model` says so."""
        self._open().records.note_checkpoint(checkpoint_callback)

    @override
    def save(self) -> None:
        """Do nothing: Lightning calls this after each `log_metrics`, and what was logged is safe already."""

    @override
    def finalize(self, status: str = "success") -> None:
        """Send what is left, within `close_timeout`, and end the run if it is ours to end.

        A later stage (`trainer.test` after `trainer.fit`) opens it again. Lightning calls this on every rank.
        """
        self.has_met = False
        self._ended = self._status or _status(status)
        self._old_crash = getattr(sys, "last_value", None)
        until_seconds = time.monotonic() + self._close_seconds
        session, self._session = self._session, None
        if session is not None and session.pid == os.getpid():
            self._earlier = session
        try:
            if session is not None and session.pid == os.getpid():
                session.close(self._ended, deadline_seconds=self._close_seconds)
        finally:  # also after a Ctrl-C
            if self._output is not None:
                is_sent = self._output.close(max(1.0, until_seconds - time.monotonic()))
                if not is_sent and session is not None:
                    session.keep_output(self._output)
        if session is not None and self._ended == "KILLED":
            end_autolog_run(session.run_id, "KILLED")
        if session is not None and session.is_told:
            self._forget_process()

    @property
    def _close_seconds(self) -> float:
        return self._options.close_timeout / (1 if self._ended == "FINISHED" else 3)

    # ---- opening -----------------------------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        # Before a Trainer is made, Lightning takes the process of each of AI Runtime's nodes for rank 0, and one that
        # was forked for what its parent was.
        launch = self._options.launch
        return getattr(rank_zero_only, "rank", 0) == 0 and launch.node_rank == 0 and launch.global_rank in {None, 0}

    def _reserve(
        self, state: Mapping[str, Any] | None = None, autolog: Autolog | None = None, *, reconsiders: bool = False
    ) -> Opened:
        """Choose the run and make it, so that its id is known. Rank 0's.

        Args:
            state: As for `Opening.first`.
            autolog: As for `Opening.first`.
            reconsiders: These are known now: a run that nothing was logged into may give way to another.
        """
        opening = Opening(self._options, self.experiment, self._options.launch, detect_job_run(), warn=self._warn)
        known = self._opened
        if known is None:
            self._options.check_spool_dir()
            opened = opening.first(state, autolog)
        elif reconsiders and self._earlier is None:
            opened = opening.reconsidered(known, state, autolog)
        else:
            opened = opening.again(known)
        if known is None or known.run.run_id != opened.run.run_id:
            rank_zero_info(opened.choice.sentence)
        self._opened = opened
        self._run_id, self._experiment_id = opened.run.run_id, opened.run.experiment_id
        self._end_with_process()
        return opened

    def _open(
        self, state: Mapping[str, Any] | None = None, autolog: Autolog | None = None, *, by_trainer: bool = False
    ) -> RunSession:
        """Return the open run. Rank 0's."""
        if self._session is not None and self._session.pid != os.getpid():  # that is the parent's, and closed here
            self._session = None
        if self._session is None:
            earlier = self._earlier
            self._session = RunSession(
                self._options,
                self.experiment,
                self._reserve(state, autolog, reconsiders=by_trainer),
                earlier=earlier,
                state=state,
                warn=self._warn,
                say=rank_zero_info,
            )
            self._status = None if earlier is None or by_trainer else self._ended
            self._send_params()
        return self._session

    def open_together(self, trainer: Trainer, checkpoint: Mapping[str, Any] | None) -> None:
        """Open the run on rank 0 and tell its id to the others. Collective: every rank calls this.

        Args:
            trainer: Whose training it is.
            checkpoint: That is resumed from; {} for none, None if that is not known yet.

        Raises:
            Exception: On every rank, if rank 0 cannot.
        """
        told: tuple[str, ...] = ()
        error: Exception | None = None
        if trainer.is_global_zero:
            try:
                session = self._open_for(trainer, checkpoint)
                told = session.run_id, session.experiment_id, session.attempt
            except Exception as raised:  # noqa: BLE001 - the others wait
                error, told = raised, (f"{type(raised).__name__}: {raised}",)
        told = trainer.strategy.broadcast(told)
        if error is not None:
            raise error
        if len(told) == 1:
            raise RuntimeError(f"Rank 0 cannot open the run. {told[0]}")
        self._run_id, self._experiment_id, attempt = told
        self.has_met = checkpoint is not None
        if not trainer.is_global_zero and (text := stray_run_warning(trainer, self._run_id)) is not None:
            self._warn(text, text)
        if self._options.log_console and trainer.local_rank == 0:
            self._keep_output(f"logs/node_{trainer.node_rank}/{attempt}")

    def _keep_output(self, folder: str) -> None:
        try:
            if self._output is None:
                self._output = NodeOutput(
                    lambda: MlflowClient(self._options.tracking_uri), str(self._run_id), folder, warn=self._warn
                )
            self._output.start()
        except OSError as error:  # no disk; the other ranks train on
            self._warn("output", f"The output of this node is not kept with the run: {error}")

    def _open_for(self, trainer: Trainer, checkpoint: Mapping[str, Any] | None) -> RunSession:
        if checkpoint is None:
            return self._open(by_trainer=True)
        state = state_of(checkpoint, trainer, self)
        autolog = None
        try:
            autolog = find_autolog(trainer, self.experiment)
        except MlflowException as error:
            if self._opened is None:
                raise
            self._warn("find autolog", f"What mlflow.pytorch.autolog() does cannot be seen: {error}")
        session = self._open(state, autolog, by_trainer=True)
        session.meet(trainer, checkpoint, state, autolog)
        return session

    # ---- for the companion -------------------------------------------------------------------------------------------

    @property
    def session(self) -> RunSession | None:
        """The open run, on rank 0."""
        return self._session

    @property
    def latest_session(self) -> RunSession | None:
        """The open run, or what it was when it was open."""
        return self._session or self._earlier

    def note_exception(self, exception: BaseException) -> None:
        """Remember how training ended, for `finalize`."""
        self._status = _status_of(exception)

    def _end_with_process(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self._end_at_exit)

    def _forget_process(self) -> None:
        """Nothing is left to be done when the process ends."""
        if self._is_registered and not self._params:
            self._is_registered = False
            atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        try:
            self._end_now()
        except Exception as error:  # noqa: BLE001 - nobody is left to handle it
            self._warn("exit", f"The run could not be ended as the process ends: {error}")

    def _end_now(self) -> None:
        crash = getattr(sys, "last_value", None)  # what ended the script, after training or before
        if crash is self._old_crash:
            crash = None
        if self._params:  # nobody has trained
            self._open()
        if self._session is not None and self._session.pid == os.getpid():  # nobody has finalized
            self._status = self._status if crash is None else _status_of(crash)
            self.finalize()
        session, opened = self._earlier, self._opened
        if opened is None or (session is not None and session.is_told) or opened.choice.ends == "never":
            return
        status = self._ended if crash is None else _status_of(crash)
        if session is not None:
            # Where the end of training has waited already, what it left is in the outbox.
            is_second = session.choice.ends == "when_done"
            session.end(status, deadline_seconds=min(self._close_seconds, 5.0) if is_second else self._close_seconds)
        elif opened.run.is_new:  # its id was asked for, and nothing more
            end_reserved(
                self.experiment,
                opened.run.run_id,
                status,
                uri=self.tracking_uri,
                folder=self._options.spool_dir / opened.run.run_id,
                deadline_seconds=self._close_seconds,
                warn=self._warn,
            )


def _status(lightnings: str) -> Status:
    if lightnings in {"success", "finished"}:
        return "FINISHED"
    exception = sys.exception()
    return "FAILED" if exception is None else _status_of(exception)


def _status_of(exception: BaseException) -> Status:
    return "KILLED" if isinstance(exception, KeyboardInterrupt | SIGTERMException) else "FAILED"
