"""The servers' kernels with a divided step, without storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tolerances
from echelon.errors import JobError
from echelon.kvstore.optimizer_spec import spec_by_name
from echelon.optim.torch_classes import TORCH
from echelon.server.optimizer.class_kernels import WholeClass
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.optimizer.kernels import kernel_for

pytestmark = pytest.mark.numeric

SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
FTRL = {"lr": 0.1, "lamda1": 0.0, "beta": 1.0, "weight_decay": 0.0, "rescale_grad": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 10 / 33])
def test_sgd_scales_a_gradient_in_the_precision_of_the_weights(dtype: torch.dtype, scale: float) -> None:
    weights, gradient = torch.zeros(128, dtype=dtype), torch.linspace(0.5, 2, 128, dtype=dtype)
    expected = gradient * (-0.1 * scale)
    kernel_for("sgd", SGD).update(weights, gradient, [], Step(Progress(), 0.1, 1 / scale, scale))
    bound = tolerances.reordering(dtype, terms=1, steps=1)
    torch.testing.assert_close(weights, expected, rtol=bound, atol=0)


def test_ftrl_clips_the_gradient_before_it_is_divided() -> None:
    def after_one_push(clip: float | None, gradient: float, divisor: float) -> torch.Tensor:
        kernel = kernel_for("ftrl", FTRL | {"clip_gradient": clip})
        weights, states = torch.zeros(64), [torch.zeros(64) for _ in kernel.state_names]
        kernel.update(weights, torch.full((64,), gradient / divisor), states, Step(Progress(), 0.1, divisor))
        return weights

    for divisor in (1.0, 4.0):
        assert torch.equal(after_one_push(1.0, 10.0, divisor), after_one_push(None, 1.0, divisor))
        assert torch.equal(after_one_push(1.0, 0.5, divisor), after_one_push(None, 0.5, divisor))


@pytest.mark.parametrize("name", [name for name in TORCH if name != "sparse_adam"])
def test_a_divided_step_moves_the_weights_less(name: str) -> None:
    """A divisor of 4, under dist_async for example, makes a quarter of a step: whatever is divided."""
    kernel = kernel_for(name, spec_by_name(name, {"lr": 0.01}).groups[0])
    for number in (1, 2):
        whole, divided = (change_of_step(kernel, number, divisor) for divisor in (1.0, 4.0))
        assert whole.abs().max() > 0
        torch.testing.assert_close(divided * 4, whole, rtol=2e-2, atol=1e-9)


def change_of_step(kernel: Kernel, number: int, divisor: float) -> Tensor:
    """Return what a step changes if it is divided, after steps that are not."""
    weights, state, progress = torch.full((8, 8), 1e-4), dict[str, Any](), Progress()
    states = [torch.zeros(8, 8) for _ in kernel.state_names]
    for step in range(1, number + 1):
        before, by = weights.clone(), divisor if step == number else 1.0
        gradient = torch.linspace(1, 2, 64).view(8, 8) / (by if kernel.divides_gradient else 1)
        if isinstance(kernel, WholeClass):
            kernel.update_object(weights, gradient, state, Step(progress, 0.01, by))
        else:
            kernel.update(weights, gradient, states, Step(progress, 0.01, by))
        progress = kernel.progress(progress, 0.01)
    return weights - before


class Counts(torch.optim.SGD):
    """Counts its steps in its parameter group."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        super().step(closure)


class Remembers(torch.optim.SGD):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        super().step(closure)


class Fails(torch.optim.SGD):
    """Fails."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no luck")


class Moves(torch.optim.SGD):
    """Gives its parameter other memory, and keeps a number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["n"] = state.get("n", 0) + 1
                parameter.data = parameter.data - group["lr"] * parameter.grad * state["n"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counts, r"Counts changes group\['count'\] in step\(\). .* runs any class"),
        (Remembers, r"Remembers changes self.steps in step\(\). .* runs any class"),
        (Fails, r"Fails.step\(\) failed on a parameter of shape \(2, 3\): RuntimeError\('no luck'\)"),
    ],
)
def test_a_class_that_cannot_run_on_one_parameter_at_a_time(kind: type[torch.optim.SGD], words: str) -> None:
    with pytest.raises(JobError, match=words):
        WholeClass(kind, {"lr": 0.1}).update_object(torch.ones(2, 3), torch.ones(2, 3), {}, Step(Progress(), 0.1))


def test_a_class_may_replace_the_memory_of_a_parameter_and_keep_numbers() -> None:
    weights, state = torch.ones(2), dict[str, Any]()
    for _ in range(2):
        WholeClass(Moves, {"lr": 0.1}).update_object(weights, torch.ones(2), state, Step(Progress(), 0.1))
    assert torch.equal(weights, torch.ones(2) - 0.1 - 0.1 * 2)
    assert state == {"n": 2}
