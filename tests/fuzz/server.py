"""The fuzzer of the servers, in one process: real `_Server` objects, a hostile worker, and well-behaved ones beside it.

    PYTHONPATH=src:tests python -m fuzz.server --messages 10000000 --seed 1

An episode has two servers and lasts some thousand messages. The hostile worker shares a store with a well-behaved one
whose rounds do not wait for it, and has stores of its own. It does not name the keys of the other: a worker of a job
may overwrite what it wants. After each message to a server these hold:

- the server has answered, or refused the message as malformed; no other exception occurred
- the well-behaved workers, who push and pull between the messages, get exactly the right weights
- the memory of the process does not grow from episode to episode
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from echelon import system
from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Configure,
    Done,
    Init,
    Malformed,
    Member,
    OptimizerSpec,
    Place,
    Placed,
    Push,
    PushHeader,
    PutStates,
    Response,
    Roster,
    SetOptimizer,
    decode_request,
    decode_response,
    encode,
)
from echelon.cluster.placement import KeySpec, Layout
from echelon.observe.events import EventLog
from echelon.server.reception import Reception
from echelon.server.serve import _Server
from echelon.server.shard import shard as shard_module
from echelon.server.storage.memory import frame_pieces
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Buffer, Endpoint, FramesRefused, Peer, Placer, Traffic, Transport
from echelon.transport.outbox import Precedence
from fuzz.messages import MessageSource
from fuzz.requests import HostileWorker, Known, request_source

NUM_SERVERS = 2
NUM_STORES = 4  # of the hostile worker; it shares store 0 with the others
HOSTILE = 1  # its rank; the others are well-behaved
GOOD_KEYS = (KeySpec("good", (64,), "float32"), KeySpec("better", (2, 4100), "float32"))
EPISODE = 10_000  # messages
CHECK_EVERY = 50
MEMORY = 256 << 20  # that a server takes for that of the machine
GROWTH = 96 << 20  # bytes that the process may grow after the first episodes
SGD = OptimizerSpec(
    "sgd", [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}]
)
# store, staleness, groups; in the last one, rounds wait for all, so the hostile worker has closed it
SHARED: list[tuple[str, int | None, list[list[int]] | None]] = [
    ("dist_async", None, None),
    ("dist_ssync", 1 << 40, None),
    ("dist_gsync", None, [[0], [1], [2]]),
    ("dist_sync", None, None),
]


class _Endpoint:
    """Keeps the answers of a server, by peer."""

    address = ""

    def __init__(self) -> None:
        self.placer: Placer | None = None
        self.traffic = Traffic()
        self.broken: set[Peer] = set()
        self.answers: dict[Peer, list[tuple[Response, list[Buffer]]]] = {}
        self.ended = 0

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        response = decode_response(memoryview(frames[0]))
        self.answers.setdefault(peer, []).append((response, list(frames[1:])))

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        return None

    def disconnect(self, peer: Peer) -> None:
        self.ended += 1

    def redirect(self, peer: Peer, address: str) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class _WatchedReception(Reception):
    """It does not survive its own exceptions: only Malformed is an answer to a message."""

    def _end(self, peer: Peer, frames: Sequence[memoryview], error: Exception) -> None:
        if not isinstance(error, Malformed):
            raise AssertionError(f"a message raised {error!r}") from error
        super()._end(peer, frames, error)


class _WatchedServer(_Server):
    def __init__(self, rank: int, roster: Roster, endpoint: Endpoint, transport: Transport, events: EventLog) -> None:
        super().__init__(rank, roster, endpoint, transport, events)
        self.reception = _WatchedReception(rank, self.slices, endpoint, events)


class _GoodWorker:
    """Pushes whole numbers, and knows the weights that follow."""

    def __init__(self, episode: Episode, rank: int) -> None:
        self._episode = episode
        self._rank = rank
        self.layout = Layout(NUM_SERVERS)
        self.weights = [torch.zeros(spec.length) for spec in GOOD_KEYS]
        self.clock = 0
        self._id = 1 << 40

    def call(self, server: int, request: Any, *frames: Buffer) -> tuple[Response, list[Buffer]]:
        """Send a request and return its answer, which must come at once."""
        self._episode.deliver(server, self._rank, 0, [encode(request), *frames])
        answers = self._episode.answers(server, self._rank, 0)
        assert len(answers) == 1, f"{request} has {len(answers)} answers"
        return answers[0]

    def next_id(self) -> int:
        self._id += 1
        return self._id

    def join(self, store: str, staleness: int | None, groups: list[list[int]] | None) -> None:
        for server in range(NUM_SERVERS):
            configure = Configure(self.next_id(), self._rank, store, staleness, groups, "mxnet", 0, server)
            assert isinstance(self.call(server, configure)[0], Done)
            assert isinstance(self.call(server, SetOptimizer(self.next_id(), SGD))[0], Done)
        placed, _ = self.call(0, Place(self.next_id(), list(GOOD_KEYS)))
        assert isinstance(placed, Placed)
        self.layout.adopt(placed.segments, placed.slots)
        for server in range(NUM_SERVERS):
            frames = self.frames(server, self.weights)
            answer, _ = self.call(server, Init(self.next_id(), placed.segments, placed.slots, True), *frames)
            assert isinstance(answer, Done), answer

    def frames(self, server: int, values: list[Tensor]) -> list[Buffer]:
        slots = [self.layout.slots[key] for key in range(len(GOOD_KEYS))]
        flat = torch.zeros(max(slot.start + slot.padded for slot in slots))
        for slot, value in zip(slots, values, strict=True):
            flat[slot.start : slot.start + slot.length] = value
        pieces = frame_pieces([piece for slot in slots for piece in self.layout.pieces(slot, server)])
        return [flat[piece.start : piece.stop].view(torch.uint8).numpy().data for piece in pieces]

    def step(self, random: Random, others: Sequence[_GoodWorker]) -> None:
        """Push a number to all keys with the other workers of the round, and compare the weights that come back."""
        numbers = [float(random.randrange(-8, 9)) for _ in (self, *others)]
        workers = sorted((self, *others), key=lambda worker: worker._rank)
        for weight in self.weights:
            weight -= sum(numbers)
        for server in range(NUM_SERVERS):
            for worker, number in zip(workers, numbers, strict=True):
                gradients = [torch.full((spec.length,), number) for spec in GOOD_KEYS]
                push = Push(worker.next_id(), self.clock, [0, 1], PushHeader(), True, True)
                frames = [encode(push), *worker.frames(server, gradients)]
                self._episode.deliver(server, worker._rank, 0, frames)
            for worker in workers:
                ((answer, found),) = self._episode.answers(server, worker._rank, 0)
                assert isinstance(answer, Done), answer
                wanted = self.frames(server, self.weights)
                assert [bytes(one) for one in found] == [bytes(one) for one in wanted], "the weights are right"
        for worker in workers:
            worker.clock += 1


class Episode:
    """Servers with a hostile worker and one or two well-behaved ones."""

    def __init__(self, source: MessageSource, seed: int) -> None:
        self.random = source.random
        self.random.seed(seed)
        self.counts: Counter[str] = Counter()
        store, staleness, groups = self.random.choice(SHARED)
        lock_step = store == "dist_sync"
        ranks = (0, HOSTILE, 2) if lock_step else (0, HOSTILE)
        members = [Member(SERVER, rank, "host", 1) for rank in range(NUM_SERVERS)]
        roster = Roster([*members, *(Member(WORKER, rank, "host", 1) for rank in ranks)])
        self._names = {m.rank: m.endpoint_name.encode() for m in roster.members if m.role == WORKER}
        transport = InProcessTransport()
        sizes = (0, 1, 4096, 4 << 22, 4 << 22, 4 << 22)
        descriptors = [transport.allocate(size).descriptor for size in sizes]
        self._endpoints = [_Endpoint() for _ in range(NUM_SERVERS)]
        self._servers = [
            _WatchedServer(rank, roster, endpoint, transport, EventLog(None, SERVER, rank))
            for rank, endpoint in enumerate(self._endpoints)
        ]
        if lock_step:
            for one in self._servers:
                one.slices.close(HOSTILE, 0)
        self._good = [_GoodWorker(self, rank) for rank in ranks if rank != HOSTILE]
        for worker in self._good:
            worker.join(store, staleness, groups)
        self._hostile = HostileWorker(source, HOSTILE, NUM_SERVERS, [*descriptors, "", "x"])
        self._number = 0  # of the store that the hostile worker sends to
        self._known = [Known(NUM_SERVERS) for _ in range(NUM_STORES)]
        for number in range(NUM_STORES):
            kind = (store, staleness, groups) if number == 0 else self.random.choice(SHARED)
            for server in range(NUM_SERVERS):
                configure = Configure(1, HOSTILE, *kind, "mxnet", number, server)
                self.deliver(server, HOSTILE, number, [encode(configure)])
                if number and kind[0] == "dist_sync":  # a store of its own: it waits for nobody
                    for rank in ranks:
                        if rank != HOSTILE:
                            self._servers[server].slices.close(rank, number)

    def run(self, messages: int) -> None:
        """Deliver a number of hostile messages, with steps of the well-behaved workers between them."""
        for index in range(messages):
            if index % CHECK_EVERY == 0:
                self._good[0].step(self.random, self._good[1:])
            if index % 50 == 0:
                self._number = self.random.randrange(NUM_STORES)
                self._hostile.known = self._known[self._number]
            server, frames = self._hostile.message()
            if not self._is_allowed(frames[0]):
                continue
            self.deliver(server, HOSTILE, self._number, frames)
            for answer, _ in self.answers(server, HOSTILE, self._number):
                self._learn(answer)
        for one in self._servers:
            for shard in (shard for hosted in one.slices.hosted.values() for shard in hosted.shards.values()):
                assert shard.requests is None or not shard.requests.damage

    def deliver(self, server: int, rank: int, number: int, frames: Sequence[Buffer]) -> None:
        """Give a message to a server as an endpoint does: the frames are refused before they are received."""
        peer = self._names[rank] + b".%d" % number
        views = [memoryview(bytearray(frame)) for frame in frames]
        if len(views) > 1:
            try:
                self._servers[server].reception.admit(peer, views[0], [len(view) for view in views[1:]])
            except FramesRefused:
                self.counts["refused frames"] += 1
                return
        self._servers[server].reception.receive(peer, views)

    def answers(self, server: int, rank: int, number: int) -> list[tuple[Response, list[Buffer]]]:
        """Return the answers of a server to a worker since the last call."""
        return self._endpoints[server].answers.pop(self._names[rank] + b".%d" % number, [])

    def _learn(self, answer: Response) -> None:
        self.counts[type(answer).__name__] += 1
        if isinstance(answer, Placed):
            self._hostile.known.layout.adopt(answer.segments, answer.slots)

    def _is_allowed(self, head: bytes) -> bool:
        """Return whether a message leaves the keys of the well-behaved workers alone, if it is for their store."""
        if self._number:
            return True
        try:
            request = decode_request(head)
        except Malformed:
            return True
        if isinstance(request, Init):
            return not request.overwrite or not {slot.key for slot in request.slots} & {0, 1}
        keys = getattr(request, "keys", None) or [getattr(request, "key", None)]
        return not isinstance(request, PutStates) and not {0, 1} & set(keys)


def resident_bytes() -> int:
    """Return the memory of this process, without what it has freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzz(messages: int, seed: int, *, report: bool = False) -> Counter[str]:
    """Deliver a number of messages in episodes. AssertionError says what is wrong, and in which episode."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # as a server does
    usual = system.machine_memory
    setattr(shard_module, "machine_memory", lambda: MEMORY)  # noqa: B010
    source, counts = request_source(), Counter[str]()
    began, first_bytes = time.monotonic(), 0
    try:
        for index, done in enumerate(range(0, messages, EPISODE)):
            episode = Episode(source, seed * 1_000_003 + index)
            try:
                episode.run(min(EPISODE, messages - done))
            except Exception as error:
                raise AssertionError(f"episode {index} of seed {seed} failed: {error!r}") from error
            counts += episode.counts
            del episode
            now = resident_bytes()
            first_bytes = now if index <= 8 else first_bytes
            assert now - first_bytes < GROWTH, f"the process grew by {(now - first_bytes) >> 20} MB"
            if report:
                rate = (done + EPISODE) / (time.monotonic() - began)
                print(f"{done + EPISODE} messages, {rate:.0f} per s, {now >> 20} MB, {dict(counts)}", flush=True)
    finally:
        setattr(shard_module, "machine_memory", usual)  # noqa: B010
    return counts


def main() -> None:
    """Run the fuzzer from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    counts = fuzz(arguments.messages, arguments.seed, report=True)
    print(f"{arguments.messages} messages: {dict(counts)}; nothing failed")


if __name__ == "__main__":
    main()
