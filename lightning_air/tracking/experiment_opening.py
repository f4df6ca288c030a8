"""Find the experiment that was chosen, or make it, while another process may do the same."""

from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException

from lightning_air.tracking.artifact_location import same_location
from lightning_air.tracking.experiment import ExperimentChoice


@dataclass(frozen=True, kw_only=True)
class OpenExperiment:
    """An experiment that is there.

    Attributes:
        experiment_id: Its number.
        name: Its name.
        artifact_location: Where its runs keep their artifacts; fixed when it was made.
        is_new: It was made now, by us.
        warning: What the user asked for and did not get; None otherwise.
    """

    experiment_id: str
    name: str
    artifact_location: str
    is_new: bool
    warning: str | None


def get_or_create_experiment(
    client: MlflowClient, choice: ExperimentChoice, *, artifact_location: str | None = None
) -> OpenExperiment:
    """Return the experiment, and make it where there is none by that name; two processes may do so at once.

    Args:
        client: Of the tracking server.
        choice: Which experiment.
        artifact_location: Where a new one keeps its artifacts; None leaves it to the server.

    Raises:
        RuntimeError: The experiment was deleted, its number is unknown, or its name is taken by something else.
        MlflowException: The server cannot be asked.
    """
    experiment, is_new = _find(client, choice), False
    if experiment is None and choice.name is not None:
        experiment, is_new = _create(client, choice.name, artifact_location)
    if experiment is None:
        raise RuntimeError(
            f"{choice.is_named_by} is {choice.experiment_id!r}, but the tracking server has no such experiment. "
            "Unset it, or pass the experiment's name as experiment_name."
        )
    if experiment.lifecycle_stage == "deleted":
        raise RuntimeError(
            f"The experiment {experiment.name!r} was deleted, and its name is free only once it is purged. Restore it "
            f"with MlflowClient().restore_experiment({experiment.experiment_id!r}), or pass another experiment_name."
        )
    warning = None
    if artifact_location is not None and not same_location(artifact_location, experiment.artifact_location):
        warning = (
            f"The experiment {experiment.name!r} keeps its artifacts at {experiment.artifact_location!r}, which was "
            f"fixed when it was made; artifact_location={artifact_location!r} has no effect. Pass another "
            "experiment_name to use it."
        )
    return OpenExperiment(
        experiment_id=experiment.experiment_id,
        name=experiment.name,
        artifact_location=experiment.artifact_location,
        is_new=is_new,
        warning=warning,
    )


def _find(client: MlflowClient, choice: ExperimentChoice) -> Experiment | None:
    try:
        if choice.experiment_id is not None:
            return client.get_experiment(choice.experiment_id)
        return client.get_experiment_by_name(choice.name or "")
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise


def _create(client: MlflowClient, name: str, artifact_location: str | None) -> tuple[Experiment, bool]:
    try:
        number = client.create_experiment(name, artifact_location=artifact_location)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        experiment = client.get_experiment_by_name(name)  # another process was faster
        if experiment is None:
            raise RuntimeError(
                f"No experiment can be made at {name!r}: a notebook, folder or file has that name. Pass another "
                f"experiment_name, for example {name + '-runs'!r}."
            ) from error
        return experiment, False
    return client.get_experiment(number), True
