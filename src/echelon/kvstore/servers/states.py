"""The optimizer state on the servers: gathered from all servers and scattered to them, by torch.optim's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.cluster.messages import GetStates, OptimizerSpec, PutStates, StateEntry, States
from echelon.cluster.placement import Layout, Slot
from echelon.kvstore.servers.client import Client
from echelon.kvstore.state_files import by_key, check_fit, kernel_of
from echelon.server.optimizer.kernel import Kernel
from echelon.server.storage.memory import master_dtype
from echelon.server.storage.rows import RowMap
from echelon.server.storage.states import as_frame, dtype_name, from_frame


def gather(client: Client, layout: Layout) -> dict[str, Tensor]:
    """Return every key's states from all servers as `<key>/<state>`. A key that was never updated has none."""
    tickets = [client.send(server, GetStates(client.next_id())) for server in range(layout.num_servers)]
    client.wait(tickets)
    found: dict[str, Tensor] = {}
    for ticket in tickets:
        answer = ticket.response
        assert isinstance(answer, States)
        frames = ticket.frames if answer.entries else []
        for entry, frame in zip(answer.entries, frames, strict=True):
            slot, tensor = layout.slots[entry.key], from_frame(entry, memoryview(frame))
            name = f"{slot.spec.name}/{entry.name}"
            if entry.start is None:
                found[name] = tensor
                continue
            state = found.setdefault(name, torch.zeros(slot.spec.shape, dtype=tensor.dtype, device="cpu"))
            if slot.spec.row_sparse:
                rows = RowMap.of(slot, layout).all_rows_of(ticket.server)
                state[rows] = tensor.view(len(rows), *slot.spec.shape[1:])
            else:
                state.view(-1)[entry.start : entry.start + tensor.numel()] = tensor
    return found


def scatter(source: str, client: Client, layout: Layout, spec: OptimizerSpec, states: Mapping[str, Tensor]) -> None:
    """Send each server its part of every key's states. Check them all before anything changes."""
    given = by_key(states)
    slots = {str(slot.spec.name): slot for slot in layout.slots.values()}
    check_fit(source, spec, {name: slot.spec for name, slot in slots.items()}, given)
    requests = []
    for server in range(layout.num_servers):
        entries: list[StateEntry] = []
        frames: list[memoryview] = []
        for key, kinds in given.items():
            kernel = kernel_of(spec, key)
            if kernel is None:
                continue
            for name, state in kinds.items():
                for start, part in _parts(name, state, layout, slots[key], server, kernel):
                    entries.append(StateEntry(slots[key].key, name, dtype_name(part), tuple(part.shape), start))
                    frames.append(as_frame(part))
        requests.append((server, PutStates(client.next_id(), entries), frames))
    client.wait([client.send(server, request, frames) for server, request, frames in requests])


def _parts(
    name: str, state: Tensor, layout: Layout, slot: Slot, server: int, kernel: Kernel
) -> list[tuple[int | None, Tensor]]:
    """Return the parts of a state that a server stores, each with its first element; None: the state as it is."""
    is_cut, dtype = name in kernel.possible_states, master_dtype(slot.spec.dtype)
    if slot.spec.row_sparse and is_cut:
        rows = RowMap.of(slot, layout).all_rows_of(server)
        return [(0, state[rows].to(dtype).reshape(len(rows), -1))] if len(rows) else []
    pieces = layout.pieces(slot, server, exact=is_cut)
    if not is_cut:
        return [(None, state)] if pieces else []
    flat = state.reshape(-1).to(dtype)
    bounds = [(piece.start - slot.start, piece.stop - slot.start) for piece in pieces]
    return [(start, flat[start:stop]) for start, stop in bounds]
