"""Cutting a network into a few pieces that run one after the other, each compiled by itself.

Compiled in one piece, a network's backward pass is one piece, too, and all gradients are there at its end: too late to
leave while it runs. A chain (nested `nn.Sequential`, as all networks here are) is cut into regions of about as many
parameters each; backward then finishes a region at a time, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

REGIONS = 4
Link = tuple[str, nn.Module]  # a module and its name's beginning


def links_of(model: nn.Module) -> list[Link]:
    """The modules of a chain in order, none of them with more than a region's parameters where it can be cut."""
    most = len(list(model.parameters())) / REGIONS

    def cut(prefix: str, module: nn.Module) -> list[Link]:
        small = len(list(module.parameters())) <= most
        if not is_chain(module) or (small and prefix):
            return [(prefix, module)]
        children = module._modules.items()  # named_children() leaves out a module that comes again
        return [link for name, child in children if child is not None for link in cut(f"{prefix}{name}.", child)]

    return cut("", model)


def is_chain(module: nn.Module) -> bool:
    """Whether calling the module is calling its children in order, and nothing else: a hook would be lost."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return type(module) is nn.Sequential and not any(hooks)


def regions_of(model: nn.Module) -> list[list[Link]]:
    """The links in groups of about as many parameters each; a model that is no chain is one region."""
    links = links_of(model)
    most = len(list(model.parameters())) / REGIONS
    regions: list[list[Link]] = [[]]
    counted: set[nn.Parameter] = set()
    filled = 0
    for prefix, module in links:
        new = set(module.parameters()) - counted  # what comes again is ready with its first region
        counted |= new
        count = len(new)
        if regions[-1] and filled and filled + count > most:
            regions.append([])
            filled = 0
        regions[-1].append((prefix, module))
        filled += count
    return regions


def region_of(model: nn.Module) -> dict[str, int]:
    """The number of every parameter's region; one that several regions share is ready with the first of them."""
    regions: dict[nn.Parameter, int] = {}
    for number, region in enumerate(regions_of(model)):
        for _, module in region:
            for parameter in module.parameters():
                regions.setdefault(parameter, number)
    return {name: regions[parameter] for name, parameter in model.named_parameters()}


def run_region(region: list[Link], weights: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that runs a region with some of its weights replaced, by their names in the whole model."""
    parts: list[tuple[nn.Module, dict[str, Tensor]]] = []
    for prefix, module in region:
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        parts.append((module, own))

    def run(x: Tensor) -> Tensor:
        for module, own in parts:
            x = functional_call(module, own, (x,)) if own else module(x)
        return x

    return run


def in_regions(
    model: nn.Module, weights: Mapping[str, Tensor], compiler: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Tensor], Tensor]:
    """The model as a function, its regions compiled one by one."""
    regions = [compiler(run_region(region, weights)) for region in regions_of(model)]

    def run(x: Tensor) -> Tensor:
        for region in regions:
            x = region(x)
        return x

    return run
