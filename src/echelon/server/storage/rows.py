"""Row-sparse keys (tables of embeddings): which server stores which row, and rows as they travel in frames.

A table is cut into blocks of rows, which are assigned to the servers in turn, so a row is whole on one server. A server
numbers its own rows from 0 without gaps. Messages name rows by these numbers, in ascending order.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.placement import ITEM_BYTES, Layout, Slot
from echelon.errors import UsageError
from echelon.server.storage.memory import TORCH_DTYPES, received

_NUMBER_BYTES = 8


class RowMap(NamedTuple):
    """The rows of one table on `num_servers` servers."""

    num_rows: int
    block: int  # rows
    num_servers: int
    first: int  # the server that stores the first block

    @classmethod
    def of(cls, slot: Slot, layout: Layout) -> RowMap:
        """Return the map of a row-sparse key."""
        segment = layout.segments[slot.segment]
        servers = layout.num_servers
        return cls(slot.spec.shape[0], segment.stripe // segment.row, servers, segment.index % servers)

    def count(self, server: int) -> int:
        """Return how many rows a server stores."""
        blocks = -(-self.num_rows // self.block)
        turn = (server - self.first) % self.num_servers
        here = len(range(turn, blocks, self.num_servers))
        has_last = here > 0 and (blocks - 1) % self.num_servers == turn
        return here * self.block - (blocks * self.block - self.num_rows if has_last else 0)

    def split(self, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield every server that stores rows, the positions of its rows in `rows`, and their numbers there."""
        blocks = rows // self.block
        servers = (blocks + self.first) % self.num_servers
        numbers = blocks // self.num_servers * self.block + rows % self.block
        for server in range(self.num_servers):
            if self.count(server):
                if self.num_servers == 1:
                    yield server, torch.arange(len(rows), device=rows.device), numbers
                else:
                    positions = (servers == server).nonzero().view(-1)
                    yield server, positions, numbers[positions]

    def rows_of(self, server: int, numbers: Tensor) -> Tensor:
        """Return the rows of the table that a server's numbers stand for."""
        turn = (server - self.first) % self.num_servers
        return (numbers // self.block * self.num_servers + turn) * self.block + numbers % self.block

    def all_rows_of(self, server: int) -> Tensor:
        """Return all rows of a server, in the order of its numbers."""
        return self.rows_of(server, torch.arange(self.count(server), device="cpu"))


class PushedRows:
    """The gradients of some tables as rows and values. A row that occurs twice has two values, which are added."""

    def __init__(self, parts: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.parts = parts  # by key

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows."""
        return sum(numbers.nbytes + values.nbytes for numbers, values in self.parts.values())


def pushed_rows(
    layout: Layout, server: int, keys: Sequence[int], counts: Sequence[int], frames: Sequence[memoryview]
) -> PushedRows:
    """Return the rows that a push brings. Raise UsageError if frames do not fit the keys or rows do not exist."""
    if len(counts) != len(keys) or len(frames) != 2 * len(keys):
        raise UsageError(
            f"a push of rows of {len(keys)} keys has {len(counts)} numbers of rows and {len(frames)} frames; expected "
            f"{len(keys)} and {2 * len(keys)}"
        )
    parts = {}
    for key, count, numbers, values in zip(keys, counts, frames[::2], frames[1::2], strict=True):
        slot = layout.slots[key]
        rows = row_numbers(slot, RowMap.of(slot, layout).count(server), numbers)
        if len(rows) != count:
            raise UsageError(f"key {slot.spec.name!r}: {count} rows were announced, but {len(rows)} came")
        parts[key] = rows, row_values(slot, count, values)
    return PushedRows(parts)


def row_numbers(slot: Slot, num_rows: int, frame: memoryview) -> Tensor:
    """Return the numbers of rows in a frame. Raise UsageError unless they ascend and all exist on this server."""
    if len(frame) % _NUMBER_BYTES:
        raise UsageError(f"key {slot.spec.name!r}: the numbers of rows have {len(frame)} bytes, not a multiple of 8")
    if not len(frame):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    numbers = received(frame, "int64")
    if bool((numbers[1:] < numbers[:-1]).any()):
        raise UsageError(f"key {slot.spec.name!r}: the numbers of rows are not in ascending order")
    if int(numbers[0]) < 0 or int(numbers[-1]) >= num_rows:
        raise UsageError(
            f"key {slot.spec.name!r}: rows {int(numbers[0])} to {int(numbers[-1])} were named, but this server stores "
            f"rows 0 to {num_rows - 1}"
        )
    return numbers


def row_values(slot: Slot, count: int, frame: memoryview) -> Tensor:
    """Return the values of rows in a frame, one row each. Raise UsageError if it has another size."""
    spec = slot.spec
    row = spec.length // spec.shape[0]
    expected = count * row * ITEM_BYTES[spec.dtype]
    if len(frame) != expected:
        raise UsageError(
            f"key {spec.name!r}: the values of {count} rows have {len(frame)} bytes; expected {expected} bytes"
        )
    if not count:
        return torch.empty((0, row), dtype=TORCH_DTYPES[spec.dtype], device="cpu")
    return received(frame, spec.dtype).view(count, row)


def as_frame(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, to send."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


class ChangeLog:
    """The rows of one table that changed, by version, as long as a worker may ask for them.

    A worker names the version of the rows that it has, so a repeated request gets the same rows again. Rows are kept
    until all workers that ask have them. If one worker falls far behind, only the last change of a row is kept, so the
    log has at most twice as many entries as the table has rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.version = 0
        self._num_rows = num_rows
        self._forgotten = 0  # changes up to this version are not in the log
        self._versions: list[int] = []  # of the entries, ascending
        self._entries: list[Tensor] = []
        self._size = 0  # rows in all entries
        self._readers: dict[int, int] = {}  # worker -> version that it has

    def add(self, rows: Tensor) -> None:
        """Record that rows, which are all different, have changed."""
        self.version += 1
        if not self._readers:
            self._forgotten = self.version
        elif len(rows):
            self._versions.append(self.version)
            self._entries.append(rows)
            self._size += len(rows)
            if self._size > 2 * self._num_rows:
                self._keep_last_changes()

    def begin_at(self, version: int) -> None:
        """Continue at a version of another log. A worker that asks for older changes gets all rows."""
        self.version = self._forgotten = version

    def expect(self, worker: int, version: int) -> None:
        """Keep all rows that are newer than this version for a worker, which has those up to it."""
        self._readers[worker] = version
        self._trim()

    def leave(self, worker: int) -> None:
        """Keep no rows for this worker any more."""
        self._readers.pop(worker, None)
        self._trim()

    def since(self, version: int) -> Tensor:
        """Return the rows that changed after a version, in ascending order."""
        if version < self._forgotten:
            return torch.arange(self._num_rows)
        entries = self._entries[bisect.bisect_right(self._versions, version) :]
        if len(entries) > 1:
            joined: Tensor = torch.cat(entries).unique()
            return joined
        return entries[0] if entries else torch.empty(0, dtype=torch.int64)

    def _trim(self) -> None:
        oldest = min(self._readers.values(), default=self.version)
        count = bisect.bisect_right(self._versions, oldest)
        if count:
            self._size -= sum(len(rows) for rows in self._entries[:count])
            del self._versions[:count], self._entries[:count]
        self._forgotten = max(self._forgotten, min(oldest, self.version))

    def _keep_last_changes(self) -> None:
        latest = torch.zeros(self._num_rows, dtype=torch.int64)
        for version, rows in zip(self._versions, self._entries, strict=True):
            latest[rows] = version
        changed = latest.nonzero().view(-1)
        changed = changed[latest[changed].argsort(stable=True)]
        versions, counts = latest[changed].unique_consecutive(return_counts=True)
        self._versions = versions.tolist()
        self._entries = list(changed.split(counts.tolist()))
        self._size = len(changed)
