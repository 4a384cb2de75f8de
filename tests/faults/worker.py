"""A worker of a job with faults: it pushes the gradients of jobs.py and sends the signals that the plan names."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from echelon import faults
from echelon.environment import Job
from echelon.kvstore import KVStore
from echelon.kvstore.create import join
from echelon.transport.choose import transport_of
from echelon.transport.faulty import FaultyTransport
from jobs import AFTER_PUSH, BEFORE_PUSH, IN_PULL, MARK, Fault, Gate, Plan, pid_of, until
from leaks import marked_processes, segments_of
from plain_sgd import PLAIN_SGD

WIDE = 4096


def main() -> None:
    plan = Plan.from_json(sys.argv[1])
    job = Job.from_environment()
    assert job.run_dir is not None
    run = Path(job.run_dir)
    mine = [fault for fault in plan.faults if fault.by == job.rank]
    in_pulls = faults.Faults(
        [
            faults.Fault(faults.Kind.CALL, "worker", fault.rank, fault.clock, "wait.Pull")
            for fault in mine
            if fault.point == IN_PULL
        ],
        rank=job.rank,
        on_fire=lambda fired: fire(next(f for f in mine if (f.point, f.clock) == (IN_PULL, fired.clock)), run),
    )
    transport = FaultyTransport(transport_of(job), in_pulls)
    kv = join(plan.store, job, transport, staleness=plan.staleness, groups=plan.groups)
    table = (plan.clocks, plan.num_workers)
    weights = {"narrow": torch.zeros(table), "wide": torch.zeros(*table, WIDE)}
    kv.init(list(weights), list(weights.values()))
    kv.use_optimizer(PLAIN_SGD)
    kv.pull(list(weights), list(weights.values()))
    for clock in range(plan.clocks):
        step(kv, plan, clock, mine, weights, run)
    kv.barrier()
    kv.pull(list(weights), list(weights.values()))
    assert bool((weights["wide"] == weights["narrow"].unsqueeze(2)).all()), "both keys saw the same updates"
    found = {role: segments(role, 0, run) for role in ("worker", "server")} if kv.rank == 0 else {}
    result = {
        "rank": kv.rank,
        "table": weights["narrow"].tolist(),
        "workers": kv.workers,
        "version": transport.version,
        "segments": found,
        "shared": kv.memory_is_shared,
        "halted": kv.halted,
    }
    (run / f"result-{kv.rank}.json").write_text(json.dumps(result))
    kv.close()


def step(kv: KVStore, plan: Plan, clock: int, mine: list[Fault], weights: dict[str, torch.Tensor], run: Path) -> None:
    (run / f"at-{kv.rank}-{clock}").touch()
    for gate in plan.gates:
        if (gate.rank, gate.clock) == (kv.rank, clock):
            pass_gate(gate, kv, run)
    for fault in mine:
        if (fault.clock, fault.point) == (clock, BEFORE_PUSH):
            fire(fault, run)
    gradients = [torch.zeros_like(weight) for weight in weights.values()]
    for gradient in gradients:
        gradient[clock, kv.rank] = 1
    if plan.together:
        kv.pushpull(list(weights), gradients, list(weights.values()))
        return
    kv.push(list(weights), gradients)
    if any(fault.clock == clock for fault in mine):
        kv.use_optimizer(PLAIN_SGD)  # answered after the push, which has then arrived at the servers
    for fault in mine:
        if (fault.clock, fault.point) == (clock, AFTER_PUSH):
            fire(fault, run)
    kv.pull(list(weights), list(weights.values()))


def pass_gate(gate: Gate, kv: KVStore, run: Path) -> None:
    if gate.gone is not None:
        until(lambda: gate.gone not in kv.workers, f"worker {gate.gone} out of the view")
    if gate.opened is not None:
        opened = run / gate.opened
        until(opened.exists, f"the file {gate.opened}", 200.0)


def fire(fault: Fault, run: Path) -> None:
    """Record the fault, then send its signal."""
    pid = os.getpid() if fault.role == "worker" else pid_of(fault.role, fault.rank, of_this_job(), run)
    line = {"role": fault.role, "rank": fault.rank, "clock": fault.clock, "point": fault.point, "pid": pid}
    with (run / "faults.jsonl").open("a") as file:
        file.write(json.dumps(line | {"at": time.time()}) + "\n")
    os.kill(pid, fault.signal)


def segments(role: str, rank: int, run: Path) -> list[str]:
    return sorted(segments_of(pid_of(role, rank, of_this_job(), run)))


def of_this_job() -> list[int]:
    return marked_processes(MARK, os.environ[MARK])


if __name__ == "__main__":
    main()
