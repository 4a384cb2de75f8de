"""A long and lossy link between two hosts of system tests: a relay between two TUN devices. Needs root.

    with a_relay(h1, h2, delay_s=0.02, loss=0.01):      # wan0 on both: 10.88.0.1 and 10.88.0.2
        h1.run(["ping", "-c", "3", "10.88.0.2"])

The kernel of the tests may have no netem, so a process reads every packet from one device, drops some, and writes the
others to the other device after the delay. `rate` limits what each host sends, in the words of tc. The relay moves as
many packets as Python can read and write; large packets (`mtu`) make it faster.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

DEVICE = "wan0"
ADDRESSES = ("10.88.0.1", "10.88.0.2")
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_PACKET = 1 << 16
_MAX_HELD = 64 << 20  # bytes in one direction; a router would drop packets, too


class Line:
    """One direction of the link: the packets that are on their way."""

    def __init__(self, delay_s: float, loss: float, chance: random.Random) -> None:
        self._delay_s, self._loss, self._chance = delay_s, loss, chance
        self._packets: deque[tuple[float, bytes]] = deque()
        self._num_held = 0
        self.dropped = 0

    def put(self, packet: bytes, now: float) -> None:
        """Let a packet enter, unless it is lost."""
        if self._chance.random() < self._loss or self._num_held > _MAX_HELD:
            self.dropped += 1
            return
        self._packets.append((now + self._delay_s, packet))
        self._num_held += len(packet)

    def due(self, now: float) -> Iterator[bytes]:
        """Yield and remove the packets that arrive by now."""
        while self._packets and self._packets[0][0] <= now:
            packet = self._packets.popleft()[1]
            self._num_held -= len(packet)
            yield packet

    def next_at(self) -> float | None:
        """Return when the next packet arrives, or None if none is on its way."""
        return self._packets[0][0] if self._packets else None


def relay(devices: Sequence[int], lines: Sequence[Line]) -> None:
    """Move packets from each device to the other one until this process is killed."""
    selector = selectors.DefaultSelector()
    for index, device in enumerate(devices):
        selector.register(device, selectors.EVENT_READ, index)
    while True:
        waits = [at for line in lines if (at := line.next_at()) is not None]
        timeout_s = max(0.0, min(waits) - time.monotonic()) if waits else None
        for key, _ in selector.select(timeout_s):
            _read_all(key.fd, lines[key.data])
        for index, line in enumerate(lines):
            for packet in line.due(time.monotonic()):
                with suppress(OSError):  # EIO: the device is down; ENOBUFS: its queue is full
                    os.write(devices[1 - index], packet)


def _read_all(device: int, line: Line) -> None:
    try:
        for _ in range(64):
            line.put(os.read(device, _MAX_PACKET), time.monotonic())
    except BlockingIOError:
        pass


def _open_device(network: int) -> int:
    """Return a TUN device in the network namespace of a process, without staying there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/proc/{network}/ns/net") as other:
        if libc.setns(other.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {network}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_WITHOUT_HEADER))
        finally:
            libc.setns(own.fileno(), _CLONE_NEWNET)
    return device


@contextmanager
def a_relay(
    one: Host, other: Host, *, delay_s: float, loss: float, rate: str | None = None, mtu: int = 1500
) -> Iterator[subprocess.Popen[str]]:
    """Give two hosts a further link, `wan0`, with a delay in each direction and a share of packets that are lost."""
    networks = [str(host.first.pid) for host in (one, other)]
    command = [sys.executable, __file__, *networks, "--delay-s", str(delay_s), "--loss", str(loss)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for host, address in zip((one, other), ADDRESSES, strict=True):
                host.run(["ip", "addr", "add", f"{address}/24", "dev", DEVICE])
                host.run(["ip", "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "10000", "up"])
                if rate is not None:
                    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                    host.run(["tc", "qdisc", "add", "dev", DEVICE, "root", *limit])
            yield process
        finally:
            process.kill()


def main() -> None:
    """Open the devices, report that, and relay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", type=int, nargs=2, help="a process in the network of each host")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0, help="the share of packets that are dropped")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    devices = [_open_device(network) for network in args.networks]
    print("ready", flush=True)
    relay(devices, [Line(args.delay_s, args.loss, random.Random(args.seed + index)) for index in range(2)])


if __name__ == "__main__":
    main()
else:
    from hosts import Host
