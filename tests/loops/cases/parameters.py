"""Models with unusual parameters: tied, parametrized, complex, empty, with other strides."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import Adam

from loops.kinds import FEATURES, TARGETS
from loops.loop import Result, Run, loop
from loops.models import WIDTH, begin, momentum, step


def trains(run: Run, network: nn.Module, lr: float = 0.05) -> Result:
    """Train as most loops do."""
    model, optimizer, net = begin(run, network, optimizer=lambda model: momentum(model, lr))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, TARGETS)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return outputs


@loop("tied weights: one parameter under two names")
def tied(run: Run) -> Result:
    return trains(run, Tied())


@loop("weight_norm (parametrization)", reads_weights=True)
def weight_norm(run: Run) -> Result:
    return trains(run, nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, TARGETS))))


@loop("weight_norm, old style: a hook computes the weight before forward", reads_weights=True)
def old_weight_norm(run: Run) -> Result:
    with warnings.catch_warnings(action="ignore"):
        layer = nn.utils.weight_norm(nn.Linear(FEATURES, TARGETS))
    return trains(run, nn.Sequential(layer))


@loop("spectral_norm (parametrization)", reads_weights=True)
def spectral_norm(run: Run) -> Result:
    return trains(run, nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, TARGETS))))


@loop("spectral_norm, old style", reads_weights=True)
def spectral_norm_old(run: Run) -> Result:
    return trains(run, nn.Sequential(old_spectral_norm(nn.Linear(FEATURES, TARGETS))))


@loop("orthogonal parametrization", reads_weights=True)
def orthogonal(run: Run) -> Result:
    return trains(run, nn.Sequential(parametrizations.orthogonal(nn.Linear(FEATURES, TARGETS))))


class Symmetric(nn.Module):
    """A user's own parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@loop("register_parametrization with a user's own module", reads_weights=True)
def parametrized(run: Run) -> Result:
    layer = nn.Linear(FEATURES, FEATURES)
    register_parametrization(layer, "weight", Symmetric())
    return trains(run, nn.Sequential(layer, nn.Linear(FEATURES, TARGETS)))


@loop("prune: a mask multiplies the weight before forward", reads_weights=True)
def pruned(run: Run) -> Result:
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, TARGETS))
    prune.l1_unstructured(network[0], "weight", amount=0.4)
    return trains(run, network)


class Waves(nn.Module):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.complex64 if torch.get_default_dtype() == torch.float32 else torch.complex128
        self.filter = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=dtype))
        self.last = nn.Linear(FEATURES, TARGETS)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.fft.irfft(torch.fft.rfft(inputs) * self.filter, FEATURES))
        return outputs


@loop("a complex parameter (FFT filters)")
def complex_parameter(run: Run) -> Result:
    return trains(run, Waves())


@loop("a complex parameter with Adam")
def complex_adam(run: Run) -> Result:
    model, optimizer, net = begin(run, Waves(), optimizer=lambda model: Adam(model.parameters(), lr=0.01))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


class Odd(nn.Module):
    """Has a number, an empty parameter and a transposed one, in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(TARGETS, FEATURES).T)
        self.listed = nn.ParameterList([torch.zeros(TARGETS), torch.ones(1)])
        self.named = nn.ParameterDict({"a": torch.full((TARGETS,), 0.1)})

    def forward(self, inputs: Tensor) -> Tensor:
        bias = self.listed[0] * self.listed[1] + self.named["a"]
        outputs: Tensor = self.scale * (inputs @ self.turned) + bias + self.empty.sum()
        return outputs


@loop("parameters without dimensions, without elements, not contiguous; ParameterList and ParameterDict")
def odd(run: Run) -> Result:
    model = trains(run, Odd(), lr=0.01)
    return model, list(model.turned.stride())


@loop("convolutions in channels_last, which they keep")
def channels_last(run: Run) -> Result:
    network = nn.Sequential(
        nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(8, TARGETS)
    )
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = trains(run, network)
    return model, list(model[1].weight.stride())


@loop("parameters that are views of one flat tensor")
def flat_views(run: Run) -> Result:
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, TARGETS))
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    start = 0
    for p in network.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return trains(run, network), flat


@loop("lazy modules, initialised by a forward pass before the Trainer exists")
def lazy_modules(run: Run) -> Result:
    network = nn.Sequential(_lazy_linear(WIDTH), nn.Tanh(), _lazy_linear(TARGETS))
    network(torch.ones(1, FEATURES))
    return trains(run, network)


@loop("a parameter of another dtype in the same model")
def mixed_dtypes(run: Run) -> Result:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(FEATURES, WIDTH, dtype=torch.float64)
            self.last = nn.Linear(WIDTH, TARGETS)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.last(torch.tanh(self.wide(inputs.double())).to(inputs.dtype))
            return outputs

    return trains(run, Mixed())


@loop("frozen parameters and buffers beside trained ones")
def frozen_and_buffers(run: Run) -> Result:
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, TARGETS))
    network[0].requires_grad_(False)
    optimizer = momentum(network)
    net = run.attach(network, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
    return network


def _lazy_linear(features: int) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.LazyLinear(features)
