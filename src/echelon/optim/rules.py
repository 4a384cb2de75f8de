"""MXNet's optimizers that torch.optim does not have: an update rule each, and the torch optimizer around it.

A rule updates one tensor in place from its gradient, its states, the number of its updates and the settings. The torch
optimizer applies the rule to whole parameters, and servers apply it to their pieces of them: the same operations on the
same elements, so the same bits. A rule with `whole` set needs a whole parameter at once and rejects pieces: for its
norm (LARS, LBSGD, LAMB), or for noise (SGLD).

The formulas and defaults are those of MXNet, for gradients that are already divided by the batch size. They use basic
torch operations, which give an element the same bits however a tensor is divided. A norm is summed in float64, in
blocks that do not depend on the number of threads, so its bits are reproducible.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Options = Mapping[str, Any]
States = Sequence[Tensor]

_BLOCK = 1024


class Rule(Optimizer):
    """A torch optimizer with one update rule. Its states are those of `state_names` and, if there are any, `step`."""

    states: ClassVar[tuple[str, ...]] = ()  # besides momentum
    whole: ClassVar[bool] = False
    divides_gradient: ClassVar[bool] = False  # a scheme's divisor divides the gradient, not the learning rate

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        """Raises ValueError for negative settings, as torch.optim does."""
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not settings.get(name, 0) >= 0:
                raise ValueError(f"Invalid {name}: {settings[name]}")
        super().__init__(params, settings)

    @classmethod
    def state_names(cls, options: Options) -> list[str]:
        """Return the names of a parameter's states, in the order in which `update` gets them. They begin as zeros."""
        return ["momentum_buffer", *cls.states] if options.get("momentum") else [*cls.states]

    @staticmethod
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        """Update weights and states in place. The gradient must not be changed; `step` counts from 1."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = itertools.count()
        for group in self.param_groups:
            for parameter, number in zip(group["params"], numbers, strict=False):
                if parameter.grad is not None:
                    self._update_one(number, parameter, group)
        return loss

    def _update_one(self, number: int, parameter: Tensor, group: Options) -> None:
        names = self.state_names(group)
        state = self.state[parameter] if names else {}
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        step = self._count(state) if names else 1
        states = [state[name] for name in names]
        assert parameter.grad is not None
        self.update(parameter, parameter.grad, states, step, float(group["lr"]), group)

    @staticmethod
    def _count(state: dict[str, Any]) -> int:
        """Count an update and return the number of updates. The count is on the CPU, as in torch.optim."""
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return int(state["step"])


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
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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

    states = ("d", "v", "z")

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
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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
    states = ("z", "n")

    def __init__(
        self, params: ParamsT, lr: float = 0.1, lamda1: float = 0.01, beta: float = 1, weight_decay: float = 0
    ) -> None:
        super().__init__(params, lr=lr, lamda1=lamda1, beta=beta, weight_decay=weight_decay)

    @staticmethod
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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
        self, params: ParamsT, lr: float = 0.01, momentum: float = 0, weight_decay: float = 0, lamda: float = 0.04
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, lamda=lamda)

    @staticmethod
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        weights.add_(gradient)


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
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        weight_norm = squared_norm(weights)
        gradient_norm = squared_norm(gradient) * options["batch_size"] ** 2
        ratio = (weight_norm / (gradient_norm + options["weight_decay"] * weight_norm + 1e-18)).sqrt().clamp(0.01, 100)
        _descend(weights, gradient, states, lr, options, ratio)


def _descend(
    weights: Tensor, gradient: Tensor, states: States, lr: float, options: Options, ratio: Tensor | None
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
    states = ("exp_avg", "exp_avg_sq")

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
    def update(weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
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
