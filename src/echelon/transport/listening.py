"""Listening sockets: of servers, of the scheduler, and those that launchers open for their processes."""

from __future__ import annotations

import errno
import socket

from echelon.errors import UsageError

LOOPBACK = "127.0.0.1"


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at exactly the address that is announced to others, by default at a free port.

    A child process may inherit it. The port is taken from the moment it is chosen, so no other program can take it
    before the child listens. The parent closes its copy once the child has started: otherwise connections would still
    be accepted, and never answered, after the child has died.
    """
    try:
        address = socket.gethostbyname(host)
        if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
            raise UsageError(
                f"cannot listen at {host}: on this machine the name stands for {address}, which other machines cannot "
                "reach; use the IP address of its network interface instead of the name"
            )
        return socket.create_server((address, port), backlog=128)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        is_address = isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
        if not is_address:
            raise
        raise UsageError(
            f"cannot listen at {host}, which is not an address of this machine; set DMLC_NODE_HOST to one that the "
            "other machines reach, or DMLC_INTERFACE (-i) to its network interface"
        ) from error
