"""Launchers: they start the processes of a job and supervise them until all have ended.

`local` runs a job as processes of this machine, `devices` runs one process per device of a worker, and `in_process`
runs a job as threads, for tests and debuggers. Below them, `supervise` watches the processes of a job and forwards
signals, and `processes` starts, kills and reaps one child process.

To add a launcher, write a module with the functions `run`, `check` and `hosts_of`, as `local` has them, and add it to
`LAUNCHERS`: `--launcher` accepts every name of that table.
"""

from echelon.launch import local

LAUNCHERS = {"local": local}

__all__ = ["LAUNCHERS"]
