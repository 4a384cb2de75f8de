"""Checks of the model and the optimizer that a Trainer is given: one line for each common mistake."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from echelon.errors import UsageError

Parameters = dict[str, nn.Parameter]


def check_arguments(model: object, optimizer: object) -> None:
    """Raise UsageError if they are not a model that one process computes, and an optimizer of torch."""
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise UsageError("the arguments are in the wrong order; write Trainer(model, optimizer, …)")
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument of Trainer must be the model, a torch.nn.Module, not {_kind(model)}")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise UsageError(
            f"the model is wrapped in {_kind(model)}, and a Trainer averages gradients itself; pass the model inside: "
            "Trainer(model.module, optimizer, …), and call model.module in the loop"
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the second argument of Trainer must be an optimizer, not {_kind(optimizer)}; write for example "
            "Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), …)"
        )


def optimized_parameters(model: nn.Module, optimizer: Optimizer) -> tuple[Parameters, Parameters]:
    """Return the optimizer's parameters that require a gradient now, and those that do not.

    Of the former, the last layer comes first: approximately the order in which backward finishes them.
    """
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: p for name, p in model.named_parameters() if id(p) in optimized}
    strangers = len(optimized - {id(p) for p in model.parameters()})
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(optimized)} parameters do not belong to the model; create the "
            "optimizer with model.parameters() of this model, after the last change of its layers"
        )
    trained = {name: p for name, p in named.items() if p.requires_grad}
    if not trained:
        raise UsageError("the optimizer has no parameter of the model that requires a gradient")
    return dict(reversed(trained.items())), {name: p for name, p in named.items() if name not in trained}


def _kind(value: object) -> str:
    return type(value).__name__
