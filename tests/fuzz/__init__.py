"""Fuzzers: random messages, well-formed and damaged, for servers and the scheduler.

`messages` makes them from a seed. `fuzzing_worker` sends them over sockets, as a process of a job whose other workers
train (`test_sockets`).
"""
