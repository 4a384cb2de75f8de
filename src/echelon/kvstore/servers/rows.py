"""How rows of row-sparse keys reach the servers and come back: one message per server that stores rows of them.

Rows always travel as frames, because a step has few of them. The worker has no second copy of a table: rows that come
back are written where the caller keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.messages import FROM_NOW, Init, PullChanges, PullRows, Push, PushHeader, PutRows
from echelon.cluster.placement import ITEM_BYTES, Slot
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers.client import Client, Ticket
from echelon.kvstore.servers.wire import PLAIN, Wire
from echelon.server.storage.memory import TORCH_DTYPES
from echelon.server.storage.rows import RowMap, as_frame, row_numbers, row_values

CREATE_S = 60.0  # that a worker which joins a job waits for the keys of the others
PART_BYTES = 4 << 20  # of a whole table that is sent or fetched in parts


class Rows(NamedTuple):
    """Some rows of a table: their numbers (int64) and one line of values for each."""

    numbers: Tensor
    values: Tensor


class RowWire:
    """A worker's connection to all servers, in terms of rows of row-sparse keys."""

    def __init__(self, client: Client, wire: Wire) -> None:
        self._client = client
        self._wire = wire
        self._versions: dict[tuple[int, int], int] = {}  # (server, key) -> of the rows that this worker has
        self._asked: dict[int, list[int]] = {}  # ticket id -> the keys that its answer brings rows of

    def restart(self) -> None:
        """Forget the versions of rows: the servers do not know this worker any more."""
        self._versions.clear()
        self._asked.clear()

    # --- whole tables, in parts

    def init(self, slot: Slot, values: Tensor) -> None:
        """Create a key with its first values."""
        layout = self._wire.layout
        for server in self._servers([slot]):
            self._client.call(server, Init(self._client.next_id(), layout.segments, [slot], True))
        self.put(slot, values)

    def wait_until_created(self, slot: Slot) -> None:
        """Wait until another worker has created a key, which then may still send its values."""
        deadline = time.monotonic() + CREATE_S
        while True:
            try:
                self.fetch(slot, torch.zeros(1, dtype=torch.int64, device="cpu"))
                return
            except UsageError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def put(self, slot: Slot, values: Tensor) -> None:
        """Overwrite a whole table."""
        table = values.detach().reshape(slot.spec.shape[0], -1)
        rows = self._map(slot)
        for server in self._servers([slot]):
            everything = rows.all_rows_of(server)
            start = 0
            for part in everything.split(self._rows_per_part(slot)):
                frame = as_frame(table[part.to(table.device)].cpu().to(TORCH_DTYPES[slot.spec.dtype]))
                self._client.call(server, PutRows(self._client.next_id(), slot.key, start), [frame])
                start += len(part)

    def pull(self, slot: Slot, out: Sequence[Tensor]) -> None:
        """Fetch a whole table."""
        for part in torch.arange(slot.spec.shape[0], device="cpu").split(self._rows_per_part(slot)):
            for rows in self.fetch(slot, part):
                write_rows(rows, out)

    # --- rows

    def fetch(self, slot: Slot, rows: Tensor) -> list[Rows]:
        """Return certain rows, which are all different and ascend, in one part per server."""
        tickets = []
        for server, _, numbers in self._map(slot).split(rows):
            if len(numbers):
                message = PullRows(self._client.next_id(), self._wire.clock(slot), slot.key)
                tickets.append(self._client.send(server, message, [as_frame(numbers)]))
        self._client.wait(tickets)
        return [part for ticket in tickets for _, part in self._parts(ticket, [slot.key], note_versions=False)]

    def push(
        self,
        gradients: Mapping[int, Rows],
        header: PushHeader = PLAIN,
        *,
        pull: bool,
        priority: int = 0,
    ) -> list[Ticket]:
        """Send the rows of the gradients of some keys, which have equal clocks, without waiting.

        Every server that stores rows of a key takes part in the round, even if no row is for it. `pull`: the answers
        bring the rows that changed since this worker's last read (`receive`).
        """
        slots = [self._wire.layout.slots[key] for key in gradients]
        self._wire.wait_for_room(slots)
        parts: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # server -> key -> numbers and values
        for slot, rows in zip(slots, gradients.values(), strict=True):
            for server, positions, numbers in self._map(slot).split(rows.numbers):
                values = rows.values if len(positions) == len(rows.numbers) else rows.values[positions]
                parts.setdefault(server, {})[slot.key] = numbers, values
        sent = []
        clock = self._wire.clock(slots[0])
        for server, by_key in parts.items():
            keys = list(by_key)
            counts = [len(numbers) for numbers, _ in by_key.values()]
            frames = [as_frame(tensor) for pair in by_key.values() for tensor in pair]
            self._wire.pushed_bytes += sum(values.nbytes for _, values in by_key.values())
            since = [self._versions.get((server, key), FROM_NOW) for key in keys] if pull else []
            request = self._client.next_id()
            message = Push(request, clock, keys, header, pull, True, counts, since, priority)
            sent.append(self._client.send(server, message, frames))
            if pull:
                self._asked[request] = keys
        self._wire.count_push(slots, sent)
        if header.gated:
            self._wire.gated.update(gradients)
        return sent

    def pull_changes(self, slots: Sequence[Slot]) -> list[Ticket]:
        """Ask for the rows of some keys that changed since this worker's last read. The answers go to `receive`.

        The first request brings none: those that change afterwards count.
        """
        tickets = []
        clocks = {self._wire.clock(slot) for slot in slots}
        for clock in clocks:
            chosen = [slot for slot in slots if self._wire.clock(slot) == clock]
            for server in self._servers(chosen):
                keys = [slot.key for slot in chosen if self._map(slot).count(server)]
                since = [self._versions.get((server, key), FROM_NOW) for key in keys]
                request = PullChanges(self._client.next_id(), clock, keys, since)
                tickets.append(self._client.send(server, request))
                self._asked[request.id] = keys
        return tickets

    def receive(self, tickets: Iterable[Ticket]) -> Iterator[tuple[int, Rows]]:
        """Yield each key and rows of it that answers have brought. The worker has these rows from now on."""
        for ticket in tickets:
            keys = self._asked.pop(ticket.id, None)
            if keys is not None:
                yield from self._parts(ticket, keys, note_versions=True)

    def forget(self, slots: Sequence[Slot]) -> None:
        """Forget what this worker has read of keys: the next request for changes brings none."""
        keys = {slot.key for slot in slots}
        self._versions = {place: version for place, version in self._versions.items() if place[1] not in keys}

    # --- internals

    def _parts(self, ticket: Ticket, keys: Sequence[int], *, note_versions: bool) -> Iterator[tuple[int, Rows]]:
        """Decode an answer. Rows that do not exist raise JobError: the server is broken or of another version."""
        frames = [memoryview(frame) for frame in ticket.frames]
        if len(frames) != 1 + 2 * len(keys) or len(frames[0]) != 16 * len(keys):
            raise JobError(f"server {ticket.server} sent {len(frames)} frames for rows of {len(keys)} keys")
        heads = torch.frombuffer(bytearray(frames[0]), dtype=torch.int64).view(-1, 2).tolist()
        for key, (version, count), numbers, values in zip(keys, heads, frames[1::2], frames[2::2], strict=True):
            slot = self._wire.layout.slots[key]
            self._wire.pulled_bytes += len(values)
            rows = self._map(slot)
            local = row_numbers(slot, rows.count(ticket.server), numbers)
            yield key, Rows(rows.rows_of(ticket.server, local), row_values(slot, count, values))
            if note_versions:
                self._versions[ticket.server, key] = version

    def _map(self, slot: Slot) -> RowMap:
        return RowMap.of(slot, self._wire.layout)

    def _servers(self, slots: Sequence[Slot]) -> list[int]:
        """Return the servers that store rows of any of these keys."""
        maps = [self._map(slot) for slot in slots]
        return [server for server in range(self._wire.layout.num_servers) if any(rows.count(server) for rows in maps)]

    def _rows_per_part(self, slot: Slot) -> int:
        row = slot.spec.length // slot.spec.shape[0]
        return max(1, PART_BYTES // (row * ITEM_BYTES[slot.spec.dtype]))


def write_rows(rows: Rows, tables: Iterable[Tensor]) -> None:
    """Copy rows to their places in tables."""
    for table in tables:
        values = rows.values.view(len(rows.numbers), *table.shape[1:])
        table.detach().index_copy_(0, rows.numbers.to(table.device), values.to(table.device, table.dtype))


def rows_of(gradient: Tensor, *, add_repeated: bool) -> Rows:
    """Return the rows of a sparse gradient in ascending order, on the CPU.

    `add_repeated`: add the values of a row that occurs twice, as `coalesce` does; otherwise both are kept.
    """
    if add_repeated or gradient.is_coalesced():
        gradient = gradient.coalesce()
        numbers, values = gradient._indices()[0], gradient._values()
    else:
        numbers, order = gradient._indices()[0].sort(stable=True)
        values = gradient._values()[order]
    return Rows(numbers.cpu(), values.detach().reshape(len(numbers), prod(gradient.shape[1:])).cpu())
