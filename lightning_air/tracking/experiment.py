"""Which tracking server, and which experiment on it.

In this order: the argument, the environment, a default. The default server is the workspace on Databricks, elsewhere
`mlflow.db` in the folder of the run, which is also where `mlflow ui` looks. The default experiment is named after the
script or notebook: `/Users/<user>/<name>` on Databricks, `<name>` elsewhere.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_air.runtime import Platform

_NO_SCRIPT = "lightning_air"
_WORKSPACE = "Workspace"
_MAX_NAME_LENGTH = 500
_BARE_ADDRESS = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+):\d+(/.*)?")


@dataclass(frozen=True, kw_only=True)
class ExperimentChoice:
    """An experiment by its name or by its number.

    Attributes:
        name: None where the number is known instead.
        experiment_id: None where the name is known instead.
        is_named_by: "default" where nobody named one, so that an experiment of another run goes before it.
    """

    name: str | None
    experiment_id: str | None
    is_named_by: str


def is_databricks_uri(tracking_uri: str) -> bool:
    """Return whether a tracking URI means a Databricks workspace, from inside it or from a laptop."""
    return tracking_uri == "databricks" or tracking_uri.startswith("databricks://")


def choose_tracking_uri(argument: str | None, platform: Platform, folder: str | Path | None = None) -> str:
    """Return the tracking URI.

    Args:
        argument: What the user passed.
        platform: What the environment says; `mlflow.set_tracking_uri()` leaves its URI there, too.
        folder: Where a local `mlflow.db` is; None is the current directory.

    Raises:
        ValueError: It looks like a server's address without "http://", which MLflow takes for a kind of store.
    """
    chosen = argument or platform.mlflow_tracking_uri or ("databricks" if platform.is_databricks else None)
    if chosen is not None and _BARE_ADDRESS.fullmatch(chosen):
        source = "tracking_uri" if argument else "MLFLOW_TRACKING_URI"
        raise ValueError(f"{source} must say how to reach the server, got {chosen!r}. Write 'http://{chosen}'.")
    return chosen or f"sqlite:///{Path(folder or '.').expanduser().absolute() / 'mlflow.db'}"


def script_name(argv0: str, notebook_path: str | None = None) -> str:
    """Return the name of what is being run: the notebook's, or the script's without its suffix.

    Args:
        argv0: `sys.argv[0]`.
        notebook_path: In the workspace.
    """
    if notebook_path:
        return PurePosixPath(notebook_path).name
    script = Path(argv0)
    stem = script.parent.name if script.name == "__main__.py" else script.stem
    is_none = not stem or argv0 in {"-c", "-m"} or stem.endswith("kernel_launcher")  # Jupyter's and Databricks' own
    return _NO_SCRIPT if is_none else stem


def choose_experiment(
    argument: str | None,
    platform: Platform,
    *,
    tracking_uri: str,
    script: str,
    ask_user: Callable[[], str | None] = lambda: None,
) -> ExperimentChoice:
    """Return the experiment's name or number.

    `mlflow.set_experiment()` leaves a number in the environment, which says more than a name that stood there before.

    Args:
        argument: What the user passed.
        platform: What the environment says.
        tracking_uri: The server; Databricks wants absolute names.
        script: From `script_name`.
        ask_user: Asks the workspace for the user's e-mail; called only where nothing else tells. None is no answer.

    Raises:
        ValueError: The name is not absolute on Databricks, or nothing there tells whose experiment the default is.
    """
    if argument is None and platform.mlflow_experiment_id:
        number = platform.mlflow_experiment_id
        return ExperimentChoice(name=None, experiment_id=number, is_named_by="MLFLOW_EXPERIMENT_ID")
    source = "experiment_name" if argument is not None else "MLFLOW_EXPERIMENT_NAME"
    name = argument if argument is not None else platform.mlflow_experiment_name
    if name is None:
        source = "default"
        name = script
        if is_databricks_uri(tracking_uri):
            name = f"{_home(known_user(platform) or ask_user(), script)}/{script}"
    elif is_databricks_uri(tracking_uri):
        name = absolute_experiment_name(name, source=source, user=known_user(platform))
    if not name.strip() or len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"{source} must have 1 to {_MAX_NAME_LENGTH} characters, got {name[:80]!r} ({len(name)}).")
    return ExperimentChoice(name=name, experiment_id=None, is_named_by=source)


def absolute_experiment_name(name: str, *, source: str = "experiment_name", user: str | None = None) -> str:
    """Return the name as Databricks knows the experiment: absolute, without `/Workspace`, without surplus slashes.

    Databricks makes an experiment under any spelling of its path, but finds it only under this one (composer#3410).

    Args:
        name: As given.
        source: What the user gave it by, for the error.
        user: Whose folder the error proposes.

    Raises:
        ValueError: The name is not absolute.
    """
    parts = [part.strip() for part in name.split("/") if part.strip()]
    while parts[:1] == [_WORKSPACE]:
        del parts[0]
    if not name.strip().startswith("/") or len(parts) < 2:  # noqa: PLR2004 - a folder and a name
        proposal = f"/Users/{user or '<your e-mail>'}/{parts[-1] if parts else 'training'}"
        raise ValueError(
            f"{source} must be the absolute path of an experiment in the Databricks workspace, got {name!r}. "
            f"Use {proposal!r}, or a path under '/Shared'."
        )
    return "/" + "/".join(parts)


def known_user(platform: Platform) -> str | None:
    """Return the user's e-mail if the environment tells it: by itself, or by the notebook's path."""
    parts = (platform.notebook_path or "").removeprefix(f"/{_WORKSPACE}").split("/")
    return platform.user or (parts[2] if parts[:2] == ["", "Users"] and parts[2:] else None)


def _home(user: str | None, script: str) -> str:
    if user is None:
        raise ValueError(
            "Nothing here tells whose experiment this is, so there is no default name for it. Pass "
            f"experiment_name='/Users/<your e-mail>/{script}', or set MLFLOW_EXPERIMENT_NAME."
        )
    return f"/Users/{user}"
