"""A process on the network that knows Echelon's protocol but not the job's secret: it tries to read, change and stop.

Arguments: the addresses of the scheduler and of a server. It prints one line per attempt, and what came of it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
from collections.abc import Callable
from contextlib import closing, suppress

from echelon.cluster.messages import (
    Barrier,
    Configure,
    ControlMessage,
    Halt,
    Leave,
    Pull,
    Register,
    WorkerExited,
    encode,
)
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import send_all
from echelon.transport.admission.credentials import INSECURE, Credentials, Security
from echelon.transport.admission.handshake import NONCE_BYTES, ClientHandshake, Mode
from echelon.transport.control import frame

TIMEOUT_S = 20.0
Address = tuple[str, int]
CONTROL: list[ControlMessage] = [
    Register("worker", 0, "10.0.0.1", 1, "", "token"),
    Leave("stop", True),
    Halt("stop"),
    Barrier(1),
    WorkerExited(0, "was killed", True),
]


def data_message(*frames: bytes) -> bytes:
    return struct.pack(f"!I{len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)


def requests(address: Address) -> bytes:
    """Return what a worker sends to a server, or to the scheduler: its name, its rank, and a request for weights."""
    name = data_message(f"worker-0.token.1 tcp://{address[0]}:{address[1]}".encode())
    configure = encode(Configure(1, 0, "dist_sync", None, None, "share"))
    return name + data_message(configure) + data_message(encode(Pull(2, 0, [0], True))) + b"".join(map(frame, CONTROL))


def raw(address: Address, first: bytes = b"") -> str:
    """Send messages without any proof, after `first`, and return what comes back after the server's greeting."""
    with socket.create_connection(address, TIMEOUT_S) as connection:
        received = b""
        with suppress(OSError):  # a reset, at any of these calls
            connection.sendall(first + requests(address))
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
    return f"{len(received)} bytes"


def hello(mode: Mode) -> bytes:
    return ClientHandshake(mode, b"guess", "", bytes(NONCE_BYTES)).hello


def handshake(address: Address, security: Security) -> str:
    with closing(connect(address, security, TIMEOUT_S)) as channel:
        send_all(channel, requests(address), TIMEOUT_S)
    return "accepted"


def tls_without_a_certificate(address: Address) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, TIMEOUT_S) as connection:
        connection.sendall(hello(Mode.TLS))
        connection.recv(42, socket.MSG_WAITALL)
        with context.wrap_socket(connection) as protected:
            protected.sendall(requests(address))
            received = protected.recv(65536)
    return f"{len(received)} bytes"


ATTEMPTS: dict[str, Callable[[Address], str]] = {
    "no handshake": raw,
    "insecure": lambda address: handshake(address, INSECURE),
    "other credentials": lambda address: handshake(address, Security("auto", Credentials.create())),
    "other credentials without encryption": lambda address: handshake(address, Security("proof", Credentials.create())),
    "messages after a hello": lambda address: raw(address, hello(Mode.TLS)),
    "messages after a hello of one machine": lambda address: raw(address, hello(Mode.LOCAL)),
    "TLS without a certificate": tls_without_a_certificate,
}


def main() -> None:
    for text in sys.argv[1:]:
        host, _, port = text.rpartition(":")
        for name, attempt in ATTEMPTS.items():
            try:
                outcome = attempt((host, int(port)))
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            print(f"{name}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
