"""The optimizers that update single rows of a table: torch's own functions for sparse gradients.

A server's table has fewer rows than the user's, and every row is updated as torch updates it. So one worker gives the
bits of plain PyTorch. What torch refuses for sparse gradients is refused here, with torch's words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim._functional import sparse_adam
from torch.optim.adagrad import adagrad

from echelon.errors import UsageError
from echelon.server.optimizer.kernel import Kernel, States, Step

_DENSE = "use nn.Embedding(sparse=False)"


class RowKernel:
    """The update of rows by one optimizer with the options of `kernel`, which names the states."""

    adds_repeated_rows = False  # the values of a row that occurs twice one after the other, as torch does

    def __init__(self, kernel: Kernel) -> None:
        self.options = kernel.options
        self.state_names = kernel.state_names
        if self.options.get("fused"):
            raise UsageError(f"fused=True does not support sparse gradients; pass fused=False, or {_DENSE}")
        if self.options.get("weight_decay"):
            raise UsageError(f"weight_decay option is not compatible with sparse gradients; {_DENSE}")

    def update(self, table: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        """Update the rows of a sparse gradient in place."""
        raise NotImplementedError


class Sgd(RowKernel):
    """torch.optim.SGD. Its gradient is divided by the divisor before."""

    adds_repeated_rows = True

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        if momentum := self.options["momentum"]:
            raise UsageError(
                f"SGD with momentum={momentum} would change all rows that had a gradient before, in every step, so "
                f"servers do not support it for sparse gradients; use momentum=0, or {_DENSE}"
            )

    def update(self, table: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        table.add_(-gradient if self.options["maximize"] else gradient, alpha=-step.lr)


class Adagrad(RowKernel):
    """torch.optim.Adagrad."""

    def update(self, table: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        if not step.before.step:
            states[0].fill_(float(self.options["initial_accumulator_value"]))
        keywords = {name: self.options[name] for name in ("weight_decay", "lr_decay", "eps", "maximize")}
        sparse: dict[str, Any] = {"foreach": False, "has_sparse_grad": True, **keywords}
        steps_before = [torch.tensor(float(step.before.step))]
        adagrad([table], [gradient], list(states), steps_before, lr=step.lr / step.divisor, **sparse)


class SparseAdam(RowKernel):
    """torch.optim.SparseAdam."""

    def update(self, table: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        beta1, beta2 = self.options["betas"]
        keywords: dict[str, Any] = {"eps": self.options["eps"], "maximize": self.options["maximize"]}
        mean, square = states
        keywords |= {"beta1": beta1, "beta2": beta2, "lr": step.lr / step.divisor}
        sparse_adam([table], [gradient], [mean], [square], [step.before.step + 1], **keywords)


ROW_KERNELS: dict[str, type[RowKernel]] = {"sgd": Sgd, "adagrad": Adagrad, "sparse_adam": SparseAdam}


def check_updates_rows(name: str) -> None:
    """Raise UsageError if servers cannot update rows with an optimizer."""
    if name in ("adam", "adamw"):
        raise UsageError(f"{name} does not support sparse gradients, please consider SparseAdam instead; or {_DENSE}")
    if name not in ROW_KERNELS:
        raise UsageError(
            f"servers update rows with SGD, Adagrad and SparseAdam, not with {name}; use one of these, a store without "
            "servers, or nn.Embedding(sparse=False)"
        )


def row_kernel_for(name: str, kernel: Kernel) -> RowKernel:
    """Return the update of rows by an optimizer. Raise UsageError if it does not support sparse gradients."""
    check_updates_rows(name)
    return ROW_KERNELS[name](kernel)
