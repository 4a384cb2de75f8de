"""`echelon bench io`: images per second from record files to augmented batches.

Read `run`, then `contenders` (add a peer there), `worker` and the `worker_*` programs, `images` (the record file of a
run) and `device` (batches on a GPU).
"""
