"""A bad link between two hosts of system tests: a relay between two TUN devices. Needs root.

    with join_by_relay([h1, h2], BAD) as relay:      # wan0 on both: 10.88.0.1 and 10.88.0.2
        h1.run(["ping", "-c", "3", "10.88.0.2"])
        relay.cut()                             # nothing arrives any more, and no side gets an error: half-open
        relay.heal()

The kernel of the tests may have no netem, so a process reads every packet from one device, and writes those that are
not lost to the other device when they are due (`lossy_line.py`). The relay moves as many packets as Python can read and
write; large packets (`mtu`) make it faster.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

from lossy_line import Counts, LineQuality, LossyLine

DEVICE = "wan0"
ADDRESSES = ("10.88.0.1", "10.88.0.2")
BAD = LineQuality(delay_s=0.025, loss=0.01, bytes_per_s=100e6 / 8)
WORSE = LineQuality(delay_s=0.025, loss=0.05, bytes_per_s=100e6 / 8)
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_PACKET = 1 << 16
_TURN_PACKETS = 64  # read from one device before the other one has its turn


class Relay:
    """The relay as a test sees it. `lines` are numbered by the side that sends: 0 is the first host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def cut(self, *lines: int) -> None:
        """Lose everything that these hosts send, by default both, until `heal`."""
        self._call({"cut": list(lines) or [0, 1]})

    def heal(self) -> None:
        """Carry packets in both directions again."""
        self._call({"cut": []})

    def block(self, ports: Sequence[int]) -> None:
        """Lose all packets of these TCP ports, as a firewall that has forgotten a connection."""
        self._call({"block": list(ports)})

    def counts(self) -> list[Counts]:
        """Return what has happened to the packets of each line."""
        return [Counts(**line) for line in self._call({})]

    def _call(self, command: dict[str, list[int]]) -> list[dict[str, int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer: list[dict[str, int]] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def join_by_relay(hosts: Sequence[Host], quality: LineQuality, *, seed: int = 0, mtu: int = 1500) -> Iterator[Relay]:
    """Give two hosts a further link, `wan0`, of this quality in each direction."""
    networks = [str(host.first.pid) for host in hosts]
    command = [sys.executable, __file__, *networks, "--quality", json.dumps(asdict(quality)), "--seed", str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for host, address in zip(hosts, ADDRESSES, strict=True):
                host.run(["ip", "addr", "add", f"{address}/24", "dev", DEVICE])
                host.run(["ip", "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "10000", "up"])
            yield Relay(process)
        finally:
            process.kill()


def carry(devices: Sequence[int], lines: Sequence[LossyLine]) -> None:
    """Move packets from each device to the other one, and obey commands, until standard input ends."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    for index, device in enumerate(devices):
        selector.register(device, selectors.EVENT_READ, index)
    while True:
        waits = [at for line in lines if (at := line.next_at()) is not None]
        timeout_s = max(0.0, min(waits) - time.monotonic()) if waits else None
        for key, _ in selector.select(timeout_s):
            if key.data is not None:
                _read_packets(key.fd, lines[key.data])
            elif not _obey(sys.stdin.readline(), lines):
                return
        for index, line in enumerate(lines):
            for packet in line.due(time.monotonic()):
                with suppress(OSError):  # EIO: the device is down; ENOBUFS: its queue is full
                    os.write(devices[1 - index], packet)


def _obey(command: str, lines: Sequence[LossyLine]) -> bool:
    """Carry out a command of the test and answer with the counts. Return False at the end of the input."""
    if not command:
        return False
    wanted = json.loads(command)
    for index, line in enumerate(lines):
        line.is_cut = index in wanted["cut"] if "cut" in wanted else line.is_cut
        line.blocked_ports |= frozenset(wanted.get("block", ()))
    print(json.dumps([line.counts.as_dict() for line in lines]), flush=True)
    return True


def _read_packets(device: int, line: LossyLine) -> None:
    with suppress(BlockingIOError):
        for _ in range(_TURN_PACKETS):
            line.put(os.read(device, _MAX_PACKET), time.monotonic())


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


def main() -> None:
    """Open the devices, report that, and relay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", type=int, nargs=2, help="a process in the network of each host")
    parser.add_argument("--quality", type=json.loads, required=True, help="the fields of LineQuality as JSON")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    devices = [_open_device(network) for network in args.networks]
    print("ready", flush=True)
    quality = LineQuality(**args.quality)
    carry(devices, [LossyLine(quality, args.seed + index) for index in range(2)])


if __name__ == "__main__":
    main()
else:
    from hosts import Host
