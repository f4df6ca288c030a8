"""Handing parameters over to optimizers that were built before sharding; the rest of sharding is tested by training."""

from typing import Any

import torch
from torch import nn

from lightning_air.strategy.sharding import WholeParameters


def sharded_like(module: Any) -> None:
    """Do to the parameters what `fully_shard` does: put others in their place."""
    for layer in module:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())


def test_every_group_keeps_its_options_and_gets_the_new_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(module[1].parameters()), "lr": 0.5}, {"params": [module[0].bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    whole = WholeParameters(module)
    sharded_like(module)
    whole.hand_over(module, [optimizer])
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == (0.5, 0.1)
    assert [id(param) for param in first["params"]] == [id(module[1].weight), id(module[1].bias)]
    assert [id(param) for param in second["params"]] == [id(module[0].bias)]


def test_an_optimizer_that_holds_the_list_itself() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.LBFGS(module.parameters())
    whole = WholeParameters(module)
    sharded_like(module)
    whole.hand_over(module, [optimizer])
    assert [id(param) for param in optimizer._params] == [id(param) for param in module.parameters()]


def test_parameters_of_something_else_stay() -> None:
    module, other = nn.Sequential(nn.Linear(2, 2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    whole = WholeParameters(module)
    sharded_like(module)
    whole.hand_over(module, [optimizer])
    assert optimizer.param_groups[0]["params"][0] is other


def test_whole_parameters_are_not_kept_alive() -> None:
    import weakref

    module = nn.Sequential(nn.Linear(2, 2))
    alive = weakref.ref(module[0].weight)
    whole = WholeParameters(module)
    sharded_like(module)
    assert alive() is None
    whole.hand_over(module, [])
