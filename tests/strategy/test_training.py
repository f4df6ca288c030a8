"""The same loss curve and the same weights, whatever the sharding and the number of ranks."""

import functools

import pytest
import torch

from tests.kit.ranks import run_ranks, values
from tests.strategy.training import Outcome, train

# Sums in another order: float32 to about 1e-6 a step; bfloat16 has 8 bits, and its errors add up over 16 steps.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 5e-2, "bf16-true": 1e-1}


@functools.cache
def reference(precision: str, accumulate: int = 1, clip: float | None = None) -> Outcome:
    return train(None, {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip})


def assert_same(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    assert len(outcome.losses) == len(expected.losses) == 16
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(outcome.weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)
    assert outcome.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_loss_curve_and_weights_are_those_of_one_process(sharding: str, world_size: int, precision: str) -> None:
    outcomes = values(run_ranks(train, world_size, args=({"sharding": sharding}, {"precision": precision})))
    expected = reference(precision)
    assert expected.losses[-1] < expected.losses[0] * 0.8  # it learns, so that agreeing means something
    for outcome in outcomes:
        assert_same(outcome, expected, TOLERANCE[precision])


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_two_nodes_train_as_one_process(sharding: str) -> None:
    outcomes = values(run_ranks(train, 4, nodes=2, args=({"sharding": sharding},)))
    for outcome in outcomes:
        assert_same(outcome, reference("32-true"), TOLERANCE["32-true"])
