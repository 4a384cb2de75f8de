"""The weights of a model and those that the store has sent: copies new ones in, and notices edits by the loop.

The parameters keep their own memory. The store's memory holds what the servers sent last, so an edit is a difference
between the two. A parameter is compared if its version counter or its address has changed. Some writes bypass the
counter (`p.data.clamp_()`). To notice them, everything is compared, which costs as much as a copy of the model: always
if the model is small or once an edit was found, else in the first steps only. Later, a few elements of some parameters
of a large model are compared in turn.

With `lazy` the parameters on the CPU use the store's memory itself, where weights arrive without a copy. Edits are then
noticed by version counter and address only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import UsageError

_SAMPLED = 64  # elements of a parameter that are compared
_FIRST_STEPS = 4  # in which everything is compared
_SMALL = 1 << 20  # elements of a model that is compared in every step
_IN_TURN = 8  # parameters that are sampled in a later step
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size; faster to compare than bytes


class Snapshot(NamedTuple):
    """The parameters at one point of a step: the sum of their version counters, and bytes of some of them."""

    versions: int
    samples: list[Tensor]

    def same_as(self, other: Snapshot) -> bool:
        """Return whether nothing was written between the two."""
        same = map(torch.equal, self.samples, other.samples)
        return self.versions == other.versions and all(same)


class ModelWeights:
    """The parameters of a model by name, and the store's memory of each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sent: Mapping[str, Tensor], *, lazy: bool) -> None:
        self._parameters = parameters
        self._sent = sent
        self._lazy = lazy
        self._names = list(parameters)
        self._seen: dict[str, tuple[int, int]] = {}
        self._checks = 0
        self._compares_all = sum(parameter.numel() for parameter in parameters.values()) <= _SMALL

    def take(self, names: Sequence[str]) -> None:
        """Copy new weights from the store's memory to the parameters."""
        copied = [name for name in names if not self._is_shared(name)]
        with torch.no_grad():
            for name in copied:
                real(self._parameters[name]).copy_(self._sent[name], non_blocking=True)
        self._see(names)

    def move(self) -> None:
        """Let the parameters use the store's memory, where that is possible and wanted."""
        for name, parameter in self._parameters.items():
            if self._lazy and parameter.device.type == "cpu" and not parameter.is_complex():
                parameter.data = self._sent[name]
        self._see(self._names)

    def edited(self) -> list[str]:
        """Return the parameters that differ from what the store sent, and whose difference was not returned before.

        Call it when nothing is in flight.
        """
        self._checks += 1
        suspects = {name for name in self._names if self._mark(name) != self._seen.get(name)}
        if not self._lazy and (self._compares_all or self._checks <= _FIRST_STEPS):
            suspects.update(self._names)
        else:
            suspects.update(name for name in self._sampled() if self._sample_differs(name))
        found = [name for name in self._names if name in suspects and self._differs(name)]
        self._compares_all = self._compares_all or bool(found)
        self._see(suspects)
        return found

    def snapshot(self) -> Snapshot:
        """Return what shows later whether the parameters were written to."""
        versions = sum(parameter._version for parameter in self._parameters.values())
        return Snapshot(versions, [self._own_sample(name).clone() for name in self._sampled()])

    def _see(self, names: Iterable[str]) -> None:
        for name in names:
            self._seen[name] = self._mark(name)

    def _mark(self, name: str) -> tuple[int, int]:
        parameter = self._parameters[name]
        return parameter._version, parameter.data_ptr()

    def _is_shared(self, name: str) -> bool:
        return self._lazy and self._parameters[name].data_ptr() == self._sent[name].data_ptr()

    def _differs(self, name: str) -> bool:
        parameter, sent = self._parameters[name], self._sent[name]
        values = real(parameter).detach()
        if values.shape != sent.shape or values.dtype != sent.dtype:
            raise UsageError(
                f"{name!r} is now {tuple(values.shape)} {values.dtype}, but its key in the store is "
                f"{tuple(sent.shape)} {sent.dtype}; convert the model before the Trainer is created"
            )
        if self._is_shared(name):
            return True  # the version counter has changed, and there is nothing to compare with
        differs = not same_bits(values.cpu(), sent)
        if self._lazy and parameter.device.type == "cpu":  # it got other memory
            sent.copy_(values)
            parameter.data = sent
        return differs

    def _sampled(self) -> Sequence[str]:
        """Return the parameters that are sampled in this step."""
        if self._lazy:
            return ()
        if self._checks <= _FIRST_STEPS or len(self._names) <= _IN_TURN:
            return self._names
        first = self._checks * _IN_TURN % len(self._names)
        return self._names[first : first + _IN_TURN]

    def _own_sample(self, name: str) -> Tensor:
        """Return the bytes of some elements of a parameter."""
        values = real(self._parameters[name]).detach()
        return _as_bytes(sample(values, values))

    def _sample_differs(self, name: str) -> bool:
        values, sent = real(self._parameters[name]).detach(), self._sent[name]
        if values.shape != sent.shape or values.dtype != sent.dtype:
            return True
        return not same_bits(sample(values, values).cpu(), sample(sent, values))


def digest(weights: Mapping[str, Tensor]) -> int:
    """Return a number that identifies the values of some parameters. It is never 0."""
    found = hashlib.blake2b(digest_size=7)
    for name, weight in weights.items():
        found.update(name.encode())
        found.update(_as_bytes(real(weight).detach().cpu()).numpy().data)
    return int.from_bytes(found.digest(), "big") or 1


def sample(tensor: Tensor, like: Tensor) -> Tensor:
    """Return some elements, the same ones of all tensors of a shape, without a copy of a large tensor."""
    flat = tensor.view(-1) if like.is_contiguous() else tensor[(0,) * (tensor.ndim - 1)]
    return flat[:: max(1, flat.numel() // _SAMPLED)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; NaN is then equal to NaN."""
    integers = _INTEGERS.get(one.element_size(), torch.uint8)
    return torch.equal(*(tensor.contiguous().view(-1).view(integers) for tensor in (one, other)))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def real(value: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, which is what a store holds. Others are returned as they are."""
    return torch.view_as_real(value) if value.is_complex() else value
