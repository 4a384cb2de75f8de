"""Dividing a network into a few regions that run one after the other and are compiled separately.

If a network is compiled as a whole, its backward pass is one function, and all gradients are finished at its end: too
late to be sent while it runs. A chain (nested `nn.Sequential`, as all networks in this package are) is divided into
regions of about equally many parameters. Backward then finishes one region after the other, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

REGIONS = 4
Link = tuple[str, nn.Module]  # the prefix of a module's parameter names, and the module


def links_of(model: nn.Module) -> list[Link]:
    """Return the modules of a chain in order, divided until none has more parameters than a region, if possible."""
    most = len(list(model.parameters())) / REGIONS

    def cut(prefix: str, module: nn.Module) -> list[Link]:
        small = len(list(module.parameters())) <= most
        if not is_chain(module) or (small and prefix):
            return [(prefix, module)]
        children = module._modules.items()  # named_children() omits repeated modules
        return [link for name, child in children if child is not None for link in cut(f"{prefix}{name}.", child)]

    return cut("", model)


def is_chain(module: nn.Module) -> bool:
    """Return whether a call of the module only calls its children in order. If it has hooks, they would be skipped."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return type(module) is nn.Sequential and not any(hooks)


def regions_of(model: nn.Module) -> list[list[Link]]:
    """Group the links into regions of about equally many parameters. A model that is not a chain is one region."""
    links = links_of(model)
    most = len(list(model.parameters())) / REGIONS
    regions: list[list[Link]] = [[]]
    counted: set[nn.Parameter] = set()
    filled = 0
    for prefix, module in links:
        new = set(module.parameters()) - counted  # a repeated parameter belongs to its first region
        counted |= new
        count = len(new)
        if regions[-1] and filled and filled + count > most:
            regions.append([])
            filled = 0
        regions[-1].append((prefix, module))
        filled += count
    return regions


def region_of(model: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's region. A parameter in several regions belongs to the first of them."""
    regions: dict[nn.Parameter, int] = {}
    for number, region in enumerate(regions_of(model)):
        for _, module in region:
            for parameter in module.parameters():
                regions.setdefault(parameter, number)
    return {name: regions[parameter] for name, parameter in model.named_parameters()}


def run_region(region: list[Link], weights: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that runs a region with some weights replaced, by their names in the whole model."""
    parts: list[tuple[nn.Module, dict[str, Tensor]]] = []
    for prefix, module in region:
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        parts.append((module, own))

    def run(x: Tensor) -> Tensor:
        for module, own in parts:
            x = functional_call(module, own, (x,)) if own else module(x)
        return x

    # Dynamo keeps compiled versions by code object, at most eight of each, so every region needs a code object. It
    # records shapes by the name of the code: under one name, a second region would be compiled for any shape.
    name = f"run_{region[0][0].replace('.', '_')}"
    code = run.__code__.replace(co_name=name)
    return FunctionType(code, run.__globals__, name, run.__defaults__, run.__closure__)


def in_regions(
    model: nn.Module, weights: Mapping[str, Tensor], compiler: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Tensor], Tensor]:
    """Return the model as a function whose regions are compiled one by one."""
    regions = [compiler(run_region(region, weights)) for region in regions_of(model)]

    def run(x: Tensor) -> Tensor:
        for region in regions:
            x = region(x)
        return x

    return run
