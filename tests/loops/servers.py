"""The scheduler and the servers of jobs, as threads of a process of their own, with pushes that can be delayed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from echelon.cluster.messages import Malformed, Push, decode_request
from echelon.environment import Job
from echelon.scheduler import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport.interface import Buffer, Endpoint, Peer, Placer, Traffic, Transport
from echelon.transport.listening import LOOPBACK, listen
from echelon.transport.outbox import Precedence
from echelon.transport.shared_memory import SharedMemoryTransport

NUM_SERVERS = 2
TIMEOUT_S = 30.0  # after which a loop that hangs ends with an error
DELAY_S = 0.02
ALLOWED = "loops.cases.optimizers:SignSGD"  # a class of the loops that the servers may run


class RunningJob:
    """The scheduler and the servers of one job."""

    def __init__(self, num_workers: int, delay_s: float = 0.0) -> None:
        listener = listen(LOOPBACK)
        self.job = Job(
            scheduler_port=listener.getsockname()[1],
            num_workers=num_workers,
            num_servers=NUM_SERVERS,
            timeout_s=TIMEOUT_S,
            stall_seconds=TIMEOUT_S / 2,
            allow_optimizers=ALLOWED,
        )
        transport: Transport = SharedMemoryTransport()
        if delay_s:
            transport = DelayedTransport(transport, delay_s)
        programs: list[Callable[[], object]] = [partial(serve_scheduler, self.job, listener)]
        programs += [partial(serve_server, self.job.as_role("server", rank), transport) for rank in range(NUM_SERVERS)]
        self._threads = [threading.Thread(target=program) for program in programs]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for the end of the job."""
        for thread in self._threads:
            thread.join()


class DelayedTransport:
    """A transport whose servers receive each push some time after it has arrived.

    A worker that does not wait for the new weights therefore goes on with the old ones, every time.
    """

    def __init__(self, inner: Transport, delay_s: float) -> None:
        self.name = inner.name
        self.connect = inner.connect
        self.allocate = inner.allocate
        self.attach = inner.attach
        self._inner = inner
        self._delay_s = delay_s

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint."""
        return _DelayedEndpoint(self._inner.serve(host), self._delay_s)


@dataclass(frozen=True)
class _Held:
    due: float
    peer: Peer
    frames: list[memoryview]


class _DelayedEndpoint:
    def __init__(self, inner: Endpoint, delay_s: float) -> None:
        self.address = inner.address
        self.disconnect = inner.disconnect
        self.redirect = inner.redirect
        self.wake = inner.wake
        self.close = inner.close
        self.broken = inner.broken
        self.placer: Placer | None = None
        self.traffic = Traffic()
        self._inner = inner
        self._delay_s = delay_s
        self._held: deque[_Held] = deque()  # messages keep their order

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        self._inner.send(peer, frames, precedence)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        end = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if self._held and self._held[0].due <= now:
                message = self._held.popleft()
                return message.peer, message.frames
            until = min(end, self._held[0].due) if self._held else end
            received = self._inner.recv(max(0.0, until - now))
            if received is not None and (self._held or _is_push(received[1])):
                self._held.append(_Held(time.monotonic() + self._delay_s, *received))
            elif received is not None or time.monotonic() >= end or until == end:
                return received  # None also if `wake` was called


def _is_push(frames: list[memoryview]) -> bool:
    try:
        return isinstance(decode_request(frames[0]), Push)
    except (Malformed, IndexError):
        return False
