"""A Slurm cluster for system tests: munged and slurmctld on `login`, one slurmd on each host of a test network.

    with make_hosts(tmp_path, 2, sshd=False) as network, start_slurm(network, tmp_path / "slurm") as slurm:
        slurm.run(["srun", "-N2", "hostname"])

All files are in one folder, and the daemons end with the context. Intervals are as short as Slurm allows. The cluster
needs no control groups and no accounting. The partition `low` is preempted by the partition `high`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, Network

from echelon.launch.supervision.processes import ChildProcess
from jobs import until

CPUS = 8  # of each host, whatever this machine has
KILL_WAIT_S = 20  # between SIGTERM and SIGKILL: the time that Slurm gives a cancelled job to save
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: a requeued job waits for this time, which is two minutes by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait={kill_wait_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs={cpus} RealMemory=1000
PartitionName=main Nodes=ALL Default=YES PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster. Commands run on `login`, with `variables`."""

    login: Host
    variables: Mapping[str, str]

    def run(self, arguments: Sequence[str], **more: bool | float) -> subprocess.CompletedProcess[str]:
        """Run a program on `login`."""
        return self.login.run(arguments, environment=self.variables, **more)  # type: ignore[arg-type]

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that have not ended."""
        return self.run(["squeue", "--noheader", "--format=%i"]).stdout.split()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        return self.run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]).stdout.strip()

    def cancel_all(self) -> None:
        """Kill all jobs, and wait until the hosts are free."""
        for job in self.jobs():
            self.run(["scancel", "--full", "--signal=KILL", job], check=False)
            self.run(["scancel", job], check=False)
        until(lambda: not self.jobs(), "no job is left")


@contextmanager
def start_slurm(network: Network, folder: Path) -> Iterator[Slurm]:
    """Run a cluster on the hosts of a network."""
    for name in ("state", *(f"spool-{host.name}" for host in network.hosts)):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    nodes = ",".join(host.name for host in network.hosts)
    configuration.write_text(
        _CONFIGURATION.format(folder=folder, nodes=nodes, cpus=CPUS, kill_wait_s=KILL_WAIT_S).lstrip()
    )
    slurm = Slurm(network.login, {"SLURM_CONF": str(configuration)})
    with ExitStack() as stack:
        _start(stack, network.login, _munged(folder), folder, slurm.variables)
        until((folder / "munge.socket").exists, f"munged runs; see {folder}/munged.out")
        _start(stack, network.login, ["slurmctld", "-D", "-c"], folder, slurm.variables)
        for host in network.hosts:
            _start(stack, host, ["slurmd", "-D"], folder, slurm.variables)
        until(lambda: _idle_nodes(slurm) == len(network.hosts), f"all nodes are idle; see {folder}/*.log")
        stack.callback(slurm.cancel_all)
        yield slurm


def _munged(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    return ["munged", "--foreground", "--force", *options]  # --force: the folder may belong to another user than root


def _start(stack: ExitStack, host: Host, command: list[str], folder: Path, variables: Mapping[str, str]) -> None:
    """Start a daemon, which is killed at the end."""
    with (folder / f"{command[0]}-{host.name}.out").open("wb") as out:
        daemon = ChildProcess(command[0], [*host.prefix(), *command], {**host.variables, **variables}, stdout=out)
    stack.callback(daemon.close)


def _idle_nodes(slurm: Slurm) -> int:
    found = slurm.run(["sinfo", "--noheader", "--Node", "--partition=main", "--states=idle"], check=False)
    return len(found.stdout.splitlines())
