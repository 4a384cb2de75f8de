"""The bad link of the system tests does what it promises: rate, delay, counted loss, and cuts of each direction."""

from __future__ import annotations

import math
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts import Network, make_hosts
from lossy_line import QUEUE_S, LineQuality, LossyLine
from relay import ADDRESSES, BAD, Relay, join_by_relay

PACKET = bytes(1000)
RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = listener.accept()
total = 0
while data := connection.recv(1 << 16):
    began = began if total else time.monotonic()
    total += len(data)
print(total / (time.monotonic() - began))
"""
ECHO = """
import socket, sys
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind((sys.argv[1], 5001))
print("ready", flush=True)
while True:
    echo.sendto(*echo.recvfrom(2000))
"""
PROBE = """
import socket, sys, time
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.settimeout(0.5)
for number in range(int(sys.argv[2])):
    began = time.monotonic()
    probe.sendto(str(number).encode(), (sys.argv[1], 5001))
    try:
        probe.recv(2000)
        print(time.monotonic() - began)
    except TimeoutError:
        pass
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


def test_a_packet_arrives_after_its_delay() -> None:
    line = LossyLine(LineQuality(delay_s=0.5))
    line.put(PACKET, now=10.0)
    assert list(line.due(10.4)) == []
    assert line.next_at() == 10.5
    assert list(line.due(10.5)) == [PACKET]
    assert line.next_at() is None


def test_the_rate_spaces_packets_and_a_full_queue_drops_them() -> None:
    line = LossyLine(LineQuality(bytes_per_s=128_000))  # 128 packets per second
    for _ in range(50):
        line.put(PACKET, now=1.0)
    in_queue = int(QUEUE_S * 128) + 1
    assert len(list(line.due(1.0 + QUEUE_S / 2))) == QUEUE_S * 64
    assert len(list(line.due(2.0))) == in_queue - QUEUE_S * 64
    assert (line.counts.delivered, line.counts.overflowed) == (in_queue, 50 - in_queue)


def test_the_loss_is_counted_and_depends_on_the_seed_alone() -> None:
    def arrivals(seed: int) -> list[bytes]:
        line = LossyLine(LineQuality(loss=0.05), seed)
        for number in range(10_000):
            line.put(str(number).encode(), now=1.0)
        arrived = list(line.due(1.0))
        assert line.counts.lost == 10_000 - len(arrived)
        return arrived

    assert len(arrivals(1)) == pytest.approx(9500, abs=5 * math.sqrt(10_000 * 0.05 * 0.95))
    assert arrivals(1) == arrivals(1) != arrivals(2)


def test_a_cut_line_also_loses_what_is_on_its_way() -> None:
    line = LossyLine(LineQuality(delay_s=1.0))
    line.put(b"on its way", now=0.0)
    line.is_cut = True
    line.put(b"sent meanwhile", now=0.5)
    assert list(line.due(1.0)) == []
    line.is_cut = False
    line.put(b"sent afterwards", now=1.0)
    assert list(line.due(2.0)) == [b"sent afterwards"]
    assert line.counts.cut == 2


def test_packets_of_blocked_tcp_ports_are_lost() -> None:
    line = LossyLine(LineQuality())
    line.blocked_ports = frozenset([4000])
    tcp, udp = bytes([0x45, *bytes(8), 6, *bytes(10)]), bytes([0x45, *bytes(8), 17, *bytes(10)])
    passing = [tcp + struct.pack("!HH", 4001, 80), udp + struct.pack("!HH", 4000, 80), tcp, b"short"]
    for packet in [*passing, tcp + struct.pack("!HH", 4000, 80), tcp + struct.pack("!HH", 80, 4000)]:
        line.put(packet, now=1.0)
    assert list(line.due(1.0)) == passing
    assert line.counts.blocked == 2


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, sshd=False) as network:
        yield network


def measured_rate(network: Network, num_bytes: int) -> float:
    h1, h2 = network.hosts
    with h1.start([sys.executable, "-c", RECEIVE, ADDRESSES[0]]) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        h2.run([sys.executable, "-c", SEND, ADDRESSES[0], str(num_bytes)])
        return float(receiver.stdout.readline())


@contextmanager
def echo_on_the_second_host(network: Network) -> Iterator[None]:
    with network.hosts[1].start([sys.executable, "-c", ECHO, ADDRESSES[1]]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def round_trips(network: Network, count: int) -> list[float]:
    """Return the seconds that packets take to the second host and back, of those that arrive."""
    return [
        float(text)
        for text in network.hosts[0].run([sys.executable, "-c", PROBE, ADDRESSES[1], str(count)]).stdout.split()
    ]


@pytest.mark.system
def test_packets_of_real_hosts_are_delayed_limited_and_lost(network: Network) -> None:
    with join_by_relay(network.hosts, BAD) as relay:
        with echo_on_the_second_host(network):
            assert 0.050 <= min(round_trips(network, 10)) < 0.060
        measured_rate(network, 20_000_000)
        (_, sent) = relay.counts()
        share = sent.lost / (sent.lost + sent.overflowed + sent.delivered)
        assert sent.delivered_bytes > 20_000_000
        assert share == pytest.approx(BAD.loss, abs=5 * math.sqrt(BAD.loss / sent.delivered))
    with join_by_relay(network.hosts, LineQuality(delay_s=0.001, bytes_per_s=BAD.bytes_per_s)):
        rate = measured_rate(network, 20_000_000)
        assert 0.5 * BAD.bytes_per_s < rate < 1.02 * BAD.bytes_per_s, "TCP without loss nearly fills the line"


@pytest.mark.system
def test_each_direction_can_be_cut_and_healed(network: Network) -> None:
    with join_by_relay(network.hosts, LineQuality()) as relay, echo_on_the_second_host(network):
        assert round_trips(network, 2)
        for lines in ((0,), (1,), ()):
            before = relay.counts()
            relay.cut(*lines)
            assert not round_trips(network, 2), f"lines {lines or 'both'} are cut"
            _assert_cut(relay, lines or (0,), [count.cut for count in before])
            relay.heal()
            assert round_trips(network, 2)


def _assert_cut(relay: Relay, lines: tuple[int, ...], before: list[int]) -> None:
    end = time.monotonic() + 5.0
    while not all(relay.counts()[line].cut > before[line] for line in lines):
        assert time.monotonic() < end, f"packets of lines {lines} are counted as cut"
