"""An open run on rank 0, from its opening to its end: what is said to the server, and when.

Opening speaks with the server and waits for it, before training begins; so a wrong address or name is an error at once.
From then on nothing waits: metrics go through the tracker, all else through one background thread.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from torch import Tensor

from lightning_air._lightning import ModelCheckpoint, Trainer, TrainerFn, batches_that_stepped
from lightning_air.runtime import detect_job_run
from lightning_air.tracking import attempts
from lightning_air.tracking.artifacts import attempt_folder
from lightning_air.tracking.attempts import ResumePoint
from lightning_air.tracking.autolog import Autolog, settle_autolog
from lightning_air.tracking.background import Background
from lightning_air.tracking.charging import BEFORE, charges_of, writer_tag
from lightning_air.tracking.ending import ending_now, tell_end
from lightning_air.tracking.folder_lock import SpoolInUseError
from lightning_air.tracking.full_record import send_record
from lightning_air.tracking.leftovers import send_leftovers
from lightning_air.tracking.logger_options import LoggerOptions
from lightning_air.tracking.metric_names import examples
from lightning_air.tracking.node_output import NodeOutput
from lightning_air.tracking.opening import Opened, trouble_reaching, world_of
from lightning_air.tracking.outbox import OUTPUT_FOLDER, Addressed, Outbox, read_outbox, write_outbox
from lightning_air.tracking.outbox_sending import send_outbox
from lightning_air.tracking.run_records import RunRecords
from lightning_air.tracking.run_tags import run_tags
from lightning_air.tracking.summary import RunPlace, end_text, start_text
from lightning_air.tracking.system_points import (
    count_system_points,
    estimate_found_points,
    estimate_system_points,
    points_per_second,
    system_interval,
    system_warning,
)
from lightning_air.tracking.tails import Tail
from lightning_air.tracking.tracker import Tracker
from lightning_air.tracking.warn_once import Warn

_PARAMS_SECONDS = 10.0


class RunSession:
    """The run that training logs into, while a stage of it runs. Training thread of rank 0.

    Args:
        options: The logger's.
        client: To the server.
        opened: The run.
        earlier: Of the same run, and closed; None at first.
        state: What the checkpoint that is resumed from says.
        warn: Told of trouble.
        say: Told what the user is to know.

    Raises:
        RuntimeError: Another logger logs into the run.
        OSError: The spool cannot be made.
    """

    def __init__(
        self,
        options: LoggerOptions,
        client: MlflowClient,
        opened: Opened,
        *,
        earlier: "RunSession | None",
        state: Mapping[str, Any] | None,
        warn: Warn,
        say: Callable[[str], object],
    ) -> None:
        self.tracking_uri = options.tracking_uri
        self.pid = os.getpid()
        self.seconds_blocked = 0.0
        self._options = options
        self._client = client
        self._warn = warn
        self._say = say
        self._launch, self._job = options.launch, detect_job_run()
        self.has_met = self._is_over = self._is_complete = False
        self.is_told = self._is_refused = False
        self._resumed: str | None = None
        self._trainer: Trainer | None = None  # that trains; not one that only evaluates
        self._is_first = earlier is None
        self.opened, run = opened, opened.run
        self.choice, self.ordinal, self.attempt = opened.choice, opened.ordinal, attempt_folder(opened.ordinal)
        self.run_id, self.experiment_id = run.run_id, run.experiment_id
        self._place = RunPlace(
            tracking_uri=options.tracking_uri,
            experiment_id=run.experiment_id,
            run_id=run.run_id,
            run_name=run.name,
            experiment_name=opened.experiment_name,
            workspace_url=options.platform.workspace_url,
            job=self._job,
        )
        self._rolled_back = run.tags.get(attempts.ROLLED_BACK_TAG)
        self.background = Background("lightning-air-mlflow", warn=warn, on_trouble=self._keep_outbox)
        self._outbox_lock = threading.Lock()
        self._extra = Outbox()  # what is not the background's to send
        self._leftovers = Background("lightning-air-leftovers", warn=warn)  # of its own: they may take long
        mine = state if state is not None and state.get("run_id") == run.run_id else None
        self.records: RunRecords = self._new_records(state) if earlier is None else earlier.records
        charged = charges_of(run.tags)
        try:
            self.tracker: Tracker = Tracker(
                run.run_id,
                options.tracking_uri,
                options.spool_dir / run.run_id,
                new_thinner=lambda spent: options.new_thinner(spent, system=self._system_points()),
                charged=charged,
                found=0 if charged else self._found_points(mine),
                shown=run.latest,
                earlier=None if earlier is None else earlier.tracker,
                tail=None if mine is None else Tail.of(mine),
                flush_seconds=options.flush_seconds,
                full_record=options.full_record,
                on_part=self._send_record,
                on_events=self.records.note_events,
                warn=warn,
            )
        except Exception as error:
            if run.is_new and earlier is None:  # nobody would end it
                client.set_terminated(run.run_id, "FAILED")
            if isinstance(error, SpoolInUseError):
                raise RuntimeError(  # noqa: TRY004 - it is no wrong type
                    f"Another AirMLflowLogger logs into the run {run.run_id}, and a run takes one at a time. Give each "
                    f"a run of its own (run_id), or wait until the other has ended. {error}"
                ) from error
            raise
        self._take_over_outbox()
        if earlier is not None:
            self.records.reopen(run, self.background)
            self.background.submit("the run's status", self._say_running, note=Outbox)

    def _take_over_outbox(self) -> None:
        """Have sent what an earlier attempt or stage has left of this run, but for its end, which is over."""
        try:
            found = read_outbox(self.tracker.folder)
            if found is None:
                return
            left = replace(found, outbox=replace(found.outbox, ending=None))
            write_outbox(self.tracker.folder, left)
        except (OSError, ValueError) as error:
            self._warn("outbox", f"What an earlier attempt has left of the run {self.run_id} is not sent: {error}")
            return
        self.background.submit(
            "what an earlier attempt has left",
            lambda: send_outbox(self.tracker.folder, left, self._client, warn=self._warn),
            note=lambda: left.outbox,
        )

    def _keep_outbox(self) -> None:
        """Put on the disk what the server has not been told, for the next attempt. On any thread."""
        with self._outbox_lock:
            outbox = self.background.outbox().plus(self._extra)
            addressed = Addressed(run_id=self.run_id, tracking_uri=self.tracking_uri, outbox=outbox)
            try:
                write_outbox(self.tracker.folder, addressed)
            except OSError as error:
                self._warn("outbox", f"What the server has not been told cannot be kept for later: {error}")

    def _say_running(self) -> None:
        if not self._is_over:  # as when it could not be said for the whole stage
            self._client.update_run(self.run_id, status="RUNNING")

    def _new_records(self, state: Mapping[str, Any] | None) -> RunRecords:
        return RunRecords(
            self._client,
            self.opened.run,
            self.background,
            attempt=self.attempt,
            log_model=self._options.log_model,
            checkpoints=None if state is None else state.get("checkpoints"),
            warn=self._warn,
        )

    def _send_leftovers(self, state: Mapping[str, Any] | None) -> None:
        """Have sent what other runs have left, on this machine or in the checkpoint that is resumed from."""
        tail = None if state is None else Tail.of(state)
        self._leftovers.submit(
            "what earlier attempts have left",
            lambda: send_leftovers(
                self._options.spool_dir,
                self.tracking_uri,
                but=self.run_id,
                tail=None if tail is None or state is None else (str(state["run_id"]), tail),
                warn=self._warn,
                say=self._say,
            ),
        )

    def _latest_steps(self) -> list[tuple[str, int]]:
        return [(key, step) for key, (_, step) in self.opened.run.latest.items()]

    def _found_points(self, mine: Mapping[str, Any] | None) -> int:
        """Return how many points the run has that no tag of ours counts."""
        if mine is not None and "metric_steps" in mine:
            return int(mine["metric_steps"])
        found = estimate_found_points(self._latest_steps())
        if found:
            tag = writer_tag(BEFORE)
            self._warn(
                "found",
                f"The run {self.run_id} has metrics that this logger has not counted: {found:,} points at most are "
                f"taken from its budget for them. If you know their number, set the run's tag {tag!r} to it before.",
            )
        return found

    def _system_points(self) -> int:
        """Return how many points the platform's system metrics will take of the cap: none where nobody samples them."""
        there = count_system_points(self._latest_steps())
        interval = system_interval(
            self._options.platform,
            self._launch,
            is_adopted=not self.opened.run.is_new,
            is_sampled=there > 0,
        )
        if interval is None:
            return there
        num_nodes, num_gpus = self._launch.num_nodes or 1, torch.cuda.device_count()
        estimate = estimate_system_points(num_nodes=num_nodes, gpus_per_node=num_gpus, interval_seconds=interval)
        text = system_warning(
            there=there,
            estimate=estimate,
            cap=self._options.max_metric_steps,
            rate=points_per_second(num_nodes, num_gpus, interval),
            interval_seconds=interval,
        )
        if text is not None:
            self._warn("system metrics", text)
        return there + estimate

    # ---- the Trainer -------------------------------------------------------------------------------------------------

    def meet(
        self,
        trainer: Trainer,
        checkpoint: Mapping[str, Any],
        state: Mapping[str, Any] | None,
        autolog: Autolog | None,
    ) -> None:
        """Note what only the Trainer knows: the world, what it resumes from, and who else logs."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        tags = run_tags(self._options.tags, world_of(self._launch, trainer))
        tags = {key: value for key, value in tags.items() if not key.startswith("mlflow.")}
        if checkpoint and is_fitting:
            path = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
            point = ResumePoint(
                run_id=None if state is None else state.get("run_id"),
                step=int(checkpoint.get("global_step", 0)),
                path=path,
            )
            tags |= attempts.attempt_tags(self._job, self.ordinal, point)
            self._resumed = attempts.resumed_sentence(point, run_id=self.run_id, ordinal=self.ordinal)
            tags |= self._roll_back(batches_that_stepped(checkpoint))
            if path is not None:
                self.records.note_resumed(path)
        elif is_fitting and self._is_first and not self.has_met and not self.opened.run.is_new:
            tags |= self._roll_back(trainer.global_step)  # from the beginning, in a run that has been further
        self.records.set_tags(tags)
        self.records.log_config(trainer)
        if autolog is not None:
            self.background.flush(_PARAMS_SECONDS)  # before autologging's: where they differ, the run has ours
            note = settle_autolog(trainer, autolog, self._client, self.run_id)
            self._warn(note.text, note.text) if note.is_warning else self._say(note.text)
        if self._is_first and not self.has_met:
            self._send_leftovers(self._other(state))
            self._say(start_text(self._place, resumed=self._resumed, plan=self.tracker.plan()))
        self.has_met = True

    def _other(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return what a checkpoint of another run says; nothing if it is of this one, whose tail the tracker has."""
        if state is None or state.get("run_id") == self.run_id:
            return None
        if self._options.resume_run == "continue" and self.choice.kind in {"new", "child"}:
            self._warn(
                "not continued",
                f"The checkpoint's run {state.get('run_id')} is not continued: before training, something was logged "
                f"into the new run {self.run_id}.",
            )
        return state

    def _roll_back(self, step: int) -> dict[str, str]:
        """If the run had gone on beyond where it resumes, show that, and put its latest values right at the end."""
        if trouble_reaching(self.tracking_uri) is not None:  # in a later stage of training
            self.tracker.roll_back(step, {})
            return {}
        try:
            latest = attempts.latest_steps(self._client.get_run(self.run_id))
        except MlflowException as error:
            self._warn("roll-back", f"Whether the run has been further cannot be seen: {error}")
            return {}
        reached = attempts.rolled_back(latest, step)
        # Also where the server has nothing beyond: what is still to be sent of an earlier attempt may have.
        self.tracker.roll_back(step, {key: latest[key] for key in attempts.metrics_beyond(latest, step)})
        if reached is None:
            return {}
        self._rolled_back = attempts.rolled_back_value(self._rolled_back, reached, step, time.time())
        return {attempts.ROLLED_BACK_TAG: self._rolled_back}

    def begin_training(self, trainer: Trainer) -> None:
        """Plan the budget for the length that the Trainer knows, and see what can be known of how it ends."""
        self._trainer = trainer
        if self._options.register_model is not None:
            self._check_registration(trainer)
        steps = trainer.estimated_stepping_batches
        if 0 <= steps < float("inf"):
            self.tracker.set_horizon(int(steps))

    def _check_registration(self, trainer: Trainer) -> None:
        if not _model_checkpoints(trainer):
            self._warn("nothing to register", "register_model takes a ModelCheckpoint's best: add one.")
        if self._options.platform.is_databricks and trainer.lightning_module.example_input_array is None:
            self._warn(
                "no signature",
                "Unity Catalog takes no model without a signature: set the module's example_input_array, which "
                "register_model makes it of.",
            )

    def _register(self) -> None:
        """Have the best checkpoint of the training registered."""
        trainer, self._trainer = self._trainer, None
        name = self._options.register_model
        callbacks = [] if trainer is None else _model_checkpoints(trainer)
        if trainer is None or name is None or not callbacks:
            return
        from lightning_air.tracking.registering import ModelRegistration  # noqa: PLC0415 - takes a second

        rated = next((each for each in callbacks if each.monitor is not None), callbacks[0])
        registration = ModelRegistration(name, trainer.lightning_module, rated, warn=self._warn, say=self._say)
        self.background.submit(
            f"the registered model {name}", lambda: registration.send(self._client, self.run_id), replaces="model"
        )

    def _send_record(self) -> None:
        folder = self._options.spool_dir / self.run_id
        self.background.submit(
            f"the full record of metrics ({folder})",
            lambda: send_record(self._client, self.run_id, folder),
            replaces="record",
            note=lambda: Outbox(has_record=True),
        )

    # ---- logging -----------------------------------------------------------------------------------------------------

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the values of a step."""
        begun = time.perf_counter()
        self.tracker.append(step, metrics if _are_plain(metrics) else self._numbers(metrics))
        self.seconds_blocked += time.perf_counter() - begun

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                if isinstance(value, str | bytes):
                    raise TypeError("text")  # noqa: TRY301 - float() would read it
                numbers[str(name)] = float(value.item() if isinstance(value, Tensor) else value)
            except Exception:  # noqa: BLE001 - whatever a value's __float__ raises must not stop the training
                self._warn(
                    f"no number {name}", f"The metric {name!r} is left out, since it is no number, but {_shown(value)}."
                )
        return numbers

    def flush(self, deadline_seconds: float) -> bool:
        """Have all sent, and return whether it is; 0 asks for it only."""
        return self.tracker.flush(deadline_seconds)

    # ---- what a later attempt needs, and the end ---------------------------------------------------------------------

    def state(self, step: int) -> dict[str, Any]:
        """Return what goes into a checkpoint."""
        self.tracker.flush(0)
        tail = None
        try:
            tail = None if self._is_complete else self.tracker.tail()
        except (OSError, ValueError) as error:
            self._warn("tail", f"Metrics that are not sent yet cannot go into the checkpoint: {error}")
        if tail is not None and tail.is_cut:
            self._warn(
                "tail is cut",
                f"The checkpoint of step {step} has the first {tail.num_bytes / 1e6:.1f} MB of metrics that the server "
                f"has not taken, and not those after them: these are only in {self.tracker.folder}, on this machine.",
            )
        return {
            "run_id": self.run_id,
            "experiment_id": self.experiment_id,
            "step": step,
            "metric_steps": self.tracker.used,
            "tail": None if tail is None else tail.to_dict(),
            "checkpoints": self.records.snapshot(),
        }

    def close(self, status: str, *, deadline_seconds: float) -> None:
        """Send what is left within the deadline, and end the run if it is ours to end."""
        deadline = time.monotonic() + deadline_seconds
        self._is_over = True
        try:
            self._is_complete = self.tracker.close(deadline_seconds)
            self.records.finish(self.tracker.folder)
            if status == "FINISHED":
                try:
                    self._register()
                except Exception as error:  # noqa: BLE001 - whatever a user's module raises
                    self._warn("register", f"The model is not registered: {error!r}")
        finally:  # also after a Ctrl-C
            self._trainer = None
            self.tracker.close(0)
            # A dead server has had the whole deadline already; what is left gets a moment all the same.
            self.background.close(max(1.0, deadline - time.monotonic()))
            self._leftovers.close(max(0.0, deadline - time.monotonic()))
            self._keep_outbox()
            if self.choice.ends == "when_done":
                self.end(status, deadline_seconds=max(1.0, deadline - time.monotonic()))
            if self.background.num_dropped or self._is_refused:
                self._keep_for_restoring(status)
            self._say_end(status)

    def _keep_for_restoring(self, status: str) -> None:
        """If the run was deleted meanwhile, keep what was refused because of that: it may be restored."""
        if trouble_reaching(self.tracking_uri) is not None:
            return
        try:
            if self._client.get_run(self.run_id).info.lifecycle_stage != "deleted":
                return
        except MlflowException:  # as when it is gone for good
            return
        ending = ending_now(status) if self._is_refused else self._extra.ending
        self._extra = self.background.refused().plus(replace(self._extra, ending=ending))
        self._keep_outbox()

    def _say_end(self, status: str) -> None:
        """Tell the user what has become of it all."""
        self._say(
            end_text(
                self._place,
                status=self._said_of(status),
                stats=self.tracker.stats,
                budget=self.tracker.plan(),
                seconds_blocked=self.seconds_blocked,
                best=self.records.best_checkpoint,
                kept=self.background.kept,
                lost=self.background.lost,
            )
        )
        left = [] if self._is_complete else ["metrics"]
        left += self.background.kept
        left += [] if self._extra.ending is None else ["its end"]
        if left:
            self._warn(
                "pending",
                f"The run {self.run_id} has not got all yet ({examples(left)}). It is kept in {self.tracker.folder}: "
                f"the next attempt on this machine sends it, or `lightning-air replay {self.tracker.folder}`.",
            )

    def _said_of(self, status: str) -> str:
        """Say how the run has ended, as far as that is known."""
        if self.choice.ends == "never":
            return f"training {status}; the run is ended by whoever started it"
        if self.choice.ends == "at_exit":
            return f"training {status}; the run ends with this process"
        if self._is_refused:
            return f"{status}, which the server refuses"
        return status if self.is_told else f"{status}, which the server does not know yet"

    def end(self, status: str, *, deadline_seconds: float) -> None:
        """Tell the server how the run has ended; `is_told` says whether it knows. If not, the outbox has it."""
        ending = ending_now(status)
        self.is_told, self._is_refused = tell_end(
            self._client, self.run_id, ending, deadline_seconds=deadline_seconds, warn=self._warn
        )
        if self.is_told and self._extra.ending is None:
            return
        self._extra = replace(self._extra, ending=None if self.is_told else ending)
        self._keep_outbox()

    def keep_output(self, output: NodeOutput) -> None:
        """Put what this node has printed, and the server has not got, beside what else it has not got."""
        with self._outbox_lock:  # or an empty outbox would take the copies with it
            try:
                paths = output.copy_into(self.tracker.folder / OUTPUT_FOLDER)
            except OSError as error:
                self._warn("output", f"The output of this node is not kept with the run: {error}")
                return
            files = tuple((str(path.absolute()), output.folder) for path in paths)
            self._extra = self._extra.plus(Outbox(files=files))
        self._keep_outbox()


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _are_plain(metrics: Mapping[str, Any]) -> bool:
    return all(type(value) is float or type(value) is int for value in metrics.values())


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001 - a user's own __repr__
        return f"a {type(value).__qualname__}"
