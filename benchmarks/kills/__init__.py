"""What a job of MXNet, of PyTorch DDP and of Echelon does when one of its processes is killed with kill -9.

`python -m benchmarks.kills` runs one job per (system, process killed), kills the process when every worker has made
KILL_AT steps, and observes the job for `--observe-s` seconds. `cases` describes the jobs, `observe` watches one, and
`worker_mxnet.py`, `worker_ddp.py` and `worker_echelon.py` are the same training loop for each system: every worker
prints a line per step.
"""
