"""MXNet's optimizers that treat every element by itself and that torch.optim does not have.

Their formulas and defaults are MXNet's, with the gradient already divided by the batch. Operations are torch's plain
ones, which give an element the same bits wherever a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.optim.rule import Options, Rule


class Signum(Rule):
    """A step of the same length for every element, in the direction of the averaged gradient.

    Without momentum it is signSGD: the gradient's own direction, and weight decay straight on the weights.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0, wd_lh: float = 0
    ) -> None:
        """`wd_lh` shrinks weights by itself, `weight_decay` by way of the gradient."""
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
            return  # it divides by the rate, and a rate of 0 (poly's last) is to change nothing
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

    That function has the learning rate in it, so a schedule rescales the weights, in MXNet as here.
    """

    divides_gradient = True  # for that same reason

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
            return  # as in FTML
        z, n = states
        before = n.sqrt()
        root = n.addcmul_(gradient, gradient).sqrt()
        z.add_(gradient).addcmul_(root - before, weights, value=-1 / lr)
        divisor = root.add_(options["beta"]).div_(lr).add_(options["weight_decay"])
        found = z.sign().mul_(options["lamda1"]).sub_(z).div_(divisor)
        weights.copy_(found.masked_fill_(z.abs() <= options["lamda1"], 0))


class DCASGD(Rule):
    """SGD that makes up for a gradient's age by how far the weights have moved since (Zheng et al., 2016).

    As in MXNet that is since the last update, whoever made it, and momentum keeps steps, learning rate and all.
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
    """MXNet's `test`: weights grow by the gradient, whatever the learning rate. For trying out stores."""

    divides_gradient = True

    def __init__(self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0) -> None:
        """Both numbers are for whoever sets them in every optimizer; they do nothing."""
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        weights.add_(gradient)
