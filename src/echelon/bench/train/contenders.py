"""The contenders of `echelon bench train`: which processes each one starts.

All contenders train the same network with the same batch size and the same SGD, and each worker has the same number of
threads. All traffic uses loopback, or the network between hosts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.bench.harness.job import JobPlan, echelon_specs, gloo_specs, mxnet_specs
from echelon.bench.harness.process import ProcessContender, ProcessSpec
from echelon.errors import JobError
from echelon.transport.listening import LOOPBACK

CLIPPED = ("--max-grad-norm", "1")
# glibc keeps freed memory. Echelon's workers make the same settings themselves (`system.keep_freed_memory`).
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan(JobPlan):
    """The work that every contender of a run does."""

    model: str
    batch_size: int
    threads: int

    @property
    def flags(self) -> list[str]:
        """The flags that every worker program takes."""
        return ["--model", self.model, "--batch-size", str(self.batch_size)]

    @property
    def torch_flags(self) -> list[str]:
        """The flags of the worker programs that use torch."""
        return [*self.flags, "--threads", str(self.threads)]

    @property
    def thread_variables(self) -> dict[str, str]:
        """The environment variables that limit the threads of a worker."""
        return {"OMP_NUM_THREADS": str(self.threads)}


class TrainContender(ProcessContender):
    """A contender that collects losses.

    The time and the loss of a step are the means over the workers, because with a relaxed store each worker has its own
    pace.
    """

    def __init__(self, name: str, specs: Sequence[ProcessSpec], work_dir: Path, address: str = LOOPBACK) -> None:
        super().__init__(name, specs, work_dir, step_timeout_s=60.0, address=address)
        self.losses: list[float] = []

    def run_round(self, num_steps: int) -> list[float]:
        """Run the steps, store their losses and return their times."""
        super().run_round(num_steps)
        if any(len(answer.losses) != num_steps for answer in self.answers):
            raise JobError(f"{self.name}: {num_steps} steps, {[len(answer.losses) for answer in self.answers]} losses")
        self.losses += _means([answer.losses for answer in self.answers])
        return _means([answer.step_s for answer in self.answers])


def _means(workers: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*workers, strict=True)]


def echelon(plan: TrainPlan) -> TrainContender:
    """Return Echelon's Trainer with servers."""
    return _echelon("echelon", plan)


def replicated(plan: TrainPlan) -> TrainContender:
    """Return Echelon with a backup of every slice."""
    return _echelon("replicated", replace(plan, replicas=1))


def gradients(plan: TrainPlan) -> TrainContender:
    """Return Echelon without --push-factors: large linear layers push their gradient, not its factors."""
    return _echelon("gradients", plan, "--push-factors", "0")


def lazy(plan: TrainPlan) -> TrainContender:
    """Return Echelon with lazy_pull: a step does not wait for the new weights, the next forward pass does."""
    return _echelon("lazy", plan, "--lazy-pull", "1")


def clipped(plan: TrainPlan) -> TrainContender:
    """Return Echelon with clipping by the global norm: the servers agree on the norm before they update."""
    return _echelon("clipped", plan, *CLIPPED)


def _echelon(name: str, plan: TrainPlan, *flags: str) -> TrainContender:
    module = "echelon.bench.train.worker_echelon"
    specs = echelon_specs(plan, module, [*plan.torch_flags, *flags], plan.thread_variables)
    return TrainContender(name, specs, plan.work_dir, plan.address)


def ddp(plan: TrainPlan) -> TrainContender:
    """Return torch's DistributedDataParallel."""
    return _ddp("ddp", plan, {})


def ddp_tuned(plan: TrainPlan) -> TrainContender:
    """Return DDP with a glibc that keeps freed memory; page faults otherwise take a quarter of DDP's time here."""
    return _ddp("ddp_tuned", plan, KEPT_MEMORY)


def ddp_clipped(plan: TrainPlan) -> TrainContender:
    """Return DDP with torch's clip_grad_norm_ before every update."""
    return _ddp("ddp_clipped", plan, {}, *CLIPPED)


def _ddp(name: str, plan: TrainPlan, env: Mapping[str, str], *flags: str) -> TrainContender:
    module = "echelon.bench.train.worker_ddp"
    specs = gloo_specs(plan, name, module, [*plan.torch_flags, *flags], {**plan.thread_variables, **env})
    return TrainContender(name, specs, plan.work_dir, plan.address)


def mxnet(plan: TrainPlan) -> TrainContender:
    """Return MXNet's Gluon Trainer with MXNet's servers."""
    script = Path(__file__).with_name("worker_mxnet.py")
    return TrainContender("mxnet", mxnet_specs(plan, script, plan.flags, plan.thread_variables), plan.work_dir)


PEERS: dict[str, Callable[[TrainPlan], TrainContender]] = {
    "ddp": ddp,
    "ddp_tuned": ddp_tuned,
    "mxnet": mxnet,
    "gradients": gradients,
    "lazy": lazy,
    "replicated": replicated,
    "clipped": clipped,
    "ddp_clipped": ddp_clipped,
}
