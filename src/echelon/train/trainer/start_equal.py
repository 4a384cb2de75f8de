"""Giving all workers the same start: what the store has no key for, frozen parameters and buffers, comes from rank 0.

The store copies rank 0's values of the parameters that are trained to all workers. Frozen parameters, parameters that
belong to another optimizer, and buffers would stay different where workers have different seeds or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.train.trainer.servers.weights import same_bits

CHUNK_BYTES = 32 << 20


def untrained_tensors(model: nn.Module, trained: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a model that are not in `trained`, and all its buffers, by name."""
    ids = {id(parameter) for parameter in trained}
    found = {name: p.detach() for name, p in model.named_parameters() if id(p) not in ids}
    return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def copy_from_first_worker(kvstore: KVStore, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors with those of the living worker with the lowest rank. All workers call it."""
    if kvstore.num_workers == 1:
        return
    _check_same_forms(kvstore, tensors)
    flat = [as_bytes(tensor) for tensor in tensors.values()]
    for chunk in _chunks(flat):
        _copy_chunk(kvstore, chunk)
    overwrite(tensors.values(), flat)


def _check_same_forms(kvstore: KVStore, tensors: Mapping[str, Tensor]) -> None:
    own = forms_of(tensors)
    check_forms(kvstore.rank, own, kvstore.gather(own)[0])


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and shape of tensors as texts."""
    return {name: f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}" for name, t in tensors.items()}


def check_forms(rank: int, own: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raise UsageError if this worker's tensors differ from those of the first worker in name, dtype or shape."""
    for name in {**first, **own}:
        if first.get(name) != own.get(name):
            raise UsageError(
                f"worker {rank}: the frozen parameters and buffers of the model must have the same names and "
                f"shapes on all workers: {name!r} is {own.get(name, 'missing')} here, and {first.get(name, 'missing')} "
                "on the first worker; Trainer(start_equal=False) lets each worker keep its own"
            )


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's bytes, on the CPU."""
    return tensor.detach().to("cpu", copy=True).reshape(-1).view(torch.uint8)


def overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy the bytes of values into tensors that differ from them."""
    for tensor, flat in zip(tensors, values, strict=True):
        first = flat.view(tensor.dtype).view(tensor.shape)
        if not same_bits(tensor.detach().cpu(), first):  # a write would look like an edit to another Trainer
            with torch.no_grad():
                tensor.copy_(first)


def _chunks(flat: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield all bytes of tensors in lists of parts, each list with at most CHUNK_BYTES."""
    chunk: list[Tensor] = []
    room = CHUNK_BYTES
    for part in flat:
        for piece in part.split(CHUNK_BYTES) if part.numel() else ():
            if piece.numel() > room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
            chunk.append(piece)
            room -= piece.numel()
    if chunk:
        yield chunk


def _copy_chunk(kvstore: KVStore, chunk: Sequence[Tensor]) -> None:
    """Overwrite parts with those of the first worker. If it dies before it has sent them, the next one is the first."""
    while True:
        own = b"".join(piece.numpy().tobytes() for piece in chunk) if kvstore.is_first else b""
        sent = [part for _, part in sorted(kvstore.gather_bytes(own).items()) if len(part)]
        if sent:
            break
    values = torch.frombuffer(bytearray(sent[0]), dtype=torch.uint8)
    for piece, part in zip(chunk, values.split([piece.numel() for piece in chunk]), strict=True):
        piece.copy_(part)
