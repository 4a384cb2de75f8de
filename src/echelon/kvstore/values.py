"""The keys and tensors of a call: callers give one key or many, and one tensor or one per device for each.

`tensors_by_key` brings every form into one: the tensors of each key. A key that a call names twice has the tensors of
both, as in MXNet: they are summed in a push, and all of them are filled by a pull.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.cluster.placement import KeySpec
from echelon.errors import UsageError

Key = str | int
Keys = Key | Sequence[Key]
Value = Tensor | Sequence[Tensor]
Values = Value | Sequence[Value]


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype as `KeySpec` names it, for example float32."""
    return str(tensor.dtype).removeprefix("torch.")


def spec_of_value(name: Key, value: Tensor, *, row_sparse: bool = False) -> KeySpec:
    """Return the key's name with the shape and dtype of a value. `row_sparse`: the key is stored and sent by rows."""
    return KeySpec(name, tuple(value.shape), dtype_name(value), row_sparse)


def as_keys(keys: Keys) -> list[Key]:
    """Return one key or many as a list."""
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        return list(keys)
    return [keys]  # of any type: the store checks it


def as_values(keys: Keys, values: Values) -> list[list[Tensor]]:
    """Return the tensors of each key, one per device."""
    if not isinstance(keys, Sequence) or isinstance(keys, str):
        return [_per_device(keys, values)]
    if isinstance(values, Tensor) or len(values) != len(keys):
        given = 1 if isinstance(values, Tensor) else len(values)
        raise UsageError(f"{len(keys)} keys but {given} values; a list of keys needs one value (or list) for each")
    return [_per_device(key, value) for key, value in zip(keys, values, strict=True)]


def tensors_by_key(keys: Keys, values: Values) -> dict[Key, list[Tensor]]:
    """Return all tensors of each key that a call names, in order."""
    found: dict[Key, list[Tensor]] = {}
    for key, tensors in zip(as_keys(keys), as_values(keys, values), strict=True):
        check_key(key)
        found.setdefault(key, []).extend(tensors)
    return found


def check_key(key: Key) -> None:
    """Raise UsageError unless a key is a string or an int."""
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise UsageError(f"a key must be a string or an int, not {key!r}")


def sum_over_devices(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum over devices, on the device of the first tensor, of the tensors cast to a dtype.

    The sum of sparse tensors is sparse, unless one of them is dense.
    """
    if not all(tensor.is_sparse for tensor in tensors):
        tensors = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    total = tensors[0].detach().to(dtype)
    if len(tensors) > 1:
        total = total.clone()
        for tensor in tensors[1:]:
            total.add_(tensor.detach().to(total.device, dtype))
    return total


def is_finite(value: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    if value.is_sparse:
        value = value.coalesce().values()
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def row_numbers(spec: KeySpec, rows: Tensor) -> Tensor:
    """Return row numbers as int64 on the CPU. Raise UsageError if the key has no such row."""
    if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise UsageError(f"key {spec.name!r}: row_ids must be a tensor of integers, not {kind}")
    numbers = rows.detach().cpu().to(torch.int64)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)
    if not spec.shape or not 0 <= low <= high < max(1, spec.shape[0]):
        raise UsageError(f"key {spec.name!r} is {spec}, but row_ids names rows {low} to {high}")
    return numbers


def check_row_outs(spec: KeySpec, outs: Sequence[Tensor], rows: Tensor) -> None:
    """Raise UsageError unless each out is sparse and of the key's shape, or dense with one row for each number."""
    dense_shape = (*rows.shape, *spec.shape[1:])
    for out in outs:
        wanted = spec.shape if out.is_sparse else dense_shape
        if tuple(out.shape) != wanted:
            raise UsageError(
                f"key {spec.name!r} is {spec}: out for row_ids of shape {tuple(rows.shape)} must be dense of shape "
                f"{dense_shape}, or sparse of shape {spec.shape}; it is {out.layout} of shape {tuple(out.shape)}"
            )


def copy_rows(numbers: Tensor, places: Tensor, values: Tensor, outs: Sequence[Tensor]) -> None:
    """Copy rows, whose numbers are all different and ascend, into outs. `places`: of each row of a dense out."""
    for out in outs:
        if out.is_sparse:
            given = values.to(out.device, out.dtype)
            indices = numbers[None].to(out.device)
            rows = torch.sparse_coo_tensor(indices, given, out.shape, is_coalesced=True, check_invariants=False)
            with torch.no_grad():  # a detached sparse tensor does not share the list of its rows
                out.copy_(rows)
        else:
            out.detach().copy_(values[places])


def _per_device(key: Key, value: Values) -> list[Tensor]:
    tensors: list[Tensor] = []
    for tensor in value if isinstance(value, Sequence) else [value]:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise UsageError(f"key {key!r}: a value must be a torch tensor or a list of them, not {kind}")
        _check_layout(key, tensor)
        tensors.append(tensor)
    if not tensors:
        raise UsageError(f"key {key!r}: the list of values is empty")
    return tensors


def _check_layout(key: Key, tensor: Tensor) -> None:
    """Reject meta tensors and layouts now. Later it would fail in the middle of a call that other workers wait for."""
    by_rows = tensor.is_sparse and tensor.sparse_dim() == 1
    if tensor.layout is not torch.strided and not by_rows:
        dims = f" with {tensor.sparse_dim()} sparse dimensions" if tensor.is_sparse else ""
        raise UsageError(
            f"key {key!r}: a value of layout {tensor.layout}{dims} cannot be stored or sent; make it dense "
            "(to_dense()) or sparse by rows (to_sparse(1))"
        )
    if tensor.is_meta:
        raise UsageError(f"key {key!r}: a value on device meta has no elements to store or send")
