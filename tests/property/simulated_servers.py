"""The servers' real code on a simulated network: a test decides which message is delivered next, and who is killed.

Messages between two processes keep their order, as on a connection. A killed server receives nothing more; what it has
sent may still arrive. Workers are small models of the client: they push the same gradients in every run, repeat what
was not answered when a slice moves, and stop after a number of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Configure,
    Departure,
    Done,
    Init,
    Member,
    NotFinite,
    Place,
    Placed,
    Push,
    PushHeader,
    Request,
    Roster,
    SetOptimizer,
    Settled,
    Slice,
    SliceInSync,
    StoreProgress,
    View,
    decode_response,
    encode,
)
from echelon.cluster.placement import KeySpec, Layout
from echelon.kvstore.optimizer_spec import spec_of
from echelon.observe.events import EventLog
from echelon.server.serve import _Server
from echelon.server.storage.memory import empty_frames, frame_pieces
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Buffer, Endpoint, Peer, Placer, Traffic
from echelon.transport.outbox import Precedence

KEYS = [KeySpec("a", (70_000,), "float32"), KeySpec("b", (5, 7), "float32"), KeySpec("c", (40_000,), "float32")]
SGD = spec_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9), {})
Link = tuple[str, str]  # names of the sender and the receiver


class Network:
    """Messages on their way, in order for each pair of processes."""

    def __init__(self) -> None:
        self.waiting: dict[Link, deque[list[bytes]]] = {}
        self.dead: set[str] = set()

    def post(self, sender: str, receiver: str, frames: Sequence[Buffer]) -> None:
        if sender not in self.dead and receiver not in self.dead:
            self.waiting.setdefault((sender, receiver), deque()).append([bytes(frame) for frame in frames])

    def links(self) -> list[Link]:
        """Return the pairs with a message that can be delivered."""
        return sorted(link for link, messages in self.waiting.items() if messages and link[1] not in self.dead)


class _Endpoint:
    """One end of the connections of a process. A test delivers, so nothing is received here."""

    def __init__(self, network: Network, name: str, receivers: dict[Peer, str]) -> None:
        self.placer: Placer | None = None
        self.traffic = Traffic()
        self.broken: set[Peer] = set()
        self.address = name
        self._network = network
        self._name = name
        self._receivers = receivers

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        receiver = self._receivers.get(peer)
        if receiver is None:
            assert isinstance(peer, bytes)
            receiver = peer.decode()
        self._network.post(self._name, receiver, frames)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        raise AssertionError("the test delivers messages")

    def disconnect(self, peer: Peer) -> None: ...

    def redirect(self, peer: Peer, address: str) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class _Transport(InProcessTransport):
    """What a server needs of a transport: connections to other servers."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = 0.0) -> Endpoint:
        return _Endpoint(self._network, f"{name}.x.0", dict(enumerate(addresses)))


@dataclass(eq=False)
class ModelWorker:
    """A worker: its open requests by slice, and what it has been told."""

    rank: int
    world: World
    num_steps: int
    token: str = ""
    layout: Layout = field(init=False)
    clock: int = 0
    open: dict[int, tuple[int, list[bytes]]] = field(default_factory=dict)  # by id: slice and frames
    weights: dict[int, list[memoryview]] = field(default_factory=dict)  # by slice: of the last answer
    targets: list[str] = field(default_factory=list)  # by slice: the name of the server
    _ids: int = 0

    def __post_init__(self) -> None:
        self.layout = Layout(len(self.world.servers))
        self.targets = [f"server-{rank}" for rank in range(len(self.world.servers))]

    def name(self, number: int) -> str:
        return f"worker-{self.rank}.{self.token}.x.{number}"

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def send(self, number: int, request: Request, frames: Sequence[Buffer] = ()) -> None:
        message = [encode(request), *(bytes(frame) for frame in frames)]
        self.open[request.id] = number, message
        self.world.network.post(self.name(number), self.targets[number], message)

    def greet(self, number: int) -> None:
        configure = Configure(self.next_id(), self.rank, "dist_sync", None, None, "share", 0, number)
        self.send(number, configure)

    def move(self, number: int, server: str) -> None:
        """Find a slice on another server, and repeat what was not answered."""
        self.targets[number] = server
        unanswered = [message for other, message in self.open.values() if other == number]
        self.greet(number)
        for message in unanswered:
            self.world.network.post(self.name(number), server, message)

    def receive(self, number: int, frames: list[bytes]) -> None:
        answer = decode_response(frames[0])
        if self.open.pop(answer.id, None) is None:
            return
        if isinstance(answer, Placed):
            self.layout.adopt(answer.segments, answer.slots)
        else:
            assert isinstance(answer, Done), answer
            if len(frames) > 1:
                self.weights[number] = [memoryview(frame) for frame in frames[1:]]

    @property
    def is_waiting(self) -> bool:
        return bool(self.open)

    def step(self) -> None:
        """Push the gradients of the next step to all slices."""
        for number in range(len(self.targets)):
            pieces = frame_pieces(
                [piece for slot in self.layout.slots.values() for piece in self.layout.pieces(slot, number)]
            )
            frames = empty_frames(pieces, [segment.dtype for segment in self.layout.segments])
            generator = torch.Generator().manual_seed(1000 * self.clock + 10 * self.rank + number)
            for piece in pieces:
                frames.view(piece.segment, piece.start, piece.stop).zero_()
            for slot in self.layout.slots.values():  # the padding between keys stays zero
                for piece in self.layout.pieces(slot, number, exact=True):
                    values = torch.randn(piece.stop - piece.start, generator=generator)
                    frames.view(piece.segment, piece.start, piece.stop).copy_(values)
            push = Push(self.next_id(), self.clock, sorted(self.layout.slots), PushHeader(4.0), True, True)
            self.send(number, push, frames.buffers())
        self.clock += 1


class World:
    """A job: servers, workers, and the control messages that a test delivers to each of them in its own time."""

    def __init__(self, num_servers: int, num_workers: int, num_steps: int, *, replicas: bool) -> None:
        self.network = Network()
        self.members = [Member(SERVER, rank, "host", 1, f"server-{rank}") for rank in range(num_servers)]
        self.members += [Member(WORKER, rank, "host", 1) for rank in range(num_workers)]
        self.slices = [Slice(n, (n + 1) % num_servers if replicas else None, replicas) for n in range(num_servers)]
        self.view = 1
        self.views: dict[str, deque[View]] = {}  # by the name of the process that has not received them yet
        self.in_sync: list[SliceInSync | NotFinite] = []
        self.settled: list[Settled] = []
        self.servers: dict[int, _Server] = {}
        for rank in range(num_servers):
            self._start(rank, Roster(self.members, 1, self.slices))
        self.workers = [ModelWorker(rank, self, num_steps) for rank in range(num_workers)]

    def _start(self, rank: int, roster: Roster) -> None:
        address = next(m.address for m in roster.members if (m.role, m.rank) == (SERVER, rank))
        endpoint = _Endpoint(self.network, address, {})
        server = _Server(rank, roster, endpoint, _Transport(self.network), EventLog(None, SERVER, rank))
        server.slices.tell_scheduler = self._tell_scheduler
        self.servers[rank] = server

    def _tell_scheduler(self, message: SliceInSync | NotFinite | Settled) -> None:
        if isinstance(message, SliceInSync):
            self.in_sync.append(message)
        elif isinstance(message, Settled):
            self.settled.append(message)

    def set_up(self) -> None:
        """Create the store and its keys, in an order without surprises."""
        for worker in self.workers:
            for number in range(len(self.slices)):
                worker.greet(number)
                worker.send(number, SetOptimizer(worker.next_id(), SGD))
            worker.send(0, Place(worker.next_id(), KEYS))
        self.run_to_rest()
        for number in range(len(self.slices)):
            first = self.workers[0]
            slots = list(first.layout.slots.values())
            pieces = frame_pieces([piece for slot in slots for piece in first.layout.pieces(slot, number)])
            frames = empty_frames(pieces, [segment.dtype for segment in first.layout.segments])
            for piece in pieces:
                frames.view(piece.segment, piece.start, piece.stop).fill_(0.5)
            request = Init(first.next_id(), first.layout.segments, slots, True)
            first.send(number, request, frames.buffers())
        self.run_to_rest()

    def run_to_rest(self) -> None:
        while links := self.network.links():
            self.deliver(links[0])

    def deliver(self, link: Link) -> None:
        """Deliver the next message of a pair of processes."""
        sender, receiver = link
        frames = self.network.waiting[link].popleft()
        if receiver.startswith("server-"):
            rank = next(rank for rank, server in self.servers.items() if server.endpoint.address == receiver)
            self.servers[rank].reception.receive(sender.encode(), [memoryview(bytearray(frame)) for frame in frames])
        else:
            rank, number = int(receiver.partition("-")[2].partition(".")[0]), int(receiver.rpartition(".")[2])
            if self.workers[rank].targets[number] == sender:
                self.workers[rank].receive(number, frames)

    def kill(self, rank: int) -> None:
        """Kill a server, and let its slices move as the scheduler decides."""
        address = self.servers.pop(rank).endpoint.address
        self.network.dead.add(address)
        self.members = [m for m in self.members if (m.role, m.rank) != (SERVER, rank)]
        for number, stored in enumerate(self.slices):
            if stored.primary == rank:
                assert stored.in_sync
                self.slices[number] = Slice(stored.backup)
            elif stored.backup == rank:
                self.slices[number] = Slice(stored.primary)
        self.publish(f"server {rank} died")

    def restart(self, rank: int) -> None:
        """Start a server again: it becomes the backup of the slices that have none."""
        address = f"server-{rank}-again-{self.view}"
        self.members = [*self.members, Member(SERVER, rank, "host", 2, address, f"t{self.view}")]
        for number, stored in enumerate(self.slices):
            if stored.backup is None and stored.primary != rank:
                self.slices[number] = Slice(stored.primary, rank)
        self.view += 1
        self._start(rank, Roster(self.members, self.view, list(self.slices), late=True))
        self.publish(f"server {rank} joined", skip=address)

    def restart_empty(self, rank: int) -> None:
        """Start a server without a backup again: it has to be rebuilt."""
        self.servers.pop(rank)
        self.view += 1
        self._start(rank, Roster(self.members, self.view, list(self.slices), late=True, stores=[StoreProgress(0, 0)]))

    def replace_worker(self, rank: int) -> None:
        """Kill a worker, and start it again: another process with the same rank."""
        self.network.dead.update(self.workers[rank].name(number) for number in range(len(self.slices)))
        self.members = [m for m in self.members if (m.role, m.rank) != (WORKER, rank)]
        self.publish(f"worker {rank} died")
        self.members = [*self.members, Member(WORKER, rank, "host", 2, "", "again")]
        self.publish(f"worker {rank} joined")
        self.workers[rank] = ModelWorker(rank, self, self.workers[rank].num_steps, "again")

    def mark_in_sync(self) -> None:
        """Do what the scheduler does with the messages of primaries whose new backup has everything."""
        while self.in_sync:
            done = self.in_sync.pop()
            assert isinstance(done, SliceInSync)
            stored = self.slices[done.slice]
            if stored.backup == done.backup and not stored.in_sync:
                self.slices[done.slice] = Slice(stored.primary, stored.backup, True)
                self.publish(f"slice {done.slice} has a backup")

    def publish(self, reason: str, skip: str = "") -> None:
        self.view += 1
        workers = [m.rank for m in self.members if m.role == WORKER]
        view = View(self.view, workers, reason, Departure.MOVED, list(self.members), list(self.slices))
        names = [server.endpoint.address for server in self.servers.values()]
        for name in [*names, *(f"worker-{rank}" for rank in workers)]:
            if name != skip:
                self.views.setdefault(name, deque()).append(view)

    def deliver_view(self, name: str) -> None:
        view = self.views[name].popleft()
        if name.startswith("server-"):
            for server in self.servers.values():
                if server.endpoint.address == name:
                    server.follow(view)
            return
        worker = self.workers[int(name.removeprefix("worker-"))]
        addresses = {m.rank: m.address for m in view.members if m.role == SERVER}
        for number, stored in enumerate(view.slices):
            if stored.primary is not None and worker.targets[number] != addresses[stored.primary]:
                worker.move(number, addresses[stored.primary])

    def choices(self) -> list[tuple[str, object]]:
        """Return what can happen next."""
        found: list[tuple[str, object]] = [("deliver", link) for link in self.network.links()]
        alive = {server.endpoint.address for server in self.servers.values()}
        for name, views in self.views.items():
            if views and (name in alive or name.startswith("worker-")):
                found.append(("view", name))
        found += [("step", w.rank) for w in self.workers if not w.is_waiting and w.clock < w.num_steps]
        return found

    def do(self, choice: tuple[str, object]) -> None:
        match choice:
            case ("deliver", link):
                self.deliver(link)  # type: ignore[arg-type]
            case ("view", name):
                self.deliver_view(str(name))
            case ("step", rank):
                self.workers[rank].step()  # type: ignore[call-overload]
        self.mark_in_sync()

    @property
    def is_done(self) -> bool:
        return all(worker.clock == worker.num_steps and not worker.is_waiting for worker in self.workers)

    def final_weights(self) -> dict[int, list[Tensor]]:
        """Return the weights of all workers, which must be equal, by slice."""
        found = [
            {
                n: [torch.frombuffer(bytearray(f), dtype=torch.float32) for f in frames]
                for n, frames in w.weights.items()
            }
            for w in self.workers
        ]
        for other in found[1:]:
            for number, tensors in other.items():
                assert all(torch.equal(one, two) for one, two in zip(found[0][number], tensors, strict=True))
        return found[0]
