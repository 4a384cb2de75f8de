"""The contenders of `echelon bench pushpull`: how each job is put together from processes.

All of them do the same step on the same shapes with the same optimizer (SGD, lr 0.1, momentum 0.9, weight decay 1e-4),
gradients and weights in float32, each worker with gradients of its own. All traffic stays on loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.bench.harness.alternate import Contender
from echelon.bench.harness.job import job_specs, local_job
from echelon.bench.harness.mxnet_environment import MXNET_DEFAULTS, MXNET_STORES, mxnet_python
from echelon.bench.harness.process import ProcessContender, ProcessSpec
from echelon.environment import Job
from echelon.errors import UsageError

# What `mxnet_tuned` sets, chosen from five runs of 5 to 7 settings in turn (ResNet-50, 2 workers, 2 servers, dist_sync,
# two cores that others used too, so single rounds differ by half). Medians over those of its defaults, a figure a run:
#   DMLC_LOCAL=1 (unix sockets)             1.08 0.91 0.82 1.13 0.85    kept where TCP is not asked for
#   MXNET_CPU_WORKER_NTHREADS=2             0.93 0.93                   with the next, together 0.96: kept for TCP;
#   OMP_WAIT_POLICY=passive                 0.83 0.93                   on top of unix sockets 1.03 1.01: left out
#   OMP_NUM_THREADS=1                       1.03 0.97                   left out
#   MXNET_KVSTORE_REDUCTION_NTHREADS=1      0.80 0.99                   left out
#   MXNET_KVSTORE_BIGARRAY_BOUND=100000     0.83 0.96                   left out
#   kv.pushpull instead of push and pull    0.75 to 0.95 (sync), 1.05 (async)
MXNET_OVER_TCP = {"MXNET_CPU_WORKER_NTHREADS": "2", "OMP_WAIT_POLICY": "passive"}
MXNET_OVER_UNIX_SOCKETS = {"DMLC_LOCAL": "1"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What every contender is asked to do. `work_dir` is for logs and rendezvous, and goes when the run ends."""

    shapes_file: Path
    work_dir: Path
    num_workers: int = 2
    num_servers: int = 2
    kv_store: str = "dist_sync"
    transport: str = "auto"


def echelon(plan: Plan) -> Contender:
    """Scheduler, servers and workers of Echelon, each `python -m echelon.bench.pushpull.worker_echelon` in its role."""
    worker = [sys.executable, "-m", "echelon.bench.pushpull.worker_echelon"]
    argv = [*worker, "--shapes", str(plan.shapes_file), "--kv-store", plan.kv_store]
    return ProcessContender("echelon", job_specs(_job(plan), argv), plan.work_dir)


def gloo(plan: Plan) -> Contender:
    """As many ranks as there are workers; servers have no counterpart here."""
    argv = [sys.executable, "-m", "echelon.bench.pushpull.worker_gloo", "--shapes", str(plan.shapes_file)]
    argv += ["--store", str(plan.work_dir / "gloo.store"), "--world-size", str(plan.num_workers)]
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = range(plan.num_workers)
    specs = [ProcessSpec(f"rank {rank}", [*argv, "--rank", str(rank)], env, driven=True) for rank in ranks]
    return ProcessContender("gloo", specs, plan.work_dir)


def echelon_copy(plan: Plan) -> Contender:
    """Echelon's plain API: the caller's own tensors, copied in and out within the step."""
    worker = [sys.executable, "-m", "echelon.bench.pushpull.worker_echelon", "--copy"]
    argv = [*worker, "--shapes", str(plan.shapes_file), "--kv-store", plan.kv_store]
    return ProcessContender("echelon_copy", job_specs(_job(plan), argv), plan.work_dir)


def mxnet(plan: Plan) -> Contender:
    """MXNet as its own launcher starts it and its own examples drive it: push everything, then pull everything."""
    return _mxnet("mxnet", plan, MXNET_DEFAULTS)


def mxnet_tuned(plan: Plan) -> Contender:
    """MXNet at its best here: the settings above, and one call a key under dist_sync."""
    env = MXNET_DEFAULTS | (MXNET_OVER_TCP if plan.transport == "tcp" else MXNET_OVER_UNIX_SOCKETS)
    return _mxnet("mxnet_tuned", plan, env, *(["--one-call"] if plan.kv_store == "dist_sync" else []))


def _mxnet(name: str, plan: Plan, env: Mapping[str, str], *options: str) -> Contender:
    if plan.kv_store not in MXNET_STORES:
        raise UsageError(f"MXNet has no {plan.kv_store!r}; compare with it under {' or '.join(MXNET_STORES)}")
    script = Path(__file__).with_name("worker_mxnet.py")
    # -I: the script's own folder must not shadow the standard library in there.
    argv = [str(mxnet_python()), "-I", str(script), "--shapes", str(plan.shapes_file), "--kv-store", plan.kv_store]
    return ProcessContender(name, job_specs(_job(plan), [*argv, *options], env), plan.work_dir)


MAKERS: dict[str, Callable[[Plan], Contender]] = {
    "echelon": echelon,
    "echelon_copy": echelon_copy,
    "gloo": gloo,
    "mxnet": mxnet,
    "mxnet_tuned": mxnet_tuned,
}


def _job(plan: Plan) -> Job:
    return local_job(plan.num_workers, plan.num_servers, plan.transport)
