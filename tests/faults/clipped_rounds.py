"""Rounds that are clipped by the global norm: on the workers of a job, and in one process. Also a worker that dies.

As a program it is a worker that ends itself with SIGKILL at clock DEATH, at the point that its argument names, if it
has the last rank. The others write the norms of all rounds and the weights into the run's folder.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from message_faults import LOSE, REPEAT, message_fault
from torch import Tensor, nn

from echelon.cluster.messages import PushHeader
from echelon.environment import Job
from echelon.faults import Fault, Faults, Kind
from echelon.kvstore import KVStore
from echelon.kvstore.create import join
from echelon.kvstore.servers.store import ServerStore
from echelon.transport.choose import by_name
from echelon.transport.faulty import FaultyTransport
from plain_sgd import PLAIN_SGD

CLOCKS, MAX_NORM = 5, 1.0
SHAPES = {"narrow": (3, 5), "wide": (70, 1000)}  # wide: a part of it on every server
Rounds = tuple[list[float], list[Tensor]]  # the norm of every round, and the weights at the end

DEATH = 2
BEFORE_NORM = "before norm"  # after its pushes have arrived
BETWEEN_TOTALS = "between totals"  # when one of two servers has received the total


def gradients(rank: int, clock: int) -> list[Tensor]:
    """Return the gradients of a worker; their norm is above MAX_NORM in some rounds only."""
    draw = torch.Generator().manual_seed(10 * clock + rank)
    return [torch.randn(shape, generator=draw) * (0.001 if clock % 2 else 1.0) for shape in SHAPES.values()]


def run_rounds(kv: KVStore, after_pushes: Callable[[int], None] = lambda clock: None) -> Rounds:
    """Push and clip on one worker, whose gradients have the weight 1 + rank."""
    assert isinstance(kv, ServerStore)
    names = list(SHAPES)
    weights = [torch.zeros(shape) for shape in SHAPES.values()]
    kv.init(names, weights)
    kv.use_optimizer(PLAIN_SGD)
    norms = []
    for clock in range(CLOCKS):
        tickets = []
        for name, gradient in zip(names, gradients(kv.rank, clock), strict=True):
            kv.views(name)[1].copy_(gradient)
            tickets += kv.push_bucket(kv.slots([name]), PushHeader(float(1 + kv.rank), gated=True))
        after_pushes(clock)
        norms.append(kv.clip(kv.slots(names), MAX_NORM))
        kv.wait(tickets)
    kv.pull(names, weights)
    return norms, weights


def in_one_process(workers_of: Callable[[int], Sequence[int]]) -> Rounds:
    """Return the same for one process that clips the mean, weighted by samples. `workers_of` a clock: who pushed it."""
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    norms = []
    for clock in range(CLOCKS):
        samples = {worker: 1.0 + worker for worker in workers_of(clock)}
        pushed = {worker: gradients(worker, clock) for worker in samples}
        for number, weight in enumerate(weights):
            weight.grad = torch.zeros_like(weight)
            for worker, share in samples.items():
                weight.grad += pushed[worker][number] * (share / sum(samples.values()))
        norms.append(float(nn.utils.clip_grad_norm_(weights, MAX_NORM)))
        optimizer.step()
    return norms, [weight.detach() for weight in weights]


def main() -> None:
    job = Job.from_environment()
    assert job.run_dir is not None
    point, dies = sys.argv[1], job.rank == job.num_workers - 1

    def end(fault: Fault) -> None:
        if fault.kind == Kind.DROP:
            os.kill(os.getpid(), signal.SIGKILL)

    faults = [message_fault(action, job.num_workers - 1, "ApplyScaled", DEATH) for action in (REPEAT, LOSE)]
    at_totals = faults if dies and point == BETWEEN_TOTALS else []
    kv = join("dist_sync", job, FaultyTransport(by_name(job.transport), Faults(at_totals, on_fire=end)))

    def after_pushes(clock: int) -> None:
        if dies and point == BEFORE_NORM and clock == DEATH:
            kv.use_optimizer(PLAIN_SGD)  # answered after the pushes, which have then arrived at the servers
            os.kill(os.getpid(), signal.SIGKILL)

    found = run_rounds(kv, after_pushes)
    torch.save(found, Path(job.run_dir) / f"rounds-{kv.rank}.pt")
    kv.close()


if __name__ == "__main__":
    main()
