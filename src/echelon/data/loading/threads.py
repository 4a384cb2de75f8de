"""Threads for the loader: each uses one core, and the rest of the process keeps torch's own parallelism."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from echelon.errors import DataError

_START_TIMEOUT_S = 300.0
_starting = threading.Lock()


def start_threads(threads: int, equip: Callable[[], None]) -> ThreadPoolExecutor:
    """Start all threads, each with torch's own parallelism off; the rest of the process keeps it.

    torch.set_num_threads holds for the calling thread and for threads that have not used torch yet, so the value is
    put back here once every thread has taken its own. What `equip` raises in a thread is raised here.
    """
    started = threading.Barrier(threads + 1)
    failures: list[Exception] = []

    def begin() -> None:
        torch.get_num_threads()  # Makes torch take its default now; later it would overwrite the next line's.
        torch.set_num_threads(1)
        try:
            equip()
        except Exception as error:
            failures.append(error)
            started.abort()

    with _starting:
        before = torch.get_num_threads()
        executor = ThreadPoolExecutor(threads, "echelon-data", begin)
        try:
            for _ in range(threads):
                executor.submit(started.wait, _START_TIMEOUT_S)
            started.wait(_START_TIMEOUT_S)
        except threading.BrokenBarrierError:
            executor.shutdown(cancel_futures=True)
            raise (failures or [DataError(f"{threads} threads did not start in {_START_TIMEOUT_S:g} s")])[0] from None
        finally:
            torch.set_num_threads(before)
    return executor
