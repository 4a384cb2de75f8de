"""The servers' kernels with a divided step, without storage."""

from __future__ import annotations

import pytest
import torch

import tolerances
from echelon.server.kernels import Progress, kernel_for

pytestmark = pytest.mark.numeric

SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
FTRL = {"lr": 0.1, "lamda1": 0.0, "beta": 1.0, "weight_decay": 0.0, "rescale_grad": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 10 / 33])
def test_sgd_scales_a_gradient_in_the_precision_of_the_weights(dtype: torch.dtype, scale: float) -> None:
    weights, gradient = torch.zeros(128, dtype=dtype), torch.linspace(0.5, 2, 128, dtype=dtype)
    expected = gradient * (-0.1 * scale)
    kernel_for("sgd", SGD).update(weights, gradient, [], Progress(), 0.1, 1 / scale, scale)
    bound = tolerances.reordering(dtype, terms=1, steps=1)
    torch.testing.assert_close(weights, expected, rtol=bound, atol=0)


def test_ftrl_clips_the_gradient_before_it_is_divided() -> None:
    def after_one_push(clip: float | None, gradient: float, divisor: float) -> torch.Tensor:
        kernel = kernel_for("ftrl", FTRL | {"clip_gradient": clip})
        weights, states = torch.zeros(64), [torch.zeros(64) for _ in kernel.state_names]
        kernel.update(weights, torch.full((64,), gradient / divisor), states, Progress(), 0.1, divisor, 1.0)
        return weights

    for divisor in (1.0, 4.0):
        assert torch.equal(after_one_push(1.0, 10.0, divisor), after_one_push(None, 1.0, divisor))
        assert torch.equal(after_one_push(1.0, 0.5, divisor), after_one_push(None, 0.5, divisor))
