"""Launchers: they start the processes of a job and supervise them until all have ended.

A launcher (`interface`) makes a `plan`, which says which process runs where. `run` and `supervision` watch the
processes of a job, wherever they run. On this machine they are children (`local`); on other machines an agent
starts each of them (`agents`); `ssh`, `mpi`, `slurm`, `sge` and `yarn` start the agents. `ray` has actors, `kubernetes`
has pods, and `threads` runs a job as threads of one process. `node` starts one machine's part of a job, and `devices`
one process per device of a worker.

To add a launcher, write a class like `LocalLauncher`, let it pass `echelon.testing.check_launcher`, and add it to
`LAUNCHERS`: `--launcher` accepts every name of that table, and `package.module:NAME` for a launcher of your own.
"""

from echelon.launch.interface import Launcher
from echelon.launch.kubernetes.launcher import KubernetesLauncher
from echelon.launch.local.launcher import LocalLauncher
from echelon.launch.mpi import MpiLauncher
from echelon.launch.ray.launcher import RayLauncher
from echelon.launch.sge import SgeLauncher
from echelon.launch.slurm import SlurmLauncher
from echelon.launch.ssh.launcher import SshLauncher
from echelon.launch.threads.launcher import InprocLauncher
from echelon.launch.yarn import YarnLauncher

_ALL: tuple[Launcher, ...] = (
    LocalLauncher(),
    SshLauncher(),
    MpiLauncher(),
    RayLauncher(),
    SlurmLauncher(),
    SgeLauncher(),
    YarnLauncher(),
    KubernetesLauncher(),
    InprocLauncher(),
)
LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in _ALL}

__all__ = ["LAUNCHERS", "Launcher"]
