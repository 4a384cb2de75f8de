"""Pinning: memory that a GPU copies from and to by itself stays where it is, and copies run beside the host's work."""

from __future__ import annotations

import torch

from echelon.errors import UsageError


def pin(address: int, num_bytes: int) -> None:
    """Pin memory that is there already."""
    status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)  # type: ignore[no-untyped-call]
    if int(status):
        raise UsageError(f"CUDA cannot pin {num_bytes} bytes: {status}")


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
