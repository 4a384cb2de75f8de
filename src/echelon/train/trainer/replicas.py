"""How an optimizer runs without servers: everybody updates everything, or (`nccl`) each rank its own part.

`Whole` is the caller's optimizer on the caller's parameters. `Parts` is the same optimizer built over this rank's part
of every bucket, with the state of that part only; what the caller changes in its optimizer's groups (the learning rate,
above all) is taken over before every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from echelon.errors import UsageError
from echelon.kvstore.collective.process_group import ProcessGroup, Reduction
from echelon.kvstore.state_files import SCALARS, by_key
from echelon.optim import DCASGD, FTML, Accumulate, Ftrl, Signum
from echelon.train.trainer.flat_buckets import FlatBucket, elements, flat_weights, part_of

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, Signum, FTML, Ftrl, DCASGD, Accumulate)
State = dict[str, Tensor]


class Replica(Protocol):
    """The part of a Trainer that reduces buckets and updates weights."""

    def reduce(self, bucket: FlatBucket) -> Reduction:
        """Begin to sum a bucket's gradients over all."""
        ...

    def update(self, sums: Sequence[Tensor], divisor: Tensor, used: set[str]) -> None:
        """Update the weights of parameters in use by their mean gradients."""
        ...

    def state(self) -> State:
        """The optimizer's state, whole, `<parameter>/<state>`."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state."""
        ...


class Whole:
    """All-reduce, then everybody runs the optimizer."""

    def __init__(self, group: ProcessGroup, optimizer: Optimizer, buckets: Sequence[FlatBucket]) -> None:
        self._group = group
        self._optimizer = optimizer
        self._buckets = buckets
        self._parameters = {name: p for bucket in buckets for name, p in bucket.parameters.items()}

    def reduce(self, bucket: FlatBucket) -> Reduction:
        """Everybody gets all sums."""
        return self._group.all_reduce(bucket.gradients)

    def update(self, sums: Sequence[Tensor], divisor: Tensor, used: set[str]) -> None:
        """The sums' memory becomes the gradients."""
        for bucket, total in zip(self._buckets, sums, strict=True):
            total /= divisor
            for name, parameter in bucket.parameters.items():
                mean = bucket.place(total, name)
                parameter.grad = mean.to(parameter.dtype) if name in used else None
        self._optimizer.step()

    def state(self) -> State:
        """From the optimizer."""
        return state_of(self._optimizer, self._parameters)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Into the optimizer."""
        load_state(self._optimizer, self._parameters, by_key(state))


class Parts:
    """Reduce-scatter, the owner updates its part, all-gather."""

    def __init__(self, group: ProcessGroup, optimizer: Optimizer, buckets: Sequence[FlatBucket]) -> None:
        check_elementwise(optimizer)
        self._group = group
        self._optimizer = optimizer
        self._buckets = buckets
        self._weights = [flat_weights(bucket) for bucket in buckets]
        self._parts = [part_of(bucket.length, group.rank, group.size) for bucket in buckets]
        self._slices: dict[str, nn.Parameter] = {}
        self._ranges: dict[str, range] = {}
        for bucket, weights, part in zip(buckets, self._weights, self._parts, strict=True):
            for name, chosen in bucket.slices(part).items():
                self._slices[name] = nn.Parameter(elements(weights, chosen))
                self._ranges[name] = chosen
        self._own = self._rebuilt(optimizer)

    def reduce(self, bucket: FlatBucket) -> Reduction:
        """Each gets the sums of its part."""
        return self._group.reduce_scatter(bucket.gradients)

    def update(self, sums: Sequence[Tensor], divisor: Tensor, used: set[str]) -> None:
        """Update the own part, and get the others'."""
        for bucket, part, total in zip(self._buckets, self._parts, sums, strict=True):
            total /= divisor
            for name, chosen in bucket.slices(part).items():
                own = self._slices[name]
                mean = total[chosen.start - part.start : chosen.stop - part.start]
                own.grad = mean.to(own.dtype) if name in used else None
        if self._own is not None:
            for mine, theirs in zip(self._own.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({option: value for option, value in theirs.items() if option != "params"})
            self._own.step()
            self._own.zero_grad()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless step() was called
        gathering = [
            self._group.all_gather(elements(weights, part), weights)
            for weights, part in zip(self._weights, self._parts, strict=True)
        ]
        for pending in gathering:
            pending.result()

    def state(self) -> State:
        """Put together from everybody's parts."""
        own = state_of(self._own, self._slices) if self._own is not None else {}
        scalars = {name: float(tensor) for name, tensor in own.items() if name.rpartition("/")[2] in SCALARS}
        words = [json.loads(text) for text in self._group.gather_texts(json.dumps([sorted(own), scalars]))]
        known = {name for names, _ in words for name in names}
        found = {name: torch.tensor(value) for _, values in words for name, value in values.items()}
        for bucket, part in zip(self._buckets, self._parts, strict=True):
            kinds = by_key(dict.fromkeys(known - found.keys(), torch.empty(0)))
            for kind in sorted({kind for name in bucket.parameters for kind in kinds.get(name, {})}):
                whole = self._gathered(bucket, part, kind, own)
                for name in bucket.parameters:
                    if f"{name}/{kind}" in known:
                        found[f"{name}/{kind}"] = bucket.place(whole, name).cpu().contiguous()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the own part of whole states."""
        if self._own is None:
            return
        cut: dict[str, State] = {}
        buckets = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        for name, kinds in by_key(state).items():
            check_fits(name, kinds, {name: p for b in self._buckets for name, p in b.parameters.items()})
            if name in self._slices:
                cut[name] = {kind: self._cut(buckets[name], name, kind, tensor) for kind, tensor in kinds.items()}
        load_state(self._own, self._slices, cut)

    def _rebuilt(self, optimizer: Optimizer) -> Optimizer | None:
        names = {id(p): name for bucket in self._buckets for name, p in bucket.parameters.items()}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            found = [names[id(p)] for p in group["params"] if id(p) in names]
            groups.append({**group, "params": [self._slices[name] for name in found if name in self._slices]})
        if not any(group["params"] for group in groups):
            return None  # a model smaller than the group is large
        kind: Any = type(optimizer)
        known = signature(kind).parameters
        rebuilt: Optimizer = kind(groups, **{name: v for name, v in optimizer.defaults.items() if name in known})
        return rebuilt

    def _gathered(self, bucket: FlatBucket, part: range, kind: str, own: State) -> Tensor:
        mine = torch.zeros(len(part), dtype=bucket.gradients.dtype, device=bucket.gradients.device)
        for name, chosen in bucket.slices(part).items():
            if f"{name}/{kind}" in own:
                mine[chosen.start - part.start : chosen.stop - part.start] = own[f"{name}/{kind}"].to(mine)
        return self._group.all_gather(mine, torch.empty_like(bucket.gradients)).result()

    def _cut(self, bucket: FlatBucket, name: str, kind: str, tensor: Tensor) -> Tensor:
        if kind in SCALARS:
            return tensor
        flat = torch.zeros(bucket.length, dtype=tensor.dtype)
        bucket.place(flat, name).copy_(tensor)
        return elements(flat, self._ranges[name]).clone()


def check_elementwise(optimizer: Optimizer) -> None:
    """An optimizer that looks at whole tensors cannot work on parts of them."""
    if type(optimizer) not in ELEMENTWISE:
        raise UsageError(
            f"{type(optimizer).__name__} cannot run on parts of tensors, as nccl does; use nccl_allreduce, or one of "
            f"{', '.join(kind.__name__ for kind in ELEMENTWISE)}"
        )


def state_of(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> State:
    """What an optimizer remembers, by parameter, on the CPU."""
    found: State = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{name}/{kind}"] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    return found


def load_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> None:
    """Give an optimizer its memory back; torch's own loading puts each where and in what form it belongs."""
    for name, kinds in states.items():
        check_fits(name, kinds, parameters)
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(ordered)}
    memory = {numbers[id(parameters[name])]: dict(kinds) for name, kinds in states.items()}
    optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})


def check_fits(name: str, kinds: Iterable[str] | Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Another model's state is refused before anything changes."""
    if name not in parameters:
        raise UsageError(f"the state has parameter {name!r}, which this model does not train: another model's?")
    for kind in kinds:
        tensor = kinds[kind] if isinstance(kinds, Mapping) else None
        wanted = tuple(parameters[name].shape)
        if kind not in SCALARS and tensor is not None and tensor.numel() != parameters[name].numel():
            raise UsageError(f"state {kind} of {name!r} is {tuple(tensor.shape)}, the parameter is {wanted}")
