"""Checks of the numbers that workers send for their optimizer, before anything uses them.

A number that overflows float32, or an option of the wrong type, would raise an exception in the middle of an update.
So numbers are limited, and a kernel with new options makes two steps on a few elements first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from echelon.cluster.messages import NO_OPTIMIZER, OptimizerSpec, PushHeader, Setting
from echelon.cluster.placement import ALIGN
from echelon.errors import UsageError
from echelon.server.optimizer.class_kernels import WholeClass
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.optimizer.row_kernels import SparseAdam

MAX_SAMPLES = float(1 << 53)
LARGEST = 1e10  # of rates and settings: their products with what optimizers compute do not overflow float32
_NOT_NEGATIVE = frozenset({"lr", "momentum", "weight_decay", "eps", "lr_decay", "initial_accumulator_value"})


def check_header(header: PushHeader) -> None:
    """Raise UsageError if the samples or learning rates of a push are not possible."""
    for what, number in (("samples", header.samples), ("samples without a gradient", header.absent)):
        if number is not None and not 0 <= number <= MAX_SAMPLES:
            raise UsageError(f"the push has {number} {what}; expected a number from 0 to {MAX_SAMPLES:g}")
    for rate in header.lrs:
        if not 0 <= rate <= LARGEST:
            raise UsageError(f"the push has a learning rate of {rate}; expected a number from 0 to {LARGEST:g}")


def check_spec(spec: OptimizerSpec) -> None:
    """Raise UsageError if an optimizer has impossible settings, or keys in parameter groups that do not exist."""
    if not spec.groups:
        raise UsageError(f"optimizer {spec.name!r} has no parameter groups")
    for key, group in spec.members.items():
        if not NO_OPTIMIZER <= group < len(spec.groups):
            raise UsageError(f"key {key!r} is in parameter group {group}, but there are {len(spec.groups)} groups")
    if spec.max_grad_norm is not None and not spec.max_grad_norm >= 0:
        raise UsageError(f"max_grad_norm is {spec.max_grad_norm}; expected a number of 0 or more")
    for settings in spec.groups:
        check_settings(settings)


def check_settings(settings: Mapping[str, Setting]) -> None:
    """Raise UsageError if a setting of an optimizer is NaN, infinite, too large, or negative where that is impossible.

    The coefficients of averages (betas) are at least 0 and below 1, as in torch.optim.
    """
    for name, value in settings.items():
        for number in _numbers(value if isinstance(value, list) else [value]):
            if not -LARGEST <= number <= LARGEST:
                raise UsageError(f"{name} is {number}; expected a number from {-LARGEST:g} to {LARGEST:g}")
            if number < 0 and name in _NOT_NEGATIVE:
                raise UsageError(f"{name} is {number}; expected a number of 0 or more")
            if name == "betas" and not 0 <= number < 1:
                raise UsageError(f"betas has {number}; expected numbers from 0 to below 1")


def try_out(kernel: Kernel) -> None:
    """Make two steps on a few elements, to raise the exceptions of impossible options."""
    if isinstance(kernel, WholeClass):  # `Runner` makes an instance, which checks its options
        return
    if kernel.rows_only:
        _try_out_rows(kernel)
        return
    weights, gradient = torch.ones(ALIGN, device="cpu"), torch.ones(ALIGN, device="cpu")
    states = [torch.zeros(ALIGN, device="cpu") for _ in kernel.state_names]
    progress, lr = Progress(), float(kernel.options.get("lr", 0.0))
    for _ in range(2):
        kernel.update(weights, gradient, states, Step(progress, lr, 2.0))
        progress = kernel.progress(progress, lr)


def _try_out_rows(kernel: Kernel) -> None:
    table, numbers = torch.ones(4, 2, device="cpu"), torch.zeros((1, 1), dtype=torch.int64, device="cpu")
    gradient = torch.sparse_coo_tensor(numbers, table[:1], table.shape, is_coalesced=True, check_invariants=False)
    states = [torch.zeros_like(table) for _ in kernel.state_names]
    SparseAdam(kernel).update(table, gradient, states, Step(Progress(), float(kernel.options.get("lr", 0.0))))


def _numbers(values: Sequence[object]) -> Iterable[float]:
    return (value for value in values if isinstance(value, float | int))
