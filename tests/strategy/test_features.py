"""What an ordinary LightningModule may do, under every sharding: each compared with one plain process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_air import AirStrategy
from tests.kit.ranks import run_ranks, values
from tests.kit.trainers import fast_trainer_kwargs
from tests.strategy.training import GLOBAL_BATCH, Net, Outcome, Regression, loader, train

SHARDINGS = ["ddp", "fsdp", "hsdp"]


def assert_close(outcome: Outcome, expected: Outcome, tolerance: float = 1e-4) -> None:
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(outcome.weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)


def on_two_ranks(fn: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return values(run_ranks(fn, 2, args=args, **kwargs))


# ---- gradients -------------------------------------------------------------------------------------------------------


class CountGradientSyncs(Callback):
    """Counts, per batch, the collectives that carry gradients: DDP's buckets, FSDP's reduce-scatters."""

    def __init__(self) -> None:
        self.per_batch: list[int] = []
        self.count = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel):
            trainer.strategy.model.register_comm_hook(None, self._hook)
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the latter from torch 2.13 on
            if hasattr(dist, name):
                setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return collective(*args, **kwargs)

        return count

    def _hook(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.count += 1
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def on_train_batch_end(self, *_: Any) -> None:
        self.per_batch.append(self.count)
        self.count = 0


def accumulate(sharding: str) -> tuple[Outcome, list[int]]:
    counter = CountGradientSyncs()
    outcome = train({"sharding": sharding}, {"accumulate_grad_batches": 4}, callbacks=(counter,))
    return outcome, counter.per_batch


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_accumulation_syncs_gradients_once_per_optimizer_step(sharding: str) -> None:
    expected = train(None, {"accumulate_grad_batches": 4})
    for outcome, per_batch in on_two_ranks(accumulate, sharding):
        assert_close(outcome, expected)
        assert len(per_batch) == 16
        for index, count in enumerate(per_batch):
            is_step = index % 4 == 3
            assert (count > 0) == is_step, f"batch {index}: {count} gradient collectives"


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_clipping_by_norm_uses_the_norm_over_all_ranks(sharding: str) -> None:
    options = {"gradient_clip_val": 0.05}
    expected = train(None, options)
    assert expected.losses != train(None).losses  # the clip bites
    for outcome in on_two_ranks(train, {"sharding": sharding}, options):
        assert_close(outcome, expected)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_start_from_rank_zeros_weights(sharding: str) -> None:
    expected = train(None)
    for outcome in on_two_ranks(seeded_by_rank, sharding):
        assert_close(outcome, expected)


def seeded_by_rank(sharding: str) -> Outcome:
    return train({"sharding": sharding}, seed_by_rank=True)


# ---- the model -------------------------------------------------------------------------------------------------------


class Compiled(Regression):
    """Compiles a part of itself, the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


def train_compiled(sharding: str, how: str) -> Outcome:
    torch.manual_seed(1)
    if how == "part in place":
        module: Any = Compiled()
    else:
        module = Regression()
        if how == "layers":
            for index, layer in enumerate(module.net.layers):
                module.net.layers[index] = torch.compile(layer, backend="eager")
        else:
            module = torch.compile(module, backend="eager")
    outcome = train({"sharding": sharding}, module=module)
    inner = getattr(module, "_orig_mod", module)
    outcome.extra["compiled"] = torch._dynamo.utils.counters["frames"]["ok"]
    outcome.extra["sharded layers"] = [isinstance(layer, FSDPModule) for layer in inner.net.layers]
    return outcome


@pytest.mark.parametrize("how", ["whole module", "part in place", "layers"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_compiled_models_train_the_same(sharding: str, how: str) -> None:
    expected = train(None)
    # Tracing warns about what it cannot see through, which is not what is tested here.
    for outcome in on_two_ranks(train_compiled, sharding, how, warnings_as_errors=False):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-4)
        assert outcome.extra["compiled"] > 0
        assert all(outcome.extra["sharded layers"]) == (sharding != "ddp")


class Tied(Regression):
    """The same weight at the entrance and at the exit, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.net.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(x).mean(dim=-1, keepdim=True)


def train_tied(sharding: str | None) -> Outcome:
    torch.manual_seed(1)
    module = Tied()
    outcome = train(
        {"sharding": sharding, "wrap": 1} if sharding in ("fsdp", "hsdp") else sharding and {}, module=module
    )
    outcome.extra["tied"] = module.head.weight is module.net.inp.weight
    return outcome


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_tied_weights_stay_tied(sharding: str) -> None:
    expected = train_tied(None)
    for outcome in on_two_ranks(train_tied, sharding):
        assert outcome.extra["tied"]
        assert_close(outcome, expected)


class ManualGan(LightningModule):
    """Two optimizers that Lightning lets a module step by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Net(num_blocks=2)
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        generator_optimizer, critic_optimizer = self.optimizers()
        self.toggle_optimizer(generator_optimizer)
        fake = self.generator(x)
        loss = nn.functional.mse_loss(fake, y) - 0.1 * self.critic(fake).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)
        self.toggle_optimizer(critic_optimizer)
        critic_loss = (self.critic(y) - 1).square().mean() + self.critic(self.generator(x).detach()).square().mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()
        self.untoggle_optimizer(critic_optimizer)
        return {"loss": loss + critic_loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.generator(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2),
            torch.optim.AdamW(self.critic.parameters(), lr=1e-2),
        )


def train_gan(sharding: str | None) -> Outcome:
    torch.manual_seed(1)
    # DDP sees two backwards per forward pass and unused parameters in each: the user says so, as with stock DDP.
    options = {"sharding": sharding} | ({"find_unused_parameters": True} if sharding == "ddp" else {})
    return train(options if sharding else None, module=ManualGan())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_several_optimizers_by_manual_optimization(sharding: str) -> None:
    expected = train_gan(None)
    for outcome in on_two_ranks(train_gan, sharding):
        assert_close(outcome, expected)


class ManualWithOwnParameter(ManualGan):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


def test_manual_optimization_with_a_parameter_of_the_root_is_refused_by_name() -> None:
    for result in run_ranks(train_manual_with_own_parameter, 2):
        assert "holds the parameter(s) temperature itself" in (result.error or "")


def train_manual_with_own_parameter() -> Outcome:
    return train({"sharding": "fsdp"}, module=ManualWithOwnParameter())


class ShardsItself(Regression):
    """A user who wrote `configure_model`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def configure_model(self) -> None:
        if isinstance(self.net.layers[0], FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers[:1]:
            fully_shard(layer, mesh=mesh)
        if self.what == "root":
            fully_shard(self, mesh=mesh)


def train_sharded_by_user(what: str, options: dict[str, Any]) -> Outcome:
    torch.manual_seed(1)
    module = ShardsItself(what)
    # Gradients of what the user left whole are the user's business: here nothing reduces them.
    outcome = train({"sharding": "fsdp", **options}, module=module)
    outcome.extra["sharded"] = {name for name, param in module.named_parameters() if isinstance(param, DTensor)}
    return outcome


def test_a_module_that_shards_itself_is_left_in_charge() -> None:
    expected = train(None)
    for outcome in on_two_ranks(train_sharded_by_user, "root", {}):
        assert_close(outcome, expected)
        assert outcome.extra["sharded"] == set(expected.weights) - {"shift"}
    for outcome in on_two_ranks(train_sharded_by_user, "one layer", {}):
        assert all(name.startswith("net.layers.0.") for name in outcome.extra["sharded"])


def test_wrap_beside_a_module_that_shards_itself_is_refused() -> None:
    for result in run_ranks(train_sharded_by_user, 2, args=("root", {"wrap": ["Block"]})):
        assert "wrap=('Block',) has no effect: the model was sharded before" in (result.error or "")


class BuildsLayersLate(Regression):
    """`configure_model` used for lazy construction only: it shards nothing, so AirStrategy does."""

    def __init__(self) -> None:
        super().__init__()
        self.late: nn.Module | None = None

    def configure_model(self) -> None:
        if self.late is None:
            generator_state = torch.get_rng_state()
            torch.manual_seed(5)
            self.late = nn.Linear(1, 1)
            torch.set_rng_state(generator_state)

    def forward(self, x: Tensor) -> Tensor:
        assert self.late is not None
        return self.late(super().forward(x))


def train_built_late(sharding: str | None) -> Outcome:
    torch.manual_seed(1)
    module = BuildsLayersLate()
    outcome = train({"sharding": sharding} if sharding else None, module=module)
    outcome.extra["all sharded"] = all(isinstance(param, DTensor) for param in module.parameters())
    return outcome


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_configure_model_that_only_builds_layers(sharding: str) -> None:
    expected = train_built_late(None)
    for outcome in on_two_ranks(train_built_late, sharding):
        assert_close(outcome, expected)
        assert outcome.extra["all sharded"] == (sharding != "ddp")


class BuildsItsOptimizerEarly(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


def train_with_early_optimizer(sharding: str) -> Outcome:
    torch.manual_seed(1)
    return train({"sharding": sharding}, module=BuildsItsOptimizerEarly())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_an_optimizer_built_before_sharding_trains_what_is_computed_with(sharding: str) -> None:
    expected = train(None)
    for outcome in on_two_ranks(train_with_early_optimizer, sharding):
        assert_close(outcome, expected)


class OnMeta(Regression):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = Net()


def train_on_meta() -> Outcome:
    outcome = train({"sharding": "fsdp"}, module=OnMeta())
    outcome.extra["finite"] = all(torch.isfinite(weight).all() for weight in outcome.weights.values())
    return outcome


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1, device="meta"))


class OnMetaWithoutReset(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.offset = Offset()


def train_without_reset() -> None:
    train({"sharding": "fsdp"}, module=OnMetaWithoutReset())


def test_meta_weights_that_nothing_initialises_are_named() -> None:
    (result,) = run_ranks(train_without_reset, 1)  # where a warning is an error
    assert "Offset: built on the meta device and without a `reset_parameters` method" in (result.error or "")


def test_a_model_on_the_meta_device_is_built_after_sharding() -> None:
    # DTensor warns that random numbers on a CPU mesh are only lightly supported.
    first, second = on_two_ranks(train_on_meta, warnings_as_errors=False)
    assert first.extra["finite"]
    assert first.losses[0] < 100  # the scale, which is not on the meta device, has kept its value of one
    assert first.losses == second.losses
    assert first.losses[-1] < first.losses[0]


class WithBatchNorm(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)


def layers_with_sync_batchnorm(sharding: str) -> bool:
    kwargs = fast_trainer_kwargs(".", strategy=AirStrategy(sharding), sync_batchnorm=True, limit_val_batches=0)
    seen: list[bool] = []

    class Look(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(isinstance(pl_module.norm, nn.SyncBatchNorm))

    trainer = Trainer(**{**kwargs, "max_steps": 1, "max_epochs": -1, "callbacks": [Look()]})
    # The layer itself needs a GPU; the model does not call it.
    module = WithBatchNorm()
    trainer.fit(module, loader(), loader())
    return seen[0]


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp"])  # DDP itself refuses the layer on the CPU
def test_sync_batchnorm_is_applied(sharding: str) -> None:
    results = run_ranks(layers_with_sync_batchnorm, 1, args=(sharding,), warnings_as_errors=False)
    assert values(results) == [True]


# ---- memory options --------------------------------------------------------------------------------------------------


def train_with_forward_counts(options: dict[str, Any] | None) -> Outcome:
    torch.manual_seed(1)
    module = Regression()
    counts = {"forwards": 0}
    layer = module.net.layers[0]
    forward = layer.up.forward

    def counting(x: Tensor) -> Tensor:
        counts["forwards"] += 1
        return forward(x)

    layer.up.forward = counting
    outcome = train(options, {"limit_val_batches": 0}, module=module)
    outcome.extra |= counts
    return outcome


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_activation_checkpointing_recomputes_and_changes_nothing(sharding: str) -> None:
    expected = train_with_forward_counts(None)
    options = {"sharding": sharding, "activation_checkpointing": ["Block"]}
    for outcome in on_two_ranks(train_with_forward_counts, options):
        assert outcome.extra["forwards"] == 2 * expected.extra["forwards"] == 32
        assert_close(outcome, expected)


@pytest.mark.parametrize("options", [{"cpu_offload": True}, {"reshard_after_forward": False}, {"wrap": 100}])
@pytest.mark.parametrize("sharding", ["fsdp", "hsdp"])
def test_memory_options_change_no_value(sharding: str, options: dict[str, Any]) -> None:
    expected = train(None)
    for outcome in on_two_ranks(train, {"sharding": sharding, **options}):
        assert_close(outcome, expected)


# ---- averaging, evaluation -------------------------------------------------------------------------------------------


def train_with_average(sharding: str | None) -> Outcome:
    torch.manual_seed(1)
    callback = EMAWeightAveraging(decay=0.8)
    return train({"sharding": sharding} if sharding else None, module=Regression(), callbacks=(callback,))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_exponential_moving_average_of_the_weights(sharding: str) -> None:
    expected = train_with_average(None)
    plain = train(None)
    assert not torch.equal(expected.weights["net.out.weight"], plain.weights["net.out.weight"])  # averaged
    for outcome in on_two_ranks(train_with_average, sharding):
        assert_close(outcome, expected)
        assert outcome.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=1e-4)


class CallsPartsOnly(Regression):
    """Steps that never call `self(...)`, and forwards that no backward follows, inside and outside of steps."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = self(x)
        return nn.functional.mse_loss(self.net(x) * self.scale, y) + 0.1 * (self(x) - target).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self(torch.ones(2, 8))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x) * self.scale, y), sync_dist=True)


def train_parts_only(sharding: str | None) -> Outcome:
    torch.manual_seed(1)
    callbacks = (EMAWeightAveraging(decay=0.8),)
    options = {"val_check_interval": 2, "accumulate_grad_batches": 2}
    return train({"sharding": sharding} if sharding else None, options, module=CallsPartsOnly(), callbacks=callbacks)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_no_forward_uses_parameters_gathered_before_they_changed(sharding: str) -> None:
    expected = train_parts_only(None)
    for outcome in on_two_ranks(train_parts_only, sharding):
        assert_close(outcome, expected)
        assert outcome.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=1e-4)


def evaluate(sharding: str | None) -> dict[str, Any]:
    """Evaluate without training, train, and evaluate again with the same Trainer."""
    torch.manual_seed(1)
    strategy: Any = AirStrategy(sharding) if sharding else "auto"
    trainer = Trainer(**fast_trainer_kwargs(".", strategy=strategy, use_distributed_sampler=False, max_epochs=1))
    module = Regression()
    batches = loader(trainer.world_size, trainer.global_rank)
    before = trainer.validate(module, batches, verbose=False)[0]["val_loss"]
    trainer.fit(module, batches, batches)
    after = trainer.test(module, batches, verbose=False)[0]["test_loss"]
    predictions = trainer.predict(module, batches)
    assert predictions is not None
    mine = torch.cat([torch.as_tensor(part) for part in predictions])
    return {"before": before, "after": after, "predictions": mine, "rank": trainer.global_rank}


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_validate_fit_test_predict_with_one_trainer(sharding: str) -> None:
    expected = evaluate(None)
    assert expected["after"] < expected["before"]
    outcomes = on_two_ranks(evaluate, sharding)
    for outcome in outcomes:
        assert outcome["before"] == pytest.approx(expected["before"], rel=1e-4)
        assert outcome["after"] == pytest.approx(expected["after"], rel=1e-4)
    # Rank r holds every second sample, from r on.
    together = torch.stack([outcome["predictions"] for outcome in outcomes], dim=1).flatten(0, 1)
    torch.testing.assert_close(together, expected["predictions"], rtol=1e-4, atol=1e-4)


class UsesRootAfterForward(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.log("val_loss", nn.functional.mse_loss(output * self.scale, y), sync_dist=True)


def one_model_under_two_trainers(sharding: str | None) -> list[float]:
    torch.manual_seed(1)
    module = UsesRootAfterForward()
    losses = []
    for is_first in (True, False):
        options = {} if sharding in (None, "ddp") else {"wrap": ["Block"]}
        strategy: Any = AirStrategy(sharding, **options) if sharding else "auto"
        kwargs = fast_trainer_kwargs(".", strategy=strategy, use_distributed_sampler=False, num_sanity_val_steps=0)
        trainer = Trainer(**kwargs)
        batches = loader(trainer.world_size, trainer.global_rank)
        if is_first:
            trainer.fit(module, batches, batches)
            losses.append(trainer.validate(module, batches, verbose=False)[0]["val_loss"])
        else:
            losses.append(trainer.validate(module, batches, verbose=False)[0]["val_loss"])
            trainer.fit(module, batches, batches)
            losses.append(float(trainer.callback_metrics["val_loss"]))
    return losses


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_model_under_two_trainers(sharding: str) -> None:
    expected = one_model_under_two_trainers(None)
    for losses in on_two_ranks(one_model_under_two_trainers, sharding):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_a_leaf_is_made_by_the_front_door_only() -> None:
    with pytest.raises(ValueError, match=r"AirDDP is not for sharding='fsdp'\. Call AirStrategy"):
        type(AirStrategy())("fsdp")


# ---- what is refused -------------------------------------------------------------------------------------------------


class Frozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_frozen_model_is_refused_for_training(sharding: str) -> None:
    (result,) = run_ranks(train_frozen, 1, args=(sharding,), warnings_as_errors=False)
    assert "ValueError: Frozen has nothing to train: none of its 17 parameters requires a gradient" in (
        result.error or ""
    )


def train_frozen(sharding: str) -> None:
    train({"sharding": sharding}, module=Frozen())


def test_wrap_that_matches_nothing_names_the_classes_there_are() -> None:
    (result,) = run_ranks(train, 1, args=({"sharding": "fsdp", "wrap": ["Blok"]},))
    assert "ValueError: wrap names 'Blok', but the model has no module of that class. It has: Block" in (
        result.error or ""
    )


def test_global_batch_is_what_the_tests_say() -> None:
    assert loader(2, 0).batch_size == GLOBAL_BATCH // 2
