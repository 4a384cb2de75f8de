"""Slurm: a job as one step of an allocation.

`allocation` describes the allocation that this process runs in, and the `srun` command that starts the agents there.
`script` writes the request for a batch job, and `batch` submits it and follows it to its end. `launcher` is what
`--launcher slurm` selects, and `__main__` runs it in a batch job.
"""

from echelon.launch.slurm.launcher import SlurmLauncher

__all__ = ["SlurmLauncher"]
