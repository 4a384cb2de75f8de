"""`echelon bench rows`: what a step of a large table of embeddings costs, by the number of rows that a batch touches.

Scheduler, servers and workers are threads of this process and talk over TCP, so all bytes can be counted. A dense
gradient would send and return the whole table in every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.results import write_result
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run as run_job
from echelon.train.trainer import Trainer
from echelon.transport.interface import CONNECT_S, Block, Buffer, Endpoint, Peer, Transport
from echelon.transport.outbox import Precedence
from echelon.transport.sockets import TcpTransport

TOUCHED = (10, 100, 1000, 10_000)
OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "sparseadam": torch.optim.SparseAdam}
WARMUP_STEPS = 2


class Cost(NamedTuple):
    """A step of one worker."""

    touched: int
    sent_bytes: float
    received_bytes: float
    step_ms: float


def run(args: argparse.Namespace) -> int:
    """Measure the steps of every number of rows, print them and write the result file."""
    check_numbers(args, rows=min(TOUCHED), width=1, num_workers=1, num_servers=1, steps=1)
    console = Console()
    table_bytes = args.rows * args.width * 4
    console.print(f"a table of {args.rows} x {args.width} float32: {table_bytes:,} bytes; per worker and step:")
    costs = []
    for cost in measure(args):
        costs.append(cost._asdict())
        share = (cost.sent_bytes + cost.received_bytes) / (2 * table_bytes)
        console.print(
            f"{cost.touched:>6} rows touched   {cost.sent_bytes:>12,.0f} bytes sent   {cost.received_bytes:>12,.0f} "
            f"received   {share:>8.3%} of a dense step   {cost.step_ms:.2f} ms",
            soft_wrap=True,
        )
    if args.json is not None:
        write_result(args.json, {"table": [args.rows, args.width], "optimizer": args.optimizer, "steps": costs})
    return 0


def measure(args: argparse.Namespace) -> Iterator[Cost]:
    """Yield the cost of a step for each number of rows, with one job for all of them."""
    counted = CountedTransport(TcpTransport())
    touched = [count for count in TOUCHED if count <= args.rows]

    def program(kv: KVStore) -> list[Cost]:
        table = nn.Embedding(args.rows, args.width, sparse=True)
        with Trainer(table, OPTIMIZERS[args.optimizer](table.parameters(), lr=0.1), kv) as trainer:
            return [_step_cost(kv, trainer, table, count, args.steps, counted) for count in touched]

    jobs = {"num_workers": args.num_workers, "num_servers": args.num_servers}
    yield from run_job(program, "dist_sync", transport=counted, **jobs)[0]


def _step_cost(
    kv: KVStore, trainer: Trainer, table: nn.Embedding, count: int, steps: int, counted: CountedTransport
) -> Cost:
    generator = torch.Generator().manual_seed(kv.rank)
    seconds = []
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            kv.barrier()
            before = counted.sent, counted.answered
            kv.barrier()
        rows = torch.randint(0, table.num_embeddings, (count,), generator=generator)
        table(rows).sum().backward()
        began = time.perf_counter()
        trainer.step(count)
        seconds.append(time.perf_counter() - began)
    kv.barrier()
    sent, answered = counted.sent - before[0], counted.answered - before[1]
    kv.barrier()
    parts = steps * kv.num_workers
    return Cost(count, sent / parts, answered / parts, statistics.median(seconds[WARMUP_STEPS:]) * 1e3)


class CountedTransport:
    """A transport that counts the bytes of all messages: `sent` by workers, `answered` by servers."""

    def __init__(self, inner: Transport) -> None:
        self.name = inner.name
        self.sent = 0
        self.answered = 0
        self._inner = inner

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint."""
        endpoint = self._inner.serve(host)
        send = endpoint.send

        def counted(peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
            self.answered += sum(memoryview(frame).nbytes for frame in frames)
            send(peer, frames, precedence)

        endpoint.send = counted  # type: ignore[method-assign]
        return endpoint

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = CONNECT_S) -> Endpoint:
        """Return a worker's endpoint."""
        endpoint = self._inner.connect(name, addresses, wait_s)
        send = endpoint.send

        def counted(peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
            self.sent += sum(memoryview(frame).nbytes for frame in frames)
            send(peer, frames, precedence)

        endpoint.send = counted  # type: ignore[method-assign]
        return endpoint

    def allocate(self, num_bytes: int) -> Block:
        """Return memory of the inner transport."""
        return self._inner.allocate(num_bytes)

    def attach(self, descriptor: str) -> memoryview | None:
        """Return a peer's memory, if the inner transport can reach it."""
        return self._inner.attach(descriptor)
