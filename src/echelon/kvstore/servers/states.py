"""The optimizer state on the servers: gathered from all servers and scattered to them, by torch.optim's names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor

from echelon.cluster.messages import GetStates, OptimizerSpec, PutStates, States
from echelon.cluster.placement import Layout, Piece, Slot
from echelon.kvstore.servers.client import Client
from echelon.kvstore.state_files import SCALARS, by_key, check_fit, counts_updates
from echelon.server.memory import master_dtype

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
            for piece in layout.pieces(slot, ticket.server):
                stop = min(piece.stop, slot.start + slot.length)
                for name in names:
                    flat = found.setdefault(f"{slot.spec.name}/{name}", _empty(slot)).view(-1)
                    received = torch.frombuffer(bytearray(next(frames)), dtype=flat.dtype)
                    flat[piece.start - slot.start : stop - slot.start] = received[: stop - piece.start]
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
            pieces = layout.pieces(slot, server)
            if pieces:
                here[slot.key] = int(kinds.get("step", torch.tensor(_STEP_OF_UNCOUNTED)))
            for piece in pieces:
                for kind, state in kinds.items():
                    if kind not in SCALARS:
                        entries.append((slot.key, kind))
                        frames.append(_part(state, slot, piece).numpy().data)
        requests.append((server, PutStates(client.next_id(), here, entries), frames))
    client.wait([client.send(server, request, frames) for server, request, frames in requests])


def _part(state: Tensor, slot: Slot, piece: Piece) -> Tensor:
    """Return a piece of a state, with zeros for the padding after the key."""
    part = torch.zeros(piece.stop - piece.start, dtype=master_dtype(slot.spec.dtype))
    stop = min(piece.stop, slot.start + slot.length)
    part[: stop - piece.start] = state.reshape(-1)[piece.start - slot.start : stop - slot.start]
    return part


def _empty(slot: Slot) -> Tensor:
    return torch.zeros(slot.spec.shape, dtype=master_dtype(slot.spec.dtype))
