"""How far two results of the same arithmetic may differ when their sums are made in another order.

Distributed training adds the same gradients as one process on the joined batch, in another order; compiled kernels, and
the vector units of another CPU (`ATEN_CPU_CAPABILITY`), do the same. Each sum of n terms then rounds differently by
about eps * sqrt(n), every step adds such an error to the weights, and the next step starts from it. A tolerance
therefore follows from the dtype, the number of terms and the number of steps. A test names what magnifies the error:
Adam, for example, divides by the root of a small number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SAFETY = 4.0  # sums of both signs cancel: an error of the same size is larger beside a smaller result


def reordering(dtype: torch.dtype, terms: int, steps: int, magnification: float = 1.0) -> float:
    """Return the relative difference that another order of summation explains after some steps of training."""
    return SAFETY * torch.finfo(dtype).eps * math.sqrt(terms) * steps * magnification


def of_training(data: Sequence[tuple[Tensor, Tensor]], magnification: float = 1.0) -> float:
    """Return the same for a training on these batches; a weight's gradient sums over samples and their elements."""
    images = data[0][0]
    return reordering(images.dtype, max(len(batch) for batch, _ in data) * images[0].numel(), len(data), magnification)
