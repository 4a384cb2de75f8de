"""Large linear layers push the factors of their gradient instead of the gradient itself.

The weights' gradient is a product: what came back to the outputs, transposed, times what went in. With few samples the
two are small beside it, and the worker need neither compute it, nor write it, nor send it: a server makes the product
as it goes through the weights (`server.factored`). The weights' `.grad` then stays None.

The layer computes with weights that ask for no gradient, and with a bias that came through `_Carried`, whose way back
leads to the weights, too. So autograd sees the layer as it always does: hooks, `torch.autograd.grad`, and a weight that
is used elsewhere give what they would. `_Carried` gives the weights no gradient only where it would be added to `.grad`
and nobody looked at it before; the factors leave when all ways back to the weights have come to their end.
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

SMALLER_BY = 4  # the factors must be smaller than the gradient by this
Factors = list[tuple[Tensor, Tensor]]  # for each time that the layer was used: the outputs' gradients, the inputs
Gradients = tuple[Tensor | None, ...]


def is_worthwhile(rank: int, shape: Sequence[int]) -> bool:
    """Whether factors of this rank are much smaller than their product."""
    return 0 < rank * sum(shape) * SMALLER_BY <= shape[0] * shape[1]


def can_be_factored(module: nn.Module) -> bool:
    """A layer that is exactly what it seems."""
    if type(module) is not nn.Linear or module.bias is None or "forward" in vars(module):
        return False
    weight = module.weight
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.requires_grad


def factorable_layers(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Linear]:
    """The layers whose weights are among these, by their names, and that alone use their weights and biases."""
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
    """Takes the place of one layer's `forward`. `take` gets the factors of a backward pass if `may_take` says so."""

    def __init__(self, module: nn.Linear, may_take: Callable[[], bool], take: Callable[[Tensor, Tensor], None]) -> None:
        self._module = module
        self._weight = module.weight
        self._may_take = may_take
        self._take = take
        self._factors: dict[int, Factors] = {}  # by backward passes
        self._watchers = len(module.weight._post_accumulate_grad_hooks or ())
        self._end = get_gradient_edge(module.weight).node  # kept: a hook lives as long as its node
        self._hook = self._end.register_prehook(self._complete)

        def forward(called: nn.Linear, input: Tensor) -> Tensor:
            # A copy of the model has this function, too, bound to its own layer.
            ours = called is self._module and self._pays(input)
            return self._forward(input) if ours else nn.Linear.forward(called, input)

        self._forward_here = module.__dict__["forward"] = MethodType(forward, module)

    def remove(self) -> None:
        """Leave the layer as it was. What others have put around `forward` stays, and calls the plain one."""
        self._hook.remove()
        self._may_take = lambda: False
        if self._module.__dict__.get("forward") is self._forward_here:
            del self._module.__dict__["forward"]

    def _pays(self, inputs: Tensor) -> bool:
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
        came_back: list[Tensor | None] = []

        def note(gradients: Gradients) -> None:
            if torch.is_grad_enabled():
                raise UsageError("a second derivative needs the weights' gradients: train with push_factors off")
            came_back[:] = gradients

        bias: Tensor = _Carried.apply(self._module.bias, weight, rows.detach(), came_back, self)  # type: ignore[no-untyped-call]
        outputs = nn.functional.linear(rows, weight.detach(), bias)
        assert outputs.grad_fn is not None
        outputs.grad_fn.register_prehook(note)  # not on the tensor: others' hooks there may change the gradient
        return outputs if inputs.ndim == 2 else outputs.view(*inputs.shape[:-1], -1)

    def gradient(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Of the weights, of one use; None if its factors were kept."""
        kept = self._factors.setdefault(torch._C._current_graph_task_id(), [])
        rank = len(left) + sum(len(one) for one, _ in kept)
        if self._unseen() and self._may_take() and is_worthwhile(rank, self._weight.shape):
            kept.append((left, right))
            return None
        return left.t().mm(right)

    def _unseen(self) -> bool:
        """Whether a gradient would go to `.grad` alone, and be the first there."""
        weight = self._weight
        watched = weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > self._watchers
        if watched or weight.grad is not None or not weight.requires_grad:
            return False
        try:
            return torch._C._will_engine_execute_node(self._end)
        except RuntimeError:  # `torch.autograd.grad` asks for it
            return False

    def _complete(self, gradients: Gradients) -> Gradients | None:
        """All uses have come back; what has no factors is in the gradient already."""
        factors = self._factors.pop(torch._C._current_graph_task_id(), None)
        if not factors:
            return None
        left, right = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*factors, strict=True))
        if gradients[0] is not None:
            return (torch.addmm(gradients[0], left.t(), right),)
        self._take(left, right)
        return None


class _Carried(torch.autograd.Function):
    """The bias; what comes back goes on to it, and the gradient of the weights, unless factors are kept, to them."""

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor, weight: Tensor, inputs: Tensor, came_back: list[Tensor | None], layer: FactoredLinear
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.came_back, ctx.layer = came_back, layer
        return bias.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        left = ctx.came_back.pop()
        return gradient, None if left is None else ctx.layer.gradient(left, inputs), None, None, None
