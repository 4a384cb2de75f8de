"""The state of an optimizer as named tensors, and the optimizer of `nccl`, which is divided among the ranks.

`ShardedOptimizer` builds the caller's optimizer again over this rank's shard of every bucket, with the state of that
shard only. Before every step it copies the settings of the caller's parameter groups, such as the learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import UsageError
from echelon.kvstore.collective.process_group import ProcessGroup, Reduction
from echelon.kvstore.state_files import SCALARS, by_key
from echelon.optim import RULES, torch_classes
from echelon.server.storage.states import as_tensor, as_values
from echelon.train.trainer.clipping import clip_shards
from echelon.train.trainer.workers.flat_buckets import FlatBucket, flat_weights, shard_of

ELEMENTWISE = (*torch_classes.ELEMENTWISE.values(), *(rule for rule in RULES.values() if not rule.whole))
State = dict[str, Tensor]


class ShardedOptimizer:
    """Reduce-scatter, each rank updates its shard, all-gather."""

    def __init__(self, group: ProcessGroup, optimizer: Optimizer, buckets: Sequence[FlatBucket]) -> None:
        self._group = group
        self._optimizer = optimizer
        self._buckets = buckets
        self._weights = [flat_weights(bucket) for bucket in buckets]
        self._shards = [shard_of(bucket.length, group.rank, group.size) for bucket in buckets]
        self._slices: dict[str, nn.Parameter] = {}
        self._ranges: dict[str, range] = {}
        for bucket, weights, part in zip(buckets, self._weights, self._shards, strict=True):
            for name, chosen in bucket.slices(part).items():
                self._slices[name] = nn.Parameter(weights[chosen.start : chosen.stop])
                self._ranges[name] = chosen
        self._own = self._build_for_shard(optimizer)

    def reduce(self, bucket: FlatBucket) -> Reduction:
        """Start a reduce-scatter."""
        return self._group.reduce_scatter(bucket.gradients)

    def update(self, sums: Sequence[Tensor], divisor: Tensor, used: set[str], max_norm: float | None) -> Tensor | None:
        """Update the own shard, and gather those of the other ranks. Return the norm of all, if it is clipped."""
        for bucket, part, total in zip(self._buckets, self._shards, sums, strict=True):
            total /= divisor
            for name, chosen in bucket.slices(part).items():
                own = self._slices[name]
                mean = total[chosen.start - part.start : chosen.stop - part.start]
                own.grad = mean.to(own.dtype) if name in used else None
        gradients = [own.grad for own in self._slices.values() if own.grad is not None]
        norm = None if max_norm is None else clip_shards(gradients, max_norm, self._group)
        if self._own is not None:
            for mine, theirs in zip(self._own.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({option: value for option, value in theirs.items() if option != "params"})
            self._own.step()
            self._own.zero_grad()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless step() was called
        gathering = [
            self._group.all_gather(weights[part.start : part.stop], weights)
            for weights, part in zip(self._weights, self._shards, strict=True)
        ]
        for pending in gathering:
            pending.result()
        return norm

    def adopt(self) -> None:
        """Bring parameters that the caller gave other memory back to their places, with their present values."""
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            for name, parameter in bucket.parameters.items():
                place = bucket.place(weights, name)
                if parameter.data_ptr() != place.data_ptr():
                    place.copy_(parameter.detach())
                    parameter.data = place

    def state(self) -> State:
        """Gather the state from the shards of all ranks."""
        own = state_of(self._own, self._slices) if self._own is not None else {}
        scalars = {name: float(tensor) for name, tensor in own.items() if name.rpartition("/")[2] in SCALARS}
        summaries = [json.loads(text) for text in self._group.gather_texts(json.dumps([sorted(own), scalars]))]
        known = {name for names, _ in summaries for name in names}
        found = {name: torch.tensor(value, device="cpu") for _, values in summaries for name, value in values.items()}
        for bucket, part in zip(self._buckets, self._shards, strict=True):
            kinds = by_key(dict.fromkeys(known - found.keys(), torch.empty(0, device="cpu")))
            for kind in sorted({kind for name in bucket.parameters for kind in kinds.get(name, {})}):
                whole = self._gather(bucket, part, kind, own)
                for name in bucket.parameters:
                    if f"{name}/{kind}" in known:
                        found[f"{name}/{kind}"] = bucket.place(whole, name).cpu().contiguous()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the own shard of whole states."""
        if self._own is None:
            return
        cut: dict[str, State] = {}
        buckets = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        parameters = {name: bucket.parameters[name] for name, bucket in buckets.items()}
        for name, kinds in by_key(state).items():
            check_fits(name, kinds, parameters)
            if name in self._slices:
                cut[name] = {kind: self._own_shard(buckets[name], name, kind, tensor) for kind, tensor in kinds.items()}
        load_state(self._own, self._slices, cut)

    def _build_for_shard(self, optimizer: Optimizer) -> Optimizer | None:
        names = {id(p): name for bucket in self._buckets for name, p in bucket.parameters.items()}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            found = [names[id(p)] for p in group["params"] if id(p) in names]
            groups.append({**group, "params": [self._slices[name] for name in found if name in self._slices]})
        if not any(group["params"] for group in groups):
            return None  # the model has fewer elements than the group has ranks
        kind: Any = type(optimizer)
        accepted = signature(kind).parameters
        rebuilt: Optimizer = kind(groups, **{name: v for name, v in optimizer.defaults.items() if name in accepted})
        return rebuilt

    def _gather(self, bucket: FlatBucket, part: range, kind: str, own: State) -> Tensor:
        mine = torch.zeros(len(part), dtype=bucket.gradients.dtype, device=bucket.gradients.device)
        for name, chosen in bucket.slices(part).items():
            if f"{name}/{kind}" in own:
                mine[chosen.start - part.start : chosen.stop - part.start] = own[f"{name}/{kind}"].to(mine)
        return self._group.all_gather(mine, torch.empty_like(bucket.gradients)).result()

    def _own_shard(self, bucket: FlatBucket, name: str, kind: str, tensor: Tensor) -> Tensor:
        if kind in SCALARS:
            return tensor
        flat = torch.zeros(bucket.length, dtype=tensor.dtype, device="cpu")
        bucket.place(flat, name).copy_(tensor)
        chosen = self._ranges[name]
        return flat[chosen.start : chosen.stop].clone()


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise UsageError for an optimizer that needs whole tensors, because it cannot work on shards of them."""
    if type(optimizer) not in ELEMENTWISE:
        raise UsageError(
            f"{type(optimizer).__name__} cannot run on shards of tensors, which nccl uses; use nccl_allreduce, or "
            f"one of {', '.join(dict.fromkeys(kind.__name__ for kind in ELEMENTWISE))}"
        )


def state_of(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> State:
    """Return an optimizer's state by parameter, on the CPU."""
    found: State = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{name}/{kind}"] = as_tensor(value, f"state {kind!r} of {name!r}").cpu().contiguous().clone()
    return found


def load_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> None:
    """Load an optimizer's state. torch's own loading chooses device and dtype of each tensor."""
    for name, kinds in states.items():
        check_fits(name, kinds, parameters, any_shape=type(optimizer) not in ELEMENTWISE)
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(ordered)}
    memory = {numbers[id(parameters[name])]: as_values(kinds, parameters[name].shape) for name, kinds in states.items()}
    optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})


def check_fits(
    name: str, kinds: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], *, any_shape: bool = False
) -> None:
    """Raise UsageError if a state is of another model, before anything changes.

    `any_shape`: the optimizer may keep states of other shapes than the parameter's, for example of its rows.
    """
    if name not in parameters:
        raise UsageError(f"the state has parameter {name!r}, which this model does not train; is it of another model?")
    for kind, tensor in kinds.items():
        wanted = tuple(parameters[name].shape)
        if not any_shape and kind not in SCALARS and tensor.numel() != parameters[name].numel():
            raise UsageError(f"state {kind} of {name!r} is {tuple(tensor.shape)}, but the parameter is {wanted}")
