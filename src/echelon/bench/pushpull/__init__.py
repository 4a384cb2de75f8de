"""`echelon bench pushpull`: the time of one push, sum, update and pull of a model's tensors.

Read `run`, then `contenders` (add a peer there), `shapes` (the tensors) and the `worker_*` programs.
"""
