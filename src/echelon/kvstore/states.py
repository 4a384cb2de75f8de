"""The servers' optimizer state in a file: one tensor a (key, state), names readable, digests by safetensors' reader."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from echelon.cluster.messages import GetStates, OptimizerSpec, PutStates, States
from echelon.cluster.placement import Layout, Slot
from echelon.errors import DataError, UsageError
from echelon.kvstore.client import Client
from echelon.server.memory import master_dtype


def save(path: Path, client: Client, layout: Layout, spec: OptimizerSpec) -> None:
    """Gather the state from all servers and write it, whole or not at all."""
    tensors, steps = gather(client, layout)
    metadata = {"optimizer": msgspec.json.encode(spec).decode(), "steps": msgspec.json.encode(steps).decode()}
    temporary = path.with_name(path.name + ".part")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, path)


def gather(client: Client, layout: Layout) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Every key's states, put together from the servers' pieces, and its step count."""
    tickets = [client.send(server, GetStates(client.next_id())) for server in range(layout.num_servers)]
    client.wait(tickets)
    tensors: dict[str, Tensor] = {}
    steps: dict[str, int] = {}
    for ticket in tickets:
        answer = ticket.response
        assert isinstance(answer, States)
        frames = iter(ticket.frames)
        counts: dict[int, int] = {}
        for key, index in answer.entries:
            counts[key] = max(counts.get(key, 0), index + 1)
        for key, step in answer.steps.items():
            slot = layout.slots[key]
            steps[str(slot.spec.name)] = step
            for piece in layout.pieces(slot, ticket.server):
                for index in range(counts.get(key, 0)):
                    flat = tensors.setdefault(_name(slot, index), _empty(slot)).view(-1)
                    stop = min(piece.stop, slot.start + slot.length)
                    received = torch.frombuffer(bytearray(next(frames)), dtype=flat.dtype)
                    flat[piece.start - slot.start : stop - slot.start] = received[: stop - piece.start]
    return tensors, steps


def load(path: Path, client: Client, layout: Layout, spec: OptimizerSpec) -> None:
    """Read a file and hand each server its pieces; a file that does not fit is refused before anything changes."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise DataError(f"{path}: no optimizer states can be read from it ({error})") from error
    saved = msgspec.json.decode(metadata.get("optimizer", "null"), type=OptimizerSpec | None)
    if saved is None or saved.name != spec.name:
        raise UsageError(f"{path} has states of {saved.name if saved else 'no optimizer'}; the servers run {spec.name}")
    steps: dict[str, int] = msgspec.json.decode(metadata["steps"])
    scatter(path, client, layout, tensors, steps)


def scatter(path: Path, client: Client, layout: Layout, tensors: dict[str, Tensor], steps: dict[str, int]) -> None:
    """Hand each server its pieces of every key's states."""
    slots = [slot for slot in layout.slots.values() if str(slot.spec.name) in steps]
    unknown = sorted(steps.keys() - {str(slot.spec.name) for slot in slots})
    if unknown or not slots:
        raise UsageError(f"{path} has states for key {unknown[:1]}, which this job does not have: another model's?")
    requests = []
    for server in range(layout.num_servers):
        entries: list[tuple[int, int]] = []
        frames: list[memoryview] = []
        here: dict[int, int] = {}
        for slot in slots:
            pieces = layout.pieces(slot, server)
            if pieces:
                here[slot.key] = steps[str(slot.spec.name)]
            for piece in pieces:
                index = 0
                while (state := tensors.get(_name(slot, index))) is not None:
                    if state.numel() != slot.length:
                        raise UsageError(
                            f"{path}: state {index} of key {slot.spec.name!r} has {state.numel()} elements, "
                            f"the key has {slot.length}"
                        )
                    part = torch.zeros(piece.stop - piece.start, dtype=state.dtype)
                    stop = min(piece.stop, slot.start + slot.length)
                    part[: stop - piece.start] = state.view(-1)[piece.start - slot.start : stop - slot.start]
                    entries.append((slot.key, index))
                    frames.append(part.numpy().data)
                    index += 1
        requests.append((server, PutStates(client.next_id(), here, entries), frames))
    client.wait([client.send(server, request, frames) for server, request, frames in requests])


def _name(slot: Slot, index: int) -> str:
    return f"{slot.spec.name}/{index}"


def _empty(slot: Slot) -> Tensor:
    return torch.zeros(slot.spec.shape, dtype=master_dtype(slot.spec.dtype))
