"""The addresses of this machine: the one to announce to the other hosts of a job, and the interface it belongs to."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence

import psutil

from echelon.errors import UsageError
from echelon.transport.listening import LOOPBACK
from echelon.transport.registration import interface_address

_OUTSIDE = "198.51.100.1"  # an address that is never this machine's (RFC 5737); nothing is sent to it


def announced_address(interface: str | None, name: str, peers: Sequence[str]) -> str:
    """Return the address of this machine that other hosts of a job reach it at.

    That of the interface, if one is given. Otherwise the one that `name`, the machine's own name in the hosts file,
    stands for, and else the one from which a peer is reached. A loopback address serves only a job on one machine.
    """
    if interface:
        return interface_address(interface)
    others = [peer for peer in peers if peer != name]
    for address in _candidates(name, others):
        if _is_own(address) and not (others and ipaddress.ip_address(address).is_loopback):
            return address
    have = ", ".join(f"{name} {address}" for name, address in own_addresses())
    raise UsageError(
        f"the address of {name} for the other hosts is unknown: the name stands for no address of this machine, which "
        f"has {have}; name its interface with -i"
    )


def launcher_address(interface: str | None, hosts: Sequence[str], *, one_machine: bool) -> str:
    """Return the address of this machine for hosts that connect to the launcher.

    `hosts` are those of the hosts file. Without one, another system chooses the hosts, which reach this machine over
    its default route, unless the job stays on `one_machine`.
    """
    if interface or hosts:
        return announced_address(interface, os.uname().nodename, hosts)
    if one_machine:
        return LOOPBACK
    return address_towards(_OUTSIDE) or announced_address(None, os.uname().nodename, [])


def is_this_machine(name: str) -> bool:
    """Return whether a host name stands for an address of this machine."""
    return any(_is_own(address) for address in _candidates(name, []))


def own_addresses() -> list[tuple[str, str]]:
    """Return the interfaces of this machine with their IPv4 addresses."""
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def interface_towards(host: str) -> str | None:
    """Return the interface whose address this machine uses to reach a host, or None if there is none."""
    address = address_towards(host)
    return next((name for name, own in own_addresses() if own == address), None)


def address_towards(host: str) -> str | None:
    """Return the address of this machine that a host sees, or None if it has no route there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        try:
            probe.connect((host, 9))
        except (OSError, UnicodeError):
            return None
        return str(probe.getsockname()[0])


def _candidates(name: str, others: Sequence[str]) -> Iterator[str]:
    try:
        yield from dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET))
    except (OSError, UnicodeError):  # UnicodeError: no host can have this name
        pass
    for other in others:
        if address := address_towards(other):
            yield address


def _is_own(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
