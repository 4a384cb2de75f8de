"""Optimizers: MXNet's names, its rule for weight decay, and which of them servers can run."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn, optim

from echelon import models
from echelon.errors import UsageError
from echelon.kvstore.optimizer_spec import spec_of
from echelon.optim import (
    DCASGD,
    FTML,
    LAMB,
    LARS,
    LBSGD,
    NAG,
    SGD,
    SGLD,
    Accumulate,
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    Ftrl,
    GroupAdaGrad,
    LBSGDByNorm,
    Nadam,
    RMSProp,
    Signum,
)
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.optimizer.kernels import kernel_for
from echelon.train.recipe.optimizers import NAMES, check_on_servers, check_optimizer, make_optimizer
from echelon.train.recipe.options import OPTIMIZER_STYLES, OPTIMIZERS
from echelon.train.recipe.plan import LargeBatch

pytestmark = pytest.mark.numeric


class Everything(nn.Module):
    """Every kind of parameter that the rule distinguishes."""

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


def test_weight_decay_of_a_resnet() -> None:
    """The convolutions of a resnet have no bias, and the gamma of the norm on the input is fixed."""
    model = models.build("resnet", num_classes=10, image_shape=(3, 28, 28), num_layers=20)
    decaying, others = make_optimizer("sgd", model, lr=0.1, momentum=0.9, weight_decay=1e-4).param_groups
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(decaying["params"]) == len(matrices) + len(norms) - 1
    assert len(others["params"]) == len(norms) + 1  # betas, and the classifier's bias


KINDS: dict[str, tuple[type[optim.Optimizer], type[optim.Optimizer]]] = {  # in torch's style, and in MXNet's
    "sgd": (optim.SGD, SGD),
    "ccsgd": (optim.SGD, SGD),
    "nag": (optim.SGD, NAG),
    "lbsgd": (LBSGD, LBSGD),
    "adam": (optim.Adam, Adam),
    "adamw": (optim.AdamW, optim.AdamW),
    "rmsprop": (optim.RMSprop, RMSProp),
    "adagrad": (optim.Adagrad, AdaGrad),
    "groupadagrad": (GroupAdaGrad, GroupAdaGrad),
    "adadelta": (optim.Adadelta, AdaDelta),
    "adamax": (optim.Adamax, Adamax),
    "nadam": (optim.NAdam, Nadam),
    "signum": (Signum, Signum),
    "ftml": (FTML, FTML),
    "ftrl": (Ftrl, Ftrl),
    "dcasgd": (DCASGD, DCASGD),
    "lars": (LARS, LARS),
    "lamb": (LAMB, LAMB),
    "sgld": (SGLD, SGLD),
    "test": (Accumulate, Accumulate),
}
OTHER_WAYS = ("test", "sgld", "ftrl")  # these move against the gradient, add noise, or move as their state says
STYLED = [(name, style) for name in NAMES for style in OPTIMIZER_STYLES]


def decay_of(name: str) -> float:
    return 0.0 if name == "groupadagrad" else 0.01


@pytest.mark.parametrize(("name", "style"), STYLED)
def test_every_name_takes_a_step(name: str, style: str) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = make_optimizer(name.upper(), model, lr=0.1, momentum=0.9, weight_decay=decay_of(name), style=style)
    assert type(optimizer) is KINDS[name][OPTIMIZER_STYLES.index(style)]
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    if name in OTHER_WAYS:
        assert (model.weight != before).all()
    else:
        assert (model.weight < before).all()  # the gradient is 4 everywhere


def test_the_names_of_all_optimizers() -> None:
    """MXNet has all of them except adamw."""
    registered = """sgd signum ftml lars lbsgd lamb dcasgd nag sgld adam adagrad rmsprop adadelta ftrl adamax nadam test
        ccsgd groupadagrad"""
    assert set(NAMES) == set(KINDS) == {*registered.split(), "adamw"}
    assert NAMES == OPTIMIZERS


@pytest.mark.parametrize(
    ("name", "momentum", "nesterov"),
    [("sgd", 0.8, False), ("ccsgd", 0.8, False), ("nag", 0.8, True), ("nag", 0.0, False)],
)
def test_momentum(name: str, momentum: float, nesterov: bool) -> None:
    optimizer = make_optimizer(name, nn.Linear(1, 1), lr=0.1, momentum=momentum, weight_decay=0.0)
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (momentum, nesterov)


@pytest.mark.parametrize(("name", "momentum"), [("rmsprop", 0), ("lars", 0), ("signum", 0.8), ("lbsgd", 0.8)])
def test_momentum_is_passed_only_to_the_optimizers_of_mxnets_scripts(name: str, momentum: float) -> None:
    """MXNet's scripts do the same."""
    made = make_optimizer(name, nn.Linear(1, 1), lr=0.1, momentum=0.8, weight_decay=0)
    assert made.defaults["momentum"] == momentum


@pytest.mark.parametrize("weight_decay", [0.01, 0.0])
def test_lars_excludes_norms_and_biases(weight_decay: float) -> None:
    model = Everything()
    weights, others = make_optimizer("lars", model, lr=0.1, weight_decay=weight_decay).param_groups
    assert names_in(model, weights) == ["conv.weight", "fc.weight"]
    assert (weights["weight_decay"], weights["eta"]) == (weight_decay, 0.001)
    assert (others["weight_decay"], others["eta"]) == (0.0, None)
    assert len(others["params"]) == len(DECAYING | OTHERS) - 2


def test_lbsgd_with_lars_uses_the_norm_of_the_summed_gradient() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    large_batch = LargeBatch(batch_size=8, warmup_strategy="lars")
    made = make_optimizer("lbsgd", model, lr=0.1, weight_decay=0.0, large_batch=large_batch)
    assert type(made) is LBSGDByNorm
    model(torch.full((1, 1), 0.5)).backward()
    made.step()
    assert float(model.weight.detach()) == pytest.approx(3.0 - 0.1 * (3.0 / (8 * 0.5)) * 0.5)


def test_sglds_noise_depends_only_on_the_seed() -> None:
    def stepped(seed: int) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = make_optimizer("sgld", model, lr=0.01, weight_decay=0, seed=seed)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return torch.stack([parameter.detach().flatten() for parameter in model.parameters()])

    first, second = stepped(1), stepped(2)
    assert torch.equal(first, stepped(1))
    assert len(torch.cat([first, second]).unique()) == first.numel() * 2, "no two parameters, no two seeds share noise"


def kernel_of(name: str) -> Kernel:
    spec = spec_of(make_optimizer(name, nn.Linear(4, 1, bias=False), lr=0.01, weight_decay=0), {})
    return kernel_for(spec.name, spec.groups[0])


@pytest.mark.parametrize("name", ["signum", "ftml", "dcasgd", "lars", "lamb", "test"])
def test_gsps_gamma_makes_a_smaller_step(name: str) -> None:
    """The step is a quarter, whether the learning rate or (for SGD) the gradient is divided."""
    kernel, steps = kernel_of(name), []
    for gamma in (1, 4):
        weights = torch.full((4,), 1e-4)
        states = [torch.zeros_like(weights) for _ in kernel.state_names]
        gradient = torch.full((4,), 2.0 / (gamma if kernel.divides_gradient else 1))
        kernel.update(weights, gradient, states, Step(Progress(), 0.01, gamma))
        steps.append(float(weights[0]) - 1e-4)
    assert steps[1] / steps[0] == pytest.approx(1 / 4, rel=1e-3)


def test_gsps_gamma_does_not_rescale_the_weights_of_ftrl() -> None:
    kernel = kernel_of("ftrl")
    weights, states = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
    kernel.update(weights, torch.full((4,), 2.0), states, Step(Progress(), 0.01))
    before = weights.clone()
    kernel.update(weights, torch.zeros(4), states, Step(Progress(1), 0.01, 4))
    assert torch.equal(weights, before)


@pytest.mark.parametrize(("name", "style"), STYLED)
def test_servers_run_the_listed_optimizers_and_no_others(name: str, style: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(name, model, lr=0.1, momentum=0.9, weight_decay=decay_of(name), style=style)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    if name == "sgld":
        with pytest.raises(
            UsageError, match=r"servers cannot run the optimizer 'sgld'; use one of .*adagrad, adam, .*test$"
        ):
            check_on_servers(name)
        with pytest.raises(UsageError, match="SGLD cannot run on the servers: its noise is drawn in the worker"):
            spec_of(optimizer, names)
        return
    check_on_servers(name)
    spec = spec_of(optimizer, names)
    model(torch.ones(1, 2)).sum().backward()
    weights, gradient = model.weight.detach().clone(), model.weight.grad
    assert gradient is not None
    kernel = kernel_for(spec.name, spec.groups[0])
    states = [torch.zeros_like(weights) for _ in kernel.state_names]
    kernel.update(weights, gradient, states, Step(Progress(), 0.1))
    optimizer.step()
    if (name, style) in (("sgd", "mxnet"), ("ccsgd", "mxnet")):  # the fused kernel has a scalar tail here
        torch.testing.assert_close(weights, model.weight.detach())
    else:
        assert torch.equal(weights, model.weight.detach())


def test_groupadagrad_rejects_weight_decay() -> None:
    message = "--wd 0.0001: groupadagrad has no weight decay, as in MXNet; give --wd 0"
    with pytest.raises(UsageError, match=re.escape(message)):
        make_optimizer("groupadagrad", nn.Linear(1, 1), lr=0.1)


def test_gradients_are_clipped_in_mxnets_style_only() -> None:
    model = nn.Linear(1, 1)
    optimizer = make_optimizer("sgd", model, lr=1.0, weight_decay=0, style="mxnet", clip_gradient=0.25)
    before = float(model.bias.detach())
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    assert float(model.bias.detach()) == pytest.approx(before - 0.25)
    message = "--clip-gradient 0.5: torch's adam does not clip gradients; give --optimizer-style mxnet, too"
    with pytest.raises(UsageError, match=re.escape(message)):
        check_optimizer("adam", "torch", 0.5)
    with pytest.raises(UsageError, match=r"torch's adamw does not clip gradients$"):
        check_optimizer("adamw", "mxnet", 0.5)
    check_optimizer("lamb", "torch", 0.5)


def test_an_unknown_optimizer_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(
        UsageError, match=re.escape("unknown optimizer 'addam'; did you mean 'adam'? Choose one of sgd, ccsgd,")
    ):
        make_optimizer("addam", nn.Linear(1, 1), lr=0.1)


def test_invalid_numbers_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=re.escape("optimizer 'sgd' with lr=-1, momentum=0.9: Invalid learning rate")):
        make_optimizer("sgd", nn.Linear(1, 1), lr=-1)
    with pytest.raises(UsageError, match=re.escape("optimizer 'ftml' with lr=-1: Invalid lr: -1")):
        make_optimizer("ftml", nn.Linear(1, 1), lr=-1)
    with pytest.raises(UsageError, match=re.escape("--wd -0.1: weight decay must be 0 or more")):
        make_optimizer("sgd", nn.Linear(1, 1), lr=0.1, weight_decay=-0.1)


def test_a_model_without_trainable_parameters_is_rejected() -> None:
    with pytest.raises(UsageError, match="ReLU has no parameter that requires a gradient"):
        make_optimizer("sgd", nn.ReLU(), lr=0.1)
