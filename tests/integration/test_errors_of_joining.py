"""Errors of workers that create different stores, use a closed store, or join a job that they have left."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from error_jobs import DEADLINE_S, check_still_works, error_of, prepare

import forked
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.kvstore.create import join
from echelon.kvstore.servers.session import SESSIONS
from echelon.launch.threads.in_process import run
from echelon.scheduler import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport.in_process import InProcessTransport
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport


@pytest.mark.parametrize("transport", [None, SharedMemoryTransport, TcpTransport])
@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (("dist_sync", {}), ("dist_async", {}), ("dist_sync()", "dist_async()")),
        (
            ("dist_ssync", {"staleness": 1}),
            ("dist_ssync", {"staleness": 4}),
            ("dist_ssync(staleness=1)", "dist_ssync(staleness=4)"),
        ),
        (
            ("dist_gsync", {"groups": [[0, 1]]}),
            ("dist_gsync", {"groups": [[0], [1]]}),
            ("dist_gsync(groups=[[0, 1]])", "dist_gsync(groups=[[0], [1]])"),
        ),
    ],
)
def test_workers_that_create_different_stores(ours: Any, theirs: Any, words: tuple[str, str], transport: Any) -> None:
    """All servers take the same store. The worker with the other one gets an error, and the job goes on without it."""
    messages: list[str] = []
    worked: list[int] = []

    def program(kv: KVStore) -> None:
        while kv.num_workers > 1:  # until only the worker with the accepted store is left
            kv.barrier()
        prepare(kv)
        check_still_works(kv)
        worked.append(kv.rank)

    with pytest.raises(UsageError) as caught:
        run_two(program, ours, theirs, transport() if transport else None)
    messages.append(str(caught.value))
    assert len(worked) == 1
    assert all(word in messages[0] for word in words)
    assert messages[0].startswith(f"worker {1 - worked[0]}: server 0: worker {worked[0]} created ")
    assert "all workers must create the same store" in messages[0]


def run_two(program: Callable[[KVStore], None], ours: Any, theirs: Any, transport: Any) -> None:
    """Run a job whose two workers create different stores, and raise the first error."""
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job(scheduler_port=listener.getsockname()[1], num_workers=2, num_servers=2, timeout_s=DEADLINE_S)
    network = transport or InProcessTransport()

    def work(rank: int) -> None:
        name, dials = (ours, theirs)[rank]
        own = job.as_role("worker", rank)
        try:
            program(join(name, own, network, **dials))
        finally:
            SESSIONS.finish(own)

    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(serve_scheduler, job, listener)]
        jobs += [pool.submit(serve_server, job.as_role("server", rank), network) for rank in range(2)]
        workers = [pool.submit(work, rank) for rank in range(2)]
    assert [done.result() for done in jobs] == [0, 0, 0]
    for worker in workers:
        worker.result()


def after_close(folder: Path, kv: KVStore) -> list[str]:
    kv.init("good", torch.zeros(3))
    kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
    kv.barrier()
    kv.close()
    one = torch.ones(3)
    return [
        error_of(lambda: kv.push("good", one)),
        error_of(lambda: kv.pull("good", one)),
        error_of(lambda: kv.pushpull("good", one)),
        error_of(lambda: kv.init("other", one)),
        error_of(lambda: kv.set_optimizer("sgd", lr=1.0, momentum=0.5)),
        error_of(lambda: kv.save_optimizer_states(folder / "states")),
        error_of(lambda: kv.load_optimizer_states(folder / "states")),
        error_of(kv.barrier),
        error_of(kv.retire),
        error_of(lambda: kv.halt("enough")),
    ]


@pytest.mark.parametrize(
    ("runs", "store", "num_workers"),
    [
        (run, "dist_sync", 2),
        (run, "dist_async", 2),
        (forked.run, "dist_sync", 2),
        (forked.run, "nccl", 2),
        (forked.run, "local", 1),
    ],
)
def test_every_call_after_close_raises_the_same_error(
    runs: Callable[..., list[list[str]]], store: str, num_workers: int, tmp_path: Path
) -> None:
    found = runs(partial(after_close, tmp_path), store, num_workers=num_workers, timeout_s=DEADLINE_S)
    for rank, messages in enumerate(found):
        closed = f"worker {rank}: this store is closed; close it after the last call"
        assert [text.startswith(closed) for text in messages] == [True] * 10, messages


def test_a_process_that_has_left_its_job_cannot_join_again() -> None:
    """It fails at once and not after the timeout for a scheduler that has ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    whole = Job(scheduler_port=listener.getsockname()[1], num_workers=2, num_servers=1, timeout_s=60.0)
    transport = InProcessTransport()

    def rejoin(rank: int) -> str:
        join("dist_sync", whole.as_role("worker", rank), transport).close()
        SESSIONS.finish(whole.as_role("worker", rank))
        began = time.monotonic()
        message = error_of(lambda: join("dist_sync", whole.as_role("worker", rank), transport))
        assert time.monotonic() - began < DEADLINE_S
        return message

    with ThreadPoolExecutor(4) as pool:
        pool.submit(serve_scheduler, whole, listener)
        pool.submit(serve_server, whole.as_role("server", 0), transport)
        messages = [job.result() for job in [pool.submit(rejoin, rank) for rank in range(2)]]
    for message in (*messages, rejoin_later(whole, transport)):
        assert f"this process has left the job of 127.0.0.1:{whole.scheduler_port}" in message
        assert "create all stores and Trainers before the process leaves the job" in message


def rejoin_later(whole: Job, transport: InProcessTransport) -> str:
    """Join again after the scheduler has ended."""
    return error_of(lambda: join("dist_sync", whole.as_role("worker", 0), transport))
