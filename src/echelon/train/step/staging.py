"""Copies a model's gradients and weights between a device and the store's memory, with few kernels.

The store keeps the elements of a parameter in logical order, the same for every worker and every checkpoint. On the
device they are in the order that the network's kernels prefer (channels-last, for example), and some of them are in
half precision. Copying tensor by tensor takes one kernel each: hundreds of a few microseconds, up to a tenth of a small
network's step. Here one indexed copy per bucket puts the elements in order, in a staging buffer on the device, and one
copy moves the buffer. Tensors are packed and unpacked a list at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.servers.bucket import Bucket


class GradientStaging:
    """Copies the gradients of one bucket to the store. `leaves` are the tensors that the network computes with."""

    def __init__(self, store: ServerStore, bucket: Bucket, leaves: Mapping[str, Tensor]) -> None:
        self.bucket = bucket
        self._names, self.leaves = bucket.names, [leaves[name] for name in bucket.names]
        self.num_missing = 0  # gradients that backward has not computed yet
        self._store_memory = store.span(bucket.names)[0]
        starts = _starts(bucket.gradients.values(), self._store_memory)
        self._order = logical_positions(self.leaves, starts)
        self._packed = self._store_memory.new_zeros(len(self._order), device=self._order.device)
        self._views = views_like(self._packed, self.leaves)
        self._buffer = torch.zeros_like(self._store_memory, device=self._order.device)

    def drop_unused(self) -> dict[str, Tensor]:
        """Remove the parameters that have no gradient, and return them."""
        used = [leaf.grad is not None for leaf in self.leaves]
        unused = {name: leaf for name, leaf in zip(self._names, self.leaves, strict=True) if leaf.grad is None}
        self._names = list(compress(self._names, used))
        self.leaves = list(compress(self.leaves, used))
        self._views = list(compress(self._views, used))
        return unused

    def copy_out(self) -> None:
        """Copy the gradients to the store's memory, with device operations only."""
        copy_tensors(self._views, [leaf.grad for leaf in self.leaves])  # type: ignore[misc]
        self._buffer.index_copy_(0, self._order, self._packed)
        self._store_memory.copy_(self._buffer, non_blocking=True)


class WeightStaging:
    """Copies all weights from the store, one bucket at a time, and then to where the network reads them."""

    def __init__(
        self,
        store: ServerStore,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, Tensor],
        leaves: Mapping[str, Tensor],
    ) -> None:
        """`leaves` are the tensors that the network computes with: parameters, or half-precision copies of them."""
        names = [name for bucket in buckets for name in bucket.names]
        self._store_memory = [store.span(bucket.names)[1] for bucket in buckets]
        self._parameters = [parameters[name].detach() for name in names]
        self._leaves = [leaves[name].detach() for name in names]
        starts: list[int] = []
        base = 0
        for bucket, memory in zip(buckets, self._store_memory, strict=True):
            starts += [base + start for start in _starts(bucket.weights.values(), memory)]
            base += len(memory)
        self._order = logical_positions(self._parameters, starts)
        self._buffer = self._store_memory[0].new_zeros(base, device=self._order.device)
        self._bucket_buffers = torch.split(self._buffer, [len(memory) for memory in self._store_memory])
        self._packed = self._store_memory[0].new_zeros(len(self._order), device=self._order.device)
        self._views = views_like(self._packed, self._parameters)
        copy_tensors(self._views, self._parameters)
        self._buffer.index_copy_(0, self._order, self._packed)

    def copy_in(self, index: int) -> None:
        """Copy the weights of a bucket from the store's memory to the staging buffer."""
        self._bucket_buffers[index].copy_(self._store_memory[index], non_blocking=True)

    def unpack(self) -> None:
        """Copy the weights from the staging buffer to where the network reads them, with device operations only."""
        torch.index_select(self._buffer, 0, self._order, out=self._packed)
        copy_tensors(self._leaves, self._views)

    def renew_parameters(self) -> None:
        """After `unpack`, copy the weights to the parameters that have half-precision copies, too."""
        others = [
            i
            for i, (parameter, leaf) in enumerate(zip(self._parameters, self._leaves, strict=True))
            if parameter.data_ptr() != leaf.data_ptr()
        ]
        copy_tensors([self._parameters[i] for i in others], [self._views[i] for i in others])


def _starts(places: Iterable[Tensor], memory: Tensor) -> list[int]:
    """Return the first element of each place in the memory of its bucket."""
    return [(place.data_ptr() - memory.data_ptr()) // memory.element_size() for place in places]


def logical_positions(tensors: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Return the position in logical order, counted from the tensor's start, of each element in memory order."""
    order = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.int64)
    for view, start in zip(views_like(order, tensors), starts, strict=True):
        view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
    return order.to(tensors[0].device)


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of flat memory with the shapes and strides of other tensors, one after the other."""
    dense = [torch.empty_like(tensor, device="meta") for tensor in tensors]  # removes gaps between elements
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.as_strided(tensor.shape, tensor.stride()) for part, tensor in zip(parts, dense, strict=True)]


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, with one call per pair of dtypes.

    torch copies a list with one kernel only if strides are equal. The strides of dimensions of size 1 may differ, so
    these dimensions are removed.
    """
    pairs_by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pairs_by_dtypes.setdefault((target.dtype, source.dtype), []).append((target.squeeze(), source.squeeze()))
    for pairs in pairs_by_dtypes.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
