"""Threads for the loader: each uses one core, and the rest of the process keeps torch's own parallelism."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_START_TIMEOUT_S = 60.0
_starting = threading.Lock()


def start_threads(threads: int, equip: Callable[[], None]) -> ThreadPoolExecutor:
    """Start all threads, each with torch's own parallelism off; the rest of the process keeps it.

    torch.set_num_threads holds for the calling thread and for threads that have not used torch yet, so the value is
    put back here once every thread has taken its own.
    """
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # Makes torch take its default now; later it would overwrite the next line's.
        torch.set_num_threads(1)
        equip()

    with _starting:
        before = torch.get_num_threads()
        executor = ThreadPoolExecutor(threads, "echelon-data", begin)
        for _ in range(threads):
            executor.submit(started.wait, _START_TIMEOUT_S)
        started.wait(_START_TIMEOUT_S)
        torch.set_num_threads(before)
    return executor
