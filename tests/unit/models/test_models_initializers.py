"""Each initializer draws from its distribution and changes only weights and biases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from echelon import models
from echelon.errors import UsageError
from echelon.models.initializers import initialize, names

pytestmark = pytest.mark.numeric

FAN_IN, FAN_OUT = 32 * 9, 64 * 9
MEAN_FAN = (FAN_IN + FAN_OUT) / 2


def _draw(initializer: str, network: str = "") -> torch.Tensor:
    torch.manual_seed(0)
    convolution = nn.Conv2d(64, 64, 3, groups=2)  # fan-in counts 32 channels
    initialize(convolution, initializer, network)
    assert not convolution.get_parameter("bias").any()
    return convolution.weight.detach()


@pytest.mark.parametrize(
    ("initializer", "network", "std"),
    [
        ("default", "resnet", math.sqrt(2 / FAN_IN)),
        ("default", "alexnet", 0.01),
        ("default", "vgg", math.sqrt(3 / MEAN_FAN) / math.sqrt(3)),
        ("xavier", "alexnet", math.sqrt(3 / MEAN_FAN) / math.sqrt(3)),
        ("msra", "", math.sqrt(1.88235 / MEAN_FAN)),
        ("normal", "", 0.01),
        ("uniform", "", 0.07 / math.sqrt(3)),
    ],
)
def test_standard_deviation(initializer: str, network: str, std: float) -> None:
    weight = _draw(initializer, network)
    assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert abs(weight.mean().item()) < std / 20


def test_uniform_rules_are_bounded() -> None:
    assert _draw("uniform").abs().max() <= 0.07
    assert _draw("xavier").abs().max() <= math.sqrt(3 / MEAN_FAN)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_orthogonal(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], shape[0])
    initialize(layer, "orthogonal")
    weight = layer.weight if shape[0] < shape[1] else layer.weight.T
    torch.testing.assert_close(weight @ weight.T, 1.414**2 * torch.eye(16), atol=1e-4, rtol=0)


def test_constants_do_not_change_batch_norm() -> None:
    model = models.build("resnet", num_classes=10, image_shape=(3, 28, 28), num_layers=8, initializer="zero")
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert all(bool((m.weight == 1).all()) and not m.bias.any() for m in norms)
    assert not any(bool(w.any()) for w in weights)
    assert bool((_draw("one") == 1).all())


def test_every_name_builds_and_a_seed_repeats_the_weights() -> None:
    for name in names():
        first, second = (_seeded(name) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _seeded(initializer: str) -> list[nn.Parameter]:
    torch.manual_seed(3)
    model = models.build("digits-cnn", num_classes=10, image_shape=(1, 8, 8), initializer=initializer)
    return list(model.parameters())


def test_unknown_initializer() -> None:
    with pytest.raises(UsageError, match=r"unknown initializer 'xaver'; did you mean 'xavier'"):
        models.build("mlp", num_classes=10, image_shape=(1, 8, 8), initializer="xaver")
