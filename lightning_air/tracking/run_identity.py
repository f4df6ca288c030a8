"""Which run this training logs into, and who ends that run.

The first of these that there is: the run the user passed, the one the launch names (MLFLOW_RUN_ID), the one in the
checkpoint if the user wants it continued, the active run of MLflow's fluent interface (ours becomes its child, or it is
adopted on request), a new one. Only a run that the user passed must be usable, since only that is surely a mistake
otherwise: where another is gone, the training matters more, and goes on with the next choice and a warning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

_Named = Literal["given", "environment", "checkpoint"]
RunKind = _Named | Literal["active", "child", "new"]
RunEnd = Literal["when_done", "at_exit", "never"]
ResumeRun = Literal["new", "continue"]


class RunFacts(NamedTuple):
    """What the choice needs to know of a run."""

    run_id: str
    experiment_id: str
    is_deleted: bool = False


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """The run to log into.

    Attributes:
        kind: What decided.
        run_id: None where the run is yet to be made.
        parent_run_id: Of a child.
        experiment_id: Where the run is, or has to be made as a child; None where the experiment is the user's choice.
        ends: When we end the run: when the training is done, for one that we make; when the process ends, for one
            that somebody handed to us and may go on to use; never, for one that is active in this process.
        sentence: For the user.
        warnings: What the user may not have expected.
    """

    kind: RunKind
    run_id: str | None
    parent_run_id: str | None
    experiment_id: str | None
    ends: RunEnd
    sentence: str
    warnings: tuple[str, ...]


def choose_run(
    *,
    look_up: Callable[[str], RunFacts | None],
    run_id: str | None = None,
    environment_run_id: str | None = None,
    checkpoint_run_id: str | None = None,
    resume_run: ResumeRun = "new",
    active: RunFacts | None = None,
    adopt_active: bool = False,
    experiment_id: str | None = None,
) -> RunChoice:
    """Decide which run to log into; changes nothing.

    Args:
        look_up: Returns what is known of a run, None where there is none; called for those that come into question.
        run_id: What the user passed.
        environment_run_id: MLFLOW_RUN_ID as it was when the package was imported: `mlflow.start_run()` deletes it.
        checkpoint_run_id: The run that the checkpoint was saved in.
        resume_run: "continue" takes that run.
        active: The active run of MLflow's fluent interface.
        adopt_active: Log into that run instead of into a child.
        experiment_id: Of the experiment that the user named; None if nobody named one.

    Raises:
        ValueError: The run that the user passed does not exist or is deleted.
    """
    warnings: list[str] = []
    continued = checkpoint_run_id if resume_run == "continue" else None
    candidates: list[tuple[_Named, str | None]] = [
        ("given", run_id),
        ("environment", environment_run_id),
        ("checkpoint", continued),
    ]
    for kind, candidate in candidates:
        if candidate is None:
            continue
        facts = look_up(candidate)
        if facts is None or facts.is_deleted:
            warnings.append(_gone(kind, candidate, is_deleted=facts is not None))
            continue
        if experiment_id not in {None, facts.experiment_id}:
            warnings.append(
                f"The run {candidate} is in the experiment {facts.experiment_id}, so the one that was named "
                f"({experiment_id}) is not used: a run cannot move."
            )
        if kind == "environment" and continued not in {None, candidate}:
            warnings.append(
                f"The checkpoint's run {continued} is not continued, since MLFLOW_RUN_ID names the run of this launch. "
                f"To continue it, pass run_id={continued!r}."
            )
        is_active = active is not None and active.run_id == candidate
        return RunChoice(
            kind=kind,
            run_id=candidate,
            parent_run_id=None,
            experiment_id=facts.experiment_id,
            ends="never" if is_active else "when_done" if kind == "checkpoint" else "at_exit",
            sentence=f"Logging into the run {candidate}, {_REASONS[kind]}.",
            warnings=tuple(warnings),
        )
    return _choose_fluent(active, warnings, adopt_active=adopt_active, experiment_id=experiment_id)


_REASONS: dict[_Named, str] = {
    "given": "as run_id says",
    "environment": "as MLFLOW_RUN_ID says",
    "checkpoint": "which the checkpoint was saved in",
}


def _gone(kind: _Named, run_id: str, *, is_deleted: bool) -> str:
    state = "is deleted" if is_deleted else "does not exist on this tracking server"
    if kind == "given":
        remedy = f"Restore it with MlflowClient().restore_run({run_id!r})" if is_deleted else "Pass one that does"
        raise ValueError(f"The run run_id={run_id!r} {state}. {remedy}, or leave run_id out for a new run.")
    source = "MLFLOW_RUN_ID" if kind == "environment" else "The checkpoint"
    return f"{source} names the run {run_id}, which {state}: it is not used."


def _choose_fluent(
    active: RunFacts | None, warnings: list[str], *, adopt_active: bool, experiment_id: str | None
) -> RunChoice:
    kind: RunKind = "new"
    sentence = "Logging into a new run."
    if active is not None and adopt_active:
        kind, sentence = "active", f"Logging into the active run {active.run_id}, which its owner ends."
        if experiment_id not in {None, active.experiment_id}:
            warnings.append(
                f"The active run is in the experiment {active.experiment_id}, so the one that was named "
                f"({experiment_id}) is not used: a run cannot move."
            )
    elif active is not None and experiment_id not in {None, active.experiment_id}:
        sentence = (
            f"Logging into a new run, not a child of the active one ({active.run_id}): that is in another experiment."
        )
    elif active is not None:
        kind, sentence = "child", f"Logging into a new child of the active run {active.run_id}."
    return RunChoice(
        kind=kind,
        run_id=active.run_id if active is not None and kind == "active" else None,
        parent_run_id=active.run_id if active is not None and kind == "child" else None,
        experiment_id=active.experiment_id if active is not None and kind != "new" else None,
        ends="never" if kind == "active" else "when_done",
        sentence=sentence,
        warnings=tuple(warnings),
    )


def look_up_run(client: MlflowClient, run_id: str) -> RunFacts | None:
    """Return what the choice needs to know of a run; None where the server has none.

    Raises:
        MlflowException: The server cannot be asked.
    """
    try:
        info = client.get_run(run_id).info
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise
    return RunFacts(info.run_id, info.experiment_id, info.lifecycle_stage == "deleted")
