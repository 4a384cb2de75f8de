"""Launchers: they start the processes of a job and supervise them until all have ended.

A launcher (`interface`) makes a `plan`, which says which process runs where, and runs it. `local` starts processes of
this machine, `ray` starts actors of a Ray cluster. Launchers for other machines start an `agent` there for each
process, and speak to it over a byte stream (`streams`). `remote` is such a process as the launcher sees it, and
`coordinate` starts them all when the ports are known. `run` and `supervise` watch the processes of a job, wherever they
run. `devices` runs one process per device of a worker, and `in_process` runs a job as threads, for tests.

To add a launcher, write a class like `LocalLauncher`, let it pass `echelon.testing.check_launcher`, and add it to
`LAUNCHERS`: `--launcher` accepts every name of that table, and `package.module:NAME` for a launcher of your own.
"""

from echelon.launch.inproc import InprocLauncher
from echelon.launch.interface import Launcher
from echelon.launch.kubernetes import KubernetesLauncher
from echelon.launch.local import LocalLauncher
from echelon.launch.mpi import MpiLauncher
from echelon.launch.ray.launcher import RayLauncher
from echelon.launch.sge import SgeLauncher
from echelon.launch.slurm import SlurmLauncher
from echelon.launch.ssh import SshLauncher
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
