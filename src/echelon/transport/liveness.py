"""Whether the machine at the other end of a TCP connection still answers, as the kernel of this one has seen.

A connection is half-open when the other machine has vanished, or when something between them drops its packets. The
kernel then repeats unacknowledged data for a quarter of an hour before it reports an error. TCP_USER_TIMEOUT would
shorten that, but also end connections whose other side does not read because it computes. So the kernel sends probes
over an idle connection, which the other kernel acknowledges whether its process reads or not, and `silence_s` says when
it last acknowledged anything.
"""

from __future__ import annotations

import socket
import struct

PROBE_S = 2  # between the probes over an idle connection
SILENT_S = 6.0  # without an acknowledgement: the connection is half-open
_PROBES = 3
_TCP_INFO_BYTES = 60
_LAST_DATA_RECEIVED, _LAST_ACK_RECEIVED = 52, 56  # offsets in struct tcp_info: milliseconds ago


def send_probes(connected: socket.socket) -> None:
    """Have the kernel send probes over the connection when it is idle, and end it when none is acknowledged."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def silence_s(connected: socket.socket) -> float:
    """Return for how long no data and no acknowledgement has arrived."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (data_ms,), (ack_ms,) = (struct.unpack_from("=I", info, at) for at in (_LAST_DATA_RECEIVED, _LAST_ACK_RECEIVED))
    return float(min(data_ms, ack_ms)) / 1e3
