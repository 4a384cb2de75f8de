"""The conformance suite on all transports, tests of shared memory, and broken transports that the suite detects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.testing import check_transport
from echelon.testing.transport import CHECKS, Check
from echelon.transport.admission import admission
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import CONNECT_S, Block, Buffer, Endpoint, Peer, Placer, Traffic, Transport
from echelon.transport.outbox import Precedence
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", [InProcessTransport, SharedMemoryTransport, TcpTransport])
def test_transport(transport: type[Transport], check: Check) -> None:
    check(transport)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tcp_between_machines(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over TLS, which the processes use when they do not see that they are on one machine."""
    monkeypatch.setattr(admission, "on_one_machine", lambda own, peer: False)
    check(TcpTransport)


# --- shared memory between processes

ATTACH = """
import sys
from echelon.transport.shared_memory import SharedMemoryTransport
memory = SharedMemoryTransport().attach(sys.argv[1])
if memory is None:
    sys.exit("out of reach")
assert memory[:5] == b"hello", bytes(memory[:5])
memory[5:10] = b"world"
"""


def attach_elsewhere(descriptor: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ATTACH, descriptor], capture_output=True, text=True, timeout=60)


def test_another_process_attaches_by_the_descriptor() -> None:
    block = SharedMemoryTransport().allocate(5000)
    block.buffer[:5] = b"hello"
    done = attach_elsewhere(block.descriptor)
    assert done.returncode == 0, done.stderr
    assert bytes(block.buffer[:10]) == b"helloworld"


ALLOCATES = "from echelon.transport.choose import by_name; print(by_name('shm').allocate(64).descriptor)"


def test_memory_of_a_dead_process_cannot_be_attached() -> None:
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "from echelon.transport.choose import by_name; print(by_name('shm').allocate(64).descriptor)",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert SharedMemoryTransport().attach(made.stdout.strip()) is None


def test_another_file_with_the_same_number_is_rejected() -> None:
    """A reused PID or another PID namespace looks like this: the path opens and the size is right, but not the file."""
    transport = SharedMemoryTransport()
    block, other = transport.allocate(64), transport.allocate(64)
    boot, pid, _, size, token = block.descriptor.split()
    number = other.descriptor.split()[2]
    assert transport.attach(f"{boot} {pid} {number} {size} {token}") is None
    assert transport.attach(block.descriptor) is not None


def test_a_descriptor_cannot_name_a_plain_file(tmp_path: Path) -> None:
    """Not even a file of the right size that begins with the token of the descriptor."""
    transport = SharedMemoryTransport()
    boot, pid, _, size, _ = transport.allocate(64).descriptor.split()
    path = tmp_path / "secret"
    path.write_bytes(b"\1" * 16 + bytes(int(size) - 16))
    with path.open("rb+") as file:
        assert transport.attach(f"{boot} {pid} {file.fileno()} {size} {'01' * 16}") is None


def test_attached_memory_outlives_its_owner() -> None:
    transport = SharedMemoryTransport()
    block = transport.allocate(64)
    attached = transport.attach(block.descriptor)
    assert attached is not None
    block.buffer[0] = 9
    del block
    assert attached[0] == 9


def test_freed_memory_cannot_be_attached_and_leaves_no_file() -> None:
    transport = SharedMemoryTransport()
    before = len(os.listdir("/proc/self/fd"))
    descriptor = transport.allocate(64).descriptor
    assert transport.attach(descriptor) is None
    assert len(os.listdir("/proc/self/fd")) == before


# --- the suite detects broken transports


class _Endpoint:
    """An endpoint that passes everything on; a defect overrides one method."""

    placer: Placer | None = None  # the in-process transport ignores it
    traffic = Traffic()

    def __init__(self, inner: Endpoint) -> None:
        self.inner = inner
        self.broken = inner.broken

    @property
    def address(self) -> str:
        return self.inner.address

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        self.inner.send(peer, frames, precedence)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        return self.inner.recv(timeout_s)

    def disconnect(self, peer: Peer) -> None:
        self.inner.disconnect(peer)

    def redirect(self, peer: Peer, address: str) -> None:
        self.inner.redirect(peer, address)

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


class _Wrapped:
    """An in-process network whose endpoints have one defect."""

    name = "broken"
    endpoint: type[_Endpoint] = _Endpoint

    def __init__(self) -> None:
        self._inner = InProcessTransport()

    def serve(self, host: str) -> Endpoint:
        return self.endpoint(self._inner.serve(host))

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = CONNECT_S) -> Endpoint:
        return self.endpoint(self._inner.connect(name, addresses, wait_s))

    def allocate(self, num_bytes: int) -> Block:
        return self._inner.allocate(num_bytes)

    def attach(self, descriptor: str) -> memoryview | None:
        return self._inner.attach(descriptor)


class _DropsEmptyFramesEndpoint(_Endpoint):
    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        super().send(peer, [frame for frame in frames if len(frame)])


class DropsEmptyFrames(_Wrapped):
    endpoint = _DropsEmptyFramesEndpoint


class _TruncatesEndpoint(_Endpoint):
    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        super().send(peer, [memoryview(frame).cast("B")[: 16 << 20] for frame in frames])


class Truncates(_Wrapped):
    endpoint = _TruncatesEndpoint


class _LastComesFirstEndpoint(_Endpoint):
    def __init__(self, inner: Endpoint) -> None:
        super().__init__(inner)
        self.earlier: list[tuple[Peer, list[memoryview]]] = []

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        last = self.inner.recv(0 if self.earlier else timeout_s)
        while last is not None and (later := self.inner.recv(0)) is not None:
            self.earlier.append(last)
            last = later
        return last or (self.earlier.pop() if self.earlier else None)


class LastComesFirst(_Wrapped):
    endpoint = _LastComesFirstEndpoint


class _NeverSleepsEndpoint(_Endpoint):
    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        return super().recv(min(timeout_s, 0.001))


class NeverSleeps(_Wrapped):
    endpoint = _NeverSleepsEndpoint


class GivesUsedMemory(_Wrapped):
    def allocate(self, num_bytes: int) -> Block:
        block = super().allocate(num_bytes)
        block.buffer[-1:] = b"\1" if num_bytes else b""
        return block


class AttachesACopy(_Wrapped):
    def attach(self, descriptor: str) -> memoryview | None:
        attached = super().attach(descriptor)
        return None if attached is None else memoryview(bytearray(attached))


class TrustsAnyDescriptor(_Wrapped):
    def attach(self, descriptor: str) -> memoryview | None:
        return super().attach(descriptor) or memoryview(bytearray(8192))


class LeaksAFile(_Wrapped):
    def serve(self, host: str) -> Endpoint:
        leaked.append(os.eventfd(0))
        return super().serve(host)


leaked: list[int] = []


@pytest.fixture
def _no_leaks() -> object:
    yield
    while leaked:
        os.close(leaked.pop())


@pytest.mark.usefixtures("_no_leaks")
@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (DropsEmptyFrames, "a request's frames"),
        (Truncates, "lengths"),
        (LastComesFirst, "in order"),
        (NeverSleeps, "waited its time"),
        (GivesUsedMemory, "zeroed"),
        (AttachesACopy, "write is visible"),
        (TrustsAnyDescriptor, "attach"),
        (LeaksAFile, "open files"),
    ],
)
def test_a_broken_transport_is_detected(broken: type[_Wrapped], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_transport(broken)
