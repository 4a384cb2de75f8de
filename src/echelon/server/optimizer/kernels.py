"""The optimizers as in-place updates of flat pieces of memory, with the same bits as torch.optim on whole tensors.

The element-wise optimizers can update a piece of a key, or a run over many keys. torch's unfused forms give the same
bits wherever a tensor is cut. torch's fused SGD does so too if no element falls into the scalar tail of a call. Pieces
are multiples of the alignment of keys (64 elements) and have no tail, so the fused form, which needs one pass, serves
an unfused SGD as well. With `fused=True` the user's own loop would have had scalar tails: `exact` then asks for pieces
that end where the key ends.

The optimizers that most jobs use have a kernel of their own here. `class_kernels` runs the other classes of torch.optim
and users' own, `RuleKernel` the optimizers of `echelon.optim`. Some of them need a key as a whole.

`divisor` (in ASP, SSP and GSP) divides the step, each in its way:

    SGD, Ftrl, test       the gradient (SGD: and the weight decay), so that the momentum contains the smaller step
    Rprop, Adafactor,     the change of the weights, because the change is not proportional to a setting (Rprop,
      Muon, users' own    Adafactor) or nothing is known about it (users' own)
    all others            the learning rate, because adaptive optimizers would normalize a smaller gradient, and the
                          momentum of MXNet's SGD contains the rate anyway

Settings may change between updates, so a kernel has no memory: what an optimizer has done so far is in `Progress`, and
a state begins when the first kernel that names it updates. torch's SGD begins its momentum late as well; the others of
torch.optim fail if a setting begins to need a state after the first update, and `changed_kernel` refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop

from echelon.errors import UsageError, unknown_name
from echelon.optim import RULES, SGD, Rule
from echelon.optim.import_path import import_allowed, is_import_path
from echelon.optim.torch_classes import ELEMENTWISE, WHOLE
from echelon.server.optimizer.class_kernels import ElementwiseClass, WholeClass
from echelon.server.optimizer.kernel import Kernel, Options, States, Step


class Sgd(Kernel):
    """torch.optim.SGD. The first momentum of a key is its gradient, whenever momentum begins."""

    begins_states_late = True
    counts = False
    divides_gradient = True
    scales_gradient = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._momentum = float(options["momentum"])
        self._weight_decay = float(options["weight_decay"])
        self._dampening = float(options["dampening"])
        self._nesterov = bool(options["nesterov"])
        self._maximize = bool(options["maximize"])

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self._momentum else ()

    @property
    def possible_states(self) -> frozenset[str]:
        return frozenset({"momentum_buffer"})

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        is_first = "momentum_buffer" not in step.before.states
        decay = self._weight_decay / step.divisor
        self._descend(weights, gradient, states, step.lr, self._dampening, decay, is_first, step.scale)

    def _descend(
        self,
        weights: Tensor,
        gradient: Tensor,
        states: States,
        lr: float,
        dampening: float,
        weight_decay: float,
        is_first_step: bool,
        scale: float,
    ) -> None:
        if scale != 1 and weights.dtype is torch.float64:  # torch's kernel takes the scale in float32
            gradient, scale = gradient.div(1 / scale), 1.0
        torch._fused_sgd_(
            [weights],
            [gradient],
            list(states),
            weight_decay=weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=dampening,
            nesterov=self._nesterov,
            maximize=self._maximize,
            is_first_step=is_first_step,
            grad_scale=_grad_scale(scale),
        )


@lru_cache(maxsize=1024)  # scales repeat, unless the batch size changes in every step
def _grad_scale(scale: float) -> Tensor | None:
    """Return what torch's kernel divides the gradient by."""
    return None if scale == 1 else torch.tensor(1 / scale)


class MxnetSgd(Sgd):
    """echelon.optim.SGD. `1 - dampening` multiplies what enters the momentum, so it can be the learning rate."""

    divides_gradient = False

    def __init__(self, options: Options) -> None:
        super().__init__({"dampening": 0.0, "nesterov": False, "maximize": False, **options})
        self._prepares = options.get("rescale_grad", 1.0) != 1 or options.get("clip_gradient") is not None

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        scale = step.scale
        if self._prepares:
            (gradient,), scale = SGD.prepared([gradient * scale], [weights], self.options), 1.0
        rate = step.lr / step.divisor
        taken, dampening = (1.0, 1 - rate) if self._momentum else (rate, 0.0)
        self._descend(weights, gradient, states, taken, dampening, self._weight_decay, False, scale)


class Functional(Kernel):
    """An optimizer of torch.optim through its functional form."""

    _function: Callable[..., None]
    _passed: tuple[str, ...]  # the options that the function takes under the same name

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._keywords = {name: options[name] for name in self._passed}

    def _lists(self, states: States) -> list[list[Tensor]]:
        """Return the states as the function takes them: one list per kind, empty where a kind is not used."""
        raise NotImplementedError

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        steps_before = [torch.tensor(float(step.before.step))]
        lists, rate = self._lists(states), step.lr / step.divisor
        type(self)._function([weights], [gradient], *lists, steps_before, foreach=False, lr=rate, **self._keywords)


class Adam(Functional):
    """torch.optim.Adam."""

    _function: Callable[..., None] = staticmethod(adam)
    _passed = ("amsgrad", "weight_decay", "eps", "maximize")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        beta1, beta2 = options["betas"]
        self._keywords |= {"beta1": beta1, "beta2": beta2, "fused": self.exact}

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.options["amsgrad"] else ()))

    def _lists(self, states: States) -> list[list[Tensor]]:
        return [[states[0]], [states[1]], list(states[2:])]


class AdamW(Adam):
    """torch.optim.AdamW."""

    _function = staticmethod(adamw)


class Adagrad(Functional):
    """torch.optim.Adagrad."""

    _function = staticmethod(adagrad)
    _passed = ("weight_decay", "lr_decay", "eps", "maximize")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._keywords["fused"] = self.exact

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("sum",)

    def _lists(self, states: States) -> list[list[Tensor]]:
        return [[states[0]]]

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        if not step.before.step:
            states[0].fill_(float(self.options["initial_accumulator_value"]))
        super().update(weights, gradient, states, step)


class RMSprop(Functional):
    """torch.optim.RMSprop."""

    _function = staticmethod(rmsprop)
    _passed = ("alpha", "eps", "weight_decay", "momentum", "centered", "maximize")

    @property
    def state_names(self) -> tuple[str, ...]:
        averages = ("square_avg", "grad_avg") if self.options["centered"] else ("square_avg",)
        return (*averages, *(("momentum_buffer",) if self.options["momentum"] else ()))

    def _lists(self, states: States) -> list[list[Tensor]]:
        averages = 1 + bool(self.options["centered"])
        return [[states[0]], list(states[1:averages]), list(states[averages:])]


class RuleKernel(Kernel):
    """An optimizer of `echelon.optim`."""

    begins_states_late = True

    def __init__(self, rule: type[Rule], options: Options) -> None:
        super().__init__(options)
        self._rule = rule
        self.counts = rule.counts
        self.divides_gradient = rule.divides_gradient
        self.whole = rule.whole

    def with_options(self, options: Options) -> Kernel:
        return RuleKernel(self._rule, options)

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(self._rule.state_names(self.options))

    @property
    def possible_states(self) -> frozenset[str]:
        most = {name: 2.0 for name in ("momentum", "batch_scale") if name in self.options}
        return frozenset(self._rule.state_names({**self.options, **most}))

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        rate, divisor = 1.0 if self._rule.ignores_rate else step.lr, step.divisor
        options = self.options
        if not self.divides_gradient:
            rate /= divisor
        elif divisor != 1 and options.get("clip_gradient") is not None:  # the limit is that of an undivided gradient
            options = {**options, "clip_gradient": options["clip_gradient"] / divisor}
        self._rule.apply(weights, gradient, states, step.before.step + 1, rate, options)


class RowsOnly(Kernel):
    """torch.optim.SparseAdam, which updates rows only (`row_kernels.py`). Dense keys are refused before this runs."""

    rows_only = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


KERNELS: dict[str, Callable[[Options], Kernel]] = {
    **{name: partial(ElementwiseClass, kind) for name, kind in ELEMENTWISE.items()},
    **{name: partial(WholeClass, kind) for name, kind in WHOLE.items()},
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "sparse_adam": RowsOnly,
    **{name: partial(RuleKernel, rule) for name, rule in RULES.items()},
    "mxnet_sgd": MxnetSgd,
}


def kernel_for(name: str, options: Options, allowed: Collection[str] = ()) -> Kernel:
    """Return the kernel of an optimizer: one of the table, or a class by an import path that is `allowed`."""
    if is_import_path(name):
        return WholeClass(import_allowed(name, allowed), options)
    if name not in KERNELS:
        raise unknown_name("optimizer of the servers", name, sorted(KERNELS))
    return _checked(name, partial(KERNELS[name], options))


def changed_kernel(name: str, known: Kernel, changes: Options) -> Kernel:
    """Return the kernel of an optimizer some of whose settings have changed.

    Raise UsageError if they need a state that was not begun at the first update, as in torch.optim.
    """
    changed = _checked(name, partial(known.with_options, {**known.options, **changes}))
    missing = sorted(set(changed.state_names) - set(known.state_names))
    if missing and not changed.begins_states_late:
        shown = ", ".join(f"{option} from {known.options.get(option)} to {value}" for option, value in changes.items())
        raise UsageError(
            f"{name} cannot change {shown} after the first step: it would need the state {', '.join(missing)}, which "
            "torch.optim creates in the first step only; begin with that setting"
        )
    return changed


def _checked(name: str, make: Callable[[], Kernel]) -> Kernel:
    try:
        kernel = make()
        _ = kernel.state_names, float(kernel.options.get("lr", 0.0))
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the options of optimizer {name!r} are incomplete or invalid: {error!r}") from error
    return kernel
