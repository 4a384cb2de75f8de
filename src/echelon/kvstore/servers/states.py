"""The optimizer state on the servers: gathered from all servers and scattered to them, by torch.optim's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.cluster.messages import GetStates, OptimizerSpec, PutStates, States
from echelon.cluster.placement import Layout, Slot
from echelon.kvstore.servers.client import Client
from echelon.kvstore.state_files import by_key, check_fit, counts_updates, state_names
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
        counts: dict[int, int] = {}
        for key, index in answer.entries:
            counts[key] = max(counts.get(key, 0), index + 1)
        for key, step in answer.steps.items():
            slot = layout.slots[key]
            names = state_names(spec, str(slot.spec.name)) if step else []
            if step and counts_updates(spec) and names:
                found[f"{slot.spec.name}/step"] = torch.tensor(float(step))
            for piece in layout.pieces(slot, ticket.server):
                stop = min(piece.stop, slot.start + slot.length)
                for index in range(counts.get(key, 0)):
                    frame = next(frames)
                    if index < len(names):
                        flat = found.setdefault(f"{slot.spec.name}/{names[index]}", _empty(slot)).view(-1)
                        received = torch.frombuffer(bytearray(frame), dtype=flat.dtype)
                        flat[piece.start - slot.start : stop - slot.start] = received[: stop - piece.start]
    return found


def scatter(source: str, client: Client, layout: Layout, spec: OptimizerSpec, states: Mapping[str, Tensor]) -> None:
    """Send each server its pieces of every key's states. Check them all before anything changes."""
    given = by_key(states)
    slots = {str(slot.spec.name): slot for slot in layout.slots.values()}
    check_fit(source, spec, {name: slot.spec for name, slot in slots.items()}, given)
    ordered = {name: [kinds[kind] for kind in state_names(spec, name)] for name, kinds in given.items()}
    requests = []
    for server in range(layout.num_servers):
        entries: list[tuple[int, int]] = []
        frames: list[memoryview] = []
        here: dict[int, int] = {}
        for name, tensors in ordered.items():
            slot = slots[name]
            pieces = layout.pieces(slot, server)
            if pieces:
                here[slot.key] = int(given[name].get("step", torch.tensor(_STEP_OF_UNCOUNTED)))
            for piece in pieces:
                for index, state in enumerate(tensors):
                    part = torch.zeros(piece.stop - piece.start, dtype=master_dtype(slot.spec.dtype))
                    stop = min(piece.stop, slot.start + slot.length)
                    part[: stop - piece.start] = state.reshape(-1)[piece.start - slot.start : stop - slot.start]
                    entries.append((slot.key, index))
                    frames.append(part.numpy().data)
        requests.append((server, PutStates(client.next_id(), here, entries), frames))
    client.wait([client.send(server, request, frames) for server, request, frames in requests])


def _empty(slot: Slot) -> Tensor:
    return torch.zeros(slot.spec.shape, dtype=master_dtype(slot.spec.dtype))
