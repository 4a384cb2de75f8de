"""The whole state of a shard, as messages that give another server the same state.

A snapshot has everything that was applied. Pushes that wait for their round follow as the requests that they are, with
frames in place of shared memory. So do the workers' offers of their memory (`Attach`). Of a worker that has left or
retired no request would be accepted, so its waiting pushes are part of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from echelon.cluster.messages import Malformed, OpenShard, Push, Request, Restore, StateEntry, decode_request, encode
from echelon.cluster.placement import Piece
from echelon.server.storage.factored import Factored
from echelon.server.storage.memory import Mapped, as_bytes
from echelon.server.storage.optimization import PushedGradient

if TYPE_CHECKING:
    from echelon.server.shard.shard import Shard

Input = tuple[int, Request, Sequence[memoryview]]  # worker, request, frames
_decoder = msgspec.msgpack.Decoder(dict[str, Any], strict=False)


def inputs_of(shard: Shard) -> Iterator[Input]:
    """Yield the inputs that give an empty server the state of a shard. All tensors are copies."""
    yield 0, OpenShard(0, shard.workers), ()
    if shard.config is None or shard.requests is None:
        return
    yield 0, *_restore_of(shard)
    for worker, attach in shard.attached():
        yield worker, attach, ()
    for worker, waiting in shard.requests.waiting_pushes():
        if shard.requests.engine.is_active(worker):
            yield worker, *with_frames(shard, waiting)


def with_frames(shard: Shard, waiting: PushedGradient) -> tuple[Push, list[memoryview]]:
    """Return a push that waits, with copies of its frames or of what it has in its worker's memory."""
    push, frames = waiting.push, waiting.frames
    assert push is not None
    if isinstance(waiting.window, Mapped):
        push, frames = replace(push, framed=True), shard.tensors.frames(waiting.window, push.keys)
    elif isinstance(waiting.window, Factored):
        push, frames = replace(push, framed=True), [as_bytes(waiting.window.factors)]
    return push, [memoryview(bytearray(frame)) for frame in frames]


def _restore_of(shard: Shard) -> tuple[Restore, list[memoryview]]:
    assert shard.config is not None
    assert shard.requests is not None
    layout, storage = shard.layout, shard.storage
    weights, tables = storage.stored_weights(), storage.tables.keys()
    entries: list[StateEntry] = []
    states: list[memoryview] = []
    if shard.optimization.has_optimizer:
        entries, states = shard.states.get(shard.requests.lanes)
    waiting = [
        (worker, *with_frames(shard, one))
        for worker, one in shard.requests.waiting_pushes()
        if not shard.requests.engine.is_active(worker)
    ]
    plain = {
        "layout": layout.to_plain(),
        "requests": shard.requests.to_plain(),
        "progress": shard.optimization.to_plain(),
        "gathering": shard.gathering.to_plain(),
        "weights": list(weights),
        "tables": [[key, storage.tables[key].log.version] for key in tables],
        "waiting": [[worker, encode(push), len(frames)] for worker, push, frames in waiting],
    }
    message = Restore(
        0,
        shard.config,
        shard.optimization.spec,
        layout.segments,
        list(layout.slots.values()),
        entries,
        msgspec.msgpack.encode(plain),
    )
    stored = [*weights.values(), *(storage.tables[key].values.view(-1) for key in tables)]
    copies = [as_bytes(tensor.clone()) for tensor in stored]
    return message, [*(frame for _, _, frames in waiting for frame in frames), *copies, *states]


def restore(shard: Shard, message: Restore, frames: Sequence[memoryview]) -> None:
    """Give an empty shard the state of a snapshot."""
    try:
        plain = _decoder.decode(message.state)
    except msgspec.DecodeError as error:
        raise Malformed(f"not the state of a shard ({error})") from error
    shard.layout.adopt(message.segments, message.slots)
    shard.configure(message.config)
    if message.optimizer is not None:
        shard.optimization.set_optimizer(message.optimizer)
    requests = shard.requests
    assert requests is not None
    for slot in message.slots:
        requests.lanes.add(slot.key)
        shard.optimization.add(slot.key)
    requests.load_plain(plain["requests"])
    shard.optimization.load_plain(plain["progress"])
    left = list(frames)
    waiting = [(worker, body, [left.pop(0) for _ in range(count)]) for worker, body, count in plain["waiting"]]
    for index in plain["weights"]:
        length = shard.layout.stored(shard.layout.segments[index], shard.rank)
        _fill(shard.storage.weights(Piece(index, 0, length, 0)), left.pop(0))
    for key, version in plain["tables"]:
        table = shard.storage.tables.make(key)
        _fill(table.values.view(-1), left.pop(0))
        table.log.begin_at(version)
        shard.storage.tables.add(key, table)
    shard.states.fill(message.entries, left)
    shard.gathering.load_plain(plain["gathering"])
    shard.layout.load_plain(plain["layout"])
    for worker, body, pushed in waiting:
        push = decode_request(body)
        if not isinstance(push, Push):
            raise Malformed(f"a snapshot has a {type(push).__name__} among the pushes that wait")
        requests.put_back(worker, shard.gradient_of(push, pushed))


def _fill(place: Tensor, frame: memoryview) -> None:
    if len(frame) != place.nbytes:
        raise Malformed(f"a tensor of a snapshot has {len(frame)} bytes; expected {place.nbytes}")
    if place.numel():
        place.copy_(torch.frombuffer(bytearray(frame), dtype=place.dtype))
