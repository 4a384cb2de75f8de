"""How two processes prove to each other that they belong to one job, before any message. A pure state machine.

The client chooses the mode of the connection, and the server accepts it or not:

    mode     proof of the secret        encrypted   when
    NONE     none                       no          both sides run with --insecure
    LOCAL    HMACs over both nonces     no          both sides see that they are on one machine
             and both addresses
    PROOF    HMACs over both nonces     no          both sides run with --no-encryption
    TLS      certificates               yes         otherwise

Parts of fixed size are exchanged in turn. With mode TLS, the TLS handshake takes the place of the client's proof, and
the result is sent encrypted. `needed` is the number of bytes that a side waits for; no byte beyond them is read.

    client -> server   HELLO    magic, version, mode, nonce
    server -> client   ANSWER   magic, version, verdict, nonce
    client -> server   PROOF    HMAC of the client          (or the TLS handshake, or nothing)
    server -> client   RESULT   verdict, HMAC of the server
"""

from __future__ import annotations

import enum
import hmac
import struct

MAGIC = b"echelon\x00"
VERSION = 1
NONCE_BYTES = 32
_GREETING = struct.Struct(f"!8sBB{NONCE_BYTES}s")
_MAC_BYTES = 32
_RESULT = struct.Struct(f"!B{_MAC_BYTES}s")


class Mode(enum.IntEnum):
    """How a connection is protected. See the table at the top of this module."""

    NONE = 0
    LOCAL = 1
    PROOF = 2
    TLS = 3


class Verdict(enum.IntEnum):
    """What a server says about a client."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    MODE_REFUSED = 2
    OTHER_CREDENTIALS = 3


class State(enum.Enum):
    """What a side of the handshake waits for."""

    HELLO = enum.auto()
    ANSWER = enum.auto()
    PROOF = enum.auto()
    TLS = enum.auto()
    RESULT = enum.auto()
    DONE = enum.auto()


class HandshakeError(Exception):
    """The other side is refused, or refuses this one.

    `answer` is what to send to it before the connection is closed; `verdict` is the server's, where there is one.
    """

    def __init__(self, reason: str, verdict: Verdict | None = None, answer: bytes = b"") -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.answer = answer


OTHER_CREDENTIALS = "the credentials of the two processes differ"
NOT_ECHELON = "its first bytes are not those of Echelon's protocol"
_NEEDED = {State.HELLO: _GREETING.size, State.ANSWER: _GREETING.size, State.PROOF: _MAC_BYTES}
_NEEDED |= {State.RESULT: _RESULT.size, State.TLS: 0, State.DONE: 0}


class _Handshake:
    """What both sides share: the transcript of the parts so far, which the HMACs cover."""

    def __init__(self, state: State, secret: bytes, addresses: str, nonce: bytes) -> None:
        self.state = state
        self._secret = secret
        self._addresses = addresses.encode()
        self._nonce = nonce
        self._transcript = b""

    @property
    def needed(self) -> int:
        """The size of the part that this side waits for."""
        return _NEEDED[self.state]

    def receive(self, part: bytes) -> bytes:
        """Take a part of `needed` bytes and return what to send. Raises HandshakeError."""
        raise NotImplementedError

    def tls_complete(self) -> bytes:
        """Continue after the TLS handshake, which has proved the credentials of both sides."""
        raise NotImplementedError

    def _mac(self, mode: Mode, side: bytes) -> bytes:
        bound = self._addresses if mode is Mode.LOCAL else b""
        return hmac.digest(self._secret, b"echelon " + side + self._transcript + bound, "sha256")


class ClientHandshake(_Handshake):
    """The side that opens the connection. Begin by sending `hello`."""

    def __init__(self, mode: Mode, secret: bytes, addresses: str, nonce: bytes) -> None:
        super().__init__(State.ANSWER, secret, addresses, nonce)
        self._mode = mode
        self.hello = _GREETING.pack(MAGIC, VERSION, mode, nonce)
        self._transcript = self.hello

    def receive(self, part: bytes) -> bytes:
        """Take the server's answer or its result."""
        return self._receive_answer(part) if self.state is State.ANSWER else self._receive_result(part)

    def tls_complete(self) -> bytes:
        """Wait for the server's result."""
        self.state = State.RESULT
        return b""

    def _receive_answer(self, part: bytes) -> bytes:
        magic, version, code, _ = _GREETING.unpack(part)
        if magic != MAGIC:
            raise HandshakeError(f"{NOT_ECHELON}: another program listens there")
        if version != VERSION or code == Verdict.OTHER_VERSION:
            raise HandshakeError(_versions(VERSION, version), Verdict.OTHER_VERSION)
        if code == Verdict.MODE_REFUSED:
            raise HandshakeError(_mode_refused(self._mode, "it", "this process"), Verdict.MODE_REFUSED)
        if code != Verdict.ACCEPTED:
            raise HandshakeError(f"an answer with the unknown verdict {code}")
        self._transcript += part
        if self._mode is Mode.TLS:
            self.state = State.TLS
            return b""
        self.state = State.RESULT
        return b"" if self._mode is Mode.NONE else self._mac(self._mode, b"client")

    def _receive_result(self, part: bytes) -> bytes:
        code, mac = _RESULT.unpack(part)
        if code != Verdict.ACCEPTED:
            raise HandshakeError(OTHER_CREDENTIALS, Verdict.OTHER_CREDENTIALS)
        proves = self._mode in (Mode.LOCAL, Mode.PROOF)
        if not hmac.compare_digest(mac, self._mac(self._mode, b"server") if proves else bytes(_MAC_BYTES)):
            raise HandshakeError(OTHER_CREDENTIALS)
        self.state = State.DONE
        return b""


class ServerHandshake(_Handshake):
    """The side that accepts the connection, in one of the modes `allowed`."""

    def __init__(self, allowed: frozenset[Mode], secret: bytes, addresses: str, nonce: bytes) -> None:
        super().__init__(State.HELLO, secret, addresses, nonce)
        self._allowed = allowed
        self._mode = Mode.NONE

    def receive(self, part: bytes) -> bytes:
        """Take the client's hello or its proof."""
        return self._receive_hello(part) if self.state is State.HELLO else self._receive_proof(part)

    def tls_complete(self) -> bytes:
        """Accept the client."""
        self.state = State.DONE
        return _RESULT.pack(Verdict.ACCEPTED, bytes(_MAC_BYTES))

    def _receive_hello(self, part: bytes) -> bytes:
        magic, version, mode, _ = _GREETING.unpack(part)
        if magic != MAGIC:
            raise HandshakeError(NOT_ECHELON)
        if version != VERSION:
            raise self._refusal(Verdict.OTHER_VERSION, _versions(VERSION, version))
        if mode not in self._allowed:
            known = Mode(mode) if mode in Mode.__members__.values() else Mode.NONE
            raise self._refusal(Verdict.MODE_REFUSED, _mode_refused(known, "this process", "it"))
        self._mode = Mode(mode)
        answer = _GREETING.pack(MAGIC, VERSION, Verdict.ACCEPTED, self._nonce)
        self._transcript = part + answer
        if self._mode is Mode.NONE:
            self.state = State.DONE
            return answer + _RESULT.pack(Verdict.ACCEPTED, bytes(_MAC_BYTES))
        self.state = State.TLS if self._mode is Mode.TLS else State.PROOF
        return answer

    def _receive_proof(self, part: bytes) -> bytes:
        if not hmac.compare_digest(part, self._mac(self._mode, b"client")):
            answer = _RESULT.pack(Verdict.OTHER_CREDENTIALS, bytes(_MAC_BYTES))
            raise HandshakeError(OTHER_CREDENTIALS, Verdict.OTHER_CREDENTIALS, answer)
        self.state = State.DONE
        return _RESULT.pack(Verdict.ACCEPTED, self._mac(self._mode, b"server"))

    def _refusal(self, verdict: Verdict, reason: str) -> HandshakeError:
        return HandshakeError(reason, verdict, _GREETING.pack(MAGIC, VERSION, verdict, self._nonce))


def _versions(own: int, other: int) -> str:
    return f"it speaks version {other} of Echelon's protocol and this process version {own}; use one Echelon everywhere"


def _mode_refused(mode: Mode, server: str, client: str) -> str:
    """Say why a server does not accept a mode."""
    if mode is Mode.NONE:
        return f"{client} was started with --insecure, but {server} requires the credentials of the job"
    if mode is Mode.PROOF:
        return f"{client} was started with --no-encryption, but {server} was not"
    return f"{server} was started with --insecure, but {client} was not"
