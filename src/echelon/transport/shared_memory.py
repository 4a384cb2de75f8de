"""The transport on one machine: messages over TCP, tensors in memory that both sides map.

A block is a memfd. It has no name in the file system, and it disappears with the last process that maps it, even after
SIGKILL. A peer of the same user opens it through /proc/PID/fd. The first page holds a random token that the descriptor
repeats. A wrong token means another machine, another PID namespace or a reused PID; the peer then uses frames.
Descriptors arrive over the network, so one of another form, or one that leads to another kind of file, is rejected.
The size of a block is sealed: a process that maps it cannot be stopped by a peer that truncates it.
"""

from __future__ import annotations

import fcntl
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
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LINK = f"/memfd:{_NAME} (deleted)"  # the kernel's name for such a file
_DESCRIPTOR = re.compile(
    r"(?P<boot>[0-9a-f-]{36}) (?P<pid>[0-9]{1,10}) (?P<file>[0-9]{1,10}) (?P<size>[0-9]{1,15}) (?P<token>[0-9a-f]{32})"
)


class SharedBlock(Block):
    """A memfd of this process, mapped into its memory."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, _PAGE + num_bytes)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
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
        path, size = f"/proc/{found['pid']}/fd/{found['file']}", int(found["size"])
        try:
            if os.readlink(path) != _LINK or size < _PAGE:
                return None  # opening a file of another kind could have effects
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if not _is_block(opened, size):
                return None
            mapped = mmap.mmap(opened, size)
        except OSError:
            return None
        finally:
            os.close(opened)
        if mapped[:_TOKEN_BYTES] != bytes.fromhex(found["token"]):
            return None
        return memoryview(mapped)[_PAGE:]


def _is_block(opened: int, size: int) -> bool:
    """Return whether a file is a memfd of this size that nobody can truncate, on ordinary pages."""
    if os.readlink(f"/proc/self/fd/{opened}") != _LINK or fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        return False
    ordinary = os.fstatvfs(opened).f_bsize == mmap.PAGESIZE  # a huge page that is missing would stop the process
    return ordinary and os.fstat(opened).st_size == size


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
