"""Values that workers exchange, as bytes: tensors, numbers, and what JSON can hold. Nothing is pickled."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from echelon.errors import UsageError

OPERATIONS = ("mean", "sum", "max", "min")


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A value on its way. `dtype` is empty if it is not a tensor; `data` is the tensor's bytes, or MessagePack."""

    dtype: str
    shape: list[int]
    data: bytes


_decoder = msgspec.msgpack.Decoder(_Packed)


def pack(value: Any) -> bytes:
    """Return a value as bytes, or raise UsageError if its type cannot be exchanged."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UsageError(f"a tensor with layout {value.layout} cannot be exchanged; pass value.to_dense()")
        flat = value.detach().cpu().reshape(-1).contiguous()
        name = str(value.dtype).removeprefix("torch.")
        return msgspec.msgpack.encode(_Packed(name, list(value.shape), flat.view(torch.uint8).numpy().tobytes()))
    try:
        return msgspec.msgpack.encode(_Packed("", [], msgspec.msgpack.encode(value)))
    except (TypeError, OverflowError) as error:
        raise UsageError(
            f"a value of type {type(value).__name__} cannot be exchanged ({error}); pass tensors, numbers, strings, or "
            "lists and dicts of them without tensors"
        ) from error


def unpack(data: bytes | memoryview, device: torch.device | str = "cpu") -> Any:
    """Return the value that `pack` encoded; tensors go to `device`."""
    packed = _decoder.decode(data)
    if not packed.dtype:
        return msgspec.msgpack.decode(packed.data)
    dtype = getattr(torch, packed.dtype)
    if not packed.data:
        return torch.empty(packed.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(packed.data), dtype=dtype).view(packed.shape).to(device)


def check_operation(op: str) -> None:
    """Raise UsageError if `reduce` does not have this operation."""
    if op not in OPERATIONS:
        raise UsageError(f"all_reduce has no operation {op!r}; choose one of {', '.join(OPERATIONS)}")


def reduce(values: Mapping[int, Any], op: str) -> Any:
    """Return the mean, sum, maximum or minimum of the workers' values, by rank. The order of the sum is by rank."""
    ordered = [values[rank] for rank in sorted(values)]
    if all(isinstance(value, Tensor) for value in ordered):
        _check_same_form(values)
        return _reduce_tensors(ordered, op)
    for rank, value in values.items():
        if not isinstance(value, int | float):
            raise UsageError(
                f"all_reduce takes tensors or numbers, the same on all workers; worker {rank} gave {_form(value)}. "
                "gather returns values of other types"
            )
    if op in ("max", "min"):
        return max(ordered) if op == "max" else min(ordered)
    return sum(ordered) / len(ordered) if op == "mean" else sum(ordered)


def _reduce_tensors(tensors: Sequence[Tensor], op: str) -> Tensor:
    dtype = tensors[0].dtype
    if op in ("max", "min"):
        elementwise: Callable[[Tensor, Tensor], Tensor] = torch.maximum if op == "max" else torch.minimum
        return functools.reduce(elementwise, tensors)
    if dtype in (torch.float16, torch.bfloat16):
        return _reduce_tensors([tensor.float() for tensor in tensors], op).to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        tensors = [tensor.to(torch.int64) for tensor in tensors]
    total = functools.reduce(operator.add, tensors)
    return total / len(tensors) if op == "mean" else total


def _check_same_form(values: Mapping[int, Tensor]) -> None:
    first = min(values)
    for rank, value in values.items():
        if (value.shape, value.dtype) != (values[first].shape, values[first].dtype):
            raise UsageError(
                f"all_reduce needs the same shape and dtype on all workers: worker {first} gave "
                f"{_form(values[first])}, worker {rank} gave {_form(value)}"
            )


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"
