"""A connection is that of the worker whose process opened it: no other process takes a living worker's rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Configure,
    Configured,
    Done,
    Failed,
    Member,
    Response,
    Roster,
    decode_response,
    encode,
)
from echelon.observe.events import EventLog
from echelon.server.serve import _Server
from echelon.transport.admission.credentials import Credentials, Security
from echelon.transport.interface import Endpoint
from echelon.transport.sockets import TcpTransport

TIMEOUT_S = 30.0


class Job:
    """A server with two registered workers, over real connections."""

    def __init__(self) -> None:
        self.transport = TcpTransport(Security("auto", Credentials.create()))
        self.endpoint = self.transport.serve("127.0.0.1")
        self.workers = [Member(WORKER, rank, "127.0.0.1", 1, "", f"token{rank}") for rank in range(2)]
        roster = Roster([Member(SERVER, 0, "127.0.0.1", 1, self.endpoint.address, "own"), *self.workers])
        self.server = _Server(0, roster, self.endpoint, self.transport, EventLog(None, SERVER, 0))

    @contextmanager
    def client(self, name: str) -> Iterator[Endpoint]:
        client = self.transport.connect(name, [self.endpoint.address])
        try:
            yield client
        finally:
            client.close()

    def configure(self, client: Endpoint, rank: int) -> Response:
        """Say to be the worker `rank`, and return the answer."""
        return self.ask(client, Configure(1, rank, "dist_sync", None, None, "share"))

    def ask(self, client: Endpoint, request: Configure) -> Response:
        client.send(0, [encode(request)])
        received = self.endpoint.recv(TIMEOUT_S)
        assert received is not None
        self.server.reception.receive(*received)
        answer = client.recv(TIMEOUT_S)
        assert answer is not None
        return decode_response(answer[1][0])


def test_a_process_is_only_the_worker_that_it_registered_as() -> None:
    job = Job()
    with job.client(job.workers[0].endpoint_name) as client:
        refused = job.configure(client, 1)
        assert isinstance(refused, Failed)
        assert refused.reason == "server 0: this connection is not one of the process that registered as worker 1"
        assert isinstance(job.configure(client, 0), Done)
    for name in ("worker-1", "worker-1.token", "worker-1.token0"):
        with job.client(name) as client:
            assert isinstance(job.configure(client, 1), Failed)
    job.endpoint.close()


def test_a_living_worker_keeps_its_store() -> None:
    job = Job()
    name = job.workers[1].endpoint_name
    with job.client(name) as first, job.client(name) as second:
        assert isinstance(job.configure(first, 1), Done)
        refused = job.configure(second, 1)
        assert isinstance(refused, Failed)
        assert "worker 1 already has another connection for its store 0" in refused.reason
        assert isinstance(job.configure(first, 1), Done), "a repeated request is harmless"
    job.endpoint.close()


def test_a_worker_continues_after_a_cut_connection() -> None:
    job = Job()
    with job.client(job.workers[1].endpoint_name) as client:
        assert isinstance(job.configure(client, 1), Done)
        client.disconnect(0)
        assert isinstance(job.configure(client, 1), Done)
    job.endpoint.close()


def test_a_worker_that_joins_takes_the_bound_over_when_another_one_has_created_the_store() -> None:
    job = Job()
    joining = Configure(1, 1, "dist_ssync", None, None, "share", late=True)
    with job.client(job.workers[0].endpoint_name) as first, job.client(job.workers[1].endpoint_name) as second:
        early = job.ask(second, joining)
        assert isinstance(early, Failed)
        assert early.not_in_view, "it asks again"
        assert job.ask(first, Configure(1, 0, "dist_ssync", 3, None, "share")) == Done(1)
        assert job.ask(second, joining) == Configured(1, None, 3)
    job.endpoint.close()
