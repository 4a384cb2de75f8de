"""MXNet's optimizers that need a whole parameter: for its norm (LARS, LBSGD, LAMB), or for noise (SGLD).

A norm is summed in float64, in blocks that do not depend on the number of threads, so its bits are reproducible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.optimizer import ParamsT

from echelon.optim.rule import Options, Rule

_BLOCK = 1024


def squared_norm(tensor: Tensor) -> Tensor:
    """Return the sum of squares as one float64 on the tensor's device."""
    sums = tensor.detach().reshape(-1).double().square()
    while sums.numel() != 1:
        sums = pad(sums, (0, -sums.numel() % _BLOCK)).view(-1, _BLOCK).sum(1) if sums.numel() else sums.new_zeros(1)
    return sums[0]


class LARS(Rule):
    """SGD whose rate for a parameter is proportional to its norm divided by its gradient's norm (You et al., 2017).

    With `eta` None, a group of parameters (biases, norms) uses the plain rate. Momentum accumulates gradients before
    they are multiplied by the rate. That equals MXNet's momentum with its default correction for changes of the rate.
    """

    whole = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0,
        weight_decay: float = 0,
        eta: float | None = 0.001,
        eps: float = 0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, eps=eps)

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        eta, decay = options["eta"], options["weight_decay"]
        ratio = None
        if eta is not None:
            weight_norm, gradient_norm = squared_norm(weights).sqrt(), squared_norm(gradient).sqrt()
            ratio = eta * weight_norm / (gradient_norm + decay * weight_norm + options["eps"])
            ratio = torch.where((weight_norm > 0) & (gradient_norm > 0), ratio, 1.0)
        _descend(weights, gradient, states, lr, options, ratio)


class LBSGD(Rule):
    """MXNet's lbsgd with the warm-up strategy `lars`: LARS with another ratio, limited to between 0.01 and 100.

    MXNet uses the norm of the gradient summed over the batch, which is `batch_size` times that of the mean gradient.
    """

    whole = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0,
        weight_decay: float = 0,
        batch_size: float = 1,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, batch_size=batch_size)

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        weight_norm = squared_norm(weights)
        gradient_norm = squared_norm(gradient) * options["batch_size"] ** 2
        ratio = (weight_norm / (gradient_norm + options["weight_decay"] * weight_norm + 1e-18)).sqrt().clamp(0.01, 100)
        _descend(weights, gradient, states, lr, options, ratio)


def _descend(
    weights: Tensor, gradient: Tensor, states: Sequence[Tensor], lr: float, options: Options, ratio: Tensor | None
) -> None:
    """Make an SGD step with the decayed gradient multiplied by `ratio`."""
    change = gradient.add(weights, alpha=options["weight_decay"])
    if ratio is not None:
        change.mul_(ratio.to(change.dtype))
    if options["momentum"]:
        change = states[0].mul_(options["momentum"]).add_(change)
    weights.add_(change, alpha=-lr)


class LAMB(Rule):
    """Adam with decoupled decay whose step for a parameter has the norm lr times the parameter's (You et al., 2019)."""

    whole = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @staticmethod
    def state_fills(options: Options) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        (beta1, beta2), (mean, square) = options["betas"], states
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = square.div(1 - beta2**step).sqrt_().add_(options["eps"])
        change = mean.div(1 - beta1**step).div_(divisor).add_(weights, alpha=options["weight_decay"])
        weight_norm, change_norm = squared_norm(weights).sqrt(), squared_norm(change).sqrt()
        ratio = torch.where((weight_norm > 0) & (change_norm > 0), weight_norm / change_norm, 1.0)
        weights.add_(change.mul_(ratio.to(change.dtype)), alpha=-lr)


class SGLD(Rule):
    """Langevin dynamics: half a gradient step, plus noise of variance `lr`.

    The noise of an update is a function of the seed, the parameter's number and its step. So processes with the same
    parameters draw the same noise, and so does a resumed run. Servers do not support it.
    """

    whole = True

    def __init__(self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0, seed: int = 0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, seed=seed)

    def _update_one(self, number: int, parameter: Tensor, group: Options) -> None:
        step = self._count(self.state[parameter])
        words = f"{group['seed']} {number} {step}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        generator = torch.Generator(parameter.device).manual_seed(seed)
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        noise.normal_(0.0, math.sqrt(float(group["lr"])), generator=generator)
        assert parameter.grad is not None
        change = parameter.grad.add(parameter, alpha=group["weight_decay"])
        parameter.add_(change, alpha=-float(group["lr"]) / 2).add_(noise)
