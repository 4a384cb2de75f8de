"""Moving bytes between processes.

`interface` defines a transport; `in_process`, `sockets` (TCP) and `shared_memory` implement it. `connection` is one TCP
connection of the last two. `credentials` are a job's secret, `handshake` and `admission` prove it when a connection
begins, and `channel` is the connection afterwards. `control` is every process's connection to the scheduler, whose end
means that the process has died, and `registration` is how a process joins a job over it.
"""

from echelon.environment import Job
from echelon.errors import unknown_name
from echelon.transport.credentials import Security
from echelon.transport.interface import Transport
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport

__all__ = ["NAMES", "SharedMemoryTransport", "TcpTransport", "Transport", "by_name", "transport_of"]

NAMES = ("auto", "shm", "tcp")


def by_name(name: str, security: Security | None = None) -> Transport:
    """Return the transport of `--transport`. `auto` shares memory with processes of the same machine.

    Without `security`, connections are protected as the job says that the environment describes.
    """
    if name not in NAMES:
        raise unknown_name("transport", name, NAMES)
    return TcpTransport(security) if name == "tcp" else SharedMemoryTransport(security)


def transport_of(job: Job) -> Transport:
    """Return the transport of a job, protected by its credentials."""
    return by_name(job.transport, Security.of(job))
