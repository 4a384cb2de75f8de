"""The norm of a tensor, with the same bits however many threads compute it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 1024


def squared_norm(tensor: Tensor) -> Tensor:
    """Return the sum of squares as one float64 on the tensor's device.

    It is summed in float64, in blocks that do not depend on the number of threads, so its bits are reproducible.
    """
    sums = tensor.detach().reshape(-1).double().square()
    while sums.numel() != 1:
        sums = pad(sums, (0, -sums.numel() % _BLOCK)).view(-1, _BLOCK).sum(1) if sums.numel() else sums.new_zeros(1)
    return sums[0]
