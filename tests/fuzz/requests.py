"""Requests of a hostile worker: random bytes, random requests, and plausible ones of which one thing is wrong.

Plausible requests name keys that exist, have clocks near the present ones and frames of the right sizes, so that they
reach the code behind the first checks. `Known` is what the worker has learnt from the server's answers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from echelon.cluster.messages import (
    ApplyScaled,
    Ask,
    Attach,
    Configure,
    Gather,
    GetStates,
    Init,
    Join,
    MeasureNorm,
    OptimizerSpec,
    Pause,
    Place,
    Pull,
    PullChanges,
    PullRows,
    Push,
    PushHeader,
    PutRows,
    PutStates,
    Request,
    Resume,
    Retire,
    SetOptimizer,
    Setting,
    StateEntry,
    encode,
)
from echelon.cluster.placement import ITEM_BYTES, KeySpec, Layout, Segment
from echelon.server.storage.memory import frame_pieces
from fuzz.messages import POOLS, MessageSource

STORES = ("dist_sync", "dist_async", "dist_ssync", "dist_gsync")
OPTIMIZERS: list[OptimizerSpec] = [
    OptimizerSpec(
        "sgd",
        [{"lr": 0.5, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False, "maximize": False}],
    ),
    OptimizerSpec(
        "adam",
        [{"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": True, "maximize": False}],
    ),
    OptimizerSpec("nadam", [{"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}]),
    OptimizerSpec("adagrad", [{"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False,
                               "initial_accumulator_value": 0.0}]),
    OptimizerSpec("sparse_adam", [{"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "maximize": False}]),
]  # fmt: skip
NUMBERS = (0.0, 1.0, 2.0, 0.5, -1.0, 1e300, -1e300, 1e-300, math.nan, math.inf, -math.inf)
INTEGERS = (-(2**63), -1, 0, 1, 2, 3, 63, 64, 65, 4096, 10**6, 2**31, 2**40, 2**62, 2**63, 2**64 - 1)
SETTINGS: list[Setting] = [*NUMBERS, [0.5, 0.5], "a", None, True]
DTYPES = (*ITEM_BYTES, "complex64", "bool", "")
STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "mu_product", "sum", "other")


class Known:
    """What a worker knows of a store: the slots, and how often it has pushed each key."""

    def __init__(self, num_servers: int) -> None:
        self.layout = Layout(num_servers)
        self.clocks: dict[tuple[int, int], int] = {}  # by server and key
        self.created: dict[int, list[int]] = {}  # by server: the keys of requests to create keys


def request_source() -> MessageSource:
    """Return a source of random requests. It takes a tenth of a second, so episodes share it."""
    kinds = [kind for kind in get_args(Request) if kind is not Retire]  # after it, most requests would be refused
    return MessageSource(kinds, 0, {**POOLS, "number": (1, 2, 3)})


class HostileWorker:
    """Makes requests of a worker that follows no rules, from the random numbers of a source."""

    def __init__(self, source: MessageSource, rank: int, num_servers: int, descriptors: list[str]) -> None:
        self.random = source.random
        self.rank = rank
        self.known = Known(num_servers)  # of the store that the next message is for
        self._num_servers = num_servers
        self._descriptors = descriptors
        self._source = source
        self._makers: list[Callable[[int], tuple[Request, list[bytes]]]] = [
            *[self._push] * 6,
            *[self._pull] * 3,
            *[self._init] * 3,
            *[self._place] * 2,
            *[self._rows] * 4,
            self._attach,
            self._configure,
            self._optimizer,
            self._states,
            self._norms,
            self._others,
        ]

    def message(self) -> tuple[int, list[bytes]]:
        """Return the number of a server, and the frames of a message to it."""
        server = self.random.randrange(self._num_servers)
        if self.random.random() < 0.3:
            frames = self._source.frames() if self.random.random() < 0.3 else []
            return server, [self._source.any(), *frames]
        maker = self.random.choice(self._makers)
        request, frames = maker(server)
        if self.random.random() < 0.25:
            request = self._changed(request)
        if frames and self.random.random() < 0.15:
            frames = self._damaged(frames)
        return 0 if isinstance(request, Place) else server, [encode(request), *frames]

    # --- plausible requests

    def _id(self) -> int:
        return self.random.randrange(1, 2000)

    def _keys(self, server: int, *, row_sparse: bool = False) -> list[int]:
        """Return some keys, mostly those that exist on the server."""
        slots = self.known.created.get(server, []) if self.random.random() < 0.9 else list(self.known.layout.slots)
        if self.random.random() < 0.9:
            slots = [key for key in slots if self.known.layout.slots[key].spec.row_sparse == row_sparse]
        return self.random.sample(slots, min(len(slots), self.random.randint(1, 4))) or [0]

    def _clock(self, server: int, keys: list[int]) -> int:
        near = 0 if self.random.random() < 0.8 else self.random.choice((1, -1, 7, 100, 200))
        return max(0, self.known.clocks.get((server, keys[0]), 0) + near)

    def _sizes(self, keys: list[int], server: int) -> list[int]:
        """Return the sizes of the frames of dense keys."""
        layout = self.known.layout
        slots = [layout.slots[key] for key in keys if key in layout.slots]
        pieces = frame_pieces([piece for slot in slots for piece in layout.pieces(slot, server)])
        return [(p.stop - p.start) * ITEM_BYTES[layout.segments[p.segment].dtype] for p in pieces]

    def _push(self, server: int) -> tuple[Request, list[bytes]]:
        keys = self._keys(server)
        clock = self._clock(server, keys)
        framed = self.random.random() < 0.8
        if self.random.random() < 0.8:
            self.known.clocks |= {(server, key): clock + 1 for key in keys}
        frames = [bytes(size) for size in self._sizes(keys, server)] if framed else []
        return Push(self._id(), clock, keys, self._header(), self.random.random() < 0.7, framed), frames

    def _header(self) -> PushHeader:
        pick, chance = self.random.choice, self.random.random
        return PushHeader(
            pick((None, 1.0, 4.0, 0.0)) if chance() < 0.95 else pick(NUMBERS),
            [] if chance() < 0.8 else [pick(NUMBERS) for _ in range(self.random.randint(1, 2))],
            None if chance() < 0.9 else [{pick(("momentum", "betas", "eps", "x")): pick(SETTINGS)}],
            pick(NUMBERS) if chance() < 0.05 else 0.0,
            self.random.randint(1, 3) if chance() < 0.1 else 0,
            gated=chance() < 0.15,
            edits=pick((0, 0, 0, 1, 2)),
        )

    def _pull(self, server: int) -> tuple[Request, list[bytes]]:
        keys = self._keys(server)
        return Pull(self._id(), self._clock(server, keys), keys, self.random.random() < 0.7), []

    def _place(self, server: int) -> tuple[Request, list[bytes]]:
        specs = [self._spec() for _ in range(self.random.randint(1, 3))]
        return Place(self._id(), specs), []

    def _spec(self) -> KeySpec:
        pick = self.random.choice
        shape = tuple(pick((1, 3, 8, 64, 100, 5000)) for _ in range(self.random.randint(0, 3)))
        shape = shape if math.prod(shape) <= 100_000 else shape[:1]
        dtype = pick(DTYPES) if self.random.random() < 0.3 else "float32"
        return KeySpec(f"key {self.random.randrange(40)}", shape, dtype, self.random.random() < 0.3)

    def _init(self, server: int) -> tuple[Request, list[bytes]]:
        layout = self.known.layout
        some = self.random.sample(list(layout.slots), min(len(layout.slots), self.random.randint(1, 4)))
        slots = [layout.slots[key] for key in some]
        self.known.created[server] = list({*self.known.created.get(server, []), *some})
        if slots and self.random.random() < 0.15:
            at = self.random.randrange(len(slots))
            slots[at] = self._changed(slots[at])
        segments = list(layout.segments)
        if self.random.random() < 0.2:
            segments.append(Segment(len(segments), self.random.choice(DTYPES), self._size(), self._size(), 0))
        if segments and self.random.random() < 0.1:
            segments[-1] = self._changed(segments[-1])
        keys = [slot.key for slot in slots if not slot.spec.row_sparse]
        framed = self.random.random() < 0.8
        frames = [bytes(size) for size in self._sizes(keys, server)] if framed else []
        return Init(self._id(), segments, slots, framed, self.random.random() < 0.3), frames

    def _size(self) -> int:
        return self.random.choice((0, 1, 64, 4096, 8192, 1 << 18, 1 << 22, 1 << 40))

    def _attach(self, server: int) -> tuple[Request, list[bytes]]:
        segments = self.known.layout.segments or [Segment(0, "float32", 1 << 22, 4096)]
        pick = self.random.choice
        return Attach(self._id(), pick(segments), pick(self._descriptors), pick(self._descriptors)), []

    def _configure(self, server: int) -> tuple[Request, list[bytes]]:
        store = self.random.choice(STORES)
        staleness = self.random.choice((None, 0, 3)) if self.random.random() < 0.3 else None
        staleness = 2 if store == "dist_ssync" and self.random.random() < 0.8 else staleness
        groups = [[0, 1], [2]] if store == "dist_gsync" else None
        number = self.random.choice((0, 1, 2, 3, 3, 200))
        rank, slice_number = self.random.choice((self.rank, 0)), server if self.random.random() < 0.9 else number
        return Configure(self._id(), rank, store, staleness, groups, "mxnet", number, slice_number), []

    def _optimizer(self, server: int) -> tuple[Request, list[bytes]]:
        return SetOptimizer(self._id(), self.random.choice(OPTIMIZERS)), []

    def _states(self, server: int) -> tuple[Request, list[bytes]]:
        entries, frames = list[StateEntry](), list[bytes]()
        for key in self._keys(server):
            slot = self.known.layout.slots.get(key)
            scalar = self.random.random() < 0.5
            shape = () if scalar or slot is None else (slot.length,)
            entries.append(StateEntry(key, self.random.choice(STATES), "float32", shape, None if scalar else 0))
            frames.append(struct.pack("<f", self.random.choice((0, 1, 9, -1, math.nan, math.inf))) * math.prod(shape))
        return PutStates(self._id(), entries), frames

    def _rows(self, server: int) -> tuple[Request, list[bytes]]:
        slot = self.known.layout.slots.get(self._keys(server, row_sparse=True)[0])
        if slot is None or not slot.spec.row_sparse:
            return self._place(server)
        count = self.random.randint(0, 3)
        row = slot.length // slot.spec.shape[0] * ITEM_BYTES[slot.spec.dtype]
        numbers = b"".join(self.random.randrange(4).to_bytes(8, "little") for _ in range(count))
        clock = self._clock(server, [slot.key])
        since = self.random.choice((-1, 0, 1, 5, 2**62))
        match self.random.randrange(4):
            case 0:
                return PullRows(self._id(), clock, slot.key), [numbers]
            case 1:
                return PullChanges(self._id(), clock, [slot.key], [since]), []
            case 2:
                return PutRows(self._id(), slot.key, self.random.choice((0, 1, 70))), [bytes(count * row)]
        self.known.clocks[server, slot.key] = clock + 1
        frames = [bytes(8 * count) if self.random.random() < 0.7 else numbers, bytes(count * row)]
        return Push(self._id(), clock, [slot.key], self._header(), True, True, [count], [since]), frames

    def _norms(self, server: int) -> tuple[Request, list[bytes]]:
        keys, number = self._keys(server), self.random.choice(NUMBERS)
        clock = max(0, self._clock(server, keys) - 1)
        if self.random.random() < 0.5:
            return MeasureNorm(self._id(), clock, keys, number if self.random.random() < 0.5 else None), []
        return ApplyScaled(self._id(), clock, keys, number), []

    def _others(self, server: int) -> tuple[Request, list[bytes]]:
        match self.random.randrange(40):
            case 0 if self.random.random() < 0.1:
                return Retire(self._id()), []
            case 1 | 2 | 3:
                return Pause(self._id()), []
            case 4 | 5 | 6 | 7 | 8:
                return Resume(self._id()), []
            case 9 | 10 | 11 | 12:
                return GetStates(self._id()), []
            case 13 | 14 | 15 | 16:
                return Gather(self._id()), [b"part"] * self.random.choice((0, 1, 1, 1, 2))
            case 17 | 18 | 19:
                return Join(self._id(), self.random.choice((None, 0, 1, 3)), self.random.choice(({}, {0: 1}))), []
        return Ask(self._id(), self._id()), []

    # --- defects

    def _changed(self, value: Any) -> Any:
        """Return a struct with another value in one field."""
        field = self.random.choice(value.__struct_fields__)
        return msgspec.structs.replace(value, **{field: self._other(getattr(value, field))})

    def _other(self, value: Any) -> Any:
        pick = self.random.choice
        if isinstance(value, msgspec.Struct):
            return self._changed(value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return pick((min(value + 1, 2**64 - 1), max(0, value - 1), *INTEGERS))
        if isinstance(value, float):
            return pick(NUMBERS)
        if isinstance(value, list | tuple) and value and self.random.random() < 0.7:
            at = self.random.randrange(len(value))
            parts = [*value[:at], self._other(value[at]), *value[at + 1 :]]
            return type(value)(pick((parts, [*value, value[-1]], value[:-1])))
        return pick(("", "float32", "float64", 7, [0], [], None, {}))

    def _damaged(self, frames: list[bytes]) -> list[bytes]:
        at = self.random.randrange(len(frames))
        other = self.random.choice((b"", frames[at][:-1], frames[at] + b"x", frames[at] * 2))
        return self.random.choice(([*frames[:at], other, *frames[at + 1 :]], frames[1:], [*frames, b"more"]))
