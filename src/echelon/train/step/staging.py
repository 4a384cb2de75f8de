"""A model's gradients and weights between a device and the store's memory, in few kernels.

In the store a parameter's elements lie in their logical order, as every worker and every checkpoint sees them; on the
device they lie as the network's kernels like them (channels last, for example), and some of them in half precision.
Copying tensor by tensor between the two takes a kernel each: hundreds of a few microseconds, as long as a tenth of a
small network's step. Here elements are put in order by one indexed copy for all of a bucket, and tensors are gathered
and spread a list at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from echelon.train.trainer.server import ServerTrainer


class Departure:
    """A bucket's gradients on their way out. `leaves` are what the network reads in place of the parameters."""

    def __init__(self, trainer: ServerTrainer, index: int, leaves: Mapping[str, Tensor]) -> None:
        self.index = index
        self._names, self.leaves = list(leaves), list(leaves.values())
        self.missing = 0  # gradients that backward has not finished yet
        self._out = trainer.kvstore.span(list(leaves))[0]
        starts = [_start(trainer, name, self._out) for name in leaves]
        self._order = elements_in_order(self.leaves, starts)
        self._gathered = self._out.new_zeros(len(self._order), device=self._order.device)
        self._views = views_like(self._gathered, self.leaves)
        self._leaving = torch.zeros_like(self._out, device=self._order.device)

    def leave_out_unused(self) -> dict[str, Tensor]:
        """Do without the parameters that backward gave no gradient, and return them."""
        used = [leaf.grad is not None for leaf in self.leaves]
        unused = {name: leaf for name, leaf in zip(self._names, self.leaves, strict=True) if leaf.grad is None}
        self._names = list(compress(self._names, used))
        self.leaves = list(compress(self.leaves, used))
        self._views = list(compress(self._views, used))
        return unused

    def bring(self) -> None:
        """Gather the gradients and copy them to the store's memory. Device work."""
        copy_alike(self._views, [leaf.grad for leaf in self.leaves])  # type: ignore[misc]
        self._leaving.index_copy_(0, self._order, self._gathered)
        self._out.copy_(self._leaving, non_blocking=True)


class Arrivals:
    """All weights on their way in, a bucket at a time, and from there to where the network reads them."""

    def __init__(
        self,
        trainer: ServerTrainer,
        buckets: Sequence[Sequence[str]],
        full: Mapping[str, Tensor],
        leaves: Mapping[str, Tensor],
    ) -> None:
        """`full` are the weights in float32, `leaves` what the network reads in their place."""
        names = [name for bucket in buckets for name in bucket]
        self._in = [trainer.kvstore.span(bucket)[1] for bucket in buckets]
        self._full = [full[name].detach() for name in names]
        self._leaves = [leaves[name].detach() for name in names]
        starts: list[int] = []
        base = 0
        for bucket, memory in zip(buckets, self._in, strict=True):
            starts += [base + _start(trainer, name, memory, weight=True) for name in bucket]
            base += len(memory)
        self._order = elements_in_order(self._full, starts)
        self._arrived = self._in[0].new_zeros(base, device=self._order.device)
        self._slices = torch.split(self._arrived, [len(memory) for memory in self._in])
        self._ordered = self._in[0].new_zeros(len(self._order), device=self._order.device)
        self._views = views_like(self._ordered, self._full)
        copy_alike(self._views, self._full)
        self._arrived.index_copy_(0, self._order, self._ordered)

    def fetch(self, index: int) -> None:
        """Copy a bucket's weights from the store's memory."""
        self._slices[index].copy_(self._in[index], non_blocking=True)

    def take(self) -> None:
        """Put the weights where the network reads them. Device work."""
        torch.index_select(self._arrived, 0, self._order, out=self._ordered)
        copy_alike(self._leaves, self._views)

    def renew(self) -> None:
        """After `take`: put the weights into those parameters, too, that the network does not read. Device work."""
        others = [
            i
            for i, (full, leaf) in enumerate(zip(self._full, self._leaves, strict=True))
            if full.data_ptr() != leaf.data_ptr()
        ]
        copy_alike([self._full[i] for i in others], [self._views[i] for i in others])


def _start(trainer: ServerTrainer, name: str, memory: Tensor, *, weight: bool = False) -> int:
    """Where a parameter begins in its bucket's memory."""
    weights, gradients = trainer.kvstore.views(name)
    return ((weights if weight else gradients).data_ptr() - memory.data_ptr()) // memory.element_size()


def elements_in_order(tensors: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """For every element of some tensors, in the order of their memory: its place in logical order, from `starts` on."""
    order = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.int64)
    for view, start in zip(views_like(order, tensors), starts, strict=True):
        view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
    return order.to(tensors[0].device)


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Flat memory cut into tensors of the shapes and strides of others."""
    dense = [
        torch.empty_like(tensor, device="meta") for tensor in tensors
    ]  # the strides without gaps, if there are any
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.as_strided(tensor.shape, tensor.stride()) for part, tensor in zip(parts, dense, strict=True)]


def copy_alike(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, those of the same two dtypes in one go.

    That takes equal strides, but not of dimensions of one element, which are left out.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kinds.setdefault((target.dtype, source.dtype), []).append((target.squeeze(), source.squeeze()))
    for pairs in kinds.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
