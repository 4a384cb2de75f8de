"""The tables of embeddings with sparse gradients (`nn.Embedding(sparse=True)`) in a Trainer whose store has servers.

In a step, the rows of the gradients go to the servers, and the rows that anybody has changed come back. The parameters
keep their own memory, and no second copy of a table exists. Which parameters are tables is known from the model when
the Trainer is created: all workers then have the same keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from echelon.cluster.messages import OptimizerSpec, PushHeader
from echelon.errors import UsageError
from echelon.kvstore.optimizer_spec import StepSettings
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.rows import Rows, rows_of, write_rows
from echelon.kvstore.servers.store import ServerStore
from echelon.server.optimizer.kernels import kernel_for
from echelon.server.optimizer.row_kernels import check_updates_rows, row_kernel_for
from echelon.train.trainer.servers.weights import same_bits, sample

log = logging.getLogger(__name__)


def find_tables(model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> list[str]:
    """Return the names of the parameters that get sparse gradients."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    sparse: set[int] = set()
    for module in filter(_is_sparse_embedding, model.modules()):
        tables = [p for p in module.parameters(recurse=False) if id(p) in names and p.ndim > 1]
        if tables and getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"the table of {names[id(tables[0])]!r} has max_norm={module.max_norm}, which changes rows in the "
                "forward pass of one worker only; use sparse=False"
            )
        sparse.update(map(id, tables))
    if isinstance(optimizer, SparseAdam):
        return list(parameters)
    return [name for number, name in names.items() if number in sparse]


def _is_sparse_embedding(module: nn.Module) -> bool:
    """Return whether a module gives its parameters sparse gradients: torch's embeddings, and classes made like them."""
    is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__
    return is_embedding and getattr(module, "sparse", None) is True


def check_optimizer(names: Sequence[str], spec: OptimizerSpec) -> None:
    """Raise UsageError if the optimizer does not support sparse gradients with its settings."""
    for name in names:
        try:
            check_updates_rows(spec.name)
            row_kernel_for(spec.name, kernel_for(spec.name, spec.groups[spec.members.get(name, 0)]))
        except UsageError as error:
            raise UsageError(f"{name!r} has sparse gradients: {error}") from error


class SparseTables:
    """Parameters whose gradients are pushed as rows."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], store: ServerStore, settings: StepSettings) -> None:
        """Create a key for each parameter, with rank 0's values. All workers call this."""
        self.parameters = parameters
        self._store = store
        self._settings = settings
        self.edits = 0  # identifies the edits of weights that the loop made before this step; 0: none
        self._in_flight: list[Ticket] = []
        self._seen: dict[str, _Mark] = {}
        if parameters:
            store.init(list(parameters), [p.detach() for p in parameters.values()], row_sparse=True)
        self._slots = dict(zip(parameters, store.slots(list(parameters)), strict=True))
        self._names = {slot.key: name for name, slot in self._slots.items()}

    def fetch_all(self) -> None:
        """Copy whole tables from the servers into the parameters."""
        self._store.rows.forget(list(self._slots.values()))
        self.fetch_changes()  # there are none, but from now on servers keep for this worker what changes
        if self._store.is_late or not self._store.is_first:  # the servers have the values of the first
            for name, slot in self._slots.items():
                self._store.rows.pull(slot, [self.parameters[name].data])
        self._see()

    def fetch_changes(self) -> None:
        """Copy the rows that changed since the last read into the parameters."""
        if self.parameters:
            self._in_flight = self._store.rows.pull_changes(list(self._slots.values()))
            self.wait()

    def push(self, samples: int, *, add_repeated: bool, gated: bool = False) -> None:
        """Push the gradients, and ask for the rows that change. `samples` is the size of the batch.

        `add_repeated`: a row that a gradient names several times is sent once, with the sum. `gated`: the servers hold
        the update until `ServerStore.clip`.
        """
        gradients: dict[int, Rows] = {}
        absent: dict[int, Rows] = {}
        for name, parameter in self.parameters.items():
            key = self._slots[name].key
            if parameter.grad is None:
                absent[key] = _no_rows(parameter)
            else:
                gradients[key] = rows_of(_sparse(name, parameter.grad), add_repeated=add_repeated)
        for part, weight, missing in ((gradients, float(samples), 0.0), (absent, 0.0, float(samples))):
            if part:
                rates, changes = self._settings.rates(), self._settings.changes()
                header = PushHeader(weight, rates, changes, missing, gated=gated, edits=self.edits)
                self._in_flight += self._store.push_rows(part, header)
        self.edits = 0

    def wait(self) -> list[Ticket]:
        """Wait for the rows of the last push and copy them into the parameters. Return the answers."""
        tickets, self._in_flight = self._in_flight, []
        self._store.wait(tickets)
        with torch.no_grad():
            for key, rows in self._store.rows.receive(tickets):
                write_rows(rows, [self.parameters[self._names[key]].data])
        self._see()
        return tickets

    def forget(self) -> None:
        """Forget the pushes of a worker that was removed from the job."""
        self._in_flight = []
        self.edits = 0

    def edited(self) -> list[str]:
        """Return the tables that the loop has written to since their rows arrived, and that were not returned before.

        There is no copy to compare with. Writes are noticed by version counter and address, and those that bypass the
        counter by a sample of the elements.
        """
        found = [name for name in self.parameters if not self._mark(name).equals(self._seen[name])]
        self._see()
        return found

    def _see(self) -> None:
        self._seen = {name: self._mark(name) for name in self.parameters}

    def _mark(self, name: str) -> _Mark:
        parameter = self.parameters[name]
        if (spec := self._slots[name].spec).shape != tuple(parameter.shape):
            raise UsageError(f"{name!r} is now {tuple(parameter.shape)}, but its key in the store is {spec}")
        values = parameter.detach()
        return _Mark(parameter._version, parameter.data_ptr(), sample(values, values).cpu().clone())


class _Mark(NamedTuple):
    """What is remembered of a table: its version counter, its address, and some elements."""

    version: int
    address: int
    elements: Tensor

    def equals(self, other: _Mark) -> bool:
        return self[:2] == other[:2] and same_bits(self.elements, other.elements)


def _sparse(name: str, gradient: Tensor) -> Tensor:
    """Return the gradient of a table. Raise UsageError if it is dense."""
    if not gradient.is_sparse:
        raise UsageError(
            f"the gradient of {name!r} is dense, but its embedding has sparse=True or its optimizer is SparseAdam; "
            "if another layer uses the same weights, create the embedding with sparse=False"
        )
    return gradient


def _no_rows(parameter: nn.Parameter) -> Rows:
    row = parameter.numel() // len(parameter)
    no_numbers = torch.empty(0, dtype=torch.int64, device="cpu")
    return Rows(no_numbers, torch.empty((0, row), dtype=parameter.dtype, device="cpu"))


def as_dense(name: str, gradient: Tensor, reported: set[str]) -> Tensor:
    """Return a sparse gradient of a dense key as a dense one. The first time, log it."""
    if name not in reported:
        reported.add(name)
        log.warning(
            "the gradient of %r is sparse, but the model has no nn.Embedding(sparse=True) of it, so it is sent as a "
            "dense gradient",
            name,
        )
    return gradient.to_dense()
