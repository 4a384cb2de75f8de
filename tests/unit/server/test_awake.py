"""A server polls between the pushes of a step if the machine has spare cores, and sleeps otherwise."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Configure,
    ControlMessage,
    Finish,
    Member,
    Push,
    PushHeader,
    Request,
    Roster,
    encode,
)
from echelon.observe.events import EventLog
from echelon.server import serve
from echelon.server.serve import POLL_S, _Server, has_spare_cores
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Buffer, Peer, Placer, Traffic
from echelon.transport.outbox import Precedence


class Scripted:
    """An endpoint with given messages from worker 0. It records the timeout of each receive."""

    placer: Placer | None = None
    traffic = Traffic()
    address = ""

    def __init__(self, requests: Sequence[Request], inbox: queue.SimpleQueue[ControlMessage]) -> None:
        self._requests = list(requests)
        self._inbox = inbox
        self.timeouts: list[float] = []
        self.broken: set[Peer] = set()

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        self.timeouts.append(timeout_s)
        if not self._requests:
            self._inbox.put(Finish())
            return None
        return b"worker-0..1", [memoryview(encode(self._requests.pop(0)))]

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        pass

    def disconnect(self, peer: Peer) -> None:
        pass

    def redirect(self, peer: Peer, address: str) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def roster(*hosts: str) -> Roster:
    workers = [Member(WORKER, rank, host, 1) for rank, host in enumerate(hosts[1:])]
    return Roster([Member(SERVER, 0, hosts[0], 1), *workers])


def with_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(serve, "usable_cores", lambda: cores)


@pytest.mark.parametrize(
    ("cores", "hosts", "spare"),
    [(4, ("a", "a"), True), (3, ("a", "a"), False), (3, ("a", "b", "c"), True), (16, ("a", *"aaaaaaaa"), False)],
)
def test_spare_cores_means_two_cores_per_process_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, cores: int, hosts: tuple[str, ...], spare: bool
) -> None:
    with_cores(monkeypatch, cores)
    assert has_spare_cores(roster(*hosts), 0) is spare


@pytest.mark.parametrize("cores", [4, 2])
def test_the_server_sleeps_unless_more_pushes_follow(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    with_cores(monkeypatch, cores)
    monkeypatch.setattr(serve, "AWAKE_S", 60.0)  # longer than any delay of a test
    inbox: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
    pushes = [Push(2 + i, 0, [i], PushHeader(1.0, more=i < 2), True, False) for i in range(3)]
    endpoint = Scripted([Configure(1, 0, "dist_sync", None, None, "share"), *pushes], inbox)
    server = _Server(0, roster("a", "a"), endpoint, InProcessTransport(), EventLog(None, SERVER, 0))
    assert server.run(inbox, lambda: None) == 0
    awake = 0.0 if cores == 4 else POLL_S
    assert endpoint.timeouts == [POLL_S, POLL_S, awake, awake, POLL_S]
