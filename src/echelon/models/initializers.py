"""Initializers by name, with MXNet's rules: weights are drawn, biases are 0, batch-norm scales are 1.

Only weights of two or more dimensions are drawn, so that the scale of batch norm stays 1. The fan-in of a convolution
is shape[1] x kernel area and its fan-out is shape[0] x kernel area; with groups, shape[1] is divided already. A module
that sets `keeps_initialization` is not changed. Random numbers come from torch's global generator; seed it to get the
same weights again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from echelon.errors import unknown_name

Rule = Callable[[Tensor], object]


def _fans(weight: Tensor) -> tuple[int, int]:
    area = math.prod(weight.shape[2:])
    return weight.shape[1] * area, weight.shape[0] * area


def _xavier(weight: Tensor) -> None:
    bound = math.sqrt(3.0 / (sum(_fans(weight)) / 2.0))
    nn.init.uniform_(weight, -bound, bound)


def _he(weight: Tensor) -> None:
    nn.init.normal_(weight, std=math.sqrt(2.0 / _fans(weight)[0]))


def _msra(weight: Tensor) -> None:
    magnitude = 2.0 / (1.0 + 0.25**2)  # He et al. for a PReLU of slope 0.25, with the mean of fan-in and fan-out
    nn.init.normal_(weight, std=math.sqrt(magnitude / (sum(_fans(weight)) / 2.0)))


def _orthogonal(weight: Tensor) -> None:
    flat = weight.new_empty(weight.shape[0], math.prod(weight.shape[1:])).uniform_(-1.0, 1.0)
    left, _, right = torch.linalg.svd(flat, full_matrices=False)
    weight.copy_(1.414 * (left if left.shape == flat.shape else right).reshape(weight.shape))


_normal: Rule = partial(nn.init.normal_, std=0.01)

RULES: dict[str, Rule] = {
    "xavier": _xavier,
    "msra": _msra,
    "orthogonal": _orthogonal,
    "normal": _normal,
    "uniform": partial(nn.init.uniform_, a=-0.07, b=0.07),
    "one": nn.init.ones_,
    "zero": nn.init.zeros_,
}


def names() -> tuple[str, ...]:
    """Return the names of all initializers."""
    return ("default", *RULES)


def rule_for(initializer: str, network: str = "") -> Rule:
    """Return the rule of that name. The rule "default" differs for alexnet, for vgg, and for all other networks."""
    if initializer != "default":
        if initializer not in RULES:
            raise unknown_name("initializer", initializer, names())
        return RULES[initializer]
    if network == "alexnet":
        return _normal
    return _xavier if "vgg" in network else _he


@torch.no_grad()
def initialize(model: nn.Module, initializer: str = "default", network: str = "") -> None:
    """Initialise every weight and bias of `model` again with the named rule."""
    rule = rule_for(initializer, network)
    for module in model.modules():
        if getattr(module, "keeps_initialization", False):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("weight") and parameter.ndim >= 2:
                rule(parameter)
