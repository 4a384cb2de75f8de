"""The handshake: both sides complete in every mode, for every splitting of the bytes, and accept no wrong byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.transport.admission.handshake import (
    NONCE_BYTES,
    VERSION,
    ClientHandshake,
    HandshakeError,
    Mode,
    ServerHandshake,
    State,
    Verdict,
)

SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
ADDRESSES = "('127.0.0.1', 1) ('127.0.0.1', 2)"
ALL = frozenset(Mode)


def client(mode: Mode, secret: bytes = SECRET, addresses: str = ADDRESSES) -> ClientHandshake:
    return ClientHandshake(mode, secret, addresses, b"c" * NONCE_BYTES)


def server(allowed: frozenset[Mode] = ALL, secret: bytes = SECRET, addresses: str = ADDRESSES) -> ServerHandshake:
    return ServerHandshake(allowed, secret, addresses, b"s" * NONCE_BYTES)


def exchange(
    one: ClientHandshake, other: ServerHandshake, change: Callable[[int, bytes], bytes] = lambda index, part: part
) -> int:
    """Carry bytes between both sides until both wait. Return how many parts were received.

    `change(index, part)` may change a part on its way. The TLS handshake succeeds if both sides begin it.
    """
    towards: dict[ClientHandshake | ServerHandshake, bytes] = {other: one.hello, one: b""}
    sides: list[tuple[ClientHandshake | ServerHandshake, ClientHandshake | ServerHandshake]] = [
        (other, one),
        (one, other),
    ]
    index = 0
    moved = True
    while moved:
        moved = False
        if one.state is other.state is State.TLS:
            towards[other], towards[one], moved = one.tls_complete(), other.tls_complete(), True
        for side, peer in sides:
            if 0 < side.needed <= len(towards[side]):
                part, towards[side] = towards[side][: side.needed], towards[side][side.needed :]
                towards[peer] += side.receive(change(index, part))
                index, moved = index + 1, True
    return index


@pytest.mark.parametrize("mode", Mode)
def test_both_sides_complete(mode: Mode) -> None:
    one, other = client(mode), server()
    exchange(one, other)
    assert one.state is other.state is State.DONE


@given(
    mode=st.sampled_from([Mode.LOCAL, Mode.PROOF]),
    index=st.integers(0, 3),
    position=st.integers(0, 100),
    flip=st.integers(1, 255),
)
def test_no_changed_byte_is_accepted(mode: Mode, index: int, position: int, flip: int) -> None:
    """Every byte of every part is covered by the HMACs, the mode and the nonces included."""
    one, other = client(mode), server()

    def change(at: int, part: bytes) -> bytes:
        changed = bytearray(part)
        if at == index:
            changed[position % len(changed)] ^= flip
        return bytes(changed)

    with suppress(HandshakeError):
        exchange(one, other, change)
    assert one.state is not State.DONE


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PROOF])
def test_other_credentials(mode: Mode) -> None:
    one, other = client(mode, OTHER_SECRET), server()
    proof = one.receive(other.receive(one.hello))
    with pytest.raises(HandshakeError, match="credentials of the two processes differ") as refused:
        other.receive(proof)
    with pytest.raises(HandshakeError, match="credentials of the two processes differ"):
        one.receive(refused.value.answer)


def test_a_server_without_the_secret_is_refused() -> None:
    """It accepts anything that the client sends, but it cannot prove the secret itself."""
    one, fake = client(Mode.LOCAL), server(secret=OTHER_SECRET)
    fake._secret = SECRET  # to have an accepting result, whose proof is replaced
    proof = one.receive(fake.receive(one.hello))
    result = fake.receive(proof)
    with pytest.raises(HandshakeError, match="differ"):
        one.receive(result[:1] + bytes(len(result) - 1))
    one = client(Mode.LOCAL)
    one.receive(server().receive(one.hello))
    with pytest.raises(HandshakeError, match="differ"):
        one.receive(b"\x00" + proof)  # the client's own proof, sent back


def test_addresses_are_bound_on_one_machine() -> None:
    """A process that passes a connection on to another port cannot pass the proof on."""
    for mode in (Mode.LOCAL, Mode.PROOF):
        one, other = client(mode), server(addresses="('127.0.0.1', 1) ('127.0.0.1', 3)")
        proof = one.receive(other.receive(one.hello))
        if mode is Mode.PROOF:  # between hosts, addresses may be translated on the way
            one.receive(other.receive(proof))
            assert one.state is State.DONE
            continue
        with pytest.raises(HandshakeError, match="differ"):
            other.receive(proof)


@pytest.mark.parametrize(
    ("mode", "allowed", "words"),
    [
        (Mode.NONE, [Mode.TLS], "started with --insecure"),
        (Mode.TLS, [Mode.NONE], "started with --insecure"),
        (Mode.PROOF, [Mode.TLS, Mode.LOCAL], "started with --no-encryption"),
    ],
)
def test_a_mode_that_the_server_does_not_allow(mode: Mode, allowed: list[Mode], words: str) -> None:
    one, other = client(mode), server(frozenset(allowed))
    with pytest.raises(HandshakeError, match=words) as refused:
        other.receive(one.hello)
    with pytest.raises(HandshakeError, match=words) as seen:
        one.receive(refused.value.answer)
    assert seen.value.verdict is Verdict.MODE_REFUSED


def test_another_version() -> None:
    one, other = client(Mode.LOCAL), server()
    hello = bytearray(one.hello)
    hello[8] = VERSION + 1
    with pytest.raises(HandshakeError, match=f"version {VERSION + 1} .* version {VERSION}") as refused:
        other.receive(bytes(hello))
    with pytest.raises(HandshakeError, match="use one Echelon everywhere"):
        one.receive(refused.value.answer)


def test_another_protocol() -> None:
    request = b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: *\r\n\r\n"
    for side in (server(), client(Mode.TLS)):
        with pytest.raises(HandshakeError, match="not those of Echelon") as refused:
            side.receive(request[: side.needed])
        assert not refused.value.answer
