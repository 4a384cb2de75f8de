"""MXNet's optimizers that divide by the size of past gradients: adam, adagrad, groupadagrad, rmsprop and their kin.

torch.optim has optimizers of these names with other formulas or defaults: where epsilon is added, whether weight decay
is part of the gradient, and whether the learning rate is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.optim.rule import Common, ForeachRule, Moment, Options, Rule, States, Tensors, subtract

_MANY = 1e9  # updates after which torch's fused Adam corrects nothing any more


class Adam(ForeachRule):
    """MXNet's adam. The corrections of both averages are in the learning rate, so epsilon is not corrected."""

    states = ("exp_avg", "exp_avg_sq")
    clips_decayed = True
    skips_overflow = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **common)

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        beta1, beta2 = options["betas"]
        count = at.exact_step
        rate = at.lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        if weights[0].is_cuda:
            cls._update_fused(weights, gradients, states, Moment(count, rate, at.found_inf), options)
            return
        means, squares = states
        _average(means, gradients, beta1)
        _average_squares(squares, gradients, beta2)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_add_(divisors, options["eps"])
        torch._foreach_addcdiv_(weights, means, divisors, value=-float(rate))

    @staticmethod
    def _update_fused(
        weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        """Update with torch's kernel for all tensors, which does nothing if gradients overflowed."""
        device = weights[0].device
        beta1, beta2 = options["betas"]
        torch._fused_adam_(
            weights,
            gradients,
            states[0],
            states[1],
            [],
            [torch.full((), _MANY, device=device)] * len(weights),
            lr=torch.as_tensor(at.lr, dtype=torch.float32, device=device),
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,  # it is in the gradients
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=at.found_inf,
        )


class AdaGrad(ForeachRule):
    """MXNet's adagrad: epsilon is inside the root, and weight decay is not divided by it."""

    states = ("sum",)
    counts = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        eps: float = 1e-7,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, **common)

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        (sums,) = states
        torch._foreach_addcmul_(sums, gradients, gradients)
        changes = torch._foreach_div(gradients, _roots(sums, options["eps"]))
        if decay := options["weight_decay"]:
            torch._foreach_add_(changes, weights, alpha=decay)
        subtract(weights, changes, at.lr)


class GroupAdaGrad(Rule):
    """MXNet's groupadagrad: AdaGrad with one rate per row, from the mean square of the row's gradients.

    A row is what one index of the first dimension selects. Every element of the state `sum` has the value of its row.
    """

    states = ("sum",)
    whole = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        """Raises ValueError for weight decay, which MXNet's does not have either."""
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, **common)
        for decay in (weight_decay, *(group["weight_decay"] for group in self.param_groups)):
            if decay:
                raise ValueError(f"Invalid weight_decay: {decay}; groupadagrad has none, give 0")

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        squares = gradient.square()
        states[0].add_(squares.mean(tuple(range(1, squares.dim())), keepdim=True) if squares.dim() > 1 else squares)
        weights.addcdiv_(gradient, states[0].add(options["eps"]).sqrt_(), value=-lr)


class RMSProp(ForeachRule):
    """MXNet's rmsprop. With `centered` it is Graves' version: of the variance, with the momentum `gamma2`."""

    counts = False
    clips_decayed = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        gamma1: float = 0.9,
        gamma2: float = 0.9,
        eps: float = 1e-8,
        centered: bool = False,
        clip_weights: float | None = None,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        """`clip_weights` limits the weights to ±this value."""
        super().__init__(
            params,
            lr=lr,
            gamma1=gamma1,
            gamma2=gamma2,
            eps=eps,
            centered=centered,
            clip_weights=clip_weights,
            weight_decay=weight_decay,
            **common,
        )

    @classmethod
    def state_names(cls, options: Options) -> list[str]:
        return ["square_avg", *(["grad_avg", "momentum_buffer"] if options["centered"] else [])]

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        gamma, eps = options["gamma1"], options["eps"]
        _average_squares(states[0], gradients, gamma)
        if options["centered"]:
            _, means, steps = states
            _average(means, gradients, gamma)
            variances = torch._foreach_addcmul(states[0], means, means, value=-1)
            torch._foreach_mul_(steps, options["gamma2"])
            subtract(steps, torch._foreach_div(gradients, _roots(variances, eps)), at.lr)
            torch._foreach_add_(weights, steps)
        else:
            subtract(weights, torch._foreach_div(gradients, _roots(states[0], eps)), at.lr)
        if (limit := options["clip_weights"]) is not None:
            torch._foreach_clamp_max_(weights, limit)
            torch._foreach_clamp_min_(weights, -limit)


class AdaDelta(ForeachRule):
    """MXNet's adadelta. It has no learning rate, and weight decay shrinks the weights directly."""

    states = ("square_avg", "acc_delta")
    counts = False
    ignores_rate = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        """`lr` has no effect; it is accepted because callers pass it to every optimizer."""
        super().__init__(params, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, **common)

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        squares, deltas = states
        rho, eps = options["rho"], options["eps"]
        _average_squares(squares, gradients, rho)
        changes = torch._foreach_div(_roots(deltas, eps), _roots(squares, eps))
        torch._foreach_mul_(changes, gradients)
        _average_squares(deltas, changes, rho)
        if decay := options["weight_decay"]:
            torch._foreach_add_(changes, weights, alpha=decay)
        subtract(weights, changes, at.lr)  # 1, or less where servers divide a step


class Adamax(ForeachRule):
    """MXNet's adamax: Adam with the largest gradient in place of the mean square.

    An element that never had a gradient stays; MXNet divides 0 by 0 there, and the weight becomes NaN.
    """

    states = ("exp_avg", "exp_inf")
    clips_decayed = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, **common)

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        means, largest = states
        beta1, beta2 = options["betas"]
        _average(means, gradients, beta1)
        torch._foreach_mul_(largest, beta2)
        torch._foreach_maximum_(largest, torch._foreach_abs(gradients))
        divisors = torch._foreach_clamp_min(largest, torch.finfo(largest[0].dtype).tiny)
        subtract(weights, torch._foreach_div(means, divisors), at.lr / (1 - beta1**at.exact_step))


class Nadam(ForeachRule):
    """MXNet's nadam: Adam with Nesterov's momentum, which grows with the number of updates.

    The product of the momenta is that of the parameter's own updates. MXNet multiplies one product at every update of
    any parameter, so it reaches 0 sooner; with one parameter the two are equal.
    """

    states = ("exp_avg", "exp_avg_sq")
    clips_decayed = True
    capturable = False  # the momenta of a step are computed on the host

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        schedule_decay: float = 0.004,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, schedule_decay=schedule_decay, weight_decay=weight_decay, **common
        )

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        means, squares = states
        beta1, beta2 = options["betas"]
        count, decay = int(at.step), options["schedule_decay"]
        _average(means, gradients, beta1)
        _average_squares(squares, gradients, beta2)
        product, following = _momentum_product(beta1, decay, count), _nadam_momentum(beta1, decay, count + 1)
        changes = torch._foreach_mul(gradients, (1 - _nadam_momentum(beta1, decay, count)) / (1 - product))
        torch._foreach_add_(changes, means, alpha=following / (1 - product * following))
        divisors = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**count))
        torch._foreach_add_(divisors, options["eps"])
        torch._foreach_addcdiv_(weights, changes, divisors, value=-float(at.lr))


def _nadam_momentum(beta: float, decay: float, step: int) -> float:
    return float(beta * (1 - 0.5 * 0.96 ** (step * decay)))


@lru_cache
def _momentum_product(beta: float, decay: float, step: int) -> float:
    """Return the product of the momenta of updates 1 to `step`. It soon is too small to matter, and then 0."""
    product = 1.0
    for number in range(1, step + 1):
        product *= _nadam_momentum(beta, decay, number)
        if product < 1e-30:
            return 0.0
    return product


def _average(means: Tensors, values: Tensors, beta: float) -> None:
    torch._foreach_mul_(means, beta)
    torch._foreach_add_(means, values, alpha=1 - beta)


def _average_squares(squares: Tensors, values: Tensors, beta: float) -> None:
    torch._foreach_mul_(squares, beta)
    torch._foreach_addcmul_(squares, values, values, value=1 - beta)


def _roots(values: Tensors, eps: float) -> Tensors:
    return torch._foreach_sqrt(torch._foreach_add(values, eps))
