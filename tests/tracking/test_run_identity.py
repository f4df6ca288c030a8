"""One order decides which run is logged into, and what was not expected is said."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_air.tracking.run_identity import RunChoice, RunFacts, choose_run

law = settings(derandomize=True, deadline=None, database=None)

RUNS = {
    "given": RunFacts("given", "1"),
    "env": RunFacts("env", "1"),
    "saved": RunFacts("saved", "1"),
    "active": RunFacts("active", "1"),
    "elsewhere": RunFacts("elsewhere", "2"),
    "deleted": RunFacts("deleted", "1", is_deleted=True),
}
ACTIVE = RUNS["active"]


def choose(**changes: Any) -> RunChoice:
    return choose_run(look_up=RUNS.get, **changes)


def test_order() -> None:
    everything: dict[str, Any] = {
        "run_id": "given",
        "environment_run_id": "env",
        "checkpoint_run_id": "saved",
        "resume_run": "continue",
        "active": ACTIVE,
    }
    kinds = []
    for name in ("run_id", "environment_run_id", "checkpoint_run_id", "active", None):
        choice = choose(**everything)
        kinds.append((choice.kind, choice.run_id, choice.parent_run_id))
        if name is not None:
            del everything[name]
    assert kinds == [
        ("given", "given", None),
        ("environment", "env", None),
        ("checkpoint", "saved", None),
        ("child", None, "active"),
        ("new", None, None),
    ]


@pytest.mark.parametrize(
    ("wishes", "ends", "sentence"),
    [
        ({"run_id": "given"}, "at_exit", "Logging into the run given, as run_id says."),
        ({"environment_run_id": "env"}, "at_exit", "Logging into the run env, as MLFLOW_RUN_ID says."),
        (
            {"checkpoint_run_id": "saved", "resume_run": "continue"},
            "when_done",
            "Logging into the run saved, which the checkpoint was saved in.",
        ),
        (
            {"active": ACTIVE, "adopt_active": True},
            "never",
            "Logging into the active run active, which its owner ends.",
        ),
        ({"active": ACTIVE}, "when_done", "Logging into a new child of the active run active."),
        ({}, "when_done", "Logging into a new run."),
    ],
)
def test_who_ends_it_and_what_the_user_reads(wishes: dict[str, Any], ends: str, sentence: str) -> None:
    choice = choose(**wishes)
    assert (choice.ends, choice.sentence, choice.warnings) == (ends, sentence, ())


@pytest.mark.parametrize("name", ["run_id", "environment_run_id"])
def test_a_run_that_is_active_here_is_never_ended_by_us(name: str) -> None:
    # mlflow.start_run() adopts MLFLOW_RUN_ID, too.
    assert choose(**{name: "active"}, active=ACTIVE).ends == "never"


def test_checkpoints_run_is_continued_only_on_request() -> None:
    assert choose(checkpoint_run_id="saved").kind == "new"
    assert choose(resume_run="continue").kind == "new"


def test_checkpoints_run_gives_way_to_the_launchs_and_says_so() -> None:
    choice = choose(environment_run_id="env", checkpoint_run_id="saved", resume_run="continue")
    assert choice.kind == "environment"
    assert len(choice.warnings) == 1
    assert "run saved is not continued" in choice.warnings[0]
    assert "pass run_id='saved'" in choice.warnings[0]
    assert choose(environment_run_id="env", checkpoint_run_id="env", resume_run="continue").warnings == ()
    assert choose(environment_run_id="env", checkpoint_run_id="saved").warnings == ()


@pytest.mark.parametrize(
    ("run_id", "message"),
    [
        ("none", r"run_id='none' does not exist on this tracking server. Pass one that does, or leave run_id out"),
        (
            "deleted",
            r"run_id='deleted' is deleted. Restore it with MlflowClient\(\).restore_run\('deleted'\), or leave",
        ),
    ],
)
def test_a_given_run_must_be_usable(run_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(run_id=run_id, environment_run_id="env")


@pytest.mark.parametrize("gone", ["none", "deleted"])
def test_training_goes_on_without_a_run_that_is_gone(gone: str) -> None:
    choice = choose(
        environment_run_id=gone, checkpoint_run_id=gone, resume_run="continue", active=ACTIVE, adopt_active=True
    )
    assert choice.run_id == "active"
    state = "is deleted" if gone == "deleted" else "does not exist on this tracking server"
    assert choice.warnings == (
        f"MLFLOW_RUN_ID names the run {gone}, which {state}: it is not used.",
        f"The checkpoint names the run {gone}, which {state}: it is not used.",
    )


@pytest.mark.parametrize(
    "wishes",
    [
        {"run_id": "elsewhere"},
        {"environment_run_id": "elsewhere"},
        {"active": RUNS["elsewhere"], "adopt_active": True},
    ],
)
def test_a_run_stays_in_its_experiment(wishes: dict[str, Any]) -> None:
    choice = choose(**wishes, experiment_id="1")
    assert (choice.run_id, choice.experiment_id) == ("elsewhere", "2")
    assert len(choice.warnings) == 1
    assert "is in the experiment 2, so the one that was named (1) is not used" in choice.warnings[0]
    assert choose(**wishes).warnings == ()


def test_a_child_is_in_its_parents_experiment() -> None:
    assert choose(active=ACTIVE).experiment_id == choose(active=ACTIVE, experiment_id="1").experiment_id == "1"
    choice = choose(active=ACTIVE, experiment_id="2")
    assert (choice.kind, choice.parent_run_id, choice.experiment_id) == ("new", None, None)
    assert choice.sentence.startswith("Logging into a new run, not a child of the active one (active)")


def test_runs_that_do_not_come_into_question_are_not_asked_for() -> None:
    asked = []

    def look_up(run_id: str) -> RunFacts | None:
        asked.append(run_id)
        return RUNS.get(run_id)

    choose_run(look_up=look_up, run_id="given", environment_run_id="env", checkpoint_run_id="saved", active=ACTIVE)
    choose_run(look_up=look_up, active=ACTIVE, checkpoint_run_id="saved")
    assert asked == ["given"]


known = st.none() | st.sampled_from([*RUNS, "none"])


@law
@given(
    environment=known,
    checkpoint=known,
    resume=st.sampled_from(["new", "continue"]),
    active=st.none() | st.sampled_from([ACTIVE, RUNS["elsewhere"]]),
    adopt=st.booleans(),
    experiment=st.none() | st.sampled_from(["1", "2"]),
)
def test_there_is_always_one_choice(  # noqa: PLR0917
    environment: str | None, checkpoint: str | None, resume: Any, active: Any, adopt: bool, experiment: str | None
) -> None:
    choice = choose(
        environment_run_id=environment,
        checkpoint_run_id=checkpoint,
        resume_run=resume,
        active=active,
        adopt_active=adopt,
        experiment_id=experiment,
    )
    is_adopted = choice.kind in {"environment", "checkpoint", "active"}
    assert (choice.run_id is not None) == is_adopted
    assert (choice.parent_run_id is not None) == (choice.kind == "child")
    assert (choice.experiment_id is None) == (choice.kind == "new")
    if active is not None:
        assert (choice.ends == "never") == (choice.run_id == active.run_id)
    if is_adopted:
        facts = RUNS[str(choice.run_id)]
        assert not facts.is_deleted
        assert facts.experiment_id == choice.experiment_id
