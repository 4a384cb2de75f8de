"""Sparse gradients in a process group: the rows of all ranks are gathered and added.

Ranks have different numbers of rows. They exchange the numbers first, and pad their rows to the largest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.kvstore.collective.process_group import ProcessGroup


class SparseGradients:
    """The gradients of tables (`nn.Embedding(sparse=True)`), which every rank of a group averages with the others."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup) -> None:
        self.parameters = parameters
        self._group = group

    def given(self, samples: int) -> set[str]:
        """Return the names of the tables that have a gradient on this rank."""
        return {name for name, parameter in self.parameters.items() if samples and parameter.grad is not None}

    def reduce(self, samples: int, divisor: Tensor, used: set[str]) -> None:
        """Set the gradients of the tables in `used` to the weighted mean. All ranks call it with the same `used`."""
        own = {name: self._weighted(name, samples) for name in self.parameters if name in used}
        if not own:
            return
        lengths = torch.tensor([gradient._nnz() for gradient in own.values()], device=self._group.device)
        all_lengths = self._group.all_gather(lengths, lengths.new_empty(self._group.size, len(own))).result()
        for (name, gradient), counts in zip(own.items(), all_lengths.t().tolist(), strict=True):
            rows = torch.cat(self._gather(gradient.indices()[0], counts))
            values = torch.cat(self._gather(gradient.values(), counts))
            total = torch.sparse_coo_tensor(rows.unsqueeze(0), values, gradient.shape, check_invariants=False)
            total = total.coalesce()
            total.values().div_(divisor.to(values.dtype))
            self.parameters[name].grad = total

    def _weighted(self, name: str, samples: int) -> Tensor:
        parameter = self.parameters[name]
        if parameter.grad is None or not samples:
            return torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                parameter.detach().new_empty((0, *parameter.shape[1:])),
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        if not parameter.grad.is_sparse:
            raise UsageError(
                f"the gradient of {name!r} is dense, but its embedding has sparse=True or its optimizer is SparseAdam; "
                "if another layer uses the same weights, create the embedding with sparse=False"
            )
        return parameter.grad.detach().coalesce() * samples

    def _gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """Return the rows of every rank. `counts` says how many each has."""
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        out = padded.new_empty((self._group.size, *padded.shape))
        gathered = self._group.all_gather(padded, out).result()
        return [part[:count] for part, count in zip(gathered, counts, strict=True)]
