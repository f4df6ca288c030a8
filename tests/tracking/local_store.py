"""A real MLflow store in a SQLite file of its own. Making one takes seconds, so all are copies of one template."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from mlflow import MlflowClient

MLFLOW_WARNING = "The ``noload`` loader strategy is deprecated"
"""MLflow 3.17's own use of SQLAlchemy 2.1; a test with a store in this process ignores it."""


def local_client(factory: pytest.TempPathFactory) -> MlflowClient:
    """Return a client of a new store with the default experiment only, whose artifacts lie beside its database."""
    template = factory.getbasetemp() / "mlflow-template.db"
    if not template.exists():
        MlflowClient(f"sqlite:///{template}").search_experiments()
    folder = factory.mktemp("mlflow")
    shutil.copy(template, folder / "mlflow.db")
    with closing(sqlite3.connect(folder / "mlflow.db")) as connection, connection:  # the template has them elsewhere
        connection.execute("UPDATE experiments SET artifact_location = ?", (str(folder / "artifacts"),))
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def new_experiment(client: MlflowClient, name: str) -> str:
    """Return the number of a new experiment whose artifacts would lie nowhere."""
    return client.create_experiment(name, artifact_location="/nowhere")
