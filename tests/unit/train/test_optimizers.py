"""Optimizers: MXNet's names, its rule of decay, and on the servers those that are said to run there."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn, optim

from echelon import models
from echelon.errors import UsageError
from echelon.kvstore.optimizers import spec_of
from echelon.server.kernels import kernel_for
from echelon.train.optimizers import NAMES, ON_SERVERS, make_optimizer


class Everything(nn.Module):
    """Every kind of parameter that the rule tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.layer_norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 5)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.fc.weight
        self.slope = nn.PReLU()
        self.odd_bias = nn.Parameter(torch.zeros(2, 2))
        self.fixed = nn.BatchNorm2d(4)
        self.fixed.weight.requires_grad_(False)


DECAYING = {"conv.weight", "batch_norm.weight", "group_norm.weight", "layer_norm.weight", "fc.weight"}
OTHERS = {"conv.bias", "batch_norm.bias", "group_norm.bias", "layer_norm.bias", "fc.bias"}
OTHERS |= {"slope.weight", "odd_bias", "fixed.bias"}


def names_in(model: nn.Module, group: dict[str, list[nn.Parameter]]) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(names[id(parameter)] for parameter in group["params"])


def test_weights_and_gammas_decay_and_nothing_else() -> None:
    model = Everything()
    optimizer = make_optimizer("sgd", model, lr=0.1, momentum=0.9, weight_decay=0.01)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert [names_in(model, group) for group in optimizer.param_groups] == [sorted(DECAYING), sorted(OTHERS)]


def test_without_decay_one_group_is_enough() -> None:
    model = Everything()
    (group,) = make_optimizer("sgd", model, lr=0.1, momentum=0.9, weight_decay=0.0).param_groups
    assert names_in(model, group) == sorted(DECAYING | OTHERS)


def test_a_network_of_ours() -> None:
    """A resnet: its convolutions have no bias, and the gamma of the norm on the input is fixed."""
    model = models.build("resnet", num_classes=10, image_shape=(3, 28, 28), num_layers=20)
    decaying, others = make_optimizer("sgd", model, lr=0.1, momentum=0.9, weight_decay=1e-4).param_groups
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(decaying["params"]) == len(matrices) + len(norms) - 1
    assert len(others["params"]) == len(norms) + 1  # betas, and the classifier's bias


KINDS: dict[str, type[optim.Optimizer]] = {
    "sgd": optim.SGD,
    "ccsgd": optim.SGD,
    "nag": optim.SGD,
    "lbsgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_takes_a_step(name: str) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = make_optimizer(name.upper(), model, lr=0.1, momentum=0.9, weight_decay=0.01)
    assert type(optimizer) is KINDS[name]
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert (model.weight < before).all()  # the gradient is 4 everywhere, whatever the optimizer makes of it


def test_all_the_names() -> None:
    assert set(NAMES) == set(KINDS)


@pytest.mark.parametrize(
    ("name", "momentum", "nesterov"),
    [("sgd", 0.8, False), ("ccsgd", 0.8, False), ("lbsgd", 0.8, False), ("nag", 0.8, True), ("nag", 0.0, False)],
)
def test_momentum(name: str, momentum: float, nesterov: bool) -> None:
    optimizer = make_optimizer(name, nn.Linear(1, 1), lr=0.1, momentum=momentum, weight_decay=0.0)
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (momentum, nesterov)


def test_rmsprop_gets_no_momentum() -> None:
    assert make_optimizer("rmsprop", nn.Linear(1, 1), lr=0.1, momentum=0.9, weight_decay=0).defaults["momentum"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_run_what_is_said_and_nothing_else(name: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(name, model, lr=0.1, momentum=0.9, weight_decay=0.01)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    if name not in ON_SERVERS:
        with pytest.raises(UsageError, match="cannot run on the servers"):
            spec_of(optimizer, names)
        return
    spec = spec_of(optimizer, names)
    model(torch.ones(1, 2)).sum().backward()
    weights, gradient = model.weight.detach().clone().flatten(), model.weight.grad
    assert gradient is not None
    kernel = kernel_for(spec.name, spec.groups[0])
    states = [torch.full_like(weights, fill) for fill in kernel.state_fills()]
    kernel.update(weights, gradient.flatten(), states, 1, 0.1, 1, 1.0)
    optimizer.step()
    assert torch.equal(weights, model.weight.detach().flatten())


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=re.escape("Unknown optimizer 'addam'. Did you mean 'adam'? Known: sgd, ccsgd,")
    ):
        make_optimizer("addam", nn.Linear(1, 1), lr=0.1)


@pytest.mark.parametrize("name", ["signum", "FTML", "lars", "lamb", "dcasgd", "sgld", "ftrl"])
def test_what_mxnet_has_and_we_do_not(name: str) -> None:
    with pytest.raises(UsageError, match=f"MXNet has the optimizer '{name}', Echelon not yet; use one of sgd, "):
        make_optimizer(name, nn.Linear(1, 1), lr=0.1)


def test_bad_numbers_are_refused_in_our_words() -> None:
    with pytest.raises(UsageError, match=re.escape("optimizer 'sgd' with lr=-1, momentum=0.9: Invalid learning rate")):
        make_optimizer("sgd", nn.Linear(1, 1), lr=-1)
    with pytest.raises(UsageError, match=re.escape("--wd -0.1: weight decay must be 0 or more")):
        make_optimizer("sgd", nn.Linear(1, 1), lr=0.1, weight_decay=-0.1)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(UsageError, match="ReLU has no parameter that requires a gradient"):
        make_optimizer("sgd", nn.ReLU(), lr=0.1)
