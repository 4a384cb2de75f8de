"""Writes a file past the kernel's page cache (O_DIRECT), if the file system can.

For a write through the page cache the kernel allocates and fills a page for every 4 kB, on a core that the training
needs, too: see docs/log.md for what that cost the steps beside it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable

_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it
_CHUNK_BYTES = 4 << 20  # of one write
_BLOCK_BYTES = mmap.PAGESIZE  # a multiple of the blocks of disks: direct writes have such addresses and lengths


def aligned_memory(num_bytes: int) -> memoryview:
    """Return zeroed memory that can be written directly."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:num_bytes]


def write_direct(number: int, data: memoryview, check: Callable[[], None]) -> None:
    """Write aligned memory to an open file that is empty. `check` is called before each chunk and may raise."""
    is_direct = _set_direct(number, True)
    whole = len(data) // _BLOCK_BYTES * _BLOCK_BYTES
    begin = 0
    while begin < len(data):
        check()
        if is_direct and begin >= whole:
            is_direct = _set_direct(number, False)  # less than a block is left
        end = min(begin + _CHUNK_BYTES, whole if is_direct else len(data))
        try:
            begin += os.write(number, data[begin:end])
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct:
                raise
            is_direct = _set_direct(number, False)  # the disk has larger blocks, or a write was cut short within one


def _set_direct(number: int, on: bool) -> bool:
    """Choose whether later writes are direct. Return whether they are: some file systems have only the page cache."""
    flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~_DIRECT
    try:
        fcntl.fcntl(number, fcntl.F_SETFL, flags | _DIRECT if on else flags)
    except OSError:
        return False
    return on and bool(_DIRECT)
