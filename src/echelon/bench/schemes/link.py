"""A slow link to one process: a network namespace of this machine behind a veth pair that tc limits. Needs root.

    with slow_link("5mbit") as link:
        ...  # processes started with link.command([...]) reach this machine at link.address, and no other way

A child process keeps the namespace alive. The kernel kills that child when this process dies, even by SIGKILL, and then
removes the namespace and the veth pair. So nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from echelon.errors import JobError
from echelon.launch.addresses import own_addresses
from echelon.launch.supervision.processes import ChildProcess

PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_NETWORK = "198.18"  # reserved for benchmarks between networks (RFC 2544), so no real network has these addresses
_INSIDE = "eth0"
# A burst of 32 kB passes at once, and the queue holds 50 ms. tc needs a burst of at least one timer tick of the rate.
_LIMIT = ("burst", "32kb", "latency", "50ms")
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The link: this machine's address on it, and the process in whose namespace its other end is."""

    address: str
    holder_pid: int

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs another one behind the link."""
        return ["nsenter", f"--target={self.holder_pid}", "--net", "--", *words]


def why_impossible() -> str:
    """Return why this process cannot make a slow link; empty if it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"a network namespace needs {', '.join(missing)} (Debian's packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"a network namespace cannot be made: {done.stderr.strip()}" if done.returncode else ""


@contextmanager
def slow_link(rate: str) -> Iterator[SlowLink]:
    """Make the link. `rate` limits each direction, as tc writes it: 5mbit."""
    outside = f"echelon{os.getpid()}"
    holder = ChildProcess("slow link", ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"], {})
    try:
        assert holder.stdout is not None
        if (line := holder.stdout.readline()) != b"ready\n":
            raise JobError(f"a network namespace cannot be made: {(line + holder.stdout.read()).decode().strip()}")
        subnet = _free_subnet()
        link = SlowLink(f"{subnet}.1", holder.pid)
        _call(f"ip link add {outside} type veth peer name {_INSIDE} netns {holder.pid}".split())
        _call(f"ip addr add {link.address}/24 dev {outside}".split())
        _call(f"ip link set {outside} up".split())
        _call(link.command(f"ip addr add {subnet}.2/24 dev {_INSIDE}".split()))
        _call(link.command(f"ip link set {_INSIDE} up".split()))
        _call(["tc", "qdisc", "add", "dev", outside, "root", "tbf", "rate", rate, *_LIMIT])
        _call(link.command(["tc", "qdisc", "add", "dev", _INSIDE, "root", "tbf", "rate", rate, *_LIMIT]))
        yield link
    finally:
        # The kernel removes the pair with the namespace, but later; the next link may have the same name.
        subprocess.run(["ip", "link", "delete", outside], capture_output=True, timeout=_TIMEOUT_S, check=False)
        holder.close()


def _free_subnet() -> str:
    used = {address for _, address in own_addresses()}
    return next(net for last in range(256) if f"{(net := f'{_NETWORK}.{last}')}.1" not in used)


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise JobError(f"the slow link cannot be made: `{' '.join(command)}` failed: {done.stderr.strip()}")
