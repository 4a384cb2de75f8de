"""Ports for processes that a test starts later."""

from __future__ import annotations

import random
import socket

BELOW = 32768  # from here on the kernel gives ports to connections, also between the choice of one and its use


def free_port() -> int:
    """Return a port of this machine that nothing uses, and that no connection gets by itself."""
    while True:
        port = random.randrange(16384, BELOW)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # it is in use
