"""The best checkpoint of a training that ended well, as a new version of a registered MLflow model.

MLflow keeps a model as a pickled module. Where every rank has all of the module, that is a copy of the one that was
trained, with the weights of the checkpoint; a sharded one can't be copied, and is made anew by `load_from_checkpoint`,
from the hyperparameters that `save_hyperparameters` has put into the checkpoint.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import mlflow.pytorch
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature, infer_signature
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_air._lightning import LightningModule, ModelCheckpoint
from lightning_air.tracking.artifacts import FileUpload
from lightning_air.tracking.run_tags import TAG_PREFIX
from lightning_air.tracking.warn_once import Warn

MODEL_ARTIFACT = "model"
REGISTERED_TAG = f"{TAG_PREFIX}registered_model"


class ModelRegistration:
    """One checkpoint on its way to the registry. Made by the training thread, sent by one in the background.

    Args:
        name: Of the registered model; made if it isn't there. In Unity Catalog `catalog.schema.model`.
        module: That was trained.
        callback: That has saved it. What it has under `open_checkpoint` opens its checkpoints; else they are files.
        warn: Told of what the version lacks.
        say: Told of the version, once it is there.
    """

    def __init__(
        self,
        name: str,
        module: LightningModule,
        callback: ModelCheckpoint,
        *,
        warn: Warn,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._name = name
        self._class = type(module)
        self._blank = None if is_sharded(module) else copy_on_cpu(module)
        self._callback = callback
        self._warn = warn
        self._say = say

    def send(self, client: MlflowClient, run_id: str) -> None:
        """Upload the model into the run, and register it; after a failure it may be called again.

        Raises:
            ValueError: There is no checkpoint, or the module cannot be made of it.
            Exception: Whatever MLflow, the disk or the checkpoint's store raises.
        """
        path = self._callback.best_model_path or self._callback.last_model_path
        if not path:
            raise ValueError("training has saved no checkpoint")
        source = f"{client.get_run(run_id).info.artifact_uri}/{MODEL_ARTIFACT}"
        if (known := self._version_of(client, source)) is not None:
            self._note(client, run_id, known, path)
            return
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, MODEL_ARTIFACT)
            save_model(self._module(path), folder, warn=self._warn)
            FileUpload(folder, "").send(client, run_id)
        make_registered_model(client, self._name)
        tags = {f"{TAG_PREFIX}checkpoint": path}
        made = client.create_model_version(self._name, source, run_id, tags=tags)
        self._note(client, run_id, str(made.version), path)

    def _note(self, client: MlflowClient, run_id: str, number: str, path: str) -> None:
        client.set_tag(run_id, REGISTERED_TAG, f"{self._name}/{number}")
        self._say(f"Registered version {number} of the model {self._name}, of {path}.")

    def _version_of(self, client: MlflowClient, source: str) -> str | None:
        """Return the version that an earlier call has made, whose answer did not arrive."""
        try:
            versions = client.search_model_versions(f"name = '{self._name}'")
        except MlflowException:  # in Unity Catalog, where there's no such model yet
            return None
        return next((str(each.version) for each in versions if each.source == source), None)

    def _module(self, path: str) -> LightningModule:
        if self._blank is None:
            try:
                return self._class.load_from_checkpoint(self._open(path), map_location="cpu", weights_only=True)
            except TypeError as error:
                raise ValueError(
                    f"{self._class.__name__} cannot be made of its checkpoint ({error}); call "
                    "self.save_hyperparameters() in its __init__"
                ) from error
        checkpoint = torch.load(self._open(path), map_location="cpu", weights_only=True)
        self._blank.on_load_checkpoint(checkpoint)
        self._blank.load_state_dict(checkpoint["state_dict"], strict=self._blank.strict_loading)
        return self._blank

    def _open(self, path: str) -> BytesIO | Path:
        opens = getattr(self._callback, "open_checkpoint", None)
        return Path(path) if opens is None else opens(path)


def is_sharded(module: LightningModule) -> bool:
    """Return whether a rank has a part of the module only."""
    tensors = [*module.parameters(), *module.buffers()]
    return any(isinstance(each, DTensor) for each in tensors) or any(
        isinstance(each, FullyShardedDataParallel) for each in module.modules()
    )


def copy_on_cpu(module: LightningModule) -> LightningModule | None:
    """Return a copy of a module whose tensors take no memory of a device; None if something in it can't be copied."""
    memo: dict[int, Any] = {
        id(each): torch.nn.Parameter(each.detach().cpu().clone(), requires_grad=each.requires_grad)
        for each in module.parameters()
    }
    memo |= {id(each): each.detach().cpu().clone() for each in module.buffers()}
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 - whatever a user's attribute raises: a lock, an open file
        return None


def save_model(module: LightningModule, folder: Path, *, warn: Warn) -> None:
    """Write a module as an MLflow model, which needs this torch and this Lightning, and nothing is run to find out.

    Args:
        module: On the CPU.
        folder: That does not exist yet.
        warn: Told if the model has no signature.
    """
    options: dict[str, Any] = {}
    if "serialization_format" in inspect.signature(mlflow.pytorch.save_model).parameters:
        options["serialization_format"] = "pickle"  # the other one traces a graph
    mlflow.pytorch.save_model(
        module.eval(),
        str(folder),
        signature=signature_of(module, warn=warn),
        pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", f"lightning=={version('lightning')}"],
        **options,
    )


def signature_of(module: LightningModule, *, warn: Warn) -> ModelSignature | None:
    """Return what the module takes and returns, as `example_input_array` shows it; None without one."""
    example = module.example_input_array
    if isinstance(example, tuple) and len(example) == 1:
        [example] = example
    if example is None:
        return None
    try:
        with torch.no_grad():
            output = module.eval()(**example) if isinstance(example, Mapping) else module.eval()(example)
        return infer_signature(_arrays(example), _arrays(output))
    except Exception as error:  # noqa: BLE001 - whatever a user's forward raises
        warn("signature", f"The registered model has no signature: forward(example_input_array) failed: {error!r}.")
        return None


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _arrays(each) for key, each in value.items()}
    return value.detach().numpy() if isinstance(value, Tensor) else value


def make_registered_model(client: MlflowClient, name: str) -> None:
    """Make a registered model, unless there is one."""
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
