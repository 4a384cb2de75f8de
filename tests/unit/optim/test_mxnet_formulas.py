"""MXNet's formulas: on workers and in the servers' kernels, equal to weights that MXNet 1.9.1 computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.kvstore.optimizer_spec import spec_by_name
from echelon.optim import LBSGD, NAG, SGD, Adamax, GroupAdaGrad, Nadam, Rule, create
from echelon.server.optimizer.kernel import Progress, Step
from echelon.server.optimizer.kernels import kernel_for
from mxnet_optimizers import CASES, RATES, RECORDED_UPDATES, assert_close, inputs, recorded, settings_of

pytestmark = pytest.mark.numeric


def on_worker(case: str, copies: int = 1) -> Iterator[Tensor]:
    """Yield the weights after every update; with `copies`, of several copies of the rows."""
    name, settings = settings_of(case)
    weights, gradients = inputs()
    parameter = nn.Parameter(weights.repeat(copies, 1))
    optimizer = create(name, [parameter], **settings)
    for gradient, rate in zip(gradients, RATES, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient.repeat(copies, 1)
        optimizer.step()
        yield parameter.detach().clone()


@pytest.mark.parametrize("case", CASES)
def test_workers_compute_mxnets_weights(case: str) -> None:
    found = list(on_worker(case))
    assert_close(case, torch.stack([found[index] for index in RECORDED_UPDATES]), recorded()[case])


@pytest.mark.parametrize("case", CASES)
def test_servers_compute_the_same_bits(case: str) -> None:
    """Pieces of 64 elements, as servers cut keys; rules that need whole parameters get one piece."""
    copies = 16 * 5
    expected = list(on_worker(case, copies))
    name, settings = settings_of(case)
    spec = spec_by_name(name, settings, "mxnet")
    kernel = kernel_for(spec.name, spec.groups[0])
    weights, gradients = inputs()
    whole = weights.repeat(copies, 1)
    states = [torch.zeros_like(whole) for _ in kernel.state_names]
    cuts = [slice(None)] if kernel.whole else [slice(0, 16), slice(16, 48), slice(48, None)]
    for number, (gradient, rate) in enumerate(zip(gradients, RATES, strict=True)):
        total = gradient.repeat(copies, 1)
        for cut in cuts:
            kernel.update(whole[cut], total[cut], [state[cut] for state in states], Step(Progress(number), rate))
        assert torch.equal(whole, expected[number]), f"update {number + 1}"


@pytest.mark.parametrize("case", ["sgd-momentum", "nag-momentum", "adam", "rmsprop", "adadelta", "adamax", "lbsgd"])
def test_a_divided_step_is_smaller(case: str) -> None:
    """A divisor of 4, under dist_async for example, makes a quarter of the first step."""
    name, settings = settings_of(case)
    if name == "lbsgd":
        settings |= {"batch_scale": 1}
    spec = spec_by_name(name, settings | {"wd": 0.0}, "mxnet")
    kernel = kernel_for(spec.name, spec.groups[0])
    steps = []
    for divisor in (1, 4):
        weights = torch.ones(64)
        states = [torch.zeros_like(weights) for _ in kernel.state_names]
        kernel.update(weights, torch.full((64,), 0.5), states, Step(Progress(), 0.01, divisor))
        steps.append(float(weights[0]) - 1)
    assert steps[1] / steps[0] == pytest.approx(1 / 4, rel=1e-3)


# --- learning rates on the device, as in captured steps


def train(optimizer: Any, parameters: list[nn.Parameter], steps: int, rates: list[float]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for index in range(steps):
        for number, parameter in enumerate(parameters):
            skips = number == 1 and index == 0  # its count of updates is one less
            parameter.grad = None if skips else torch.randn(parameter.shape, generator=generator)
        group = optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rates[index])
        else:
            group["lr"] = rates[index]
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "adagrad", "rmsprop", "adadelta", "adamax"])
def test_a_rate_on_the_device_gives_the_same_weights(name: str) -> None:
    """Parameters with other counts than the rest, and a state that was loaded in between, keep their counts."""
    rates = [0.1, 0.1, 0.03, 0.03, 0.01, 0.01]
    settings = {"learning_rate": 0.1, "wd": 0.01} | ({"momentum": 0.9} if name in ("sgd", "nag") else {})

    def run(on_device: bool, reload: bool) -> list[Tensor]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, size)) for size in (7, 5, 3)]
        optimizer = create(name, parameters, **settings)
        if on_device:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        train(optimizer, parameters, 3, rates[:3])
        if reload:
            optimizer.load_state_dict(optimizer.state_dict())
        return train(optimizer, parameters, 3, rates[3:])

    expected = run(on_device=False, reload=False)
    for reload in (False, True):
        for found, wanted in zip(run(on_device=True, reload=reload), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# --- what is special


def test_after_a_drop_of_the_rate_the_momentum_still_has_large_steps() -> None:
    def stepped(optimizer: Any, parameter: nn.Parameter) -> float:
        for rate in (0.1, 0.0):
            optimizer.param_groups[0]["lr"] = rate
            parameter.grad = torch.ones(1)
            optimizer.step()
        return float(parameter.detach())

    for make, wanted in ((SGD, -0.19), (NAG, -0.19 - 0.081), (torch.optim.SGD, -0.1)):
        parameter = nn.Parameter(torch.zeros(1))
        assert stepped(make([parameter], lr=0.1, momentum=0.9), parameter) == pytest.approx(wanted)


def test_a_macrobatch_is_one_step_with_the_mean_gradient() -> None:
    """Two macrobatches of four batches equal two steps of SGD at four times the rate."""
    gradients = torch.linspace(-1, 3, 8)
    summed, plain = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    large = LBSGD([summed], lr=0.1, momentum=0.9, weight_decay=0.1, batch_scale=4, warmup_updates=0)
    small = SGD([plain], lr=0.4, momentum=0.9, weight_decay=0.1)
    for number, gradient in enumerate(gradients):
        before = float(summed.detach())
        summed.grad = gradient.view(1)
        large.step()
        if number % 4 < 3:
            assert float(summed.detach()) == before
        else:
            plain.grad = gradients[number - 3 : number + 1].mean().view(1)
            small.step()
            torch.testing.assert_close(summed.detach(), plain.detach())
    assert float(plain.detach()) != 0


def test_a_weight_without_gradients_is_not_spoiled_by_adamax() -> None:
    """MXNet divides 0 by 0 there."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([0.0, 1.0])
    Adamax([parameter], lr=0.1).step()
    assert parameter.tolist() == pytest.approx([1.0, 0.9])


def test_nadam_has_one_product_of_momenta_per_parameter() -> None:
    alone, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, both = Nadam([alone], lr=0.1), Nadam([other, nn.Parameter(torch.ones(3))], lr=0.1)
    for optimizer in (first, both, first, both):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    assert torch.equal(alone, other)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; did you mean 'sgd'?"),
        ("sgd", {"lr_scheduler": None}, "optimizer 'sgd' has no setting lr_scheduler; it has clip_gradient, lr, "),
        ("sgd", {"learning_rate": -1}, "optimizer 'sgd': Invalid lr: -1"),
        ("adam", {"clip_gradient": 0}, "optimizer 'adam': Invalid clip_gradient: 0; None means no limit"),
        ("groupadagrad", {"wd": 0.1}, "optimizer 'groupadagrad': Invalid weight_decay: 0.1; groupadagrad has none"),
        ("lbsgd", {"batch_scale": 2.5}, "optimizer 'lbsgd': Invalid batch_scale: 2.5"),
        ("lbsgd", {"begin_epoch": 3}, "lbsgd with begin_epoch: load the optimizer's state"),
    ],
)
def test_invalid_settings_are_rejected(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        create(name, [nn.Parameter(torch.zeros(1))], **settings)


def test_the_decay_of_a_group_is_rejected_by_groupadagrad() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "weight_decay": 1}]
    with pytest.raises(ValueError, match="Invalid weight_decay: 1; groupadagrad has none"):
        GroupAdaGrad(groups)


def test_settings_without_an_effect_are_accepted() -> None:
    made = create("SGD", [nn.Parameter(torch.zeros(1))], multi_precision=True, lazy_update=False, learning_rate=0.2)
    assert isinstance(made, Rule)
    assert made.defaults["lr"] == 0.2
