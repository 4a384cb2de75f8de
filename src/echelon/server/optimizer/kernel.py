"""What every kernel is: an optimizer with fixed settings, which updates pieces of keys in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Options = Mapping[str, Any]
States = Sequence[Tensor]


class Progress(NamedTuple):
    """What an optimizer has done with some keys so far: the number of updates, the states that exist, other numbers."""

    step: int = 0
    states: frozenset[str] = frozenset()
    numbers: tuple[tuple[str, float], ...] = ()  # one per name and key: NAdam's mu_product, ASGD's eta and mu


class Step(NamedTuple):
    """One update of some keys. `before` is the progress before it.

    `scale` multiplies the gradient. It is 1 unless the kernel `scales_gradient`.
    """

    before: Progress
    lr: float
    divisor: float = 1.0
    scale: float = 1.0


NO_STEP = Step(Progress(), 0.0)  # of values that are written without an optimizer


class Kernel:
    """One optimizer with one set of options."""

    counts = True  # torch.optim's state has the number of updates, `step`
    begins_states_late = False  # a change of settings may need a state that does not exist yet
    divides_gradient = False  # by the divisor, instead of the learning rate
    scales_gradient = False  # applies the scale of a sum itself, which saves a pass over the gradient
    whole = False  # needs all elements of a key in one call
    rows_only = False  # takes sparse gradients only

    def __init__(self, options: Options) -> None:
        self.options = options
        self.exact = bool(options.get("fused"))

    def with_options(self, options: Options) -> Kernel:
        """Return the kernel of the same optimizer with other options."""
        return type(self)(options)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states that `update` takes, in order; torch.optim's names."""
        raise NotImplementedError

    @property
    def possible_states(self) -> frozenset[str]:
        """The states that a key may have: with `begins_states_late`, those of other settings, too."""
        return frozenset(self.state_names)

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of the states that are one number per key."""
        return ("step",) if self.counts else ()

    def progress(self, before: Progress, lr: float) -> Progress:
        """Return the progress after an update."""
        return Progress(before.step + 1, before.states.union(self.state_names))

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        """Update a piece in place. A state that `step.before` does not have is zero.

        The gradient may be the worker's own memory, so kernels must not write to it.
        """
        raise NotImplementedError
