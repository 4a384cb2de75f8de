"""Large linear layers push the factors of their gradient instead of the gradient itself.

The weights' gradient is a product: what came back to the outputs, transposed, times what went in. With few samples the
two are small beside it, and the worker need neither compute it, nor write it, nor send it: a server makes the product
as it goes through the weights (`server.factored`). The weights' `.grad` then stays None.

While the layer runs forward, its weight does not ask for a gradient, and a hook on the outputs keeps what comes back.
That the bias has its gradient is the sign that all of it has: in a backward pass for other things than parameters'
gradients (`torch.autograd.grad` for the inputs) nothing comes to the bias, and nothing leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.errors import UsageError

SMALLER_BY = 4  # the factors must be smaller than the gradient by this
# For each time that the layer was used: the backward pass, the outputs' gradients, the inputs.
Factors = list[tuple[int, Tensor, Tensor]]


def is_worthwhile(rank: int, shape: Sequence[int]) -> bool:
    """Whether factors of this rank are much smaller than their product."""
    return 0 < rank * sum(shape) * SMALLER_BY <= shape[0] * shape[1]


def can_be_factored(module: nn.Module) -> bool:
    """A layer that is exactly what it seems: of one sort, with weights and a bias that nobody else looks at."""
    if type(module) is not nn.Linear or module.bias is None or module.weight.dtype is not torch.float32:
        return False
    watched = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in (module.weight, module.bias))
    on_cpu = module.weight.device.type == "cpu"
    return on_cpu and not watched and module.weight.requires_grad and module.bias.requires_grad


class FactoredLinear:
    """Watches one layer. `take` gets the factors if `may_take` says so; if not, the weight gets its gradient."""

    def __init__(
        self,
        module: nn.Linear,
        may_take: Callable[[], bool],
        take: Callable[[Tensor, Tensor], None],
        has_gradient: Callable[[Tensor], None],
    ) -> None:
        self._module = module
        self._may_take = may_take
        self._take = take
        self._has_gradient = has_gradient
        self._factors: Factors = []
        self._spared = False  # whether autograd is, in the call under way
        self.hooks: list[RemovableHandle] = [  # functions: a copy of the model copies methods with all they belong to
            module.register_forward_pre_hook(lambda called, args: self._before(called, args)),
            module.register_forward_hook(lambda called, args, out: self._after(called, args, out), always_call=True),
            module.bias.register_post_accumulate_grad_hook(self._bias_has_gradient),  # type: ignore[no-untyped-call]
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Decide, and if it is worthwhile, spare autograd the weights."""
        if module is not self._module:
            return  # a copy of the model has copies of its hooks
        weight, bias = self._module.weight, self._module.bias
        asked = torch.is_grad_enabled() and weight.requires_grad and bias.requires_grad and self._may_take()
        self._spared = asked and bool(args) and self._pays(args[0])
        if self._spared:
            weight.requires_grad_(False)

    def _pays(self, inputs: object) -> bool:
        weight = self._module.weight
        if not isinstance(inputs, Tensor) or inputs.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
            return False
        return is_worthwhile(inputs.numel() // max(1, weight.shape[1]), weight.shape)

    def _after(self, module: nn.Module, args: tuple[Any, ...], outputs: Tensor | None) -> None:
        if module is not self._module or not self._spared:
            return
        self._module.weight.requires_grad_(True)
        if isinstance(outputs, Tensor):  # and not because of an error
            outputs.register_hook(self._keeper(args[0]))  # type: ignore[no-untyped-call]

    def _keeper(self, inputs: Tensor) -> Callable[[Tensor], None]:
        version = inputs._version

        def keep(gradient: Tensor) -> None:
            if torch.is_grad_enabled():
                raise UsageError("a second derivative needs the weights' gradients: train with push_factors off")
            if inputs._version != version:
                raise UsageError(
                    f"what went into {self._module} was changed in place before its gradient was computed "
                    f"(version {version} is now {inputs._version})"
                )
            rows, columns = self._module.weight.shape
            which = torch._C._current_graph_task_id()
            self._factors.append((which, gradient.reshape(-1, rows), inputs.detach().reshape(-1, columns)))

        return keep

    def _bias_has_gradient(self, bias: Tensor) -> None:
        now = torch._C._current_graph_task_id()  # what another backward pass left is not of this one
        mine = [(left, right) for which, left, right in self._factors if which == now]
        self._factors.clear()
        if not mine:
            return
        left, right = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*mine, strict=True))
        weight = self._module.weight
        if self._may_take() and weight.grad is None and is_worthwhile(len(left), weight.shape):
            self._take(left, right)
            return
        gradient = left.t().mm(right)
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._has_gradient(weight)
