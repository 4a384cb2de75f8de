"""The transport of a job: `--transport auto`, `shm` or `tcp`."""

from __future__ import annotations

from echelon import fault_points
from echelon.environment import Job
from echelon.transport.admission.credentials import Security
from echelon.transport.faulty import FaultyTransport
from echelon.transport.interface import Transport, check_name
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport


def by_name(name: str, security: Security | None = None) -> Transport:
    """Return the transport of `--transport`. `auto` shares memory with processes of the same machine.

    Without `security`, connections are protected as the job says that the environment describes.
    """
    check_name(name)
    return TcpTransport(security) if name == "tcp" else SharedMemoryTransport(security)


def transport_of(job: Job) -> Transport:
    """Return the transport of a job, protected by its credentials."""
    transport = by_name(job.transport, Security.of(job))
    return transport if fault_points.ACTIVE is None else FaultyTransport(transport, fault_points.ACTIVE)
