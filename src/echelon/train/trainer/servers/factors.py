"""Large linear layers push the two factors of their gradient instead of the gradient itself.

The gradient of the weights is a product: the gradient of the outputs, transposed, times the inputs. With few samples
the factors are much smaller than the product, and the worker does not need to compute, store or send it. A server
multiplies the factors when it updates the weights (`server.factored`). The weights' `.grad` then stays None.

The layer computes with detached weights and a bias that passed through `_BiasOfFactored`, whose backward also leads to
the weights. For autograd the layer therefore behaves as always: hooks, `torch.autograd.grad`, and weights that are
used elsewhere give the usual results. `_BiasOfFactored` omits the gradient of the weights only if it would be added to
`.grad` and nobody reads it before. The factors are pushed when all paths to the weights are finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from echelon.errors import UsageError

SMALLER_BY = 4  # the factors must be smaller than the gradient by this ratio
Factors = list[tuple[Tensor, Tensor]]  # for each use of the layer: the gradients of the outputs, the inputs
Gradients = tuple[Tensor | None, ...]


def is_worthwhile(rank: int, shape: Sequence[int]) -> bool:
    """Return whether factors of this rank are much smaller than their product."""
    return 0 < rank * sum(shape) * SMALLER_BY <= shape[0] * shape[1]


def can_be_factored(module: nn.Module) -> bool:
    """Return whether a module is an unmodified float32 linear layer on the CPU whose weights are trained."""
    if type(module) is not nn.Linear or module.bias is None or "forward" in vars(module):
        return False
    weight = module.weight
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.requires_grad


def factorable_layers(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Linear]:
    """Return the layers, by the names of their weights, that can be factored and share no parameter with others."""
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    names = {id(weight): name for name, weight in weights.items()}
    return {
        names[id(module.weight)]: module
        for module in model.modules()
        if can_be_factored(module)
        and isinstance(module, nn.Linear)
        and id(module.weight) in names
        and users[id(module.weight)] == users[id(module.bias)] == 1
    }


class FactoredLinear:
    """Replaces one layer's `forward`. If `may_take` returns True, `take` gets the factors of a backward pass."""

    def __init__(self, module: nn.Linear, may_take: Callable[[], bool], take: Callable[[Tensor, Tensor], None]) -> None:
        self._module = module
        self._weight = module.weight
        self._may_take = may_take
        self._take = take
        self._factors: dict[int, Factors] = {}  # by backward pass
        self._num_hooks = len(module.weight._post_accumulate_grad_hooks or ())
        self._end = get_gradient_edge(module.weight).node  # kept, because its hook is removed together with it
        self._hook = self._end.register_prehook(self._complete)

        def forward(called: nn.Linear, input: Tensor) -> Tensor:
            # A copy of the model has this function, too, bound to the copy's layer.
            factored = called is self._module and self._is_worthwhile(input)
            return self._forward(input) if factored else nn.Linear.forward(called, input)

        self._forward_here = module.__dict__["forward"] = MethodType(forward, module)

    def remove(self) -> None:
        """Restore the layer. Wrappers that others have put around `forward` stay, and call the plain one."""
        self._hook.remove()
        self._may_take = lambda: False
        if self._module.__dict__.get("forward") is self._forward_here:
            del self._module.__dict__["forward"]

    def _is_worthwhile(self, inputs: Tensor) -> bool:
        weight, bias = self._module.weight, self._module.bias
        if weight is not self._weight or bias is None or not weight.requires_grad or not self._may_take():
            return False
        if type(inputs) not in (Tensor, nn.Parameter) or inputs.dtype is not weight.dtype or inputs.ndim < 2:
            return False
        elsewhere = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or elsewhere:
            return False
        return inputs.shape[-1] == weight.shape[1] and is_worthwhile(inputs.numel() // weight.shape[1], weight.shape)

    def _forward(self, inputs: Tensor) -> Tensor:
        weight = self._weight
        rows = inputs if inputs.ndim == 2 else inputs.reshape(-1, weight.shape[1])
        output_gradient: list[Tensor | None] = []

        def keep(gradients: Gradients) -> None:
            if torch.is_grad_enabled():
                raise UsageError("a second derivative needs the weights' gradients; use push_factors=False")
            output_gradient[:] = gradients

        bias: Tensor = _BiasOfFactored.apply(self._module.bias, weight, rows.detach(), output_gradient, self)  # type: ignore[no-untyped-call]
        outputs = nn.functional.linear(rows, weight.detach(), bias)
        assert outputs.grad_fn is not None
        outputs.grad_fn.register_prehook(keep)  # not on the tensor, where hooks of others may change the gradient
        return outputs if inputs.ndim == 2 else outputs.view(*inputs.shape[:-1], -1)

    def gradient(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Return the gradient of the weights for one use, or None if its factors were kept."""
        kept = self._factors.setdefault(torch._C._current_graph_task_id(), [])
        rank = len(left) + sum(len(one) for one, _ in kept)
        if self._is_unread() and self._may_take() and is_worthwhile(rank, self._weight.shape):
            kept.append((left, right))
            return None
        return left.t().mm(right)

    def _is_unread(self) -> bool:
        """Return whether nobody reads a gradient before it is stored as the first one in `.grad`."""
        weight = self._weight
        hooked = weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > self._num_hooks
        if hooked or weight.grad is not None or not weight.requires_grad:
            return False
        try:
            return torch._C._will_engine_execute_node(self._end)
        except RuntimeError:  # `torch.autograd.grad` was called for these weights
            return False

    def _complete(self, gradients: Gradients) -> Gradients | None:
        """Push the factors when all uses of the weights are finished. `gradients` has the uses without factors."""
        factors = self._factors.pop(torch._C._current_graph_task_id(), None)
        if not factors:
            return None
        left, right = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*factors, strict=True))
        if gradients[0] is not None:
            return (torch.addmm(gradients[0], left.t(), right),)
        self._take(left, right)
        return None


class _BiasOfFactored(torch.autograd.Function):
    """The identity of the bias. Backward also gives the weights their gradient, unless its factors are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        bias: Tensor,
        weight: Tensor,
        inputs: Tensor,
        output_gradient: list[Tensor | None],
        layer: FactoredLinear,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.output_gradient, ctx.layer = output_gradient, layer
        return bias.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        left = ctx.output_gradient.pop()
        return gradient, None if left is None else ctx.layer.gradient(left, inputs), None, None, None
