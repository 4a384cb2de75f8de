"""Processes of a job on other machines, through agents.

`agent` runs on a machine and starts one process; `messages` is what it and the launcher say to each other, over a byte
stream (`streams`, `channel_stream`). `remote` is such a process as the launcher sees it, and `coordinate` starts all of
them when the ports are known. Where another system starts the agents (mpirun, srun, qsub, YARN), they connect to the
launcher's `hub`: `task` is their side of it, and `tasks` runs the program that starts them.
"""
