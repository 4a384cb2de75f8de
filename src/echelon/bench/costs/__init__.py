"""`echelon bench costs`: the fixed costs of a job. Read `run`; it starts `worker_memory`."""
