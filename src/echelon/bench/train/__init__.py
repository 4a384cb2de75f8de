"""`echelon bench train`. Read `command`, then `contenders` (add a peer there) and the `worker_*` programs."""
