"""Send a run's parameters and tags: what the server has already is not sent again, and what it refuses is found."""

from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException

from lightning_air.tracking.door_errors import Refused
from lightning_air.tracking.metric_names import renamed_warning
from lightning_air.tracking.params import change_tags, left_out_warning, param_batches, plan_params
from lightning_air.tracking.upload_errors import trouble_of
from lightning_air.tracking.warn_once import Warn

_MAX_BATCH_TAGS = 100


class ParamsAndTags:
    """The parameters and tags of one run. One thread's.

    Args:
        client: To the server.
        run_id: MLflow's.
        params: That the run has.
        tags: That the run has.
        warn: Told of what cannot be stored as it is.
    """

    def __init__(
        self, client: MlflowClient, run_id: str, params: Mapping[str, str], tags: Mapping[str, str], *, warn: Warn
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._params, self._tags = dict(params), dict(tags)
        self._warn = warn
        self._refusal = ""

    def send_params(self, flat: Mapping[str, str]) -> None:
        """Send parameters; those that the run has with other values become tags.

        Args:
            flat: From `flatten_params`.

        Raises:
            MlflowException: The server cannot be asked, or refuses for a reason that is not the parameters'.
            RuntimeError: The run is deleted.
        """
        plan = plan_params(flat, self._params)
        if not all(self._takes(batch) for batch in param_batches(plan.new)):
            # Somebody else, such as autologging, has logged one with another value, or one is never taken.
            run = self._client.get_run(self._run_id)
            if run.info.lifecycle_stage == "deleted":
                raise RuntimeError(f"the run is deleted; MlflowClient().restore_run({self._run_id!r}) restores it")
            self._params |= run.data.params
            plan = plan_params(flat, self._params)
            for batch in param_batches(plan.new):
                self._send_what_it_takes(list(batch.items()))
        self.send_tags(change_tags(plan, self._tags))
        if plan.renamed:
            text = renamed_warning("parameter", plan.renamed)
            self._warn(text, text)
        if (text_or_none := left_out_warning(plan)) is not None:
            self._warn(text_or_none, text_or_none)

    def send_tags(self, tags: Mapping[str, str]) -> None:
        """Send tags, as far as they are not set yet.

        Raises:
            MlflowException: The server cannot be asked, or refuses.
        """
        changed = [(key, value) for key, value in tags.items() if self._tags.get(key) != value]
        for start in range(0, len(changed), _MAX_BATCH_TAGS):
            batch = dict(changed[start : start + _MAX_BATCH_TAGS])
            self._client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in batch.items()])
            self._tags |= batch

    def _takes(self, batch: Mapping[str, str]) -> bool:
        """Send parameters; return False if the server refuses them."""
        try:
            self._client.log_batch(self._run_id, params=[Param(key, value) for key, value in batch.items()])
        except MlflowException as error:
            trouble = trouble_of(error)
            if not (isinstance(trouble, Refused) and trouble.blames_content):
                raise
            self._refusal = str(trouble)
            return False
        self._params |= batch
        return True

    def _send_what_it_takes(self, params: Sequence[tuple[str, str]]) -> None:
        if self._takes(dict(params)):
            return
        if len(params) > 1:
            self._send_what_it_takes(params[: len(params) // 2])
            self._send_what_it_takes(params[len(params) // 2 :])
            return
        [(key, value)] = params
        self._warn(
            f"parameter {key}",
            f"MLflow refuses the parameter {key!r} = {value[:80]!r} ({self._refusal}); it stands only in "
            "hyperparameters.yaml among the run's artifacts.",
        )
