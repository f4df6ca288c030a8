"""`AirStrategy`: the front door of the strategy, and what all shardings have in common.

`AirStrategy(sharding=…)` makes one of two leaves: `ddp.py`, on Lightning's `DDPStrategy`, and `fsdp.py`, on its
`ModelParallelStrategy` (FSDP2). Both are `AirStrategy`s, and both are the stock class that Lightning's own
`isinstance` checks ask for. What stands here is the same for both: the launch, the process group, stopping together,
failing together, and who calls the CheckpointIO.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_air._lightning import (
    Callback,
    LightningEnvironment,
    LightningModule,
    MultiProcessingLauncher,
    ParallelStrategy,
    PathLike,
    SIGTERMException,
    StrategyRegistry,
    Trainer,
    TrainerFn,
    all_parts,
    other_package_hint,
    rank_zero_warn,
    refuse_other_package,
)
from lightning_air.strategy.announcing import Announcer
from lightning_air.strategy.checkpoint_io import is_collective
from lightning_air.strategy.loop_stop import SIGTERM_EXIT_CODE, LoopStop
from lightning_air.strategy.membership import Membership
from lightning_air.strategy.names import noted, with_own_names
from lightning_air.strategy.options import SHARDINGS, Sharding, StrategyOptions, check_options, check_sharding
from lightning_air.strategy.preparing import choose_grad_mode, refuse_frozen_model
from lightning_air.strategy.process_group import abort, barrier, choose_backend, join, reduce
from lightning_air.strategy.stop import Stop
from lightning_air.strategy.topology import (
    AIR_KINDS,
    AirEnvironment,
    check_world,
    current_launch,
    resolve_devices,
    resolve_num_nodes,
)
from lightning_air.strategy.world import current_world, enter_world

T = TypeVar("T")


class _AnnounceFirst(Callback):
    """The first of all callbacks: Lightning asks the strategy last what to do about an exception."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(trainer.strategy, AirStrategy):  # a Trainer of another strategy may have been given our list
            trainer.strategy._announce(exception)  # noqa: SLF001 - one class in two parts


class _FrontDoor:
    """`AirStrategy.__new__`, one class above it: jsonargparse would read the options from a class's own `__new__`."""

    def __new__(cls, sharding: Sharding = "ddp", **_: Any) -> Self:
        """Make the leaf of this sharding; Python then runs its `__init__`, since the leaf is an `AirStrategy`."""
        check_sharding(sharding)
        leaf = AirStrategy._leaves[sharding] if cls is AirStrategy else cls  # noqa: SLF001 - the same class in two parts
        return super().__new__(leaf)  # type: ignore[return-value] # a leaf is an AirStrategy


class AirStrategy(_FrontDoor, ParallelStrategy):
    """Train on any number of nodes with DDP, FSDP or HSDP; the launch is read from the environment.

    The process group has a backend for host memory beside the device's (`cpu:gloo,cuda:nccl`), as asynchronous
    checkpoints need it. An ordinary LightningModule runs under every sharding unchanged: under "fsdp" and "hsdp" its
    blocks and its root are sharded with FSDP2, unless `configure_model` has sharded something, which then stands.

    `Trainer(devices=…, num_nodes=…)` left alone are taken from the launch (Databricks AIR, torchrun, SLURM); what
    contradicts it is an error. SIGTERM on any rank stops all ranks at the same step, about a second later, with
    Lightning's `SIGTERMException`; callbacks find the agreed `stop` here. When one rank raises, the others end within
    31 seconds with its error in their message.

    Args:
        sharding: "ddp" (each rank holds the whole model), "fsdp" (all ranks share it), or "hsdp" (the ranks of a node
            share it, and the nodes are replicas).
        process_group_backend: "auto", or a `torch.distributed` backend with one for host memory, such as
            "cpu:gloo,cuda:nccl".
        timeout: How long a collective may take, in seconds or as a timedelta.
        join_timeout: How long the ranks wait for each other at the start; then an error names who is missing.
        wrap: fsdp, hsdp: what becomes a block that is gathered as a whole: module classes by type or name, or the
            number of parameters from which a module is one. Default: the classes in the model's `_no_split_modules`,
            else the repeated layers of its outermost ModuleLists.
        activation_checkpointing: Module classes, by type or name, that recompute their activations in the backward
            pass instead of keeping them.
        reshard_after_forward: fsdp, hsdp: free a block's gathered parameters after its forward (True, the default),
            keep them until its backward (False), or reshard to this many ranks.
        cpu_offload: fsdp, hsdp: keep parameters, gradients and optimizer state in host memory.
        find_unused_parameters: ddp: allow parameters that take no part in the loss.
        static_graph: ddp: the same parameters are used in every iteration.
        gradient_as_bucket_view: ddp: let gradients be views of the communication buckets.
        bucket_cap_mb: ddp: the size of a communication bucket, in MiB.
        broadcast_buffers: ddp: send rank 0's buffers to all ranks before each forward.

    Raises:
        ValueError: If a value is wrong or an option does not belong to the sharding.
    """

    num_nodes: int  # both stock strategies have it
    _leaves: ClassVar[dict[str, type["AirStrategy"]]] = {}

    def __init_subclass__(cls, *, shardings: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not shardings:
            raise TypeError(
                f"{cls.__name__} subclasses AirStrategy, which is final: it picks its own subclass by `sharding`. "
                "Subclass Lightning's DDPStrategy or ModelParallelStrategy, or write a Callback."
            )
        AirStrategy._leaves.update(dict.fromkeys(shardings, cls))

    def __init__(
        self,
        sharding: Sharding = "ddp",
        *,
        process_group_backend: str = "auto",
        timeout: timedelta | float = 1800.0,
        join_timeout: timedelta | float = 300.0,
        wrap: str | Sequence[str | type[nn.Module]] | int | None = None,
        activation_checkpointing: str | Sequence[str | type[nn.Module]] | None = None,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
    ) -> None:
        self._refuse_another_leafs(sharding)
        self.options = check_options(
            sharding=sharding,
            process_group_backend=process_group_backend,
            timeout=timeout,
            join_timeout=join_timeout,
            activation_checkpointing=activation_checkpointing,
            wrap=wrap,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
        )
        self._init_stock(self.options)
        self._loop_stop: LoopStop | None = None
        self._was_asked_before = False  # to stop, when the run before was at its end
        self._announcer = Announcer(abort=self._abort_collectives)

    def _refuse_another_leafs(self, sharding: Sharding) -> None:
        leaf = AirStrategy._leaves[sharding]
        if type(self) is not leaf:
            raise ValueError(f"{type(self).__name__} is not for sharding={sharding!r}. Call AirStrategy({sharding!r}).")

    def _init_stock(self, options: StrategyOptions) -> None:
        """Initialise the stock strategy that a leaf stands on."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"AirStrategy(sharding={self.options.sharding!r}){other_package_hint()}"

    @property
    def sharding(self) -> Sharding:
        """How parameters are spread over the ranks."""
        return self.options.sharding

    @property
    def process_group_backend(self) -> str:
        """The backend of the process group, once the devices are known."""
        return choose_backend(self.options.process_group_backend, self.root_device)

    # ---- who this rank is -------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Settle the topology. Lightning calls this when the Trainer is built, and again before the group is made.

        Raises:
            ValueError: If the Trainer's devices or num_nodes contradict the launch.
        """
        launch = current_launch()
        if launch.kind in AIR_KINDS and type(self.cluster_environment) is LightningEnvironment:
            self.cluster_environment = AirEnvironment()
        devices = self.parallel_devices or []
        if devices:
            num_visible = torch.cuda.device_count() if devices[0].type == "cuda" else 1
            self.parallel_devices = resolve_devices(devices, launch, num_visible=num_visible)
        self.num_nodes = resolve_num_nodes(self.num_nodes, launch)
        if devices:
            check_world(self.num_processes, self.num_nodes, launch)
        super().set_world_ranks()  # type: ignore[misc] # both leaves stand on a class that has it

    # Lightning's connector calls this private hook last, and sets the launcher nowhere else.
    @override
    def _configure_launcher(self) -> None:
        interactive = current_launch().kind == "notebook"
        if self.num_nodes * self.num_processes == 1:
            self._launcher = None  # one rank runs in this process, in a notebook too
        elif not interactive:
            super()._configure_launcher()
        elif self.sharding == "ddp":
            self._launcher = MultiProcessingLauncher(self, start_method="fork")
        else:
            raise RuntimeError(
                f"sharding={self.sharding!r} cannot start {self.num_processes} ranks inside a notebook. Run a script, "
                "or let the platform start the ranks (`@distributed` on Databricks AIR) with the Trainer inside."
            )

    # ---- the process group ------------------------------------------------------------------------------------------

    @override
    def connect(self, model: LightningModule) -> None:
        """Begin a run: Lightning's first call of it, before any hook of the user's."""
        super().connect(model)
        self._announcer.begin()
        if self._loop_stop is not None:
            self._was_asked_before = self._loop_stop.is_unheeded
            self._loop_stop = None
        callbacks: list[Callback] = self._module.trainer.callbacks  # type: ignore[attr-defined] # set by its connector
        if not any(isinstance(callback, _AnnounceFirst) for callback in callbacks):
            callbacks.insert(0, _AnnounceFirst())

    @override
    def setup_environment(self) -> None:
        """Make or check the process group. Collective: every rank calls this."""
        assert self.accelerator is not None
        self.set_world_ranks()  # a forked rank has learnt which one it is since the Trainer was built
        self.accelerator.setup_device(self.root_device)  # before NCCL opens a context on it
        membership = self._membership()
        join(
            membership,
            backend=self.process_group_backend,
            timeout=self.options.timeout,
            join_timeout=self.options.join_timeout,
            device=self.root_device,
        )
        if membership.world_size > 1:
            self._announcer.open(enter_world(membership, self.options.timeout))
        super().setup_environment()  # the stock strategy finds the group made
        if is_collective(self.checkpoint_io):
            self.checkpoint_io.connect(self.sharding)

    def _membership(self) -> Membership:
        assert self.cluster_environment is not None
        launch = current_launch()
        is_alone = self.world_size == 1
        return Membership(
            global_rank=self.global_rank,
            world_size=self.world_size,
            ranks_per_node=self.num_processes,
            address="" if is_alone else self.cluster_environment.main_address,
            port=0 if is_alone else self.cluster_environment.main_port,
            agent_hosts_store=launch.uses_agent_store,
            attempt=launch.restart_count,
            plan=f"sharding={self.sharding!r}",
        )

    def _abort_collectives(self) -> None:
        abort(self.root_device)

    # ---- setting up -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        """Prepare the model for the ranks. Collective: every rank calls this."""
        self._prepare(trainer)
        super().setup(trainer)

    def _prepare(self, trainer: Trainer) -> None:
        """Do what stands before every sharding's own setup."""
        refuse_other_package(trainer, *all_parts(trainer))
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_frozen_model(self._module)
        choose_grad_mode(trainer, self.root_device, self.sharding)
        self._leave_if_asked_before()
        world = current_world()
        control_group = None if world is None else world.control_group
        self._loop_stop = LoopStop(trainer, self.launcher, control_group, self.global_rank)

    def _leave_if_asked_before(self) -> None:
        """Do not begin if a rank was told to stop when the run before was at its end. Collective."""
        was_asked, self._was_asked_before = self._was_asked_before, False
        if self.reduce_boolean_decision(was_asked, all=False):
            raise SIGTERMException(SIGTERM_EXIT_CODE)

    # ---- stopping together ------------------------------------------------------------------------------------------

    @property
    def stop(self) -> Stop | None:
        """The stop that all ranks have agreed on, or None. Set before `on_exception` of callbacks is called."""
        return None if self._loop_stop is None else self._loop_stop.agreed

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to leave the training loop at the same step, with `SIGTERMException`.

        Any rank may call this, on any thread; the first reason of a rank is kept. Acted on about a second later.

        Args:
            reason: One line, shown on every rank.

        Raises:
            RuntimeError: If no fit is running.
        """
        if self._loop_stop is None:
            raise RuntimeError(f"No fit is running that could be stopped ({reason!r}).")
        self._loop_stop.request(reason)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._loop_stop is not None:
            self._loop_stop.start_validation()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._loop_stop is not None:
            self._loop_stop.end_validation()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._announcer.raise_if_another_failed()
        return self._step("training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._announcer.raise_if_another_failed()
        if self._loop_stop is not None:
            self._loop_stop.leave_if_agreed_in_validation()
        return self._step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._announcer.raise_if_another_failed()
        return self._step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._announcer.raise_if_another_failed()
        if self._loop_stop is not None:
            self._loop_stop.leave_prediction()
        return self._step("predict_step", *args, **kwargs)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step as the stock strategy does."""
        return getattr(super(), name)(*args, **kwargs)

    # ---- failing together -------------------------------------------------------------------------------------------

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        # The gradients of a collective that was aborted are not to be stepped with.
        self._announcer.raise_if_another_failed()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._announce(exception)

    def _announce(self, exception: BaseException) -> None:
        """Tell the other ranks of an exception that they do not share. Idempotent.

        Called before any callback's `on_exception`: one of them may start a collective that nobody else joins.
        """
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = SIGTERM_EXIT_CODE  # Lightning's own is success, and nobody would start the run again
        if self._loop_stop is not None:
            self._loop_stop.end(exception)
        is_agreed = isinstance(exception, SIGTERMException) and self.stop is not None
        if not is_agreed:
            self._announcer.announce(exception)

    @override
    def teardown(self) -> None:
        """End what `setup` began. Called on every rank, also after an exception."""
        try:
            if self._loop_stop is not None:
                self._loop_stop.end()
        finally:
            self._announcer.close()
            self._teardown_stock()

    def _teardown_stock(self) -> None:
        """Run the stock teardown, and the CheckpointIO's whatever happens in it.

        On a broken GPU moving the model to the host raises, and the uploads under way would be lost with it.
        """
        try:
            super().teardown()
        except BaseException:
            self.checkpoint_io.teardown()
            raise

    def _can_meet_others(self) -> bool:
        """Return whether a collective makes sense; raise if another rank has failed and this one is to learn of it."""
        if self._announcer.has_failed:
            return False
        self._announcer.raise_if_another_failed()
        return dist.is_initialized()

    # ---- collectives ------------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None, **kwargs: Any) -> None:
        """Wait for all ranks. Collective: every rank calls this; after a failure it does nothing."""
        if self._can_meet_others():
            barrier(self.root_device)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s object on every rank. Collective: every rank calls this."""
        if not self._can_meet_others():
            return obj
        holder = [obj]
        dist.broadcast_object_list(holder, src)
        return holder[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Return the tensor reduced over the ranks, in place. Collective: every rank calls this."""
        if not isinstance(tensor, Tensor) or not self._can_meet_others():
            return tensor
        return reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all (or any) ranks decided so. Collective: every rank calls this; no device is involved."""
        if not self._can_meet_others():
            return decision
        count = torch.tensor(int(decision))
        dist.all_reduce(count)
        return int(count) == self.world_size if all else int(count) > 0

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any | None = None
    ) -> None:
        """Save through the CheckpointIO: on every rank if it is collective, else as the stock strategy does.

        After one rank has failed nothing is saved: the ranks are not at the same step, and would wait for each other.
        """
        self._announcer.raise_if_another_failed()
        if self._announcer.has_failed:
            rank_zero_warn(f"{filepath} is not saved, since a rank has failed and the others cannot take part.")
            return
        if is_collective(self.checkpoint_io):
            with_notes = noted(checkpoint, self._module, self.optimizers)
            self.checkpoint_io.save_checkpoint(with_notes, self.broadcast(filepath), storage_options=storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load through the CheckpointIO. Collective: every rank calls this."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return with_own_names(checkpoint, self._module) if is_collective(self.checkpoint_io) else checkpoint

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Remove through the CheckpointIO: on every rank if it is collective, else on rank 0."""
        if is_collective(self.checkpoint_io):
            self.checkpoint_io.remove_checkpoint(self.broadcast(filepath))
        else:
            super().remove_checkpoint(filepath)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def register_names() -> None:
    """Make "air_ddp", "air_fsdp" and "air_hsdp" names that `Trainer(strategy=…)` knows."""
    for sharding in SHARDINGS:
        StrategyRegistry.register(
            f"air_{sharding}",
            AirStrategy,
            description=f"lightning_air.AirStrategy(sharding={sharding!r})",
            override=True,
            sharding=sharding,
        )
