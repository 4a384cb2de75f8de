"""Heartbeats of a process to the scheduler."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from echelon.cluster.messages import ControlMessage, Heartbeat, decode_control
from echelon.transport import awake
from echelon.transport.admission.channel import PlainChannel
from echelon.transport.control import ControlClient
from echelon.transport.framing import FrameReader


def test_a_process_that_rarely_gets_a_core_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn of its thread is late, so its clock does not move. It still has to say that it lives."""
    monkeypatch.setattr(awake, "LATE_S", 0.0)
    own, scheduler = socket.socketpair()
    with scheduler, closing(ControlClient(PlainChannel(own), lambda _: None, heartbeat_timeout_s=0.3)):
        scheduler.settimeout(10.0)
        reader, received = FrameReader(decode_control), list[ControlMessage]()
        while len(received) < 3:
            received += reader.feed(memoryview(scheduler.recv(1000)))
        assert received == [Heartbeat()] * len(received)
