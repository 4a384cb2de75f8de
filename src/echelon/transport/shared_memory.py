"""The transport on one machine: messages over TCP, tensors in memory that both sides map.

A block is a memfd. It has no name in the file system, and it disappears with the last process that maps it, even after
SIGKILL. A peer of the same user opens it through /proc/PID/fd. The first page holds a random token that the descriptor
repeats. A wrong token means another machine, another PID namespace or a reused PID; the peer then uses frames.
Descriptors arrive over the network, so one of another form, or one that leads to another kind of file, is rejected.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
from pathlib import Path

from echelon.transport.interface import Block
from echelon.transport.sockets import TcpTransport

_PAGE = 4096
_TOKEN_BYTES = 16
_NAME = "echelon"
_LINK = f"/memfd:{_NAME} (deleted)"  # the kernel's name for such a file
_DESCRIPTOR = re.compile(
    r"(?P<boot>[0-9a-f-]{36}) (?P<pid>[0-9]{1,10}) (?P<file>[0-9]{1,10}) (?P<size>[0-9]{1,15}) (?P<token>[0-9a-f]{32})"
)


class SharedBlock(Block):
    """A memfd of this process, mapped into its memory."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._file, _PAGE + num_bytes)
        mapped = mmap.mmap(self._file, _PAGE + num_bytes)
        token = secrets.token_bytes(_TOKEN_BYTES)
        mapped[:_TOKEN_BYTES] = token
        descriptor = f"{_boot_id()} {os.getpid()} {self._file} {_PAGE + num_bytes} {token.hex()}"
        super().__init__(memoryview(mapped)[_PAGE:], descriptor)

    def __del__(self) -> None:
        os.close(self._file)


class SharedMemoryTransport(TcpTransport):
    """Shared memory where a peer can attach it, frames elsewhere."""

    name = "shm"

    def allocate(self, num_bytes: int) -> Block:
        """Return zeroed memory that a peer on this machine can attach."""
        return SharedBlock(num_bytes)

    def attach(self, descriptor: str) -> memoryview | None:
        """Return a peer's memory, or None if it is not on this machine or cannot be opened."""
        found = _DESCRIPTOR.fullmatch(descriptor)
        if found is None or found["boot"] != _boot_id():
            return None
        try:
            opened = os.open(f"/proc/{found['pid']}/fd/{found['file']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = int(found["size"])
            if os.readlink(f"/proc/self/fd/{opened}") != _LINK or os.fstat(opened).st_size != size:
                return None
            mapped = mmap.mmap(opened, size)
        except OSError:
            return None
        finally:
            os.close(opened)
        if mapped[:_TOKEN_BYTES] != bytes.fromhex(found["token"]):
            return None
        return memoryview(mapped)[_PAGE:]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
