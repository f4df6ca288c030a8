"""The leaf for sharding="fsdp" and "hsdp": parameters, gradients and optimizer state are spread with FSDP2.

The user's module needs no code for it. Its blocks are sharded, then its root with all that is left, and each step
goes through the root's `__call__`, so that the root's parameters are gathered for it. With manual optimization the
backward happens inside of the step, before the root's forward has ended; there each top-level child is a root.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree  # no public name; what FSDP2 itself walks containers with
from typing_extensions import override

from lightning_air._lightning import (
    LightningModule,
    ModelParallelStrategy,
    PathLike,
    Trainer,
    TrainerFn,
    WeightAveraging,
    optimizers_to_device,
    rank_zero_warn,
    to_uncompiled,
)
from lightning_air.strategy.air import AirStrategy
from lightning_air.strategy.blocks import (
    checkpoint_activations,
    choose_blocks,
    compile_forwards,
    outermost_modules,
)
from lightning_air.strategy.checkpoint_io import is_collective
from lightning_air.strategy.names import checkpoint_name, with_own_names
from lightning_air.strategy.options import StrategyOptions
from lightning_air.strategy.sharding import (
    WholeParameters,
    inside_step,
    is_marked_sharded,
    is_sharded,
    mark_sharded,
    materialize,
    set_gradient_sync,
    shard_module,
)

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

# Top-level keys of a sharded checkpoint beside the model and the optimizers, for `meta.pt` to name.
_SHARDED_KEYS = "lightning_air_sharded_keys"


class AirFSDP(AirStrategy, ModelParallelStrategy, shardings=("fsdp", "hsdp")):
    """What `AirStrategy(sharding="fsdp")` and `AirStrategy(sharding="hsdp")` make."""

    _compiler: Compiler | None = None
    _connected_module: LightningModule | None = None

    @override
    def _init_stock(self, options: StrategyOptions) -> None:
        ModelParallelStrategy.__init__(self, timeout=options.timeout)

    # Lightning refuses a compiled LightningModule for this base class, right after it has assigned this private
    # attribute. Compiling the whole step is of no use here anyway: its graph would break at every block. So the
    # compilation moves from the steps to the blocks, which is how FSDP2 is meant to be compiled.
    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._connected_module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        if module is not None and module._compiler_ctx is not None:  # noqa: SLF001 - set by Lightning, no public name
            self._compiler = module._compiler_ctx["dynamo_ctx"]  # noqa: SLF001
            module = to_uncompiled(module)
        elif module is not self._connected_module:
            self._compiler = None
        self._connected_module = module

    # ---- setting up -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        # Private: the sizes are constructor arguments in the base, but the world size is known only now.
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1
        super().setup_environment()
        if self.sharding == "hsdp":
            self._refuse_scattered_nodes()
            self._device_mesh = init_device_mesh(
                self.root_device.type, (self.num_nodes, self.num_processes), mesh_dim_names=("replicate", "shard")
            )
            self._module._device_mesh = self._device_mesh  # noqa: SLF001 - what `LightningModule.device_mesh` shows

    def _refuse_scattered_nodes(self) -> None:
        here = self.node_rank * self.num_processes + self.local_rank
        if self.global_rank != here or self.world_size != self.num_nodes * self.num_processes:
            raise ValueError(
                f"sharding='hsdp' needs equally many ranks on every node, numbered node by node, but local rank "
                f"{self.local_rank} of {self.num_processes} on node {self.node_rank} of {self.num_nodes} is rank "
                f"{self.global_rank} of {self.world_size}. Distribute the tasks in blocks, or use 'fsdp'."
            )

    @property
    def _sharding_mesh(self) -> DeviceMesh:
        return self.device_mesh if self.sharding == "hsdp" else self.device_mesh["data_parallel"]

    @override
    def setup(self, trainer: Trainer) -> None:
        self._prepare(trainer)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise TypeError(
                "The model holds modules wrapped in torch.distributed.fsdp.FullyShardedDataParallel (FSDP1); "
                "AirStrategy shards with FSDP2. Remove the wrapping, or use fully_shard in configure_model."
            )
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync is not None:  # Trainer(sync_batchnorm=True); the stock base forgets it
            self._layer_sync.apply(module)
        checkpoint_activations(module, self.options.activation_checkpointing)
        whole = None if is_sharded(module) else WholeParameters(module)
        self.model = self._shard(module, compiler=self._compiler)
        if is_fitting:
            self._shard_averages(trainer)
            self.setup_optimizers(trainer)
            if whole is not None:
                whole.hand_over(module, self.optimizers)
        self.setup_precision_plugin()
        if is_fitting and not self.options.cpu_offload:
            optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: LightningModule, *, compiler: Compiler | None) -> nn.Module:
        """Convert, shard and place the module, unless `configure_model` or an earlier call has sharded it."""
        needs_sharding = not is_sharded(module)
        converted = self.precision_plugin.convert_module(module)
        if needs_sharding:
            roots = self._roots(module)
            root_ids = {id(root) for root in roots}
            blocks = [block for block in choose_blocks(module, self.options.wrap) if id(block) not in root_ids]
            if compiler is not None:
                compile_forwards(blocks or outermost_modules(module), compiler)
            shard_module(
                blocks,
                roots,
                mesh=self._sharding_mesh,
                device=self.root_device,
                reshard_after_forward=self.options.reshard_after_forward,
                cpu_offload=self.options.cpu_offload,
                keep_roots=module.automatic_optimization,
            )
            mark_sharded(module)
        elif self.options.wrap is not None and not is_marked_sharded(module):
            raise ValueError(
                f"wrap={self.options.wrap!r} has no effect: the model was sharded before, by its configure_model. "
                "Remove one of the two."
            )
        # Under CPU offload FSDP2 wants the shards in host memory, while buffers, which stay whole, go to the device.
        without_values = materialize(module, torch.device("cpu") if self.options.cpu_offload else self.root_device)
        if without_values:
            rank_zero_warn(
                f"{', '.join(without_values)}: built on the meta device and without a `reset_parameters` method, so "
                "their weights are what the memory held. Define it, or load a checkpoint before training."
            )
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device)
        return converted if self.options.cpu_offload else converted.to(self.root_device)

    def _roots(self, module: LightningModule) -> list[nn.Module]:
        if module.automatic_optimization:
            return [module]
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise ValueError(
                f"{type(module).__name__} optimizes manually and holds the parameter(s) {', '.join(own)} itself; "
                f"sharding={self.sharding!r} then shards its submodules only. Move them into a submodule, or use 'ddp'."
            )
        return outermost_modules(module)

    def _shard_averages(self, trainer: Trainer) -> None:
        """Shard the copies that weight-averaging callbacks keep, so that they meet the model shard by shard.

        Private: the callback has no public name for its copy, and takes it before any strategy can shard the model.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set by Trainer's callback connector
            average = callback._average_model if isinstance(callback, WeightAveraging) else None  # noqa: SLF001
            if average is not None:
                assert isinstance(average.module, LightningModule)
                self._shard(average.module, compiler=None)

    # ---- running ----------------------------------------------------------------------------------------------------

    @override
    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step through the module's `__call__`, where FSDP2 gathers the root's parameters."""
        module = self._module
        contexts = {
            "training_step": self.precision_plugin.train_step_context,
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }
        with contexts[name]():
            if not isinstance(module, FSDPModule):
                return getattr(module, name)(*args, **kwargs)
            with inside_step(module):
                return self._forward_redirection(module, module, name, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients local inside of this context; they stay unsharded until the next backward outside of it."""
        set_gradient_sync(self._module, enabled=False)
        try:
            yield
        finally:
            set_gradient_sync(self._module, enabled=True)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any | None = None
    ) -> None:
        """Save. Collective: every rank calls this.

        A stock CheckpointIO has no part in it: the directory is Lightning's sharded checkpoint.
        """
        if is_collective(self.checkpoint_io):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        # Callbacks put sharded tensors under keys of their own (weight averaging: the weights being trained). The base
        # would pickle rank 0's shard of them into meta.pt and lose the rest.
        sharded = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states") and _holds_shards(value)
        }
        for key, value in sharded.items():
            if not isinstance(value, dict) or value.keys() != checkpoint["state_dict"].keys():
                raise ValueError(
                    f"The checkpoint holds sharded tensors under {key!r}, which cannot be saved there: only another "
                    "set of the model's own weights, by name, can. Keep what the callback stores in plain tensors "
                    "(`tensor.full_tensor()`)."
                )
        for key in sharded:
            del checkpoint[key]
        if sharded:
            checkpoint[_SHARDED_KEYS] = sorted(sharded)
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **_prefixed(sharded)}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model and the optimizers in place and return the rest. Collective: every rank calls this."""
        if is_collective(self.checkpoint_io):
            return self._load_collectively(checkpoint_path, weights_only)
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        for key in checkpoint.pop(_SHARDED_KEYS, []):
            values = {name: torch.empty_like(value) for name, value in self._module.state_dict().items()}
            path = Path(self.broadcast(checkpoint_path))
            dcp.load({"state_dict": _prefixed({key: values})}, checkpoint_id=path)
            checkpoint[key] = values
            checkpoint["state_dict"] = self._module.state_dict()  # for the callback that saved them
        return checkpoint

    def _load_collectively(self, path: PathLike, weights_only: bool | None) -> dict[str, Any]:
        assert is_collective(self.checkpoint_io)
        module = self._module
        own = module.state_dict()
        model_state = {checkpoint_name(name): value for name, value in own.items()}
        optimizer_states = {
            f"optimizer_{index}": get_optimizer_state_dict(module, optimizer)
            for index, optimizer in enumerate(self.optimizers)
        }

        def like(last_key: str, shape: tuple[int, ...]) -> Tensor | None:  # weight averages, name by name
            value = model_state.get(checkpoint_name(last_key))
            return torch.empty_like(value) if value is not None and value.shape == shape else None

        checkpoint = self.checkpoint_io.load_checkpoint(
            self.broadcast(path),
            weights_only=weights_only,
            state={"state_dict": model_state, **optimizer_states},
            like=like,
            strict=module.strict_loading,
        )
        checkpoint = with_own_names({**checkpoint, "state_dict": model_state}, module)
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        for optimizer, state in zip(self.optimizers, optimizer_states.values(), strict=True):
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state)
        checkpoint["state_dict"] = own  # for callbacks; the strategy has loaded it
        return checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if is_collective(self.checkpoint_io):  # it copies what it needs; the stock base copies all to the host first
            return self._module.state_dict()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if is_collective(self.checkpoint_io):
            return getattr(optimizer, "_optimizer", optimizer).state_dict()  # as every strategy unwraps Lightning's
        return super().optimizer_state(optimizer)

    @override
    def _teardown_stock(self) -> None:
        super()._teardown_stock()
        self.checkpoint_io.teardown()  # the stock base leaves it out


def _holds_shards(value: object) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value))


def _prefixed(values: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key}/{name}": tensor for key, tensors in values.items() for name, tensor in tensors.items()}
