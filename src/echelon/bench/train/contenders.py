"""The contenders of `echelon bench train`: how each job is put together from processes.

All of them train the same network on batches of the same size with the same SGD, and each worker has the same number
of threads. All traffic stays on loopback.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.bench.harness.job import job_specs, local_job
from echelon.bench.harness.mxnet_environment import MXNET_DEFAULTS, MXNET_STORES, mxnet_python
from echelon.bench.harness.process import ProcessContender, ProcessSpec
from echelon.errors import JobError, UsageError
from echelon.transport.allocator import LARGEST_INT

# What Echelon's workers tell glibc by themselves (`transport.allocator`), as variables: keep freed memory.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(LARGEST_INT)}


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What every contender is asked to do. `work_dir` is for logs and rendezvous, and goes when the run ends."""

    model: str
    batch_size: int
    threads: int
    work_dir: Path
    num_workers: int = 2
    num_servers: int = 2
    kv_store: str = "dist_sync"
    transport: str = "auto"

    @property
    def options(self) -> list[str]:
        """What every worker is told on its command line."""
        return ["--model", self.model, "--batch-size", str(self.batch_size)]


class TrainContender(ProcessContender):
    """A step's time and loss are the means over the workers, since under a relaxed store each has its own pace."""

    def __init__(self, name: str, specs: Sequence[ProcessSpec], work_dir: Path) -> None:
        super().__init__(name, specs, work_dir, step_timeout_s=60.0)
        self.losses: list[float] = []

    def run_round(self, num_steps: int) -> list[float]:
        """As the base class, and the losses are kept."""
        super().run_round(num_steps)
        if any(len(answer.losses) != num_steps for answer in self.answers):
            raise JobError(f"{self.name}: {num_steps} steps, {[len(answer.losses) for answer in self.answers]} losses")
        self.losses += _means([answer.losses for answer in self.answers])
        return _means([answer.step_s for answer in self.answers])


def _means(workers: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*workers, strict=True)]


def echelon(plan: TrainPlan) -> TrainContender:
    """Scheduler, servers and workers of Echelon, each `python -m echelon.bench.train.worker_echelon` in its role."""
    return _echelon("echelon", plan, [])


def gradients(plan: TrainPlan) -> TrainContender:
    """Echelon, but every layer pushes its gradient, none the factors of it."""
    return _echelon("gradients", plan, ["--push-factors", "0"])


def _echelon(name: str, plan: TrainPlan, more: Sequence[str]) -> TrainContender:
    argv = [sys.executable, "-m", "echelon.bench.train.worker_echelon", *plan.options, *more]
    argv += ["--threads", str(plan.threads), "--kv-store", plan.kv_store]
    job = local_job(plan.num_workers, plan.num_servers, plan.transport)
    return TrainContender(name, job_specs(job, argv, _threads(plan)), plan.work_dir)


def ddp(plan: TrainPlan) -> TrainContender:
    """As many ranks as there are workers; servers have no counterpart here."""
    return _ddp("ddp", plan, {})


def ddp_tuned(plan: TrainPlan) -> TrainContender:
    """DDP where somebody knew that page faults are a quarter of its time here, and what to do about it."""
    return _ddp("ddp_tuned", plan, KEPT_MEMORY)


def _ddp(name: str, plan: TrainPlan, env: Mapping[str, str]) -> TrainContender:
    argv = [sys.executable, "-m", "echelon.bench.train.worker_ddp", *plan.options, "--threads", str(plan.threads)]
    argv += ["--store", str(plan.work_dir / f"{name}.store"), "--world-size", str(plan.num_workers)]
    env = {"GLOO_SOCKET_IFNAME": "lo", **_threads(plan), **env}
    ranks = range(plan.num_workers)
    specs = [ProcessSpec(f"rank {rank}", [*argv, "--rank", str(rank)], env, driven=True) for rank in ranks]
    return TrainContender(name, specs, plan.work_dir)


def mxnet(plan: TrainPlan) -> TrainContender:
    """MXNet's Gluon with its own servers."""
    if plan.kv_store not in MXNET_STORES:
        raise UsageError(f"MXNet has no {plan.kv_store!r}; compare with it under {' or '.join(MXNET_STORES)}")
    script = Path(__file__).with_name("worker_mxnet.py")
    # -I: the script's own folder must not shadow the standard library in there.
    argv = [str(mxnet_python()), "-I", str(script), *plan.options, "--kv-store", plan.kv_store]
    job = local_job(plan.num_workers, plan.num_servers, plan.transport)
    return TrainContender("mxnet", job_specs(job, argv, MXNET_DEFAULTS | _threads(plan)), plan.work_dir)


def _threads(plan: TrainPlan) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(plan.threads)}


MAKERS: dict[str, Callable[[TrainPlan], TrainContender]] = {
    "echelon": echelon,
    "gradients": gradients,
    "ddp": ddp,
    "ddp_tuned": ddp_tuned,
    "mxnet": mxnet,
}
