"""The optimizer state on the servers: gathered from all servers and scattered to them, by torch.optim's names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from echelon.cluster.messages import GetStates, OptimizerSpec, PutStates, States
from echelon.cluster.placement import Layout, Slot
from echelon.kvstore.servers.client import Client
from echelon.kvstore.state_files import SCALARS, by_key, check_fit, counts_updates
from echelon.server.memory import master_dtype
from echelon.server.rows import RowMap

_STEP_OF_UNCOUNTED = 1  # any count above 0: the step is not the first one


def gather(client: Client, layout: Layout, spec: OptimizerSpec) -> dict[str, Tensor]:
    """Return every key's states from all servers as `<key>/<state>`. A key that was never updated has none."""
    tickets = [client.send(server, GetStates(client.next_id())) for server in range(layout.num_servers)]
    client.wait(tickets)
    found: dict[str, Tensor] = {}
    for ticket in tickets:
        answer = ticket.response
        assert isinstance(answer, States)
        frames = iter(ticket.frames)
        for key, entries in itertools.groupby(answer.entries, key=itemgetter(0)):
            slot = layout.slots[key]
            names = list(dict.fromkeys(name for _, name in entries))
            if counts_updates(spec):
                found[f"{slot.spec.name}/step"] = torch.tensor(float(answer.steps[key]))
            for part in _parts(layout, slot, ticket.server):
                for name in names:
                    state = found.setdefault(f"{slot.spec.name}/{name}", _empty(slot))
                    part.write(state, torch.frombuffer(bytearray(next(frames)), dtype=state.dtype))
    return found


def scatter(source: str, client: Client, layout: Layout, spec: OptimizerSpec, states: Mapping[str, Tensor]) -> None:
    """Send each server its pieces of every key's states. Check them all before anything changes."""
    given = by_key(states)
    slots = {str(slot.spec.name): slot for slot in layout.slots.values()}
    check_fit(source, spec, {name: slot.spec for name, slot in slots.items()}, given)
    requests = []
    for server in range(layout.num_servers):
        entries: list[tuple[int, str]] = []
        frames: list[memoryview] = []
        here: dict[int, int] = {}
        for name, kinds in given.items():
            slot = slots[name]
            parts = _parts(layout, slot, server)
            if parts:
                here[slot.key] = int(kinds.get("step", torch.tensor(_STEP_OF_UNCOUNTED)))
            for part in parts:
                for kind, state in kinds.items():
                    if kind not in SCALARS:
                        entries.append((slot.key, kind))
                        frames.append(part.read(state).to(master_dtype(slot.spec.dtype)).numpy().data)
        requests.append((server, PutStates(client.next_id(), here, entries), frames))
    client.wait([client.send(server, request, frames) for server, request, frames in requests])


class _Elements(NamedTuple):
    """A piece of a key: elements [start, stop) of it, and padding at the end."""

    start: int
    stop: int
    padded: int

    def write(self, state: Tensor, received: Tensor) -> None:
        state.view(-1)[self.start : self.stop] = received[: self.stop - self.start]

    def read(self, state: Tensor) -> Tensor:
        return pad(state.reshape(-1)[self.start : self.stop], (0, self.padded - (self.stop - self.start)))


class _Rows(NamedTuple):
    """The rows of a row-sparse key on one server."""

    rows: Tensor

    def write(self, state: Tensor, received: Tensor) -> None:
        state[self.rows] = received.view(len(self.rows), *state.shape[1:])

    def read(self, state: Tensor) -> Tensor:
        return state[self.rows].reshape(-1)


def _parts(layout: Layout, slot: Slot, server: int) -> Sequence[_Elements | _Rows]:
    """Return the parts in which a server sends and receives the states of a key."""
    if slot.spec.row_sparse:
        rows = RowMap.of(slot, layout).all_rows_of(server)
        return [_Rows(rows)] if len(rows) else []
    end = slot.start + slot.length
    return [
        _Elements(piece.start - slot.start, min(piece.stop, end) - slot.start, piece.stop - piece.start)
        for piece in layout.pieces(slot, server)
    ]


def _empty(slot: Slot) -> Tensor:
    return torch.zeros(slot.spec.shape, dtype=master_dtype(slot.spec.dtype))
