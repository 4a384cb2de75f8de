"""Flat buckets: adjacent parameters of one dtype in contiguous memory, so that one collective moves them all.

A parameter's place keeps the parameter's strides, so channels-last weights stay channels-last. It begins at a multiple
of ALIGN elements, because GPU kernels read several elements at once and fail at other addresses. The length is padded,
so that every rank has an equal shard, which begins at such a multiple, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from echelon.kvstore.collective.process_group import wide
from echelon.train.trainer.buckets import make_buckets

ALIGN = 64
COLLECTIVE_BYTES = 16 << 20  # larger than for servers: collectives are slow with small messages


@dataclass(slots=True, eq=False)
class FlatBucket:
    """Some parameters: where each begins, and memory for their gradients, in float32 or wider."""

    index: int
    parameters: dict[str, nn.Parameter]
    starts: dict[str, int]
    gradients: Tensor
    strides: dict[str, tuple[int, ...] | None] = field(init=False)  # None: the elements are not dense
    places: dict[str, Tensor] = field(init=False)
    arrived: set[str] = field(default_factory=set)  # parameters that backward has finished in the current step

    def __post_init__(self) -> None:
        self.strides = {name: p.stride() if is_dense(p) else None for name, p in self.parameters.items()}
        self.places = {name: self.place(self.gradients, name) for name in self.parameters}

    @property
    def is_complete(self) -> bool:
        """Whether backward has finished all gradients of the bucket."""
        return len(self.arrived) == len(self.parameters)

    @property
    def length(self) -> int:
        """The number of elements, with padding."""
        return self.gradients.numel()

    def place(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's part of a tensor of this bucket's length, in the parameter's shape and strides.

        The strides are those at the start, because the parameter may get other memory later.
        """
        parameter, strides = self.parameters[name], self.strides[name]
        start = flat.storage_offset() + self.starts[name]
        if strides is not None:
            return flat.as_strided(parameter.shape, strides, start)
        return flat[self.starts[name] : self.starts[name] + parameter.numel()].view(parameter.shape)

    def collect(self, given: Collection[str]) -> None:
        """Copy the given gradients to their places; the others count as zero."""
        pairs = [(self.places[name], p.grad) for name, p in self.parameters.items() if name in given]
        if len(pairs) < len(self.parameters):
            self.gradients.zero_()
        found = [(place, gradient.detach()) for place, gradient in pairs if gradient is not None]
        if found:
            torch._foreach_copy_([place for place, _ in found], [gradient for _, gradient in found])

    def write_gradients(self, means: Tensor, used: Collection[str]) -> None:
        """Copy means, which are laid out as this bucket, into the gradients of the parameters in `used`.

        The tensors that are the gradients now stay the gradients: the caller may hold them, or views of them.
        """
        pairs = []
        for name, parameter in self.parameters.items():
            if name not in used:
                continue
            mean = self.place(means, name)
            if parameter.grad is None:
                parameter.grad = mean.to(parameter.dtype, copy=True)
            else:
                pairs.append((parameter.grad.detach(), mean))
        if pairs:
            torch._foreach_copy_([gradient for gradient, _ in pairs], [mean for _, mean in pairs])

    def slices(self, part: range) -> dict[str, range]:
        """Return which elements of the bucket belong to each parameter, for the parameters inside `part`."""
        found = {}
        for name, parameter in self.parameters.items():
            start = max(part.start, self.starts[name])
            stop = min(part.stop, self.starts[name] + parameter.numel())
            if start < stop:
                found[name] = range(start, stop)
        return found


def make_flat_buckets(
    parameters: Mapping[str, nn.Parameter], size: int, limit: int = COLLECTIVE_BYTES
) -> list[FlatBucket]:
    """Divide parameters, in the order in which backward finishes them, into buckets for a group of `size` ranks."""
    buckets: list[FlatBucket] = []
    for _, run in itertools.groupby(parameters.items(), lambda item: item[1].dtype):
        members = list(run)
        sizes = [parameter.numel() * parameter.element_size() for _, parameter in members]
        for bucket in make_buckets(sizes, limit):
            chosen = dict(members[i] for i in bucket)
            buckets.append(_flat_bucket(len(buckets), chosen, size))
    return buckets


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in some order of its dimensions."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _flat_bucket(index: int, parameters: dict[str, nn.Parameter], size: int) -> FlatBucket:
    starts, length = {}, 0
    for name, parameter in parameters.items():
        starts[name] = length
        length += parameter.numel() + -parameter.numel() % ALIGN
    first = next(iter(parameters.values()))
    gradients = torch.zeros(length + -length % (size * ALIGN), dtype=wide(first.dtype), device=first.device)
    return FlatBucket(index, parameters, starts, gradients)


def flat_weights(bucket: FlatBucket) -> Tensor:
    """Move a bucket's parameters into one flat tensor, and return it."""
    first = next(iter(bucket.parameters.values()))
    weights = torch.zeros(bucket.length, dtype=first.dtype, device=first.device)
    for name, parameter in bucket.parameters.items():
        place = bucket.place(weights, name)
        place.copy_(parameter.detach())
        parameter.data = place
    return weights


def shard_of(length: int, rank: int, size: int) -> range:
    """Return a rank's shard of `length` elements."""
    share = length // size
    return range(rank * share, (rank + 1) * share)
