"""Connections over real sockets: strangers are refused, counted and reported; processes of the job get a channel."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.transport.admission import admission as admission_module
from echelon.transport.admission.admission import Admission, ConnectionRefused, Strangers, Unproven, connect
from echelon.transport.admission.channel import Channel, PlainChannel, TlsChannel
from echelon.transport.admission.credentials import INSECURE, Credentials, Security, read_credentials, user_credentials
from echelon.transport.admission.handshake import NONCE_BYTES, ClientHandshake, Mode


@lru_cache
def security(number: int = 0, policy: str = "auto") -> Security:
    return Security(policy, Credentials.create())


class Door:
    """A listening process: an admission whose loop runs in the calls of `admit`."""

    def __init__(self, own: Security) -> None:
        self.selector = selectors.DefaultSelector()
        self.admission = Admission(socket.create_server(("127.0.0.1", 0)), own, self.selector, Strangers("the test"))
        self.address: tuple[str, int] = self.admission._listener.getsockname()

    def step(self) -> list[Channel]:
        ready = [self.admission.advance(key.data) for key, _ in self.selector.select(0.1)]
        return [channel for channel in ready if channel is not None]

    def admit(self, other: Security) -> tuple[Channel, Channel]:
        """Let a process with the security `other` connect, and return both ends."""
        result: list[Channel | BaseException] = []

        def open_connection() -> None:
            try:
                result.append(connect(self.address, other, 10.0))
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=open_connection)
        thread.start()
        accepted: list[Channel] = []
        while thread.is_alive():
            accepted += self.step()
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        return accepted[0], result[0]

    def close(self) -> None:
        self.admission.close()
        self.selector.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door(security())
    yield made
    made.close()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all processes believe that they are on different machines."""
    monkeypatch.setattr(admission_module, "on_one_machine", lambda own, peer: False)


def receive(channel: Channel, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = bytearray(count)
        try:
            received += part[: channel.recv_into(memoryview(part))]
        except BlockingIOError:
            pass
    return bytes(received)


def check_both_directions(one: Channel, other: Channel) -> None:
    for source, target in ((one, other), (other, one)):
        data = secrets.token_bytes(40_000)
        sent = source.sendmsg([memoryview(data)[:3], memoryview(data)[3:]])
        assert receive(target, sent) == data[:sent]
    one.close()
    other.close()


def test_peers_on_one_machine_are_not_encrypted(door: Door) -> None:
    one, other = door.admit(security())
    assert isinstance(one, PlainChannel)
    check_both_directions(one, other)


@pytest.mark.usefixtures("far")
def test_peers_on_two_machines_use_tls_1_3(door: Door) -> None:
    one, other = door.admit(security())
    assert isinstance(one, TlsChannel)
    assert one.socket.version() == "TLSv1.3"
    check_both_directions(one, other)


@pytest.mark.usefixtures("far")
def test_no_encryption_between_machines() -> None:
    own = Security("proof", security().credentials)
    door = Door(own)
    one, other = door.admit(own)
    assert isinstance(one, PlainChannel)
    check_both_directions(one, other)
    with pytest.raises(ConnectionRefused, match="differ"):
        door.admit(Security("proof", security(1).credentials))
    door.close()


@pytest.mark.parametrize("place", ["near", "far"])
def test_other_credentials_give_one_clear_line_on_both_sides(
    door: Door, place: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "far":
        request.getfixturevalue("far")
    for _ in range(3):
        with pytest.raises(ConnectionRefused, match=r"credentials of the two processes differ.*copy ~/\.config"):
            door.admit(security(1))
    assert door.admission.strangers.count == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the test refused a connection from 127.0.0.1: the credentials of the two processes differ")


def test_insecure_only_if_both_sides_say_so(door: Door) -> None:
    with pytest.raises(ConnectionRefused, match="this process was started with --insecure"):
        door.admit(INSECURE)
    insecure = Door(INSECURE)
    check_both_directions(*insecure.admit(INSECURE))
    with pytest.raises(ConnectionRefused, match="it was started with --insecure, but this process was not"):
        insecure.admit(security())
    insecure.close()


def test_a_server_that_sees_another_machine_gets_tls(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example through a forwarded port. The client only ever changes to the stronger mode."""
    monkeypatch.setattr(admission_module, "allowed_modes", lambda security, own, peer: frozenset([Mode.TLS]))
    one, other = door.admit(security())
    assert isinstance(one, TlsChannel)
    check_both_directions(one, other)


def test_any_splitting_of_the_bytes(door: Door) -> None:
    """A client whose bytes arrive one by one is admitted after the last one, and its next bytes are not lost."""
    with socket.create_connection(door.address) as client:
        addresses = f"{client.getsockname()} {client.getpeername()}"
        side = ClientHandshake(Mode.LOCAL, security().secret, addresses, bytes(NONCE_BYTES))
        outgoing = side.hello
        admitted: list[Channel] = []
        while side.needed:
            for byte in outgoing:
                assert not admitted
                client.sendall(bytes([byte]))
                admitted += door.step()
            answer = b""
            while len(answer) < side.needed:
                admitted += door.step() if not admitted else []
                answer += client.recv(side.needed - len(answer))
            outgoing = side.receive(answer)
        client.sendall(b"message")
        assert receive(admitted[0], 7) == b"message"
        admitted[0].close()


def test_connections_without_a_proof_are_limited(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "MAX_UNPROVEN", 4)
    idle = [socket.create_connection(door.address) for _ in range(10)]
    while len(door.admission._unproven) < 4 or door.admission.strangers.count < 6:
        door.step()
    assert door.admission.strangers.count == 6
    check_both_directions(*door.admit(security()))
    for connection in idle:
        connection.close()


def test_a_slow_client_is_refused_after_the_deadline(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "HANDSHAKE_S", 0.0)
    with socket.create_connection(door.address) as idle:
        while not door.admission._unproven:
            door.step()
        door.admission.expire()
        assert idle.recv(1) == b""
    assert door.admission.strangers.count == 1


def test_a_connection_that_says_nothing_is_not_reported(door: Door) -> None:
    socket.create_connection(door.address).close()
    check_both_directions(*door.admit(security()))  # accepted after it
    assert not door.admission._unproven
    assert door.admission.strangers.count == 0


def test_a_client_that_is_not_answered_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "HANDSHAKE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError, match="did not answer"):
        connect(silent.getsockname(), security(), 10.0)


def test_unproven_connections_are_closed_with_the_admission() -> None:
    door = Door(security())
    with socket.create_connection(door.address) as idle:
        while not door.admission._unproven:
            door.step()
        assert isinstance(next(iter(door.admission._unproven)), Unproven)
        door.close()
        assert idle.recv(1) == b""


# --- credentials


def test_credentials_survive_as_one_line() -> None:
    made = Credentials.create()
    text = made.to_text()
    assert len(text.split()) == 1
    assert Credentials.parse(f"{text}\n", "here") == made
    assert made.secret != Credentials.create().secret


@pytest.mark.parametrize("text", ["", "x", "a.b", "AAAA.AAAA", "ä.b"])
def test_damaged_credentials(text: str) -> None:
    whole = Credentials.create().to_text()
    for damaged in (text, whole[:-9], whole[5:]):
        with pytest.raises(UsageError, match="the variable ECHELON_CREDENTIALS does not hold credentials") as error:
            Security.of(Job(credentials=damaged or "?"))
        assert len(damaged) < 9 or damaged not in str(error.value)


def test_a_job_never_shows_its_secret() -> None:
    job = Job(credentials=Credentials.create().to_text())
    assert job.credentials is not None
    assert job.credentials not in repr(job)
    assert Job.from_environment(job.to_environment()) == job
    security = Security.of(job)
    assert job.credentials[:20] not in repr(security) + repr(security.credentials)


def test_the_users_own_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    made = user_credentials()
    assert user_credentials() == made
    (file,) = (tmp_path / "config/echelon").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert Security.of(Job(credentials_file=str(file))).credentials == made
    file.chmod(0o640)
    with pytest.raises(UsageError, match=r"has mode 0640.*chmod 600"):
        read_credentials(file)


def test_processes_that_start_together_share_the_users_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found: list[Credentials] = []
    threads = [threading.Thread(target=lambda: found.append(user_credentials())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({one.to_text() for one in found}) == 1
