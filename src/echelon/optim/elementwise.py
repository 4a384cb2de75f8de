"""MXNet's optimizers that update every element independently of the others.

The formulas and defaults are those of MXNet, for gradients that are already divided by the batch size. They use basic
torch operations, which give an element the same bits however a tensor is divided.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.optim.rule import Options, Rule


class Signum(Rule):
    """Changes every element by the same amount, with the sign of the averaged gradient.

    Without momentum it is signSGD: it uses the sign of the gradient, and weight decay shrinks the weights directly.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0, wd_lh: float = 0
    ) -> None:
        """`wd_lh` shrinks the weights directly; `weight_decay` is added to the gradient."""
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, wd_lh=wd_lh)

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
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

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.6, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @staticmethod
    def state_fills(options: Options) -> dict[str, float]:
        return {"d": 0.0, "v": 0.0, "z": 0.0}

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        if not lr:
            return  # the formula divides by the rate; a rate of 0 (the last one of poly) changes nothing
        (beta1, beta2), (d, v, z) = options["betas"], states
        decay = options["weight_decay"]
        decayed = gradient.add(weights, alpha=decay) if decay else gradient
        v.mul_(beta2).addcmul_(decayed, decayed, value=1 - beta2)
        new_d = v.div(1 - beta2**step).sqrt_().add_(options["eps"]).mul_((1 - beta1**step) / lr)
        sigma = new_d.sub(d, alpha=beta1)
        z.mul_(beta1).add_(decayed, alpha=1 - beta1).addcmul_(sigma, weights, value=-1)
        d.copy_(new_d)
        weights.copy_(z).div_(new_d).neg_()


class Ftrl(Rule):
    """Follow the regularised leader (McMahan et al., 2013): weights are a function of the states, and often zero.

    The function contains the learning rate, so a schedule rescales the weights, as in MXNet.
    """

    divides_gradient = True  # because the learning rate rescales the weights

    def __init__(
        self, params: ParamsT, lr: float = 0.1, lamda1: float = 0.01, beta: float = 1, weight_decay: float = 0
    ) -> None:
        super().__init__(params, lr=lr, lamda1=lamda1, beta=beta, weight_decay=weight_decay)

    @staticmethod
    def state_fills(options: Options) -> dict[str, float]:
        return {"z": 0.0, "n": 0.0}

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
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

    def __init__(
        self, params: ParamsT, lr: float = 0.01, momentum: float = 0, weight_decay: float = 0, lamda: float = 0.04
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, lamda=lamda)

    @staticmethod
    def state_fills(options: Options) -> dict[str, float]:
        return Rule.state_fills(options) | {"previous": 0.0}

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
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
    """MXNet's `test`: adds the gradient to the weights and ignores the learning rate. For tests of stores."""

    divides_gradient = True

    def __init__(self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0) -> None:
        """`lr` and `weight_decay` have no effect; they are accepted because callers pass them to every optimizer."""
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        weights.add_(gradient)
