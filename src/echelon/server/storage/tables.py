"""The tables of one server (row-sparse keys): updates of rows, and the rows that answers bring.

No step reads or writes a whole table: its cost follows the rows that workers push.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.messages import FROM_NOW
from echelon.cluster.placement import Layout
from echelon.errors import UsageError
from echelon.server.optimizer.kernel import Step
from echelon.server.optimizer.row_kernels import RowKernel
from echelon.server.storage.finite import Origin
from echelon.server.storage.memory import TORCH_DTYPES, master_dtype, zeros
from echelon.server.storage.rows import ChangeLog, PushedRows, RowMap, as_frame


class WeightedRows(NamedTuple):
    """A worker's rows and their weight in the sum."""

    rows: PushedRows
    weight: float


class RowUpdate(NamedTuple):
    """How tables are updated. `kernel` None: the sum replaces the values, and rows without a value become zero."""

    gradients: tuple[WeightedRows, ...]
    kernel: RowKernel | None
    step: Step
    origin: Origin | None = None  # with it, the rows are checked for NaN and infinity


class Table:
    """One table: its rows on this server, and a log of the rows that change."""

    def __init__(self, values: Tensor, num_rows: int) -> None:
        self.values = values  # one row of elements per row
        self.log = ChangeLog(num_rows)
        self._states: dict[str, Tensor] = {}
        self.pushed: Tensor | None = None  # without an optimizer, the rows that are not zero, once that is known

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """Return optimizer states by name. They are created at first use, as zeros."""
        for name in names:
            if name not in self._states:
                self._states[name] = zeros(self.values.numel(), self.values.dtype).view_as(self.values)
        return [self._states[name] for name in names]

    def clear_states(self) -> None:
        """Set all optimizer states to zero, where they are."""
        for state in self._states.values():
            state.zero_()


class Tables:
    """All tables of a server."""

    def __init__(self, layout: Layout, server: int) -> None:
        self._layout = layout
        self._server = server
        self._tables: dict[int, Table] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._tables

    def __getitem__(self, key: int) -> Table:
        return self._tables[key]

    def among(self, keys: Sequence[int]) -> set[int]:
        """Return those of some keys that are tables."""
        return self._tables.keys() & keys if self._tables else set()

    def make(self, key: int) -> Table:
        """Return a table of zeros. Raise UsageError if there is no memory."""
        slot = self._layout.slots[key]
        count = RowMap.of(slot, self._layout).count(self._server)
        row = self._layout.segments[slot.segment].row
        try:
            return Table(zeros(count * row, master_dtype(slot.spec.dtype)).view(count, row), count)
        except (OSError, OverflowError, MemoryError) as error:
            raise UsageError(f"no memory for {count} rows of key {slot.spec.name!r}: {error}") from error

    def add(self, key: int, table: Table) -> None:
        """Add a table."""
        self._tables[key] = table

    def keys(self) -> list[int]:
        """Return the keys of all tables."""
        return list(self._tables)

    def leave(self, worker: int) -> None:
        """Keep no rows for a worker that left the job."""
        for table in self._tables.values():
            table.log.leave(worker)

    def put(self, key: int, start: int, values: Tensor) -> None:
        """Overwrite adjacent rows."""
        table = self._tables[key]
        table.values[start : start + len(values)] = values
        table.pushed = None
        table.log.add(torch.arange(start, start + len(values)))

    def update(self, keys: Sequence[int], update: RowUpdate) -> None:
        """Sum the pushed rows of tables in rank order, and update these rows."""
        for key in keys:
            table = self._tables[key]
            parts = [(*gradient.rows.parts[key], gradient.weight) for gradient in update.gradients]
            gradient = _sum(parts, table.values, update.kernel)
            rows = gradient._indices()[0]
            if update.kernel is None:
                _replace(table, rows, gradient._values())
            else:
                states = table.state(update.kernel.state_names)
                update.kernel.update(table.values, gradient, states, update.step)
            table.log.add(rows.unique_consecutive())

    def squared_norm(self, key: int, gradients: Sequence[WeightedRows]) -> float:
        """Return the squared norm of the weighted sum of a table's pushed rows."""
        parts = [(*gradient.rows.parts[key], gradient.weight) for gradient in gradients]
        wide = _sum(parts, self._tables[key].values, None)._values().double().flatten()
        return float(torch.dot(wide, wide))

    def frames(self, rows: Mapping[int, Tensor]) -> list[memoryview]:
        """Return an answer's frames: the version and number of rows of each key, then the rows and their values."""
        heads: list[int] = []
        frames: list[memoryview] = []
        for key, numbers in rows.items():
            table = self._tables[key]
            heads += [table.log.version, len(numbers)]
            values = table.values[numbers].to(TORCH_DTYPES[self._layout.slots[key].spec.dtype])
            frames += [as_frame(numbers), as_frame(values)]
        return [as_frame(torch.tensor(heads, dtype=torch.int64)), *frames]


class ChangedRows:
    """The output of a request for the rows of tables that are newer than those that a worker has."""

    def __init__(self, tables: Tables, worker: int, since: Mapping[int, int]) -> None:
        self._tables = tables
        self._since = {key: tables[key].log.version if v == FROM_NOW else v for key, v in since.items()}
        for key, version in self._since.items():
            tables[key].log.expect(worker, version)

    def buffers(self) -> list[memoryview]:
        """Return the rows as they are now, as frames."""
        return self._tables.frames({key: self._tables[key].log.since(v) for key, v in self._since.items()})


class ChosenRows:
    """The output of a request for certain rows of a table."""

    def __init__(self, tables: Tables, key: int, rows: Tensor) -> None:
        self._tables = tables
        self._rows = {key: rows}

    def buffers(self) -> list[memoryview]:
        """Return the rows as they are now, as frames."""
        return self._tables.frames(self._rows)


RowOutput = ChangedRows | ChosenRows


def _sum(parts: Sequence[tuple[Tensor, Tensor, float]], table: Tensor, kernel: RowKernel | None) -> Tensor:
    """Return the weighted sum of pushed rows as a sparse gradient of the table."""
    values = [value.to(table.dtype) if weight == 1 else value.to(table.dtype) * weight for _, value, weight in parts]
    rows = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts])
    total = torch.sparse_coo_tensor(
        rows[None], values[0] if len(values) == 1 else torch.cat(values), table.shape, check_invariants=False
    )
    # One gradient stays as it is where torch, too, adds the values of a repeated row one after the other.
    keeps = kernel is not None and kernel.adds_repeated_rows and len(parts) == 1
    return total if keeps else total.coalesce()


def _replace(table: Table, rows: Tensor, values: Tensor) -> None:
    """Replace a table by some rows; all others become zero."""
    if table.pushed is None:
        table.values.zero_()
        table.log.add(torch.arange(len(table.values)))
    else:
        table.values[table.pushed] = 0
        table.log.add(table.pushed)
    table.values[rows] = values
    table.pushed = rows
