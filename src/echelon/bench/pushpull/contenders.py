"""The contenders of `echelon bench pushpull`: which processes each one starts.

All contenders do the same step on the same shapes with the same optimizer (SGD, lr 0.1, momentum 0.9, weight decay
1e-4). Gradients and weights are float32, and each worker has gradients of its own. All traffic uses loopback, or the
network between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.bench.harness.job import JobPlan, echelon_specs, gloo_specs, mxnet_specs
from echelon.bench.harness.process import ProcessContender
from echelon.bench.harness.turns import Contender
from echelon.bench.pushpull.iperf import Iperf3
from echelon.bench.pushpull.shapes import num_elements, shapes
from echelon.errors import UsageError

# What `mxnet_tuned` sets. It was chosen from five runs, each with 5 to 7 settings in turns (ResNet-50, 2 workers,
# 2 servers, dist_sync, two cores with other load, so that single rounds differ by half). One number per run: the median
# relative to that of MXNet's defaults.
#   DMLC_LOCAL=1 (unix sockets)             1.08 0.91 0.82 1.13 0.85    kept unless TCP is requested
#   MXNET_CPU_WORKER_NTHREADS=2             0.93 0.93                   with the next one 0.96: kept for TCP;
#   OMP_WAIT_POLICY=passive                 0.83 0.93                   in addition to unix sockets 1.03 1.01: left out
#   OMP_NUM_THREADS=1                       1.03 0.97                   left out
#   MXNET_KVSTORE_REDUCTION_NTHREADS=1      0.80 0.99                   left out
#   MXNET_KVSTORE_BIGARRAY_BOUND=100000     0.83 0.96                   left out
#   kv.pushpull instead of push and pull    0.75 to 0.95 (sync), 1.05 (async)
MXNET_OVER_TCP = {"MXNET_CPU_WORKER_NTHREADS": "2", "OMP_WAIT_POLICY": "passive"}
MXNET_OVER_UNIX_SOCKETS = {"DMLC_LOCAL": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPullPlan(JobPlan):
    """The work that every contender of a run does."""

    model: str

    @property
    def flags(self) -> list[str]:
        """The flags that every worker program takes."""
        return ["--model", self.model]

    @property
    def bytes_between_hosts(self) -> int:
        """How many bytes of gradients and weights go from one host to another in a step, in both directions."""
        assert self.hosts is not None
        at = [self.hosts.at(index) for index in range(self.num_servers + self.num_workers)]
        servers, workers = at[: self.num_servers], at[self.num_servers :]
        remote = sum(server != worker for server in servers for worker in workers)
        return 2 * 4 * num_elements(shapes(self.model)) * remote // self.num_servers


def echelon(plan: PushPullPlan) -> Contender:
    """Return Echelon as its Trainer uses it: gradients and weights are in the store's memory."""
    specs = echelon_specs(plan, "echelon.bench.pushpull.worker_echelon", plan.flags)
    return ProcessContender("echelon", specs, plan.work_dir, address=plan.address)


def echelon_copy(plan: PushPullPlan) -> Contender:
    """Return Echelon through its plain API: each step copies the caller's tensors in and out."""
    specs = echelon_specs(plan, "echelon.bench.pushpull.worker_echelon", [*plan.flags, "--copy"])
    return ProcessContender("echelon_copy", specs, plan.work_dir, address=plan.address)


def encrypted(plan: PushPullPlan) -> Contender:
    """Return Echelon as it is by default: TLS between hosts. `--security` chooses that of the first contender."""
    specs = echelon_specs(replace(plan, security="auto"), "echelon.bench.pushpull.worker_echelon", plan.flags)
    return ProcessContender("encrypted", specs, plan.work_dir, address=plan.address)


def replicated(plan: PushPullPlan) -> Contender:
    """Return Echelon with a backup of every slice."""
    specs = echelon_specs(replace(plan, replicas=1), "echelon.bench.pushpull.worker_echelon", plan.flags)
    return ProcessContender("replicated", specs, plan.work_dir, address=plan.address)


def iperf3(plan: PushPullPlan) -> Contender:
    """Return iperf3, which moves the bytes of a step between the hosts, in both directions at once."""
    if plan.hosts is None:
        raise UsageError("--peer iperf3 measures the network between hosts: name two with --hosts")
    return Iperf3(plan.hosts, plan.bytes_between_hosts)


def gloo(plan: PushPullPlan) -> Contender:
    """Return a Gloo all-reduce with a local SGD on each rank."""
    specs = gloo_specs(plan, "gloo", "echelon.bench.pushpull.worker_gloo", plan.flags, {"OMP_NUM_THREADS": "1"})
    return ProcessContender("gloo", specs, plan.work_dir)


def mxnet(plan: PushPullPlan) -> Contender:
    """Return MXNet as its launcher and its examples use it: push every key, then pull every key."""
    return _mxnet("mxnet", plan, {})


def mxnet_tuned(plan: PushPullPlan) -> Contender:
    """Return MXNet with the settings above and, under dist_sync, one `pushpull` call per key."""
    env = MXNET_OVER_TCP if plan.transport == "tcp" else MXNET_OVER_UNIX_SOCKETS
    return _mxnet("mxnet_tuned", plan, env, *(["--one-call"] if plan.kv_store == "dist_sync" else []))


def _mxnet(name: str, plan: PushPullPlan, env: Mapping[str, str], *flags: str) -> Contender:
    script = Path(__file__).with_name("worker_mxnet.py")
    return ProcessContender(name, mxnet_specs(plan, script, [*plan.flags, *flags], env), plan.work_dir)


PEERS: dict[str, Callable[[PushPullPlan], Contender]] = {
    "gloo": gloo,
    "mxnet": mxnet,
    "mxnet_tuned": mxnet_tuned,
    "echelon_copy": echelon_copy,
    "encrypted": encrypted,
    "replicated": replicated,
    "iperf3": iperf3,
}
