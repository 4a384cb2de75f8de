"""The only code that moves bytes. `interface` says what a transport is; three keep it: in-process, shared memory, TCP.

`control` is the connection to the scheduler, whose end means death.
"""

from echelon.suggestions import unknown_name
from echelon.transport.interface import Transport
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.tcp import TcpTransport

NAMES = ("auto", "shm", "tcp")


def by_name(name: str) -> Transport:
    """The transport behind `--transport`; auto shares memory where a peer can reach it."""
    if name not in NAMES:
        raise unknown_name("transport", name, NAMES)
    return TcpTransport() if name == "tcp" else SharedMemoryTransport()
