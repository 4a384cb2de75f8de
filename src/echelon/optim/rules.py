"""MXNet's optimizers that torch.optim does not have: signum, ftml, ftrl, dcasgd, lars, lamb, sgld and test."""

from __future__ import annotations

import hashlib
import math
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.optim.norm import squared_norm
from echelon.optim.rule import Common, Options, Rule, States


class Signum(Rule):
    """Changes every element by the same amount, with the sign of the averaged gradient.

    Without momentum it is signSGD: it uses the sign of the gradient, and weight decay shrinks the weights directly.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0,
        wd_lh: float = 0,
        **common: Unpack[Common],
    ) -> None:
        """`wd_lh` shrinks the weights directly; `weight_decay` is added to the gradient."""
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, wd_lh=wd_lh, **common)

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        momentum, decay = options["momentum"], options["weight_decay"]
        shrink = lr * (options["wd_lh"] if momentum else decay)
        direction = gradient
        if momentum:
            direction = states[0].mul_(momentum).add_(gradient, alpha=1 - momentum)
            if decay:
                direction.add_(weights, alpha=(1 - momentum) * decay)
        if shrink:
            weights.mul_(1 - shrink)
        weights.add_(direction.sign(), alpha=-lr)


class FTML(Rule):
    """Follow the moving leader (Zheng and Kwok, 2017)."""

    clips_decayed = True
    states = ("d", "v", "z")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.6, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **common)

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        if not lr:
            return  # the formula divides by the rate; a rate of 0 (the last one of poly) changes nothing
        (beta1, beta2), (d, v, z) = options["betas"], states
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        new_d = v.div(1 - beta2**step).sqrt_().add_(options["eps"]).mul_((1 - beta1**step) / lr)
        sigma = new_d.sub(d, alpha=beta1)
        z.mul_(beta1).add_(gradient, alpha=1 - beta1).addcmul_(sigma, weights, value=-1)
        d.copy_(new_d)
        weights.copy_(z).div_(new_d).neg_()


class Ftrl(Rule):
    """Follow the regularised leader (McMahan et al., 2013): weights are a function of the states, and often zero.

    The function contains the learning rate, so a schedule rescales the weights, as in MXNet.
    """

    divides_gradient = True  # because the learning rate rescales the weights
    states = ("z", "n")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        lamda1: float = 0.01,
        beta: float = 1,
        weight_decay: float = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, lamda1=lamda1, beta=beta, weight_decay=weight_decay, **common)

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        if not lr:
            return  # as in FTML: the formula divides by the rate
        z, n = states
        before = n.sqrt()
        root = n.addcmul_(gradient, gradient).sqrt()
        z.add_(gradient).addcmul_(root - before, weights, value=-1 / lr)
        divisor = root.add_(options["beta"]).div_(lr).add_(options["weight_decay"])
        found = z.sign().mul_(options["lamda1"]).sub_(z).div_(divisor)
        weights.copy_(found.masked_fill_(z.abs() <= options["lamda1"], 0))


class DCASGD(Rule):
    """SGD that compensates a stale gradient by how far the weights have moved meanwhile (Zheng et al., 2016).

    As in MXNet, the movement is measured since the last update by any worker, and momentum accumulates whole steps,
    which include the learning rate.
    """

    states = ("previous",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        momentum: float = 0,
        weight_decay: float = 0,
        lamda: float = 0.04,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, lamda=lamda, **common)

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        previous = states[-1]
        if step == 1:
            previous.copy_(weights)
        change = weights.sub(previous).mul_(gradient).mul_(gradient).mul_(options["lamda"]).add_(gradient)
        if options["weight_decay"]:
            change.add_(weights, alpha=options["weight_decay"])
        change.mul_(-lr)
        if options["momentum"]:
            change = states[0].mul_(options["momentum"]).add_(change)
        previous.copy_(weights)
        weights.add_(change)


class Accumulate(Rule):
    """MXNet's `test`: adds the gradient to the weights and ignores the learning rate. For tests of stores.

    As in MXNet, of the other settings only `rescale_grad` has an effect.
    """

    divides_gradient = True

    def __init__(self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0, **common: Unpack[Common]) -> None:
        """`lr` and `weight_decay` have no effect; they are accepted because callers pass them to every optimizer."""
        super().__init__(params, lr=lr, weight_decay=weight_decay, **common)

    @classmethod
    def apply(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        """Add the rescaled gradient."""
        weights.add_(gradient, alpha=options.get("rescale_grad", 1.0))


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
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, eps=eps, **common)

    @classmethod
    def apply(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        """Make an SGD step with the decayed gradient multiplied by the ratio of the norms, which ignores clipping."""
        (prepared,) = cls.prepared([gradient], [weights], options)
        change = prepared.add(weights, alpha=options["weight_decay"])
        if options["eta"] is not None:
            change.mul_(cls._ratio(weights, gradient, options).to(change.dtype))
        if options["momentum"]:
            change = states[0].mul_(options["momentum"]).add_(change)
        weights.add_(change, alpha=-lr)

    @staticmethod
    def _ratio(weights: Tensor, gradient: Tensor, options: Options) -> Tensor:
        weight_norm = squared_norm(weights).sqrt()
        gradient_norm = squared_norm(gradient).sqrt() * options.get("rescale_grad", 1.0)
        ratio = options["eta"] * weight_norm / (gradient_norm + options["weight_decay"] * weight_norm + options["eps"])
        return torch.where((weight_norm > 0) & (gradient_norm > 0), ratio, 1.0)


class LAMB(Rule):
    """Adam with decoupled decay whose step for a parameter has the norm lr times the parameter's (You et al., 2019)."""

    whole = True
    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **common)

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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

    def __init__(
        self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0, seed: int = 0, **common: Unpack[Common]
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, seed=seed, **common)

    def _update_one(self, number: int, parameter: Tensor, group: Options) -> None:
        step = self._count(self.state[parameter])
        words = f"{group['seed']} {number} {step}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        generator = torch.Generator(parameter.device).manual_seed(seed)
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        noise.normal_(0.0, math.sqrt(float(group["lr"])), generator=generator)
        assert parameter.grad is not None
        (prepared,) = self.prepared([parameter.grad], [parameter], group)
        change = prepared.add(parameter, alpha=group["weight_decay"])
        parameter.add_(change, alpha=-float(group["lr"]) / 2).add_(noise)
