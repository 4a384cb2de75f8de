"""`echelon bench train`: samples per second of whole training steps.

Read `run`, then `contenders` (add a peer there), `workloads` and `networks` (what is trained) and the `worker_*`
programs.
"""
