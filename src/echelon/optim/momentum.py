"""MXNet's SGD with momentum: sgd, nag and lbsgd. The momentum contains the learning rate.

    momentum = mu * momentum + lr * (gradient + wd * weight);  weight -= momentum

torch's momentum accumulates gradients, and its step is lr times the momentum. The two are equal while the rate is
constant. When it drops, MXNet's momentum still has steps of the old size, and torch's shrinks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.optim.norm import squared_norm
from echelon.optim.rule import Common, ForeachRule, Moment, Number, Options, Rule, States, Tensors, scaled, subtract


class SGD(ForeachRule):
    """MXNet's sgd."""

    counts = False
    skips_overflow = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, **common)

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        changes = gradients
        if decay := options["weight_decay"]:
            changes = torch._foreach_add(gradients, weights, alpha=decay)
        if weights[0].is_cuda:
            cls._descend_fused(weights, scaled(changes, at.lr), states, options, at.found_inf)
            return
        if not (momentum := options["momentum"]):
            subtract(weights, changes, at.lr)
            return
        (averages,) = states
        torch._foreach_mul_(averages, momentum)
        torch._foreach_add_(averages, changes, alpha=in_momentum(float(at.lr)))
        torch._foreach_sub_(weights, averages)

    @staticmethod
    def _descend_fused(
        weights: Tensors, steps: Tensors, states: Sequence[Tensors], options: Options, found_inf: Tensor | None
    ) -> None:
        """Add steps to the momentum and subtract it from the weights, in one kernel that does nothing on overflow."""
        torch._fused_sgd_(
            weights,
            steps,
            [state for kind in states for state in kind],
            weight_decay=0.0,
            momentum=options["momentum"],
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=found_inf,
        )


class NAG(SGD):
    """MXNet's nag: Nesterov's momentum.

    As in MXNet's kernel, which updates the weights first, the weight decay in the momentum is that of the new weights.
    """

    skips_overflow = False

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        momentum, decay = options["momentum"], options["weight_decay"]
        if not momentum:
            super().update_all(weights, gradients, states, at, options)
            return
        (averages,) = states
        changes = torch._foreach_add(gradients, weights, alpha=decay) if decay else gradients
        torch._foreach_mul_(averages, momentum)
        torch._foreach_add_(weights, averages, alpha=-momentum)
        subtract(weights, changes, at.lr * (1 + momentum))
        subtract(averages, gradients, -at.lr)
        if decay:
            subtract(averages, weights, -at.lr * decay)


def in_momentum(lr: float) -> float:
    """Return the rate that the momentum contains. The servers' fused kernel takes `1 - lr` as dampening, and rounds."""
    return 1 - (1 - lr)


class LBSGD(Rule):
    """MXNet's lbsgd: sums the gradients of `batch_scale` batches, and makes one step with their mean.

    The rate of a step is multiplied by a number that grows from 1 to `batch_scale` over the first `warmup_updates`
    batches, in proportion to `warmup_power` of the part that is done, and stays there. None: it stays 1 until then.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        batch_scale: int = 1,
        warmup_power: float | None = 1.0,
        warmup_updates: float = 160,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            batch_scale=_whole(batch_scale),
            warmup_power=warmup_power,
            warmup_updates=warmup_updates,
            **common,
        )

    @classmethod
    def state_names(cls, options: Options) -> list[str]:
        return [*super().state_names(options), *(["gradient_sum"] if options["batch_scale"] > 1 else [])]

    @classmethod
    def apply(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        """Add the gradient to the sum. With the last batch of a macrobatch, update with the mean."""
        scale, mean = options["batch_scale"], gradient
        if scale > 1:
            total = states[-1].add_(gradient)
            if step % scale:
                return
            mean = total.div(scale)
            total.zero_()
        (prepared,) = cls.prepared([mean], [weights], options)
        change = prepared.add(weights, alpha=options["weight_decay"])
        change.mul_(lr * cls._multiplier(weights, mean, step, options))
        if options["momentum"]:
            change = states[0].mul_(options["momentum"]).add_(change)
        weights.sub_(change)

    @classmethod
    def _multiplier(cls, weights: Tensor, gradient: Tensor, step: int, options: Options) -> Number:
        scale, power, updates = options["batch_scale"], options["warmup_power"], options["warmup_updates"]
        if step >= updates:
            return float(scale)
        return 1.0 if power is None or updates <= 1 else 1 + (scale - 1) * (step / updates) ** power


class LBSGDByNorm(LBSGD):
    """MXNet's lbsgd with the warm-up strategy "lars": a multiplier per parameter instead of a warm-up.

    It is the parameter's norm divided by its gradient's, limited to between 0.01 and 100. MXNet uses the norm of the
    gradient summed over the batch, which is `batch_size` times that of the mean gradient.
    """

    whole = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        batch_scale: int = 1,
        batch_size: float = 1,
        **common: Unpack[Common],
    ) -> None:
        Rule.__init__(
            self,
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            batch_scale=_whole(batch_scale),
            batch_size=batch_size,
            **common,
        )

    @classmethod
    def _multiplier(cls, weights: Tensor, gradient: Tensor, step: int, options: Options) -> Number:
        weight_norm = squared_norm(weights)
        gradient_norm = squared_norm(gradient) * options["batch_size"] ** 2
        ratio: Tensor = weight_norm / (gradient_norm + options["weight_decay"] * weight_norm + 1e-18)
        return ratio.sqrt().clamp(0.01, 100)


def _whole(batch_scale: int) -> int:
    if batch_scale < 1 or batch_scale != int(batch_scale):
        raise ValueError(f"Invalid batch_scale: {batch_scale}")
    return int(batch_scale)
